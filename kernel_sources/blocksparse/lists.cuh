// Which blocks a tile's lines of blocks store, in order of depth: the union of GROUPS lines, and of
// each block which of the lines store it and where.
//
// A warp walks them by itself: no list is made beforehand, and no barrier is needed. 32 / GROUPS
// words of each line's bits are looked at at a time, one such set ahead, so that empty ones cost a
// ballot; of the next word that is not empty the ranks are read while the current one is worked on.
//
// Reads of struct Config:
//   TRANSPOSED   whether op(S) is S^T: a line of blocks is a column of the layout
//   GROUPS       lines of blocks of a tile: 1, 2, 4 or 8
//   PARTIAL      whether a tile has but a part of the depth
#pragma once

#include "blocksparse/side.cuh"

// The layout's words, and of them those of a line of op(S), of a row as stored; its blocks.
struct Lists {
    const u32* row_bits;
    const int* row_ranks;
    const u32* col_bits;
};

// Blocks along the depth.
struct Range {
    int begin, end;
};

constexpr u32 ALL = 0xffffffffu;                  // lanes
constexpr u32 LIVE = (1u << Config::GROUPS) - 1;  // a bit of each line
constexpr int WORDS_AT_ONCE = 32 / Config::GROUPS;

struct Walk {
    static constexpr bool TRANSPOSED = Config::TRANSPOSED, PARTIAL = Config::PARTIAL;
    static constexpr int GROUPS = Config::GROUPS;

    const Lists* lists;
    const Grid* grid;
    Range range;  // PARTIAL: of the blocks that count
    i64 line;   // of all heads', that this lane looks at: line lane % GROUPS of the tile
    i64 row;    // TRANSPOSED: the head's first row of blocks
    int place;  // TRANSPOSED: of the tile's first line in a word of a row
    bool exists;
    int first;           // of the words of `found`: word first + lane / GROUPS of the lane's line
    u32 found, ahead;    // and the set behind it
    u32 waiting;         // lanes whose word is not empty and still to come
    int word, next_word;
    u32 left, next_left;  // of a word, which blocks of the union are still to come
    u32 bits, next_bits;  // of it this lane's: of its line or, TRANSPOSED, of its row
    int rank, next_rank;

    __device__ __forceinline__ Walk(const Lists& lists, const Grid& grid, int head, int first_line,
                                    const Range& range = {})
        : lists(&lists), grid(&grid), range(range) {
        int own = first_line + threadIdx.x % GROUPS;
        exists = own < grid.lines;
        line = i64(head) * grid.lines + own;
        row = i64(head) * grid.depths;
        place = first_line;
        int start = PARTIAL ? range.begin / 32 : 0;
        first = start - WORDS_AT_ONCE;
        waiting = left = next_left = 0;
        ahead = words_from(start);
        look();
    }

    __device__ __forceinline__ u32 words_from(int start) const {
        int at = start + threadIdx.x % 32 / GROUPS;
        const u32* from = TRANSPOSED ? lists->col_bits : lists->row_bits;
        return exists && at < grid->line_words ? from[line * grid->line_words + at] : 0;
    }

    // Of a word the blocks in the range. Those before it stay in `bits`: ranks count them.
    __device__ __forceinline__ u32 wanted(int word) const {
        if (!PARTIAL) return ~0u;
        int before = range.begin - word * 32, there = range.end - word * 32;
        u32 low = before <= 0 ? 0 : before < 32 ? (1u << before) - 1 : ~0u;
        u32 high = there >= 32 ? ~0u : there > 0 ? (1u << there) - 1 : 0;
        return high & ~low;
    }

    // Finds the next word that is not empty, and begins to read of it.
    __device__ __forceinline__ void look() {
        next_left = 0;
        while (waiting == 0) {
            first += WORDS_AT_ONCE;
            if (first >= grid->line_words) return;
            found = ahead;
            ahead = words_from(first + WORDS_AT_ONCE);
            u32 own = found & wanted(first + int(threadIdx.x) % 32 / GROUPS);
            waiting = __ballot_sync(ALL, own != 0);
        }
        int lane = threadIdx.x % 32, j = (__ffs(waiting) - 1) / GROUPS;
        waiting &= ~(LIVE << j * GROUPS);
        next_word = first + j;
        next_left = __reduce_or_sync(ALL, lane / GROUPS == j ? found : 0) & wanted(next_word);
        next_bits = __shfl_sync(ALL, found, j * GROUPS + lane % GROUPS);
        next_rank = 0;
        if (TRANSPOSED) {
            next_bits = 0;
            if (next_left >> lane & 1) {
                i64 at = (row + next_word * 32 + lane) * grid->row_words + place / 32;
                next_bits = lists->row_bits[at];
                next_rank = lists->row_ranks[at];
            }
        } else if (next_bits) {
            next_rank = lists->row_ranks[line * grid->line_words + next_word];
        }
    }

    // The next block's number along the depth, or -1: which lines store it, and where line
    // lane % GROUPS does, if it is one of these.
    __device__ __forceinline__ int next(u32& live, int& slot) {
        live = 0;
        if (left == 0) {
            if (next_left == 0) return -1;
            word = next_word;
            left = next_left;
            bits = next_bits;
            rank = next_rank;
            look();
        }
        int at = __ffs(left) - 1;
        left &= left - 1;
        u32 own = bits;
        int before = rank, bit = at;
        if (TRANSPOSED) {
            own = __shfl_sync(ALL, bits, at);
            before = __shfl_sync(ALL, rank, at);
            live = own >> place % 32 & LIVE;
            bit = place % 32 + threadIdx.x % GROUPS;
        } else {
            live = __ballot_sync(ALL, bits >> at & 1) & LIVE;
        }
        slot = before + __popc(own & ((1u << bit) - 1));
        return word * 32 + at;
    }
};
