// From a warp's sums to values. With g = lane / 4 and t = lane % 4 a lane has, of 16 rows by 16
// columns, sums[j][e]: row g + 8 (e / 2), column 8 j + 2 t + e % 2.
#pragma once

#include "blocksparse/clear.cuh"
#include "blocksparse/stationary/parameters.cuh"
#include "common/mma_half.cuh"

// The epilogue of 16 rows by 16 columns, from a row and column of what `beside` begins at on. Four
// summands are under way at a time, and behind a barrier none ahead of the products: places of all
// that belong to 32 rows are 32 registers, more than there are.
__device__ __forceinline__ void finish_sums(float (&sums)[2][4], const Finish& finish,
                                            const Beside<SUMMANDS>& beside, int row, int column) {
    if constexpr (Config::EPILOGUE) {
        if (SUMMANDS && BLOCK > 16) __syncwarp();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            Given<SUMMANDS> given[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                given[e].read(beside, row + e / 2 * 8, column + j * 8 + e % 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[j][e] = given[e].finished(finish, sums[j][e], 0);
        }
    }
}

// A block of 16 x 16, whose lanes have their own place `to`: lanes side by side change words, so
// that each stores 8 bytes of a row and a warp 256 bytes of eight rows at a time.
//   lanes 2i, 2i + 1 have columns 4i .. 4i + 3 and 8 + 4i .. 8 + 4i + 3
__device__ __forceinline__ int exchanged_column() {
    int t = threadIdx.x % 4;
    return t % 2 * 8 + t / 2 * 4;
}
__device__ __forceinline__ Vector<u32, 2> exchanged(u32 first, u32 second) {
    bool odd = threadIdx.x & 1;
    u32 own = odd ? second : first;
    u32 other = __shfl_xor_sync(ALL, odd ? first : second, 1);
    return {odd ? other : own, odd ? own : other};
}
__device__ __forceinline__ void store_sums(const float (&sums)[2][4], OutputT* to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 word[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            word[j] = pack<OutputT>(sums[j][2 * half], sums[j][2 * half + 1]);
        store_vector(reinterpret_cast<u32*>(to + half * 8 * BLOCK), exchanged(word[0], word[1]));
    }
}

// Larger blocks: a warp's 32 rows of a block, in 2 or 4 KB of shared memory. 16-byte chunks of its
// rows change places, so that eight rows of a chunk lie in different banks, and so do the chunks of
// 128 bytes.
constexpr int CHUNKS = BLOCK / 8, ROWS_AT_ONCE = 32 / CHUNKS;  // of a row; of a store of the warp

__device__ __forceinline__ u32 staged(int row, int chunk) {
    int moved = CHUNKS == 8 ? row % 8 : row / 2 % 4;
    return row * CHUNKS * 16 + ((chunk ^ moved) << 4);
}

__device__ __forceinline__ void stage_sums(const float (&sums)[2][4], u32 rows, int tile,
                                           int group) {
    int lane = threadIdx.x % 32, matrix = lane / 8;
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        word[i] = pack<OutputT>(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    u32 to = rows + staged(tile * 16 + matrix % 2 * 8 + lane % 8, group * 2 + matrix / 2);
    store_matrices<false>(to, word[0], word[1], word[2], word[3]);
}

// `to` is this lane's 16 bytes of the first rows; those of a block lie side by side.
__device__ __forceinline__ void store_rows(const unsigned char* rows, OutputT* to) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        int row = i * ROWS_AT_ONCE + lane / CHUNKS;
        auto chunk = load_vector<u32, 4>(
            reinterpret_cast<const u32*>(rows + staged(row, lane % CHUNKS)));
        store_vector(reinterpret_cast<u32*>(to + i * 32 * 8), chunk);
    }
}
