// common/hopper.cuh of kernel_sources, of what one block's own threads do.
#pragma once

#include "common/barrier.cuh"
#include "common/mma_half.cuh"

inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }
inline void fence_shared_writes() {}
inline void fence_barrier_init() {}
template <int REGISTERS>
inline void take_registers() {}
template <int REGISTERS>
inline void release_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}

inline Barrier numbered_barriers[16];
inline void sync_threads(int number, int threads) {
    Barrier& barrier = numbered_barriers[number];
    barrier.count = threads;
    barrier.wait();
}

inline u64 matrix_descriptor(u32 address, int atom_bytes, int group_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(atom_bytes >> 4) << 16 |
           u64(group_bytes >> 4) << 32 | u64(1) << 62;
}

// Of a matrix whose rows of 128 swizzled bytes run along M or N.
template <class T>
inline float number_of_matrix(u64 descriptor, int line, int depth) {
    if (descriptor >> 62 != 1) std::abort();
    u32 base = (descriptor & 0x3fff) << 4, atom = (descriptor >> 16 & 0x3fff) << 4;
    u32 group = (descriptor >> 32 & 0x3fff) << 4;
    if (base % 1024) std::abort();
    u32 at = base + line / 64 * atom + depth / 8 * group + depth % 8 * 128 + line % 64 * 2;
    at ^= (at >> 7 & 7) << 4;
    T x;
    std::memcpy(&x, shared + at, 2);
    return convert<float>(x);
}

// A thread's part of 64 x N sums of 16 products, whose left operand `left(row, depth)` gives.
template <class T, int N, class Left>
inline void multiply_matrices(float (&d)[N / 2], u64 right, int accumulate, const Left& left) {
    int lane = threadIdx.x % 32;
    for (int half = 0; half < 2; ++half) {
        float a[16];
        for (int k = 0; k < 16; ++k) a[k] = left(lane / 4 + 8 * half, k);
        for (int i = 0; i < N / 8; ++i)
            for (int next = 0; next < 2; ++next) {
                float& sum = d[4 * i + 2 * half + next];
                double whole = accumulate ? sum : 0;
                for (int k = 0; k < 16; ++k)
                    whole += double(a[k]) * number_of_matrix<T>(right, i * 8 + lane % 4 * 2 + next, k);
                sum = float(whole);
            }
    }
}
template <class T, int N>
inline void multiply_warpgroup(float (&d)[N / 2], u64 left, u64 right, int accumulate) {
    int first = threadIdx.x % 128 / 32 * 16;  // of the warp's rows
    multiply_matrices<T, N>(d, right, accumulate, [&](int row, int k) {
        return number_of_matrix<T>(left, first + row, k);
    });
}
template <class T, int N>
inline void multiply_warpgroup(float (&d)[N / 2], const u32 (&left)[4], u64 right, int accumulate) {
    int warp = threadIdx.x / 32;
    for (int i = 0; i < 4; ++i) words_of_lanes[warp][threadIdx.x % 32][i] = left[i];
    wait_for_warp();
    multiply_matrices<T, N>(d, right, accumulate, [&](int row, int k) {
        u32 word = words_of_lanes[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        return half_of<T>(word, k % 2);
    });
    wait_for_warp();
}

template <bool TRANSPOSED>
inline void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    static_assert(!TRANSPOSED);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    check_alignment(shared + address, 16);
    words_of_lanes[warp][lane][0] = address;
    wait_for_warp();
    u32 words[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        std::memcpy(shared + words_of_lanes[warp][i * 8 + lane / 4][0] + lane % 4 * 4, &words[i], 4);
    wait_for_warp();
}
