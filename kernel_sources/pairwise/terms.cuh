// What one feature k adds to the sum of a pair, and how two partial sums meet.
//
// Floors on an H200 (132 SM x 128 lanes x 1.98 GHz), per million pair-features:
//   difference + Abs or Square     2 issue slots   0.0598 us
//   dot + Identity                 1 issue slot    0.0299 us
//   Power, any p                   2 special-function operations (16 a clock and SM)   0.478 us
//   Power p = 0.5, 1.5, 2.5        1 special-function operation   0.239 us
//   Power p = 3, 4 | 6             3 | 4 issue slots
//   ExpPower p = 1, 2              1 special-function operation   0.239 us
//   ExpPower, any p                3 special-function operations   0.718 us
//   PowerLog                       2 special-function operations   0.478 us
#pragma once

#include "common/math.cuh"
#include "pairwise/double/power.cuh"

// The arguments of an inner stage: its exponent, the factor of ExpPower, and what |v| is multiplied
// by before a logarithm is taken of it (unit.cuh).
template <class T>
struct InnerNumbers {
    T p, scale, unit = T(1);
};

// Terms that add up. UNROLL_K features are unrolled: enough to hide a shared-memory read behind
// arithmetic; special functions hide it by themselves, and their code is long. ZERO_ADDS_NOTHING:
// so that features past the last one may be summed as zeros. BY_LOGARITHM: the relative error of a
// term grows with its logarithm.
struct Sum {
    static constexpr int UNROLL_K = 4;
    static constexpr bool ZERO_ADDS_NOTHING = true;
    static constexpr bool BY_LOGARITHM = false;
    template <class T>
    static __device__ __forceinline__ T merge(T x, T y, InnerNumbers<T>) { return x + y; }
    // The same of a total and a sum, which is left with what begins the next one.
    template <class T>
    static __device__ __forceinline__ T merge_exactly(T total, T& sum, InnerNumbers<T>) {
        return add_chain(total, sum);
    }
};

struct Identity : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) { return sum + v; }
};

struct Abs : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return sum + absolute(v);
    }
};

struct Square : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return multiply_add(v, v, sum);
    }
};

struct Sqrt : Sum {  // NaN for v < 0, as torch.sqrt
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return sum + fast_sqrt(v);
    }
};

// x^p for x >= 0.
__device__ __forceinline__ float size_to_the(float x, float p) { return fast_power(x, p); }
__device__ __forceinline__ double size_to_the(double x, double p) {
    return branchless::fast_power(x, p);
}

// |v|^p for a p > 0 of the host.
struct Power : Sum {
    static constexpr int UNROLL_K = 1;
    static constexpr bool BY_LOGARITHM = true;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        return sum + size_to_the(absolute(v) * numbers.unit, numbers.p);
    }
};

// size^p for size >= 0 and any p >= 0: 1 for p = 0, but 0 at 0. A NaN stays one.
template <class T>
__device__ __forceinline__ T power_or_count(T size, T p) {
    T power = p == T(0) ? (size == size ? T(1) : size) : size_to_the(size, p);
    return size == T(0) ? T(0) : power;
}

// size^p for any p on the device: 1 and 2 are exact, as integers keep exact sums by them.
template <class T>
__device__ __forceinline__ T power_on_device(T size, T p) {
    T term = power_or_count(size, p);
    term = p == T(1) ? size : term;
    return p == T(2) ? size * size : term;
}
// The same without a branch: with one around each power, kernels have a third more instructions.
__device__ __forceinline__ double power_on_device(double size, double p) {
    branchless::Exponent exponent(p);
    exponent.fraction = 0;
    exponent.undefined = 0x7ff80000;  // a NaN stays one for p = 0
    double power = branchless::size_power(size, exponent), exact = p == 2.0 ? size * size : size;
    bool is_exact = p == 1.0 || p == 2.0 || (__double2hiint(size) | __double2loint(size)) == 0;
    return __hiloint2double(chosen(is_exact, __double2hiint(exact), __double2hiint(power)),
                            chosen(is_exact, __double2loint(exact), __double2loint(power)));
}

// |v|^p for a p on the device, where p = 0 (count of v != 0) and p = inf (maximum) turn up at run
// time. The extra slots hide behind the two special-function operations.
struct PowerOnDevice {
    static constexpr int UNROLL_K = 1;
    static constexpr bool ZERO_ADDS_NOTHING = true;
    static constexpr bool BY_LOGARITHM = true;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        T size = absolute(v) * numbers.unit, term = power_on_device(size, numbers.p);
        return merge(sum, numbers.p == infinity(size) ? size : term, numbers);
    }
    template <class T>
    static __device__ __forceinline__ T merge(T x, T y, InnerNumbers<T> numbers) {
        return numbers.p == infinity(x) ? maximum(x, y) : x + y;
    }
    template <class T>
    static __device__ __forceinline__ T merge_exactly(T total, T& sum, InnerNumbers<T> numbers) {
        T largest = maximum(total, sum), whole = add_chain(total, sum);
        if (numbers.p == infinity(total)) sum = T(0);
        return numbers.p == infinity(total) ? largest : whole;
    }
};

