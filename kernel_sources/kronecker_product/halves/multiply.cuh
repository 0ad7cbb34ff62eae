// One mode of a tile of half-precision numbers: the matrix, transposed, times eight slices, by
// tensor cores with sums in fp32.
//
//   WORDS 1      one product
//   WORDS 2      fp32 by high * high + high * low + low * high, of 22 bits each; steps in depth are
//                added in fp32, where a tensor core's own additions would truncate
#pragma once

#include "common/mma_half.cuh"
#include "kronecker_product/halves/tile.cuh"

// Fragments of the matrix: columns of tile first + i by 16, or 8, in depth.
template <class M>
__device__ __forceinline__ void read_matrix(u32 (&a)[WORDS][4], u32 matrix, int lane, int first,
                                            int i, int step) {
    if constexpr (M::STACKED) {
        // High words above low ones, and beside both the high words and the zeros below these, read
        // too: beside a zero that the compiler knew, it would copy the others for each product.
        int index = (lane % 8 + lane / 24 * 8) * M::P, low = lane / 8 == 1 ? REST : 0;
        load_matrices<false>(a[0], matrix + 2 * (place(index) ^ low));
        return;
    }
    bool is_tail = step == M::STEPS;
    int own = lane % 16 * M::P + (is_tail ? 0 : lane / 16 * 8);
    int rest = (first + i) * 16 * M::P + step * 16;
    int from = is_power(M::P) ? place(own) ^ place(first * 16 * M::P) ^ place(i * 16 * M::P) ^
                                    place(step * 16)
                              : place(own + rest);
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
        load_matrices<false>(a[word], matrix + 2 * (from ^ word * REST));
}

template <class M>
struct Kept {
    static constexpr int STEPS = M::KEPT ? M::STEPS + M::HAS_TAIL : 1;
    u32 a[STEPS][M::OWN_COLUMNS][WORDS][4];

    __device__ __forceinline__ Kept(u32 matrix, int lane) {
        if (!M::KEPT) return;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int i = 0; i < M::OWN_COLUMNS; ++i)
                read_matrix<M>(a[step][i], matrix, lane, 0, i, step);
    }
};

// Adds a step's products to a sum, of which they may be the first.
__device__ __forceinline__ void add_rounded(float (&sum)[4], const float (&step)[4],
                                            bool is_first) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] = is_first ? step[k] : sum[k] + step[k];
}

template <int COUNT>
__device__ __forceinline__ void add_products(float (&sum)[4], const u32 (&a)[COUNT][4],
                                             const u32 (&b)[COUNT][2], bool is_first) {
    if constexpr (COUNT == 1) {
        if (is_first) first_products<HalfT>(sum, a[0], b[0]);
        else multiply_fragments<HalfT>(sum, a[0], b[0]);
    } else {
        float step[4];
        first_products<HalfT>(step, a[1], b[0]);
        multiply_fragments<HalfT>(step, a[0], b[1]);
        multiply_fragments<HalfT>(step, a[0], b[0]);
        add_rounded(sum, step, is_first);
    }
}

// Fragments of a warp's slices, 16 in depth from a step on: of each two tiles four registers.
template <class M>
__device__ __forceinline__ void read_step(u32 (&b)[M::OWN_SLICES / 2][WORDS][4], u32 tile, int lane,
                                          int first, int step) {
    constexpr int STRIDE = M::ACROSS ? M::R : 1;
    int row = lane % 8, lower = lane / 8 % 2 * 8;
    int slice = lane / 16 * 8 + (M::ACROSS ? 0 : row), behind = M::ACROSS ? lower + row : lower;
#pragma unroll
    for (int j = 0; j < M::OWN_SLICES / 2; ++j) {
        int from = place_of<M, M::P>(first, 2 * j, slice, step * 16 * STRIDE, behind * STRIDE);
#pragma unroll
        for (int word = 0; word < WORDS; ++word)
            load_matrices<M::ACROSS>(b[j][word], tile + 2 * (from ^ word * REST));
    }
}

template <class M>
__device__ __forceinline__ void multiply_step(float (&sums)[M::OWN_SLICES][4],
                                              const u32 (&a)[WORDS][4],
                                              const u32 (&b)[M::OWN_SLICES / 2][WORDS][4],
                                              bool is_first) {
#pragma unroll
    for (int j = 0; j < M::OWN_SLICES; ++j) {
        u32 own[WORDS][2];
#pragma unroll
        for (int word = 0; word < WORDS; ++word)
#pragma unroll
            for (int k = 0; k < 2; ++k) own[word][k] = b[j / 2][word][j % 2 * 2 + k];
        add_products(sums[j], a, own, is_first);
    }
}

