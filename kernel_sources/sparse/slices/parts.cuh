// out[n,r] = finish(sum_c w[r,c] x[n,c]), w in the format u8, u4 or u2 with rows cut into parts.
//
// A slice is 32 rows of about as many codes, one a lane. Each lane's codes are cut into `parts` of
// equal length, a warp for each. So all warps of a slice take as long, and their sums meet in
// order in the shared memory of their block. A block takes some slices at a time and goes on to
// others. It holds all of x. Lanes of a warp begin at columns of their own, close to each other.
//
// So one launch is a product, and blocks do not wait for each other. The second launch of panels
// (slices/slices.cuh) took 3.6 to 6 us of a product's 12 to 27 in a program on an H200.
//
// Floor in bytes: itemsize + 1 (u8), + .5 (u4) or + .25 (u2) a code, 2 a row and part, over the
// bandwidth of memory: of an H200's 4.31 TB/s 1.2 us for 4096 x 4096 of u8 with a density of .1,
// 4.7 us of u2 with .5, 25 us for 22016 x 4096. Of operations: as slices/slices.cuh.
//
// Facts and struct Fixed: class Parts of kernlib/families/sparse/kernels/slices/parts.py.
#pragma once

#include "common/async_copy.cuh"
#include "common/parameters.cuh"
#include "sparse/slices/lanes.cuh"

using OutputT = Config::OutputT;  // storage of out

struct Addresses {
    const unsigned char* data;
    const int* offsets;  // of slices, in codes of a lane
    const RowT* rows;    // of each slice: of its lanes, then the columns where parts of them begin
    const InputT* x;
    OutputT* out;
};
struct Parameters : Addresses,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr u32 SUM_BYTES = WARPS * COLUMNS * 32 * 4;  // of shared memory, before x

// The codes of one lane in a part of a slice, and the column where they begin.
struct Part {
    u32 start, length, column;
    RowT row;

    __device__ __forceinline__ Part(const Parameters& p, u32 slice, u32 part) {
        start = length = column = 0;
        row = NO_ROW;
        if (slice < p.slices) {
            const RowT* rows = p.rows + i64(slice) * p.row_pitch + threadIdx.x % 32;
            start = u32(__ldg(p.offsets + slice));
            length = (u32(__ldg(p.offsets + slice + 1)) - start) / p.parts;
            row = rows[0];
            if (part) column = u32(rows[32 * (1 + part)]);
            start += part * length;
        }
    }
    __device__ __forceinline__ const unsigned char* data(const Parameters& p) const {
        return p.data + i64(start) * CODE_BYTES<InputT>;
    }
};

// Begins to read x: of several vectors, which are turned on their way, it waits for them too.
__device__ __forceinline__ void stage_x(const Parameters& p, unsigned char* to, u32 vector,
                                        u32 count) {
    const InputT* x = p.x + vector * p.x_stride;
    if constexpr (COLUMNS == 1) {
#pragma unroll 1
        for (u32 at = threadIdx.x * CHUNK; at < p.cols; at += THREADS * CHUNK)
            copy_async<16>(to + at * PITCH, x + at, 16);
    } else {
        stage_once(to, x, p.x_stride, count, 0, p.cols);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
sparse_parts(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char memory[];
    float (*sums)[COLUMNS][32] = reinterpret_cast<float (*)[COLUMNS][32]>(memory);
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    if (!p.ahead) wait_for_prerequisites();
#endif
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 slot = warp / p.parts, part = warp - slot * p.parts;
    u32 chunk = blockIdx.x % p.chunks, vector = chunk * COLUMNS;
    u32 count = min(p.columns - vector, u32(COLUMNS));
    u32 x_place = shared_address(memory + SUM_BYTES);

    // x, and what others may use, come after wait_to_begin.
    if (!p.ahead) stage_x(p, memory + SUM_BYTES, vector, count);
    u32 slice = blockIdx.x / p.chunks * p.slots + slot;
    if (slot >= p.slots) slice = p.slices;  // a warp without work, which waits for the others
    Part at(p, slice, part);
    Stream stream;
    stream.open(at.data(p), at.length);
    if (p.ahead) {
        wait_to_begin();
        stage_x(p, memory + SUM_BYTES, vector, count);
    }
    wait_for_copies();
    __syncthreads();
    Finish finish{Read<Parameters>{p}};
    for (u32 begin = blockIdx.x / p.chunks * p.slots;;) {
        float total[SUMS] = {};
        stream.run(x_place + at.column * PITCH, total);
        if (COLUMNS == 1) total[0] += total[1];
        RowT row = at.row;
        begin += p.step;
        slice += p.step;
        at = Part(p, slice, part);
        stream.open(at.data(p), at.length);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) sums[warp][n][lane] = total[n];
        __syncthreads();
        if (row != NO_ROW) {
            for (u32 n = part; n < count; n += p.parts) {
                u32 of_slice = threadIdx.x / 32 - part;
                float sum = sums[of_slice][n][lane];
#pragma unroll 8
                for (u32 other = 1; other < p.parts; ++other)
                    sum += sums[of_slice + other][n][lane];
                p.out[i64(vector + n) * p.out_column_stride + i64(row) * p.out_row_stride] =
                    convert<OutputT>(finish(sum, row));
            }
        }
        if (begin >= p.slices) break;
        __syncthreads();
    }
}
