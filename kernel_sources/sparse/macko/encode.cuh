// The entries of a matrix in MACKO's 4-bit delta format, where row_ptr says. A warp walks a row.
//
// Floor: the bytes of the matrix over 4.3 TB/s.
//
// Facts and struct Fixed: class Encode of kernlib/families/sparse/kernels/codecs/macko.py.
#pragma once

#include "sparse/macko/runs.cuh"

using RowT = Config::RowT;                     // of row_ptr
constexpr BitsT INFINITE = Config::INFINITE;  // bits of infinity

struct Pointers {
    const BitsT* dense;
    const RowT* row_ptr;
    BitsT* values;
    u32* deltas;  // zeros
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Codes of neighbouring entries, put into their words together.
struct Codes {
    u32* deltas;
    i64 place;  // of the next entry
    u32 word;

    __device__ __forceinline__ void flush(i64 last) {
        if (word) atomicOr(deltas + last / 8, word);
        word = 0;
    }
    __device__ __forceinline__ void put(u32 code) {
        word |= code << (place % 8 * 4);
        if (++place % 8 == 0) flush(place - 1);
    }
};

// The entries of a lane's run, from `place` on; `before` is the column of the value before it.
__device__ __forceinline__ void write_run(const Parameters& p, const BitsT* row,
                                          const BitsT (&run)[RUN], i64 column, i64 before,
                                          i64 place) {
    Codes codes{p.deltas, place, 0};
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        if (!is_value(run[i])) continue;
        i64 gap = column + i - before - 1;
        for (; gap > LAST_CODE; gap -= LAST_CODE + 1) {
            before += LAST_CODE + 1;
            p.values[codes.place] = row[before];  // either zero
            codes.put(LAST_CODE);
        }
        bool is_number = (run[i] & MAGNITUDE) <= INFINITE;
        p.values[codes.place] = is_number ? run[i] : MAGNITUDE;
        codes.put(u32(gap));
        before = column + i;
    }
    codes.flush(codes.place);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_macko_encode(const __grid_constant__ Parameters p) {
    int lane = threadIdx.x % 32;
    i64 index = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (index >= p.rows) return;
    const BitsT* row = p.dense + index * p.row_stride;
    i64 place = p.row_ptr[index];
    walk(p, row, [&](const BitsT (&run)[RUN], u32 mask, int count, i64 column, i64 before) {
        int sum = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int lower = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += lower;
        }
        if (mask) write_run(p, row, run, column, before, place + sum - count);
        place += __shfl_sync(ALL_LANES, sum, 31);
    });
}
