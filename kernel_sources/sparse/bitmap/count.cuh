// counts[chunk] = entries of a chunk: what does not equal zero. A warp takes a chunk.
//
// Floor: rows * cols * itemsize bytes over 4.3 TB/s.
//
// Facts and struct Fixed: class Count of kernlib/families/sparse/kernels/codecs/bitmap.py.
#pragma once

#include "sparse/bitmap/read.cuh"

constexpr int THREADS = 256;

struct Pointers {
    const BitsT* dense;
    u32* counts;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_bitmap_count(const __grid_constant__ Parameters p) {
    u32 chunk = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (chunk >= p.chunks) return;
    i64 row = i64(chunk / p.kchunks) * CHUNK_ROWS;
    i64 column = i64(chunk % p.kchunks) * CHUNK_COLUMNS;
    u32 count = 0;
#pragma unroll 1
    for (int first = 0; first < CHUNK_ROWS; first += 8) {
        Piece x[8];
        read_pieces(p, row + first, column, x);
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) count += is_entry(x[i][e]);
    }
    count = __reduce_add_sync(WARP, count);
    if (lane == 0) p.counts[chunk] = count;
}
