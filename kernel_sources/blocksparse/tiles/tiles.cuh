// The stored blocks of a product of dense matrices on Hopper, for square blocks of 16, 32 and 64
// and half types, where tiles have many of them:
//   values[z, slot] = Finish(a[z, h, rows of the slot, :] * b[z, h, :, its columns]), 0 in slots
// that hold no block.
// Floors on an H200: 2 * 128 * 256 * depth operations a tile that has a block over 768 TFLOP/s,
// whatever it stores of them: 0.18 ms at 4096 in all dimensions; and from L2, 9 TB/s, 48 KB a tile
// and step of 64 along the depth: 700 TFLOP/s. A block of 16 by itself takes 4 KB of each 64 of the
// depth, a 64th of the operations: 35 TFLOP/s. So from some density on to multiply all of a tile,
// as dense products do, and to store what is asked for takes less time: at a depth of 4096 from .15
// on for blocks of 16, .22 for 32 and .31 for 64.
// Reached on an H100, as a part of gradients at 4096: 0.19 ms, 720 TFLOP/s of all it multiplies.
//
// Persistent CTAs of one producer warp and two warpgroups of 64 x 256 sums each. Tiles without a
// block are passed over: the producer looks at the bits of a tile's lines, a lane at each, while
// the one before is multiplied. A warp has 16 rows of one line of blocks; it stores through rows of
// shared memory, 64 columns at a time, 512 bytes that lie side by side for each 16 columns.
//
// Sums are in order of depth, one after the other: bits depend on neither layout nor batch.
//
// Facts, struct Fixed and multiply(...), one wgmma of 64 x 256 by 16: class Tiles of
// kernlib/families/blocksparse/kernels/sdd/tiles.py.
#pragma once

#include "blocksparse/clear.cuh"
#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/hopper/stage_part.cuh"
#include "common/parameters.cuh"

using OutputT = Config::OutputT;      // storage of values
constexpr int BLOCK = Config::BLOCK;  // rows and columns of a block: 16, 32 or 64
constexpr bool LEFT_LINES = Config::LEFT_LINES;    // a has the rows contiguous, else the depth
constexpr bool RIGHT_LINES = Config::RIGHT_LINES;  // b has the columns contiguous, else the depth
constexpr int WARPGROUPS = Config::WARPGROUPS, STAGE_BYTES = Config::STAGE_BYTES;
constexpr int WORDS = Config::WORDS;  // of a stage: its tile; whether it is the last

// Written at each launch.
struct Maps {
    TensorMap a, b;
};
struct Lists {
    const u32* row_bits;
    const int* row_ranks;
    const u32* counts;  // of which the first is how many slots hold a block
    OutputT* out;
};
struct Parameters : Maps,
                    Lists,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr u32 ALL = 0xffffffffu;  // lanes
constexpr int WARPS = 4 * WARPGROUPS, THREADS = 128 * (WARPGROUPS + 1);
constexpr int TILE_LINES = 64 * WARPGROUPS, TILE_COLUMNS = 256;
constexpr int SUMS = TILE_COLUMNS / 2;            // accumulators of a thread
constexpr int LEFT_PIECES = WARPGROUPS, PIECES = LEFT_PIECES + TILE_COLUMNS / 64;
static_assert(STAGE_BYTES == PIECES * PIECE_BYTES, "as the host lays it out");
constexpr u32 NO_TILE = ALL;

constexpr int LINES = TILE_LINES / BLOCK;         // of blocks of a tile
constexpr int TILE_BLOCKS = TILE_COLUMNS / BLOCK, WORD_TILES = 32 / TILE_BLOCKS;
constexpr u32 TILE_BITS = (1u << TILE_BLOCKS) - 1;
constexpr int PART_BLOCKS = 64 / BLOCK;           // of 64 columns
constexpr u32 PART_BITS = (1u << PART_BLOCKS) - 1;
constexpr int CHUNKS = BLOCK / 8;                 // of 16 bytes, of a row of a block

// 128 rows by 256 columns of a head and batch. One panel after the other, down which neighbouring
// CTAs share columns of b.
struct Tile {
    int group, panel, head, batch;

    __device__ __forceinline__ Tile(const Parameters& p, u32 index) {
        group = int(index % p.groups);
        index /= p.groups;
        panel = int(index % p.panels);
        index /= p.panels;
        head = int(index % p.heads);
        batch = int(index / p.heads);
    }
};

// What a tile stores of one line of blocks: a bit each, and the slot of the first.
struct Line {
    u32 bits;
    int slot;

    __device__ __forceinline__ Line(const Parameters& p, const Tile& tile, int line)
        : bits(0), slot(0) {
        if (line >= p.grid_rows) return;
        i64 at = (i64(tile.head) * p.grid_rows + line) * p.row_words + tile.panel / WORD_TILES;
        int place = tile.panel % WORD_TILES * TILE_BLOCKS;
        u32 word = p.row_bits[at];
        bits = word >> place & TILE_BITS;
        slot = p.row_ranks[at] + __popc(word & ((1u << place) - 1));
    }
};

// The bits of one of a tile's lines a lane, of all lanes none behind the last tile.
__device__ __forceinline__ u32 bits_of_lane(const Parameters& p, u32 index) {
    int lane = threadIdx.x % 32;
    if (index >= p.tiles || lane >= LINES) return 0;
    Tile tile(p, index);
    return Line(p, tile, tile.group * LINES + lane).bits;
}

