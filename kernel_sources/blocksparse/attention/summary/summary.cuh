// What the gradient of attention is told of each row of q, so that tiles do not look at all of it:
//   sums[row] = log2 of its sum of exponentials, infinite where nothing is left of the row, so that
//   weights are 0; deltas[row] = sum of grad o out, less the gradient by the log-sum-exp.
// Rows behind the last one, up to `padded`, are as those of which nothing is left.
//
// Floor: out and grad once over 4.3 TB/s. A row is a few lanes' of a warp, 16 bytes each.
//
// The generated source defines before it includes this file:
//   InputT
//   LANES              of a row: a power of two of 16 bytes each at least
//   PARAMETER_BYTES    what lowering makes of Parameters
#pragma once

#include "common/types.cuh"

constexpr int THREADS = 256, ROWS = THREADS / LANES;
constexpr float LOG2_E = 1.4426950408889634f;

struct Strides {
    i64 batch, head, row;
};
struct Parameters {
    const InputT *out, *grad;
    const float *lse, *grad_lse;  // (batch, heads, queries); the latter null without
    float *sums, *deltas;         // (batch, heads, padded)
    Strides out_strides, grad_strides;
    int heads, queries, padded, chunks;  // chunks of 16 bytes of a row
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as its lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_attention_summary(const __grid_constant__ Parameters p) {
    int tiles = p.padded / ROWS, lane = threadIdx.x % LANES;
    i64 head = blockIdx.x / u32(tiles);
    int row = int(blockIdx.x % u32(tiles)) * ROWS + int(threadIdx.x) / LANES;
    i64 batch = head / p.heads, within = head % p.heads;
    bool exists = row < p.queries;
    float delta = 0.0f;
    if (exists && lane < p.chunks) {
        const Strides &a = p.out_strides, &b = p.grad_strides;
        const InputT* out = p.out + batch * a.batch + within * a.head + row * a.row;
        const InputT* grad = p.grad + batch * b.batch + within * b.head + row * b.row;
        auto x = load_vector<InputT, 8>(out + lane * 8);
        auto y = load_vector<InputT, 8>(grad + lane * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            delta = fmaf(convert<float>(x.element[i]), convert<float>(y.element[i]), delta);
    }
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) delta += __shfl_xor_sync(~0u, delta, apart);
    if (lane != 0) return;
    float infinity = __uint_as_float(0x7f800000u);
    float sum = exists ? p.lse[head * p.queries + row] : -infinity;
    bool none = sum == -infinity;
    if (exists && p.grad_lse) delta -= p.grad_lse[head * p.queries + row];
    p.sums[head * p.padded + row] = none ? infinity : sum * LOG2_E;
    p.deltas[head * p.padded + row] = none ? 0.0f : delta;
}
