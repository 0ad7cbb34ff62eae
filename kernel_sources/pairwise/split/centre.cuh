// The offset that both operands lose before they are split: of each feature the mean over some
// 500 points of a and as many of b, evenly spaced. Data far from the origin would otherwise lose to
// cancellation what the offset adds to their norms; a mean of few points is as good as that of all.
// Also sets the count of doubtful pairs (split/pack.cuh) to zero. Reads 1000 K numbers, 5 us
// for most K.
//
// Facts and struct Fixed: class Centre of kernlib/families/pairwise/kernels/pack.py.
#pragma once

#include "common/types.cuh"
#include "pairwise/view.cuh"

using InputT = Config::InputT;         // storage
constexpr int GATE_WORDS = 4;          // the count, and those of product/parameters.cuh
constexpr int THREADS = 1024, COLUMNS = 32, LINES = THREADS / COLUMNS;

struct Operands {
    const InputT* a;
    const InputT* b;
    float* centre;
    u32* doubtful;
};

struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Adds the finite ones of a thread's samples of feature k.
__device__ __forceinline__ void add_samples(float& sum, float& count, const InputT* data,
                                            const View& view, const Sample& sample, int batch) {
#pragma unroll 8
    for (int i = threadIdx.x / COLUMNS; i < sample.points; i += LINES) {
        i64 point = i * sample.step;
        float x = convert<float>(data[i % batch * view.batch_stride + point * view.row_stride]);
        bool finite = x - x == 0.0f;
        sum += finite ? x : 0.0f;
        count += finite ? 1.0f : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_split_centre(const __grid_constant__ Parameters p) {
    __shared__ float sums[2][LINES][COLUMNS + 1];
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < GATE_WORDS) p.doubtful[threadIdx.x] = 0;
    if (!Config::DIFFERENCE) return;  // there is nothing to centre
    int column = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    int k = blockIdx.x * COLUMNS + column;
    float sum = 0.0f, count = 0.0f;
    if (k < p.k) {
        i64 l = blockIdx.y;
        add_samples(sum, count,
                    p.a + l * p.a_view.batch_stride + k * p.a_view.column_stride, p.a_view,
                    p.a_sample, p.batch);
        add_samples(sum, count,
                    p.b + l * p.b_view.batch_stride + k * p.b_view.column_stride, p.b_view,
                    p.b_sample, p.batch);
    }
    sums[0][line][column] = sum;
    sums[1][line][column] = count;
    __syncthreads();
    for (int step = LINES / 2; step > 0; step /= 2) {
        if (line < step) {
            sums[0][line][column] += sums[0][line + step][column];
            sums[1][line][column] += sums[1][line + step][column];
        }
        __syncthreads();
    }
    if (line > 0 || k >= p.pitch) return;
    float mean = sums[0][0][column] / fmaxf(sums[1][0][column], 1.0f);
    p.centre[i64(blockIdx.y) * p.pitch + k] = mean - mean == 0.0f ? mean : 0.0f;
}
