// Products with block-sparse matrices on Hopper, for blocks of 64 and 128, float32 at fp32 grade:
//   out[z, h, l, n] = Finish(sum_k op(S[z, h])[l, k] * dense[z, h, k, n]).
// Numbers are pairs of float16 words with scales, as pack.cuh packs them; a product is
// hi * hi + (lo * hi + hi * lo) / 2^11, which leaves out lo * lo, 2^-24 of it. What wgmma adds to
// is truncated, so 64 of the depth are summed, the small products apart, and added in fp32 times
// the scales of line and column. By an emulation of truncating sums normal numbers are off by
// 1.6e-7 of the result in norm for 1024 of the depth and by 2.0e-7 for 4096, positive ones by
// 2.1e-7 to 3.9e-7, with one bit more or fewer kept; chains of fp32 fma by 5.6e-7, 1.2e-6 and
// 5.0e-7 to 9.9e-7.
// Floors: those of pack.cuh; 6 * lines * depth operations a stored block and column over 768
// TFLOP/s; and from L2 to the multiprocessors, 9 TB/s, for a step of 64 along the depth 32 KB for
// the panel of 128 columns and 16 KB for each 64 x 64 piece of a block: 1690 clocks of a
// multiprocessor for two pieces, where wgmma takes 1536. That is 287 TFLOP/s for blocks of 128, and
// 208 and 230 for blocks of 64 at densities .25 and .5, where a step has 1.14 and 1.33 pieces.
// Reached on an H100 with the packing, at 4096 in all dimensions and these densities: 128 and 148
// TFLOP/s for blocks of 128, 122 and 143 for blocks of 64.
//
// Persistent CTAs as in hopper/hopper.cuh, whose walk, order and ring these are. A tile is 128
// lines by 128 columns, a warpgroup's 64 x 128: a thread has two times 64 accumulators and 64 sums,
// 192 of 208 registers. While one warpgroup adds, in 192 instructions of a thread, the other one's
// 768 clocks of wgmma go on. Stages are 64 KB, three of them; results are stored from registers.
//
// Facts, struct Fixed and multiply(...), one wgmma of 64 x 128 by 16, operands along the depth:
// class HopperWords of kernlib/families/blocksparse/kernels/spmm/hopper_words.py.
#pragma once

#include "blocksparse/hopper/run.cuh"
#include "blocksparse/hopper_words/store.cuh"

constexpr int LINES = Config::LINES, DEPTH = Config::DEPTH;  // of a block of op(S): 64 or 128 each
constexpr int WORDS = Config::WORDS, STAGES = Config::STAGES, STAGE_BYTES = Config::STAGE_BYTES;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PIECE_SCALES = 4 * SQUARE, PANEL_SCALES = 4 * TILE_COLUMNS;  // bytes
constexpr int SCALES_BYTES = WARPGROUPS * PIECE_SCALES + PANEL_SCALES;
static_assert(STAGE_BYTES == WARPGROUPS * PIECE_WORDS + PANEL_WORDS, "as the host lays it out");

// Of a stage the words of each warpgroup's piece, then those of the panel. Scales have twice as
// many places, behind the barriers: in each those of the warpgroups' lines, then of the columns.
constexpr int PANEL_AT = WARPGROUPS * PIECE_WORDS, SCALES_AT = STAGES * STAGE_BYTES + 128;
static_assert(STAGES * (2 * sizeof(u64) + WORDS * sizeof(u32)) <= 128, "barriers and words");

__device__ __forceinline__ unsigned char* scales_of(const Shared& s, const Ring& ring) {
    return s.stages + SCALES_AT + (ring.parity * STAGES + ring.stage) * SCALES_BYTES;
}

struct Copies {
    static constexpr int BYTES_A_PIECE = PIECE_WORDS + PIECE_SCALES;
    static constexpr int BYTES_A_PANEL = PANEL_WORDS + PANEL_SCALES;

