// Chunks of a dense matrix, at the offsets that its counts gave them. A CTA makes one in shared
// memory, as it will lie, and copies it out; values come in as many bits as they have.
//
// Floor: rows * cols * itemsize + the bytes of data, over 4.3 TB/s.
//
// Facts and struct Fixed: class Encode of kernlib/families/sparse/kernels/codecs/bitmap.py.
#pragma once

#include "sparse/bitmap/read.cuh"

struct Pointers {
    const BitsT* dense;
    const u32* offsets;  // in 16 bytes
    unsigned char* data;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// The words of a warp's rows. The four lanes of a block put its four together, and store one each.
__device__ __forceinline__ void put_words(Chunk& chunk, Piece (&x)[WARP_ROWS], int warp) {
    int lane = threadIdx.x % 32;
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
        u32 word = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            int odd = k / 4, j = k % 4;
            word |= u32(is_entry(x[i / 2 * 2 + odd][i % 2 * 4 + j])) << (8 * j + 4 * odd);
        }
        word <<= lane % 4;
        word |= __shfl_xor_sync(WARP, word, 1);
        word |= __shfl_xor_sync(WARP, word, 2);
        if (lane % 4 == i) mine = word;
    }
    chunk.words[word_of(warp * PAIRS + lane % 4 / 2, lane / 4) + lane % 2] = mine;
}

// What follows the values, up to whole 16 bytes.
__device__ __forceinline__ void fill_tail(Chunk& chunk, u32 count) {
    u32 end = (count + PER_ACCESS - 1) / PER_ACCESS * PER_ACCESS;
    if (count + threadIdx.x < end) chunk.values[count + threadIdx.x] = 0;
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sparse_bitmap_encode(const __grid_constant__ Parameters p) {
    __shared__ Chunk chunk;
    u32 begin = p.offsets[blockIdx.x], units = p.offsets[blockIdx.x + 1] - begin;
    int warp = threadIdx.x / 32;
    i64 first = i64(blockIdx.x / p.kchunks) * CHUNK_ROWS + warp * WARP_ROWS;
    Piece x[WARP_ROWS];
    read_pieces(p, first, i64(blockIdx.x % p.kchunks) * CHUNK_COLUMNS, x);
    put_words(chunk, x, warp);
    __syncthreads();
    Ranks ranks(chunk.words, warp);
#pragma unroll
    for (int i = 0; i < 2 * WARP_ROWS; ++i) {
        int row = i / 2, plane = i % 2;
        u32 bits = ranks.bits(row, plane), at = ranks.at(row, plane);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (bits >> 8 * j & 1) chunk.values[at++] = x[row][plane * 4 + j];
    }
    fill_tail(chunk, ranks.total);
    __syncthreads();
    auto* to = reinterpret_cast<Vector<u32, 4>*>(p.data) + begin;
    auto* from = reinterpret_cast<const Vector<u32, 4>*>(&chunk);
    for (u32 i = threadIdx.x; i < units; i += CHUNK_THREADS) to[i] = from[i];
}
