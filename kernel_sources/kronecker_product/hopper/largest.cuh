// The largest finite magnitude of each row of x, or of each column with the factors on the left:
// what float16 is scaled by that several launches hand on (bounds.cuh).
//
// Floor on an H200: (bytes of x) over 4.3 TB/s, of what may still be in the L2 cache for the first
// product.
//
// Facts and struct Fixed: class Largest of kernlib/families/kronecker_product/kernels/largest.py.
#pragma once

#include "common/types.cuh"

constexpr int THREADS = Config::THREADS;
constexpr bool INSIDE = Config::INSIDE;  // whether columns lie behind features
constexpr int CHUNK = 8;  // neighbours, of 16 bytes
constexpr int COLUMNS = INSIDE ? 64 : 1, CHUNKS = INSIDE ? COLUMNS / CHUNK : 1;
constexpr int STEP = THREADS / CHUNKS * (INSIDE ? 1 : CHUNK);  // features
constexpr int COUNT = INSIDE ? CHUNK : 1;                      // maxima of a thread
constexpr u32 FINITE = 0x7bff;                                 // bits of the largest number

struct Pointers {
    const half_t* x;
    u32* largest;  // bits of fp32, zeros before
};

struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// So many neighbours; zeros behind them.
__device__ __forceinline__ Vector<half_t, CHUNK> load_chunk(const half_t* from, i64 stride,
                                                            i64 exist, bool aligned) {
    if (aligned && exist >= CHUNK) return load_vector<half_t, CHUNK>(from);
    Vector<half_t, CHUNK> found = {};
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        if (e < exist) found.element[e] = from[e * stride];
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_product_largest(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32* of_block = reinterpret_cast<u32*>(shared);  // COLUMNS
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) of_block[i] = 0;
    __syncthreads();
    const int own = threadIdx.x % CHUNKS * CHUNK;  // among columns
    const i64 column = i64(blockIdx.x) * COLUMNS + own;
    const i64 stride = INSIDE ? p.column_stride : p.feature_stride;
    const half_t* x = p.x + column * p.column_stride;
    u32 most[COUNT] = {};
    i64 feature = i64(blockIdx.y) * STEP + threadIdx.x / CHUNKS * (INSIDE ? 1 : CHUNK);
#pragma unroll 4
    for (; feature < p.features; feature += i64(gridDim.y) * STEP) {
        const i64 exist = INSIDE ? p.columns - column : p.features - feature;
        const auto found = load_chunk(x + feature * p.feature_stride, stride, exist, p.aligned);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            const u32 bits = found.element[e].bits & 0x7fff;
            u32& kept = most[INSIDE ? e : 0];
            kept = max(kept, bits <= FINITE ? bits : 0);
        }
    }
#pragma unroll
    for (int e = 0; e < COUNT; ++e)
        if (most[e]) atomicMax(&of_block[own + e], most[e]);
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
        const half_t found{u16(of_block[i])};
        const i64 at = i64(blockIdx.x) * COLUMNS + i;
        if (at < p.columns) atomicMax(&p.largest[at], __float_as_uint(convert<float>(found)));
    }
}
