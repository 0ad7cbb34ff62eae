// What becomes of a tile's scores before their exponentials, where they are in registers.
//
// Numbers 4 g .. 4 g + 3 of a thread are columns 8 g + 2 (lane % 4) + {0, 1} of rows lane / 4 and
// lane / 4 + 8 of its warp's sixteen, which lie in one line of blocks.
#pragma once

#include "blocksparse/attention/hopper/parameters.cuh"
#include "common/overlap.cuh"

constexpr int SCORES = TILE_COLS / 2;       // of a thread
constexpr int OF_PIECE = PIECE / 2;         // of these, those of a piece

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000); }

// A warp's rows in a tile: the first, and which of the tile's lines of blocks has them.
struct Sixteen {
    int row, line;
    __device__ __forceinline__ Sixteen(int tile, int member) {
        int own = member * 64 + int(threadIdx.x) % 128 / 32 * 16;
        row = tile * TILE_ROWS + own;
        line = LINES > 1 ? own / BLOCK_ROWS : 0;
    }
    // The thread's own, 0 or 1.
    __device__ __forceinline__ int of(int half) const {
        return row + int(threadIdx.x) % 32 / 4 + 8 * half;
    }
};

// What a warp knows of its rows.
struct Task {
    Sixteen rows;
    Sight sight;
    Score score;
    Dropout dropout;
};

// Columns that a row sees, from the first one on.
struct Seen {
    int first;
    u32 count;
    __device__ __forceinline__ Seen(const Sight& sight, int row) {
        int end = WINDOW || CAUSAL ? min(sight.cols, row + sight.right + 1) : sight.cols;
        first = WINDOW ? max(0, row - sight.left) : 0;
        count = row < sight.rows && end > first ? end - first : 0;
    }
    __device__ __forceinline__ bool has(int col) const { return u32(col - first) < count; }
};

// -inf for what the warp's line of blocks does not store, whatever it was: a selection each and no
// branches, as most tiles of small blocks have gaps in most of their pieces.
__device__ __forceinline__ void leave_gaps(float (&scores)[SCORES], u32 stored) {
#pragma unroll
    for (int i = 0; i < SCORES; ++i)
        scores[i] = stored >> i / OF_PIECE & 1 ? scores[i] : minus_infinity();
}

// The same for what a row does not see. Few tiles have any of that, at an edge or a diagonal.
__device__ __forceinline__ void cut(float (&scores)[SCORES], const int (&columns)[PIECES],
                                    const Sight& sight, const Sixteen& rows) {
    Seen seen[2] = {Seen(sight, rows.of(0)), Seen(sight, rows.of(1))};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        int col = columns[piece];
        if (sight.covers(rows.row, 16, col, PIECE)) continue;
        col += int(threadIdx.x) % 4 * 2;
#pragma unroll
        for (int i = 0; i < OF_PIECE; ++i) {
            float& score = scores[piece * OF_PIECE + i];
            if (!seen[i / 2 % 2].has(col + i / 4 * 8 + i % 2)) score = minus_infinity();
        }
    }
}

// Of a tile's columns those behind `end`, of a piece that holds some before it as well.
__device__ __forceinline__ Range rows_behind(const Note& note, int end) {
    Range found = {0, 0};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        int before = end - note.columns[piece];
        if (before > 0 && before < PIECE)
            found = {piece * PIECE + before, (piece + 1) * PIECE};
    }
    return found;
}

// Logits in the place of products, by what the caller's text makes of them; -inf for what its mask
// leaves out. It is asked for rows and columns that exist alone.
__device__ __forceinline__ void change(float (&scores)[SCORES], const Note& note,
                                       const Parameters& p, const Score& score, float scale,
                                       const Sixteen& rows) {
    int own[2] = {min(rows.of(0), p.queries - 1), min(rows.of(1), p.queries - 1)};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        int first = note.columns[piece] + int(threadIdx.x) % 4 * 2;
#pragma unroll
        for (int i = 0; i < OF_PIECE; ++i) {
            int row = own[i / 2 % 2], col = min(first + i / 4 * 8 + i % 2, p.keys - 1);
            float& value = scores[piece * OF_PIECE + i];
            if (HAS_SCORE) value = score(value * scale, row, col);
            if (HAS_MASK && !score.keeps(row, col)) value = minus_infinity();
        }
    }
}

// Weights that the dropout takes are zero.
__device__ __forceinline__ void drop(float (&weights)[SCORES], const int (&columns)[PIECES],
                                     const Dropout& dropout, const Sixteen& rows) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 8) {
        int col = columns[i / OF_PIECE] + i % OF_PIECE * 2 + int(threadIdx.x) % 4 * 2;
        Dropout own = dropout;
        compute_here(own.key[0]);  // ten rounds' keys would be kept between tiles
        compute_here(own.key[1]);
        u32 words[4];
        own.words(words, rows.of(0), col);
        compute_here(words[3]);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            u32 word = words[e / 2 % 2 * 2 + e / 4];
            if (!dropout.keeps(word, e % 2)) weights[i + e] = 0.0f;
        }
    }
}
