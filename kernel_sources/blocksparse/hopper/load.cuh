// The copies of a stage: pieces of 64 x 64 of two bytes each, and a panel of the dense operand.
#pragma once

#include "blocksparse/hopper/config.cuh"
#include "blocksparse/hopper/ring.cuh"

struct Copies {
    static constexpr int BYTES_A_PIECE = PIECE_BYTES, BYTES_A_PANEL = PANEL_BYTES;

    // One stage: the pieces that are stored, each asked for by a lane of its own, to which the walk
    // has given its line's slot, and the panel.
    __device__ __forceinline__ static void load(const Parameters& p, const Shared& s,
                                                const Tile& tile, const Ring& ring, int slot,
                                                u32 live, int block, int part) {
        int lane = threadIdx.x % 32, depth = part * STEP_DEPTH;
        u64* full = &s.full[ring.stage];
        unsigned char* to = s.stages + ring.stage * STAGE_BYTES;
#pragma unroll
        for (int w = 0; w < WARPGROUPS; ++w) {
            if (lane != w || !(live >> w & 1)) continue;
            int line = LINES == 64 ? 0 : w * 64;
            load_box(to + w * PIECE_BYTES, p.values, full, TRANSPOSED ? line : depth,
                     TRANSPOSED ? depth : line, slot, tile.batch * p.value_batches);
        }
        to += WARPGROUPS * PIECE_BYTES;
        int k = block * DEPTH + depth, n = tile.column * TILE_COLUMNS;
        int head = tile.head * p.dense_heads, batch = tile.batch * p.dense_batches;
        if (DEPTH_LAST) {
            if (lane == WARPGROUPS) load_box(to, p.dense, full, k, n, head, batch);
        } else {
            int box = lane - WARPGROUPS;
            if (box >= 0 && box < TILE_COLUMNS / ROW)
                load_box(to + box * PIECE_BYTES, p.dense, full, n + box * ROW, k, head, batch);
        }
    }
};
