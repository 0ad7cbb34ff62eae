// One run of neighbouring factors, applied to a tile that stays in shared memory between the first
// factor and the last:
//
//   target[o, i, c, (q1 .. qN)] = sum source[o, i, c, (p1 .. pN)] * F1[p1, q1] * .. * FN[pN, qN]
//
// One column c is a whole row of x, or what one of the elements behind the run's own takes part in.
//
// A run is a struct that the generated source has, with
//   SourceT, TargetT             storage of what is read and written
//   COLUMNS, COLUMNS_LAST        of a tile, and whether they are its last dimension
//   IN_FEATURES, INPUTS          of a column, and of a tile
//   WRITTEN_HERE                 whether the source is a target of this launch
//   ENDS                         whether the target is the result
//   Modes                        list of Modes in their order
#pragma once

#include "kronecker_product/modes/entries.cuh"
#include "kronecker_product/modes/multiply.cuh"
#include "kronecker_product/modes/load.cuh"
#include "kronecker_product/modes/summands.cuh"

// Where a mode's matrix lies in shared memory, column by column with zeros around it: a warp takes
// units of 8 columns by 4 rows, whole sectors of device memory.
template <class M>
struct Unit {
    static constexpr int ROWS = 2 * M::STEPS, COUNT = M::COLUMN_TILES * ROWS;
    int row, column;  // of the thread's entry; columns of units behind the last are none
    __device__ __forceinline__ explicit Unit(int unit)
        : row(unit % ROWS * 4 + threadIdx.x % 4), column(unit / ROWS * 8 + threadIdx.x / 4 % 8) {}
    __device__ __forceinline__ bool exists() const { return row < M::P && column < M::Q; }
    __device__ __forceinline__ int to() const { return place(column * M::DEPTH + row); }
};

// A factor as it is, by copies that are under way then.
template <class M>
__device__ __forceinline__ void copy_matrix(AccT* matrix, const Parameters& p, i64 batch) {
    const Matrix& m = p.matrices[M::FIRST];
    const InputT* factor = p.factors[M::FIRST] + batch * m.batch_stride;
#pragma unroll 4
    for (int number = threadIdx.x / 32; number < Unit<M>::COUNT; number += WARPS) {
        const Unit<M> unit(number);
        const InputT* from = factor + unit.row * m.row_stride + unit.column * m.column_stride;
        copy_async<sizeof(AccT)>(matrix + unit.to(), unit.exists() ? from : factor,
                                 unit.exists() * sizeof(AccT));
    }
}

// The matrix of a mode in shared memory: the product of its factors' entries. What a warp asks for
// AT_ONCE arrives at once: 128 threads would wait 52 times for 104 x 59, one by one.
template <class M>
__device__ __forceinline__ void stage_matrix(AccT* matrix, const Parameters& p, i64 batch) {
    if constexpr (M::PARTS == 1 && !M::SPLIT && sizeof(InputT) == sizeof(AccT)) {
        copy_matrix<M>(matrix, p, batch);
        return;
    }
    constexpr int OF_WARP = ceil_div(Unit<M>::COUNT, WARPS), MOST = M::PARTS > 1 ? 4 : 16;
    constexpr int AT_ONCE = OF_WARP < MOST ? OF_WARP : MOST;
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < Unit<M>::COUNT; first += AT_ONCE * WARPS) {
        AccT value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Unit<M> unit(first + i * WARPS);
            value[i] = entry_of<M>(p, batch, unit.row, unit.column);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * WARPS >= Unit<M>::COUNT) continue;
            const int to = Unit<M>(first + i * WARPS).to();
            if constexpr (M::SPLIT) split(value[i], matrix[to], matrix[M::MATRIX + to]);
            else matrix[to] = value[i];
        }
    }
}

// The sums in the place of the tile.
template <class M>
__device__ __forceinline__ void put_back(AccT* tile, const Sums<M>& sums, const Warp<M>& warp,
                                         int begin) {
#pragma unroll
    for (int i = 0; i < M::ROWS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!warp.exists(warp.slice(begin + i, half))) continue;
#pragma unroll
            for (int j = 0; j < M::WARP_COLUMNS; ++j) {
                int column = warp.column(j), lane = warp.column(0), own = j * 8;
                const AccT* value = sums.value[i][j] + 2 * half;
                if constexpr (M::R == 1 && M::Q % 2 == 0) {
                    int to = place_of<M, M::Q>(warp, begin, i, half, own, lane);
                    if (M::LINEAR || column < M::Q)
                        store_vector(tile + to, Vector<AccT, 2>{value[0], value[1]});
                } else {
#pragma unroll
                    for (int next = 0; next < 2; ++next) {
                        if (!M::LINEAR && column + next >= M::Q) continue;
                        tile[place_of<M, M::Q>(warp, begin, i, half, own + next, lane)] =
                            value[next];
                    }
                }
            }
        }
    }
}

