// out[n,r] = finish(sum over panels of part[panel,n,r]), in a fixed order: the same bits at every
// run.
//
// Floor: panels * N * R * 4 bytes over the bandwidth of L2, where slices/slices.cuh has left them.
//
// Facts and struct Fixed: class Reduce of kernlib/families/sparse/kernels/slices/reduce.py.
#pragma once

#include "common/types.cuh"
#include "common/hopper.cuh"
#include "common/parameters.cuh"

constexpr int ROWS = 32, PARTS = 8;  // of a block: rows, and threads that share one's panels
constexpr int THREADS = ROWS * PARTS;

using OutputT = Config::OutputT;  // storage of out

struct Addresses {
    const float* part;  // (panel, n, row)
    OutputT* out;
};
struct Parameters : Addresses,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_slices_reduce(const __grid_constant__ Parameters p) {
    __shared__ float sums[PARTS][ROWS];
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    wait_for_prerequisites();
#endif
    u32 lane = threadIdx.x % ROWS, share = threadIdx.x / ROWS, n = blockIdx.y;
    u32 row = blockIdx.x * ROWS + lane;
    float sum = 0.0f;
    if (row < p.rows) {
        const float* from = p.part + i64(n) * p.rows + row;
        i64 stride = i64(p.columns) * p.rows;
#pragma unroll 4
        for (u32 panel = share; panel < p.panels; panel += PARTS) sum += from[panel * stride];
    }
    sums[share][lane] = sum;
    __syncthreads();
    if (share != 0 || row >= p.rows) return;
#pragma unroll
    for (int other = 1; other < PARTS; ++other) sum += sums[other][lane];
    Finish finish{Read<Parameters>{p}};
    p.out[n * p.out_column_stride + row * p.out_row_stride] = convert<OutputT>(finish(sum, row));
}
