// Products with block-sparse matrices on Hopper, for blocks of 16 and 32 and half types:
//   out[z, h, l, n] = Finish(sum_k op(S[z, h])[l, k] * dense[z, h, k, n]).
// Floors: the stored blocks, the dense operand and the result once over 4.3 TB/s on an H200;
// 2 * lines * depth operations a stored block and column over 562 TFLOP/s for blocks of 16 and 876
// for those of 32, what wgmma of such a width reaches with an operand in registers; and what goes
// from L2 to the multiprocessors, 9 TB/s: a line of blocks along the depth that one of a tile's
// lines stores takes a panel of 256 columns: at 4096 in all dimensions 186, 281 and 462 TFLOP/s for
// blocks of 16 at density .1, .25, .5; 292, 356 and 485 for those of 32.
// Reached on an H100 by dsd: 91, 148 and 229, and 164, 232 and 301; by dds, whose columns are read
// by 32 or 64 bytes, 70, 103 and 158, and 141, 186 and 237.
//
// The product is computed across: wgmma's 64 rows are columns of the result, its columns a block's
// lines, so that a block is as wide as it is. A tile is 128 lines, 8 or 4 lines of blocks, by 256
// columns; the union of its lines' blocks is walked, PER steps of it a stage. The dense operand's
// fragments are read once a step and multiplied by all blocks that the lines store there. Four
// warps copy by cp.async, as a tensor copy costs one thread 62 ns and brings one block.
//
// The generated source defines multiply(...) before it includes this file: one wgmma of
// 64 x BLOCK by 16, its left operand in registers. Facts and struct Fixed: class Narrow of
// kernlib/families/blocksparse/kernels/spmm/narrow.py.
#pragma once

#include "blocksparse/hopper/parameters.cuh"
#include "blocksparse/hopper/pieces.cuh"
#include "common/async_copy.cuh"
#include "common/mma_half.cuh"

constexpr int BLOCK = Config::BLOCK;             // lines and depth of a block: 16 or 32
constexpr bool TRANSPOSED = Config::TRANSPOSED;  // op(S) is S^T: blocks are (depth, lines)
constexpr bool DEPTH_LAST = Config::DEPTH_LAST;  // dense has the depth side by side, else columns
constexpr bool LINES_LAST = Config::LINES_LAST;  // out has the lines side by side, else columns
constexpr int SUMMANDS = Config::SUMMANDS;
constexpr int WARPGROUPS = Config::WARPGROUPS, TILE_LINES = 128, TILE_COLUMNS = 256;
constexpr int GROUPS = Config::GROUPS;  // lines of blocks of a tile
constexpr int THREADS = 128 * (WARPGROUPS + 1), COPIERS = 128;
constexpr int CHUNK = 8;                       // elements of 16 bytes
constexpr int STAGE_DEPTH = 64;                // of a stage
constexpr int PER = STAGE_DEPTH / BLOCK;       // steps of a stage
constexpr int ACROSS = BLOCK / CHUNK;          // chunks of a block's row
constexpr int STEPS_OF_BLOCK = BLOCK / STEP;
constexpr int PANELS = TILE_COLUMNS / WARPGROUPS / 64;  // of 64 columns, of a warpgroup
constexpr int PANEL_BYTES = STAGE_DEPTH * TILE_COLUMNS * 2;
constexpr int BLOCK_BYTES = BLOCK * BLOCK * 2;
constexpr int STAGE_BYTES = PANEL_BYTES + PER * GROUPS * BLOCK_BYTES;
static_assert(STAGE_BYTES == Config::STAGE_BYTES, "as the host counts it");
constexpr int STAGES = Config::STAGES;         // under way
constexpr int WORDS = Config::WORDS;           // of a stage: a bit a block; whether it is its
                                               // tile's last; that one's place

#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/hopper/schedule.cuh"
#include "blocksparse/hopper/store.cuh"

