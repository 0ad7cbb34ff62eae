// Gradients by scores where captured tensors want theirs: what these have of a tile is made of the
// same numbers, before the slopes of scores multiply them.
//
// A thread keeps the products of q and k beside weights until then, 32 registers where a slope
// depends on them and none where the score is v and something else, as with biases.
#pragma once

#include "blocksparse/attention/gradient/hopper/weights.cuh"

using Collecting = Collection<TRANSPOSED>;

// What captured tensors have of two neighbours, which may not exist where nothing is left: 0 there.
struct Shares {
    float found[COLLECTED + (COLLECTED == 0)][2];

    // Of one that exists, whose gradient is 0 where nothing is left.
    template <int INDEX = 0, class Score>
    __device__ __forceinline__ void take(const Score& score, float gradient, float v, int row,
                                         int column, int e) {
        if constexpr (INDEX < COLLECTED) {
            float share = gradient * score.template slope_of<COLLECTED_AT[INDEX]>(v, row, column);
            found[INDEX][e] = gradient == 0.0f ? 0.0f : share;
            take<INDEX + 1>(score, gradient, v, row, column, e);
        }
    }

    // Those of row h of a thread's two, to where they are added up or, of pairs, stored: nothing is
    // written for what may not exist.
    __device__ __forceinline__ void leave(Collecting& collecting, const Parameters& p, int h,
                                          int batch, int head, int row, int column) const {
#pragma unroll
        for (int index = 0; index < COLLECTED; ++index) {
            const float(&two)[2] = found[index];
            if (!IS_PAIR[index]) {
                collecting.sums[index][h] += two[0] + two[1];
                continue;
            }
            const CapturedStrides to = strides_of(p, index);
            float* begin = collected_at(p, index) + batch * to.batch + head * to.head;
            store(begin + row * to.row + column, two);
        }
    }

    __device__ __forceinline__ static void store(float* to, const float (&two)[2]) {
        if (WIDE_PAIRS) {
            if (two[0] != 0.0f || two[1] != 0.0f)
                store_vector(to, Vector<float, 2>{two[0], two[1]});
            return;
        }
        if (two[0] != 0.0f) to[0] = two[0];
        if (two[1] != 0.0f) to[1] = two[1];
    }
};

// As take_slopes(), of products of q and k and of weights alone.
template <bool IS_PARTIAL, class Score>
__device__ __forceinline__ void collect_slopes(Words& words, const float (&products)[SCORES],
                                               const float (&weights)[SCORES],
                                               const float (&grads)[SCORES], const Elements& tile,
                                               const RowNumbers& own, float scale,
                                               const Score& score, u32 kept, float left,
                                               Collecting& collecting, const Parameters& p,
                                               int batch) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) {
        int group = i / 8, eight = i / 4 % 2, h = i / 2 % 2;
        int row = tile.rows.of(h), column = tile.first_of(group) + eight * 8 + tile.column;
        float deltas[2] = {own.delta[h], own.delta[h]}, found[2] = {};
        if (TRANSPOSED) {
            auto pair = tile.pair(1, group, eight);
            deltas[0] = pair.element[0];
            deltas[1] = pair.element[1];
        }
        Shares shares = {};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float grad = grads[i + e], weight = weights[i + e];
            if (IS_PARTIAL && weight == 0.0f) continue;
            if (DROPOUT) grad = kept >> (i + e) & 1 ? grad * left : 0.0f;
            int of_row = tile.row_of(row, column + e), of_column = tile.column_of(row, column + e);
            float v = products[i + e] * scale;
            float slope = weight * score.slope(v, of_row, of_column);
            // What is left out has none, whatever lies there.
            float gradient = weight == 0.0f ? 0.0f : weight * (grad - deltas[e]);
            found[e] = slope == 0.0f || weight == 0.0f ? 0.0f : slope * (grad - deltas[e]);
            shares.take(score, gradient, v, of_row, of_column, e);
        }
        words[i / 8][i % 8 / 2] = pack<InputT>(found[0], found[1]);
        shares.leave(collecting, p, h, batch, tile.note.head, row, column);
    }
}