// The last 8 in depth, of one slice tile.
template <bool IS_STACKED, int COUNT>
__device__ __forceinline__ void add_tail(float (&sum)[4], const u32 (&a)[COUNT][4],
                                         const u32 (&b)[COUNT], bool is_first) {
    if constexpr (COUNT == 1) {
        if (is_first) first_short_products<HalfT>(sum, a[0][0], a[0][1], b[0]);
        else multiply_short_fragments<HalfT>(sum, a[0][0], a[0][1], b[0]);
    } else if constexpr (IS_STACKED) {
        float step[4];
        first_products<HalfT>(step, a[0], b);
        sum[0] = step[2] + step[0];
        sum[1] = step[3] + step[1];
    } else {
        float step[4];
        const u32 twice[4] = {a[0][0], a[0][1], a[0][0], a[0][1]};
        first_short_products<HalfT>(step, a[1][0], a[1][1], b[0]);
        multiply_fragments<HalfT>(step, twice, b);
        add_rounded(sum, step, is_first);
    }
}

// Those of the last 8 in depth: four registers of as many tiles as these hold.
template <class M>
struct Tail {
    static_assert(M::OWN_SLICES == 2 || M::OWN_SLICES == 4, "of the four that are read at once");
    static constexpr int AT_ONCE = WORDS == 1 ? M::OWN_SLICES : 2;
    u32 b[M::OWN_SLICES / AT_ONCE][4];

    __device__ __forceinline__ void read(u32 tile, int lane, int first) {
        constexpr int STRIDE = M::ACROSS ? M::R : 1;
        int row = lane % 8;
        // Lanes of eight ask for a slice tile each; of two words, each second for the low ones.
        int tile_of_lane = lane / 8 / WORDS % AT_ONCE, low = lane / 8 % WORDS * REST;
        int slice = tile_of_lane * 8 + (M::ACROSS ? 0 : row), behind = M::ACROSS ? row : 0;
#pragma unroll
        for (int j = 0; j < M::OWN_SLICES / AT_ONCE; ++j) {
            int from = place_of<M, M::P>(first, j * AT_ONCE, slice, M::STEPS * 16 * STRIDE,
                                         behind * STRIDE);
            load_matrices<M::ACROSS>(b[j], tile + 2 * (from ^ low));
        }
    }
    __device__ __forceinline__ void multiply(float (&sums)[M::OWN_SLICES][4],
                                             const u32 (&a)[WORDS][4], bool is_first) const {
#pragma unroll
        for (int j = 0; j < M::OWN_SLICES; ++j) {
            u32 own[WORDS];
#pragma unroll
            for (int word = 0; word < WORDS; ++word)
                own[word] = b[j / AT_ONCE][j % AT_ONCE * WORDS + word];
            add_tail<M::STACKED>(sums[j], a, own, is_first);
        }
    }
};

// OWN_COLUMNS tiles of columns from one on, by OWN_SLICES tiles of slices.
template <class M>
__device__ __forceinline__ void multiply(Sums<M>& sums, u32 tile, u32 matrix, const Kept<M>& kept,
                                         int lane, int first_column, int first_slice) {
#pragma unroll(M::KEPT || M::STEPS <= 4 ? 8 : 2)
    for (int step = 0; step < M::STEPS + M::HAS_TAIL; ++step) {
        u32 b[M::OWN_SLICES / 2][WORDS][4];
        Tail<M> tail;
        const bool is_tail = M::HAS_TAIL && step == M::STEPS;
        if (is_tail) tail.read(tile, lane, first_slice);
        else read_step<M>(b, tile, lane, first_slice, step);
        const bool is_first = (M::KEPT || M::STEPS <= 4) && step == 0;  // as the compiler knows
#pragma unroll
        for (int i = 0; i < M::OWN_COLUMNS; ++i) {
            u32 a[WORDS][4];
            if constexpr (M::KEPT) {
#pragma unroll
                for (int word = 0; word < WORDS; ++word)
#pragma unroll
                    for (int k = 0; k < 4; ++k) a[word][k] = kept.a[step][i][word][k];
            } else {
                constexpr bool EXIST = M::COLUMN_TILES % M::OWN_COLUMNS == 0;
                bool exists = EXIST || first_column + i < M::COLUMN_TILES;
                read_matrix<M>(a, matrix, lane, exists ? first_column : 0, exists ? i : 0, step);
            }
            if (is_tail) tail.multiply(sums.value[i], a, is_first);
            else multiply_step<M>(sums.value[i], a, b, is_first);
        }
    }
}
