// What a row's pairs add up to on the lanes, and where sums go.
//
// Finish and Slopes are values of sums, and derivatives of these:
// kernlib/families/pairwise/lowering/backward_source.py.
#pragma once

#include "pairwise/points/parameters.cuh"
#include "pairwise/reduce/math.cuh"

constexpr int SPAN = 32;                // stages whose sums are added up before they are written
// Sums of a row on the lanes: of its v's columns, then of hyperparameters.
constexpr int OF_HYPER = WANTS_VALUES ? COLUMNS : 0, OWN = OF_HYPER + HYPER;

// Hyperparameters of batch entry l, each read once: what Finish and Slopes make of the same numbers
// is then computed once.
struct Hyperparameters {
    AccT value[SCALARS];

    __device__ __forceinline__ Hyperparameters(const PointsLaunch& launch, i64 l) {
        ScalarReader<PointsLaunch> read{launch, l};
#pragma unroll
        for (int i = 0; i < SCALARS; ++i) value[i] = read(i);
    }
    __device__ __forceinline__ AccT operator()(int index) const { return value[index]; }
};

// What depends on sums alone.
struct Functions {
    Finish finish;
    Slopes slopes;
    __device__ __forceinline__ explicit Functions(const Hyperparameters& read)
        : finish(read), slopes(read) {}

    // Adds a pair to the sums of its row; what it is worth to the row's point.
    __device__ __forceinline__ float add(float (&own)[OWN > 0 ? OWN : 1], float s, float w,
                                         const float* line) const {
        float x = w * slopes(s);
        if (WANTS_VALUES) {
            float value = finish(s);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                own[c] = fmaf(value, line[c], own[c]);
        }
        if (HYPER > 0) slopes.add(own + OF_HYPER, s, w, x);
        return x;
    }
};

// A sum as it is written: added to what has been there since the share's first SPAN.
__device__ __forceinline__ void put(float* to, float sum, bool first) {
    *to = first ? sum : *to + sum;
}

// Feature k of a row's sum of differences. The constant may be float's largest number.
__device__ __forceinline__ void put_point(const PointsLaunch& p, const Share& share, int m, int k,
                                          float sum, const Functions& functions, bool first) {
    float whole = functions.slopes.constant * sum * float(p.factor);
    put(p.points + share.row(p, m) * p.k + k, whole, first);
}

// The sums of a row on the lanes.
__device__ __forceinline__ void put_own(const PointsLaunch& p, const Share& share, int m,
                                        const float (&own)[OWN > 0 ? OWN : 1],
                                        const Functions& functions, bool first) {
    if (WANTS_VALUES) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            float* to = p.values + share.row(p, m) * p.columns + c;
            if (c < p.columns) put(to, own[c], first);
        }
    }
#pragma unroll
    for (int h = 0; h < HYPER; ++h) {
        float total = own[OF_HYPER + h];
        i64 place = ((share.split * p.m + m) * p.batch + share.l) * HYPER + h;
        put(p.totals + place, functions.slopes.whole(h, BOTH ? 0.5f * total : total), first);
    }
}
