// Counts the codes of each (panel, row) of the formats u8, u4 and u2: a warp each.
//
// Floor: the bytes of the dense matrix over the bandwidth of memory.
//
// Facts and struct Fixed: class Count of kernlib/families/sparse/kernels/codecs/slices.py.
#pragma once

#include "sparse/slices/walk.cuh"

struct Pointers {
    const BitsT* dense;
    int* lengths;  // (panel, row)
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_slices_count(const __grid_constant__ Parameters p) {
    i64 line = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (line >= i64(p.panels) * p.lines) return;
    u32 codes = walk(p, line % p.lines, u32(line / p.lines), Ignore()).codes;
    if (threadIdx.x % 32 == 0) p.lengths[line] = int(codes);
}
