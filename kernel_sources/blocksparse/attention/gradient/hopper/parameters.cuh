// Tiles of the gradient's kernel, its shared memory, and what a launch is given.
//
// A CTA has 64 or 128 rows of op(S), those of q, or of k if TRANSPOSED: a warpgroup has 64 of them.
// Two operands of these rows stay in shared memory (q and the gradient of out; k and v), and those
// of the columns that some row stores come through a ring (k and v; q and the gradient of out).
#pragma once

#include "blocksparse/attention/gradient/collected.cuh"
#include "common/hopper.cuh"

using InputT = Config::InputT;
constexpr bool TRANSPOSED = Config::TRANSPOSED;  // whether op(S) is S^T: dk and dv
constexpr int WARPGROUPS = Config::WARPGROUPS;   // that multiply, 1 or 2
constexpr int BLOCK_ROWS = Config::BLOCK_ROWS, BLOCK_COLS = Config::BLOCK_COLS;  // of op(S)
constexpr int TILE_COLS = Config::TILE_COLS, STAGES = Config::STAGES;
// Of q, k and v with zeros behind them: a multiple of 16, 128 at most.
constexpr int FEATURES = Config::FEATURES;
// Whether dv is added to before slopes are made, which takes fewer registers, or with dk, which
// lets products run on beside both.
constexpr bool EARLY = Config::EARLY;
constexpr int PRODUCER_REGISTERS = Config::PRODUCER_REGISTERS;  // of a thread
constexpr int CONSUMER_REGISTERS = Config::CONSUMER_REGISTERS;
// Whether the elements of two neighbouring columns lie in 8 bytes, of pairs.
constexpr bool WIDE_PAIRS = Config::WIDE_PAIRS;
static_assert(!SUMMED, "sums over batches or heads are the portable kernel's");
constexpr int ROW_BYTES = 128, ROW = 64;       // of shared memory: swizzled, elements
constexpr int STEP = 16;                       // depth of one wgmma
constexpr int TILE_ROWS = 64 * WARPGROUPS, THREADS = 128 * (WARPGROUPS + 1);
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int LINES = TILE_ROWS > BLOCK_ROWS ? TILE_ROWS / BLOCK_ROWS : 1;  // of blocks, of a tile
constexpr u32 LIVE = (1u << LINES) - 1;        // a bit of each
// A tile's columns are those of so many blocks, wherever these lie, or of a part of one.
constexpr int PIECE = BLOCK_COLS < TILE_COLS ? BLOCK_COLS : TILE_COLS;
constexpr int PIECES = TILE_COLS / PIECE;
constexpr int CHUNKS = (FEATURES + ROW - 1) / ROW;  // of 64 features
constexpr int OWN_CHUNK = TILE_ROWS * ROW_BYTES, OWN_BYTES = CHUNKS * OWN_CHUNK;
constexpr int SLOT_CHUNK = TILE_COLS * ROW_BYTES, SLOT_BYTES = CHUNKS * SLOT_CHUNK;
// Of a stage beside the two operands: numbers of each row of q, if these are its columns.
constexpr int NUMBERS = 2 + HAS_SCORE;
constexpr int NUMBER_BYTES = TRANSPOSED ? TILE_COLS * 4 : 0;
constexpr int STAGE_BYTES = 2 * SLOT_BYTES + 1024 * (TRANSPOSED ? 1 : 0);
static_assert(NUMBERS * NUMBER_BYTES <= 1024, "slots begin at whole 1024 bytes");
static_assert((2 * CHUNKS + NUMBERS) * PIECES <= 32, "each copy of a stage is a lane's");

// Flags of a note: GAPS where some line does not store some piece, EDGE where some row does not see
// all of a piece, CUT where some of a piece lies behind the last column that anybody sees.
constexpr u32 GAPS = 1, EDGE = 2, CUT = 4, END = 8;

// What the producer says of a stage: the head of q, and which columns and blocks it holds.
struct Note {
    u32 flags;
    int head;
    int columns[PIECES];  // the first of each piece
    u32 stored[LINES];    // of each line of blocks, a bit for each piece that it stores
};

