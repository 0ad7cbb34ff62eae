// Many vectors x[n, c] of 2-byte elements as the right operand of wgmma: for each block of 64
// features a row of 128 bytes of each vector, swizzled by 128 bytes. So some vectors of a block are
// one piece that a bulk copy brings to shared memory as it is. Rows behind the last vector and
// features behind the last one are zero.
//
// In order 0 features lie in their own order. In order 1 those of each 32 lie in the order of
// sparse/bitmap/fragments.cuh: position 16 * p + 8 * h + 2 * t + e holds feature
// 8 * t + 4 * p + 2 * h + e.
//
// Floor: x read and written once, 4 * columns * cols bytes over the bandwidth of L2 or memory:
// 8 MB for 512 x 4096, some 2 us. A thread takes UNITS times 16 bytes, all on their way at a time;
// 8 of them share lines of 128 bytes on both sides.
//
// Facts and struct Fixed: class Pack of kernlib/families/sparse/kernels/pack.py.
#pragma once

#include "common/hopper.cuh"

constexpr int THREADS = 256;
constexpr int UNITS = 2;                   // of 16 bytes, of a thread
constexpr int CHUNK = 8, CHUNKS = 8;       // elements of a unit, units of a row
constexpr int PASS = THREADS / CHUNKS;     // rows that a CTA takes at a time
constexpr int ROW_BYTES = CHUNK * CHUNKS * 2;

struct Pointers {
    const u16* x;
    unsigned char* packed;
};

struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

union Unit {
    Vector<u16, CHUNK> elements;
    u32 words[4];
};

// Exchanges half of the words with the lane whose number differs in bit BIT: those whose own number
// differs from the lane's there.
template <int BIT>
__device__ __forceinline__ void exchange(Unit& unit) {
    bool upper = threadIdx.x & BIT;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i & BIT) continue;
        u32 sent = upper ? unit.words[i] : unit.words[i + BIT];
        u32 come = __shfl_xor_sync(0xffffffffu, sent, BIT);
        if (upper) unit.words[i] = come;
        else unit.words[i + BIT] = come;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_pack(const __grid_constant__ Parameters p) {
    // They wait where they read what is packed here.
    if constexpr (Config::OVERLAPS) launch_dependents();
    u32 block = blockIdx.x / p.tiles, tile = blockIdx.x - block * p.tiles;
    u32 unit = threadIdx.x % CHUNKS, first = tile * (PASS * UNITS) + threadIdx.x / CHUNKS;
    i64 feature = i64(block) * (CHUNK * CHUNKS) + unit * CHUNK;
    Unit units[UNITS] = {};
    if constexpr (Config::OVERLAPS) wait_for_prerequisites();
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        u32 n = first + i * PASS;
        if (n < p.columns && feature < p.cols)
            units[i].elements = load_vector<u16, CHUNK>(p.x + n * p.x_stride + feature);
    }
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        u32 n = first + i * PASS;
        if (feature + CHUNK > p.cols) {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (feature + e >= p.cols) units[i].elements.element[e] = 0;
        }
        if constexpr (Config::ORDER == 1) {  // word j of unit t to word t of unit j, of each four
            exchange<1>(units[i]);
            exchange<2>(units[i]);
        }
        if (n >= p.padded) continue;
        unsigned char* row = p.packed + (i64(block) * p.padded + n) * ROW_BYTES;
        store_vector(reinterpret_cast<u16*>(row + ((unit ^ n % 8) * 16)), units[i].elements);
    }
}
