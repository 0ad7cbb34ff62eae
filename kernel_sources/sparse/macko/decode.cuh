// A dense matrix of zeros receives the entries of one in MACKO's 4-bit delta format. A warp walks a
// row, 32 entries at a time: the column of an entry is the sum of the codes up to its own, and of
// one for each entry before it.
//
// Floor: the bytes of the dense matrix over 4.3 TB/s, twice, as it is filled with zeros before.
//
// Facts and struct Fixed: class Decode of kernlib/families/sparse/kernels/codecs/macko.py.
#pragma once

#include "common/types.cuh"

using BitsT = Config::BitsT;  // a value's bits
using RowT = Config::RowT;    // of row_ptr

constexpr int THREADS = 128;
constexpr u32 ALL_LANES = 0xffffffff;

struct Pointers {
    const BitsT* values;
    const unsigned char* deltas;
    const RowT* row_ptr;
    BitsT* out;
    const BitsT* values_end;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_macko_decode(const __grid_constant__ Parameters p) {
    int lane = threadIdx.x % 32;
    i64 row = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (row >= p.rows) return;
    // Within the entries, whatever row_ptr holds. `column` is that of the entry before.
    i64 end = min(i64(p.row_ptr[row + 1]), i64(p.values_end - p.values)), column = -1;
    for (i64 first = max(i64(p.row_ptr[row]), i64(0)); first < end; first += 32) {
        i64 k = first + lane;
        int passed = k < end ? 1 + (p.deltas[k / 2] >> (k % 2 * 4) & 15) : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int lower = __shfl_up_sync(ALL_LANES, passed, step);
            if (lane >= step) passed += lower;
        }
        i64 to = column + passed;
        if (k < end && to < p.columns) p.out[row * p.columns + to] = p.values[k];
        column += __shfl_sync(ALL_LANES, passed, 31);
    }
}
