// Kronecker-sparse factors on Hopper, batch first and d > 1, where features of a group lie d apart:
//   y[n, i, j, l] = Finish(sum_k w[i, l, j, k] * x[n, i, k, l])
// Floors as in hopper/hopper.cuh. A tile takes LANES * HALVES neighbouring l together, so that
// whole sectors move; what limits it is the traffic from L2: every tile of TILE_COLUMNS features
// reads x again.
//
// 16 bytes of a tile of x are LANES neighbouring l of 8 / LANES (fp32: 4 / LANES) neighbouring k: a
// thread's loads become the registers of LANES independent wgmmas, in half types after one byte
// permute each. The order of k inside a wgmma is free, so thread t of a quad takes chunks 2t and
// 2t + 1 of a row, which the swizzle spreads over all banks; w is packed in that order. Of three l
// it takes 24 bytes, all l of four k.
//
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT    storage of x and w, arithmetic, storage of y
//   LANES, HALVES            l of a warpgroup; 2 where two warpgroups share rows and split l
//   MERGED                   whether rows of x hold all l of a k, so that (k, l) is one dimension
//   TILE_COLUMNS             output features j of a tile
//   TILE_DEPTH               input features k of a stage
//   STAGES, PRODUCTS, multiply(...), HALF_INPUT, PARAMETER_BYTES, and the epilogues: as in
//                            hopper/hopper.cuh
#pragma once

#include "common/async_copy.cuh"
#include "common/hopper.cuh"
#include "common/shared_words.cuh"
#include "kronecker_sparse/epilogue.cuh"

constexpr int SIZE = sizeof(InputT);
constexpr int ROW_BYTES = 128;
constexpr int CHUNK = 16 / SIZE;                      // elements of 16 bytes
constexpr int SPAN = LANES * HALVES;                  // l of a tile
constexpr int ROW = ROW_BYTES / SIZE;                 // elements of one row of x in shared memory
constexpr int ROW_DEPTH = ROW / SPAN;                 // whole k of one
constexpr int ROW_BLOCKS = TILE_DEPTH * SPAN / ROW;   // such rows of a stage, for each n
constexpr int TILE_ROWS = HALVES == 2 ? 64 : 128;
constexpr int PRODUCERS = 128, THREADS = 384;
constexpr int SUMS = TILE_COLUMNS / 2;                // accumulators of a thread for one l
constexpr int STEP = 32 / SIZE;                       // k of one wgmma
constexpr int STEPS = TILE_DEPTH / STEP;
constexpr int COPIES = PRODUCTS == 3 ? 2 : 1;
constexpr int SPAN_BYTES = SPAN * SIZE;               // of one k
// Bits of the row that the chunk is XORed with, by the copy engine if MERGED.
constexpr int SWIZZLE = (MERGED ? ROW_BYTES : SPAN_BYTES) / 16 - 1;

constexpr int X_BLOCK_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int X_BYTES = ROW_BLOCKS * X_BLOCK_BYTES;
constexpr int W_LANE_BYTES = TILE_COLUMNS * TILE_DEPTH * SIZE;
constexpr int W_BYTES = COPIES * SPAN * W_LANE_BYTES;  // of a stage, packed by hopper/pack.cuh
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
// j that are staged and stored together: eight at least, in whole rows.
constexpr int OUT_COLUMNS = SPAN == 3 ? ROW : ROW_DEPTH < 8 ? 8 : ROW_DEPTH;
constexpr int OUT_BLOCKS = OUT_COLUMNS * SPAN / ROW;
constexpr int OUT_ROWS = 64;                                // n likewise
constexpr int OUT_BLOCK_BYTES = OUT_ROWS * ROW_BYTES;
constexpr int OUT_BYTES = OUT_BLOCKS * OUT_BLOCK_BYTES;
constexpr int OUT_SLOTS = TILE_COLUMNS / OUT_COLUMNS < 4 ? TILE_COLUMNS / OUT_COLUMNS : 4;

// Laid out by kernlib/families/kronecker_sparse/lowering/interleaved.py.
#if MERGED
struct Maps { TensorMap x, y; };
struct Operands { const unsigned char* packed; };  // weights, by hopper/pack.cuh
struct Strides {};
#else
// The copy engine takes 4 cycles for a row of 32 bytes, threads less than 2.
struct Maps {};
struct Operands {
    const InputT* x;
    OutputT* y;
    const unsigned char* packed;
};
struct Strides {
    i64 x_row, x_block, x_depth, y_row, y_block, y_column;
};
#endif

struct Fixed {
    int row_tiles, column_tiles;
    int blocks, lanes;   // a, d
    int rows;            // batch
    int columns, depth;  // b, c
    int spans;           // ceil(d / SPAN)
    u32 tiles;           // of all
    int unused;          // fills up 8 bytes
};

struct Parameters : Maps, Operands, VectorPointers<VECTORS>, Scalars<SCALARS>, Strides, Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

