// The operands of hopper_words.cuh as pairs of float16 words with scales: see format.cuh.
// Floor: 4 bytes read and 4.06 written for each number of the dense operand and of the stored
// blocks, over 4.3 TB/s on an H200: 32 us for 4096 x 4096, 8 us for a quarter of it.
//
// A CTA packs 64 rows, which are columns of the dense operand or lines of a block of op(S), by 64
// of the depth, which it reads once, along whichever is contiguous: 16 threads have four neighbours
// each, so 256 bytes, at a time. What is contiguous along rows is turned in shared memory. Slots
// that hold no block are not read.
//
// Struct Fixed: class PackWords of kernlib/families/blocksparse/kernels/spmm/hopper_words.py.
#pragma once

#include "blocksparse/hopper_words/format.cuh"
#include "blocksparse/side.cuh"
#include "common/hopper.cuh"

constexpr int THREADS = 256, LANES = 16;        // threads of a row
constexpr int EACH = ROW / LANES;               // neighbours of a thread
constexpr int TURNS = SQUARE * LANES / THREADS; // rows of a thread
constexpr int PITCH = SQUARE + 1;               // of shared memory: 2 threads a bank, either way
constexpr float LARGEST = 3.402823466e38f;      // that is finite

struct Operands {
    const float *dense, *values;
    const int* counts;                  // of the layout: the first says how many slots hold a block
    unsigned char* panels;              // words of the dense operand, and its scales
    float* panel_scales;
    unsigned char* pieces;              // those of the stored blocks
    float* piece_scales;
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// What a CTA packs, and where to.
struct Square {
    const float* from;
    i64 row, depth;        // strides
    int rows;              // that exist
    bool whole, exists;
    unsigned char *hi, *lo;
    float* scales;
    float factor;
};

__device__ __forceinline__ Square square_of_dense(const Parameters& p, u32 index) {
    int column = index % p.column_squares;
    index /= p.column_squares;
    int k = index % p.depth_squares;
    index /= p.depth_squares;
    int head = index % p.heads, batch = index / p.heads, half = column % 2;
    const Side& by = p.of_dense;
    i64 panel = i64(batch) * p.heads + head;
    panel = (panel * (p.column_squares / 2) + column / 2) * p.depth_squares + k;
    Square made;
    made.from = p.dense + batch * by.batch + head * by.panel + i64(k) * ROW * by.column +
                i64(column) * SQUARE * by.line;
    made.row = by.line;
    made.depth = by.column;
    made.rows = p.columns - column * SQUARE;
    made.whole = p.dense_whole;
    made.exists = true;
    made.hi = p.panels + panel * PANEL_WORDS + half * SQUARE_BYTES;
    made.lo = made.hi + PANEL_WORDS / 2;
    made.scales = p.panel_scales + panel * TILE_COLUMNS + half * SQUARE;
    made.factor = COLUMN_FACTOR;
    return made;
}

__device__ __forceinline__ Square square_of_values(const Parameters& p, u32 index) {
    i64 piece = index;  // by batch, slot, line and depth
    int part = index % p.depths;
    index /= p.depths;
    int half = index % p.lines;
    index /= p.lines;
    int slot = index % p.capacity, batch = index / p.capacity;
    const Side& by = p.of_values;
    Square made;
    made.from = p.values + batch * by.batch + slot * by.panel + i64(half) * SQUARE * by.line +
                i64(part) * ROW * by.column;
    made.row = by.line;
    made.depth = by.column;
    made.rows = SQUARE;
    made.whole = p.values_whole;
    made.exists = slot < p.counts[0];
    made.hi = p.pieces + piece * PIECE_WORDS;
    made.lo = made.hi + SQUARE_BYTES;
    made.scales = p.piece_scales + piece * SQUARE;
    made.factor = LINE_FACTOR;
    return made;
}

// Four neighbours, `step` apart, of which the first `count` exist.
__device__ __forceinline__ void read_neighbours(float (&x)[EACH], const float* from, i64 step,
                                                bool whole, int count) {
    if (whole && count >= EACH) {
        Vector<float, EACH> read = load_vector<float, EACH>(from);
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] = read.element[i];
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] = i < count ? from[i * step] : 0.0f;
    }
}

