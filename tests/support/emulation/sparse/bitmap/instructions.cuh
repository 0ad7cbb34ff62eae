// sparse/bitmap/instructions.cuh of kernel_sources, of kernels without the copy engine.
#pragma once

#include "common/mma.cuh"
#include "sparse/bitmap/warp.cuh"

inline void prefetch(const void*) {}

// Shared memory of a kernel's own is a static one here: some way from the block's, forth or back.
inline unsigned char* in_shared(u32 address, int bytes) {
    unsigned char* place = shared + int(address);
    check_alignment(place, bytes);
    return place;
}
inline void* __cvta_shared_to_generic(u32 address) { return in_shared(address, 1); }

template <class T>
inline T load_from(u32 address) {
    T x;
    std::memcpy(&x, in_shared(address, sizeof(T)), sizeof(T));
    return x;
}
inline u32 load_word(u32 address) { return load_from<u32>(address); }
inline u32 load_constant_word(u32 address) { return load_from<u32>(address); }
inline u32 load_value(u32 address) { return load_from<u16>(address); }
inline Vector<u32, 4> load_words(u32 address) { return load_from<Vector<u32, 4>>(address); }
inline void store_word(u32 address, u32 value) { std::memcpy(in_shared(address, 4), &value, 4); }
inline void store_pair(u32 to, int t, float upper, float lower) {
    if (t) return;
    store_word(to, __float_as_uint(upper));
    store_word(to + 32, __float_as_uint(lower));
}
inline void store_one(u32 to, int t, float sum) {
    if (t < 2) store_word(to, __float_as_uint(sum));
}
inline void store_sums(u32 to, const float (&x)[4]) { std::memcpy(in_shared(to, 16), x, 16); }

inline u32 permute(u32 low, u32 high, u32 select) {
    u32 value = 0;
    for (int byte = 0; byte < 4; ++byte) {
        u32 nibble = select >> 4 * byte & 15;
        u32 found = u32((u64(high) << 32 | low) >> 8 * (nibble & 7)) & 255;
        if (nibble & 8) found = found & 128 ? 255 : 0;
        value |= found << 8 * byte;
    }
    return value;
}
inline u32 funnel(u32 low, u32 high, u32 bits) {
    return u32((u64(high) << 32 | low) >> bits % 32);
}

inline int add_lanes_before(int sum, int width) {
    for (int step = 1; step < width; step *= 2) {
        int other = __shfl_up_sync(~0u, sum, step);
        if (int(threadIdx.x) % width >= step) sum += other;
    }
    return sum;
}
inline int add_before(int sum) { return add_lanes_before(sum, 32); }
inline int add_before_in_half(int sum) { return add_lanes_before(sum, 16); }

inline Vector<u32, 2> load_two_words(u32 address) { return load_from<Vector<u32, 2>>(address); }

inline void halves_of_e4m3(u32&, u32&, u32) { std::abort(); }

inline void multiply_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& words = words_of_lanes[warp];
    for (int i = 0; i < 4; ++i) words[lane][i] = a[i];
    for (int i = 0; i < 2; ++i) words[lane][4 + i] = b[i];
    wait_for_warp();
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k) {
            int row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4, of = k % 16 / 4;
            u32 left = words[row + of][i / 2 + k / 16 * 2] >> k % 4 * 8 & 255;
            int right = (signed char)(words[column + of][4 + k / 16] >> k % 4 * 8);
            d[i] += int(left) * right;
        }
    wait_for_warp();
}

template <class T>
inline T rounded(double x);
template <>
inline half_t rounded<half_t>(double x) {
    _Float16 value = _Float16(x);
    half_t y;
    std::memcpy(&y, &value, sizeof(y));
    return y;
}
template <>
inline bfloat16_t rounded<bfloat16_t>(double x) { return convert<bfloat16_t>(float(x)); }

template <class T>
inline u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int i = 0; i < 2; ++i) {
        double sum = double(half_of<T>(a, i)) * half_of<T>(b, i) + half_of<T>(c, i);
        d |= u32(rounded<T>(sum).bits) << 16 * i;
    }
    return d;
}
