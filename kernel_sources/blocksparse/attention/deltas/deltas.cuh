// What a row's gradient by its weights is relative to: the sum of out * grad over its values, less
// the gradient by its log-sum-exp where there is one. Kernels of gradients read it for each row.
//
// Floor: out and grad once over 4.3 TB/s on an H200.
//
// A row is read by as many lanes as it has chunks of 16 bytes, rounded to a power of two, in one
// order: the sum's bits depend on nothing else.
//
// The generated source defines before it includes this file:
//   InputT
//   LANES             of a row
//   HAS_GRAD_LSE
//   PARAMETER_BYTES   what lowering makes of Parameters
#pragma once

#include "common/types.cuh"

constexpr int THREADS = 256, CHUNK = 8, ROWS = THREADS / LANES;

struct RowStrides {
    i64 batch, head, row;
};
struct Parameters {
    const InputT *out, *grad;
    const float* grad_lse;  // (batch, heads, rows), contiguous, as is `deltas`
    float* deltas;
    RowStrides out_strides, grad_strides;
    i64 total;  // rows of all heads of all batches
    int heads, rows, chunks, unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_attention_deltas(const __grid_constant__ Parameters p) {
    const int chunk = threadIdx.x % LANES;
    const i64 line = i64(blockIdx.x) * ROWS + threadIdx.x / LANES;
    float sum = 0.0f;
    if (line < p.total && chunk < p.chunks) {
        const i64 rest = line / p.rows, batch = rest / p.heads, head = rest % p.heads;
        const i64 row = line % p.rows;
        auto at = [&](const RowStrides& s) {
            return batch * s.batch + head * s.head + row * s.row + chunk * CHUNK;
        };
        auto x = load_vector<InputT, CHUNK>(p.out + at(p.out_strides));
        auto y = load_vector<InputT, CHUNK>(p.grad + at(p.grad_strides));
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            sum = fmaf(convert<float>(x.element[i]), convert<float>(y.element[i]), sum);
    }
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (chunk == 0 && line < p.total)
        p.deltas[line] = HAS_GRAD_LSE ? sum - p.grad_lse[line] : sum;
}
