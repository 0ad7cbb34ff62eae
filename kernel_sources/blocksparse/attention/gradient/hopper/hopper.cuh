// Gradients of attention over the stored blocks of a layout on Hopper, in half types, values as
// wide as keys: dq, or dk and dv.
//   P = exp(scores - log sum), dV = P^T dO, dS = P o (dO V^T - delta), dQ = dS K, dK = dS^T Q.
// Rows of op(S) have sums of their own, so that nothing is added up in memory: dq by a launch over
// S, dk and dv by one over S^T, whose weights are made again.
//
// Floors: of 5 products of 2 * 64 * 64 * features a 64 x 64 tile that a fused pass takes, these two
// launches take 7, at the 790 TFLOP/s of wgmma with one operand in registers; and 2^x and words of
// each element twice, 64 x 64 / 16 a clock of a multiprocessor.
//
// Captured tensors have what is made of dS before slopes of scores multiply it (collect.cuh): some
// operations an element in one of the launches, or of each pair a float in memory.
//
// A producer warp and one warpgroup of 64 rows, two CTAs on a multiprocessor; or two warpgroups,
// which of blocks below 128 multiply in vain what only the other half's lines store: 47 % of all at
// density .1, for blocks of 64. Per stage a warpgroup multiplies its rows by the columns of both
// operands (S and dO V^T, or their transposes, 64 x TILE_COLS); makes weights and slopes where
// their sums lie, which as words are the left operands of the products with the same columns that
// it adds up. The stage is given back when those of the next one have begun.
//
// The generated source defines multiply(...) before it includes this file: one wgmma of
// 64 x TILE_COLS by 16 from shared memory, and one of 64 x FEATURES by 16 with the left operand in
// registers. Facts and struct Fixed: class HopperGradient of
// kernlib/families/blocksparse/kernels/attention/gradient/hopper.py.
#pragma once

#include "blocksparse/attention/gradient/hopper/parameters.cuh"
#include "blocksparse/attention/gradient/hopper/produce.cuh"
#include "blocksparse/attention/gradient/hopper/weights.cuh"
#include "blocksparse/attention/gradient/hopper/collect.cuh"
#include "blocksparse/attention/store_rows.cuh"
#include "common/overlap.cuh"

constexpr int SUMS = FEATURES / 2;  // of a thread, of one result

// A warpgroup's rows of its own operand times the columns of a stage's.
__device__ __forceinline__ void multiply_columns(float (&products)[SCORES], const Shared& s,
                                                 int operand, int warpgroup, int stage) {
    u32 own = shared_address(s.own) + operand * OWN_BYTES + warpgroup * (64 * ROW_BYTES);
    u64 left = matrix_descriptor(own, 0, 8 * ROW_BYTES);
    u64 right = matrix_descriptor(shared_address(s.slot(stage, operand)), 0, 8 * ROW_BYTES);
#pragma unroll
    for (int k = 0; k < FEATURES; k += STEP) {
        int within = k % ROW * 2 / 16;
        multiply(products, left + k / ROW * (OWN_CHUNK / 16) + within,
                 right + k / ROW * (SLOT_CHUNK / 16) + within, k > 0);
    }
    wgmma_commit();
}

