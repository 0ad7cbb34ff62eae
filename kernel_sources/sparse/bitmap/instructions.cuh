// The instructions of bitmap products: single ones, and a few that must stay together.
#pragma once

#include "common/types.cuh"
#include "sparse/bitmap/warp.cuh"

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" :: "l"(address));
}

// Shared memory, by its addresses.

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Of words that nothing writes while the kernel reads them.
__device__ __forceinline__ u32 load_constant_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ u32 load_value(u32 address) {
    u32 value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ Vector<u32, 2> load_two_words(u32 address) {
    Vector<u32, 2> x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.element[0]), "=r"(x.element[1]) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ Vector<u32, 4> load_words(u32 address) {
    Vector<u32, 4> x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.element[0]), "=r"(x.element[1]), "=r"(x.element[2]), "=r"(x.element[3])
                 : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_word(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

// By the lanes t = 0, 32 bytes apart: a branch would take as long as the stores.
__device__ __forceinline__ void store_pair(u32 to, int t, float upper, float lower) {
    asm volatile("{\n\t"
                 ".reg .pred first;\n\t"
                 "setp.eq.s32 first, %1, 0;\n\t"
                 "@first st.shared.f32 [%0], %2;\n\t"
                 "@first st.shared.f32 [%0 + 32], %3;\n\t"
                 "}" :: "r"(to), "r"(t), "f"(upper), "f"(lower) : "memory");
}

// By the lanes t = 0 and 1.
__device__ __forceinline__ void store_one(u32 to, int t, float sum) {
    asm volatile("{\n\t"
                 ".reg .pred stores;\n\t"
                 "setp.lt.s32 stores, %1, 2;\n\t"
                 "@stores st.shared.f32 [%0], %2;\n\t"
                 "}" :: "r"(to), "r"(t), "f"(sum) : "memory");
}

__device__ __forceinline__ void store_sums(u32 to, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Registers.

// Bytes of two registers; unlike __byte_perm without two masks of the selector a group. A selector
// of 8 and more gives the sign of its byte in all eight bits.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 select) {
    u32 value;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(high), "r"(select));
    return value;
}

// The lower 32 bits of 64 that are shifted to the right by bits % 32.
__device__ __forceinline__ u32 funnel(u32 low, u32 high, u32 bits) {
    u32 value;
    asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(high), "r"(bits));
    return value;
}

// Adds up the warp's values up to and with that of a lane: a shuffle knows whether it found one.
__device__ __forceinline__ int add_before(int sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
        asm volatile("{\n\t"
                     ".reg .pred found;\n\t"
                     ".reg .s32 other;\n\t"
                     "shfl.sync.up.b32 other|found, %0, %1, 0, 0xffffffff;\n\t"
                     "@found add.s32 %0, %0, other;\n\t"
                     "}" : "+r"(sum) : "r"(step));
    return sum;
}

// The same of each half of the warp.
__device__ __forceinline__ int add_before_in_half(int sum) {
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
        asm volatile("{\n\t"
                     ".reg .pred found;\n\t"
                     ".reg .s32 other;\n\t"
                     "shfl.sync.up.b32 other|found, %0, %1, 0x1000, 0xffffffff;\n\t"
                     "@found add.s32 %0, %0, other;\n\t"
                     "}" : "+r"(sum) : "r"(step));
    return sum;
}

// Pairs of halves: a * b + c, rounded once.
template <class T>
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c);

template <>
__device__ __forceinline__ u32 multiply_add<half_t>(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

template <>
__device__ __forceinline__ u32 multiply_add<bfloat16_t>(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// D (16 x 8) += A (16 x 32) B (32 x 8) of bytes, without a sign in A, with one in B, in the layout
// of common/mma.cuh; sums are exact.
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four numbers of a byte each, as halves, from sm_89 on.
__device__ __forceinline__ void halves_of_e4m3(u32& first, u32& second, u32 bytes) {
    asm("{\n\t"
        ".reg .b16 low, high;\n\t"
        "mov.b32 {low, high}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n\t"
        "}" : "=r"(first), "=r"(second) : "r"(bytes));
}
