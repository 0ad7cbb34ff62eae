// The columns of a tile of rows: blocks that one of its lines stores, in order of columns, gathered
// PIECES at a time, so that a tile of columns is full wherever its blocks lie.
#pragma once

#include "blocksparse/attention/hopper/parameters.cuh"

// The pieces of a tile of columns: lane i has the i-th. Those that are not there lie behind the
// last column, where copies bring zeros, and are stored by no line.
struct Pieces {
    int column;
    u32 live;
};

// A warp's walk over the union of the tile's lines. Lane l looks at line l % LINES; 32 / LINES
// words of each line are looked at at a time, one such set ahead, so that empty ones cost a ballot.
struct Gather {
    static constexpr int AT_ONCE = 32 / LINES;
    static constexpr int PARTS = BLOCK_COLS / PIECE;  // pieces of a block

    const u32* from;     // of this lane's line
    bool exists;
    int words, keys;
    Range range;         // of columns
    int first;           // word first + lane / LINES of the lane's line is in `found`
    u32 found, ahead;    // and the set behind it
    u32 waiting;         // lanes whose word is not empty and still to come
    int word;            // that is walked: its blocks still to come, and this lane's line's
    u32 left, own;
    int part, block;     // of a block of several pieces
    u32 live;

    __device__ __forceinline__ Gather(const Parameters& p, int layout, int tile, Range range)
        : words(p.line_words), keys(p.keys), range(range), waiting(0), left(0), part(0) {
        int line = int(i64(tile) * TILE_ROWS / BLOCK_ROWS) + int(threadIdx.x % LINES);
        exists = line < p.lines && !range.is_empty();
        from = p.row_bits + (i64(layout) * p.lines + line) * words;
        int begin = range.begin / BLOCK_COLS / 32;
        first = begin - AT_ONCE;
        found = 0;
        ahead = read(begin);
    }

    // Of this lane's word of a set the blocks that hold some of the range.
    __device__ __forceinline__ u32 read(int start) const {
        int at = start + int(threadIdx.x % 32) / LINES;
        int begin = range.begin / BLOCK_COLS - at * 32;
        int end = (range.end - 1) / BLOCK_COLS + 1 - at * 32;
        if (!exists || at >= words || end <= 0 || begin >= 32) return 0;
        u32 low = begin <= 0 ? 0 : (1u << begin) - 1, high = end >= 32 ? ~0u : (1u << end) - 1;
        return from[at] & high & ~low;
    }

    // The next block that a line stores, and which lines do; false behind the last one.
    __device__ __forceinline__ bool next_block() {
        while (left == 0) {
            if (waiting == 0) {
                first += AT_ONCE;
                if (range.is_empty() || first * 32 * BLOCK_COLS >= range.end) return false;
                found = ahead;
                ahead = read(first + AT_ONCE);
                waiting = __ballot_sync(ALL_LANES, found != 0);
                continue;
            }
            int lane = threadIdx.x % 32, place = (__ffs(int(waiting)) - 1) / LINES;
            waiting &= ~(LIVE << place * LINES);
            word = first + place;
            own = __shfl_sync(ALL_LANES, found, place * LINES + lane % LINES);
            left = __reduce_or_sync(ALL_LANES, own);
        }
        int at = __ffs(int(left)) - 1;
        left &= left - 1;
        block = word * 32 + at;
        live = __ballot_sync(ALL_LANES, own >> at & 1) & LIVE;
        return true;
    }

    // The next piece that holds some of the range.
    __device__ __forceinline__ bool next_piece() {
        bool some = false;
        while (!some) {
            if (part == 0 && !next_block()) return false;
            int column = block * BLOCK_COLS + part * PIECE;
            some = column < range.end && column + PIECE > range.begin;
            if (++part == PARTS) part = 0;
        }
        return true;
    }

    // The first column of the piece that next_piece() found.
    __device__ __forceinline__ int column() const {
        return block * BLOCK_COLS + (PARTS == 1 ? 0 : (part + PARTS - 1) % PARTS * PIECE);
    }

    // The pieces of the next tile of columns; false if there are none.
    __device__ __forceinline__ bool next(Pieces& pieces) {
        int lane = threadIdx.x % 32, count = 0;
        pieces = {keys, 0};
#pragma unroll 1
        for (; count < PIECES && next_piece(); ++count)
            if (lane == count) pieces = {column(), live};
        return count > 0;
    }
};
