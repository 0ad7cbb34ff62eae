// A tile in shared memory, and where its elements lie. The tile is an array (L, P, R) to each mode,
// in order and without gaps; what a warp reads or writes at once are eight slices and four or eight
// of P, at any power of two from each other. So the bank of an element depends on all bits of its
// index: those above the 32 (16 of double) of one line of banks are folded, two at a time, into the
// two that tell apart the quarters of a line. Quarters, of 8 floats, stay together.
#pragma once

#include "kronecker_product/modes/config.cuh"
#include "kronecker_product/modes/thread.cuh"
#include "kronecker_product/types.cuh"

using AccT = Config::AccT;
constexpr int PRODUCTS = Config::PRODUCTS;      // of one in float: 1, or 3 for fp32 by 3xTF32
constexpr int MOST_SPLIT = Config::MOST_SPLIT;  // elements of a matrix that is two words each

constexpr int IN_PLACE_MOST = 32;  // columns that one warp keeps sums of
constexpr int LINE_BITS = sizeof(AccT) == 8 ? 4 : 5;

__device__ constexpr int place(int index) {
    int high = index >> LINE_BITS;
    high ^= high >> 8;
    high ^= high >> 4;
    high ^= high >> 2;
    return index ^ ((high & 3) << (LINE_BITS - 2));
}

// What is copied to a tile is what its modes read.
template <>
struct Stored<AccT> {
    using RawT = AccT;
    static constexpr int WORDS = 1;
    __device__ static constexpr int place(int index) { return ::place(index); }
};

// A mode: of a tile (L, P, R) it makes (L, Q, R) by a matrix P x Q, the Kronecker product of the
// PARTS factors from FIRST on, which lies AT elements behind the first matrix. The last one's
// results go to device memory.
template <int L_, int P_, int Q_, int R_, int FIRST_, int PARTS_, int LAST_, int AT_>
struct Mode<L_, P_, Q_, R_, FIRST_, PARTS_, LAST_, AT_> {
    static constexpr int L = L_, P = P_, Q = Q_, R = R_, FIRST = FIRST_, PARTS = PARTS_, AT = AT_;
    static constexpr bool LAST = LAST_;
    static constexpr int SLICES = L * R, ROW_TILES = ceil_div(SLICES, 16);
    static constexpr int COLUMN_TILES = ceil_div(Q, 8), STEPS = ceil_div(P, 8);
    static constexpr int DEPTH = STEPS * 8, MATRIX = COLUMN_TILES * 8 * DEPTH;
    // Whether low words of the matrix lie MATRIX elements behind the high ones.
    static constexpr bool SPLIT = PRODUCTS == 3 && MATRIX <= MOST_SPLIT;

    // Warps share the columns out among groups of them. A step of 8 in depth takes a warp 4 cycles
    // of shared memory for 16 slices, 2 for 8 columns, and 2 to 5 of tensor cores for both.
    __device__ static constexpr int cycles(int count) {
        int rows = ceil_div(ROW_TILES, WARPS / count), columns = ceil_div(COLUMN_TILES, count);
        return 4 * rows + 2 * columns + 4 * rows * columns;
    }
    __device__ static constexpr int groups() {
        if (P == Q && Q <= IN_PLACE_MOST && ROW_TILES >= WARPS) return 1;
        int best = 1;
        for (int count = 2; count <= WARPS; count *= 2)
            if (cycles(count) < cycles(best)) best = count;
        return best;
    }
    static constexpr int GROUPS = groups(), WARP_COLUMNS = ceil_div(COLUMN_TILES, GROUPS);
    static constexpr int WARP_ROWS = ceil_div(ROW_TILES, WARPS / GROUPS);
    // A warp that has all columns of its slices may write them where it read them.
    static constexpr bool IN_PLACE = P == Q && GROUPS == 1;
    // Fragments of rows under way: all, where results wait until every warp has read the tile.
    static constexpr bool AT_ONCE = !LAST && !IN_PLACE;
    __device__ static constexpr int rows() {
        constexpr int FRAGMENTS = 16 / sizeof(AccT);
        int most = WARP_COLUMNS >= FRAGMENTS ? 1 : FRAGMENTS / WARP_COLUMNS;
        return AT_ONCE || WARP_ROWS < most ? WARP_ROWS : most;
    }
    static constexpr int ROWS = rows();
    static constexpr bool UNROLLED = STEPS * WARP_COLUMNS <= 8;  // all steps: more would spill
    // Whether all slices and columns exist, and indices are bits side by side: the place of an
    // index is that of its parts, xor-ed, most of which are known to the compiler or the same for
    // all of a mode.
    static constexpr bool LINEAR = is_power(L) && is_power(P) && is_power(Q) && is_power(R) &&
                                   P % 8 == 0 && Q % 8 == 0 && SLICES % 16 == 0 &&
                                   COLUMN_TILES % GROUPS == 0 &&
                                   ROW_TILES % (WARPS / GROUPS) == 0 && WARP_ROWS % ROWS == 0;
};

// The first element of a slice in an array whose matrix dimension is of size WIDTH.
template <class M, int WIDTH>
__device__ constexpr int first_of(int slice) {
    return slice / M::R * (WIDTH * M::R) + slice % M::R;
}

// A warp's results: fragments of 16 slices by 8 columns.
template <class M>
struct Sums {
    AccT value[M::ROWS][M::WARP_COLUMNS][4];
};

// The tile's columns that a fragment's rows and columns are.
template <class M>
struct Warp {
    int group, first_row, lane_row, lane_column;

    __device__ __forceinline__ Warp() {
        int thread = own_thread();
        int warp = thread / 32, lane = thread % 32;
        group = warp % M::GROUPS;
        first_row = warp / M::GROUPS;
        lane_row = lane / 4;
        lane_column = lane % 4 * 2;
    }
    // Whether fragment i has rows; j columns; and whether a slice exists.
    __device__ __forceinline__ bool has_row(int i) const {
        return M::LINEAR || row_tile(i) < M::ROW_TILES;
    }
    __device__ __forceinline__ bool has_column(int j) const {
        return M::LINEAR || column_tile(j) < M::COLUMN_TILES;
    }
    __device__ __forceinline__ static bool exists(int slice) {
        return M::LINEAR || slice < M::SLICES;
    }
    __device__ __forceinline__ int row_tile(int i) const {
        return first_row + i * (WARPS / M::GROUPS);
    }
    __device__ __forceinline__ int column_tile(int j) const { return group * M::WARP_COLUMNS + j; }
    // The slice of the upper or lower half of fragment i, and the first column of fragment j.
    __device__ __forceinline__ int slice(int i, int half) const {
        return row_tile(i) * 16 + half * 8 + lane_row;
    }
    __device__ __forceinline__ int column(int j) const {
        return column_tile(j) * 8 + lane_column;
    }
};

// The place of an element of the upper or lower half of fragment begin + i's slices: `own` indices
// of the matrix dimension on, and what the warp or the lane adds there.
template <class M, int WIDTH>
__device__ __forceinline__ int place_of(const Warp<M>& warp, int begin, int i, int half, int own,
                                        int lane) {
    if constexpr (M::LINEAR) {
        constexpr int STEP = WARPS / M::GROUPS * 16;
        return place(first_of<M, WIDTH>(warp.row_tile(begin) * 16)) ^
               place(first_of<M, WIDTH>(warp.lane_row) + lane * M::R) ^
               place(first_of<M, WIDTH>(i * STEP + half * 8) + own * M::R);
    } else {
        return place(first_of<M, WIDTH>(warp.slice(begin + i, half)) + (own + lane) * M::R);
    }
}
