// The steps of a tile: the blocks along the depth that one of its lines of blocks stores, in order.
#pragma once

#include "blocksparse/hopper/parameters.cuh"

// Walked by a whole warp: lane i looks at block 32 w + i of the lines, a word at a time, one word
// ahead, so that a step costs a shuffle and no load.
struct Steps {
    const Parameters& p;
    int first;         // line of blocks, among all heads' (TRANSPOSED: of columns)
    int present;       // lines of blocks of the tile that exist, 1 .. GROUP
    int head, words, word;
    u32 left;          // blocks of the current word that are still to come
    int slots[GROUP], ahead[GROUP];  // this lane's, -1 where its block is not stored

    __device__ __forceinline__ Steps(const Parameters& p, const Tile& tile) : p(p) {
        int lines = TRANSPOSED ? p.grid_cols : p.grid_rows;
        words = TRANSPOSED ? p.col_words : p.row_words;
        head = tile.head;
        first = head * lines + tile.group * GROUP;
        present = min(GROUP, lines - tile.group * GROUP);
        word = -1;
        left = 0;
        read(0);
    }

    // The slots of word w of each line, into `ahead`.
    __device__ __forceinline__ void read(int w) {
        int lane = threadIdx.x % 32, block = w * 32 + lane;
        int depth = TRANSPOSED ? p.grid_rows : p.grid_cols;
        bool exists = w < words && block < depth;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            ahead[g] = -1;
            if (!exists || g >= present) continue;
            int line = first + g, place = lane;
            i64 at = i64(line) * words + w;
            if (TRANSPOSED) {
                int own = line - head * p.grid_cols;
                at = i64(head * p.grid_rows + block) * p.row_words + own / 32;
                place = own % 32;
            }
            u32 bits = p.row_bits[at];
            if (bits >> place & 1)
                ahead[g] = p.row_ranks[at] + __popc(bits & ((1u << place) - 1));
        }
    }

    // Moves to the next step and answers its block along the depth, or -1; `slot` is of each line.
    __device__ __forceinline__ int next(int (&slot)[GROUP]) {
        while (left == 0) {
            if (++word >= words) return -1;
            bool any = false;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                slots[g] = ahead[g];
                any |= slots[g] >= 0;
            }
            left = __ballot_sync(0xffffffffu, any);
            read(word + 1);
        }
        int lane = __ffs(left) - 1;
        left &= left - 1;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) slot[g] = __shfl_sync(0xffffffffu, slots[g], lane);
        return word * 32 + lane;
    }
};
