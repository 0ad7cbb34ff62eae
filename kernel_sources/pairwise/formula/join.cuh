// Partial results of the columns of a row, which several blocks leave, put together in one order.
// Bytes: each partial result once.
//
// Facts: class Join of kernlib/families/pairwise/formula/kernels/join.py.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

using AccT = Config::AccT;
constexpr int THREADS = Config::THREADS;

constexpr i64 NO_COLUMN = 0x7fffffffffffffffll;

struct Parameters {
    const AccT* parts;  // (splits, count)
    const i64* places;
    AccT* out;
    i64* indices;
    Fixed fixed;
};

struct JoinSums {
    static __device__ __forceinline__ void store(const Parameters& call, i64 at) {
        AccT total = AccT(0), rest = AccT(0);
#pragma unroll 4
        for (i64 part = 0; part < call.fixed.splits; ++part) {
            rest += call.parts[part * call.fixed.count + at];
            total = add_chain(total, rest);
        }
        call.out[at] = total;
    }
};

struct JoinLogSumExps {
    static __device__ __forceinline__ void store(const Parameters& call, i64 at) {
        AccT largest = -infinity(AccT(0)), total = AccT(0);
        for (i64 part = 0; part < call.fixed.splits; ++part)
            largest = maximum(largest, call.parts[part * call.fixed.count + at]);
        if (absolute(largest) < infinity(largest)) {
            for (i64 part = 0; part < call.fixed.splits; ++part)
                total += exp(call.parts[part * call.fixed.count + at] - largest);
            largest += log(total);
        }
        call.out[at] = largest;
    }
};

// The first NaN if there is one.
struct JoinMinima {
    static __device__ __forceinline__ void store(const Parameters& call, i64 at) {
        AccT least = infinity(AccT(0));
        i64 place = NO_COLUMN;
        for (i64 part = 0; part < call.fixed.splits; ++part) {
            AccT x = call.parts[part * call.fixed.count + at];
            i64 column = call.places[part * call.fixed.count + at];
            bool better = least == least && (x != x || x < least);
            if (better || (x == least && column < place)) {
                least = x;
                place = column;
            }
        }
        call.out[at] = least;
        call.indices[at] = place == NO_COLUMN ? 0 : place;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
formula_join(const __grid_constant__ Parameters call) {
    i64 step = i64(gridDim.x) * THREADS;
    for (i64 at = i64(blockIdx.x) * THREADS + threadIdx.x; at < call.fixed.count; at += step)
        Config::Join::store(call, at);
}