// A thread's chunks of the dense operand, of one step after the other. What is the same for all
// steps of a tile is computed once: a step's copies take 33 instructions for blocks of 16, and 42
// for blocks of 32; 120 and 200 where each copy's address was computed by itself. Along the depth a
// stage has a row of 128 bytes for each column, else parts of 64 columns with one for each k.
struct Panel {
    static constexpr int ROW_CHUNKS = DEPTH_LAST ? ACROSS : TILE_COLUMNS / CHUNK;  // of a step
    static constexpr int COPIES = BLOCK * TILE_COLUMNS / CHUNK / COPIERS;
    static constexpr int APART = COPIERS / ROW_CHUNKS;        // rows from copy to copy
    static constexpr int PERIOD = APART < 8 ? 8 / APART : 1;  // copies until the swizzle recurs

    const InputT* from;  // the first chunk of block 0
    i64 apart, block;    // from copy to copy, from block to block
    u32 place[PERIOD];   // of the first copies, in a stage
    int count;           // columns that exist from the first chunk's on

    __device__ __forceinline__ Panel(const Parameters& p, const InputT* dense, int first) {
        int row = threadIdx.x % COPIERS / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS;
        from = dense + (DEPTH_LAST ? (first + row) * p.dense_row + chunk * CHUNK
                                   : row * p.dense_row + first + chunk * CHUNK);
        apart = APART * p.dense_row;
        block = DEPTH_LAST ? BLOCK : BLOCK * p.dense_row;
        count = p.columns - first - (DEPTH_LAST ? row : chunk * CHUNK);
#pragma unroll
        for (int i = 0; i < PERIOD; ++i)
            place[i] = chunk / 8 * PIECE_BYTES + chunk_address(0, row + i * APART, chunk % 8);
        // Kept in registers: the compiler would compute them anew for each copy.
        asm volatile("" : "+l"(from), "+l"(apart), "+l"(block), "+r"(count));
#pragma unroll
        for (u32& each : place) asm volatile("" : "+r"(each));
    }

    // How much is read of a copy's 16 bytes. Where columns are neighbours in the result, of which
    // the copy engine writes whole chunks, all of a chunk exist or none: said here, that saves two
    // instructions a copy.
    __device__ __forceinline__ int bytes(int copy) const {
        if (DEPTH_LAST) return copy * APART < count ? 16 : 0;
        if (LINES_LAST) return max(0, min(CHUNK, count)) * 2;
        return count > 0 ? 16 : 0;
    }

    // The chunks of step number `step` of a stage, which is block `at` along the depth.
    __device__ __forceinline__ void copy(unsigned char* to, int step, int at) const {
        const InputT* own = from + u64(u32(at)) * block;
        u32 turned = DEPTH_LAST ? step * ACROSS * 16 : 0;  // by the swizzle
        if (!DEPTH_LAST) to += step * BLOCK * ROW_BYTES;
#pragma unroll
        for (int i = 0; i < COPIES; ++i, own += apart) {
            int periods = i / PERIOD * (PERIOD * APART * ROW_BYTES);
            copy_async<16>(to + (place[i % PERIOD] ^ turned) + periods, own, bytes(i));
        }
    }
};

// A thread's chunk of stored blocks, of which all threads copy one of 32 or four of 16 at once: to
// matrices of eight rows of 16 bytes, of one chunk of the block those of all rows. Eight lanes that
// write together have rows of eight different places in such a matrix, and so different banks.
struct Blocks {
    static constexpr int CHUNKS = BLOCK * ACROSS, TOGETHER = COPIERS / CHUNKS;
    static constexpr int RUNS = GROUPS / TOGETHER;  // of a step

    const InputT* from;  // in slot 0
    i64 apart;           // from slot to slot
    u32 place;           // in a stage, of the first block
    int own;             // of the blocks that are copied at once

    __device__ __forceinline__ Blocks(const Parameters& p, const InputT* values)
        : apart(p.value_slot) {
        int index = threadIdx.x % CHUNKS, chunk = index % ACROSS;
        int row = index / ACROSS ^ chunk * (8 / ACROSS);
        own = threadIdx.x % COPIERS / CHUNKS;
        from = values + row * p.value_row + chunk * CHUNK;
        place = PANEL_BYTES + own * BLOCK_BYTES + (chunk * BLOCK + row) * 16;
        asm volatile("" : "+l"(from), "+r"(place), "+r"(own));  // as those of Panel
    }

