// How float16 is scaled that several launches hand on, each to the next: so that none overflows,
// whatever the numbers. With the largest number |x| of a row (largest.cuh; of a column of x with
// the factors on the left) and the largest sum |F| of a column's magnitudes of a matrix, what it
// makes of the row is at most |F| |x|. So a row's numbers stay below 2^15 if they are multiplied
// by a power of two as |x| asks for, and behind each matrix divided by one as |F| does. The last
// launch undoes all that. As sqrt(P) of P numbers of random signs are left, a matrix of 128 takes
// 2^4 of the 2^29 that half precision's normal numbers differ by; an identity takes 2.
#pragma once

#include "kronecker_product/hopper/matrices.cuh"

constexpr bool LIFTED = BOUNDED && BEFORE == 0, SETTLED = BOUNDED && BEHIND == 0;

// Of Parameters that have them: the power, as exponent, that each launch multiplies by beside that
// of x; bits of the largest numbers of x, of rows or columns from the first on.
template <class P>
__device__ __forceinline__ int* shifts_of(const P& p) {
    if constexpr (BOUNDED) return reinterpret_cast<int*>(p.powers[0]);
    else return nullptr;
}
template <class P>
__device__ __forceinline__ const u32* largest_of_x(const P& p) {
    if constexpr (BOUNDED) return reinterpret_cast<const u32*>(p.powers[1]);
    else return nullptr;
}

// What all numbers are multiplied by, of a launch whose matrices have been multiplied by `own`; its
// matrices' growths are one behind another.
template <class R>
__device__ __forceinline__ int bound_shift(int own, const u32* growths) {
    int found = own - growth_of(growths[0]);
    if (R::SECOND) found -= growth_of(growths[1]);
    return found;
}

// By one thread of a launch.
template <class R>
__device__ __forceinline__ void say_shift(const Parameters& p, int own, const u32* growths) {
    if constexpr (BEHIND > 0) shifts_of(p)[BEFORE] = bound_shift<R>(own, growths);
}

// The exponent of all numbers of a launch, but for that of x.
template <class R>
__device__ __forceinline__ int common_shift(const Parameters& p, int own,
                                            const u32* growths) {
    if (!BOUNDED) return 0;
    if (BEHIND > 0) return bound_shift<R>(own, growths);
    int found = 0;
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) found -= shifts_of(p)[i];
    return found;
}

// That of x, of a row or a column.
__device__ __forceinline__ int shift_of_x(u32 largest) {
    const int shift = shift_to(14, largest);
    return LIFTED ? shift : -shift;
}
