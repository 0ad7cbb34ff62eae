// What generated formulas read: elements of tensors, scalars, and words of arrays in which values
// of a row, a column or a thread lie.
#pragma once

#include "common/types.cuh"
#include "pairwise/formula/math.cuh"

// Chooses a function of a formula: of a term, or of a group of terms.
template <int I>
struct Nth {};

template <class To, class From>
struct Conversion {
    static __device__ __forceinline__ To of(From x) { return static_cast<To>(x); }
};
template <class To>
struct Conversion<To, half_t> {
    static __device__ __forceinline__ To of(half_t x) { return To(convert<float>(x)); }
};
template <class To>
struct Conversion<To, bfloat16_t> {
    static __device__ __forceinline__ To of(bfloat16_t x) { return To(convert<float>(x)); }
};
template <>
struct Conversion<bool, unsigned char> {
    static __device__ __forceinline__ bool of(unsigned char x) { return x != 0; }
};

// Element (l, row, col, k) of a tensor, whose strides are 0 for axes that it lacks.
template <class To, class From, class Call>
__device__ __forceinline__ To element(const Call& call, int tensor, i64 l, int row, int col,
                                      int k) {
    const i64* strides = call.strides + 4 * tensor;
    i64 at = l * strides[0] + row * strides[1] + col * strides[2] + k * strides[3];
    return Conversion<To, From>::of(static_cast<const From*>(call.tensors[tensor])[at]);
}

template <class To, class From, class Call>
__device__ __forceinline__ To scalar(const Call& call, int index, i64 l) {
    const Scalar& each = call.scalars[index];
    if (!each.device) return static_cast<To>(each.value);
    const From* from = static_cast<const From*>(each.device);
    return Conversion<To, From>::of(from[l * call.scalar_strides[index]]);
}

// Numbers of the arithmetic lie in words as they are, others as bits.
__device__ __forceinline__ void put_bits(float* to, int x) { *to = __int_as_float(x); }
__device__ __forceinline__ void put_bits(float* to, i64 x) {
    to[0] = __int_as_float(int(x));
    to[1] = __int_as_float(int(x >> 32));
}
__device__ __forceinline__ void put_bits(double* to, i64 x) { *to = __longlong_as_double(x); }
__device__ __forceinline__ void put_bits(double* to, int x) { put_bits(to, i64(x)); }

__device__ __forceinline__ i64 bits_of(const float* from, i64) {
    u32 low = u32(__float_as_int(from[0]));
    return i64(u64(u32(__float_as_int(from[1]))) << 32 | low);
}
__device__ __forceinline__ int bits_of(const float* from, int) { return __float_as_int(*from); }
__device__ __forceinline__ i64 bits_of(const double* from, i64) {
    return __double_as_longlong(*from);
}
__device__ __forceinline__ int bits_of(const double* from, int) {
    return int(__double_as_longlong(*from));
}

template <class T>
struct Bits { using type = T; };
template <>
struct Bits<bool> { using type = int; };

template <class T, class Word>
__device__ __forceinline__ void put(Word* to, T x) {
    put_bits(to, static_cast<typename Bits<T>::type>(x));
}
template <class T, class Word>
__device__ __forceinline__ T get(const Word* from) {
    return static_cast<T>(bits_of(from, typename Bits<T>::type()));
}
