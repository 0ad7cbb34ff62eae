// Elementary functions with one spelling for float and double, for main loops and for epilogues.
#pragma once

__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ double absolute(double x) { return fabs(x); }
__device__ __forceinline__ float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double multiply_add(double x, double y, double z) {
    return fma(x, y, z);
}

// fmax() drops a NaN; a distance must not.
__device__ __forceinline__ float maximum(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ double maximum(double x, double y) {
    return x > y || x != x ? x : y;
}
template <class T>
__device__ __forceinline__ T minimum(T x, T y) { return -maximum(-x, -y); }

// One special-function instruction each, relative error near 2^-22; denormals count as zero.
__device__ __forceinline__ float fast_sqrt(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ double fast_sqrt(double x) { return sqrt(x); }

// x^p for x >= 0 as 2^(p log2 x): two special-function instructions. 0^p is 0 for p > 0.
__device__ __forceinline__ float fast_power(float x, float p) {
    float y;
    asm("{\n\t"
        ".reg .f32 t;\n\t"
        "lg2.approx.ftz.f32 t, %1;\n\t"
        "mul.ftz.f32 t, t, %2;\n\t"
        "ex2.approx.ftz.f32 %0, t;\n\t"
        "}"
        : "=f"(y)
        : "f"(x), "f"(p));
    return y;
}
__device__ __forceinline__ double fast_power(double x, double p) { return pow(x, p); }

// total + sum, where `sum` is left with what the rounding lost (Dekker's Fast2Sum), for the next
// chain of terms to begin with: a total of a thousand chains is as good as one of them. Behind an
// infinity that is a NaN, if it is not KEPT from there.
template <bool KEPT = true, class T>
__device__ __forceinline__ T add_chain(T total, T& sum) {
    T whole = total + sum, lost = sum - (whole - total);
    sum = !KEPT || absolute(lost) <= absolute(sum) ? lost : T(0);
    return whole;
}

__device__ __forceinline__ float infinity(float) { return __int_as_float(0x7f800000); }
__device__ __forceinline__ double infinity(double) {
    return __longlong_as_double(0x7ff0000000000000ll);
}

// 1 / x, finite for every x but 0: the reciprocal of a tiny bandwidth times 0 is 0 then, as the
// division would be.
__device__ __forceinline__ float reciprocal(float x) {
    float y = 1.0f / x;
    return x != 0.0f && fabsf(y) == infinity(y) ? copysignf(3.402823466e38f, x) : y;
}
__device__ __forceinline__ double reciprocal(double x) {
    double y = 1.0 / x;
    return x != 0.0 && fabs(y) == infinity(y) ? copysign(1.7976931348623157e308, x) : y;
}

// The product of two reciprocals, neither 0 nor infinite unless one of them is: 0 times it is 0,
// and an infinity times it is no NaN.
template <class T>
__device__ __forceinline__ T bounded_product(T x, T y, T least, T most) {
    T z = x * y, size = absolute(z);
    bool finite = absolute(x) < infinity(x) && absolute(y) < infinity(y);
    if (x == T(0) || y == T(0) || !finite) return z;
    if (size < least) return copysign(least, z);
    return size > most ? copysign(most, z) : z;
}
__device__ __forceinline__ float bounded(float x, float y) {
    return bounded_product(x, y, 1.4e-45f, 3.402823466e38f);
}
__device__ __forceinline__ double bounded(double x, double y) {
    return bounded_product(x, y, 4.9406564584124654e-324, 1.7976931348623157e308);
}

// The normal distribution up to x, by Abramowitz and Stegun 7.1.26 to 8e-8: 15 instructions, where
// erff() takes 30 and branches.
__device__ __forceinline__ float ndtr(float x) {
    float t, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.23164189f, fabsf(x), 1.0f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * x * -0.72134752f));
    float sum = fmaf(t, fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f),
                             -0.142248368f), 0.127414796f);
    float tail = t * sum * power;
    return x < 0.0f ? tail : 1.0f - tail;
}
__device__ __forceinline__ double ndtr(double x) { return 0.5 * erfc(-0.7071067811865476 * x); }

// pow() for any base and exponent, with the accuracy of the type.
__device__ __forceinline__ float power(float x, float p) { return powf(x, p); }
__device__ __forceinline__ double power(double x, double p) { return pow(x, p); }

// s^(1/p) for an s that is no denormal, where `exponent` is 1/p rounded and `rest` what that leaves
// out, to (1 + 1/p) 2^-22: whole and fractional part of log2 s apart, as the error of a logarithm,
// and of its product with 1/p, is that of the root.
__device__ __forceinline__ float norm_root(float s, float exponent, float rest) {
    int bits = __float_as_int(s);
    float whole = float((bits >> 23) - 127), part, y, power;
    asm("lg2.approx.ftz.f32 %0, %1;"
        : "=f"(part)
        : "f"(__int_as_float((bits & 0x7fffff) | 0x3f800000)));
    // Not one multiplication and addition with what follows: `low` has what it is rounded by.
    float high = __fmul_rn(whole, exponent), n = rintf(high);
    float low = fmaf(whole, exponent, -high) + fmaf(part, exponent, whole * rest);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(high - n + low));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(n - 1.0f));  // 2^128 is infinite
    return s > 0.0f && s < infinity(s) ? 2.0f * y * power : s;
}
__device__ __forceinline__ double norm_root(double s, double exponent, double) {
    return pow(s, exponent);
}

// The same for a p that turns up at run time: exact where that of a number is.
__device__ __forceinline__ float any_root(float s, float exponent, float rest) {
    float y = norm_root(s, exponent, rest);
    return exponent == 1.0f ? s : (exponent == 0.5f ? sqrtf(s) : y);
}
__device__ __forceinline__ double any_root(double s, double exponent, double rest) {
    return exponent == 1.0 ? s : norm_root(s, exponent, rest);
}

template <int N, class T>
__device__ __forceinline__ T integer_power(T x) {
    if constexpr (N == 1) {
        return x;
    } else {
        T half = integer_power<N / 2>(x);
        return N % 2 == 0 ? half * half : half * half * x;
    }
}
