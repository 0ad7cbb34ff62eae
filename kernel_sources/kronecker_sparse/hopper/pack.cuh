// Weights in the order in which wgmma reads them from shared memory: for each tile of
// hopper/hopper.cuh or interleaved/interleaved.cuh and each of its stages along k, for each l of
// the tile and each 16 bytes along k, TILE_COLUMNS rows j. What lies outside the weight is zero.
// Reads and writes each weight once: 2 * a*b*c*d * itemsize bytes, 1 us for the 2 MB of
// (1,512,512,4) in half types.
//
// A warp takes 8 neighbouring j, whose chunks are 128 bytes of what it writes, by 4 neighbouring
// chunks along k, which are up to 512 bytes of each of their lines; a thread reads TOGETHER l at
// once and turns them.
//
// Facts, struct Fixed and ORDER, which k a position along k stands for, in each so many of them:
// class Pack of kernlib/families/kronecker_sparse/kernels/steps/pack.py.
#pragma once

#include "common/hopper.cuh"
#include "kronecker_sparse/strides.cuh"

using InputT = Config::InputT;                // of the kernel that will read it, as are:
constexpr int TILE_COLUMNS = Config::TILE_COLUMNS, TILE_DEPTH = Config::TILE_DEPTH;
constexpr int SPAN = Config::SPAN;
constexpr int TOGETHER = Config::TOGETHER;    // neighbouring l of 1 to 16 bytes, whose first one is
                                              // aligned to them
// Of words: high and low ones of 3xTF32; of TF32 rounded ones; of half types as they are.
constexpr int COPIES = Config::PRODUCTS == 3 ? 2 : 1;
constexpr int ORDER_SIZE = sizeof(ORDER);
constexpr int THREADS = 128;
constexpr int CHUNK = 16 / sizeof(InputT);
constexpr int CHUNKS = TILE_DEPTH / CHUNK;

struct Operands {
    const InputT* weight;
    InputT* packed;
};

struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

__device__ __forceinline__ void split(float x, float& high, float& low) {
    high = round_to_tf32(x);
    low = round_to_tf32(x - high);
}

template <class T>
__device__ __forceinline__ void split(T x, T& high, T& low) { high = x; }

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_pack(const __grid_constant__ Parameters p) {
    launch_dependents();  // hopper/hopper.cuh waits where it reads what is packed here
    i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= p.total) return;
    int groups = p.spans * SPAN / TOGETHER, rows = p.column_tiles * TILE_COLUMNS;
    int chunks = p.stages * CHUNKS, parts = (chunks + 3) / 4;
    i64 rest = index / 32;
    int l = int(rest % groups) * TOGETHER;
    rest /= groups;
    int chunk = int(rest % parts) * 4 + int(index % 32) / 8;
    rest /= parts;
    int j = int(rest % (rows / 8)) * 8 + int(index % 8);
    i64 i = rest / (rows / 8);
    if (chunk >= chunks) return;

    Vector<InputT, TOGETHER> read[CHUNK] = {};
    const InputT* from =
        p.weight + i * p.strides.block + l * p.strides.lane + j * p.strides.line;
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) {
        int position = chunk * CHUNK + e;
        int k = position - position % ORDER_SIZE + ORDER[position % ORDER_SIZE];
        if (l < p.lanes && j < p.columns && k < p.depth)
            read[e] = load_vector<InputT, TOGETHER>(from + k * p.strides.depth);
    }
    constexpr int LANE = CHUNKS * TILE_COLUMNS, STAGE = COPIES * SPAN * LANE;  // in chunks
#pragma unroll
    for (int m = 0; m < TOGETHER; ++m) {
        int lane = l + m;
        i64 tile = (i * p.spans + lane / SPAN) * p.column_tiles + j / TILE_COLUMNS;
        i64 place = (tile * p.stages + chunk / CHUNKS) * STAGE + lane % SPAN * LANE +
                    chunk % CHUNKS * TILE_COLUMNS + j % TILE_COLUMNS;
        Vector<InputT, CHUNK> high, low;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            split(read[e].element[m], high.element[e], low.element[e]);
        store_vector(p.packed + place * CHUNK, high);
        if (COPIES == 2) store_vector(p.packed + (place + SPAN * LANE) * CHUNK, low);
    }
}
