// The matrices of a pass as words in shared memory: copies of a product of factors along the
// diagonal, as many as make it SIZE wide.
//
// fp32 and float16 are scaled by a power of two, so that the exponent of a matrix's largest number
// is EXPONENT.
#pragma once

#include "kronecker_product/hopper/panel.cuh"

// P x P, the product of the PARTS factors from FIRST on.
template <int P_, int FIRST_, int PARTS_, int SIZE_, int EXPONENT_>
struct Merged {
    static constexpr int P = P_, Q = P_, FIRST = FIRST_, PARTS = PARTS_, SIZE = SIZE_;
    static constexpr int EXPONENT = EXPONENT_, BYTES = SIZE * SIZE * 2;  // of a word
};

template <bool FIRST, class A, class B>
struct Chosen { using Type = A; };
template <class A, class B>
struct Chosen<false, A, B> { using Type = B; };

constexpr u32 FINITE = 0x7f7fffffu;  // bits of the largest number

// The power of two, as exponent, that gives a number of these bits an exponent; 0 for zeros and for
// what is not finite.
__device__ __forceinline__ int shift_to(int exponent, u32 bits) {
    const int shift = exponent - exponent_of(__uint_as_float(bits));
    return bits && bits <= FINITE ? max(-126, min(shift, 127)) : 0;
}
// What an entry is made in: of several factors that fp32 has no more rounded than one.
template <class M>
using EntryT = typename Chosen<WORDS == 2 && (M::PARTS > 1), double, float>::Type;

// Calls `take(row, column, value)` with each of a thread's entries, several loads under way: along
// rows or, if a column's entries are neighbours in device memory, along columns.
template <class M, class Take>
__device__ __forceinline__ void each_entry(const Parameters& p, const Take& take) {
    constexpr int EACH = M::SIZE * M::SIZE / THREADS, AT_ONCE = EACH < 16 ? EACH : 16;
    constexpr int STEP = THREADS / M::SIZE;  // of what a thread's entries do not lie along
    const bool along_columns = p.matrices[M::FIRST + M::PARTS - 1].row_stride == 1;
    const int own = threadIdx.x % M::SIZE, first = threadIdx.x / M::SIZE;
#pragma unroll 1
    for (int begin = 0; begin < EACH; begin += AT_ONCE) {
        EntryT<M> value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int other = first + (begin + i) * STEP;
            const int row = along_columns ? own : other, column = along_columns ? other : own;
            value[i] = 0;
            if (row / M::P == column / M::P)
                value[i] = entry_of<M, EntryT<M>>(p, 0, row % M::P, column % M::P);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int other = first + (begin + i) * STEP;
            take(along_columns ? own : other, along_columns ? other : own, value[i]);
        }
    }
}

// By all threads, with a barrier of the block; `largest` is zero before.
template <class M>
__device__ __forceinline__ void stage_matrix(const Parameters& p, unsigned char* matrix,
                                             u32& largest) {
    float power = 1;
    if (SCALED) {
        float most = 0;  // infinite ones apart
        each_entry<M>(p, [&](int, int, EntryT<M> value) {
            const float size = fabsf(float(value));
            most = fmaxf(most, size <= __uint_as_float(FINITE) ? size : 0.0f);
        });
        const u32 found = __reduce_max_sync(~0u, __float_as_uint(most));
        if (threadIdx.x % 32 == 0) atomicMax(&largest, found);
        __syncthreads();
        power = power_of_two(shift_to(M::EXPONENT, largest));
    }
    each_entry<M>(p, [&](int row, int column, EntryT<M> value) {
        HalfT* to = reinterpret_cast<HalfT*>(matrix + place(row, column, M::SIZE));
        const EntryT<M> scaled = value * power;
        *to = convert<HalfT>(float(scaled));
        if (WORDS == 2) to[M::BYTES / 2] = convert<HalfT>(float(scaled - convert<float>(*to)));
    });
}

// All of a run's; of each the bits of its largest number, two of them.
template <class R>
__device__ __forceinline__ void stage(const Parameters& p, unsigned char* matrices, u32* largest) {
    stage_matrix<typename R::First>(p, matrices, largest[0]);
    if constexpr (R::SECOND)
        stage_matrix<typename R::Second>(p, matrices + WORDS * R::First::BYTES, largest[1]);
}

// The power of two, as exponent, that a run's matrices were multiplied by.
template <class R>
__device__ __forceinline__ int shift_of_matrices(const u32* largest) {
    if (!SCALED) return 0;
    return shift_to(R::First::EXPONENT, largest[0]) +
           (R::SECOND ? shift_to(R::Second::EXPONENT, largest[1]) : 0);
}
