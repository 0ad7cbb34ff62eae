// Products of float32 with block-sparse matrices on Hopper, at fp32 grade, for blocks of 64 and 128:
//   out[z, h, l, n] = Finish(sum_k op(S[z, h])[l, k] * dense[z, h, k, n]).
// Numbers are pairs of float16 words with scales, as words/pack.cuh has packed them; a product is
// lo * hi + hi * lo + hi * hi, which leaves out lo * lo, 2^-24 of a product. What one wgmma after the
// other adds to is truncated, so 64 of the depth are summed, the small products first, and that sum
// is added in fp32, times the scales of its line and its column. In an emulation of truncating
// sums, normal numbers at n = 4096 are off by 1.0e-7 of the result in norm, positive ones by
// 1.4e-7; cuBLAS's fp32 products of such a depth by 3e-7 and more.
// Floors: those of words/pack.cuh; 6 * lines * depth operations a stored block and column over 768
// TFLOP/s; and from L2 to the multiprocessors, 9 TB/s, for a step of 64 along the depth 32 KB for
// the panel of 128 columns and 16 KB for each 64 x 64 piece of a block: 1690 clocks of a
// multiprocessor for two pieces, where wgmma takes 1536. That is 287 TFLOP/s for blocks of 128, and
// 214 and 250 for blocks of 64 at densities .25 and .5, where a step has 1.14 and 1.33 pieces.
//
// Persistent CTAs as in hopper/hopper.cuh, whose walk, order and ring these are. A tile is 128 lines
// by 128 columns, a warpgroup's 64 x 128: 64 accumulators of a thread, 64 sums and the scales of 32
// columns and two lines, which it reads while wgmma runs. While one warpgroup adds, 250 clocks, the
// other one multiplies, 768. Stages are 65 KB, three of them; results are stored from registers.
//
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT    float
//   LINES, DEPTH             of a block of op(S): 64 or 128 each
//   TRANSPOSED               whether op(S) is S^T: a line of its blocks is a column of the layout
//   VECTORS, SUMMANDS, SCALARS, Finish   the epilogue
//   multiply(...)            one wgmma of 64 x 128 by 16, operands along the depth
//   PARAMETER_BYTES          what lowering makes of Parameters
#pragma once

constexpr int WARPGROUPS = 2, TILE_LINES = 64 * WARPGROUPS;
constexpr int GROUPS = TILE_LINES / LINES;  // lines of blocks of a tile

#include "blocksparse/words/format.cuh"
#include "blocksparse/words/parameters.cuh"
#include "common/hopper.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int SUMS = TILE_COLUMNS / 2;           // accumulators of a thread
constexpr int STEP_DEPTH = ROW, STEP = 16;       // of a stage, of one wgmma
constexpr int PIECE_SCALES = 4 * SQUARE, PANEL_SCALES = 4 * TILE_COLUMNS;  // bytes
constexpr int PIECE_BYTES = PIECE_WORDS + PIECE_SCALES;
constexpr int PANEL_BYTES = PANEL_WORDS + PANEL_SCALES;
constexpr int STAGE_BYTES = WARPGROUPS * PIECE_BYTES + PANEL_BYTES;
constexpr int STAGES = 3, OUT_PARTS = 0;         // under way; results take no shared memory
constexpr int WORDS = 3;                         // of a stage: live pieces, and its tile's place
constexpr u32 BOTH = (1u << WARPGROUPS) - 1;     // a bit a warpgroup
constexpr u32 LAST = 1u << WARPGROUPS;           // beside these: of a tile's last stage
static_assert(STAGE_BYTES % 1024 == 0, "the swizzle counts rows from there");

#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/words/store.cuh"

// Of a stage, in this order: words of each warpgroup's piece and of the panel, then their scales.
constexpr int PANEL_AT = WARPGROUPS * PIECE_WORDS, SCALES_AT = PANEL_AT + PANEL_WORDS;
constexpr int PANEL_SCALES_AT = SCALES_AT + WARPGROUPS * PIECE_SCALES;

