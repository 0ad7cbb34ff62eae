// to[i] = OutputT(from[i]), for up to ARRAYS arrays in one launch: float32 weights rounded as
// autocast rounds them before the products of a plan, or gradients widened behind them.
//
// Floor: a read and a write of the arrays. Those of a layer have some 100,000 numbers, so a launch
// takes 2 us, as each of ARRAYS of torch's would.
//
// Facts and struct Fixed: class Cast of kernlib/families/kronecker_sparse/kernels/steps/cast.py.
#pragma once

#include "common/types.cuh"

using InputT = Config::InputT;    // storage, of 2 and 4 bytes or the other way round
using OutputT = Config::OutputT;
constexpr int THREADS = 256;
constexpr int CHUNK = 8;  // elements of a thread: 16 bytes of the narrow type
constexpr int ARRAYS = Config::ARRAYS;

struct Operands {
    const InputT* from[ARRAYS];
    OutputT* to[ARRAYS];
};

struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

__device__ __forceinline__ void cast_chunk(const InputT* from, OutputT* to) {
    constexpr int READ = 16 / sizeof(InputT), WRITTEN = 16 / sizeof(OutputT);
    Vector<OutputT, WRITTEN> y[CHUNK / WRITTEN];
#pragma unroll
    for (int i = 0; i < CHUNK; i += READ) {
        Vector<InputT, READ> x = load_vector<InputT, READ>(from + i);
#pragma unroll
        for (int e = 0; e < READ; ++e)
            y[(i + e) / WRITTEN].element[(i + e) % WRITTEN] = convert<OutputT>(x.element[e]);
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i += WRITTEN) store_vector(to + i, y[i / WRITTEN]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_cast(const __grid_constant__ Parameters p) {
    i64 chunk = i64(blockIdx.x) * THREADS + threadIdx.x;
#pragma unroll
    for (int array = 0; array < ARRAYS; ++array) {
        i64 count = p.count[array], chunks = (count + CHUNK - 1) / CHUNK;
        if (chunk >= 0 && chunk < chunks) {
            const InputT* from = p.from[array] + chunk * CHUNK;
            OutputT* to = p.to[array] + chunk * CHUNK;
            if (p.vectors && chunk * CHUNK + CHUNK <= count) {
                cast_chunk(from, to);
            } else {
                for (int i = 0; i < CHUNK && chunk * CHUNK + i < count; ++i)
                    to[i] = convert<OutputT>(from[i]);
            }
        }
        chunk -= chunks;
    }
}
