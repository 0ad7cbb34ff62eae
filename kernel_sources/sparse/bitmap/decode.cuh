// The dense matrix, contiguous, of chunks: before a product with many vectors, and to have a matrix
// back. A CTA copies a chunk into shared memory and writes 16 rows of 256 columns.
//
// Floor: the bytes of data + rows * cols * itemsize, over 4.3 TB/s.
//
// Facts and struct Fixed: class Decode of kernlib/families/sparse/kernels/codecs/bitmap.py.
#pragma once

#include "sparse/bitmap/fetch.cuh"
#include "sparse/bitmap/layout.cuh"

struct Pointers {
    const unsigned char* data;
    const u32* offsets;  // in 16 bytes
    BitsT* out;
    const unsigned char* data_end;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// As one access: of a Vector whose elements were made one by one the compiler makes four.
__device__ __forceinline__ void store_words(void* to, const u32* word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}

// A row of 256 columns, of which each lane has 8. Rows that begin anywhere pass through shared
// memory, so that neighbours are still stored together.
__device__ __forceinline__ void write_row(const Parameters& p, i64 row, i64 column, Piece& x,
                                          Piece* line) {
    if (row >= p.rows) return;
    int lane = threadIdx.x % 32;
    BitsT* to = p.out + row * p.cols + column;
    if (p.vectors) {
#pragma unroll
        for (int i = 0; i < WIDTH / PER_ACCESS; ++i) {
            int at = lane * WIDTH + i * PER_ACCESS;
            if (column + at < p.cols) store_words(to + at, x.word + 4 * i);
        }
        return;
    }
    line[lane] = x;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK_COLUMNS / 32; ++i) {
        int at = i * 32 + lane;
        if (column + at < p.cols) to[at] = line[at / WIDTH][at % WIDTH];
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sparse_bitmap_decode(const __grid_constant__ Parameters p) {
    __shared__ Chunk chunk;
    __shared__ Piece lines[CHUNK_THREADS / 32][32];
    fetch<CHUNK_THREADS>(chunk, p);
    int warp = threadIdx.x / 32;
    i64 row = i64(blockIdx.x / p.kchunks) * CHUNK_ROWS + warp * WARP_ROWS;
    i64 column = i64(blockIdx.x % p.kchunks) * CHUNK_COLUMNS;
    Ranks ranks(chunk.words, warp);
#pragma unroll
    for (int i = 0; i < WARP_ROWS; ++i) {
        Piece x = {};
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
            u32 bits = ranks.bits(i, plane), at = ranks.at(i, plane);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (bits >> 8 * j & 1) x[plane * 4 + j] = chunk.values[at++];
        }
        write_row(p, row + i, column, x, lines[warp]);
    }
}
