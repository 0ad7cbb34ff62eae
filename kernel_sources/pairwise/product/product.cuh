// out[l,m,c] = sum_n K[l,m,n] v[l,n,c] for many columns, with K = Epilogue(Outer(Sum)) of a pair: a
// matrix that is never stored. Values of a tile of K stay in the registers where they were computed
// and become words there, which tensor cores multiply by those of v (product/pack.cuh).
//
// Floors on an H200 for a pair: 6 operations a column, and 6 a feature where sums are products,
// over 770 TFLOP/s; of a folded Gaussian 6 issue slots (2^x, words), 3.345e13 a second, of others
// 12. 100000 x 100000, K = 3, C = 64: 5.2 and 1.8 ms; measured on an H100 6.9, as products with a
// left operand in registers hardly run beside other code: times add up (9.6 of sums on lanes, where
// the floors are 5.0 and 3.6).
//
// A row's values are scaled by a power of two, lowered when one of them would outgrow its words:
// relative to the largest one of the row and its block's n, words are exact to 2^-36. A value that
// is not finite closes the gate: kernels launched behind it do the whole call.
//
// One producer thread, WARPGROUPS warpgroups of 64 rows each; a stage has TILE_N n.
//
// The main loop of all three: Sums is OnLanes of product/sums_on_lanes.cuh, Folded of
// product/sums_folded.cuh or OfWords of product/sums_of_words.cuh.
#pragma once

#include "pairwise/product/launch.cuh"
#include "pairwise/product/values.cuh"
#include "pairwise/reduce/math.cuh"
#include "pairwise/split/ring.cuh"

// Whether this kernel does the work. Of folded exponents unless a point is too far; behind those of
// what is left, where not too many pairs are doubtful.
template <class Sums>
__device__ __forceinline__ bool is_needed(Gate& gate) {
    if (gate.closed) return false;
    if (Sums::IS_FOLDED) return !gate.far;
    if (Config::BEHIND_FOLDED && !gate.far) return false;
    if (gate.doubtful <= Config::DOUBTFUL) return true;
    gate.closed = CLOSED;
    return false;
}

template <class Sums>
__device__ __forceinline__ void produce(const ProductLaunch& p, const Shared& s, const Part& part,
                                        i64 l) {
    constexpr int A_BYTES = Sums::A_BYTES, WORD_BYTES = Sums::WORD_BYTES;
    constexpr int POINT_BYTES = Sums::POINT_BYTES, STAGE_BYTES = POINT_BYTES + V_BYTES;
    Ring<STAGES> stage(1);
    i64 tile = part.first / TILE_N;
    const unsigned char* b = p.packed_b + l * p.b_packed_stride + tile * WORD_BYTES;
    const PointInfo* points = p.b_info + l * p.b_info_stride + part.first;
    if (A_BYTES > 0) {
        barrier_expect(s.resident_full, A_BYTES);
        load_bytes(s.resident, p.packed_a + l * p.a_packed_stride + part.m0 / TILE_M * A_BYTES,
                   s.resident_full, A_BYTES);
    }
    const unsigned char* v = p.packed_v + l * p.v_packed_stride + tile * V_BYTES;
#pragma unroll 1
    for (i64 n0 = part.first; n0 < part.last; n0 += TILE_N, v += V_BYTES) {
        unsigned char* to = s.stages + stage.place * STAGE_BYTES;
        u64* barrier = &s.full[stage.place];
        barrier_wait(&s.empty[stage.place], stage.parity);
        barrier_expect(barrier, STAGE_BYTES);
        load_bytes(to, b, barrier, WORD_BYTES);
        if (Sums::INFO_BYTES > 0) load_bytes(to + WORD_BYTES, points, barrier, Sums::INFO_BYTES);
        b += WORD_BYTES;
        points += TILE_N;
        load_bytes(to + POINT_BYTES, v, barrier, V_BYTES);
        stage.advance();
    }
}

// Adds the products of a tile's words and those of v at `address`; from zero unless `accumulate`.
__device__ __forceinline__ void multiply_words(float (&run)[SUMS], const Words& words, u32 address,
                                               int accumulate) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u64 high = core_matrices_descriptor(address + step * V_STEP, WIDTH * 16, 128);
        if (COPIES == 2) {
            multiply(run, words.low[step], high, accumulate);
            accumulate = 1;
        }
        if (V_COPIES == 2) {
            multiply(run, words.high[step], high + V_WORDS / 16, accumulate);
            accumulate = 1;
        }
        multiply(run, words.high[step], high, accumulate);
        accumulate = 1;
    }
    wgmma_commit();
    wgmma_wait<0>();
}

// What a consumer's functions share.
template <class Rows>
struct Consumer {
    const Rows& rows;
    const Finish& finish;
    i64 m;
    u32* closed;
};

