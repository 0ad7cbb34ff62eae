// The stored blocks of a product of dense matrices on Hopper, for blocks of 64 and 128 and half
// types:
//   values[z, slot] = Finish(a[z, h, rows of the slot, :] * b[z, h, :, its columns]), 0 in slots
// that hold no block.
// Floors: the blocks written once at 3.37 TB/s on an H200, which is all at depths of 64 and 128;
// 2 * depth operations an element over 768 TFLOP/s; and from L2, 9 TB/s, 40 KB a step of 64 along
// the depth for four blocks of 64 in one line, 48 KB for two of 128: 470 and 790 TFLOP/s.
//
// Persistent CTAs of one producer warp and two warpgroups. A tile is SLOTS neighbouring slots that
// mostly are of one line and then share its rows of a: rows that several slots read are brought
// once. A warpgroup has 64 rows of each slot (blocks of 128 rows), else every other slot; of a lone
// block of 64 rows both compute all, 256 clocks a step beside 422 from L2, and one stores it.
// Few blocks are tiles of fewer slots: 102 of 128 in pairs would be 51 multiprocessors' 48 KB a
// step, one by one they are 102 multiprocessors' 32 KB.
//
// Facts, struct Fixed and multiply(...), one wgmma of 64 x COLS by 16: class SampledHopper of
// kernlib/families/blocksparse/kernels/sdd/sampled_hopper.py.
#pragma once

#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/hopper/stage_part.cuh"
#include "blocksparse/summands.cuh"

constexpr int ROWS = Config::ROWS, COLS = Config::COLS;  // of a block: 64 or 128 each
constexpr int SLOTS = Config::SLOTS;                     // of a tile: 1, 2, or 4 of 64 x 64
constexpr bool LEFT_LINES = Config::LEFT_LINES;    // a has the rows contiguous, else the depth
constexpr bool RIGHT_LINES = Config::RIGHT_LINES;  // b has the columns contiguous, else the depth
constexpr int SUMMANDS = Config::SUMMANDS;
constexpr int WARPGROUPS = Config::WARPGROUPS, THREADS = 128 * (WARPGROUPS + 1);
constexpr int STAGE_BYTES = Config::STAGE_BYTES;
constexpr int WORDS = Config::WORDS;  // of a stage: see Word; whether it is the tile's last

// Written at each launch.
struct Maps {
    TensorMap a, b, out;
};
struct Lists {
    const int *rows, *cols;
};
struct Parameters : Maps,
                    Lists,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr int HIGH = ROWS / 64, WIDE = COLS / 64;                      // pieces of a block
constexpr int OWN = (SLOTS * HIGH + 1) / 2;                            // slots of a warpgroup
constexpr bool ALONE = SLOTS * HIGH == 1;                              // one warpgroup stores
constexpr int LEFT_PIECES = SLOTS * HIGH, RIGHT_PIECES = SLOTS * WIDE;
constexpr int OUT_PARTS = 2;  // of a warpgroup's result under way
static_assert(STAGE_BYTES == (LEFT_PIECES + RIGHT_PIECES) * PIECE_BYTES, "as the host has it");
static_assert(LEFT_PIECES <= 4 && RIGHT_PIECES <= 4 && OWN * COLS <= 256, "as stages have room");

// What is said of a stage: for each slot, in four bits, whether it holds a block and which of the
// lines that were brought it reads.
struct Word {
    u32 bits;
    __device__ __forceinline__ bool live(int slot) const { return bits >> (4 * slot) & 8; }
    __device__ __forceinline__ int line(int slot) const { return bits >> (4 * slot) & 3; }
};

struct Tile {
    int first, batch;  // slot
    __device__ __forceinline__ Tile(const Parameters& p, u32 index)
        : first(index % p.groups * SLOTS), batch(index / p.groups) {}
};

// A tile's slots as the producer sees them.
struct Slots {
    int rows[SLOTS], cols[SLOTS];  // rows among all heads', -1 of a slot without a block
    int lines;                     // of blocks that differ
    Word word;

