// The epilogue's parameters, as a launch is given them, and its costly part over a staged tile.
#pragma once

// Empty without vectors or scalars, as base classes are and members are not.
template <int COUNT>
struct VectorPointers {
    const InputT* vectors[COUNT];
    __device__ __forceinline__ const InputT* vector(int index) const { return vectors[index]; }
};
template <>
struct VectorPointers<0> {
    __device__ __forceinline__ const InputT* vector(int) const { return nullptr; }
};

template <int COUNT>
struct Scalars {
    Scalar scalars[COUNT];
    __device__ __forceinline__ AccT scalar(int index) const {
        return read_scalar<AccT>(scalars[index], 0);
    }
};
template <>
struct Scalars<0> {
    __device__ __forceinline__ AccT scalar(int) const { return AccT(); }
};

// Reads the parameters from SCALAR and VECTOR on: those of the epilogues behind the first ones.
template <class Parameters, int SCALAR = 0, int VECTOR = 0>
struct Read {
    const Parameters& parameters;
    __device__ __forceinline__ AccT operator()(int index) const {
        return parameters.scalar(SCALAR + index);
    }
    __device__ __forceinline__ const InputT* vector(int index) const {
        return parameters.vector(VECTOR + index);
    }
};

// 16 bytes of the staged tile through epilogues that would take seconds to compile, unrolled over a
// thread's accumulators. Half types have been rounded before, as by a product of torch's.
// feature(e) is that of element e.
template <class Rest, class Feature>
__device__ __forceinline__ void finish_chunk(u32 address, const Rest& rest,
                                             const Feature& feature) {
    constexpr int CHUNK = 16 / sizeof(OutputT);
    union { u32 word[4]; OutputT element[CHUNK]; } x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "r"(address) : "memory");
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        x.element[e] = convert<OutputT>(rest(convert<AccT>(x.element[e]), feature(e)));
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
                 : "memory");
}