// One stage: each piece asked for by a lane of its own.
__device__ __forceinline__ void load_stage(const Parameters& p, const Shared& s, const Tile& tile,
                                           u32 index, int stage, int step) {
    int lane = threadIdx.x % 32, depth = step * STEP_DEPTH;
    u64* full = &s.full[stage];
    if (lane == 0) {
        s.words[WORDS * stage] = index;
        s.words[WORDS * stage + 1] = step == p.steps - 1;
        barrier_expect(full, STAGE_BYTES);
    }
    __syncwarp();
    unsigned char* to = s.stages + stage * STAGE_BYTES + lane * PIECE_BYTES;
    if (lane < LEFT_PIECES) {
        int row = tile.group * TILE_LINES + lane * 64;
        load_box(to, p.a, full, LEFT_LINES ? row : depth, LEFT_LINES ? depth : row,
                 tile.head * p.a_heads, tile.batch * p.a_batches);
    } else if (lane < PIECES) {
        int column = tile.panel * TILE_COLUMNS + (lane - LEFT_PIECES) * 64;
        load_box(to, p.b, full, RIGHT_LINES ? column : depth, RIGHT_LINES ? depth : column,
                 tile.head * p.b_heads, tile.batch * p.b_batches);
    }
}

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring;
    u32 bits = bits_of_lane(p, blockIdx.x);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        bool any = __any_sync(ALL, bits != 0);
        bits = bits_of_lane(p, index + gridDim.x);  // arrives meanwhile
        if (!any) continue;
        Tile tile(p, index);
#pragma unroll 1
        for (int step = 0; step < p.steps; ++step) {
            wait_for_stage(s, ring);
            load_stage(p, s, tile, index, ring.stage, step);
            ring.next();
        }
    }
    wait_for_stage(s, ring);
    if (threadIdx.x % 32 == 0) {
        s.words[WORDS * ring.stage] = NO_TILE;
        barrier_arrive(&s.full[ring.stage]);
    }
}

// Everything of one tile that this warpgroup adds up. A stage is given back when the products of
// the next one are under way.
__device__ __forceinline__ void multiply_tile(float (&sums)[SUMS], const Shared& s, int warpgroup,
                                              Ring& ring) {
    // From one wgmma's part of an operand to the next one's, in units of 16 bytes: 32 bytes along
    // a row of depth, or 16 rows.
    constexpr int LEFT_STEP = LEFT_LINES ? STEP * ROW_BYTES / 16 : 2;
    constexpr int RIGHT_STEP = RIGHT_LINES ? STEP * ROW_BYTES / 16 : 2;
    int pending = -1;
    bool last;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    do {
        barrier_wait(&s.full[ring.stage], ring.parity);
        last = s.words[WORDS * ring.stage + 1];
        u32 at = shared_address(s.stages + ring.stage * STAGE_BYTES);
        u64 left = matrix_descriptor(at + warpgroup * PIECE_BYTES, PIECE_BYTES, 8 * ROW_BYTES);
        u64 right = matrix_descriptor(at + LEFT_PIECES * PIECE_BYTES, PIECE_BYTES, 8 * ROW_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEP_DEPTH / STEP; ++step)
            multiply(sums, left + step * LEFT_STEP, right + step * RIGHT_STEP, 1);
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
}

// The warp's 16 rows of a block, from `part`, 64 columns of the warpgroup's rows: `to` is the first
// of them in its slot. 32 neighbouring chunks of 16 bytes at a time.
__device__ __forceinline__ void store_block(const unsigned char* part, int block, OutputT* to) {
    int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int i = 0; i < BLOCK / 16; ++i) {
        int own = i * 32 + lane;
        u32 at = chunk_address(0, first + own / CHUNKS, block * CHUNKS + own % CHUNKS);
        auto chunk = load_vector<u32, 4>(reinterpret_cast<const u32*>(part + at));
        store_vector(reinterpret_cast<u32*>(to + own * 8), chunk);
    }
}

// The blocks of a warp's rows that the layout stores.
__device__ __forceinline__ void store_tile(float (&sums)[SUMS], Line line, const Finish& finish,
                                           const Parameters& p, const Shared& s, const Tile& tile,
                                           int warpgroup) {
    int row = threadIdx.x % 128 / 32 * 16 % BLOCK;
    unsigned char* part = s.out + warpgroup * PIECE_BYTES;
    OutputT* out = p.out + tile.batch * p.batch_step + row * BLOCK;
#pragma unroll
    for (int k = 0; k < TILE_COLUMNS / 64; ++k) {
        u32 live = line.bits >> (k * PART_BLOCKS) & PART_BITS;
        if (!live) continue;
        if (Config::EPILOGUE) {
#pragma unroll
            for (int i = 0; i < 32; ++i) sums[k * 32 + i] = finish(sums[k * 32 + i], 0);
        }
        __syncwarp();  // what the rows held before is read
        stage_part([&](int i) { return sums[k * 32 + i]; }, shared_address(part));
        __syncwarp();
#pragma unroll 1
        for (; live; live &= live - 1, ++line.slot)
            store_block(part, __ffs(int(live)) - 1, out + i64(line.slot) * (BLOCK * BLOCK));
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int warpgroup) {
    Finish finish(Read<Parameters>{p});
    int row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16;  // the warp's first, of a tile
    Ring ring;
    while (true) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        u32 index = s.words[WORDS * ring.stage];
        if (index == NO_TILE) break;
        Tile tile(p, index);
        Line line(p, tile, (tile.group * TILE_LINES + row) / BLOCK);  // arrives meanwhile
        float sums[SUMS];
        multiply_tile(sums, s, warpgroup, ring);
        store_tile(sums, line, finish, p, s, tile, warpgroup);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_tiles(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(1);
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        release_registers<40>();
        if (threadIdx.x / 32 == WARPS) produce(p, s);
    } else {
        take_registers<232>();
        clear_rest<BLOCK, WARPS>(p);
        consume(p, s, warpgroup);
    }
}
