// out[f, n] = in[n, f]: batch first to batch last, before the gradient of a weight with d > 1. Its
// sums run over n, whose neighbours batch first has a whole row apart, and its f of one group d.
//
// Floor: 2 * rows * columns * itemsize bytes over 4.3 TB/s.
//
// The generated source defines before it includes this file:
//   InputT             storage
//   PARAMETER_BYTES    what lowering makes of Parameters
#pragma once

#include "common/types.cuh"

constexpr int THREADS = 256;
constexpr int TILE = 64;
constexpr int CHUNK = 16 / sizeof(InputT);
constexpr int ACROSS = TILE / CHUNK;                       // chunks of a line of a tile
constexpr int CHUNKS = TILE * ACROSS / THREADS;            // of a thread
constexpr int LINE = TILE + 4 / sizeof(InputT);            // one word more than a multiple of 32

// Laid out by kernlib/ops/kronecker_sparse_lowering_turn.py.
struct Parameters {
    // written at each launch
    const InputT* in;
    InputT* out;
    // fixed by the plan
    i64 row_stride, pitch;  // of in and of out
    u32 rows, columns;      // n and f
    u32 column_tiles;
    u32 vectors;            // whether rows of in take aligned 16-byte loads
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

union Words {
    Vector<InputT, CHUNK> value;
    u32 word[4];
};

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_turn(const __grid_constant__ Parameters p) {
    __shared__ __align__(16) InputT tile[TILE * LINE];
    u32 row = blockIdx.x / p.column_tiles * TILE, column = blockIdx.x % p.column_tiles * TILE;
    Words x[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS, n = row + index / ACROSS;
        u32 f = column + index % ACROSS * CHUNK;
        const InputT* from = p.in + i64(n) * p.row_stride + f;
        x[i] = {};
        if (p.vectors && n < p.rows && f + CHUNK <= p.columns) {
            x[i].value = load_vector<InputT, CHUNK>(from);
        } else if (n < p.rows) {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (f + e < p.columns) x[i].value.element[e] = from[e];
        }
    }
    u32* words = reinterpret_cast<u32*>(tile);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS;
        u32 place = (index / ACROSS * LINE + index % ACROSS * CHUNK) * sizeof(InputT) / 4;
#pragma unroll
        for (int w = 0; w < 4; ++w) words[place + w] = x[i].word[w];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS, f = index / ACROSS, n = index % ACROSS * CHUNK;
        Vector<InputT, CHUNK> line;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) line.element[e] = tile[(n + e) * LINE + f];
        // The pitch is of whole chunks: a last one that is not full ends in zeros.
        if (column + f < p.columns && row + n < p.pitch)
            store_vector(p.out + i64(column + f) * p.pitch + row + n, line);
    }
}