// One stage: the pieces that are stored, each asked for by a lane of its own, to which the walk has
// given its line's slot, and the panel.
__device__ __forceinline__ void load_stage(const Parameters& p, const Shared& s, const Tile& tile,
                                           int stage, int slot, u32 live, int block, int part) {
    int lane = threadIdx.x % 32;
    u64* full = &s.full[stage];
    unsigned char* to = s.stages + stage * STAGE_BYTES;
    if (lane < WARPGROUPS && live >> lane & 1) {
        int half = LINES == 64 ? 0 : lane;
        i64 piece = (i64(slot) * (LINES / 64) + half) * (DEPTH / STEP_DEPTH) + part;
        piece += tile.batch * p.piece_batch;
        load_bytes(to + lane * PIECE_WORDS, p.piece_words + piece * PIECE_WORDS, full, PIECE_WORDS);
        load_bytes(to + SCALES_AT + lane * PIECE_SCALES, p.piece_scales + piece * SQUARE, full,
                   PIECE_SCALES);
    } else if (lane == WARPGROUPS) {
        i64 panel = i64(tile.column) * p.depths + block * (DEPTH / STEP_DEPTH) + part;
        panel += tile.batch * p.panel_batch + tile.head * p.panel_head;
        load_bytes(to + PANEL_AT, p.panel_words + panel * PANEL_WORDS, full, PANEL_WORDS);
        load_bytes(to + PANEL_SCALES_AT, p.panel_scales + panel * TILE_COLUMNS, full, PANEL_SCALES);
    }
}

#include "blocksparse/hopper/produce.cuh"

// Begins the products of a stage, at an address in shared memory: those of low words, which are
// 2^-11 of the others, while the sums are small.
__device__ __forceinline__ void multiply_stage(float (&sums)[SUMS], u32 at, int warpgroup) {
    constexpr int APART = STEP * 2 / 16;  // from one wgmma's part to the next one's, by 16 bytes
    constexpr int LOW = SQUARE_BYTES / 16, PANEL_LOW = PANEL_WORDS / 2 / 16;
    u64 left = matrix_descriptor(at + warpgroup * PIECE_WORDS, 8 * ROW_BYTES, 8 * ROW_BYTES);
    u64 right = matrix_descriptor(at + PANEL_AT, 8 * ROW_BYTES, 8 * ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEP_DEPTH / STEP * APART; step += APART) {
        multiply(sums, left + LOW + step, right + step, step > 0);
        multiply(sums, left + step, right + PANEL_LOW + step, 1);
    }
#pragma unroll
    for (int step = 0; step < STEP_DEPTH / STEP * APART; step += APART)
        multiply(sums, left + step, right + step, 1);
    wgmma_commit();
}

// The scales of a thread's two lines and of its columns: of accumulator i line i / 2 % 2, and
// columns 8 * (i / 4) + i % 2 from its first.
struct Scales {
    float line[2];
    Vector<float, 2> column[SUMS / 4];

    __device__ __forceinline__ void read(const unsigned char* stage, int warpgroup) {
        int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        auto lines = reinterpret_cast<const float*>(stage + SCALES_AT) + warpgroup * SQUARE +
                     warp * 16 + lane / 4;
        auto columns = reinterpret_cast<const float*>(stage + PANEL_SCALES_AT) + lane % 4 * 2;
        line[0] = lines[0];
        line[1] = lines[8];
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) column[i] = load_vector<float, 2>(columns + i * 8);
    }
    __device__ __forceinline__ void add(float (&total)[SUMS], const float (&sums)[SUMS]) const {
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            total[i] = fmaf(sums[i] * line[i / 2 % 2], column[i / 4].element[i % 2], total[i]);
    }
};

// Everything of one tile that this warpgroup adds up, times 1 / RESULT_FACTOR.
__device__ __forceinline__ void multiply_tile(float (&total)[SUMS], const Shared& s, int warpgroup,
                                              Ring& ring) {
    u32 word;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) total[i] = 0.0f;
#pragma unroll 1
    do {
        barrier_wait(&s.full[ring.stage], ring.parity);
        word = s.words[ring.stage * WORDS];
        if (word >> warpgroup & 1) {
            const unsigned char* stage = s.stages + ring.stage * STAGE_BYTES;
            float sums[SUMS];
            Scales scales;
            multiply_stage(sums, shared_address(stage), warpgroup);
            scales.read(stage, warpgroup);
            wgmma_wait<0>();
            barrier_arrive_by_warp(&s.empty[ring.stage]);
            scales.add(total, sums);
        } else {
            barrier_arrive_by_warp(&s.empty[ring.stage]);
        }
        ring.next();
    } while (!(word & LAST));
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int warpgroup) {
    Finish finish(Read<Parameters>{p});
    Ring ring;
    while (true) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const u32* words = s.words + ring.stage * WORDS;
        int unit = words[1], panel = words[2];
        if (unit < 0) break;
        float total[SUMS];
        multiply_tile(total, s, warpgroup, ring);
        store_tile(total, finish, p, Tile(p, unit, panel), warpgroup);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_words(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(1);
    wait_for_prerequisites();  // pack.cuh, and order/order.cuh where it is launched before
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        release_registers<88>();
        if (threadIdx.x / 32 == 4 * WARPGROUPS) produce(p, s);
    } else {
        take_registers<208>();
        consume(p, s, warpgroup);
    }
}
