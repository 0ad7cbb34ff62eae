// packed[i,l,s,q] = right[i,l,s,q], depth q side by side and padded with zeros to whole chunks of
// 16 bytes: weights of any strides, such as (a,b,c,d) whose lanes lie side by side, as
// portable/portable.cuh takes them fastest. Its many row tiles would each read them apart: a sector
// of 32 bytes for every element.
//
// Floor: 2 * a*b*c*d * itemsize bytes over the bandwidth of L2, and a launch.
//
// The generated source defines before it includes this file:
//   InputT             storage
//   PARAMETER_BYTES    what lowering makes of Parameters
#pragma once

#include "common/types.cuh"

constexpr int THREADS = 256;
constexpr int CHUNK = 16 / sizeof(InputT);

// Laid out by kernlib/families/kronecker_sparse/lowering/portable.py.
struct Parameters {
    // written at each launch
    const InputT* right;
    InputT* packed;
    // fixed by the plan
    i64 block_stride, lane_stride, line_stride, depth_stride;
    i64 depth;
    u32 lanes, lines;
    u32 chunks, total;   // in the depth of a line, and in all
    u32 lines_first;     // whether lines lie closer together than depths
    u32 unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_portable_pack(const __grid_constant__ Parameters p) {
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.total) return;
    // Neighbouring threads read neighbours.
    u32 lane = index % p.lanes, rest = index / p.lanes;
    u32 near = p.lines_first ? p.lines : p.chunks, far = p.lines_first ? p.chunks : p.lines;
    u32 first = rest % near, second = rest / near % far, block = rest / near / far;
    u32 line = p.lines_first ? first : second, chunk = p.lines_first ? second : first;
    i64 q = i64(chunk) * CHUNK;
    const InputT* from = p.right + block * p.block_stride + lane * p.lane_stride +
                         line * p.line_stride + q * p.depth_stride;
    Vector<InputT, CHUNK> values = {};
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) {
        if (q + e < p.depth) values.element[e] = from[e * p.depth_stride];
    }
    i64 to = ((i64(block) * p.lanes + lane) * p.lines + line) * p.chunks + chunk;
    store_vector(p.packed + to * CHUNK, values);
}
