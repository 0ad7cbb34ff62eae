// Attention over the stored blocks of a layout on Hopper, in half types, values as wide as keys:
//   out[b, h, i] = sum_j softmax_j(score(scale <q[b, h, i], k[b, g, j]>)) v[b, g, j]
// over what is stored, seen by position (score.cuh) and not masked; lse of the logits beside it.
//
// Floors of 128 rows by 128 columns, by clocks of a multiprocessor, for 64 | 128 features:
//   products    512 | 1024 each, of two: 4096 operations a clock
//   exponentials 1024, 16 a clock, beside the products
//   issue       about 530 instructions a warp of two on each of four schedulers: 1060
//   from L2     K and V, 32 | 64 KB at 40 bytes a clock: 820 | 1640, twice that where each
//               warpgroup has blocks of its own, which so is bound by L2: 3280 of 128 features
// With products of one warpgroup beside exponentials of the other, 1300 | 2100 are to be expected,
// and 2500 more for each tile of rows, whose first products and last exponentials overlap with
// nothing: of 128 features, 16384 columns and blocks of 128 so 650 TFLOP/s at density .5, 570 at
// .1.
// Blocks of 64 at .1: below 576 by L2. Smaller ones multiply the union of a warpgroup's lines of
// blocks, of density d with n lines 1 - (1 - d)^n: 53 % of it is theirs for blocks of 32 and
// density .1, 29 % for blocks of 16.
//
// Persistent CTAs of a producer warp for each team (parameters.cuh), which walks the blocks of a
// tile of rows (gather.cuh) and gathers them to tiles of TILE_COLS columns by tensor copies, and
// two warpgroups of 64 rows each. Teams of two share K and V; teams of one have each its own rows,
// for blocks of fewer rows than 128. That members take turns at products, as two of a dense product
// do, changes nothing here of 128 features (to 1 %), and makes 64 slower (by 3 %). Scores stay in
// registers, where they become weights, the left operand of the second product.
//
// The generated source defines multiply(...) before it includes this file: one wgmma of
// 64 x TILE_COLS x 16 from shared memory, and one of 64 x WIDTH x 16 with the left operand in
// registers. Facts and struct Fixed: class Hopper of
// kernlib/families/blocksparse/kernels/attention/hopper.py.
#pragma once

#include "blocksparse/attention/hopper/parameters.cuh"

#include "blocksparse/attention/hopper/mend.cuh"
#include "blocksparse/attention/hopper/produce.cuh"
#include "common/overlap.cuh"

constexpr int SUMS = WIDTH / 2;  // of values, of a thread

// A matrix in shared memory as wgmma is told of it, and its parts: the address is a field of the
// lower word, which no step leaves. Of rows along the depth `atom_bytes` are not looked at.
struct Matrix {
    u32 low, high;
    __device__ __forceinline__ Matrix(u32 address, int atom_bytes) {
        u64 whole = matrix_descriptor(address, atom_bytes, 8 * ROW_BYTES);
        low = u32(whole);
        high = u32(whole >> 32);
    }
    __device__ __forceinline__ u64 from(int bytes) const {
        return u64(high) << 32 | (low + bytes / 16);
    }
};

// A warpgroup's scores of one tile: 64 rows of q times those of a slot of K.
__device__ __forceinline__ void multiply_keys(float (&scores)[SCORES], const Shared& s, int member,
                                              int stage) {
    Matrix left(shared_address(s.q) + member * (64 * ROW_BYTES), 16);
    Matrix right(shared_address(s.slot(stage)), 16);
    compute_here(left.low);  // 16 registers of descriptors would be kept between tiles
#pragma unroll
    for (int k = 0; k < FEATURES; k += STEP) {
        int chunk = k / ROW, within = k % ROW * 2;
        multiply(scores, left.from(chunk * Q_CHUNK + within),
                 right.from(chunk * SLOT_CHUNK + within), k > 0);
    }
    wgmma_commit();
}

// Its weights times a slot of V, added to sums.
__device__ __forceinline__ void multiply_values(float (&sums)[SUMS], const Weights& weights,
                                                const Shared& s, int stage) {
    Matrix right(shared_address(s.slot(stage)), SLOT_CHUNK);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        multiply(sums, weights[step], right.from(step * STEP * ROW_BYTES), 1);
    wgmma_commit();
}

// What a consumer's functions share.
struct Consumer {
    const Parameters& p;
    const Shared& s;
    int member;
    float scale, factor;  // of logits; of scores, to units of ln 2
};

// What a warp knows of the tiles of columns so far.
struct Progress {
    Rows stats;
    float shrink[2];  // what sums are to be multiplied by, unless it is 1 for all rows
    bool same;
    bool met;         // a tile of which something is left out
    Range behind;     // the rows of this tile's slot of V that lie behind the length of keys
};

// Weights in the place of products. Gives the slot of K back, and q behind the last one.
__device__ __forceinline__ void take_weights(float (&scores)[SCORES], Progress& progress,
                                             const Consumer& c, const Task& task, int stage) {
    const Note& note = c.s.note(stage);
    if (!HAS_SCORE && c.scale < 0.0f) {
#pragma unroll
        for (int i = 0; i < SCORES; ++i) scores[i] = -scores[i];
    }
    if (HAS_SCORE || HAS_MASK) change(scores, note, c.p, task.score, c.scale, task.rows);
    progress.behind = {0, 0};
    u32 flags = note.flags;
    if (flags & GAPS) leave_gaps(scores, note.stored[task.rows.line]);
    if (flags & CUT) {
        if (LENGTHS) progress.behind = rows_behind(note, task.sight.cols);
        cut(scores, note.columns, task.sight, task.rows);
    }
    if (flags & (GAPS | CUT)) progress.met = true;
    int columns[PIECES];
    if (DROPOUT) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) columns[i] = note.columns[i];
    }
    barrier_arrive_by_warp(&c.s.barriers().empty[stage]);
    if (flags & LAST) barrier_arrive_by_warp(&c.s.barriers().q_empty);
    progress.same = progress.stats.add(scores, progress.shrink);
    if (DROPOUT) drop(scores, columns, task.dropout, task.rows);
}

