// Tensor cores in double, as every GPU since sm_80 has them.
//
// D (16 x 8) += A (16 x 8) B (8 x 8). With g = lane / 4 and t = lane % 4 a lane holds
//   d[0..3]  D[g][2t], D[g][2t + 1], D[g + 8][2t], D[g + 8][2t + 1]
//   a[0..3]  A[g][t], A[g + 8][t], A[g][t + 4], A[g + 8][t + 4]
//   b[0..1]  B[t][g], B[t + 4][g]
// From sm_90 on it is one instruction; the m8n8k4 of before run at half the rate there.
#pragma once

__device__ __forceinline__ void multiply_fragments(double (&d)[4], const double (&a)[4],
                                                   const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        int half = quarter % 2;  // of rows; the other bit is of depth
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
            : "d"(a[quarter]), "d"(b[quarter / 2]));
    }
#endif
}
