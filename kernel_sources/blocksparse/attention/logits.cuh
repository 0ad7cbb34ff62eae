// What a fragment of 16 rows has of a tile: which groups of 16 columns are stored and seen, and
// what becomes of their logits.
//
// A lane of a fragment has of group g rows `row` and row + 8, and columns 16 g + 2 t, 2 t + 1 and
// these 8 further on: sums[2 g + n][2 h + i] is row + 8 h, column 16 g + 8 n + 2 t + i.
#pragma once

#include "blocksparse/attention/score.cuh"
#include "common/exponential.cuh"

__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000u); }  // -inf

// Bit g for group g: whether some element may be kept, and whether some may not.
struct Groups {
    u32 live, cut;
};

// Of 16 rows from `row` on and the columns from `col` on, of which `stored` are; TURNED: of 16
// columns and the rows.
template <int GROUPS, bool TURNED = false>
__device__ __forceinline__ Groups groups_of(const Sight& sight, u32 stored, int row, int col) {
    constexpr int ROWS = TURNED ? 16 * GROUPS : 16, COLS = TURNED ? 16 : 16 * GROUPS;
    Groups found = {stored, 0};
    if (sight.covers(row, ROWS, col, COLS)) return found;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const int own_row = row + (TURNED ? 16 * g : 0), own_col = col + (TURNED ? 0 : 16 * g);
        if (sight.misses(own_row, 16, own_col, 16)) found.live &= ~(1u << g);
        if (!sight.covers(own_row, 16, own_col, 16)) found.cut |= 1u << g;
    }
    found.cut &= found.live;
    return found;
}

// Whether an element of a live group counts, which is cut or not. A mask is asked of what exists.
template <class Score>
__device__ __forceinline__ bool is_left(const Score& score, bool is_cut, const Sight& sight,
                                        int row, int col) {
    if (is_cut && !sight.keeps(row, col)) return false;
    if constexpr (HAS_MASK) return score.keeps(row, col);
    return true;
}

// The logit in the place of s of an element that counts, in units of UNIT * ln 2: in natural ones
// where there is a score, which may give what is no float any more times log2 e, such as the least
// float that masks add. `scale` is that of logits, or where a score has nothing to say with a
// factor of log2 e.
constexpr float UNIT = HAS_SCORE ? LOG2_E : 1.0f;
template <class Score>
__device__ __forceinline__ float logit(float s, float scale, const Score& score, int row, int col) {
    if constexpr (HAS_SCORE) return score(s * scale, row, col);
    return s * scale;
}
template <class Score>
__device__ __forceinline__ float slope_of(float v, const Score& score, int row, int col) {
    if constexpr (HAS_SCORE) return score.slope(v, row, col);
    return 1.0f;
}

// Which weights of a lane's part of a group a dropout leaves, bit 4 n + i, the group's first being
// at `row` and `col` of this lane; TURNED: of a group of rows, which are columns of the fragment.
template <bool TURNED = false>
__device__ __forceinline__ u32 kept_of(const Dropout& dropout, int row, int col) {
    u32 words[1 + TURNED][4], kept = 0;
    dropout.words(words[0], row, col);
    if (TURNED) dropout.words(words[TURNED], row + 1, col);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = TURNED ? i % 2 : 0, at = TURNED ? 2 * n + i / 2 : i / 2 * 2 + n;
            const u32 word = words[first][at];
            kept |= u32(dropout.keeps(word, TURNED ? col % 2 : i % 2)) << (4 * n + i);
        }
    return kept;
}