struct Power0 : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        T one = v == v ? T(1) : v;  // a NaN stays one
        return sum + (v == T(0) ? T(0) : one);
    }
};

struct PowerHalf : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return sum + fast_sqrt(absolute(v));
    }
};

struct PowerThreeHalves : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        T size = absolute(v);
        return multiply_add(size, fast_sqrt(size), sum);
    }
};

struct PowerFiveHalves : Sum {
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return multiply_add(v * v, fast_sqrt(absolute(v)), sum);
    }
};

struct Power3 : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return multiply_add(v * v, absolute(v), sum);
    }
};

struct Power4 : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        T square = v * v;
        return multiply_add(square, square, sum);
    }
};

struct Power6 : Sum {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        T square = v * v;
        return multiply_add(square * square, square, sum);
    }
};

struct PowerInfinity {
    static constexpr int UNROLL_K = 4;
    static constexpr bool ZERO_ADDS_NOTHING = true;
    static constexpr bool BY_LOGARITHM = false;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T>) {
        return maximum(sum, absolute(v));
    }
    template <class T>
    static __device__ __forceinline__ T merge(T x, T y, InnerNumbers<T>) { return maximum(x, y); }
    template <class T>
    static __device__ __forceinline__ T merge_exactly(T total, T& sum, InnerNumbers<T>) {
        total = maximum(total, sum);
        sum = T(0);
        return total;
    }
};

// e^x in one special-function operation, its absolute error below 2^-23 for x <= 0.
__device__ __forceinline__ float fast_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.442695041f));
    return y;
}
__device__ __noinline__ double fast_exp(double x) { return exp(x); }  // inlined: 1.4 s of NVRTC

// exp(scale * size^p), for p > 0, or with ANY_P for p = 0 too.
template <bool ANY_P>
__device__ __forceinline__ float exp_power(float size, float p, float scale) {
    return fast_exp(scale * (ANY_P ? power_or_count(size, p) : fast_power(size, p)));
}
template <bool ANY_P>
__device__ __noinline__ double exp_power(double size, double p, double scale) {
    return exp(scale * power_or_count(size, p));
}

// exp(scale * |v|^p) for a p > 0 of the host: 1 where v = 0, so that no feature past the last one
// may be summed.
struct ExpPower : Sum {
    static constexpr int UNROLL_K = 1;
    static constexpr bool ZERO_ADDS_NOTHING = false;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        return sum + exp_power<false>(absolute(v), numbers.p, numbers.scale);
    }
};

struct ExpPowerOnDevice : ExpPower {  // and for p = 0
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        return sum + exp_power<true>(absolute(v), numbers.p, numbers.scale);
    }
};

struct ExpPower1 : ExpPower {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        return sum + fast_exp(numbers.scale * absolute(v));
    }
};

struct ExpPower2 : ExpPower {
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        return sum + fast_exp(numbers.scale * (v * v));
    }
};

// size^p log2(size), 0 for size = 0 (in fp32 for denormals too) and any p >= 0: a logarithm of
// -1e30 in place of -inf, times 1e-25 at least, makes a power of 0.
__device__ __forceinline__ float power_log2(float size, float p) {
    float y;
    asm("{\n\t"
        ".reg .f32 t, u;\n\t"
        "lg2.approx.ftz.f32 t, %1;\n\t"
        "max.NaN.ftz.f32 t, t, 0fF149F2CA;\n\t"
        "mul.ftz.f32 u, t, %2;\n\t"
        "ex2.approx.ftz.f32 u, u;\n\t"
        "mul.ftz.f32 %0, u, t;\n\t"
        "}"
        : "=f"(y)
        : "f"(size), "f"(maximum(p, 1e-25f)));
    return y;
}
__device__ __noinline__ double power_log2(double size, double p) {  // inlined: 1.4 s of NVRTC
    double t = log2(size);
    return size == 0.0 ? 0.0 : exp2(p * t) * t;
}

struct PowerLog : Sum {  // |v|^p ln|v|
    static constexpr int UNROLL_K = 1;
    template <class T>
    static __device__ __forceinline__ T add(T sum, T v, InnerNumbers<T> numbers) {
        return multiply_add(power_log2(absolute(v), numbers.p), T(0.6931471805599453), sum);
    }
};

// Op(a, b) followed by Inner, for one k.
template <class Inner>
struct Difference {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return b - a; }
    template <class T>
    static __device__ __forceinline__ T add(T sum, T a, T b, InnerNumbers<T> numbers) {
        return Inner::add(sum, of(a, b), numbers);
    }
};

// The kernel computed the transposed matrix: its a is the caller's b.
template <class Inner>
struct SwappedDifference {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return a - b; }
    template <class T>
    static __device__ __forceinline__ T add(T sum, T a, T b, InnerNumbers<T> numbers) {
        return Inner::add(sum, of(a, b), numbers);
    }
};

template <class Inner>
struct Dot {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return a * b; }
    template <class T>
    static __device__ __forceinline__ T add(T sum, T a, T b, InnerNumbers<T> numbers) {
        return Inner::add(sum, of(a, b), numbers);
    }
};
