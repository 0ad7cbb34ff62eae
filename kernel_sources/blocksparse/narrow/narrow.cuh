// Products with block-sparse matrices on Hopper, for blocks of 16 and 32 and half types:
//   out[z, h, l, n] = Finish(sum_k op(S[z, h])[l, k] * dense[z, h, k, n]).
// Floors: the stored blocks, the dense operand and the result once over 4.3 TB/s on an H200;
// 2 * lines * depth operations a stored block and column over 562 TFLOP/s for blocks of 16 and 876
// for those of 32, what wgmma of such a width reaches with an operand in registers; and what goes
// from L2 to the multiprocessors, 9 TB/s: a line of blocks along the depth that one of a tile's
// lines stores takes a panel of 256 columns: at 4096 in all dimensions 186, 281 and 462 TFLOP/s for
// blocks of 16 at density .1, .25, .5; 292, 356 and 485 for those of 32.
//
// The product is computed across: wgmma's 64 rows are columns of the result, its columns a block's
// lines, so that a block is as wide as it is. A tile is 128 lines, 8 or 4 lines of blocks, by 256
// columns; the union of its lines' blocks is walked, PER steps of it a stage. The dense operand's
// fragments are read once a step and multiplied by all blocks that the lines store there. Four
// warps copy by cp.async, as a tensor copy costs one thread 62 ns and brings one block.
//
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT    storage of values, dense and vectors; arithmetic; storage of out
//   BLOCK                    lines and depth of a block: 16 or 32
//   TRANSPOSED               whether op(S) is S^T: blocks are (depth, lines) in memory
//   DEPTH_LAST               whether dense has the depth contiguous, else its columns
//   LINES_LAST               whether out has the lines contiguous, else its columns
//   VECTORS, SUMMANDS, SCALARS, Finish   the epilogue
//   multiply(...)            one wgmma of 64 x BLOCK by 16, its left operand in registers
//   PARAMETER_BYTES          what lowering makes of Parameters
#pragma once

constexpr int WARPGROUPS = 2, TILE_LINES = 128, TILE_COLUMNS = 256;
constexpr int GROUPS = TILE_LINES / BLOCK;  // lines of blocks of a tile
constexpr bool BY_MAPS = false, SUMS_ACROSS = true;

#include "blocksparse/hopper/parameters.cuh"
#include "common/async_copy.cuh"
#include "common/mma_half.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1), COPIERS = 128;
constexpr int ROW_BYTES = 128, ROW = 64;       // of shared memory: swizzled, elements
constexpr int CHUNK = 8;                       // elements of 16 bytes
constexpr int STAGE_DEPTH = 64, STEP = 16;     // of a stage, of one wgmma
constexpr int PER = STAGE_DEPTH / BLOCK;       // steps of a stage
constexpr int ACROSS = BLOCK / CHUNK;          // chunks of a block's row
constexpr int STEPS_OF_BLOCK = BLOCK / STEP;
constexpr int PANELS = TILE_COLUMNS / WARPGROUPS / 64;  // of 64 columns, of a warpgroup
constexpr int PIECE_BYTES = 64 * ROW_BYTES;
constexpr int PANEL_BYTES = STAGE_DEPTH * TILE_COLUMNS * 2;
constexpr int BLOCK_BYTES = BLOCK * BLOCK * 2;
constexpr int STAGE_BYTES = PANEL_BYTES + PER * GROUPS * BLOCK_BYTES;
constexpr int STAGES = 4, OUT_PARTS = 2;       // stages under way, parts of a warpgroup's result
constexpr int WORDS = 4;                       // of a stage: a bit a block; whether it is its
                                               // tile's last; that one's place

#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/hopper/schedule.cuh"
#include "blocksparse/hopper/store.cuh"

// The dense operand of one step, which is number `step` of its stage. Along the depth a stage has a
// row of 128 bytes for each column; else parts of 64 columns with one for each k.
__device__ __forceinline__ void copy_panel(const Parameters& p, const InputT* dense,
                                           unsigned char* to, int step, int block, int first) {
    constexpr int CHUNKS = BLOCK * TILE_COLUMNS / CHUNK;
#pragma unroll
    for (int i = 0; i < CHUNKS / COPIERS; ++i) {
        int index = i * COPIERS + threadIdx.x % COPIERS;
        const InputT* from;
        u32 place;
        int count = CHUNK;
        if (DEPTH_LAST) {
            int column = index / ACROSS, chunk = index % ACROSS;
            from = dense + (first + column) * p.dense_row + block * BLOCK + chunk * CHUNK;
            place = chunk_address(0, column, step * ACROSS + chunk);
            if (first + column >= p.columns) count = 0;
        } else {
            int row = index / (TILE_COLUMNS / CHUNK), chunk = index % (TILE_COLUMNS / CHUNK);
            from = dense + i64(block * BLOCK + row) * p.dense_row + first + chunk * CHUNK;
            place = chunk / 8 * PIECE_BYTES + chunk_address(0, step * BLOCK + row, chunk % 8);
            count = max(0, min(CHUNK, p.columns - first - chunk * CHUNK));
        }
        copy_async<16>(to + place, count ? from : dense, count * 2);
    }
}

