// What one feature k adds to the sum of a pair, and how two partial sums meet.
//
// Floors on an H200 (132 SM x 128 lanes x 1.98 GHz), per million pair-features:
//   difference + Abs or Square     2 issue slots   0.0598 us
//   dot + Identity                 1 issue slot    0.0299 us
//   Power, any p                   2 special-function operations (16 a clock and SM)   0.478 us
//   Power p = 0.5, 1.5, 2.5        1 special-function operation   0.239 us
//   Power p = 3, 4 | 6             3 | 4 issue slots
#pragma once

#include "common/math.cuh"

// Terms that add up. UNROLL_K features are unrolled: enough to hide a shared-memory read behind
// arithmetic; special functions hide it by themselves, and their code is long.
struct Sum {
    static constexpr int UNROLL_K = 4;
    template <class T>
    static __device__ __forceinline__ T merge(T x, T y, T) { return x + y; }
};

struct Identity : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) { return sum + v; }
};

struct Abs : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) { return sum + absolute(v); }
};

struct Square : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) { return multiply_add(v, v, sum); }
};

struct Sqrt : Sum {  // NaN for v < 0, as torch.sqrt
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) { return sum + fast_sqrt(v); }
};

// |v|^p for a p > 0 of the host.
struct Power : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T p) {
        return sum + fast_power(absolute(v), p);
    }
};

// |v|^p for a p on the device, where p = 0 (count of v != 0) and p = inf (maximum) turn up at run
// time. The extra slots hide behind the two special-function operations.
struct PowerOnDevice {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T p) {
        T size = absolute(v);
        T term = p == T(0) ? (size == size ? T(1) : size) : fast_power(size, p);
        term = size == T(0) ? T(0) : term;
        return merge(sum, p == infinity(p) ? size : term, p);
    }
    template <class T>
    static __device__ __forceinline__ T merge(T x, T y, T p) {
        return p == infinity(p) ? maximum(x, y) : x + y;
    }
};

struct Power0 : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) {
        T one = v == v ? T(1) : v;  // a NaN stays one
        return sum + (v == T(0) ? T(0) : one);
    }
};

struct PowerHalf : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) { return sum + fast_sqrt(absolute(v)); }
};

struct PowerThreeHalves : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) {
        T size = absolute(v);
        return multiply_add(size, fast_sqrt(size), sum);
    }
};

struct PowerFiveHalves : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) {
        return multiply_add(v * v, fast_sqrt(absolute(v)), sum);
    }
};

struct Power3 : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) {
        return multiply_add(v * v, absolute(v), sum);
    }
};

struct Power4 : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) {
        T square = v * v;
        return multiply_add(square, square, sum);
    }
};

struct Power6 : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) {
        T square = v * v;
        return multiply_add(square * square, square, sum);
    }
};

struct PowerInfinity {
    static constexpr int UNROLL_K = 4;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, T) { return maximum(sum, absolute(v)); }
    template <class T>
    static __device__ __forceinline__ T merge(T x, T y, T) { return maximum(x, y); }
};

// Op(a, b) followed by Inner, for one k.
template <class Inner>
struct Difference {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T a, T b, T p) {
        return Inner::add(sum, b - a, p);
    }
};

// The kernel computed the transposed matrix: its a is the caller's b.
template <class Inner>
struct SwappedDifference {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T a, T b, T p) {
        return Inner::add(sum, a - b, p);
    }
};

template <class Inner>
struct Dot {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T a, T b, T p) {
        return Inner::add(sum, a * b, p);
    }
};
