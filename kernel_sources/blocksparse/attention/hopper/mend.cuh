// Rows that are computed once more, by mma.sync from device memory.
//
// Values that are no finite numbers: a weight of 0 times NaN is NaN: what a row does not see would
// show in it where the same tile has columns that other rows see. So a warp that has met such tiles
// and finds a sum that is not finite computes its rows once more: sums of finite values, and beside
// them whether a value that counts is NaN or infinite.
//
// Logits that are LARGE: nothing may be left of weights. Their row's largest one and the sum of
// weights are computed once more too.
//
// A fragment of features and columns at a time, as each first call compiles this and hardly any
// call needs it: four of features at once took NVRTC 0.1 s more, of 1.0.
#pragma once

#include "blocksparse/attention/hopper/store.cuh"
#include "common/mma_half.cuh"

constexpr int AT_ONCE = 8;  // columns, and features of values

// Two neighbours, zero where there are none.
__device__ __forceinline__ u32 pair_at(const InputT* from, bool exists) {
    return exists ? *reinterpret_cast<const u32*>(from) : 0;
}

// A warp's sixteen rows, and where their head's q, k and v are.
struct Mender {
    const Parameters& p;
    const Task& task;
    Rows& stats;
    float scale;
    int head, batch, layout;
    const InputT *q, *k, *v;

    __device__ __forceinline__ Mender(const Parameters& p, const Task& task, Rows& stats,
                                      float scale, int head, int batch)
        : p(p), task(task), stats(stats), scale(scale), head(head), batch(batch),
          layout(batch * p.layout_batch + head * p.layout_head) {
        int shared = head / p.group;
        q = p.q + batch * p.q_strides.batch + head * p.q_strides.head;
        k = p.k + batch * p.k_strides.batch + shared * p.k_strides.head;
        v = p.v + batch * p.v_strides.batch + shared * p.v_strides.head;
    }

