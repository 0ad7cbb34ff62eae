// out[l,m,n] (+)= Epilogue(Outer(sum_k Inner(Op(a[l,m,k], b[l,n,k])))), one CTA a tile of out.
//
// Facts, struct Fixed and struct Categories: class Direct of
// kernlib/families/pairwise/kernels/direct.py. Finish is Outer and Epilogue of one sum; its
// constructor reads hyperparameters.
#pragma once

#include "pairwise/direct/categories.cuh"
#include "pairwise/gate.cuh"
#include "pairwise/mend.cuh"
#include "pairwise/scalars.cuh"
#include "pairwise/tile.cuh"

using OutputT = Config::OutputT;               // storage of out
constexpr bool SYMMETRIC = Config::SYMMETRIC;  // b is a: only tiles on and above the diagonal are
                                               // computed
constexpr int RASTER_ROWS = 16;  // tile rows walked together, so that both operands stay in L2

struct Operands {
    const InputT* a;
    const InputT* b;
    OutputT* out;
};

struct Parameters : Operands, ScalarValues<Config::SCALARS>, Fixed {};

// What a kernel is launched with: behind a gate CTAs walk over the tiles.
struct Launch : BehindGate<Config::GATED>, TablePointers<CATEGORIES>, Parameters, Categories {};

using ReadScalar = ScalarReader<Parameters>;

// Outer, epilogue and regularization over the thread's own sums, in place.
__device__ __forceinline__ void finish(AccT* total, const Parameters& parameters, const Finish& f,
                                       const Place& place, const Points& a, const Points& b,
                                       const Numbers& numbers, i64 m0, i64 n0, i64 l) {
    Rescale rescale(numbers);
    if constexpr (CATEGORIES == 0) {
        auto own = [place](int index) { return place.sums(index / CHUNKS, index % CHUNKS); };
        mend_tile<PER_SIDE * CHUNKS, CHUNK>(total, LINE, own, a, b, numbers.p);
    }
    AccT regularization = ReadScalar{parameters, l}(REGULARIZATION);
    // n - m - diagonal of the tile's first entry, far outside the tile cut to an int's range.
    i64 offset = max(min(n0 - m0 - parameters.diagonal, i64(TILE)), i64(-2 * TILE));
#pragma unroll 1
    for (int index = 0; index < PER_SIDE * CHUNKS; ++index) {
        int i = index / CHUNKS, c = index % CHUNKS;
        int place_in_sums = place.sums(i, c);
        auto value = load_vector<AccT, CHUNK>(total + place_in_sums);
        int row = place_in_sums / LINE, column = place_in_sums % LINE;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            AccT result = value.element[e];
            // Categories add to sums that have left their unit.
            if constexpr (CATEGORIES > 0) result = f(result);
            else result = f(rescale(result), rescale.unit);
            if (column + e - row + int(offset) == 0) result += regularization;
            value.element[e] = result;
        }
        store_vector(total + place_in_sums, value);
    }
}

// Rows of the finished tile to out in aligned vectors, neighbouring threads side by side.
__device__ __forceinline__ void store_vectors(const AccT* total, OutputT* out, i64 row_stride,
                                              int rows, bool accumulate) {
    constexpr int ACROSS = TILE / CHUNK, STEP = THREADS / ACROSS;
    int column = threadIdx.x % ACROSS * CHUNK, row = threadIdx.x / ACROSS;
    const AccT* from = total + row * LINE + column;
    OutputT* to = out + row * row_stride + column;
#pragma unroll 2
    for (; row < rows; row += STEP, from += STEP * LINE, to += STEP * row_stride) {
        auto value = load_vector<AccT, CHUNK>(from);
        Vector<OutputT, CHUNK> old = {}, result;
        if (accumulate) old = load_vector<OutputT, CHUNK>(to);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            AccT x = value.element[e];
            if (accumulate) x += convert<AccT>(old.element[e]);
            result.element[e] = convert<OutputT>(x);
        }
        store_vector(to, result);
    }
}