// Takes a tile of sums, whose v lies at `address`. With CAREFUL values are zeros where there is no
// such pair, for a sum of anything else would spoil them.
template <class Sums, bool CAREFUL>
__device__ __forceinline__ void take_tile(Totals& totals, Scales& scales, float (&values)[VALUES],
                                          const Consumer<typename Sums::Rows>& c, const Tile& tile,
                                          u32 address, int accumulate) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        float value = Sums::IS_FOLDED ? exp2_approximate(values[i]) : c.finish(values[i]);
        bool exists = !CAREFUL || (column_of(i) < tile.columns && c.rows.m[row_of(i)] < c.m);
        values[i] = exists ? value : 0.0f;
    }
    Words words;
    bool exceeds = split_values(words, values, scales);
    while (__any_sync(~0u, exceeds)) {
        if (!lower_scales(scales, values, totals)) {
            *c.closed = CLOSED;
            break;
        }
        exceeds = split_values(words, values, scales);
    }
    multiply_words(totals.run, words, address, accumulate);
}

// A scaled sum that is out of float's range closes the gate: the sum itself may well be in it.
template <class Rows>
__device__ __forceinline__ void store(const Totals& totals, const Scales& scales, const Rows& rows,
                                      const ProductLaunch& p, const Part& part, i64 l) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        i64 m = rows.m[row], n = m + p.diagonal;
        if (m >= p.m) continue;
        float back = 1.0f / scales.factor[row];
        float diagonal = 0.0f;
        const InputT* v = p.v + l * p.v_view.batch_stride + n * p.v_view.row_stride;
        bool crosses = Config::REGULARIZED && n >= part.first && n < part.last;
        if (crosses) diagonal = ReadScalar{p, l}(REGULARIZATION);
        float* out = p.out + ((part.split * p.batch + l) * p.m + m) * p.out_columns;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            int column = column_of(i);
            if (row_of(i) != row || column >= p.columns) continue;
            float total = totals.total[i], value = total * back;
            if (!(fabsf(total) < infinity(total))) p.gate->closed = CLOSED;
            if (crosses)
                value = fmaf(diagonal, convert<float>(v[column * p.v_view.column_stride]), value);
            out[column] = value;
        }
    }
}

template <class Sums>
__device__ __forceinline__ void consume(const ProductLaunch& p, const Shared& s, const Part& part,
                                        i64 l) {
    constexpr int POINT_BYTES = Sums::POINT_BYTES, STAGE_BYTES = POINT_BYTES + V_BYTES;
    Ring<STAGES> stage(0);
    typename Sums::Rows rows(p, l, part.m0 + (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4);
    Scales scales;
    Totals totals;
    ReadScalar read{p, l};
    Finish finish(read);
    bool rows_end = part.m0 + TILE_M > p.m;
    if (Sums::A_BYTES > 0) barrier_wait(s.resident_full, 0);
    Consumer<typename Sums::Rows> consumer = {rows, finish, p.m, &p.gate->closed};
    int group = 0;
#pragma unroll 1
    for (i64 n0 = part.first; n0 < part.last; n0 += TILE_N) {
        const unsigned char* from = s.stages + stage.place * STAGE_BYTES;
        Tile tile = {n0, int(min(part.last - n0, i64(TILE_N)))};
        barrier_wait(&s.full[stage.place], stage.parity);
        float values[VALUES];
        Sums::sum_tile(values, rows, s.resident, from, p, tile);
        u32 v = shared_address(from + POINT_BYTES);
        if (rows_end || tile.columns < TILE_N) {
            take_tile<Sums, true>(totals, scales, values, consumer, tile, v, group > 0);
        } else {
            take_tile<Sums, false>(totals, scales, values, consumer, tile, v, group > 0);
        }
        if (++group == GROUP_TILES || n0 + TILE_N >= part.last) {
            auto at = from + POINT_BYTES + STEPS * V_STEP;
            totals.settle(reinterpret_cast<const float*>(at));
            group = 0;
        }
        barrier_arrive_by_warp(&s.empty[stage.place]);
        stage.advance();
    }
    store(totals, scales, rows, p, part, l);
}

template <class Sums>
__device__ __forceinline__ void multiply_values(const ProductLaunch& launch) {
    constexpr int STAGE_BYTES = Sums::POINT_BYTES + V_BYTES;
    static_assert(Config::DYNAMIC_BYTES == Sums::A_BYTES + STAGES * STAGE_BYTES,
                  "as the host counts it");
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 barriers[BARRIERS];
    __shared__ bool closed;              // another block may close the gate at any moment
    Shared s = {dynamic, dynamic + Sums::A_BYTES, barriers, barriers + STAGES,
                barriers + 2 * STAGES};
    if (threadIdx.x == 0) {
        closed = !is_needed<Sums>(*launch.gate);
        begin_barriers(s);
    }
    __syncthreads();
    if (closed) return;
    u32 rows = launch.row_blocks, inside = blockIdx.x % (rows * launch.splits);
    i64 l = blockIdx.x / (rows * launch.splits);
    Part part(launch, i64(inside % rows) * TILE_M, int(inside / rows));
    if (threadIdx.x < 128) {
        release_registers<OF_PRODUCERS>();
        if (threadIdx.x == 0) produce<Sums>(launch, s, part, l);
    } else {
        take_registers<OF_CONSUMERS>();
        consume<Sums>(launch, s, part, l);
    }
}