// Waits for a slot of V. Rows behind the length of keys, which may be anything, are zeros then.
__device__ __forceinline__ void wait_for_values(const Consumer& c, const Ring& ring,
                                                const Range& behind) {
    barrier_wait(&c.s.barriers().full[ring.stage], ring.parity);
    if (!LENGTHS || behind.is_empty()) return;
    unsigned char* slot = c.s.slot(ring.stage) + behind.begin * ROW_BYTES;
    int bytes = (behind.end - behind.begin) * ROW_BYTES;
#pragma unroll 1
    for (int at = int(threadIdx.x) % 128 * 16; at < bytes; at += 128 * 16) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            store_vector(reinterpret_cast<u32*>(slot + chunk * SLOT_CHUNK + at), Vector<u32, 4>{});
    }
    fence_shared_writes();
    sync_threads(8 + int(threadIdx.x) / 128, 128);
}

// Sums of values of a tile of rows. Products of the next tile of columns are under way while this
// one's are added, and these while the next one's become weights.
__device__ __forceinline__ void attend(float (&sums)[SUMS], Progress& progress, const Consumer& c,
                                       const Task& task, Ring& ring, int parity) {
    Weights weights;
    bool last = c.s.note(ring.stage).flags & LAST;
    {
        float scores[SCORES];
        barrier_wait(&c.s.barriers().q_full, parity);
        wgmma_fence();
        multiply_keys(scores, c.s, c.member, ring.stage);
        wgmma_wait<0>();
        keep_behind(scores);
        take_weights(scores, progress, c, task, ring.stage);
        ring.next();
        pack_weights(weights, scores);
    }
#pragma unroll 1
    while (!last) {
        float scores[SCORES];
        int keys = ring.stage;
        barrier_wait(&c.s.barriers().full[keys], ring.parity);
        last = c.s.note(keys).flags & LAST;
        wgmma_fence();
        multiply_keys(scores, c.s, c.member, keys);
        ring.next();
        wait_for_values(c, ring, progress.behind);
        keep_behind(sums);
        keep_words(weights);
        wgmma_fence();
        multiply_values(sums, weights, c.s, ring.stage);
        wgmma_wait<1>();
        keep_behind(scores);
        take_weights(scores, progress, c, task, keys);
        done_before(progress.stats.sum[0] + progress.stats.sum[1]);
        wgmma_wait<0>();
        keep_behind(sums);
        barrier_arrive_by_warp(&c.s.barriers().empty[ring.stage]);
        ring.next();
        if (!progress.same) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] *= progress.shrink[i / 2 % 2];
        }
        pack_weights(weights, scores);
    }
    wait_for_values(c, ring, progress.behind);
    keep_behind(sums);
    keep_words(weights);
    wgmma_fence();
    multiply_values(sums, weights, c.s, ring.stage);
    wgmma_wait<0>();
    keep_behind(sums);
    barrier_arrive_by_warp(&c.s.barriers().empty[ring.stage]);
    ring.next();
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int member) {
    float scale = read_scalar<float>(p.scale, 0);
    // Of a scale of 0 a factor that is next to nothing, as -inf stays -inf then.
    float factor = HAS_SCORE ? LOG2_E : fmaxf(fabsf(scale) * LOG2_E, 1e-30f);
    Consumer c = {p, s, member, scale, factor};
    Ring ring;
    int parity = 0;
#pragma unroll 1
    while (true) {
        barrier_wait(&s.barriers().full[ring.stage], ring.parity);
        const Note& note = s.note(ring.stage);
        u32 flags = note.flags;
        if (flags & EXIT) break;
        int head = note.head, batch = note.batch;
        Task task = {Sixteen(note.tile, member), sight_of(p, batch, p.queries, p.keys),
                     score_of<Score>(p, batch, head), dropout_of(p, batch * p.heads + head)};
        Progress progress = {Rows(factor), {1.0f, 1.0f}, true, HAS_MASK, {0, 0}};
        float sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        if (flags & EMPTY) {
            barrier_arrive_by_warp(&s.barriers().empty[ring.stage]);
            ring.next();
        } else {
            attend(sums, progress, c, task, ring, parity);
            parity ^= 1;
        }
        progress.stats.close(scale);
        float of_all = DROPOUT ? task.dropout.scale : 1.0f;
        store_rows(sums, progress.stats, p, head, batch, task.rows, of_all);
        __syncwarp();
        mend_rows(sums, progress.stats, p, task, scale, head, batch, of_all, progress.met);
        store_logarithms(progress.stats, p, head, batch, task.rows);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_attention_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    bool produces = warpgroup == WARPGROUPS;
    Shared s(shared, produces ? min(warp, TEAMS - 1) : warpgroup / MEMBERS);
    if (produces && warp < TEAMS && threadIdx.x % 32 == 0) {
        s.begin();
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_prerequisites();  // order/order.cuh, where it is launched before
    if (produces) {
        release_registers<PRODUCER_REGISTERS>();
        if (warp < TEAMS) produce(p, s, warp);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume(p, s, warpgroup % MEMBERS);
    }
}