    // One stage: the pieces that are stored, each asked for by a lane of its own, to which the walk
    // has given its line's slot, and the panel.
    __device__ __forceinline__ static void load(const Parameters& p, const Shared& s,
                                                const Tile& tile, const Ring& ring, int slot,
                                                u32 live, int block, int part) {
        int lane = threadIdx.x % 32;
        u64* full = &s.full[ring.stage];
        unsigned char *to = s.stages + ring.stage * STAGE_BYTES, *scales = scales_of(s, ring);
        if (lane < WARPGROUPS && live >> lane & 1) {
            int half = LINES == 64 ? 0 : lane;
            i64 piece = (i64(slot) * (LINES / 64) + half) * (DEPTH / STEP_DEPTH) + part;
            piece += tile.batch * p.piece_batch;
            load_bytes(to + lane * PIECE_WORDS, p.piece_words + piece * PIECE_WORDS, full,
                       PIECE_WORDS);
            load_bytes(scales + lane * PIECE_SCALES, p.piece_scales + piece * SQUARE, full,
                       PIECE_SCALES);
        } else if (lane == WARPGROUPS) {
            i64 panel = i64(tile.column) * p.depths + block * (DEPTH / STEP_DEPTH) + part;
            panel += tile.batch * p.panel_batch + tile.head * p.panel_head;
            load_bytes(to + PANEL_AT, p.panel_words + panel * PANEL_WORDS, full, PANEL_WORDS);
            load_bytes(scales + WARPGROUPS * PIECE_SCALES, p.panel_scales + panel * TILE_COLUMNS,
                       full, PANEL_SCALES);
        }
    }
};

// Begins the products of a stage, at an address in shared memory: of high words, and crosswise.
__device__ __forceinline__ void multiply_stage(float (&sums)[SUMS], float (&cross)[SUMS], u32 at,
                                               int warpgroup) {
    constexpr int APART = STEP * 2 / 16;  // from one wgmma's part to the next one's, by 16 bytes
    constexpr int LOW = SQUARE_BYTES / 16, PANEL_LOW = PANEL_WORDS / 2 / 16;
    u64 left = matrix_descriptor(at + warpgroup * PIECE_WORDS, 8 * ROW_BYTES, 8 * ROW_BYTES);
    u64 right = matrix_descriptor(at + PANEL_AT, 8 * ROW_BYTES, 8 * ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEP_DEPTH / STEP * APART; step += APART) {
        multiply(sums, left + step, right + step, step > 0);
        multiply(cross, left + LOW + step, right + step, step > 0);
        multiply(cross, left + step, right + PANEL_LOW + step, 1);
    }
    wgmma_commit();
}

// Adds a stage's sums times the scales of its lines and columns: of accumulator i line i / 2 % 2,
// and columns 8 * (i / 4) + i % 2 from a thread's first.
__device__ __forceinline__ void add(float (&total)[SUMS], const float (&sums)[SUMS],
                                    const float (&cross)[SUMS], const unsigned char* scales,
                                    int warpgroup) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    auto lines = reinterpret_cast<const float*>(scales + warpgroup * PIECE_SCALES);
    auto columns = reinterpret_cast<const float*>(scales + WARPGROUPS * PIECE_SCALES);
    float line[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) line[i] = lines[warp * 16 + lane / 4 + i * 8];
#pragma unroll
    for (int part = 0; part < SUMS / 4; ++part) {
        Vector<float, 2> column = load_vector<float, 2>(columns + part * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int at = part * 4 + i;
            float sum = fmaf(cross[at], CROSS_FACTOR, sums[at]) * line[i / 2];
            total[at] = fmaf(sum, column.element[i % 2], total[at]);
        }
    }
}

// Everything of one tile that this warpgroup adds up, times 1 / RESULT_FACTOR. A stage is given
// back before its sums are added: its scales stay until the second stage to come in its place.
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
            float sums[SUMS], cross[SUMS];
            u32 at = shared_address(s.stages + ring.stage * STAGE_BYTES);
            multiply_stage(sums, cross, at, warpgroup);
            wgmma_wait<0>();
            barrier_arrive_by_warp(&s.empty[ring.stage]);
            add(total, sums, cross, scales_of(s, ring), warpgroup);
        } else {
            barrier_arrive_by_warp(&s.empty[ring.stage]);
        }
        ring.next();
    } while (!(word & LAST));
}

struct Product {
    static constexpr int SUMS = ::SUMS;
    const Parameters& p;
    Finish finish;
    int warpgroup;

    __device__ __forceinline__ Product(const Parameters& p, const Shared&, int warpgroup)
        : p(p), finish(Read<Parameters>{p}), warpgroup(warpgroup) {}

    __device__ __forceinline__ Tile multiply(float (&total)[SUMS], const Shared& s, Ring& ring,
                                             int unit, int panel) const {
        multiply_tile(total, s, warpgroup, ring);
        return Tile(p, unit, panel);
    }
    __device__ __forceinline__ void store(const float (&total)[SUMS], const Tile& tile) const {
        store_tile(total, finish, p, tile, warpgroup);
    }
    __device__ __forceinline__ void end() const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_words(const __grid_constant__ Parameters p) {
    run<Product, Copies>(p);  // behind pack.cuh
}
