// How many entries each row of a matrix has in MACKO's 4-bit delta format, and how many are values.
// A warp walks a row.
//
// Floor: the bytes of the matrix over 4.3 TB/s.
//
// Facts and struct Fixed: class Count of kernlib/families/sparse/kernels/codecs/macko.py.
#pragma once

#include "sparse/macko/runs.cuh"

struct Pointers {
    const BitsT* dense;
    int* counts;  // of entries, then of values, by row
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_macko_count(const __grid_constant__ Parameters p) {
    i64 index = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (index >= p.rows) return;
    int values = 0, entries = 0;
    const BitsT* row = p.dense + index * p.row_stride;
    walk(p, row, [&](const BitsT (&)[RUN], u32 mask, int count, i64, i64) {
        entries += count;
        values += __popc(mask);
    });
    entries = __reduce_add_sync(ALL_LANES, entries);
    values = __reduce_add_sync(ALL_LANES, values);
    if (threadIdx.x % 32 == 0) {
        p.counts[index] = entries;
        p.counts[p.rows + index] = values;
    }
}
