// One of two numbers as one instruction: the compiler makes branches of what it may, and these part
// arithmetic that would go through a pipe side by side.
#pragma once

__device__ __forceinline__ int chosen(bool first, int x, int y) {
    int z;
    asm("{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.s32 p, %3, 0;\n\t"
        "selp.b32 %0, %1, %2, p;\n\t"
        "}"
        : "=r"(z)
        : "r"(x), "r"(y), "r"(static_cast<int>(first)));
    return z;
}