// The elements of summands beside a fragment of rows, in the order of Sums.
template <class R, class M, int COUNT>
__device__ __forceinline__ void read_summands(Given<COUNT> (&given)[M::WARP_COLUMNS][4],
                                              const Parameters& p, const Finish& finish,
                                              const Tile& at, const Warp<M>& warp, int i) {
    if (COUNT == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int slice = warp.slice(i, half);
        const Slice<R, M> of(slice);
        bool exists = warp.exists(slice) && of.column < at.columns;
        const Beside<COUNT> beside(p, finish, at, of, warp.column(0), exists);
#pragma unroll
        for (int j = 0; j < M::WARP_COLUMNS; ++j) {
#pragma unroll
            for (int next = 0; next < 2; ++next)
                given[j][2 * half + next].read(beside, 8 * j + next,
                                               M::LINEAR || warp.column(j) + next < M::Q);
        }
    }
}

// Elements from a tile's first result to the first one of a slice. Of slices that are bits side by
// side it is the sum of what it is for each.
template <class R, class M>
__device__ __forceinline__ i64 offset_of(const Layout& out, int slice) {
    const Slice<R, M> of(slice);
    return of.column * out.column_stride + of.feature(0) * out.feature_stride;
}

template <class R, class M>
__device__ __forceinline__ i64 offset_of(const Layout& out, const Warp<M>& warp, int begin, int i,
                                         int half) {
    if constexpr (M::LINEAR) {
        constexpr int STEP = WARPS / M::GROUPS * 16;
        return offset_of<R, M>(out, warp.row_tile(begin) * 16) +
               offset_of<R, M>(out, warp.lane_row) + offset_of<R, M>(out, i * STEP + half * 8);
    } else {
        return offset_of<R, M>(out, warp.slice(begin + i, half));
    }
}

// The sums of the last mode, finished, to device memory.
template <class R, class M>
__device__ __forceinline__ void store(const Parameters& p, typename R::TargetT* out, const Tile& at,
                                      const Sums<M>& sums, const Finish& finish,
                                      const Warp<M>& warp, int begin) {
    constexpr bool FINISHED = EPILOGUE && R::ENDS;
    const RunFixed& run = p.runs[R::INDEX];
    const i64 step = Slice<R, M>::BEHIND * run.target.feature_stride;
    const int lane = warp.column(0);
#pragma unroll
    for (int i = 0; i < M::ROWS; ++i) {
        Given<R::ENDS ? SUMMANDS : 0> given[M::WARP_COLUMNS][4];
        read_summands<R, M>(given, p, finish, at, warp, begin + i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int slice = warp.slice(begin + i, half);
            if (!warp.exists(slice)) continue;
            const Slice<R, M> of(slice);
            if (of.column >= at.columns) continue;
            i64 first = 0;
            if (FINISHED)
                first = at.outer * run.feature_outer + at.inner * run.feature_inner +
                        (at.column + of.column) / run.feature_divisor * run.feature_column;
            typename R::TargetT* to =
                out + offset_of<R, M>(run.target, warp, begin, i, half) + lane * step;
#pragma unroll
            for (int j = 0; j < M::WARP_COLUMNS; ++j) {
#pragma unroll
                for (int next = 0; next < 2; ++next) {
                    int own = 8 * j + next;
                    if (!M::LINEAR && lane + own >= M::Q) continue;
                    AccT value = sums.value[i][j][2 * half + next];
                    if constexpr (FINISHED) {
                        i64 feature = of.feature(0) + i64(lane + own) * of.BEHIND;
                        value = given[j][2 * half + next].finished(
                            finish, value, first + feature * run.feature_own);
                    }
                    to[own * step] = convert<typename R::TargetT>(value);
                }
            }
        }
    }
}

template <class R, class M>
__device__ __forceinline__ void apply(AccT* tile, const AccT* matrices, const Parameters& p,
                                      typename R::TargetT* out, const Tile& at,
                                      const Finish& finish) {
    Warp<M> warp;
    Factors<M> factors;
    factors.read(matrices + M::AT, warp);
#pragma unroll 1
    for (int begin = 0; begin < M::WARP_ROWS; begin += M::ROWS) {
        Sums<M> sums = {};
        multiply<M>(sums, tile, matrices + M::AT, factors, warp, begin);
        if constexpr (M::LAST) {
            store<R, M>(p, out, at, sums, finish, warp, begin);
        } else {
            if (M::AT_ONCE) __syncthreads();
            else __syncwarp();
            put_back<M>(tile, sums, warp, begin);
        }
    }
    __syncthreads();
}

// The modes of a run, first to last.
template <class... M>
struct List {
    __device__ __forceinline__ static void stage(AccT* matrices, const Parameters& p, i64 batch) {
        (stage_matrix<M>(matrices + M::AT, p, batch), ...);
    }
    template <class R>
    __device__ __forceinline__ static void apply_all(AccT* tile, const AccT* matrices,
                                                     const Parameters& p, const Tile& at,
                                                     const Finish& finish) {
        auto* out = static_cast<typename R::TargetT*>(p.targets[R::INDEX]) + at.out;
        (apply<R, M>(tile, matrices, p, out, at, finish), ...);
    }
};
