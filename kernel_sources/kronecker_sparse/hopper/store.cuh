// A finished tile through shared memory to device memory, by the copy engine.
#pragma once

#include "kronecker_sparse/epilogue.cuh"
#include "kronecker_sparse/hopper/tile.cuh"

// Address of 16-byte chunk `chunk` of a swizzled row.
__device__ __forceinline__ u32 chunk_address(u32 block, int row, int chunk) {
    return block + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Columns from `first` on, as far as a part goes. Accumulators 4c .. 4c+3 of a thread are columns
// 8c + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8 of its warp's sixteen.
template <int COUNT>
__device__ __forceinline__ void stage_part(const float (&sums)[COUNT], int first, u32 out) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if constexpr (HALF_INPUT) {
        int matrix = lane / 8, line = lane % 8;
#pragma unroll
        for (int pair = 0; pair < PART_COLUMNS / 16; ++pair) {
            if (first + 16 * pair >= TILE_COLUMNS) break;
            u32 part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int place = first / 2 + 8 * pair + 2 * i;
                part[i] = pack<OutputT>(sums[place], sums[place + 1]);
            }
            int column = 16 * pair + matrix / 2 * 8, row = 16 * warp + matrix % 2 * 8;
            u32 address = OUT_LAST ? chunk_address(out, column + line, row / 8)
                                   : chunk_address(out, row + line, column / 8);
            store_matrices<OUT_LAST>(address, part[0], part[1], part[2], part[3]);
        }
    } else {
        int row = warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < PART_COLUMNS / 2; ++i) {
            if (first / 2 + i >= COUNT) break;
            int column = i / 4 * 8 + lane % 4 * 2 + i % 2, line = row + i / 2 % 2 * 8;
            int along = OUT_LAST ? line : column, across = OUT_LAST ? column : line;
            u32 block = out + along / ROW * PART_BLOCK_BYTES;
            store_shared(chunk_address(block, across, along % ROW / 4) + along % 4 * 4,
                         sums[first / 2 + i]);
        }
    }
}

// The costly epilogues over a staged part, whose first column is j = `first`; `feature` is that of
// j = 0.
__device__ __forceinline__ void finish_staged(u32 out, const Parameters& p, i64 feature,
                                              int first) {
    Rest rest(Read<Parameters, Config::HEAD_SCALARS, Config::HEAD_VECTORS>{p});
    constexpr int LINES = OUT_LAST ? PART_COLUMNS : 64, CHUNK = 16 / sizeof(OutputT);
#pragma unroll 1
    for (int index = threadIdx.x % 128; index < PART_BLOCKS * LINES * 8; index += 128) {
        int chunk = index % 8, line = index / 8 % LINES, block = index / 8 / LINES;
        int j = first + (OUT_LAST ? line : chunk * CHUNK);
        finish_chunk(chunk_address(out + block * PART_BLOCK_BYTES, line, chunk), rest, [&](int e) {
            return feature + i64(min(OUT_LAST ? j : j + e, p.columns - 1)) * p.lanes;
        });
    }
}

// The sums as they are, each pair of columns side by side.
template <class P>
__device__ __forceinline__ void store_partial(const float (&sums)[SUMS], const P& p,
                                              const Tile& tile, int warpgroup) {
    int lane = threadIdx.x % 32, first = tile.column * TILE_COLUMNS + lane % 4 * 2;
    int row = tile.row * TILE_ROWS + warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    i64 group = (i64(tile.split) * p.blocks + tile.block) * p.lanes + tile.lane;
    float* to = p.partial + (group * p.rows + row) * p.pitch + first;
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        int line = i / 2 % 2 * 8, column = i / 4 * 8;
        if (row + line < p.rows && first + column < p.pitch) {
            Vector<float, 2> pair = {sums[i], sums[i + 1]};
            store_vector(to + i64(line) * p.pitch + column, pair);
        }
    }
}

// Part by part, each in the slot that the copy engine has read longest ago.
template <class P>
__device__ __forceinline__ void store_tile(float (&sums)[SUMS], const Finish& finish, const P& p,
                                           unsigned char* out, int& slot, const Tile& tile,
                                           int warpgroup) {
    int lane = threadIdx.x % 32, row = tile.row * TILE_ROWS + warpgroup * 64;
    bool leader = threadIdx.x % 128 == 0;
    int first = tile.column * TILE_COLUMNS;
    i64 feature = i64(tile.block) * p.columns * p.lanes + tile.lane;
    if (Config::HEAD) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            int column = min(first + i / 4 * 8 + lane % 4 * 2 + i % 2, p.columns - 1);
            sums[i] = finish(sums[i], feature + i64(column) * p.lanes);
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        unsigned char* staged = out + slot * PART_BYTES;
        int column = first + part * PART_COLUMNS;
        if (leader) wait_for_reads<OUT_PARTS - 1>();
        sync_threads(1 + warpgroup, 128);
        stage_part(sums, part * PART_COLUMNS, shared_address(staged));
        if (Config::REST) {
            sync_threads(1 + warpgroup, 128);
            finish_staged(shared_address(staged), p, feature, column);
        }
        fence_shared_writes();
        sync_threads(1 + warpgroup, 128);
        if (leader) {
            if (OUT_LAST) {
#pragma unroll
                for (int block = 0; block < PART_BLOCKS; ++block)
                    store_box(p.y, staged + block * PART_BLOCK_BYTES, row + block * ROW, tile.lane,
                              column, tile.block);
            } else {
                store_box(p.y, staged, column, tile.lane, row, tile.block);
            }
            commit_stores();
        }
        if (++slot == OUT_PARTS) slot = 0;
    }
}
