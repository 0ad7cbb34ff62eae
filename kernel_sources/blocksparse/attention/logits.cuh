// What a fragment of 16 rows has of a tile: which groups of 16 columns are stored and seen, and
// what becomes of their logits.
//
// A lane of a fragment has of group g rows `row` and row + 8, and columns 16 g + 2 t, 2 t + 1 and
// these 8 further on: sums[2 g + n][2 h + i] is row + 8 h, column 16 g + 8 n + 2 t + i.
#pragma once

#include "common/exponential.cuh"

__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000u); }  // -inf

// Bit g for group g: whether some element may be kept, and whether some may not.
struct Groups {
    u32 live, cut;
};

// Of 16 rows from `row` on and the columns from `col` on, of which `stored` are.
template <int GROUPS>
__device__ __forceinline__ Groups groups_of(const Sight& sight, u32 stored, int row, int col) {
    Groups found = {stored, 0};
    if (sight.covers(row, 16, col, 16 * GROUPS)) return found;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (sight.misses(row, 16, col + 16 * g, 16)) found.live &= ~(1u << g);
        if (!sight.covers(row, 16, col + 16 * g, 16)) found.cut |= 1u << g;
    }
    found.cut &= found.live;
    return found;
}

// The logit in the place of s, times log2 e, of an element that may be kept; lowest() for what is
// left out. `scale` is that of logits, or with a factor of log2 e where score has nothing to say.
template <class Score>
__device__ __forceinline__ float finished(float s, float scale, const Score& score, bool is_cut,
                                          const Sight& sight, int row, int col) {
    if (HAS_SCORE || HAS_MASK) {
        // Neither is asked of what does not exist.
        if (is_cut && !sight.keeps(row, col)) return lowest();
        if (HAS_MASK && !score.keeps(row, col)) return lowest();
        return HAS_SCORE ? score(s * scale, row, col) * LOG2_E : s * scale;
    }
    return is_cut && !sight.keeps(row, col) ? lowest() : s * scale;
}