    // Slots of this thread's blocks of a step, by all lanes, of which each knows a line's.
    __device__ __forceinline__ void find(u32 (&slots)[RUNS], int slot) const {
#pragma unroll
        for (int i = 0; i < RUNS; ++i) slots[i] = __shfl_sync(ALL, slot, i * TOGETHER + own);
    }
    // Those of step number `step` of a stage that are stored.
    __device__ __forceinline__ void copy(unsigned char* to, int step, u32 live,
                                         const u32 (&slots)[RUNS]) const {
        to += place + step * (GROUPS * BLOCK_BYTES);
        live >>= own;
#pragma unroll
        for (int i = 0; i < RUNS; ++i)
            if (live >> i * TOGETHER & 1)
                copy_async<16>(to + i * TOGETHER * BLOCK_BYTES, from + slots[i] * apart, 16);
    }
};

// The steps of a stage: what of them this thread copies, and for each block a bit that says whether
// it is stored.
struct Steps {
    int block[PER];  // along the depth, -1 behind the last one
    u32 live[PER], word, slots[PER][Blocks::RUNS];

    __device__ __forceinline__ Steps(Walk& walk, const Blocks& blocks) : word(0) {
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            int slot;
            block[i] = walk.next(live[i], slot);
            word |= live[i] << i * GROUPS;
            blocks.find(slots[i], slot);
        }
    }
    __device__ __forceinline__ bool is_last() const { return block[PER - 1] < 0; }
};

// What is said of a stage by one of the copying threads.
__device__ __forceinline__ void say(const Shared& s, int stage, u32 word, bool last, int unit,
                                    int panel) {
    u32* words = s.words + stage * WORDS;
    words[0] = word;
    words[1] = last;
    words[2] = unit;
    words[3] = panel;
    barrier_arrive(&s.full[stage]);
}

// The stages of one tile. Each of the copying warps walks all steps; a block of 16 is one warp's. A
// stage's steps are found before any is copied: by turns, each waiting for the one before, a step
// took 575 clocks whatever was stored, where L2 needs 210 for blocks of 16; so it takes 490.
__device__ __forceinline__ void produce_tile(const Parameters& p, const Shared& s, Ring& ring,
                                             int unit, int panel) {
    Tile tile(p, unit, panel);
    Walk walk(p, p.grid, tile.head, tile.group * GROUPS);
    const Blocks blocks(p, p.values + tile.batch * p.value_batch);
    const InputT* dense = p.dense + tile.batch * p.dense_batch + tile.head * p.dense_head;
    const Panel columns(p, dense, tile.column * TILE_COLUMNS);
    bool is_last;
    do {
        const Steps steps(walk, blocks);
        is_last = steps.is_last();
        wait_for_stage(s, ring);
        unsigned char* to = s.stages + ring.stage * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            if (steps.block[i] < 0) break;
            columns.copy(to, i, steps.block[i]);
            blocks.copy(to, i, steps.live[i], steps.slots[i]);
        }
        if (threadIdx.x % COPIERS == 0) say(s, ring.stage, steps.word, is_last, unit, panel);
        arrive_after_copies(&s.full[ring.stage]);
        ring.next();
    } while (!is_last);
}

// The copying warps: tile after tile, then a stage that says that there are no more.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring;
    Schedule<COPIERS / 32> schedule(p);
    int unit, panel;
    for (schedule.now(unit, panel); unit >= 0; schedule.now(unit, panel)) {
        schedule.take();
        produce_tile(p, s, ring, unit, panel);
        schedule.next(s.words + STAGES * WORDS);
    }
    wait_for_stage(s, ring);
    if (threadIdx.x % COPIERS == 0) say(s, ring.stage, 0, true, NO_TILE, 0);
    barrier_arrive(&s.full[ring.stage]);
    wait_for_copies();
}

// The dense operand's fragments of one step for this warpgroup: rows are columns of the result.
__device__ __forceinline__ void read_panel(u32 (&fragments)[PANELS][STEPS_OF_BLOCK][4], u32 at,
                                           int warpgroup, int step) {
    int warp = threadIdx.x % 128 / 32, matrix = threadIdx.x % 32 / 8, own = threadIdx.x % 8;
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        int part = warpgroup * PANELS + panel;
#pragma unroll
        for (int k = 0; k < STEPS_OF_BLOCK; ++k) {
            u32 address;
            if (DEPTH_LAST) {
                int row = part * 64 + warp * 16 + matrix % 2 * 8 + own;
                address = chunk_address(at, row, step * ACROSS + k * 2 + matrix / 2);
            } else {
                int row = step * BLOCK + k * STEP + matrix / 2 * 8 + own;
                address = chunk_address(at + part * PIECE_BYTES, row, warp * 2 + matrix % 2);
            }
            load_matrices<!DEPTH_LAST>(fragments[panel][k], address);
        }
    }
}

