// Tensor cores as every GPU since sm_80 has them: mma.sync on fragments that a warp holds, and
// ldmatrix, which brings them from shared memory.
//
// With g = lane / 4 and t = lane % 4 a lane holds, of D (16 x 8) += A (16 x K) B (K x 8),
//   d[0..3]  D[g][2t], D[g][2t + 1], D[g + 8][2t], D[g + 8][2t + 1]
//   a[0..3]  4 bytes t of rows g and g + 8 of A, in the first half of K, then in the second
//   b[0..1]  of B column g: 4 bytes t of either half of K
// where K is 32 bytes: 16 half-precision elements, two of them in 4 bytes, or 8 TF32 ones.
#pragma once

#include "common/types.cuh"

template <class T>
__device__ __forceinline__ void multiply_fragments(float (&d)[4], const u32 (&a)[4],
                                                   const u32 (&b)[2]);

template <>
__device__ __forceinline__ void multiply_fragments<half_t>(float (&d)[4], const u32 (&a)[4],
                                                           const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void multiply_fragments<bfloat16_t>(float (&d)[4], const u32 (&a)[4],
                                                               const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// TF32: of each 32-bit element the tensor core reads the upper 19 bits.
template <>
__device__ __forceinline__ void multiply_fragments<float>(float (&d)[4], const u32 (&a)[4],
                                                          const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 rows of 16 bytes, whose addresses lanes 8i .. 8i+7 give for matrix i: lane
// receives 4 bytes t of row g of each. TRANSPOSED: of 2-byte elements, those of rows 2t, 2t + 1 in
// column g.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address) : "memory");
    }
}

// The nearest TF32 number, as bits of a float.
__device__ __forceinline__ u32 round_to_tf32(u32 x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
}

// What the tensor core leaves of a float, to the nearest TF32 number: with the float itself a sum
// of two whose loss is below 2^-23 of it, by three instructions where split_to_tf32 takes five. An
// infinity's is next to nothing. A NaN must show in its upper 19 bits, as all do that arithmetic
// makes.
__device__ __forceinline__ u32 rest_of_tf32(u32 x) {
    float rest = __uint_as_float(x) - __uint_as_float(x & 0xffffe000u);
    return __float_as_uint(rest) + 0x1000u;  // to nearest
}

// A float as the sum of two TF32 numbers: what is lost is below 2^-23 of it. An infinity's low word
// is a NaN, so that it gives NaN where fp32 arithmetic may give an infinity.
__device__ __forceinline__ void split_to_tf32(u32 x, u32& high, u32& low) {
    high = round_to_tf32(x);
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}
