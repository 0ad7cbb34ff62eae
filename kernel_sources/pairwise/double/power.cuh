// x^p in double without a branch, as 2^(p log2 x): 40 operations of the FP64 lanes, where the
// function of CUDA takes about 150. The logarithm is a sum of two numbers, right to 2e-17 of it, so
// that powers are right to 4.5e-16 + 2e-17 |p log x|. What is below 2^-1022 is 0, and what is above
// 1.7971e308, 0.03 % below the largest number, is infinite. Bases may be denormal.
#pragma once

#include "common/double_exponential.cuh"
#include "pairwise/double/reciprocal.cuh"

// With s = (m - 1) / (m + 1), log2(m) = TWO_LOG2_E s + s^3 P(s^2): P for m from sqrt(1/2) to
// sqrt(2), a minimax polynomial that leaves out 1.8e-18 of the logarithm.
constexpr double LOGARITHM[] = {
    0.21346051588222786, 0.22093504006144388, 0.2623333810739333, 0.32059855678680416,
    0.41219858557759437, 0.5770780163471407, 0.9617966939259853,
};
constexpr double TWO_LOG2_E = 2.8853900817779268;
// 2^r - 1 over r, to 3e-16 2^r / r up to 1/2: a minimax polynomial.
constexpr double POWER_OF_TWO[] = {
    7.111767369826408e-09, 1.0210506600366763e-07, 1.3215235582641994e-06,
    1.5252647746876169e-05, 0.00015403530800925171, 0.0013333558246482315,
    0.009618129107380628, 0.055504108664346574, 0.24022650695910472, 0.6931471805599516,
};

namespace branchless {
// An exponent, and upper halves of what it makes of bases that are no sizes. Most are the same for
// all elements, and the compiler takes this out of loops.
struct Exponent {
    double p;
    int odd;        // the sign's bit if p is an odd number: powers have the sign of their base
    int fraction;   // the sign's bit if p is no whole number: there are no powers below 0
    int undefined;  // the logarithm of what has no power

    // Of all but 1 every power from 1e300 on is 0 or infinite, and of all that is neither every one
    // up to 1e-290 is 1; so neither is p times a logarithm of 0, which is finite here.
    __device__ __forceinline__ explicit Exponent(double given) : p(given) {
        double size = fabs(given);
        if (size > 1e300) p = copysign(1e300, given);
        if (size > 0.0 && size < 1e-290) p = copysign(1e-290, given);
        constexpr int SIGN = int(0x80000000u);
        fraction = rint(p) == p ? 0 : SIGN;
        odd = fraction == 0 && rint(0.5 * p) != 0.5 * p ? SIGN : 0;
        undefined = given == 0.0 ? 0 : 0x7ff80000;  // x^0 is 1 for any x
    }
};

// The logarithm of |x| to the base 2: `high` + `low` where it is finite, of which `rounded` is the
// sum, or stands for the end: the largest numbers for those of 0 and infinity.
struct Logarithm {
    double high, low, rounded;
};

__device__ __forceinline__ Logarithm logarithm(double x, const Exponent& exponent) {
    double enlarged = x * 18014398509481984.0;  // 2^54
    int upper = __double2hiint(x), lower = __double2loint(x), size = upper & 0x7fffffff;
    bool denormal = size < 0x00100000, zero = (size | lower) == 0;
    int bits = chosen(denormal, __double2hiint(enlarged) & 0x7fffffff, size) + 0x00095f62;
    // x is 2^e m, and m begins at sqrt(1/2).
    double m = __hiloint2double((bits & 0xfffff) + 0x3fe6a09e,
                                chosen(denormal, __double2loint(enlarged), lower));
    double e = __hiloint2double(0x43300000, bits >> 20) -
               __hiloint2double(0x43300000, chosen(denormal, 1077, 1023));
    // The quotient s is `first`, of 21 digits, and what m - 1 less its product, which is exact,
    // leaves; of that the reciprocal's 40 digits are enough.
    double f = m - 1.0, d = m + 1.0, rough = rough_reciprocal(d);
    double fine = fma(fma(-d, rough, 1.0), rough, rough);
    double first = __hiloint2double(__double2hiint(f * rough), 0);
    double rest = fma(-first, m, f - first) * fine, s = first + rest, z = s * s;
    double series = LOGARITHM[0];
#pragma unroll
    for (int i = 1; i < 7; ++i) series = fma(series, z, LOGARITHM[i]);
    double high = fma(first, TWO_LOG2_E, e);
    double low = fma(rest, TWO_LOG2_E, fma(first, TWO_LOG2_E, e - high));
    low = fma(z * s, series, low);
    double sum = high + low;
    bool out = zero || size >= 0x7ff00000 || (upper & exponent.fraction) != 0;
    int end = chosen(size == 0x7ff00000, 0x7fe00000, exponent.undefined);
    end = chosen(zero, int(0xffe00000u), end);
    end = chosen(out, end, __double2hiint(sum));
    return {high, low, __hiloint2double(end, __double2loint(sum))};
}

// |x|^p, or no number where x is none or, of a p that is no whole number, below 0.
__device__ __forceinline__ double size_power(double x, const Exponent& exponent) {
    Logarithm log = logarithm(x, exponent);
    double product = exponent.p * log.rounded;
    double shifted = product + TO_WHOLE, whole = shifted - TO_WHOLE;
    double r = fma(exponent.p, log.low, fma(exponent.p, log.high, -whole));
    double power = POWER_OF_TWO[0];
#pragma unroll
    for (int i = 1; i < 10; ++i) power = fma(power, r, POWER_OF_TWO[i]);
    // From -1022 down and from 1023.9995 up.
    return scaled<0x408ff000, 0x408fffff>(fma(power, r, 1.0), shifted, __double2hiint(product));
}

// As pow() of CUDA.
__device__ __forceinline__ double power(double x, double p) {
    Exponent exponent(p);
    double size = size_power(x, exponent);
    int sign = __double2hiint(x) & exponent.odd;
    return __hiloint2double(__double2hiint(size) | sign, __double2loint(size));
}

// x^p for x >= 0.
__device__ __forceinline__ double fast_power(double x, double p) {
    Exponent exponent(p);
    exponent.fraction = 0;
    return size_power(x, exponent);
}

// As those of common/math.cuh.
__device__ __forceinline__ double norm_root(double s, double exponent, double) {
    return fast_power(s, exponent);
}
__device__ __forceinline__ double any_root(double s, double exponent, double rest) {
    double root = norm_root(s, exponent, rest);
    bool same = exponent == 1.0;
    return __hiloint2double(chosen(same, __double2hiint(s), __double2hiint(root)),
                            chosen(same, __double2loint(s), __double2loint(root)));
}
}
