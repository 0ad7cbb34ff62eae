// Of common/math.cuh of kernel_sources what epilogues and scores of the tests need.
#pragma once

#include <limits>
#include <math.h>  // functions of float by the names of those of double

template <class T>
inline T absolute(T x) { return std::fabs(x); }
template <class T>
inline T maximum(T x, T y) { return x > y || x != x ? x : y; }
template <class T>
inline T minimum(T x, T y) { return -maximum(-x, -y); }
inline float multiply_add(float x, float y, float z) { return std::fmaf(x, y, z); }
inline double multiply_add(double x, double y, double z) { return std::fma(x, y, z); }
template <bool KEPT = true, class T>
inline T add_chain(T total, T& sum) {
    T whole = total + sum, lost = sum - (whole - total);
    sum = !KEPT || std::fabs(lost) <= std::fabs(sum) ? lost : T(0);
    return whole;
}
template <class T>
inline T ndtr(T x) { return T(0.5 * std::erfc(-0.7071067811865476 * double(x))); }

template <class T>
inline T infinity(T) { return INFINITY; }
// The special functions of float take denormals as 0, and give none.
inline double flushed(double x) { return x; }
inline float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? 0.0f : x;
}
template <class T>
inline T fast_sqrt(T x) { return std::sqrt(flushed(x)); }
template <class T>
inline T fast_power(T x, T p) { return flushed(T(std::pow(flushed(x), p))); }
template <class T>
inline T norm_root(T s, T exponent, T) {
    return s > T(0) && s < infinity(s) ? std::pow(s, exponent) : s;
}
template <class T>
inline T any_root(T s, T exponent, T rest) {
    return exponent == T(1) ? s : norm_root(s, exponent, rest);
}
template <class T>
inline T reciprocal(T x) {
    T y = T(1) / x;
    return x != T(0) && std::isinf(y) ? std::copysign(std::numeric_limits<T>::max(), x) : y;
}
template <class T>
inline T bounded(T x, T y) { return x * y; }
template <class T>
inline T power(T x, T p) { return std::pow(x, p); }
template <int N, class T>
inline T integer_power(T x) {
    T y = x;
    for (int i = 1; i < N; ++i) y *= x;
    return y;
}
