// One run of factors in half precision: modes of a tile, and its results to device memory.
//
// The generated source defines, beside what modes/run.cuh asks for:
//   HalfT, SCALED                half_t or bfloat16_t, and what scale.cuh says
//   TILES                        2 where a mode writes its results to a tile of their own, else 1
// and, of each run, OUT_FEATURES and OUTPUTS of a column and of a tile.
#pragma once

constexpr int THREADS = WARPS * 32;
using TileT = HalfT;

#include "kronecker_product/halves/multiply.cuh"
#include "kronecker_product/halves/scale.cuh"
#include "kronecker_product/modes/load.cuh"
#include "kronecker_product/modes/summands.cuh"

// The matrix of a mode, transposed: the product of its factors' entries, zeros below it.
template <class M>
__device__ __forceinline__ void stage_matrix(HalfT* matrix, const Parameters& p, i64 batch) {
#pragma unroll 1
    for (int index = threadIdx.x; index < M::MATRIX; index += THREADS) {
        int row = index % M::P, column = index / M::P;
        float value = entry_of<M>(p, batch, row, column);
        matrix[place(index)] = convert<HalfT>(value);
    }
}

// What a sum is multiplied by before it is rounded, by the column of the tile where SHIFTED.
template <class R, class M>
struct Scaling {
    static constexpr bool ENDS = M::LAST && R::ENDS;
    static constexpr bool BEGINS = M::NUMBER == 0;  // what another run hands on is shifted before
    static constexpr bool SHIFTED = SCALED && (ENDS || BEGINS);
    const Scales& scales;
    float own;

    __device__ __forceinline__ explicit Scaling(const Scales& all) : scales(all), own(1) {
        if (SCALED)
            own = ENDS ? all.restored[R::INDEX] : __uint_as_float(all.norms[M::NUMBER]);
    }
    __device__ __forceinline__ float of(int column) const {
        if (!SHIFTED) return own;
        u32 power = scales.columns[column];
        return own * (ENDS ? inverse(power) : __uint_as_float(power));
    }
};

// The output feature that a slice's own features are behind, once a slice as it takes a division;
// below 0 where there is nothing to finish.
template <class R, class M>
__device__ __forceinline__ i64 first_feature(const RunFixed& run, const Tile& at,
                                             const Slice<R, M>& slice) {
    if (!EPILOGUE || !R::ENDS || !M::LAST || slice.column >= at.columns) return -1;
    return at.outer * run.feature_outer + at.inner * run.feature_inner +
           (at.column + slice.column) / run.feature_divisor * run.feature_column;
}

template <class R, class M, int COUNT>
__device__ __forceinline__ float finished(const RunFixed& run, const Finish& finish,
                                          const Slice<R, M>& slice, i64 first, int q,
                                          const Given<COUNT>& given, float value) {
    if constexpr (EPILOGUE && R::ENDS && M::LAST) {
        if (first >= 0)
            return given.finished(finish, value, first + slice.feature(q) * run.feature_own);
    }
    return value;
}

// Two neighbouring columns' results of a slice, or two neighbouring slices' of a column.
template <class M>
__device__ __forceinline__ void put_pair(HalfT* tile, u32 packed, int lane, int first, int own,
                                         int q) {
    int row = lane / 4, pair = lane % 4 * 2, to;
    if (M::ACROSS) {
        to = place_of<M, M::Q>(first, own, pair, q * M::R, row * M::R);
    } else {
        packed = transpose_matrix(packed);
        if (!M::LINEAR && (first + own) * 8 + row >= M::SLICES) return;
        to = place_of<M, M::Q>(first, own, row, q, pair);
    }
    *reinterpret_cast<u32*>(tile + to) = packed;
}

template <class R, class M>
__device__ __forceinline__ void put_back(HalfT* tile, const Sums<M>& sums,
                                         const Scaling<R, M>& scaling, const Parameters& p,
                                         const Tile& at, const Finish& finish, int lane,
                                         int first_column, int first) {
    int row = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < M::OWN_SLICES; ++j) {
        int begin = (first + j) * 8;
        if (!M::LINEAR && begin >= M::SLICES) continue;
        Slice<R, M> slices[2] = {Slice<R, M>(begin + pair), Slice<R, M>(begin + pair + 1)};
        // All of a tile are read before one of its results is written to device memory.
        constexpr int COUNT = R::ENDS && M::LAST ? SUMMANDS : 0;
        int q0 = first_column * 16 + row;
        const Beside<COUNT> beside[2] = {
            Beside<COUNT>(p, finish, at, slices[0], q0, slices[0].column < at.columns),
            Beside<COUNT>(p, finish, at, slices[1], q0, slices[1].column < at.columns)};
        float scale[2];
        i64 feature[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            scale[k] = scaling.of(min(slices[k].column, R::COLUMNS - 1));
            feature[k] = first_feature(p.runs[R::INDEX], at, slices[k]);
        }
#pragma unroll
        for (int i = 0; i < M::OWN_COLUMNS; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int q = (first_column + i) * 16 + half * 8;
                if (q >= M::Q) continue;
                float value[2];
                Given<COUNT> given[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) given[k].read(beside[k], i * 16 + half * 8, true);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    value[k] = sums.value[i][j][2 * half + k];
                    if (SCALED) value[k] *= scale[k];
                    value[k] = finished(p.runs[R::INDEX], finish, slices[k], feature[k], q + row,
                                        given[k], value[k]);
                }
                put_pair<M>(tile, pack<HalfT>(value[0], value[1]), lane, first, j, q);
            }
        }
    }
}

