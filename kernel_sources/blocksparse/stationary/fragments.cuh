// From a stage to fragments of mma.sync, and their products.
#pragma once

#include "blocksparse/stationary/parameters.cuh"
#include "common/mma.cuh"

// Reads 16 lines of an operand by 16 of depth: as A's fragment of the left one, as two of B of the
// right one, whose halves of lines and of depth take turns the other way round. A piece's rows of
// 128 bytes are depths if LINES_LAST, else lines; their 16-byte chunks change places with the lower
// bits of the row, so that the eight rows of a matrix lie in different banks.
template <bool LINES_LAST, bool LEFT>
struct Reader {
    u32 place;

    __device__ __forceinline__ Reader() {
        int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
        int line_half = LEFT ? matrix % 2 : matrix / 2, depth_half = LEFT ? matrix / 2 : matrix % 2;
        int high = LINES_LAST ? depth_half : line_half, chunk = LINES_LAST ? line_half : depth_half;
        place = (high * 8 + row) * ROW_BYTES + ((chunk ^ row) << 4);
        asm volatile("" : "+r"(place));  // kept in a register, not computed anew for each read
    }

    // Of the group-th 16 lines of a stage; this lane's address for the first 16 of depth.
    __device__ __forceinline__ u32 begin(u32 stage, u32 group) const {
        if (LINES_LAST) return stage + group / 4 * PIECE_BYTES + (place ^ group % 4 << 5);
        return stage + group * 16 * ROW_BYTES + place;
    }
    __device__ __forceinline__ static void read(u32 (&x)[4], u32 begin, int step) {
        u32 deep = step / 4 * PIECES_ACROSS * PIECE_BYTES;
        if (LINES_LAST) load_matrices<true>(x, begin + deep + step % 4 * 16 * ROW_BYTES);
        else load_matrices<false>(x, (begin ^ step % 4 << 5) + deep);
    }
};
using LeftReader = Reader<LEFT_LINES, true>;
using RightReader = Reader<RIGHT_LINES, false>;

using Left = u32[TILES][STEPS][4];   // a warp's rows by the whole depth
using Sums = float[TILES][2][4];     // of these rows by 16 columns

__device__ __forceinline__ void read_left(Left& left, u32 stage, int first_group) {
    LeftReader reader;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        u32 begin = reader.begin(stage, first_group + tile);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) LeftReader::read(left[tile][step], begin, step);
    }
}

// 16 columns of b by the whole depth. At a depth of 64 they are held: read while the columns before
// are stored, 33 clocks and what it takes to find them earlier. At 128 the rows of a leave no room
// for that, and summands none.
struct Columns {
    static constexpr bool HELD = BLOCK == 16 && DEPTH == 64 && !SUMMANDS;
    u32 place;
    u32 x[HELD ? STEPS : 1][4];

    __device__ __forceinline__ void begin(u32 at) {
        place = at;
        if constexpr (HELD) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) RightReader::read(x[step], at, step);
        }
    }
    __device__ __forceinline__ const u32 (&step(int index))[4] {
        if (!HELD) RightReader::read(x[0], place, index);
        return x[HELD ? index : 0];
    }
};

// The sums of those tiles that a bit of WHICH stands for, in order of depth; others are left alone.
template <int WHICH>
__device__ __forceinline__ void multiply(Sums& sums, const Left& left, Columns& columns) {
#pragma unroll
    for (int i = 0; i < TILES * 8; ++i)
        if (WHICH >> i / 8 & 1) sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32(&x)[4] = columns.step(step);
        const u32 first[2] = {x[0], x[1]}, second[2] = {x[2], x[3]};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (!(WHICH >> tile & 1)) continue;
            multiply_fragments<InputT>(sums[tile][0], left[tile][step], first);
            multiply_fragments<InputT>(sums[tile][1], left[tile][step], second);
        }
    }
}
