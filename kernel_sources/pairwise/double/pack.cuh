// Points in double as double/double.cuh multiplies them, from a point of their midst on, and the
// squares of their norms there: what products cancel is the nearer, the smaller norms are beside
// distances. Any point of the midst is right; it is the mean of SAMPLES points of either operand,
// which each block finds in the same order.
//
// A block packs TILE points. Reads and writes 8 bytes a number, and as many numbers of samples.
//
// Facts, struct Side and struct Fixed: class Pack of kernlib/families/pairwise/kernels/double.py.
#pragma once

#include "pairwise/double/layout.cuh"

constexpr bool CENTRED = Config::CENTRED;  // squared differences; products keep their origin

constexpr int PARTS = THREADS / DEPTH, RUNS = TILE / PARTS;  // threads of a feature; points of each
constexpr int SAMPLES = 32;

struct Operands {
    const double* a;
    const double* b;
    double* packed_a;
    double* packed_b;
    double* a_norms;
    double* b_norms;
};

struct PackLaunch : Operands, Fixed {};

__device__ __forceinline__ i64 place_in(const Side& side, i64 l, i64 point, int k) {
    return l * side.view.batch_stride + point * side.view.row_stride +
           k * side.view.column_stride;
}

// A share of feature k in the centre; nothing where that is not finite.
__device__ __forceinline__ double sampled(const double* data, const Side& side, i64 l, int i,
                                          int k) {
    double x = data[place_in(side, l, i * side.points / SAMPLES, k)] * (0.5 / SAMPLES);
    return x - x == 0.0 ? x : 0.0;
}

// Feature k of the centre, of which this thread adds up the `part`-th share; `shares` is a block's.
__device__ __forceinline__ double centre_of(double* shares, const PackLaunch& p, i64 l, int k,
                                            int part) {
    double share = 0.0, centre = 0.0;
    if (k < p.k) {
#pragma unroll
        for (int i = part; i < SAMPLES; i += PARTS)
            share += sampled(p.a, p.a_side, l, i, k) + sampled(p.b, p.b_side, l, i, k);
    }
    __syncthreads();  // the shares before have been read
    shares[threadIdx.x] = share;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PARTS; ++i) centre += shares[i * DEPTH + k % DEPTH];
    return centre;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_double_pack(const __grid_constant__ PackLaunch p) {
    extern __shared__ __align__(16) unsigned char shared[];
    i64 l = blockIdx.y, block = blockIdx.x;
    bool left = block < p.a_side.blocks;
    const Side& side = left ? p.a_side : p.b_side;
    if (l > 0 && side.stride == 0) return;
    block -= left ? 0 : p.a_side.blocks;
    const double* from = left ? p.a : p.b;
    double* to = (left ? p.packed_a : p.packed_b) + l * side.stride + block * p.chunks * PIECE;
    int feature = threadIdx.x % DEPTH, part = threadIdx.x / DEPTH;
    double norms[RUNS] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
        int k = chunk * DEPTH + feature;
        double centre = 0.0;
        if (CENTRED)
            centre = centre_of(reinterpret_cast<double*>(shared), p, p.apart ? l : 0, k, part);
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            int own = part + i * PARTS;
            i64 point = block * TILE + own;
            bool exists = point < side.points && k < p.k;
            double x = exists ? from[place_in(side, l, point, k)] - centre : 0.0;
            norms[i] = fma(x, x, norms[i]);
            to[chunk * PIECE + own * DEPTH + feature] = x;
        }
    }
    double* out = (left ? p.a_norms : p.b_norms) + l * side.norms_stride + block * TILE;
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        double norm = norms[i];
#pragma unroll
        for (int step = DEPTH / 2; step > 0; step /= 2) norm += __shfl_xor_sync(~0u, norm, step);
        if (feature == 0) out[part + i * PARTS] = norm;
    }
}
