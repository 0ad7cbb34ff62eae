// Points whose products are exponents of base 2: entries x, y of two points with
// sum_j x[j] y[j] = c |a - b|^2, c the factor of the squared distance in the exponent. A feature
// has three entries, of two words of fp16, high and low: high, high, low of a, and high, low, high
// of b; the norm c |a|^2 has three words of its own, beside three ones of b.
//
// Exact to 2^-23 of c (|a|^2 + |b|^2), which is the relative error of values: where a norm is above
// MOST, what sums without norms in the product does the work (`far`).
//
// Facts, structs Side (an operand, and where it goes) and Fixed, and Finish: class ProductFold of
// kernlib/families/pairwise/kernels/product.py; exponent_factor(), which returns c of Finish.
#pragma once

#include "common/hopper.cuh"
#include "pairwise/scalars.cuh"

using InputT = Config::InputT;           // storage
constexpr int DEPTH = Config::DEPTH;     // entries as padded, a multiple of 16
constexpr int POINTS = 16, PARTS = 8;    // of a block: points, and threads that share each
constexpr int THREADS = POINTS * PARTS, NORMS = 6, CHUNKS = DEPTH / 8;
constexpr float MOST = 8.0f;

struct Operands {
    const InputT* a;
    const InputT* b;
    const float* centre;
    u32* far;
    unsigned char* packed_a;
    unsigned char* packed_b;
};

struct Parameters : Operands, ScalarValues<Config::SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// The words of x: its `index`-th is what the ones before leave, rounded to fp16.
__device__ __forceinline__ float word_of(float x, int index) {
    float word = 0.0f;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (i > index) break;
        word = convert<float>(convert<half_t>(x));
        x -= word;
    }
    return word;
}

// |x - centre|^2 of a block's points, by the threads that share each.
__device__ __forceinline__ float norm_of_point(const InputT* from, i64 step, const float* centre,
                                               int k) {
    __shared__ float parts[PARTS][POINTS];
    int point = threadIdx.x % POINTS, part = threadIdx.x / POINTS;
    float norm = 0.0f;
#pragma unroll 4
    for (int i = part; i < k; i += PARTS) {
        float x = convert<float>(from[i * step]) - centre[i];
        norm = fmaf(x, x, norm);
    }
    parts[part][point] = norm;
    __syncthreads();
    norm = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) norm += parts[i][point];
    return norm;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_product_fold(const __grid_constant__ Parameters p) {
    i64 l = blockIdx.y;
    bool left = int(blockIdx.x) < p.a_side.blocks;
    const Side& side = left ? p.a_side : p.b_side;
    int block = left ? blockIdx.x : blockIdx.x - p.a_side.blocks;
    i64 point = i64(block) * POINTS + threadIdx.x % POINTS, step = side.view.column_stride;
    const InputT* from = (left ? p.a : p.b) + l * side.view.batch_stride +
                         point * side.view.row_stride;
    const float* centre = p.centre + l * p.centre_stride;
    int k = point < side.points ? p.k : 0;  // what lies outside the operand is zero
    Finish finish(ScalarReader<Parameters>{p, l});
    float c = exponent_factor(finish), root = sqrtf(2.0f * fabsf(c));
    float factor = left && c > 0.0f ? -root : root;
    float norm = c * norm_of_point(from, step, centre, k);
    if (!(fabsf(norm) <= MOST)) *p.far = 1;
    unsigned char* to = (left ? p.packed_a : p.packed_b) + l * side.packed_stride +
                        point / side.tile * (side.tile * DEPTH * 2) + point % side.tile * 16;
#pragma unroll 1
    for (int chunk = threadIdx.x / POINTS; chunk < CHUNKS; chunk += PARTS) {
        Vector<u32, 4> entries;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            int j = chunk * 8 + e, i = (j - NORMS) / 3, part = (j - NORMS) % 3;
            float entry = 0.0f;
            if (j < NORMS) {
                entry = left == (j < 3) ? word_of(norm, j % 3) : 1.0f;
            } else if (i < k) {
                float x = convert<float>(from[i * step]) - centre[i];
                entry = word_of(x * factor, part == (left ? 2 : 1));
            }
            u32 bits = convert<half_t>(entry).bits;
            entries.element[e / 2] = e % 2 ? entries.element[e / 2] | bits << 16 : bits;
        }
        store_vector(reinterpret_cast<u32*>(to + chunk * (side.tile * 16)), entries);
    }
}