// A thread's numbers: of row threadIdx.x / 16 + 16 * turn the four along the depth from
// 4 * (threadIdx.x % 16) on.
using Numbers = float[TURNS][EACH];

__device__ __forceinline__ void read_along_depth(Numbers& x, const Square& square) {
    int own = threadIdx.x / LANES, k = threadIdx.x % LANES * EACH;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        int row = own + turn * (THREADS / LANES);
        read_neighbours(x[turn], square.from + row * square.row + k * square.depth, square.depth,
                        square.whole, row < square.rows ? EACH : 0);
    }
}

__device__ __forceinline__ void read_along_rows(Numbers& x, const Square& square, float* turned) {
    int own = threadIdx.x / LANES, first = threadIdx.x % LANES * EACH;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        int k = own + turn * (THREADS / LANES);
        read_neighbours(x[turn], square.from + first * square.row + k * square.depth, square.row,
                        square.whole, square.rows - first);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            turned[(own + turn * (THREADS / LANES)) * PITCH + first + i] = x[turn][i];
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            x[turn][i] = turned[(first + i) * PITCH + own + turn * (THREADS / LANES)];
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= LARGEST; }

// The exponent's bits of the scale of a row of 16 threads: of 2^-126 at least, by which words hold
// denormals as they are, and of 2^113 at most.
__device__ __forceinline__ u32 scale_bits(const float (&x)[EACH]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) largest = fmaxf(largest, is_finite(x[i]) ? fabsf(x[i]) : 0.0f);
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    return max(int(__float_as_uint(largest) >> 23) - 14, 1);
}

__device__ __forceinline__ void split(float x, float inverse, half_t& hi, half_t& lo) {
    bool finite = is_finite(x);
    float scaled = x * inverse;
    hi = convert<half_t>(finite ? scaled : x < 0.0f ? -1.0f : 1.0f);
    lo = convert<half_t>(finite ? (scaled - convert<float>(hi)) * LOW_FACTOR : x);
}

// One row of 16 threads: four words of either kind each, and by the first the scale.
__device__ __forceinline__ void write_row(const float (&x)[EACH], const Square& square, int row) {
    int lane = threadIdx.x % LANES;
    u32 scale = scale_bits(x);
    float inverse = __uint_as_float((254 - scale) << 23);
    Vector<half_t, EACH> hi, lo;
#pragma unroll
    for (int i = 0; i < EACH; ++i) split(x[i], inverse, hi.element[i], lo.element[i]);
    int at = row * ROW_BYTES + ((lane / 2 ^ row % 8) << 4) + lane % 2 * 8;  // as wgmma reads it
    store_vector(reinterpret_cast<half_t*>(square.hi + at), hi);
    store_vector(reinterpret_cast<half_t*>(square.lo + at), lo);
    if (lane == 0) square.scales[row] = __uint_as_float(scale << 23) * square.factor;
}

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_pack(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];  // ROW rows of PITCH numbers
    launch_dependents();  // hopper_words.cuh waits where it reads what is written here
    u32 index = blockIdx.x;
    Square square = index < p.squares ? square_of_dense(p, index)
                                      : square_of_values(p, index - p.squares);
    if (square.exists) {
        Numbers x;
        if (square.depth == 1) read_along_depth(x, square);
        else read_along_rows(x, square, reinterpret_cast<float*>(shared));
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
            write_row(x[turn], square, threadIdx.x / LANES + turn * (THREADS / LANES));
    }
    // The order of tiles, where it was launched before, is there when this launch has ended: for
    // that one CTA is enough, and the others make room.
    if (index == gridDim.x - 1) wait_for_prerequisites();
}
