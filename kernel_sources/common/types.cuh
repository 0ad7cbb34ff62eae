// Scalar types, 16-byte accesses and conversions shared by every family. Includes nothing:
// the CUDA headers for fp16 and bf16 would add 20 to 40 ms to each compile.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct alignas(2) half_t { u16 bits; };
struct alignas(2) bfloat16_t { u16 bits; };

template <class To, class From>
__device__ __forceinline__ To convert(From x) { return static_cast<To>(x); }

template <>
__device__ __forceinline__ float convert<float, half_t>(half_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <>
__device__ __forceinline__ half_t convert<half_t, float>(float x) {
    half_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <>
__device__ __forceinline__ float convert<float, bfloat16_t>(bfloat16_t x) {
    return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

template <>
__device__ __forceinline__ bfloat16_t convert<bfloat16_t, float>(float x) {
    bfloat16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// N elements moved as one access; N * sizeof(T) is 2, 4, 8 or 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
    T element[N];
};

template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_vector(const T* address) {
    return *reinterpret_cast<const Vector<T, N>*>(address);
}

template <class T, int N>
__device__ __forceinline__ void store_vector(T* address, const Vector<T, N>& value) {
    *reinterpret_cast<Vector<T, N>*>(address) = value;
}

// Loads that stay where they are written relative to each other: ptxas otherwise sinks a load from
// device memory to its use, a whole latency too late, to save registers.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_shared_in_order(const T* address) {
    static_assert(N * sizeof(T) == 16, "one 16-byte access");
    union { u32 word[4]; Vector<T, N> value; } x;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(address))));
    return x.value;
}

// Zeros, without reading, unless `exists`.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_in_order_if(bool exists, const T* address) {
    static_assert(N * sizeof(T) == 16 || N * sizeof(T) == 8, "one 8- or 16-byte access");
    union { u32 word[4]; Vector<T, N> value; } x;
    if (N * sizeof(T) == 16) {
        asm volatile("{\n\t"
                     ".reg .pred p;\n\t"
                     "setp.ne.s32 p, %5, 0;\n\t"
                     "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n\t"
                     "@p ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
                     "}"
                     : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                     : "l"(address), "r"(static_cast<int>(exists)));
    } else {
        asm volatile("{\n\t"
                     ".reg .pred p;\n\t"
                     "setp.ne.s32 p, %3, 0;\n\t"
                     "mov.b32 %0, 0; mov.b32 %1, 0;\n\t"
                     "@p ld.volatile.global.v2.u32 {%0, %1}, [%2];\n\t"
                     "}"
                     : "=r"(x.word[0]), "=r"(x.word[1])
                     : "l"(address), "r"(static_cast<int>(exists)));
    }
    return x.value;
}

// A number that is known on the host (device == nullptr) or lives on the device, one per batch.
struct Scalar {
    double value;
    const void* device;
};

template <class T>
__device__ __forceinline__ T read_scalar(const Scalar& scalar, i64 offset) {
    return scalar.device ? static_cast<const T*>(scalar.device)[offset]
                         : static_cast<T>(scalar.value);
}