    // Products of the rows and of the columns from `col` on.
    __device__ __forceinline__ void multiply_rows(float (&scores)[4], int col) const {
        int lane = threadIdx.x % 32, key = col + lane / 4;
#pragma unroll 1
        for (int first = 0; first < p.values; first += 16) {
            u32 a[4], b[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int feature = first + half * 8 + lane % 4 * 2;
                bool exists = feature < p.values;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int row = task.rows.of(h);
                    a[2 * half + h] = pair_at(q + row * p.q_strides.row + feature,
                                              exists && row < p.queries);
                }
                b[half] = pair_at(k + key * p.k_strides.row + feature, exists && key < p.keys);
            }
            multiply_fragments<InputT>(scores, a, b);
        }
    }

    // Whether a column counts in its row; its score in the place of a product.
    __device__ __forceinline__ bool counts(float& score, int h, int col) const {
        int row = task.rows.of(h);
        if (!Seen(task.sight, row).has(col) || row >= p.queries) return false;
        if (HAS_SCORE) score = task.score(score * scale, row, col);
        else if (scale < 0.0f) score = -score;
        return !HAS_MASK || task.score.keeps(row, col);
    }

    // The weight of what counts, before dropout.
    __device__ __forceinline__ float weight(float score, int h) const {
        return fast_exp2((score - stats.most[h]) * stats.factor);
    }

    // Fragments of weights; and of ones where there is a weight, and where it is 0 but counts.
    __device__ __forceinline__ void weigh(u32 (&weights)[2], u32 (&some)[2], u32 (&none)[2],
                                          int col) const {
        float scores[4] = {};
        multiply_rows(scores, col);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float own[2], is_some[2], is_none[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int at = col + int(threadIdx.x) % 4 * 2 + e;
                float score = scores[2 * h + e];
                bool counted = counts(score, h, at);
                bool left = counted && (!DROPOUT || task.dropout.keeps_at(task.rows.of(h), at));
                own[e] = left ? weight(score, h) : 0.0f;
                bool is_zero = convert<float>(convert<InputT>(own[e])) == 0.0f;
                is_some[e] = counted && !is_zero ? 1.0f : 0.0f;
                is_none[e] = counted && is_zero ? 1.0f : 0.0f;
            }
            weights[h] = pack<InputT>(own[0], own[1]);
            some[h] = pack<InputT>(is_some[0], is_some[1]);
            none[h] = pack<InputT>(is_none[0], is_none[1]);
        }
    }

    // Adds what the columns from `col` on have for features from `first` on: finite values, and how
    // often infinite ones are met on either side, or both for NaN, which 0 times infinity is too.
    __device__ __forceinline__ void add(float (&sums)[4], float (&above)[4], float (&below)[4],
                                        int col, int first) const {
        u32 weights[2], some[2], none[2];
        weigh(weights, some, none, col);
        int lane = threadIdx.x % 32, feature = first + lane / 4;
        float x[2], up[2], down[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int row = col + lane % 4 * 2 + e;
            bool exists = row < p.keys && feature < p.values;
            x[e] = exists ? convert<float>(v[row * p.v_strides.row + feature]) : 0.0f;
            up[e] = x[e] <= 3.402823466e38f ? 0.0f : 1.0f;
            down[e] = x[e] >= -3.402823466e38f ? 0.0f : 1.0f;
            if (up[e] + down[e] > 0.0f) x[e] = 0.0f;
        }
        u32 high = pack<InputT>(up[0], up[1]), low = pack<InputT>(down[0], down[1]);
        multiply_short_fragments<InputT>(sums, weights[0], weights[1], pack<InputT>(x[0], x[1]));
        multiply_short_fragments<InputT>(above, some[0], some[1], high);
        multiply_short_fragments<InputT>(below, some[0], some[1], low);
        multiply_short_fragments<InputT>(above, none[0], none[1], high | low);
        multiply_short_fragments<InputT>(below, none[0], none[1], high | low);
    }

    __device__ __forceinline__ bool is_stored(int block) const {
        int line = task.rows.row / BLOCK_ROWS;
        const u32* words = p.row_bits + (i64(layout) * p.lines + line) * p.line_words;
        return words[block / 32] >> block % 32 & 1;
    }

    // The largest score and the sum of weights of the rows that want it.
    __device__ __forceinline__ void sum_weights(const bool (&wanted)[2]) const {
        Range range = task.sight.columns_of(task.rows.row, 16);
        float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
            for (int col = range.begin / AT_ONCE * AT_ONCE; col < range.end; col += AT_ONCE) {
                if (!is_stored(col / BLOCK_COLS)) continue;
                float scores[4] = {};
                multiply_rows(scores, col);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int h = i / 2;
                    if (!counts(scores[i], h, col + int(threadIdx.x) % 4 * 2 + i % 2)) continue;
                    if (pass == 0) most[h] = fmaxf(most[h], scores[i]);
                    else sum[h] += weight(scores[i], h);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& value = pass == 0 ? most[h] : sum[h];
#pragma unroll
                for (int lane = 1; lane < 4; lane *= 2) {
                    float other = __shfl_xor_sync(ALL_LANES, value, lane);
                    value = pass == 0 ? fmaxf(value, other) : value + other;
                }
                if (wanted[h]) (pass == 0 ? stats.most : stats.sum)[h] = value;
            }
        }
    }

    // AT_ONCE features from `first` on, of the rows that want it.
    __device__ __forceinline__ void mend(int first, const bool (&wanted)[2], float factor) const {
        float sums[4] = {}, above[4] = {}, below[4] = {};
        Range range = task.sight.columns_of(task.rows.row, 16);
#pragma unroll 1
        for (int col = range.begin / AT_ONCE * AT_ONCE; col < range.end; col += AT_ONCE)
            if (is_stored(col / BLOCK_COLS)) add(sums, above, below, col, first);
        const Strides& strides = p.out_strides;
        InputT* to = p.out + batch * strides.batch + head * strides.head;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int h = i / 2, row = task.rows.of(h);
            int feature = first + int(threadIdx.x) % 4 * 2 + i % 2;
            float value = sums[i] * stats.share(h) * factor;
            bool up = above[i] > 0.0f, down = below[i] > 0.0f;
            if (up) value = down ? __uint_as_float(0x7fc00000) : -minus_infinity();
            else if (down) value = minus_infinity();
            if (wanted[h] && row < p.queries && feature < p.values)
                to[row * strides.row + feature] = convert<InputT>(value);
        }
    }
};

// After store_rows(). `met`: whether the warp has met tiles of which something is left out.
__device__ __forceinline__ void mend_rows(const float (&sums)[WIDTH / 2], Rows& stats,
                                          const Parameters& p, const Task& task, float scale,
                                          int head, int batch, float factor, bool met) {
    bool large[2] = {stats.is_large(0), stats.is_large(1)}, wanted[2];
    bool any_large = !HAS_SCORE && __any_sync(ALL_LANES, large[0] || large[1]);
    if (!met && !any_large) return;
    float check[2] = {};
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) check[i / 2 % 2] = fmaf(sums[i], 0.0f, check[i / 2 % 2]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 lanes = __ballot_sync(ALL_LANES, check[h] != 0.0f && stats.sum[h] > 0.0f);
        wanted[h] = large[h] || lanes >> (threadIdx.x % 32 & ~3u) & 15;
    }
    if (!__any_sync(ALL_LANES, wanted[0] || wanted[1])) return;
    Mender mender(p, task, stats, scale, head, batch);
    if (any_large) mender.sum_weights(large);
#pragma unroll 1
    for (int first = 0; first < p.values; first += AT_ONCE) mender.mend(first, wanted, factor);
}
