// Products of a block-sparse matrix with few columns, in half types, as a language model decodes
// with: out[z, h, l, n] = Finish(sum_k S[z, h][l, k] * dense[z, h, k, n]) for up to 16 columns.
//
// Floor: the stored blocks once, 4.3 TB/s on an H200, as all else is small: at 8192 x 8192 and
// density .5 of 2-byte numbers 16 us. That takes some 40 KB on their way to each multiprocessor.
// Reached on an H100, of 3.0 TB/s, with one column: 27.4 us for blocks of 16, 28.3 for 64, 30.0 for
// 128, whose lines differ most in length; at density .1 7.9 to 8.9 us, where the floor is 4.5.
//
// A CTA has 16 lines, whose stored blocks lie one behind the other: the sum runs over their depths
// as if these were one row, DEEP * 32 at a time, and warps take turns. Nothing passes through
// shared memory but the warps' sums, which are added in order. A lane takes 16 bytes of a line and
// 16 of a column, eight depths side by side: as each product of the sum may stand anywhere in it,
// lane t of four has depths 8t to 8t + 7 of 32, where mma.sync would have pairs of them, and the
// right operand's lanes have the same. So blocks of 16 go two by two. 4 KB of blocks are on their
// way for each of at least 16 warps a multiprocessor.
//
// Facts and struct Fixed: class Decode of kernlib/families/blocksparse/kernels/spmm/decode.py.
#pragma once

#include "blocksparse/summands.cuh"
#include "common/mma.cuh"
#include "common/read_only.cuh"

using InputT = Config::InputT;    // storage of values, dense and vectors
using AccT = Config::AccT;        // arithmetic
using OutputT = Config::OutputT;  // storage of out
constexpr int LINES = Config::LINES, DEPTH = Config::DEPTH;  // of a block
constexpr int COLUMNS = Config::COLUMNS;                     // 8 or 16
constexpr int WARPS = Config::WARPS;                         // of a CTA
constexpr bool ALONG_LINES = Config::ALONG_LINES;  // lines lie closer together in out than columns
constexpr int SUMMANDS = Config::SUMMANDS;

struct Operands {
    const u32* row_bits;
    const int* row_ranks;
    const int* cols;
    const InputT* values;
    const InputT* dense;
    OutputT* out;
};

struct Parameters : Operands,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr int TILE_LINES = 16, THREADS = 32 * WARPS;
constexpr int PIECE = 8;                            // depths of a lane
constexpr int CHUNK = 4 * PIECE, DEEP = 4;          // depths of two mma.sync; chunks at a time
constexpr int APART = DEPTH < CHUNK ? CHUNK : DEPTH;  // depths between a lane's blocks
constexpr int BLOCKS = DEEP * CHUNK / APART;          // of a lane at a time
constexpr int PANELS = COLUMNS / 8;
constexpr int RESULTS = TILE_LINES * COLUMNS;

using Sums = float[PANELS][4];

// The CTA's lines: the slots of their blocks.
struct Line {
    int head, first, depths;  // first slot; depths of all blocks
    i64 line;                 // in its head

    __device__ __forceinline__ explicit Line(const Parameters& p) {
        i64 own = i64(blockIdx.x) * TILE_LINES, row = own / LINES * p.words;
        i64 last = row + p.words - 1;
        head = int(own / p.lines);
        line = own % p.lines;
        first = p.row_ranks[row];
        depths = (p.row_ranks[last] + __popc(p.row_bits[last]) - first) * DEPTH;
    }
};

// What a lane reads of both operands.
struct Reader {
    const Parameters& p;
    const Line& line;
    const InputT *values, *dense;  // of slot 0 and depth 0
    int depth;                     // this lane's first of a chunk
    bool has_column[PANELS];

