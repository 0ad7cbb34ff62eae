// What a row's gradient by its weights is relative to: the sum of out * grad over its values, less
// the gradient by its log-sum-exp where there is one. Kernels of gradients read it for each row.
//
// Floor: out and grad once over 4.3 TB/s on an H200.
//
// A row is read by as many lanes as it has chunks of 16 bytes, rounded to a power of two, in one
// order: the sum's bits depend on nothing else.
//
// Facts and struct Fixed: class Deltas of
// kernlib/families/blocksparse/kernels/attention/gradient/deltas.py.
#pragma once

#include "blocksparse/attention/strides.cuh"

using InputT = Config::InputT;
constexpr int LANES = Config::LANES;  // of a row
constexpr bool HAS_GRAD_LSE = Config::HAS_GRAD_LSE;
// Whether rows have log2 of their sum of exponentials beside it, which is infinite where nothing is
// left of a row, so that weights are 0; and those behind the last one, up to `padded`, are rows of
// which nothing is left.
constexpr bool HAS_SUMS = Config::HAS_SUMS;
// Whether these are natural logarithms instead, of logits that a score may make as large as floats
// are, and beside them what a float leaves of these, in log2.
constexpr bool HAS_RESTS = Config::HAS_RESTS;
constexpr int THREADS = 256, CHUNK = 8, ROWS = THREADS / LANES;

struct Operands {
    const InputT *out, *grad;
    const float *grad_lse, *lse, *rest;  // (batch, heads, rows), contiguous; rest may be null
    float *deltas, *sums, *rests;        // (batch, heads, padded)
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_attention_deltas(const __grid_constant__ Parameters p) {
    const int chunk = threadIdx.x % LANES;
    const i64 line = i64(blockIdx.x) * ROWS + threadIdx.x / LANES;
    const i64 of_all = line / p.padded, row = line % p.padded;
    const bool exists = line < p.total && row < p.rows;
    float sum = 0.0f;
    if (exists && chunk < p.chunks) {
        const i64 batch = of_all / p.heads, head = of_all % p.heads;
        auto at = [&](const Strides& s) {
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
    if (chunk != 0 || line >= p.total) return;
    const i64 place = of_all * p.rows + row;
    if (HAS_GRAD_LSE && exists) sum -= p.grad_lse[place];
    if (HAS_SUMS) {
        const float infinity = __uint_as_float(0x7f800000u);
        const float logarithm = exists ? p.lse[place] : -infinity;
        const bool none = logarithm == -infinity;
        p.sums[line] = none ? infinity : logarithm * (HAS_RESTS ? 1.0f : 1.4426950408889634f);
        if (HAS_RESTS) p.rests[line] = none || !p.rest ? 0.0f : p.rest[place];
        if (none) sum = 0.0f;
    }
    p.deltas[line] = sum;
}