    __device__ __forceinline__ Slots(const Parameters& p, const Tile& tile) {
        lines = 0;
        word.bits = 0;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            bool exists = tile.first + i < p.capacity;
            rows[i] = exists ? p.rows[tile.first + i] : -1;
            cols[i] = exists ? p.cols[tile.first + i] : -1;
            if (rows[i] < 0) continue;
            if (i == 0 || rows[i] != rows[i ? i - 1 : 0]) ++lines;
            word.bits |= u32(8 | (lines - 1)) << (4 * i);
        }
    }
    __device__ __forceinline__ int count() const { return __popc(word.bits & 0x88888888u); }
};

// One stage: each piece asked for by a lane of its own, those of a line of blocks once.
__device__ __forceinline__ void load_stage(const Parameters& p, const Shared& s, const Tile& tile,
                                           const Slots& slots, int stage, int step) {
    int lane = threadIdx.x % 32, depth = step * STEP_DEPTH;
    u64* full = &s.full[stage];
    if (lane == 0) {
        s.words[WORDS * stage] = slots.word.bits;
        s.words[WORDS * stage + 1] = step == p.steps - 1;
        barrier_expect(full, (slots.lines * HIGH + slots.count() * WIDE) * PIECE_BYTES);
    }
    __syncwarp();
    unsigned char* to = s.stages + stage * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        if (!slots.word.live(i)) continue;
        int head = slots.rows[i] / p.grid_rows, row = slots.rows[i] % p.grid_rows * ROWS;
        int line = slots.word.line(i);
        bool own = i == 0 || !slots.word.live(i ? i - 1 : 0) ||
                   slots.word.line(i ? i - 1 : 0) != line;
#pragma unroll
        for (int half = 0; half < HIGH; ++half) {
            if (!own || lane != i * HIGH + half) continue;
            int at = row + half * 64;
            load_box(to + (line * HIGH + half) * PIECE_BYTES, p.a, full, LEFT_LINES ? at : depth,
                     LEFT_LINES ? depth : at, head * p.a_heads, tile.batch * p.a_batches);
        }
#pragma unroll
        for (int half = 0; half < WIDE; ++half) {
            if (lane != LEFT_PIECES + i * WIDE + half) continue;
            int at = slots.cols[i] * COLS + half * 64;
            load_box(to + (LEFT_PIECES + i * WIDE + half) * PIECE_BYTES, p.b, full,
                     RIGHT_LINES ? at : depth, RIGHT_LINES ? depth : at, head * p.b_heads,
                     tile.batch * p.b_batches);
        }
    }
}

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring;
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        Slots slots(p, tile);
        int steps = slots.lines ? p.steps : 0;
        if (steps == 0) {  // a stage that nothing is copied to
            wait_for_stage(s, ring);
            if (threadIdx.x % 32 == 0) {
                s.words[WORDS * ring.stage] = 0;
                s.words[WORDS * ring.stage + 1] = 1;
                barrier_arrive(&s.full[ring.stage]);
            }
            ring.next();
        }
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            wait_for_stage(s, ring);
            load_stage(p, s, tile, slots, ring.stage, step);
            ring.next();
        }
    }
}

using Sums = float[OWN][COLS / 2];

// A warpgroup's slot number i among the tile's, and its rows there.
__device__ __forceinline__ int slot_of(int i, int warpgroup) {
    return HIGH == 2 || SLOTS == 1 ? i : i * WARPGROUPS + warpgroup;
}
__device__ __forceinline__ int half_of_slot(int warpgroup) { return HIGH == 2 ? warpgroup : 0; }

