// Tiles of interleaved/interleaved.cuh: facts, parameters, shared memory and places.
//
// Facts and struct Fixed: class Interleaved of
// kernlib/families/kronecker_sparse/kernels/lanes/interleaved.py.
#pragma once

#include "common/hopper.cuh"
#include "common/parameters.cuh"

using InputT = Config::InputT;    // storage of x and w
using AccT = Config::AccT;        // arithmetic
using OutputT = Config::OutputT;  // storage of y
constexpr int LANES = Config::LANES;    // l of a warpgroup
constexpr int HALVES = Config::HALVES;  // 2 where two warpgroups share rows and split l
// Whether rows of x hold all l of a k, so that (k, l) is one dimension.
constexpr bool MERGED = Config::MERGED;
constexpr int TILE_COLUMNS = Config::TILE_COLUMNS;  // output features j of a tile
constexpr int TILE_DEPTH = Config::TILE_DEPTH;      // input features k of a stage
constexpr int STAGES = Config::STAGES;              // under way
constexpr int PRODUCTS = Config::PRODUCTS;          // fp32: 3 for split products (3xTF32), 1 for
                                                    // TF32; half types: 1
constexpr bool HALF_INPUT = Config::HALF_INPUT;     // whether x is no float

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

template <bool IS_MERGED>
struct Operands {
    TensorMap x, y;
};
// The copy engine takes 4 cycles for a row of 32 bytes, threads less than 2: struct Fixed has the
// strides of x and y then.
template <>
struct Operands<false> {
    const InputT* x;
    OutputT* y;
};

struct Weights {
    const unsigned char* packed;  // by hopper/pack.cuh
};

struct Parameters : Operands<MERGED>,
                    Weights,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

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
