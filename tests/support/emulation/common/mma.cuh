// common/mma.cuh of kernel_sources: fragments multiplied by what lanes hand each other.
#pragma once

#include "common/types.cuh"

inline double rows_of_lanes[32][32][4], columns_of_lanes[32][32][2];  // by warp and lane

// D (16 x 8) += A (16 x 8) B (8 x 8), in the layout of common/mma.cuh and common/mma_double.cuh.
template <class T>
inline void multiply_by_lanes(T (&d)[4], const double (&a)[4], const double (&b)[2]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) rows_of_lanes[warp][lane][i] = a[i];
    for (int i = 0; i < 2; ++i) columns_of_lanes[warp][lane][i] = b[i];
    wait_for_warp();
    for (int i = 0; i < 4; ++i) {
        int half = i / 2, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 8; ++k)
            sum += rows_of_lanes[warp][lane / 4 * 4 + k % 4][half + k / 4 * 2] *
                   columns_of_lanes[warp][column * 4 + k % 4][k / 4];
        d[i] = T(sum);
    }
    wait_for_warp();
}

// TF32: of each 32-bit element the tensor core reads the upper 19 bits.
template <class T>
inline void multiply_fragments(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    double left[4], right[2];
    for (int i = 0; i < 4; ++i) left[i] = __uint_as_float(a[i] & 0xffffe000u);
    for (int i = 0; i < 2; ++i) right[i] = __uint_as_float(b[i] & 0xffffe000u);
    multiply_by_lanes(d, left, right);
}

inline u32 round_to_tf32(u32 x) { return (x + 0x1000u) & 0xffffe000u; }
inline u32 rest_of_tf32(u32 x) {
    float rest = __uint_as_float(x) - __uint_as_float(x & 0xffffe000u);
    return __float_as_uint(rest) + 0x1000u;
}
inline void split_to_tf32(u32 x, u32& high, u32& low) {
    high = round_to_tf32(x);
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

// A's and B's halves of a fragment: `depth` numbers of K, eight of them by each pair of words.
template <class T>
inline float half_of(u32 word, int index) {
    return convert<float>(T{u16(word >> 16 * index)});
}
inline u32 words_of_lanes[32][32][6];

template <class T>
inline void multiply_halves(float (&d)[4], const u32* a, const u32* b, int depth) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& words = words_of_lanes[warp];
    for (int i = 0; i < depth / 4; ++i) words[lane][i] = a[i];
    for (int i = 0; i < depth / 8; ++i) words[lane][4 + i] = b[i];
    wait_for_warp();
    for (int i = 0; i < 4; ++i) {
        int row = lane / 4 * 4, lower = i / 2, column = (lane % 4 * 2 + i % 2) * 4;
        double sum = d[i];
        for (int k = 0; k < depth; ++k)
            sum += half_of<T>(words[row + k % 8 / 2][lower + k / 8 * 2], k % 2) *
                   half_of<T>(words[column + k % 8 / 2][4 + k / 8], k % 2);
        d[i] = float(sum);
    }
    wait_for_warp();
}
template <>
inline void multiply_fragments<half_t>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply_halves<half_t>(d, a, b, 16);
}
template <>
inline void multiply_fragments<bfloat16_t>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply_halves<bfloat16_t>(d, a, b, 16);
}

template <bool TRANSPOSED>
inline void load_matrices(u32 (&x)[4], u32 address) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    check_alignment(shared + int(address), 16);  // static memory may lie before it
    words_of_lanes[warp][lane][0] = address;
    wait_for_warp();
    for (int i = 0; i < 4; ++i) {
        u16 two[2];
        for (int k = 0; k < 2; ++k) {
            int row = TRANSPOSED ? lane % 4 * 2 + k : lane / 4;
            int column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + k;
            const unsigned char* from = shared + int(words_of_lanes[warp][i * 8 + row][0]);
            std::memcpy(&two[k], from + 2 * column, 2);
        }
        x[i] = two[0] | u32(two[1]) << 16;
    }
    wait_for_warp();
}