// Everything of one tile that this warpgroup adds up; the answer is which slots hold a block. What
// stages hold for others is multiplied too, and dropped: in a branch that threads may take apart
// each wgmma would wait for the one before.
__device__ __forceinline__ Word multiply_tile(Sums& sums, const Shared& s, int warpgroup,
                                              Ring& ring) {
    // From one wgmma's part of an operand to the next one's, in units of 16 bytes: 32 bytes along
    // a row of depth, or 16 rows.
    constexpr int LEFT_STEP = LEFT_LINES ? STEP * ROW_BYTES / 16 : 2;
    constexpr int RIGHT_STEP = RIGHT_LINES ? STEP * ROW_BYTES / 16 : 2;
    Word word;
    int pending = -1;
    bool last;
    do {
        barrier_wait(&s.full[ring.stage], ring.parity);
        word.bits = s.words[WORDS * ring.stage];
        last = s.words[WORDS * ring.stage + 1];
        u32 at = shared_address(s.stages + ring.stage * STAGE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int slot = slot_of(i, warpgroup);
            int piece = word.line(slot) * HIGH + half_of_slot(warpgroup);
            u64 left = matrix_descriptor(at + piece * PIECE_BYTES, PIECE_BYTES, 8 * ROW_BYTES);
            u64 right = matrix_descriptor(at + (LEFT_PIECES + slot * WIDE) * PIECE_BYTES,
                                          PIECE_BYTES, 8 * ROW_BYTES);
#pragma unroll
            for (int step = 0; step < STEP_DEPTH / STEP; ++step)
                multiply(sums[i], left + step * LEFT_STEP, right + step * RIGHT_STEP, 1);
        }
        wgmma_commit();
        if (pending >= 0) {
            wgmma_wait<1>();
            barrier_arrive_by_warp(&s.empty[pending]);
        }
        pending = ring.stage;
        ring.next();
    } while (!last);
    wgmma_wait<0>();
    barrier_arrive_by_warp(&s.empty[pending]);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (word.live(slot_of(i, warpgroup))) continue;
#pragma unroll
        for (int k = 0; k < COLS / 2; ++k) sums[i][k] = 0.0f;
    }
    return word;
}

__device__ __forceinline__ void store_tile(Sums& sums, const Word& word, const Finish& finish,
                                           const Parameters& p, unsigned char* out, int& place,
                                           const Tile& tile, int warpgroup) {
    bool leader = threadIdx.x % 128 == 0;
    int lane = threadIdx.x % 32, half = half_of_slot(warpgroup) * 64;
    int row = half + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int own = slot_of(i, warpgroup), slot = tile.first + own;
        if (Config::EPILOGUE && word.live(own)) {
            Beside<SUMMANDS> beside(p, finish, tile.batch, slot, row, lane % 4 * 2);
#pragma unroll
            for (int k = 0; k < COLS / 2; ++k) {
                Given<SUMMANDS> given;
                given.read(beside, k / 2 % 2 * 8, k / 4 * 8 + k % 2);
                sums[i][k] = given.finished(finish, sums[i][k], 0);
            }
        }
#pragma unroll
        for (int part = 0; part < WIDE; ++part) {
            unsigned char* staged = out + place * PIECE_BYTES;
            if (leader) wait_for_reads<OUT_PARTS - 1>();
            sync_threads(1 + warpgroup, 128);
            stage_part([&](int k) { return sums[i][part * 32 + k]; }, shared_address(staged));
            fence_shared_writes();
            sync_threads(1 + warpgroup, 128);
            if (leader && slot < p.capacity)
                store_box(p.out, staged, part * 64, half, slot, tile.batch);
            if (leader) commit_stores();
            if (++place == OUT_PARTS) place = 0;
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int warpgroup) {
    Finish finish(Read<Parameters>{p});
    unsigned char* out = s.out + warpgroup * OUT_PARTS * PIECE_BYTES;
    Ring ring;
    int place = 0;
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        Sums sums = {};
        Word word = multiply_tile(sums, s, warpgroup, ring);
        if (!ALONE || warpgroup == 0)
            store_tile(sums, word, finish, p, out, place, tile, warpgroup);
    }
    if (threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_sampled_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(1);
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        release_registers<40>();
        if (threadIdx.x / 32 == 4 * WARPGROUPS) produce(p, s);
    } else {
        take_registers<232>();
        consume(p, s, warpgroup);
    }
}