struct Barriers {
    u64 full[STAGES], empty[STAGES], own;
};

struct Shared {
    unsigned char *own, *stages;
    Barriers* barriers;
    Note* notes;

    __device__ __forceinline__ explicit Shared(unsigned char* base) {
        own = base + (-shared_address(base) & 1023);  // as the swizzle has it
        stages = own + 2 * OWN_BYTES;
        barriers = reinterpret_cast<Barriers*>(stages + STAGES * STAGE_BYTES);
        notes = reinterpret_cast<Note*>(barriers + 1);
    }
    // By all threads of the block.
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(&barriers->full[stage], 1);
                barrier_init(&barriers->empty[stage], CONSUMERS / 32);
            }
            barrier_init(&barriers->own, 1);
            fence_barrier_init();
        }
        __syncthreads();
    }
    __device__ __forceinline__ unsigned char* slot(int stage, int operand) const {
        return stages + stage * STAGE_BYTES + operand * SLOT_BYTES;
    }
    // Of rows of q that are a stage's columns: the logarithm of the sum of exponentials, delta, and
    // what a float leaves of the former.
    __device__ __forceinline__ float* numbers(int stage, int which) const {
        return reinterpret_cast<float*>(slot(stage, 2)) + which * TILE_COLS;
    }
};
static_assert(1024 + 2 * OWN_BYTES + STAGES * (STAGE_BYTES + int(sizeof(Note))) +
                      int(sizeof(Barriers)) <= Config::DYNAMIC_BYTES, "as the host counts it");

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Maps {
    TensorMap own_maps[2], column_maps[2];
};
struct Operands {
    InputT* first;            // dk or dq
    InputT* second;           // dv; null without
    const u32* row_bits;      // of op(S)
    const float* deltas;      // of rows of q: (batch, heads, padded)
    const float* sums;        // the same of log2 of sums of exponentials, or HAS_SCORE of natural
    const float* rests;       // logarithms, and HAS_SCORE what floats leave of these, in log2
};
struct Parameters : Maps,
                    Operands,
                    CollectedPointers<COLLECTED>,
                    LengthPointers<LENGTHS>,
                    CapturedPointers<CAPTURED>,
                    Numbers,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Where the head and the batch of operand 0 or 1 are, of which one may serve all: bits 0 and 1 of
// operand 0, 2 and 3 of operand 1.
__device__ __forceinline__ int head_of(int shared, int operand, int head) {
    return shared >> 2 * operand & 1 ? 0 : head;
}
__device__ __forceinline__ int batch_of(int shared, int operand, int batch) {
    return shared >> 2 * operand & 2 ? 0 : batch;
}

// What a CTA has: tiles of one head follow each other, and where later rows see more columns the
// last of them comes first.
struct Place {
    int batch, head, tile;
    __device__ __forceinline__ explicit Place(const Parameters& p) {
        u32 rest = blockIdx.x / u32(p.row_tiles);
        tile = int(blockIdx.x % u32(p.row_tiles));
        if (CAUSAL && !TRANSPOSED) tile = p.row_tiles - 1 - tile;
        head = int(rest % u32(p.own_heads));
        batch = int(rest / u32(p.own_heads));
    }
    __device__ __forceinline__ int row() const { return tile * TILE_ROWS; }
};

// What rows of op(S) see.
struct View {
    Sight sight;

    __device__ __forceinline__ Range columns_of(int row, int count) const {
        return TRANSPOSED ? sight.rows_of(row, count) : sight.columns_of(row, count);
    }
    __device__ __forceinline__ bool covers(int row, int count, int column, int depth) const {
        return TRANSPOSED ? sight.covers(column, depth, row, count)
                          : sight.covers(row, count, column, depth);
    }
    __device__ __forceinline__ bool keeps(int row, int column) const {
        return TRANSPOSED ? sight.keeps(column, row) : sight.keeps(row, column);
    }
};

__device__ __forceinline__ View view_of(const Parameters& p, int batch) {
    return {sight_of(p, batch, p.queries, p.keys)};
}
