// A finished interleaved tile through shared memory to device memory, by the copy engine.
#pragma once

#include "common/shared_words.cuh"
#include "kronecker_sparse/epilogue.cuh"
#include "kronecker_sparse/interleaved/tile.cuh"

// Address of byte `byte` of the row of j and l in line `row` of staged columns.
__device__ __forceinline__ u32 out_address(u32 out, int row, int byte) {
    int chunk = byte % ROW_BYTES / 16;
    return out + byte / ROW_BYTES * OUT_BLOCK_BYTES + row * ROW_BYTES +
           ((chunk ^ (row & SWIZZLE)) << 4) + byte % 16;
}

// Columns first .. first + OUT_COLUMNS of three l: the six numbers of two of them lie side by side.
template <int COUNT>
__device__ __forceinline__ void stage_threes(const float (&sums)[LANES][COUNT], int first, u32 out,
                                             int row, int t) {
#pragma unroll
    for (int i = first / 2; i < (first + OUT_COLUMNS) / 2; i += 2) {
        u32 word[3] = {pack<OutputT>(sums[0][i], sums[1][i]),
                       pack<OutputT>(sums[2][i], sums[0][i + 1]),
                       pack<OutputT>(sums[1][i + 1], sums[2][i + 1])};
        int line = row + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t - first;
#pragma unroll
        for (int m = 0; m < 3; ++m)
            store_shared_words<1>(out_address(out, line, column * SPAN * SIZE + m * 4), word + m);
    }
}

// Columns first .. first + OUT_COLUMNS: all LANES of one (n, j) are LANES * SIZE bytes of a row.
template <int COUNT>
__device__ __forceinline__ void stage_columns(const float (&sums)[LANES][COUNT], int first, u32 out,
                                              int row, int t, int half) {
    constexpr int WORDS = LANES * SIZE / 4;
#pragma unroll
    for (int i = first / 2; i < (first + OUT_COLUMNS) / 2; i += 2) {
        u32 word[2 * WORDS];
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int m = 0; m < WORDS; ++m) {
                u32& both = word[e * WORDS + m];
                if constexpr (HALF_INPUT)
                    both = pack<OutputT>(sums[2 * m][i + e], sums[2 * m + 1][i + e]);
                else
                    both = __float_as_uint(sums[m][i + e]);
            }
        int line = row + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t - first;
        int byte = column * SPAN * SIZE + half * LANES * SIZE;
        if constexpr (HALVES == 1 && WORDS <= 2) {  // both columns lie side by side
            store_shared_words<2 * WORDS>(out_address(out, line, byte), word);
        } else {
#pragma unroll
            for (int m = 0; m < 2 * WORDS; m += 4)
                store_shared_words<4>(
                    out_address(out, line, byte + m / WORDS * SPAN_BYTES + m % WORDS * 4),
                    word + m);
        }
    }
}

// Of column j and the tile's l; where y has none, and nothing is stored, some other. Lowering sees
// to it that 32 bits do: 64 take more registers than there are.
__device__ __forceinline__ int feature_of(const Parameters& p, const Tile& tile, int j, int l) {
    l += tile.lane;
    return (tile.block * p.columns + min(j, p.columns - 1)) * p.lanes +
           (MERGED ? l : min(l, p.lanes - 1));
}

// The costly epilogues over staged columns, the first of which is j = `column`; `thread` of
// `threads` that staged them.
__device__ __forceinline__ void finish_staged(u32 out, int column, const Parameters& p,
                                              const Tile& tile, int thread, int threads) {
    Rest rest(Read<Parameters, Config::HEAD_SCALARS, Config::HEAD_VECTORS>{p});
#pragma unroll 1
    for (int index = thread; index < OUT_BLOCKS * OUT_ROWS * 8; index += threads) {
        int chunk = index % 8, row = index / 8 % OUT_ROWS, block = index / 8 / OUT_ROWS;
        int byte = block * ROW_BYTES + chunk * 16;
        finish_chunk(out_address(out, row, byte), rest, [&](int e) {
            int element = byte / SIZE + e;
            return feature_of(p, tile, column + element / SPAN, element % SPAN);
        });
    }
}

// Staged columns to y, two threads a sector of 32 bytes.
template <class P>
__device__ __forceinline__ void copy_staged(u32 out, int column, const P& p, const Tile& tile,
                                            int thread) {
    constexpr int CHUNKS = SPAN_BYTES / 16, ACROSS = OUT_COLUMNS * CHUNKS;
    OutputT* to = p.y + i64(tile.row) * TILE_ROWS * p.y_row + tile.block * p.y_block;
#pragma unroll 4
    for (int index = thread; index < ACROSS * OUT_ROWS; index += 256) {
        int place = index % ACROSS, row = index / ACROSS;
        int j = column + place / CHUNKS, l = tile.lane + place % CHUNKS * CHUNK;
        Vector<u32, 4> x = load_shared_words<4>(out_address(out, row, place * 16));
        if (tile.row * TILE_ROWS + row < p.rows && j < p.columns && l < p.lanes)
            *reinterpret_cast<Vector<u32, 4>*>(to + row * p.y_row + j * p.y_column + l) = x;
    }
}

template <class P>
__device__ __forceinline__ void store_tile(float (&sums)[LANES][SUMS], const Finish& finish,
                                           const P& p, unsigned char* staged, int& slot,
                                           const Tile& tile, int warpgroup) {
    int lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    int half = HALVES == 2 ? warpgroup : 0;
    int first = tile.column * TILE_COLUMNS;
    if (Config::HEAD) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            int j = first + i / 4 * 8 + t * 2 + i % 2;
#pragma unroll
            for (int l = 0; l < LANES; ++l)
                sums[l][i] = finish(sums[l][i], feature_of(p, tile, j, half * LANES + l));
        }
    }
    constexpr int THREADS_TOGETHER = HALVES == 2 ? 256 : 128;
    staged += HALVES == 2 ? 0 : warpgroup * OUT_SLOTS * OUT_BYTES;
    int barrier = HALVES == 2 ? 1 : 1 + warpgroup, thread = threadIdx.x % THREADS_TOGETHER;
    bool leader = MERGED && thread == (HALVES == 2 ? 128 : 0);
#pragma unroll
    for (int column = 0; column < TILE_COLUMNS; column += OUT_COLUMNS) {
        unsigned char* out = staged + slot * OUT_BYTES;
        // What used the slot before is over.
        if (leader) wait_for_reads<OUT_SLOTS - 1>();
        sync_threads(barrier, THREADS_TOGETHER);
        if constexpr (LANES == 3) stage_threes(sums, column, shared_address(out), row, t);
        else stage_columns(sums, column, shared_address(out), row, t, half);
        if (Config::REST) {
            sync_threads(barrier, THREADS_TOGETHER);
            finish_staged(shared_address(out), first + column, p, tile, thread, THREADS_TOGETHER);
        }
        if constexpr (MERGED) {
            fence_shared_writes();
            sync_threads(barrier, THREADS_TOGETHER);
            if (leader) {
#pragma unroll
                for (int block = 0; block < OUT_BLOCKS; ++block)
                    store_box(p.y, out + block * OUT_BLOCK_BYTES,
                              (first + column) * SPAN + block * ROW, tile.block,
                              tile.row * TILE_ROWS + (HALVES == 2 ? 0 : warpgroup * 64), 0);
                commit_stores();
            }
        } else {
            sync_threads(barrier, THREADS_TOGETHER);
            copy_staged(shared_address(out), first + column, p, tile, thread);
        }
        if (++slot == OUT_SLOTS) slot = 0;
    }
}
