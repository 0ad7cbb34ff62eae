// packed[i,l,s,q] = right[i,l,s,q], depth q side by side and padded with zeros to whole chunks of
// 16 bytes: weights of any strides, such as (a,b,c,d) whose lanes lie side by side, as
// portable/portable.cuh takes them fastest. Its many row tiles would each read them apart: a sector
// of 32 bytes for every element.
//
// Floor: 2 * a*b*c*d * itemsize bytes over the bandwidth of L2, and a launch.
//
// Facts and struct Fixed: class PortablePack of
// kernlib/families/kronecker_sparse/kernels/steps/portable_pack.py.
#pragma once

#include "common/types.cuh"
#include "kronecker_sparse/strides.cuh"

using InputT = Config::InputT;  // storage
constexpr int THREADS = 256;
constexpr int CHUNK = 16 / sizeof(InputT);

struct Operands {
    const InputT* right;
    InputT* packed;
};

struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

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
    const InputT* from = p.right + block * p.strides.block + lane * p.strides.lane +
                         line * p.strides.line + q * p.strides.depth;
    Vector<InputT, CHUNK> values = {};
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) {
        if (q + e < p.depth) values.element[e] = from[e * p.strides.depth];
    }
    i64 to = ((i64(block) * p.lanes + lane) * p.lines + line) * p.chunks + chunk;
    store_vector(p.packed + to * CHUNK, values);
}