// A stored block, to matrices of eight rows of 16 bytes: of one chunk those of all rows.
__device__ __forceinline__ void copy_block(const Parameters& p, const InputT* from,
                                           unsigned char* to) {
    constexpr int CHUNKS = BLOCK * ACROSS, THREADS_OF_BLOCK = CHUNKS < COPIERS ? CHUNKS : COPIERS;
    int index = threadIdx.x % THREADS_OF_BLOCK, row = index / ACROSS, chunk = index % ACROSS;
    copy_async<16>(to + (chunk * BLOCK + row) * 16, from + row * p.value_row + chunk * CHUNK, 16);
}

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

// The stages of one tile. Each of the copying warps walks all steps; a block of 16 is one warp's.
__device__ __forceinline__ void produce_tile(const Parameters& p, const Shared& s, Ring& ring,
                                             int unit, int panel) {
    constexpr int TOGETHER = BLOCK == 16 ? COPIERS / 32 : 1;  // blocks that are copied at once
    int own = BLOCK == 16 ? threadIdx.x % COPIERS / 32 : 0;
    Tile tile(p, unit, panel);
    Walk walk(p, p.grid, tile.head, tile.group * GROUPS);
    const InputT* values = p.values + tile.batch * p.value_batch;
    const InputT* dense = p.dense + tile.batch * p.dense_batch + tile.head * p.dense_head;
    bool more = true;
    while (more) {
        wait_for_stage(s, ring);
        unsigned char* to = s.stages + ring.stage * STAGE_BYTES;
        u32 word = 0;
#pragma unroll 1
        for (int step = 0; step < PER; ++step) {
            u32 live;
            int slot, block = walk.next(live, slot);
            more = block >= 0;
            if (!more) break;
            copy_panel(p, dense, to, step, block, tile.column * TILE_COLUMNS);
            word |= live << step * GROUPS;
#pragma unroll
            for (int first = 0; first < GROUPS; first += TOGETHER) {
                int g = first + own, from = __shfl_sync(ALL, slot, g);
                if (live >> g & 1)
                    copy_block(p, values + u64(from) * p.value_slot,
                               to + PANEL_BYTES + (step * GROUPS + g) * BLOCK_BYTES);
            }
        }
        if (threadIdx.x % COPIERS == 0) say(s, ring.stage, word, !more, unit, panel);
        arrive_after_copies(&s.full[ring.stage]);
        ring.next();
    }
}

// The copying warps: tile after tile, then a stage that says that there are no more.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring;
    Schedule<COPIERS / 32> schedule(p);
    int unit, panel;
    for (schedule.now(unit, panel); unit >= 0; schedule.now(unit, panel)) {
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

// The steps of a stage. Fragments that wgmma reads stay until the next step's are under way.
__device__ __forceinline__ void multiply_stage(Sums& sums, const Shared& s, int stage, u32 word,
                                               int warpgroup) {
    // From chunk to chunk of 8 along the depth and along the lines, and from one wgmma's depth to
    // the next one's.
    constexpr int OF_ROWS = 128, OF_CHUNKS = BLOCK * 16;
    constexpr int ALONG_DEPTH = TRANSPOSED ? OF_ROWS : OF_CHUNKS;
    constexpr int ALONG_LINES = TRANSPOSED ? OF_CHUNKS : OF_ROWS;
    u32 at = shared_address(s.stages + stage * STAGE_BYTES);
    u32 fragments[2][PANELS][STEPS_OF_BLOCK][4];
#pragma unroll
    for (int step = 0; step < PER; ++step) {
        u32 live = word >> (step * GROUPS) & ((1u << GROUPS) - 1);
        if (!live) break;
        auto& own = fragments[step % 2];
        read_panel(own, at, warpgroup, step);
        wgmma_fence();
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            if (!(live >> g & 1)) continue;
            u64 block = core_matrices_descriptor(
                at + PANEL_BYTES + (step * GROUPS + g) * BLOCK_BYTES, ALONG_DEPTH, ALONG_LINES);
#pragma unroll
            for (int k = 0; k < STEPS_OF_BLOCK; ++k)
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel)
                    multiply(sums[panel][g], own[panel][k], block + k * (2 * ALONG_DEPTH / 16), 1);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
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
            if (EPILOGUE) {
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
        release_registers<88>();
        produce(p, s);
    } else {
        take_registers<208>();
        consume(p, s, warpgroup);
    }
}
