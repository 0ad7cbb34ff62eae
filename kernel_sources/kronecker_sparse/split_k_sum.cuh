// out[i,l,r,s] = sum over splits of partial[split,i,l,r,s], in an order that is the same at every
// run: each of some groups of threads adds up every so many splits, and one of them their sums.
//
// Floor: splits * a*b*c*d * 4 bytes over the bandwidth of L2, where portable/portable.cuh or
// hopper/hopper.cuh has left them.
//
// Facts and struct Fixed: class SplitKSum of
// kernlib/families/kronecker_sparse/kernels/steps/split_k_sum.py.
#pragma once

#include "common/types.cuh"

using OutputT = Config::OutputT;     // storage of out
constexpr bool BIAS = Config::BIAS;  // whether the last run of each row is of another result:
                                     // bias[i,r,l] is the sum of all its places
constexpr int THREADS = 256;
constexpr int RUN = 4;  // columns of a thread

struct Operands {
    const float* partial;  // (split, block, lane, row, column), columns padded to a multiple of RUN
    OutputT* out;
};

template <bool HAS_BIAS>
struct BiasPointer {
    OutputT* bias;
};
template <>
struct BiasPointer<false> {};

struct Parameters : Operands, BiasPointer<BIAS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

template <class P>
__device__ __forceinline__ OutputT* bias_of(const P& p) { return p.bias; }

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_split_k_sum(const __grid_constant__ Parameters p) {
    __shared__ Vector<float, RUN> sums[THREADS];
    u32 across = THREADS / p.groups, group = threadIdx.x / across;
    u32 index = blockIdx.x * across + threadIdx.x % across;
    bool exists = index < p.total;
    // Neighbouring threads take neighbouring l, as they lie in a weight: written apart, each number
    // of a weight with d = 16 would be a sector of 32 bytes.
    u32 lane = index % p.lanes, run = index / p.lanes % p.runs, line = index / p.lanes / p.runs;
    u32 row = line % p.rows, block = line / p.rows, column = run * RUN;
    Vector<float, RUN> sum = {};
    if (exists) {
        i64 place = (i64(block * p.lanes + lane) * p.rows + row) * p.runs + run;
        const float* from = p.partial + place * RUN + group * p.split_stride;
        i64 step = p.groups * p.split_stride;
#pragma unroll 8
        for (u32 split = group; split < p.splits; split += p.groups, from += step) {
            auto part = load_vector<float, RUN>(from);
#pragma unroll
            for (int e = 0; e < RUN; ++e) sum.element[e] += part.element[e];
        }
    }
    if (p.groups > 1) {
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (group > 0) return;
        for (u32 other = 1; other < p.groups; ++other) {
#pragma unroll
            for (int e = 0; e < RUN; ++e)
                sum.element[e] += sums[other * across + threadIdx.x].element[e];
        }
    }
    if (!exists) return;
    if constexpr (BIAS) {
        if (run == p.runs - 1) {
            const auto& x = sum.element;
            bias_of(p)[i64(line) * p.lanes + lane] =
                convert<OutputT>((x[0] + x[1]) + (x[2] + x[3]));
            return;
        }
    }
    OutputT* to = p.out + block * p.out_block_stride + lane * p.out_lane_stride +
                  row * p.out_row_stride + column * p.out_column_stride;
#pragma unroll
    for (int e = 0; e < RUN; ++e) {
        if (column + e < p.columns) to[e * p.out_column_stride] = convert<OutputT>(sum.element[e]);
    }
}
