// Which tiles of a line of tiles have something to compute, in order, and which of their blocks a
// layout stores. A warp walks a line by itself: no list is made beforehand, no barrier is needed,
// and nothing of the layout is known on the host.
//
// A line of tiles is TILE_LINE rows (columns, for a walk over columns) of the matrix, and tiles
// follow each other along the depth, TILE_DEPTH columns (rows) each. Of tiles and blocks, each of
// the two sizes of one is a multiple of the other's.
#pragma once

#include "common/types.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;

// Half open.
struct Range {
    int begin, end;
    __device__ __forceinline__ bool is_empty() const { return begin >= end; }
};

// Which columns a row sees by their position alone: those before `cols`, and of them i - left to
// i + right, of rows i before `rows`. LEFT, RIGHT: whether these two count.
template <bool LEFT, bool RIGHT>
struct Band {
    int rows, cols, left, right;

    __device__ __forceinline__ bool keeps(int row, int col) const {
        return row < rows && col < cols && (!RIGHT || col - row <= right) &&
               (!LEFT || row - col <= left);
    }
    // Of `count` rows from `row` on and `depth` columns from `col` on: whether all is seen, and
    // whether nothing is. Neither for what is cut.
    __device__ __forceinline__ bool covers(int row, int count, int col, int depth) const {
        return row + count <= rows && col + depth <= cols &&
               (!RIGHT || col + depth - 1 - row <= right) &&
               (!LEFT || row + count - 1 - col <= left);
    }
    __device__ __forceinline__ bool misses(int row, int count, int col, int depth) const {
        return row >= rows || col >= cols || (RIGHT && col - (row + count - 1) > right) ||
               (LEFT && row - (col + depth - 1) > left);
    }
    // The columns that some of these rows see lie in here, and the rows that see some of these
    // columns.
    __device__ __forceinline__ Range columns_of(int row, int count) const {
        int last = min(row + count, rows) - 1;
        int begin = LEFT ? max(0, row - left) : 0;
        int end = RIGHT ? min(cols, last + right + 1) : cols;
        return last < row ? Range{0, 0} : Range{begin, end};
    }
    __device__ __forceinline__ Range rows_of(int col, int count) const {
        int last = min(col + count, cols) - 1;
        int begin = RIGHT ? max(0, col - right) : 0;
        int end = LEFT ? min(rows, last + left + 1) : rows;
        return last < col ? Range{0, 0} : Range{begin, end};
    }
};

// The layout's words of a line of blocks: `lines` of them, `words` each, from the head's first on.
struct Bits {
    const u32* words;
    int lines, line_words;
};

// A tile: its number along the depth, and its stored blocks, bit l * ACROSS + d for block l along
// the line and d along the depth.
struct Tile {
    int index;
    u64 live;
};

template <int TILE_LINE, int TILE_DEPTH, int BLOCK_LINE, int BLOCK_DEPTH>
struct Walk {
    static constexpr int DOWN = TILE_LINE > BLOCK_LINE ? TILE_LINE / BLOCK_LINE : 1;
    static constexpr int ACROSS = TILE_DEPTH > BLOCK_DEPTH ? TILE_DEPTH / BLOCK_DEPTH : 1;
    static constexpr int TILES_A_LINE = TILE_LINE < BLOCK_LINE ? BLOCK_LINE / TILE_LINE : 1;
    static constexpr int TILES_A_BLOCK = TILE_DEPTH < BLOCK_DEPTH ? BLOCK_DEPTH / TILE_DEPTH : 1;
    static constexpr u32 OF_LINE = u32((1ull << ACROSS) - 1);
    static constexpr u64 FULL = DOWN * ACROSS == 64 ? ~0ull : (1ull << DOWN * ACROSS % 64) - 1;
    static_assert(DOWN * ACROSS <= 64 && 32 % ACROSS == 0, "blocks of a tile are bits");
    static_assert(DOWN * BLOCK_LINE == TILE_LINE * TILES_A_LINE, "tiles and blocks fit");
    static_assert(ACROSS * BLOCK_DEPTH == TILE_DEPTH * TILES_A_BLOCK, "tiles and blocks fit");

    Bits bits;
    int first;        // line of blocks
    int base, end;    // lane i has tile base + i; behind the last tile
    u32 waiting;      // lanes whose tile has something, and is still to come
    u64 live, ahead;  // of this lane's tile, and of that 32 tiles on

    // Tiles of line `line` that hold some of `range`, in elements along the depth.
    __device__ __forceinline__ Walk(const Bits& bits, int line, const Range& range) : bits(bits) {
        first = line * DOWN / TILES_A_LINE;
        base = range.begin / TILE_DEPTH;
        end = range.is_empty() ? base : (range.end - 1) / TILE_DEPTH + 1;
        live = blocks_of(base + int(threadIdx.x % 32));
        ahead = blocks_of(base + 32 + int(threadIdx.x % 32));
        waiting = __ballot_sync(ALL_LANES, live != 0);
    }

    __device__ __forceinline__ u64 blocks_of(int tile) const {
        u64 found = 0;
        int bit = tile * ACROSS / TILES_A_BLOCK;
        if (tile >= end) return found;
#pragma unroll
        for (int l = 0; l < DOWN; ++l) {
            if (first + l >= bits.lines) break;
            u32 word = bits.words[i64(first + l) * bits.line_words + bit / 32];
            found |= u64(word >> bit % 32 & OF_LINE) << l * ACROSS;
        }
        return found;
    }

    // The next tile of which some block is stored; false behind the last one. All lanes call.
    __device__ __forceinline__ bool next(Tile& tile) {
        while (waiting == 0) {
            base += 32;
            if (base >= end) return false;
            live = ahead;
            ahead = blocks_of(base + 32 + int(threadIdx.x % 32));
            waiting = __ballot_sync(ALL_LANES, live != 0);
        }
        int lane = __ffs(int(waiting)) - 1;
        waiting &= waiting - 1;
        tile.index = base + lane;
        tile.live = __shfl_sync(ALL_LANES, live, lane);
        return true;
    }

    // Of a tile's blocks those of line `line` of the tile's elements, bit d for the d-th.
    __device__ __forceinline__ static u32 of_line(u64 live, int line) {
        return u32(live >> line / BLOCK_LINE % DOWN * ACROSS) & OF_LINE;
    }
    // The same a bit for each GROUP elements along the depth.
    template <int GROUP>
    __device__ __forceinline__ static u32 groups_of_line(u64 live, int line) {
        static_assert(BLOCK_DEPTH % GROUP == 0 && TILE_DEPTH / GROUP <= 32, "whole groups");
        u32 own = of_line(live, line), groups = 0;
#pragma unroll
        for (int d = 0; d < TILE_DEPTH / GROUP; ++d)
            groups |= (own >> d * GROUP / BLOCK_DEPTH % ACROSS & 1) << d;
        return groups;
    }
};