// Words of a tile's elements times the columns of a stage's operand, added to sums.
__device__ __forceinline__ void multiply_words(float (&sums)[SUMS], const Words& words,
                                               const Shared& s, int operand, int stage) {
    u32 slot = shared_address(s.slot(stage, operand));
    u64 right = matrix_descriptor(slot, SLOT_CHUNK, 8 * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        multiply(sums, words[step], right + step * (STEP * ROW_BYTES / 16), 1);
    wgmma_commit();
}

// Zeros in the rows of a stage's operands behind the last column that anybody sees: 0 times what
// lies there may be NaN.
__device__ __forceinline__ void clear_cut(const Shared& s, const View& view, int stage) {
    const Note& note = s.notes[stage];
    int end = TRANSPOSED ? view.sight.rows : view.sight.cols;
    constexpr int WORDS = ROW_BYTES / 16;
    for (int i = threadIdx.x; i < 2 * CHUNKS * TILE_COLS * WORDS; i += CONSUMERS) {
        int row = i / WORDS % TILE_COLS;
        if (note.columns[row / PIECE] + row % PIECE < end) continue;
        store_vector(reinterpret_cast<u32*>(s.slot(stage, 0) + i * 16), Vector<u32, 4>{});
    }
    fence_shared_writes();
    sync_threads(1, CONSUMERS);
}

// What a consumer's functions share.
struct Consumer {
    const Parameters& p;
    const Shared& s;
    int warpgroup;
    Place place;
    View view;
    Sixteen rows;
    RowNumbers own;
    float scale;  // of logits, times log2 e where score has nothing to say

    __device__ __forceinline__ Consumer(const Parameters& p, const Shared& s, int warpgroup)
        : p(p), s(s), warpgroup(warpgroup), place(p), view(view_of(p, place.batch)),
          rows(place.row(), warpgroup), own(p, place, rows) {
        scale = read_scalar<float>(p.scale, 0);
        if (!HAS_SCORE && !HAS_MASK) scale *= LOG2_E;
    }
};

__device__ __forceinline__ void add_stage(float (&first)[SUMS], float (&second)[SUMS],
                                          Collecting& collecting, const Consumer& c, int stage,
                                          int before) {
    const Note& note = c.s.notes[stage];
    u32 flags = note.flags;
    if (LENGTHS && flags & CUT) clear_cut(c.s, c.view, stage);
    Score score = score_of<Score>(c.p, c.place.batch, note.head);
    Dropout dropout = dropout_of(c.p, c.place.batch * c.p.heads + note.head);
    Elements tile(note, c.rows, c.view, TRANSPOSED ? c.s.numbers(stage, 0) : nullptr);
    u32 kept = DROPOUT ? kept_of(dropout, tile) : 0;
    float scores[SCORES], grads[SCORES], apart[SCORES];
    auto& weighed = COLLECTED > 0 ? apart : scores;
    wgmma_fence();
    multiply_columns(scores, c.s, 0, c.warpgroup, stage);
    wgmma_wait<1>();  // for the products with words of the stage before, which are registers
    keep_behind(first);
    if (TRANSPOSED) keep_behind(second);
    if (before >= 0) barrier_arrive_by_warp(&c.s.barriers->empty[before]);
    wgmma_fence();
    multiply_columns(grads, c.s, 1, c.warpgroup, stage);
    wgmma_wait<1>();
    keep_behind(scores);
    Words weights, slopes;
    bool partial = flags & (GAPS | EDGE);
    // A score is asked for rows and columns that exist alone.
    if (flags & EDGE || ((HAS_SCORE || HAS_MASK) && partial)) {
        take_weights<Left::all>(scores, weighed, weights, tile, c.own, c.scale, score, kept,
                                dropout.scale);
    } else if (!HAS_SCORE && !HAS_MASK && partial) {
        take_weights<Left::gaps>(scores, weighed, weights, tile, c.own, c.scale, score, kept,
                                 dropout.scale);
    } else {
        take_weights<Left::nothing>(scores, weighed, weights, tile, c.own, c.scale, score, kept,
                                    dropout.scale);
    }
    if (TRANSPOSED && EARLY) {
        keep_words(weights);
        wgmma_fence();
        multiply_words(second, weights, c.s, 1, stage);
    }
    wgmma_wait<0>();
    keep_behind(grads);
    if constexpr (COLLECTED > 0) {
        if (partial) {
            collect_slopes<true>(slopes, scores, weighed, grads, tile, c.own, c.scale, score, kept,
                                 dropout.scale, collecting, c.p, c.place.batch);
        } else {
            collect_slopes<false>(slopes, scores, weighed, grads, tile, c.own, c.scale, score, kept,
                                  dropout.scale, collecting, c.p, c.place.batch);
        }
    } else if (HAS_SCORE || HAS_MASK || partial) {
        take_slopes<true>(slopes, scores, grads, tile, c.own, kept, dropout.scale);
    } else {
        take_slopes<false>(slopes, scores, grads, tile, c.own, kept, dropout.scale);
    }
    if (TRANSPOSED && !EARLY) keep_words(weights);
    keep_words(slopes);
    wgmma_fence();
    if (TRANSPOSED && !EARLY) multiply_words(second, weights, c.s, 1, stage);
    multiply_words(first, slopes, c.s, 0, stage);
}

__device__ __forceinline__ void store(const float (&sums)[SUMS], InputT* to, const Strides& strides,
                                      const Consumer& c, float factor) {
    if (!to) return;
    int count = TRANSPOSED ? c.p.keys : c.p.queries;
    to += c.place.batch * strides.batch + c.place.head * strides.head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = c.rows.of(h);
        store_row<SUMS>(sums, h, to + row * strides.row, row < count, c.p.features, factor);
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int warpgroup) {
    Consumer c(p, s, warpgroup);
    float first[SUMS], second[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) first[i] = second[i] = 0.0f;
    if (COLLECTED > 0) {  // else ptxas sets them again where there is no stage, and products wait
        keep_behind(first);
        keep_behind(second);
    }
    Collecting collecting = {};
    const int lines = TRANSPOSED ? p.keys : p.queries;
    Ring ring;
    int before = -1, head = c.place.head * (TRANSPOSED ? p.group : 1);
    barrier_wait(&s.barriers->own, 0);
#pragma unroll 1
    while (true) {
        barrier_wait(&s.barriers->full[ring.stage], ring.parity);
        if (s.notes[ring.stage].flags & END) break;
        if (TRANSPOSED && COLLECTED > 0 && s.notes[ring.stage].head != head) {
            collecting.store(p, c.rows.of(0), lines, c.place.batch, head);
            head = s.notes[ring.stage].head;
        }
        add_stage(first, second, collecting, c, ring.stage, before);
        before = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    keep_behind(first);
    keep_behind(second);
    if (COLLECTED > 0) collecting.store(p, c.rows.of(0), lines, c.place.batch, head);
    store(first, p.first, p.first_strides, c, read_scalar<float>(p.scale, 0));
    if (TRANSPOSED) store(second, p.second, p.second_strides, c, 1.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPGROUPS == 1 ? 2 : 1)
blocksparse_attention_hopper_gradient(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin();
    wait_for_prerequisites();  // sums and deltas
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == 4 * WARPGROUPS) produce(p, s);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume(p, s, warpgroup);
    }
}