// The finished tile, or its transpose, to out element by element. `along` elements of a line lie
// side by side in out, as far as it lets them; a line of the tile is LINE or, transposed, 1 apart.
__device__ __forceinline__ void store_elements(const AccT* total, int element_step, int line_step,
                                               OutputT* out, i64 element_stride, i64 line_stride,
                                               int along, int lines, bool accumulate) {
    int element = threadIdx.x % TILE;
    if (element >= along) return;
#pragma unroll 1
    for (int line = threadIdx.x / TILE; line < lines; line += THREADS / TILE) {
        OutputT* to = out + line * line_stride + element * element_stride;
        AccT value = total[line * line_step + element * element_step];
        if (accumulate) value += convert<AccT>(*to);
        *to = convert<OutputT>(value);
    }
}

__device__ __forceinline__ Points points_of(const InputT* data, const View& view, i64 l, i64 first,
                                            i64 count, int k) {
    return {data + l * view.batch_stride + first * view.row_stride, view.row_stride,
            view.column_stride, int(min(count - first, i64(TILE))), k};
}

// Tile index to tile row and column: columns are walked in groups of RASTER_ROWS rows.
__device__ __forceinline__ void place_tile(const Parameters& parameters, u32 index, int& tile_m,
                                           int& tile_n) {
    u32 per_group = min(parameters.tiles_m, RASTER_ROWS) * parameters.tiles_n;
    u32 first = index / per_group * RASTER_ROWS, inside = index % per_group;
    u32 rows = min(parameters.tiles_m - first, u32(RASTER_ROWS));
    tile_m = first + inside % rows;
    tile_n = inside / rows;
}

__device__ __forceinline__ void compute_tile(const Launch& launch, AccT* stages, u32 index) {
    const Parameters& parameters = launch;
    AccT* total = LONG_K ? stages + 2 * STAGE : stages;
    int tile_m, tile_n;
    place_tile(parameters, index, tile_m, tile_n);
    if (SYMMETRIC && tile_n < tile_m) return;
    i64 m0 = i64(tile_m) * TILE, n0 = i64(tile_n) * TILE;
    int rows = int(min(parameters.m - m0, i64(TILE)));
    int columns = int(min(parameters.n - n0, i64(TILE)));
    const View& view = parameters.out_view;
    Place place;

#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        auto a = points_of(parameters.a, parameters.a_view, l, m0, parameters.m, parameters.k);
        auto b = points_of(parameters.b, parameters.b_view, l, n0, parameters.n, parameters.k);
        ReadScalar read{parameters, l};
        Numbers numbers = {read(INNER_P), read(INNER_SCALE)};
        sum_tile(total, stages, a, b, place, numbers);
        if constexpr (CATEGORIES > 0) {
            if (SCALED) leave_unit(total, place, a, b, numbers);
            add_categories(total, LONG_K ? stages : total + TILE * LINE,
                           static_cast<const TablePointers<CATEGORIES>&>(launch),
                           static_cast<const Categories&>(launch), place, m0, n0, rows, columns,
                           l);
        }
        finish(total, parameters, Finish(ReadScalar{parameters, l}), place, a, b, numbers, m0, n0,
               l);
        __syncthreads();
        OutputT* out = parameters.out + l * view.batch_stride;
        OutputT* tile = out + m0 * view.row_stride + n0 * view.column_stride;
        if (parameters.out_vectors && columns == TILE) {
            store_vectors(total, tile, view.row_stride, rows, parameters.accumulate);
        } else {
            store_elements(total, 1, LINE, tile, view.column_stride, view.row_stride, columns, rows,
                           parameters.accumulate);
        }
        if (SYMMETRIC && tile_n != tile_m) {
            // Below the diagonal: the tile's rows become out's columns.
            store_elements(total, LINE, 1, out + n0 * view.row_stride + m0 * view.column_stride,
                           view.column_stride, view.row_stride, rows, columns,
                           parameters.accumulate);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_direct(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) unsigned char shared[];
    if (!launch.is_needed()) return;
    AccT* memory = reinterpret_cast<AccT*>(shared);
    if constexpr (Config::GATED == 0) {
        compute_tile(launch, memory, blockIdx.x);
    } else {
        u32 tiles = u32(launch.tiles_m) * launch.tiles_n;
#pragma unroll 1
        for (u32 index = blockIdx.x; index < tiles; index += gridDim.x)
            compute_tile(launch, memory, index);
    }
}
