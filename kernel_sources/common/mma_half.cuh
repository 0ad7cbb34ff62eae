// Half-precision fragments beside those of mma.cuh: half of their depth, transposition, packing.
#pragma once

#include "common/mma.cuh"

// D (16 x 8) += A (16 x 8) B (8 x 8): the first half of K alone.
template <class T>
__device__ __forceinline__ void multiply_short_fragments(float (&d)[4], u32 a0, u32 a1, u32 b);

template <>
__device__ __forceinline__ void multiply_short_fragments<half_t>(float (&d)[4], u32 a0, u32 a1,
                                                                 u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

template <>
__device__ __forceinline__ void multiply_short_fragments<bfloat16_t>(float (&d)[4], u32 a0, u32 a1,
                                                                     u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// D (16 x 8) = A (16 x K) B (K x 8), K 16 or 8: a sum of zero takes no registers.
template <class T>
__device__ __forceinline__ void first_products(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <class T>
__device__ __forceinline__ void first_short_products(float (&d)[4], u32 a0, u32 a1, u32 b);

template <>
__device__ __forceinline__ void first_products<half_t>(float (&d)[4], const u32 (&a)[4],
                                                       const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
template <>
__device__ __forceinline__ void first_short_products<half_t>(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

template <>
__device__ __forceinline__ void first_products<bfloat16_t>(float (&d)[4], const u32 (&a)[4],
                                                           const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
template <>
__device__ __forceinline__ void first_short_products<bfloat16_t>(float (&d)[4], u32 a0, u32 a1,
                                                                 u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

// Of an 8 x 8 matrix a lane holds row g, columns 2t and 2t + 1: row 2t and 2t + 1 of column g.
__device__ __forceinline__ u32 transpose_matrix(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// The first in the lower half.
template <class T>
__device__ __forceinline__ u32 pack(float first, float second);

template <>
__device__ __forceinline__ u32 pack<half_t>(float first, float second) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}

template <>
__device__ __forceinline__ u32 pack<bfloat16_t>(float first, float second) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