struct Shared {
    unsigned char* stages;
    unsigned char* out;
    u64 *full, *empty;
};

// A tile's place. Spans and column tiles of the same rows are computed at the same time by
// neighbouring CTAs: were they computed one after the other, the rows of all CTAs, 69 MB of
// (1,256,256,16), would leave L2 in between, and lines of y be written in parts.
struct Tile {
    int row, column, block, lane;
    __device__ __forceinline__ Tile(const Parameters& p, u32 index) {
        lane = index % p.spans * SPAN;
        index /= p.spans;
        column = index % p.column_tiles;
        index /= p.column_tiles;
        row = index % p.row_tiles;
        block = index / p.row_tiles;
    }
};

__device__ __forceinline__ void load_weights(unsigned char* to, const Parameters& p, u64* barrier,
                                             const Tile& tile, int stage, int stages) {
    i64 place = i64(tile.block * p.spans + tile.lane / SPAN) * p.column_tiles + tile.column;
    load_bytes(to, p.packed + (place * stages + stage) * W_BYTES, barrier, W_BYTES);
}

#if MERGED
__device__ __forceinline__ void load_stage(unsigned char* to, const Parameters& p, u64* barrier,
                                           const Tile& tile, int stage, int stages) {
    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
        int first = stage * TILE_DEPTH * SPAN + block * ROW;
        load_box(to + block * X_BLOCK_BYTES, p.x, barrier, first, tile.block,
                 tile.row * TILE_ROWS, 0);
    }
    load_weights(to + X_BYTES, p, barrier, tile, stage, stages);
}
#else
// By all producers, eight of them a row.
__device__ __forceinline__ void load_stage(unsigned char* to, const Parameters& p, u64* barrier,
                                           const Tile& tile, int stage, int stages) {
    if (threadIdx.x == 0) {
        barrier_expect(barrier, W_BYTES);
        load_weights(to + X_BYTES, p, barrier, tile, stage, stages);
    }
    constexpr int CHUNKS = SPAN_BYTES / 16, STEP_ROWS = PRODUCERS / 8;
    int chunk = threadIdx.x % 8, line = threadIdx.x / 8, row = tile.row * TILE_ROWS + line;
    int l = tile.lane + chunk % CHUNKS * CHUNK, first = stage * TILE_DEPTH + chunk / CHUNKS;
    const InputT* from = p.x + row * p.x_row + tile.block * p.x_block + first * p.x_depth + l;
#pragma unroll 1
    for (int block = 0; block < ROW_BLOCKS; ++block) {
        bool exists = l < p.lanes && first + block * ROW_DEPTH < p.depth;
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r += STEP_ROWS) {
            int place = (line + r) * ROW_BYTES + ((chunk ^ ((line + r) & SWIZZLE)) << 4);
            copy_async<16>(to + place, from + r * p.x_row, exists && row + r < p.rows ? 16 : 0);
        }
        to += X_BLOCK_BYTES;
        from += ROW_DEPTH * p.x_depth;
    }
    arrive_after_copies(barrier);
}
#endif

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    int depths = (p.depth + TILE_DEPTH - 1) / TILE_DEPTH;
    int stage = 0, parity = 1;
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        for (int depth = 0; depth < depths; ++depth) {
            barrier_wait(&s.empty[stage], parity);
            load_stage(s.stages + stage * STAGE_BYTES, p, &s.full[stage], tile, depth, depths);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

#include "kronecker_sparse/interleaved/multiply.cuh"
#include "kronecker_sparse/interleaved/store.cuh"

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    int warpgroup = threadIdx.x / 128 - 1;
    int depths = (p.depth + TILE_DEPTH - 1) / TILE_DEPTH;
    int stage = 0, parity = 0, slot = 0;
    Finish finish(Read<Parameters>{p});
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        float sums[LANES][SUMS];
        // Which TF32 overwrites; from undefined ones ptxas serialises its wgmma where epilogues go
        // over them, and 128 of them, whose epilogues do not, it would spill.
        if (!HALF_INPUT && LANES * SUMS < 128) {
#pragma unroll
            for (int l = 0; l < LANES; ++l)
#pragma unroll
                for (int i = 0; i < SUMS; ++i) sums[l][i] = 0.0f;
        }
        multiply_tile(sums, s, warpgroup, depths, stage, parity);
        store_tile(sums, finish, p, s.out, slot, tile, warpgroup);
    }
    if (MERGED && threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_sparse_interleaved(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];
    unsigned char* base = shared + (-shared_address(shared) & 1023);
    Shared s = {base, base + STAGES * STAGE_BYTES, barriers, barriers + STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], MERGED ? 1 : 1 + PRODUCERS);
            barrier_init(&s.empty[i], 8);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        release_registers<40>();
        if (!MERGED || threadIdx.x == 0) produce(parameters, s);
    } else {
        take_registers<232>();
        consume(parameters, s);
    }
}
