// The factor that takes a root of a sum in a tile's unit back, by the special function unit.
#pragma once

// unit^(p / 2).
__device__ __forceinline__ float root_of_power(float unit, float p) {
    float exponent = float((__float_as_int(unit) >> 23) - 127) * 0.5f, part, power;
    float high = __fmul_rn(exponent, p), whole = rintf(high);  // as in norm_root
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(high - whole + fmaf(exponent, p, -high)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(whole));
    return part * power;
}
