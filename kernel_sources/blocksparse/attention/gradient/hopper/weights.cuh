// Weights of a tile's elements, and what the gradient is by their scores.
//
// A thread's sum i is of its row h = i / 2 % 2 of two, 8 apart, and of column i / 4 * 8 + 2 (lane %
// 4) + i % 2 of the tile: groups of 16 columns, 8 sums each, lie within one piece.
#pragma once

#include "blocksparse/attention/gradient/hopper/parameters.cuh"
#include "common/mma_half.cuh"
#include "common/exponential.cuh"

constexpr int SCORES = TILE_COLS / 2;  // of a thread
constexpr int GROUPS = TILE_COLS / 16;
constexpr int STEPS = TILE_COLS / STEP;
static_assert(SCORES <= 32, "a bit each says what a dropout leaves");
using Words = u32[STEPS][4];  // as wgmma takes a left operand from registers

// A warp's sixteen rows, of which a thread has two.
struct Sixteen {
    int first, line;  // row of op(S); line of blocks of the tile

    __device__ __forceinline__ Sixteen(int row, int warpgroup) {
        int within = warpgroup * 64 + int(threadIdx.x % 128 / 32) * 16;
        first = row + within;
        line = within / BLOCK_ROWS % LINES;
    }
    __device__ __forceinline__ int of(int h) const { return first + threadIdx.x % 32 / 4 + 8 * h; }
};

// Of q's rows: the logarithm of their sums of exponentials, delta, and HAS_SCORE what a float
// leaves of that logarithm. Those of a thread's own rows stay in registers; of a tile's columns
// they come with the stage.
struct RowNumbers {
    float sum[2], delta[2], rest[2];

    __device__ __forceinline__ RowNumbers(const Parameters& p, const Place& place,
                                          const Sixteen& rows) {
        if (TRANSPOSED) return;
        i64 head = (i64(place.batch) * p.heads + place.head) * p.padded;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] = p.sums[head + rows.of(h)];
            delta[h] = p.deltas[head + rows.of(h)];
            if (HAS_SCORE) rest[h] = p.rests[head + rows.of(h)];
        }
    }
};

// What a warp's rows of a stage are asked.
struct Elements {
    const Note& note;
    const Sixteen& rows;
    const View& view;
    const float* numbers;  // of columns
    int column;            // of the thread, of the first sum of a group
    u32 stored;            // bits of the pieces that the rows' line of blocks stores

    __device__ __forceinline__ Elements(const Note& note, const Sixteen& rows, const View& view,
                                        const float* numbers)
        : note(note), rows(rows), view(view), numbers(numbers), column(threadIdx.x % 4 * 2),
          stored(note.stored[rows.line]) {}

    __device__ __forceinline__ int first_of(int group) const {
        return note.columns[group * 16 / PIECE] + group * 16 % PIECE;
    }
    __device__ __forceinline__ bool stores(int group) const {
        return stored >> group * 16 / PIECE & 1;
    }
    // Row and column of S.
    __device__ __forceinline__ int row_of(int row, int column) const {
        return TRANSPOSED ? column : row;
    }
    __device__ __forceinline__ int column_of(int row, int column) const {
        return TRANSPOSED ? row : column;
    }
    // Two neighbours of a group's columns.
    __device__ __forceinline__ Vector<float, 2> pair(int which, int group, int eight) const {
        return load_vector<float, 2>(numbers + which * TILE_COLS + group * 16 + eight * 8 + column);
    }
};

// Which of a thread's elements a dropout leaves, a bit each.
__device__ __forceinline__ u32 kept_of(const Dropout& dropout, const Elements& tile) {
    u32 kept = 0;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        int first = tile.first_of(group) + tile.column, row = tile.rows.of(0);
        u32 words[2][4];
        if (TRANSPOSED) {  // columns are rows of S: each has its own numbers
            dropout.words(words[0], first, row);
            dropout.words(words[1], first + 1, row);
        } else {
            dropout.words(words[0], row, first);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int eight = i / 4, h = i / 2 % 2, next = i % 2;
            u32 word = TRANSPOSED ? words[next][2 * eight + h] : words[0][2 * h + eight];
            int odd = TRANSPOSED ? lane / 4 % 2 : next;
            kept |= u32(dropout.keeps(word, odd)) << (group * 8 + i);
        }
    }
    return kept;
}