    __device__ __forceinline__ Reader(const Parameters& p, const Line& line, i64 batch)
        : p(p), line(line) {
        int lane = threadIdx.x % 32, g = lane / 4;
        depth = lane % 4 * PIECE;
        values = p.values + batch * p.value_batch + line.first * p.value_slot +
                 (line.line % LINES + g) * p.value_row;
        dense = p.dense + batch * p.dense_batch + line.head * p.dense_head + g * p.dense_column;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) has_column[panel] = panel * 8 + g < p.columns;
    }

    // Columns of this lane's blocks from depth `at` on; of the last block behind it.
    __device__ __forceinline__ void find(int (&cols)[BLOCKS], int at) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            int own = min(at + depth + i * APART, line.depths - 1);
            cols[i] = load_int(p.cols + line.first + own / DEPTH);
        }
    }

    // Lines g and g + 8 of the stored blocks.
    __device__ __forceinline__ void read_blocks(u32 (&x)[DEEP][2][4], int at) const {
#pragma unroll
        for (int chunk = 0; chunk < DEEP; ++chunk) {
            int own = at + depth + chunk * CHUNK;
            const InputT* from = values + own / DEPTH * p.value_slot + own % DEPTH;
            load_once_if(x[chunk][0], own < line.depths, from);
            load_once_if(x[chunk][1], own < line.depths, from + 8 * p.value_row);
        }
    }
    __device__ __forceinline__ void read_columns(u32 (&x)[DEEP][PANELS][4],
                                                 const int (&cols)[BLOCKS], int at) const {
#pragma unroll
        for (int chunk = 0; chunk < DEEP; ++chunk) {
            int own = at + depth + chunk * CHUNK;
            const InputT* from = dense + i64(cols[chunk * CHUNK / APART]) * DEPTH + own % DEPTH;
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                load_if(x[chunk][panel], has_column[panel] && own < line.depths,
                        from + panel * 8 * p.dense_column);
        }
    }
};

// This warp's part of the sums.
__device__ __forceinline__ void sum_line(Sums& sums, const Reader& reader, int depths) {
    constexpr int GROUP = DEEP * CHUNK;
    int at = threadIdx.x / 32 * GROUP, cols[BLOCKS], next[BLOCKS];
    if (at >= depths) return;
    reader.find(next, at);
#pragma unroll 1
    for (; at < depths; at += WARPS * GROUP) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) cols[i] = next[i];
        reader.find(next, at + WARPS * GROUP);  // in time for the next round
        u32 left[DEEP][2][4], right[DEEP][PANELS][4];
        reader.read_blocks(left, at);
        reader.read_columns(right, cols, at);
#pragma unroll
        for (int chunk = 0; chunk < DEEP; ++chunk)
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const u32 (&x)[2][4] = left[chunk];
                u32 a[4] = {x[0][half], x[1][half], x[0][half + 1], x[1][half + 1]};
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    u32 b[2] = {right[chunk][panel][half], right[chunk][panel][half + 1]};
                    multiply_fragments<InputT>(sums[panel], a, b);
                }
            }
    }
}

__device__ __forceinline__ void put_sums(float* waiting, const Sums& sums) {
    int lane = threadIdx.x % 32, g = lane / 4, column = lane % 4 * 2;
    waiting += threadIdx.x / 32 * RESULTS;
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_vector(waiting + (g + half * 8) * COLUMNS + panel * 8 + column,
                         Vector<float, 2>{sums[panel][2 * half], sums[panel][2 * half + 1]});
}

// Adds the warps' sums and writes the results, a thread each.
__device__ __forceinline__ void store(const Parameters& p, const float* waiting, const Line& own,
                                      i64 batch) {
    Finish finish(Read<Parameters>{p});
    Beside<SUMMANDS> beside(p, finish, batch, own.head, own.line, 0);
    OutputT* out = p.out + p.out_view.at(batch, own.head, own.line, 0);
#pragma unroll 1
    for (int index = threadIdx.x; index < RESULTS; index += THREADS) {
        int line = ALONG_LINES ? index % TILE_LINES : index / COLUMNS;
        int column = ALONG_LINES ? index / TILE_LINES : index % COLUMNS;
        if (column >= p.columns) continue;
        AccT sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp)
            sum += waiting[warp * RESULTS + line * COLUMNS + column];
        Given<SUMMANDS> given;
        given.read(beside, line, column);
        if (Config::EPILOGUE) sum = given.finished(finish, sum, own.line + line);
        out[line * p.out_view.line + column * p.out_view.column] = convert<OutputT>(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS)
blocksparse_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    float* waiting = reinterpret_cast<float*>(shared);
    const Line own(p);
#pragma unroll 1
    for (i64 batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
        Sums sums = {};
        Reader reader(p, own, batch);
        sum_line(sums, reader, own.depths);
        put_sums(waiting, sums);
        __syncthreads();
        store(p, waiting, own, batch);
        __syncthreads();
    }
}
