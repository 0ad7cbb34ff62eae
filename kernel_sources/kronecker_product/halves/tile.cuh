// A tile of half-precision numbers in shared memory, where they lie, and its modes. Numbers of fp32
// are WORDS 2: the nearest half-precision one, and what is left, in half precision too. Of eight
// neighbours, a chunk, the former lie side by side, and then the latter.
//
// A tile is an array (L, P, R) to each mode, in order and without gaps. All that is read or written
// at once are eight chunks of 8 numbers at any power of two from each other, so that all bits of a
// chunk's line, three at a time, are folded into its place in the line. With two words that is the
// one bit of its own place that tells them apart from each other too; what is copied from device
// memory lies in order within a line, as copies of other orders take a cycle for each 16 bytes.
#pragma once

#include "kronecker_product/halves/pair.cuh"
#include "kronecker_product/modes/config.cuh"
#include "kronecker_product/modes/thread.cuh"
#include "kronecker_product/types.cuh"

using HalfT = Config::HalfT;           // half_t or bfloat16_t
using DataT = Config::DataT;           // storage of x and of the result
constexpr int WORDS = Config::WORDS;   // of HalfT, that a number is
constexpr int TILES = Config::TILES;   // 2 where a mode writes results to a tile of their own
constexpr bool SCALED = Config::SCALED;  // of two words, or float16 of several modes

constexpr int CHUNK = 8;         // numbers of 16 bytes
constexpr int LINE = 8 * CHUNK;  // of all banks
constexpr int REST = CHUNK;      // the bit that tells a number's place from that of what is left
constexpr int IN_PLACE_MOST = WORDS == 1 ? 128 : 64;  // columns that one warp keeps sums of

__device__ constexpr int folded(int index) {
    int line = index / LINE;
    line ^= line >> 6;
    line ^= line >> 3;
    return index ^ ((line & 7) << 3);
}
__device__ constexpr int place(int index) {
    return folded(WORDS == 1 ? index : index / CHUNK * (2 * CHUNK) + index % CHUNK);
}
// Of a number of fp32 as it is copied.
__device__ constexpr int raw_place(int index) { return folded(index * WORDS); }

template <>
struct Stored<HalfT> {
    using RawT = DataT;
    static constexpr int WORDS = ::WORDS;
    __device__ static constexpr int place(int index) { return raw_place(index); }
};

__device__ constexpr int ceil_log2(int x) { return x <= 1 ? 0 : 1 + ceil_log2(ceil_div(x, 2)); }

// Makes (L, Q, R) of a tile (L, P, R) by a matrix P x Q, the product of the PARTS factors from
// FIRST on, which lies AT numbers behind the first matrix, transposed. NUMBER counts modes. P and Q
// are multiples of 8, R too or 1.
template <int L_, int P_, int Q_, int R_, int FIRST_, int PARTS_, int LAST_, int AT_, int NUMBER_>
struct Mode<L_, P_, Q_, R_, FIRST_, PARTS_, LAST_, AT_, NUMBER_> {
    static constexpr int L = L_, P = P_, Q = Q_, R = R_, FIRST = FIRST_, PARTS = PARTS_, AT = AT_;
    static constexpr int NUMBER = NUMBER_;
    static constexpr bool LAST = LAST_;

    // Of fragments: 16 columns of the matrix by 8 slices.
    static constexpr int SLICES = L * R, COLUMN_TILES = ceil_div(Q, 16);
    static constexpr int SLICE_TILES = ceil_div(SLICES, 8), MATRIX = COLUMN_TILES * 16 * P;
    static constexpr int STEPS = P / 16;            // of 16 in depth
    static constexpr bool HAS_TAIL = P % 16 != 0;  // of 8
    // Where chunks are of neighbouring slices, and not of neighbours in depth.
    static constexpr bool ACROSS = R > 1;

    // A warp that makes all columns of its slices may write them where it read them; and any, once
    // all of the tile has been read, if none has more than one unit of results.
    static constexpr bool IN_PLACE = P == Q && Q <= IN_PLACE_MOST;
    static constexpr int SHARE = WORDS == 1 ? 4 : 2;  // of tiles of columns
    static constexpr int OWN_COLUMNS = IN_PLACE || COLUMN_TILES < SHARE ? COLUMN_TILES : SHARE;
    static constexpr int GROUPS = ceil_div(COLUMN_TILES, OWN_COLUMNS);
    __device__ static constexpr int slices() {
        if (OWN_COLUMNS > 4 / WORDS && IN_PLACE) return 2;
        return HAS_TAIL || ceil_div(SLICE_TILES, 4) * GROUPS >= WARPS ? 4 : 2;
    }
    static constexpr int OWN_SLICES = slices();
    static constexpr int UNITS = ceil_div(SLICE_TILES, OWN_SLICES) * GROUPS;
    static constexpr bool AT_ONCE = !IN_PLACE && WORDS == 2 && UNITS <= WARPS;
    static constexpr bool STAYS = IN_PLACE || AT_ONCE;  // results take the tile's place
    // Of numbers of two words: 8 x 8 by one multiplication for all of their products.
    static constexpr int GROWTH = P <= 8 ? 2 : ceil_log2(P) - 1;  // as split.cuh has it
    static constexpr bool STACKED = WORDS == 2 && P == 8 && Q == 8;
    // Whether all slices exist, and indices are bits side by side: the place of an index is that of
    // its parts, xor-ed, most of which are known to the compiler or the same for all of a mode.
    static constexpr bool LINEAR = is_power(P) && is_power(Q) && is_power(R) && is_power(L) &&
                                   SLICES % (8 * OWN_SLICES) == 0 &&
                                   COLUMN_TILES % OWN_COLUMNS == 0;
    // The matrix in registers.
    static constexpr bool KEPT = GROUPS == 1 && COLUMN_TILES * ceil_div(P, 16) * WORDS <= 4;
};

// A warp's results.
template <class M>
struct Sums {
    float value[M::OWN_COLUMNS][M::OWN_SLICES][4];
};

// The first element of a slice in an array whose matrix dimension is of size WIDTH.
template <class M, int WIDTH>
__device__ constexpr int first_of(int slice) {
    return M::ACROSS ? slice / M::R * (WIDTH * M::R) + slice % M::R : slice * WIDTH;
}

// The place of an element, given by the slice it is of: that of tile `first`, `own` tiles on, and
// what a lane adds; and by its index `offset` beside the slice's first one, a lane's again apart.
template <class M, int WIDTH>
__device__ __forceinline__ int place_of(int first, int own, int lane_slice, int offset,
                                        int lane_offset) {
    if constexpr (M::LINEAR) {
        int lane = place(first_of<M, WIDTH>(lane_slice) + lane_offset);
        return place(first_of<M, WIDTH>(first * 8)) ^ lane ^
               place(first_of<M, WIDTH>(own * 8)) ^ place(offset);
    } else {
        int slice = (first + own) * 8 + lane_slice;
        slice = slice < M::SLICES ? slice : 0;  // what is read there goes nowhere
        return place(first_of<M, WIDTH>(slice) + offset + lane_offset);
    }
}
