// out[n, r] = Finish(sum of row r's parts), behind macko/macko.cuh where CTAs divide entries: the
// part of the warp in whose entries the row begins, then those of the warps that begin within it. A
// warp a row and vector; parts in an order that depends on their number alone.
//
// Floor: 8 bytes of L2 an element and 4 a warp of macko/macko.cuh, some microseconds with the
// launch.
//
// Facts and struct Fixed: class MackoSum of kernlib/families/sparse/kernels/macko/macko.py.
#pragma once

#include "common/hopper.cuh"
#include "common/parameters.cuh"

using OutputT = Config::OutputT;  // storage of out
using RowT = Config::RowT;        // of row_ptr

constexpr int THREADS = 128;
constexpr int UNIT = 64;  // as in macko/macko.cuh

struct Pointers {
    const RowT* row_ptr;
    const float* sums;
    OutputT* out;
};

struct Parameters : Pointers,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_macko_sum(const __grid_constant__ Parameters p) {
    int lane = threadIdx.x % 32;
    i64 row = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32, n = blockIdx.y;
    Finish finish(Read<Parameters>{p});
    if constexpr (Config::OVERLAPS) wait_for_prerequisites();
    if (row >= p.rows) return;
    i64 start = p.row_ptr[row], end = p.row_ptr[row + 1];
    float sum = 0;
    if (start < end) {
        // Warp g begins at unit units * g / parts; those that begin behind `start`, before `end`.
        i64 units = (i64(p.row_ptr[p.rows]) + UNIT - 1) / UNIT;
        i64 g = ((start / UNIT + 1) * p.parts + units - 1) / units;
        i64 last = (((end - 1) / UNIT + 1) * p.parts + units - 1) / units;
        const float* parts = p.sums + i64(p.columns) * p.rows + n * p.parts;
        for (g += lane; g < last; g += 32) {
            bool has_entries = units * g / p.parts < units * (g + 1) / p.parts;
            if (has_entries) sum += parts[g];
        }
        if (lane == 0) sum += p.sums[n * p.rows + row];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0)
        p.out[n * p.out_vector_stride + row * p.out_row_stride] =
            convert<OutputT>(finish(sum, row));
}
