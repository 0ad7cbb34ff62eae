// One run of factors in half precision, or by pairs of half-precision numbers: modes of a tile, and
// its results to device memory.
//
// A run is a struct as modes/run.cuh has it, with OUT_FEATURES and OUTPUTS of a column and of a
// tile, and GROWTH of its modes.
#pragma once

#include "kronecker_product/halves/multiply.cuh"
#include "kronecker_product/halves/scaling.cuh"
#include "kronecker_product/modes/entries.cuh"
#include "kronecker_product/modes/load.cuh"
#include "kronecker_product/modes/summands.cuh"

// The matrix of a mode, transposed: the product of its factors' entries, zeros below it. A warp
// takes 8 columns by 4 rows: whole sectors of device memory, and all banks.
template <class M>
__device__ __forceinline__ void stage_matrix(HalfT* matrix, const Parameters& p, i64 batch) {
    constexpr int AT_ONCE = M::P % 32 == 0 ? 8 : M::P / 4 % 4 == 0 ? 4 : 2;
    const int row = threadIdx.x % 4, lane_column = threadIdx.x / 4 % 8;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 8; first < M::COLUMN_TILES * 16; first += WARPS * 8) {
        const int column = first + lane_column;
        const Entries<M> entries(p, batch, row, column);
#pragma unroll 1
        for (int begin = 0; begin < M::P; begin += 4 * AT_ONCE) {
            DataT value[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                value[i] = convert<DataT>(entries.of(begin + 4 * i));
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                int to = is_power(M::P)
                             ? raw_place(column * M::P + row) ^ raw_place(begin + 4 * i)
                             : raw_place(column * M::P + row + begin + 4 * i);
                *reinterpret_cast<DataT*>(matrix + to) = value[i];
            }
        }
    }
}

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

// Two neighbouring columns' results of a slice, or two neighbouring slices' of a column; of two
// words the first, or the REST.
template <class M, int WORD = 0>
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
    *reinterpret_cast<u32*>(tile + (to ^ WORD)) = packed;
}

// Two neighbouring slices' results, which are as they go to device memory.
template <class M>
__device__ __forceinline__ void put_raw(HalfT* tile, float one, float other, int lane, int first,
                                        int own, int q) {
    int row = lane / 4, pair = lane % 4 * 2;
    if (M::ACROSS) {
        int to = place_of<M, M::Q>(first, own, 0, q * M::R, row * M::R) ^ raw_place(pair);
        store_vector(reinterpret_cast<float*>(tile + to), Vector<float, 2>{one, other});
    } else {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            if (!M::LINEAR && (first + own) * 8 + pair + next >= M::SLICES) continue;
            int to = place_of<M, M::Q>(first, own, pair + next, q, 0) ^ raw_place(row);
            *reinterpret_cast<float*>(tile + to) = next ? other : one;
        }
    }
}

template <class M>
__device__ __forceinline__ void put_numbers(HalfT* tile, float one, float other, int lane,
                                            int first, int own, int q) {
    if constexpr (WORDS == 1) {
        put_pair<M>(tile, pack<HalfT>(one, other), lane, first, own, q);
    } else if constexpr (M::LAST) {
        put_raw<M>(tile, one, other, lane, first, own, q);
    } else {
        const Pair pair(one, other);
        put_pair<M>(tile, pair.high, lane, first, own, q);
        put_pair<M, REST>(tile, pair.low, lane, first, own, q);
    }
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
        typename Scaling<R, M>::Of scale[2];
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
                    value[k] = scaling.apply(sums.value[i][j][2 * half + k], scale[k]);
                    value[k] = finished(p.runs[R::INDEX], finish, slices[k], feature[k], q + row,
                                        given[k], value[k]);
                }
                put_numbers<M>(tile, value[0], value[1], lane, first, j, q);
            }
        }
    }
}

template <class R, class M>
__device__ __forceinline__ void apply(const HalfT* from, HalfT* to, const HalfT* matrices,
                                      const Scales& scales, const Parameters& p, const Tile& at,
                                      const Finish& finish) {
    u32 tile = static_cast<u32>(__cvta_generic_to_shared(from));
    u32 matrix = static_cast<u32>(__cvta_generic_to_shared(matrices + M::AT * WORDS));
    const int lane = own_thread() % 32;
    Kept<M> kept(matrix, lane);
    Scaling<R, M> scaling(scales);
    auto results = [&](int unit) {
        int column = unit % M::GROUPS * M::OWN_COLUMNS, slice = unit / M::GROUPS * M::OWN_SLICES;
        u32 own_matrix = matrix;
        asm volatile("" : "+r"(own_matrix));  // as own_thread(): addresses of fragments would spill
        Sums<M> sums = {};
        multiply<M>(sums, tile, own_matrix, kept, lane, column, slice);
        if (M::IN_PLACE) __syncwarp();
        if (M::AT_ONCE) __syncthreads();
        put_back<R, M>(to, sums, scaling, p, at, finish, lane, column, slice);
    };
    int warp = threadIdx.x / 32;
    if (M::AT_ONCE) {
        if (warp < M::UNITS) results(warp);
        else __syncthreads();
    } else {
#pragma unroll 1
        for (int unit = warp; unit < M::UNITS; unit += WARPS) results(unit);
    }
    __syncthreads();
}