template <class R, class M>
__device__ __forceinline__ void apply(const HalfT* from, HalfT* to, const HalfT* matrices,
                                      const Scales& scales, const Parameters& p, const Tile& at,
                                      const Finish& finish) {
    u32 tile = static_cast<u32>(__cvta_generic_to_shared(from));
    u32 matrix = static_cast<u32>(__cvta_generic_to_shared(matrices + M::AT));
    int lane = threadIdx.x % 32;
    // Else the addresses of all modes would be computed before the first tile, and spill.
    asm volatile("" : "+r"(lane));
    Kept<M> kept(matrix, lane);
    Scaling<R, M> scaling(scales);
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < M::UNITS; unit += WARPS) {
        int column = unit % M::GROUPS * M::OWN_COLUMNS, slice = unit / M::GROUPS * M::OWN_SLICES;
        Sums<M> sums = {};
        multiply<M>(sums, tile, matrix, kept, lane, column, slice);
        if (M::IN_PLACE) __syncwarp();
        put_back<R, M>(to, sums, scaling, p, at, finish, lane, column, slice);
    }
    __syncthreads();
}

// The modes of a run, first to last.
template <class... M>
struct List {
    template <class R>
    __device__ __forceinline__ static void stage(HalfT* matrices, Scales& scales,
                                                 const Parameters& p, i64 batch) {
        if (SCALED && threadIdx.x == 0) ((scales.norms[M::NUMBER] = 0), ...);
        (stage_matrix<M>(matrices + M::AT, p, batch), ...);
        if (!SCALED) return;
        __syncthreads();
        (find_norm<M>(scales, matrices + M::AT), ...);
        __syncthreads();
        // The last of all modes restores what the others did.
        constexpr int NUMBERS[] = {M::NUMBER...}, COUNT = sizeof...(M);
        if (threadIdx.x == 0)
            find_powers(scales, R::INDEX, NUMBERS[0], NUMBERS[0] + COUNT - R::ENDS);
    }
    // Which of the tiles holds the results.
    template <class R>
    __device__ __forceinline__ static HalfT* apply_all(HalfT* tile, HalfT* other,
                                                       const HalfT* matrices, const Scales& scales,
                                                       const Parameters& p, const Tile& at,
                                                       const Finish& finish) {
        ((apply<R, M>(tile, M::IN_PLACE ? tile : other, matrices, scales, p, at, finish),
          M::IN_PLACE ? void() : swap(tile, other)), ...);
        return tile;
    }
    __device__ __forceinline__ static void swap(HalfT*& one, HalfT*& other) {
        HalfT* kept = one;
        one = other;
        other = kept;
    }
};

// Results to device memory, along the tile's last dimension.
template <class R>
__device__ __forceinline__ void store_tile(const HalfT* tile, const RunFixed& run, void* target,
                                           const Tile& at) {
    HalfT* out = static_cast<HalfT*>(target) + at.out;
    constexpr int LAST = R::COLUMNS_LAST ? R::COLUMNS : R::OUT_FEATURES;
    constexpr int WIDTH = LAST % CHUNK == 0 ? CHUNK : 1;
#pragma unroll 4
    for (int index = threadIdx.x * WIDTH; index < R::OUTPUTS; index += THREADS * WIDTH) {
        int column = R::COLUMNS_LAST ? index % R::COLUMNS : index / R::OUT_FEATURES;
        int feature = R::COLUMNS_LAST ? index / R::COLUMNS : index % R::OUT_FEATURES;
        HalfT* to = out + column * run.out.column_stride + feature * run.out.feature_stride;
        auto values = load_vector<HalfT, WIDTH>(tile + place(index));
        i64 step = R::COLUMNS_LAST ? run.out.column_stride : run.out.feature_stride;
        int exist = R::COLUMNS_LAST ? at.columns - column : column < at.columns ? WIDTH : 0;
        if (run.aligned_out && exist >= WIDTH) {
            store_vector(to, values);
        } else {
#pragma unroll
            for (int e = 0; e < WIDTH; ++e)
                if (e < exist) to[e * step] = values.element[e];
        }
    }
}

struct Memory {
    HalfT *tiles, *other, *matrices;
    Scales& scales;
};

// A tile whose columns' powers are known, to its target.
template <class R>
__device__ __forceinline__ void compute_tile(const Memory& memory, HalfT* tile, const Parameters& p,
                                             const Tile& at, const Finish& finish) {
    const RunFixed& run = p.runs[R::INDEX];
    HalfT* made = R::Modes::template apply_all<R>(tile, memory.other, memory.matrices,
                                                  memory.scales, p, at, finish);
    store_tile<R>(made, run, p.targets[R::INDEX], at);
}

// Between two barriers.
template <class R>
__device__ __forceinline__ void find_scales(const Memory& memory, const HalfT* tile) {
    find_largest<R>(memory.scales, tile);
    __syncthreads();
    find_shifts(memory.scales);
}
