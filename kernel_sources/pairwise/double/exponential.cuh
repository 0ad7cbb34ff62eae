// e^x in double without a branch, so that several go through the pipe side by side: 14 operations
// of the FP64 lanes, 4.1e-16 of the value at most. Denormals are 0, and what is above 1.7951e308,
// 0.15 % below the largest number, is infinite.
#pragma once

#include "common/math.cuh"
#include "pairwise/double/chosen.cuh"

// e^r - 1 - r over r^2, to 2.9e-16 e^r / r^2 up to log(2) / 2: a minimax polynomial.
constexpr double EXPONENTIAL[] = {
    2.747679532631752e-07, 2.7634990441959545e-06, 2.4801931719849756e-05,
    0.00019841185237028992, 0.001388888851622865, 0.008333333370869509,
    0.04166666666813646, 0.16666666666611557, 0.49999999999998324,
};

// Found before the function of the language by what is declared in the same namespace.
namespace branchless {
__device__ __forceinline__ double exp(double x) {
    constexpr double SHIFT = 6755399441055744.0;  // 1.5 2^52: the sum's last digit is 1
    double shifted = fma(x, 1.4426950408889634, SHIFT), whole = shifted - SHIFT;
    double r = fma(whole, -0.6931471805599453, x);
    r = fma(whole, -2.3190468138462996e-17, r);
    double power = EXPONENTIAL[0];
#pragma unroll
    for (int i = 1; i < 9; ++i) power = fma(power, r, EXPONENTIAL[i]);
    power = fma(fma(power, r, 1.0), r, 1.0);
    int high = __double2hiint(x), size = high & 0x7fffffff;
    int scaled = __double2hiint(power) + (__double2loint(shifted) << 20);
    int low = __double2loint(power);
    // From -708 down, from 709.78125 up, and what is no number, which arithmetic has made quiet.
    bool out = size >= (high < 0 ? 0x40862000 : 0x40862e42);
    int end = chosen(size > 0x7ff00000, 0x7ff80000, chosen(high < 0, 0, 0x7ff00000));
    return __hiloint2double(chosen(out, end, scaled), chosen(out, 0, low));
}
}
