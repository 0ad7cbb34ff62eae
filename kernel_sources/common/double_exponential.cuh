// e^x in double without a branch, so that several go through the pipe side by side: 14 operations
// of the FP64 lanes, 4.1e-16 of the value at most. Denormals are 0, and what is above 1.7951e308,
// 0.15 % below the largest number, is infinite.
#pragma once

#include "common/math.cuh"
#include "common/chosen.cuh"

// e^r - 1 - r over r^2, to 2.9e-16 e^r / r^2 up to log(2) / 2: a minimax polynomial.
constexpr double EXPONENTIAL[] = {
    2.747679532631752e-07, 2.7634990441959545e-06, 2.4801931719849756e-05,
    0.00019841185237028992, 0.001388888851622865, 0.008333333370869509,
    0.04166666666813646, 0.16666666666611557, 0.49999999999998324,
};
// What a number below 2^51 is added to for the whole number next to it, in the sum's lower half.
constexpr double TO_WHOLE = 6755399441055744.0;  // 1.5 2^52: the sum's last digit is 1

// Found before the function of the language by what is declared in the same namespace.
namespace branchless {
// 2^n power for the n of `whole`, a sum with TO_WHOLE: 0 or infinity where the upper half of the
// exponent, `high`, is from BELOW or ABOVE on, by its sign, and no number where that is none, which
// arithmetic has made quiet.
template <int BELOW, int ABOVE>
__device__ __forceinline__ double scaled(double power, double whole, int high) {
    int size = high & 0x7fffffff;
    int upper = __double2hiint(power) + (__double2loint(whole) << 20);
    int lower = __double2loint(power);
    bool out = size >= (high < 0 ? BELOW : ABOVE);
    int end = chosen(size > 0x7ff00000, 0x7ff80000, chosen(high < 0, 0, 0x7ff00000));
    return __hiloint2double(chosen(out, end, upper), chosen(out, 0, lower));
}

__device__ __forceinline__ double exp(double x) {
    double shifted = fma(x, 1.4426950408889634, TO_WHOLE), whole = shifted - TO_WHOLE;
    double r = fma(whole, -0.6931471805599453, x);
    r = fma(whole, -2.3190468138462996e-17, r);
    double power = EXPONENTIAL[0];
#pragma unroll
    for (int i = 1; i < 9; ++i) power = fma(power, r, EXPONENTIAL[i]);
    power = fma(fma(power, r, 1.0), r, 1.0);
    // From -708 down and from 709.78125 up.
    return scaled<0x40862000, 0x40862e42>(power, shifted, __double2hiint(x));
}
}
