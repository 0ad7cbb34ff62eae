// What a slope is taken of, and what it is multiplied by: Op of a pair's coordinates, of pair
// gradients.
#pragma once

// Of x, given Op(x, z). SwappedDifference: z - x, whose own sign is in the constant factor.
struct Difference {
    template <class T>
    static __device__ __forceinline__ T of(T x, T z) { return x - z; }
    template <class T>
    static __device__ __forceinline__ T chain(T slope, T) { return slope; }
};

struct SwappedDifference : Difference {
    template <class T>
    static __device__ __forceinline__ T of(T x, T z) { return z - x; }
};

struct Dot {
    template <class T>
    static __device__ __forceinline__ T of(T x, T z) { return x * z; }
    template <class T>
    static __device__ __forceinline__ T chain(T slope, T z) { return slope * z; }
};