using Sums = float[PANELS][GROUPS][BLOCK / 2];

// The steps of a stage. All fragments are read first, also those of steps that a tile's last stage
// lacks, and products waited for once: of fragments that are read between products the compiler
// lets each read wait for all products before it.
__device__ __forceinline__ void multiply_stage(Sums& sums, const Shared& s, int stage, u32 word,
                                               int warpgroup) {
    // From chunk to chunk of 8 along the depth and along the lines, and from one wgmma's depth to
    // the next one's.
    constexpr int OF_ROWS = 128, OF_CHUNKS = BLOCK * 16;
    constexpr int ALONG_DEPTH = TRANSPOSED ? OF_ROWS : OF_CHUNKS;
    constexpr int ALONG_LINES = TRANSPOSED ? OF_CHUNKS : OF_ROWS;
    u32 at = shared_address(s.stages + stage * STAGE_BYTES);
    u32 fragments[PER][PANELS][STEPS_OF_BLOCK][4];
#pragma unroll
    for (int step = 0; step < PER; ++step) read_panel(fragments[step], at, warpgroup, step);
    at += PANEL_BYTES;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < PER * GROUPS; ++i) {
        if (!(word >> i & 1)) continue;
        u64 block = core_matrices_descriptor(at + i * BLOCK_BYTES, ALONG_DEPTH, ALONG_LINES);
#pragma unroll
        for (int k = 0; k < STEPS_OF_BLOCK; ++k)
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                multiply(sums[panel][i % GROUPS], fragments[i / GROUPS][panel][k],
                         block + k * (2 * ALONG_DEPTH / 16), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

__device__ __forceinline__ void store_tile(Sums& sums, const Finisher& finisher,
                                           const Parameters& p, unsigned char* out, int& place,
                                           const Tile& tile, int warpgroup) {
    constexpr int TOGETHER = 64 / BLOCK, OF_BLOCK = BLOCK / 2;  // lines of blocks of a part
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
        for (int part = 0; part < GROUPS / TOGETHER; ++part) {
            int line = tile.group * TILE_LINES + part * 64;
            int column = tile.column * TILE_COLUMNS + (warpgroup * PANELS + panel) * 64;
            auto sum = [&](int i) -> float& {
                return sums[panel][part * TOGETHER + i / OF_BLOCK][i % OF_BLOCK];
            };
            if (Config::EPILOGUE) {
#pragma unroll
                for (int i = 0; i < 32; ++i) sum(i) = finisher(sum(i), i, line, column);
            }
            store_part(sum, p, out, place, tile, warpgroup, line, column);
        }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int warpgroup) {
    Finish finish(Read<Parameters>{p});
    unsigned char* out = s.out + warpgroup * OUT_PARTS * PIECE_BYTES;
    Ring ring;
    int place = 0;
    while (true) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const u32* words = s.words + ring.stage * WORDS;
        int unit = words[2], panel = words[3];
        if (unit < 0) break;
        Sums sums = {};
        bool last;
        do {
            barrier_wait(&s.full[ring.stage], ring.parity);
            fence_shared_writes();  // which the copies were
            words = s.words + ring.stage * WORDS;
            u32 word = words[0];
            last = words[1];
            multiply_stage(sums, s, ring.stage, word, warpgroup);
            barrier_arrive_by_warp(&s.empty[ring.stage]);
            ring.next();
        } while (!last);
        Tile tile(p, unit, panel);
        store_tile(sums, Finisher(p, finish, tile), p, out, place, tile, warpgroup);
    }
    if (threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_narrow(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(COPIERS + 1);
    wait_for_prerequisites();  // order/order.cuh, where it is launched before
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        release_registers<72>();
        produce(p, s);
    } else {
        take_registers<216>();
        consume(p, s, warpgroup);
    }
}
