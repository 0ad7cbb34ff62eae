// The dense matrix of one in the format u8, u4 or u2, over zeros: a warp for a part of a slice, and
// a row for a lane.
//
// Floor: the bytes of the compressed matrix, and a sector of 32 bytes for each entry, over the
// bandwidth of memory.
//
// The generated source defines before it includes this file:
//   BitsT              unsigned, as wide as an element
//   RowT               storage of rows, as unsigned
//   STEP_BITS          8, 4 or 2
//   PARAMETER_BYTES    what lowering makes of Parameters
#pragma once

#include "common/types.cuh"
#include "sparse/slices/codes.cuh"

constexpr int THREADS = 256;

// Laid out by kernlib/families/sparse/formats/slices_gpu.py.
struct Parameters {
    const unsigned char* data;
    const int* offsets;
    const RowT* rows;
    BitsT* dense;
    i64 cols;
    u32 width, panel_slices, slices;
    u32 lines, codes;  // rows of the matrix; of a lane in data: so that no bytes lead beyond either
    u32 parts;          // into which a lane's codes are cut
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_slices_read(const __grid_constant__ Parameters p) {
    i64 warp = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, slice = warp / p.parts;
    if (slice >= p.slices) return;
    u32 lane = threadIdx.x % 32, part = u32(warp % p.parts);
    const RowT* rows = p.rows + slice * 32 * (p.parts > 1 ? 1 + p.parts : 1);
    RowT row = rows[lane];
    if (row >= p.lines) return;  // none, or one that cannot be
    u32 start = min(u32(p.offsets[slice]), p.codes);
    u32 end = min(u32(p.offsets[slice + 1]), p.codes), length = end > start ? end - start : 0;
    length /= p.parts;
    length -= length % (8 / STEP_BITS);  // whole bytes of steps
    const unsigned char* from = p.data + (i64(start) + i64(part) * length) * CODE_BYTES<BitsT>;
    i64 first = slice / p.panel_slices * p.width;
    BitsT* to = p.dense + i64(row) * p.cols + first;
    u32 column = part ? u32(rows[32 * (1 + part) + lane]) : 0;
    for (u32 code = 0; code < length; ++code) {
        Place<BitsT> place(code, length, lane);
        column += u32(from[place.step]) >> place.shift & STEP_MASK;
        BitsT bits = *reinterpret_cast<const BitsT*>(from + place.value);
        if (bits != 0 && first + column < p.cols) to[column] = bits;
        column += LEAST_STEP;
    }
}
