// The columns of a tile of rows: blocks that one of its lines stores, in order of columns, gathered
// PIECES at a time, so that a tile of columns is full wherever its blocks lie. Rows and columns are
// those of a matrix or of its transpose, whose words the layout has too.
#pragma once

#include "blocksparse/attention/walk.cuh"

// The pieces of a tile of columns: lane i has the i-th. Those that are not there lie behind the
// last column, where copies bring zeros, and are stored by no line.
struct Pieces {
    int column;
    u32 live;
};

// A warp's walk over the union of a tile's lines. Lane l looks at line l % LINES; 32 / LINES words
// of each line are looked at at a time, one such set ahead, so that empty ones cost a ballot.
template <int LINES, int BLOCK, int PIECE, int PIECES>
struct Gather {
    static constexpr int AT_ONCE = 32 / LINES;
    static constexpr int PARTS = BLOCK / PIECE;  // pieces of a block
    static constexpr u32 LIVE = (1u << LINES) - 1;

    const u32* from;     // of this lane's line
    bool exists;
    int words, behind;   // of a line; the first column that does not exist
    Range range;         // of columns
    int first;           // word first + lane / LINES of the lane's line is in `found`
    u32 found, ahead;    // and the set behind it
    u32 waiting;         // lanes whose word is not empty and still to come
    int word;            // that is walked: its blocks still to come, and this lane's line's
    u32 left, own;
    int part, block;     // of a block of several pieces
    u32 live;

    // From line of blocks `line` on, of which there may be fewer than LINES.
    __device__ __forceinline__ Gather(const Bits& bits, int line, int behind, const Range& range)
        : words(bits.line_words), behind(behind), range(range), waiting(0), left(0), part(0) {
        line += int(threadIdx.x % LINES);
        exists = line < bits.lines && !range.is_empty();
        from = bits.words + i64(line) * words;
        int begin = range.begin / BLOCK / 32;
        first = begin - AT_ONCE;
        found = 0;
        ahead = read(begin);
    }

    // Of this lane's word of a set the blocks that hold some of the range.
    __device__ __forceinline__ u32 read(int start) const {
        int at = start + int(threadIdx.x % 32) / LINES;
        int begin = range.begin / BLOCK - at * 32;
        int end = (range.end - 1) / BLOCK + 1 - at * 32;
        if (!exists || at >= words || end <= 0 || begin >= 32) return 0;
        u32 low = begin <= 0 ? 0 : (1u << begin) - 1, high = end >= 32 ? ~0u : (1u << end) - 1;
        return from[at] & high & ~low;
    }

    // Moves on to a word of which some line stores a block that is still to come; false behind the
    // last one.
    __device__ __forceinline__ bool next_word() {
        while (left == 0) {
            if (waiting == 0) {
                first += AT_ONCE;
                if (range.is_empty() || first * 32 * BLOCK >= range.end) return false;
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
        return true;
    }

    // The next block that a line stores, and which lines do; false behind the last one.
    __device__ __forceinline__ bool next_block() {
        if (!next_word()) return false;
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
            int column = block * BLOCK + part * PIECE;
            some = column < range.end && column + PIECE > range.begin;
            if (++part == PARTS) part = 0;
        }
        return true;
    }

    // The first column of the piece that next_piece() found.
    __device__ __forceinline__ int column() const {
        return block * BLOCK + (PARTS == 1 ? 0 : (part + PARTS - 1) % PARTS * PIECE);
    }

    // The pieces of the next tile of columns; false if there are none.
    __device__ __forceinline__ bool next(Pieces& pieces) {
        pieces = {behind, 0};
        if constexpr (PIECES > 1) return next_blocks(pieces);
        if (!next_piece()) return false;
        if (threadIdx.x % 32 == 0) pieces = {column(), live};
        return true;
    }

    // The same of whole blocks: those of a word at once, where one after the other is a chain of
    // some 25 instructions each. Lane i finds which bit of `left` is the one that has i before it,
    // with those of words before.
    __device__ __forceinline__ bool next_blocks(Pieces& pieces) {
        static_assert(PARTS == 1, "a piece is a block");
        int lane = threadIdx.x % 32, count = 0;
#pragma unroll 1
        while (count < PIECES && next_word()) {
            bool is_left = left >> lane & 1;
            int place = count + __popc(left & ((1u << lane) - 1));
            u32 mine = 0;
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                u32 whose = __ballot_sync(ALL_LANES, is_left && place == i);
                if (lane == i) mine = whose;
            }
            int at = __ffs(int(mine)) - 1;
            u32 lines = 0;
#pragma unroll
            for (int line = 0; line < LINES; ++line)
                lines |= (__shfl_sync(ALL_LANES, own, line) & mine ? 1u : 0u) << line;
            if (mine) pieces = {(word * 32 + at) * BLOCK, lines};
            count += __popc(left);
            left = __ballot_sync(ALL_LANES, is_left && place >= PIECES);
        }
        return count > 0;
    }
};
