// Slopes of inner stages: what one pair of points adds to a gradient, without the constant factor
// that Finish puts in front of whole sums.
//
// Every slope of a difference is odd where its stage is even, and exactly 0 at v = 0 whatever the
// exponent: equal coordinates (one-hot and integer data have many) add nothing.
//
// Floors on an H200, per million (query, point, feature), one set of coefficients:
//   Abs                   4 issue slots: difference, sign, comparison, predicated sum   0.120 us
//   Square                2 issue slots                                                 0.060 us
//   p = 1.5, 2.5, 0.5     1 special-function operation (16 a clock and SM)              0.239 us
//   any p                 2 special-function operations                                 0.478 us
#pragma once

#include "common/exponential.cuh"
#include "common/math.cuh"
#include "common/reciprocal_root.cuh"
#include "common/types.cuh"

// Numbers that slopes need, read once.
template <class T>
struct Exponents {
    T p, below;  // p - 1
    T rate;      // inner_scale times log2(e)
    T smallest;  // to which |v| is raised where the exponent is negative
};

// x with the sign of v put on top of its own.
__device__ __forceinline__ float flip(float x, float v) {
    return __int_as_float(__float_as_int(x) ^ (__float_as_int(v) & 0x80000000));
}
__device__ __forceinline__ double flip(double x, double v) {
    i64 sign = __double_as_longlong(v) & 0x8000000000000000ll;
    return __longlong_as_double(__double_as_longlong(x) ^ sign);
}

__device__ __forceinline__ float nan_of(float) { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ double nan_of(double) {
    return __longlong_as_double(0x7fffffffffffffffll);
}

__device__ __noinline__ double fast_exp2(double x) { return exp2(x); }  // inlined: 1 s of NVRTC

// x^p for x >= 0.
__device__ __forceinline__ float size_power(float x, float p) { return fast_power(x, p); }
__device__ __noinline__ double size_power(double x, double p) { return pow(x, p); }

__device__ __forceinline__ double fast_rsqrt(double x) { return 1.0 / sqrt(x); }

// SIGN: the slope is the sign of v, which a comparison loses a NaN on; the kernel makes up for it.
// FINITE: of finite v slopes are finite, as far as a kernel has to know.
struct Value {
    static constexpr bool SIGN = false, FINITE = false;
};

struct IdentitySlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T, const Exponents<T>&) { return T(1); }
};

struct AbsSlope {
    static constexpr bool SIGN = true, FINITE = true;
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) {
        return v == T(0) ? T(0) : flip(v == v ? T(1) : v, v);
    }
};

struct AbsValueSlope : Value {  // of products, of which 0 times an infinity is one more NaN
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        return AbsSlope::at(v, e);
    }
};

struct SquareSlope : Value {  // half of it
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) { return v; }
};

struct SqrtSlope : Value {  // twice of it; NaN for v < 0
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) {
        return v == T(0) ? T(0) : fast_rsqrt(v);
    }
};

// sign(v) |v|^(p - 1) for p > 1: a power of 0 is 0 by itself.
struct PowerSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        return flip(size_power(absolute(v), e.below), v);
    }
};

// The same for p < 1, finite next to 0.
struct SteepSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        T size = absolute(v);
        T slope = flip(size_power(maximum(size, e.smallest), e.below), v);
        return size == T(0) ? T(0) : slope;
    }
};

// For a p on the device, of which nothing is known.
struct DeviceSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        T size = absolute(v);
        T base = e.below < T(0) ? maximum(size, e.smallest) : size;
        T slope = size_power(base, e.below);
        slope = e.below == T(0) && size == size ? T(1) : slope;  // infinities too
        return size == T(0) ? T(0) : flip(slope, v);
    }
};

struct HalfSlope : Value {  // p = 0.5
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        T size = absolute(v);
        T slope = flip(fast_rsqrt(maximum(size, e.smallest)), v);
        return size == T(0) ? T(0) : slope;
    }
};

struct ThreeHalvesSlope : Value {
    static constexpr bool FINITE = true;
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) {
        return flip(fast_sqrt(absolute(v)), v);
    }
};

struct FiveHalvesSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) {
        return v * fast_sqrt(absolute(v));
    }
};

struct CubeSlope : Value {  // p = 3
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) { return v * absolute(v); }
};

struct FourthSlope : Value {  // p = 4
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>&) { return v * v * v; }
};

// sign(v) |v|^(p - 1) exp(inner_scale |v|^p)
struct ExpPowerSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        T size = absolute(v);
        T slope = DeviceSlope::at(size, e), share = fast_exp2(e.rate * size_power(size, e.p));
        return share == T(0) ? share : flip(slope * share, v);  // of a power that may be infinite
    }
};

struct ExpAbsSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        T size = absolute(v);
        return size == T(0) ? T(0) : flip(fast_exp2(e.rate * size), v);
    }
};

struct ExpSquareSlope : Value {
    template <class T>
    static __device__ __forceinline__ T at(T v, const Exponents<T>& e) {
        return v * fast_exp2(e.rate * v * v);
    }
};
