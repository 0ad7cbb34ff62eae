// The k smallest or largest values of each row, for few features: rows in registers, as in
// reduce/small.cuh, and their lists in shared memory.
//
// Floors of squared distances of K features on an H100 (132 SM x 128 lanes x 1.7 GHz, 2.87e13 issue
// slots a second): 2 K + 1 slots a pair (differences, squares, a comparison with the row's bound),
// so 2.4 ms for 100000 x 100000 and K = 3; and what lists take. Of n values in any order about
// k (1 + ln(n / k)) pass the bound, 100 of 100000 for k = 10, in other lanes each time: of all
// GROUPs of 8 points and 32 rows a sixth has one, and costs as much again.
//
// Facts: class Small of kernlib/families/pairwise/kernels/topk.py.
#pragma once

#include "pairwise/reduce/stage.cuh"
#include "pairwise/topk/topk.cuh"

constexpr int RESIDENT = Config::RESIDENT;  // blocks of a multiprocessor

// Points between two looks whether something passes, and how many of them a list has room for.
constexpr int GROUP = LINE <= 8 ? (ROWS == 1 ? 8 : 4) : 2;
constexpr int HALF = GROUP < 4 ? GROUP : 4;
static_assert(STAGE % GROUP == 0 && HALF <= WAITING, "groups fill a stage");

using Values = AccT[GROUP][ROWS];
using Lists = List[ROWS];

__device__ __forceinline__ void settle(Lists& lists) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) lists[i].settle();
}

// The values of the points from n on; those past the stage's last one are of any points.
__device__ __forceinline__ void compute(Values& values, const Stage& stage, const Rows& rows, int n,
                                        const InnerNumbers<AccT>& numbers) {
#pragma unroll
    for (int e = 0; e < GROUP; ++e) {
        AccT line[LINE];
        stage.read(line, n + e);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            values[e][i] = AccT(0);
#pragma unroll
            for (int k = 0; k < K; ++k)
                values[e][i] = Term::add(values[e][i], rows[i][k], line[k], numbers);
        }
    }
}

// Takes what passes of a group whose first point has a place, and of which `count` points exist.
// All lanes of a warp call it together.
__device__ __forceinline__ void take(Lists& lists, const Values& values, int place, int count) {
    bool any = false;
#pragma unroll
    for (int e = 0; e < GROUP; ++e) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) any |= lists[i].passes(values[e][i]);
    }
    if (!__any_sync(~0u, any)) return;
#pragma unroll
    for (int e = 0; e < GROUP; ++e) {
        bool room = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (e < count && lists[i].passes(values[e][i])) lists[i].push(values[e][i], place + e);
            room &= lists[i].has_room(HALF);
        }
        if (e % HALF == HALF - 1 && __any_sync(~0u, !room)) settle(lists);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
pairwise_topk_small(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ Stage stage;
    __shared__ u32 word;
    if (!launch.is_needed()) return;
    const Parameters& parameters = launch;
    Part part(parameters, ROWS * THREADS);
    i64 m0 = part.m0 + threadIdx.x;
#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        ReadScalar read{parameters, l};
        Finish finish(read);
        InnerNumbers<AccT> numbers = {read(INNER_P), read(INNER_SCALE)};
        AccT regularization = IN_PLACE ? read(REGULARIZATION) : AccT(0);
        Range range(numbers.p, K);
        Rows rows;
        read_rows(rows, parameters, l, m0);
        if constexpr (SCALED)
            numbers.unit = sample_unit(&word, rows, parameters, part, l, numbers.p);
        Rescale rescale(numbers);
        bool spaced = are_spaced(rows);
        Lists lists;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            u64* memory = reinterpret_cast<u64*>(shared) + i * THREADS + threadIdx.x;
            lists[i].begin(memory, parameters.columns);
        }
#pragma unroll 1
        for (i64 n0 = part.first; n0 < part.last; n0 += STAGE) {
            __syncthreads();
            bool looks = must_look(stage.fill(parameters, l, n0 + threadIdx.x) && spaced);
            int count = int(min(part.last - n0, i64(STAGE))), base = int(n0 - part.first);
            int places[ROWS];
            if (IN_PLACE) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    places[i] = diagonal_place(parameters, m0 + i * THREADS, n0);
                }
            }
#pragma unroll 1
            for (int n = 0; n < count; n += GROUP) {
                Values values;
                auto finish_all = [&] {
#pragma unroll
                    for (int e = 0; e < GROUP; ++e) {
#pragma unroll
                        for (int i = 0; i < ROWS; ++i) {
                            AccT value = finish(rescale(values[e][i]), rescale.unit);
                            if (IN_PLACE && n + e == places[i]) value += regularization;
                            values[e][i] = LARGEST ? -value : value;
                        }
                    }
                };
                compute(values, stage, rows, n, numbers);
                if (!BY_SPACING || looks) {
                    mend_sums(values, parameters, l, m0, n0 + n, 1, range, numbers.p);
                    finish_all();
                } else {
                    absolute_sums(values);
                    finish_all();
                }
                take(lists, values, base + n, count - n);
            }
        }
        settle(lists);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            i64 m = m0 + i * THREADS;
            if (m >= parameters.m) break;
            i64 at = ((part.split * parameters.batch + l) * parameters.m + m) * parameters.columns;
            lists[i].store(parameters.out + at, parameters.indices + at, part.first);
        }
    }
}
