// to[n; i,l,k] = from[n; i,k,l]: features whose l lie side by side to each l by itself, for
// interleaved_gradient/interleaved_gradient.cuh. Lines of k are padded by zeros to whole 16 bytes.
//
// Floor: a read and a write of the operand over 4.3 TB/s on an H200, where 25216 rows of 384
// features in half precision take 11 us of 9.
//
// Facts and struct Fixed: class Deinterleave of
// kernlib/families/kronecker_sparse/kernels/steps/deinterleave.py.
#pragma once

#include "common/hopper.cuh"

using InputT = Config::InputT;        // storage, of 2 bytes
constexpr int LANES = Config::LANES;  // d
constexpr int THREADS = 256;
constexpr int CHUNK = 8;  // elements of 16 bytes

struct Operands {
    const InputT* from;
    InputT* to;
};

struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_deinterleave(const __grid_constant__ Parameters p) {
    launch_dependents();  // who reads `to` waits
    i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= p.total) return;
    int chunk = int(index % p.chunks);
    i64 line = index / p.chunks;
    int block = int(line % p.blocks);
    const InputT* from = p.from + line / p.blocks * p.row_stride + block * p.block_stride +
                         i64(chunk) * CHUNK * LANES;
    Vector<InputT, CHUNK> x[LANES];  // in their order
    if (p.vectors) {
#pragma unroll
        for (int i = 0; i < LANES; ++i) x[i] = load_vector<InputT, CHUNK>(from + i * CHUNK);
    } else {
        int count = min(CHUNK, p.columns - chunk * CHUNK) * LANES;
#pragma unroll
        for (int i = 0; i < LANES * CHUNK; ++i)
            x[i / CHUNK].element[i % CHUNK] = i < count ? from[i] : convert<InputT>(0.0f);
    }
    InputT* to = p.to + (line * LANES * p.chunks + chunk) * CHUNK;
#pragma unroll
    for (int l = 0; l < LANES; ++l) {
        Vector<InputT, CHUNK> y;
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            int place = k * LANES + l;
            y.element[k] = x[place / CHUNK].element[place % CHUNK];
        }
        store_vector(to + i64(l) * p.chunks * CHUNK, y);
    }
}