// The modes of a run, first to last.
template <class... M>
struct List {
    template <class R>
    __device__ __forceinline__ static void stage(HalfT* matrices, Scales& scales,
                                                 const Parameters& p, i64 batch) {
        (stage_matrix<M>(matrices + M::AT * WORDS, p, batch), ...);
        if (SCALED) scale_matrices<R, M...>(matrices, scales);
    }
    // Which of the tiles holds the results.
    template <class R>
    __device__ __forceinline__ static HalfT* apply_all(HalfT* tile, HalfT* other,
                                                       const HalfT* matrices, const Scales& scales,
                                                       const Parameters& p, const Tile& at,
                                                       const Finish& finish) {
        ((apply<R, M>(tile, M::STAYS ? tile : other, matrices, scales, p, at, finish),
          M::STAYS ? void() : swap(tile, other)), ...);
        return tile;
    }
    __device__ __forceinline__ static void swap(HalfT*& one, HalfT*& other) {
        HalfT* kept = one;
        one = other;
        other = kept;
    }
};

// The whole of a tile's results to aligned memory.
template <class R, int LAST>
__device__ __forceinline__ void store_whole(const HalfT* tile, DataT* out, i64 stride) {
    constexpr int WIDTH = 16 / sizeof(DataT);
    using OwnWalk = Walk<LAST, WIDTH>;
    constexpr int STEP = OwnWalk::STEP;
    using Steps = Unrolled<R::OUTPUTS, STEP>;
    const OwnWalk walk;
    const int own = raw_place(walk.own);
    out += walk.of_thread(stride);
#pragma unroll 1
    for (int first = 0; first < Steps::STEPS; first += Steps::AT_ONCE) {
        const int from = own ^ raw_place(first * STEP);
        DataT* to = out + OwnWalk::template of_step<Steps::STEPS>(first, stride);
#pragma unroll
        for (int next = 0; next < Steps::AT_ONCE; ++next) {
            if (!Steps::WHOLE && walk.own + (first + next) * STEP >= R::OUTPUTS) continue;
            auto* values = reinterpret_cast<const int4*>(tile + (from ^ raw_place(next * STEP)));
            DataT* at = to + OwnWalk::template of_step<Steps::STEPS>(next, stride);
            // An assignment of 16 bytes would be one store for each element.
            __stcg(reinterpret_cast<int4*>(at), *values);
        }
    }
}

// Results to device memory, along the tile's last dimension.
template <class R>
__device__ __forceinline__ void store_tile(const HalfT* tile, const RunFixed& run, void* target,
                                           const Tile& at) {
    DataT* out = static_cast<DataT*>(target) + at.out;
    constexpr int LAST = R::COLUMNS_LAST ? R::COLUMNS : R::OUT_FEATURES;
    constexpr int WIDTH = LAST % CHUNK == 0 ? 16 / sizeof(DataT) : 1;
    if constexpr (WIDTH > 1 && is_power(LAST)) {
        if (run.aligned_out && at.columns == R::COLUMNS) {
            const Layout& side = run.target;
            i64 stride = R::COLUMNS_LAST ? side.feature_stride : side.column_stride;
            store_whole<R, LAST>(tile, out, stride);
            return;
        }
    }
#pragma unroll 1
    for (int index = threadIdx.x * WIDTH; index < R::OUTPUTS; index += THREADS * WIDTH) {
        int column = R::COLUMNS_LAST ? index % R::COLUMNS : index / R::OUT_FEATURES;
        int feature = R::COLUMNS_LAST ? index / R::COLUMNS : index % R::OUT_FEATURES;
        DataT* to = out + column * run.target.column_stride + feature * run.target.feature_stride;
        auto values = load_vector<DataT, WIDTH>(
            reinterpret_cast<const DataT*>(tile + raw_place(index)));
        i64 step = R::COLUMNS_LAST ? run.target.column_stride : run.target.feature_stride;
        int exist = R::COLUMNS_LAST ? at.columns - column : column < at.columns ? WIDTH : 0;
        if (WIDTH > 1 && run.aligned_out && exist >= WIDTH) {
            __stcg(reinterpret_cast<int4*>(to), *reinterpret_cast<const int4*>(&values));
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
__device__ __forceinline__ void find_scales(const Memory& memory, HalfT* tile) {
    find_largest<R>(memory.scales, tile);
    __syncthreads();
    scale_tile<R>(memory.scales, tile);
}
