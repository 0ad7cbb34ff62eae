// The fragments of one multiplication, 16 x 8 += 16 x 8 by 8 x 8, in each arithmetic.
#pragma once

#include "common/mma.cuh"
#include "common/mma_double.cuh"
#include "kronecker_product/modes/tile.cuh"

// Four values of a fragment's rows: slices g and g + 8, both of two neighbours in depth, which are
// a fragment's depths t and t + 4: sums do not know their order.
template <class T>
struct OperandOf {
    T value[4];
};
using Operand = OperandOf<AccT>;

// What tensor cores take of a matrix and of slices.
template <class T>
struct FactorOf;
template <class T>
struct SlicesOf;
using Factor = FactorOf<AccT>;
using Slices = SlicesOf<AccT>;

template <>
struct FactorOf<double> {
    double value[2];
    __device__ __forceinline__ void set(const Vector<double, 2>& pair) {
        value[0] = pair.element[0];
        value[1] = pair.element[1];
    }
    __device__ __forceinline__ void set(const Vector<double, 2>&, const Vector<double, 2>&) {}
};

// The words of an element of a matrix, of which double has one.
__device__ __forceinline__ void split(double value, double& high, double&) { high = value; }

template <>
struct SlicesOf<double> {
    double value[4];
    __device__ __forceinline__ explicit SlicesOf(const OperandOf<double>& x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = x.value[i];
    }
};

__device__ __forceinline__ void add_products(double (&d)[4], const SlicesOf<double>& a,
                                             const FactorOf<double>& b, bool) {
    multiply_fragments(d, a.value, b.value);
}

// High words and, of three products, low ones.
template <>
struct FactorOf<float> {
    u32 high[2], low[2];
    __device__ __forceinline__ void set(const Vector<float, 2>& pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 bits = __float_as_uint(pair.element[i]);
            if (PRODUCTS == 3) split_to_tf32(bits, high[i], low[i]);
            else high[i] = round_to_tf32(bits);
        }
    }
    __device__ __forceinline__ void set(const Vector<float, 2>& of_high,
                                        const Vector<float, 2>& of_low) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = __float_as_uint(of_high.element[i]);
            low[i] = __float_as_uint(of_low.element[i]);
        }
    }
};

// The words of an element of a matrix.
__device__ __forceinline__ void split(float value, float& high, float& low) {
    u32 words[2];
    split_to_tf32(__float_as_uint(value), words[0], words[1]);
    high = __uint_as_float(words[0]);
    low = __uint_as_float(words[1]);
}

template <>
struct SlicesOf<float> {
    u32 high[4], low[4];
    __device__ __forceinline__ explicit SlicesOf(const OperandOf<float>& x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = __float_as_uint(x.value[i]);
            if (PRODUCTS == 3) low[i] = rest_of_tf32(high[i]);
            else high[i] = round_to_tf32(high[i]);
        }
    }
};

// Of the first products of a sum of zero nothing but these are left.
__device__ __forceinline__ void add_products(float (&d)[4], const SlicesOf<float>& a,
                                             const FactorOf<float>& b, bool is_first) {
    if (PRODUCTS == 1) {
        multiply_fragments<float>(d, a.high, b.high);
        return;
    }
    // A tensor core's additions truncate, which sums of one sign drift by; those of fp32 round.
    float step[4] = {};
    multiply_fragments<float>(step, a.low, b.high);
    multiply_fragments<float>(step, a.high, b.low);
    multiply_fragments<float>(step, a.high, b.high);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = is_first ? step[i] : d[i] + step[i];
}