// What a tile may leave out: nothing, what a line does not store, or what a row does not see too.
// Most tiles of small blocks have gaps, which are a selection an element; few have more.
enum class Left { nothing, gaps, all };

// The weight of one element, and the slope of its score; 0 for what is left out.
template <Left OUT, class Score>
__device__ __forceinline__ float weight_of(float product, float scale, float sum, float rest,
                                           bool stored, const Elements& tile, const Score& score,
                                           int row, int column, float& slope) {
    if (OUT == Left::all && !(stored && tile.view.keeps(row, column))) return 0.0f;
    if (!HAS_SCORE && !HAS_MASK) {
        float weight = fast_exp2(fmaf(product, scale, -sum));
        return OUT != Left::gaps || stored ? weight : 0.0f;
    }
    int of_row = tile.row_of(row, column), of_column = tile.column_of(row, column);
    if (HAS_MASK && !score.keeps(of_row, of_column)) return 0.0f;
    float v = product * scale;
    if (HAS_SCORE) {
        slope = score.slope(v, of_row, of_column);
        v = score(v, of_row, of_column);
    }
    // A logit of a score may be no float any more times log2 e.
    return fast_exp2(HAS_SCORE ? fmaf(v - sum, LOG2_E, -rest) : fmaf(v, LOG2_E, -sum));
}

// Weights as words, and `weighed`: weights times the slopes of scores, in the place of products, or
// alone beside these where captured tensors have gradients. `scale` is that of logits, times log2 e
// where score has nothing to say.
template <Left OUT, class Score>
__device__ __forceinline__ void take_weights(const float (&scores)[SCORES],
                                             float (&weighed)[SCORES], Words& words,
                                             const Elements& tile, const RowNumbers& own,
                                             float scale, const Score& score, u32 kept,
                                             float left) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) {
        int group = i / 8, eight = i / 4 % 2, h = i / 2 % 2;
        bool stored = OUT == Left::nothing || tile.stores(group);
        int row = 0, column = 0;
        if (OUT == Left::all || HAS_SCORE || HAS_MASK) {
            row = tile.rows.of(h);
            column = tile.first_of(group) + eight * 8 + tile.column;
        }
        float sums[2] = {own.sum[h], own.sum[h]}, rests[2] = {}, weights[2];
        if (HAS_SCORE) rests[0] = rests[1] = own.rest[h];
        if (TRANSPOSED) {
            auto pair = tile.pair(0, group, eight);
            sums[0] = pair.element[0];
            sums[1] = pair.element[1];
        }
        if (TRANSPOSED && HAS_SCORE) {
            auto pair = tile.pair(2, group, eight);
            rests[0] = pair.element[0];
            rests[1] = pair.element[1];
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float slope = 1.0f;
            float weight = weight_of<OUT>(scores[i + e], scale, sums[e], rests[e], stored, tile,
                                          score, row, column + e, slope);
            weights[e] = !DROPOUT ? weight : kept >> (i + e) & 1 ? weight * left : 0.0f;
            const bool is_alone = !HAS_SCORE || COLLECTED > 0 || weight == 0.0f;
            weighed[i + e] = is_alone ? weight : weight * slope;
        }
        if (TRANSPOSED) words[i / 8][i % 8 / 2] = pack<InputT>(weights[0], weights[1]);
    }
}

// The gradient by scores, as words, of weights and of the gradient by these.
template <bool IS_CAREFUL>
__device__ __forceinline__ void take_slopes(Words& words, const float (&weights)[SCORES],
                                            const float (&grads)[SCORES], const Elements& tile,
                                            const RowNumbers& own, u32 kept, float left) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) {
        int h = i / 2 % 2;
        float deltas[2] = {own.delta[h], own.delta[h]}, found[2];
        if (TRANSPOSED) {
            auto pair = tile.pair(1, i / 8, i / 4 % 2);
            deltas[0] = pair.element[0];
            deltas[1] = pair.element[1];
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float grad = grads[i + e], weight = weights[i + e];
            if (DROPOUT) grad = kept >> (i + e) & 1 ? grad * left : 0.0f;
            found[e] = weight * (grad - deltas[e]);
            // What is left out has none, whatever lies there.
            if (IS_CAREFUL && weight == 0.0f) found[e] = 0.0f;
        }
        words[i / 8][i % 8 / 2] = pack<InputT>(found[0], found[1]);
    }
}
