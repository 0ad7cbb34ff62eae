// Sets the bits of blocks by lists of their rows, columns and heads, in words that are 0 before. Of
// blocks that stand there twice and indices out of range it counts how many there are, whichever of
// two threads comes first.
//
// Facts and struct Fixed: class Mark of kernlib/families/blocksparse/kernels/layout.py.
#pragma once

#include "blocksparse/layout/layout.cuh"

using IndexT = Config::IndexT;

struct Operands {
    const IndexT* rows;
    const IndexT* cols;
    const IndexT* heads;  // not read without has_heads
    u32* words;
    u32* counts;  // of the layout: [2] duplicates, [3] out of range
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Negative ones are none of the first `size` either.
__device__ __forceinline__ bool is_within(i64 index, u32 size) { return u64(index) < size; }

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_layout_mark(const __grid_constant__ Parameters p) {
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    bool outside = false, again = false;
    if (index < p.count) {
        i64 row = p.rows[index], col = p.cols[index], head = p.has_heads ? i64(p.heads[index]) : 0;
        outside = !is_within(row, p.grid_rows) || !is_within(col, p.grid_cols) ||
                  !is_within(head, p.n_heads);
        if (!outside) {
            u32 line = u32(head) * p.grid_rows + u32(row), bit = 1u << u32(col) % 32;
            again = atomicOr(&p.words[line * p.words_per_line + u32(col) / 32], bit) & bit;
        }
    }
    u32 duplicates = __ballot_sync(ALL_LANES, again), others = __ballot_sync(ALL_LANES, outside);
    if (threadIdx.x % 32 == 0) {
        if (duplicates) atomicAdd(&p.counts[2], u32(__popc(duplicates)));
        if (others) atomicAdd(&p.counts[3], u32(__popc(others)));
    }
}
