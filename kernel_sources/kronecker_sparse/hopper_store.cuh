// A finished tile through shared memory to device memory, by the copy engine.
#pragma once

// Address of 16-byte chunk `chunk` of a swizzled row.
__device__ __forceinline__ u32 chunk_address(u32 block, int row, int chunk) {
    return block + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

#if HALF_INPUT
__device__ __forceinline__ u32 pack(float x, float y) {
    return u32(convert<OutputT>(x).bits) | u32(convert<OutputT>(y).bits) << 16;
}

// Accumulators 4c .. 4c+3 of a thread are columns 8c + 2 (lane % 4) + {0, 1} of rows lane / 4 and
// lane / 4 + 8 of its warp's sixteen.
__device__ __forceinline__ void stage_tile(const float (&sums)[SUMS], u32 out) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    int matrix = lane / 8, line = lane % 8;
#pragma unroll
    for (int pair = 0; pair < TILE_COLUMNS / 16; ++pair) {
        u32 part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = pack(sums[8 * pair + 2 * i], sums[8 * pair + 2 * i + 1]);
        int column = 16 * pair + matrix / 2 * 8, row = 16 * warp + matrix % 2 * 8;
        u32 address = BATCH_LAST ? chunk_address(out, column + line, row / 8)
                                 : chunk_address(out + column / ROW * OUT_BLOCK_BYTES, row + line,
                                                 column % ROW / 8);
        store_matrices<BATCH_LAST>(address, part[0], part[1], part[2], part[3]);
    }
}
#else
__device__ __forceinline__ void stage_tile(const float (&sums)[SUMS], u32 out) {
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        int column = i / 4 * 8 + lane % 4 * 2 + i % 2, line = row + i / 2 % 2 * 8;
        int along = BATCH_LAST ? line : column, across = BATCH_LAST ? column : line;
        store_shared(chunk_address(out + along / ROW * OUT_BLOCK_BYTES, across, along % ROW / 4) +
                         along % 4 * 4,
                     sums[i]);
    }
}
#endif

// The costly epilogues over this warpgroup's part of the tile; `feature` is that of j = 0.
__device__ __forceinline__ void finish_staged(u32 out, const Parameters& p, i64 feature, int first) {
    Rest rest(ReadFrom<HEAD_SCALARS, HEAD_VECTORS, Read>{Read{p}});
    constexpr int LINES = BATCH_LAST ? TILE_COLUMNS : 64, CHUNK = 16 / sizeof(OutputT);
#pragma unroll 1
    for (int index = threadIdx.x % 128; index < OUT_BLOCKS * LINES * 8; index += 128) {
        int chunk = index % 8, line = index / 8 % LINES, block = index / 8 / LINES;
        int j = first + (BATCH_LAST ? line : block * ROW + chunk * CHUNK);
        finish_chunk(chunk_address(out + block * OUT_BLOCK_BYTES, line, chunk), rest, [&](int e) {
            return feature + i64(min(BATCH_LAST ? j : j + e, p.columns - 1)) * p.lanes;
        });
    }
}

#if PARTIAL
// The sums as they are, each pair of columns side by side.
__device__ __forceinline__ void store_partial(const float (&sums)[SUMS], const Parameters& p,
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
#else
__device__ __forceinline__ void store_tile(float (&sums)[SUMS], const Finish& finish,
                                           const Parameters& p, unsigned char* out,
                                           const Tile& tile, int warpgroup) {
    int lane = threadIdx.x % 32;
    bool leader = threadIdx.x % 128 == 0;
    int first = tile.column * TILE_COLUMNS;
    i64 feature = i64(tile.block) * p.columns * p.lanes + tile.lane;
    if (HEAD) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            int column = min(first + i / 4 * 8 + lane % 4 * 2 + i % 2, p.columns - 1);
            sums[i] = finish(sums[i], feature + i64(column) * p.lanes);
        }
    }
    if (leader) wait_for_reads<OUT_BUFFERS - 1>();
    sync_threads(1 + warpgroup, 128);
    stage_tile(sums, shared_address(out));
    if (REST) {
        sync_threads(1 + warpgroup, 128);
        finish_staged(shared_address(out), p, feature, first);
    }
    fence_shared_writes();
    sync_threads(1 + warpgroup, 128);
    if (leader) {
        int row = tile.row * TILE_ROWS + warpgroup * 64;
#pragma unroll
        for (int block = 0; block < OUT_BLOCKS; ++block) {
            unsigned char* from = out + block * OUT_BLOCK_BYTES;
            if (BATCH_LAST)
                store_box(p.y, from, row + block * ROW, tile.lane, first, tile.block);
            else
                store_box(p.y, from, first + block * ROW, tile.lane, row, tile.block);
        }
        commit_stores();
    }
}
#endif
