// The gradient of softmax over the stored blocks of each row of a block-sparse matrix, by its
// logits: y * (grad - sum(y * grad)), and by x, which is that times the scale.
//
// Floor on an H200: (bytes of the stored y and grad, and of the one or two results) over 4.3 TB/s;
// where a row does not fit into its warps' registers y and grad are read twice.
//
// Facts and struct Fixed: class GradientRows of kernlib/families/blocksparse/kernels/softmax.py.
#pragma once

#include "blocksparse/softmax/rows.cuh"

struct Pointers {
    const int* row_ranks;
    const int* counts;
    const InputT* y;
    const InputT* grad;
    InputT* to_x;       // nullptr where nobody asks for it
    InputT* to_logits;  // the same, of the same strides
    Scalar scale;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr int RESIDENT = VECTORS && CHUNKS == 2 ? 3 : 2;  // of 80 registers or 128

// Chunks of y and of its gradient.
struct Pairs {
    Chunk y[CHUNKS], grad[CHUNKS];
};

// From block `at` of the line on; zeros behind its end.
__device__ __forceinline__ void load_pairs(Pairs& pairs, const InputT* y, const InputT* grad,
                                           const Parameters& p, const Place& place, u32 at) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const u32 block = at + place.ahead + k * place.apart, slot = place.first + block;
        pairs.y[k] = pairs.grad[k] = Chunk{};
        if (block >= place.blocks) continue;
        pairs.y[k] = read_chunk(y + slot * p.y_strides.slot, p.y_strides.column);
        pairs.grad[k] = read_chunk(grad + slot * p.grad_strides.slot, p.grad_strides.column);
    }
}

__device__ __forceinline__ float product_of(Pairs& pairs, int count) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        if (k >= count) break;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            sum += convert<float>(pairs.y[k].element[e]) * convert<float>(pairs.grad[k].element[e]);
        keep_packed(pairs.y[k]);
        keep_packed(pairs.grad[k]);
    }
    return sum;
}

// The sum of a row over all warps of its task.
__device__ __forceinline__ float whole_sum(float own, const Fixed& sizes,
                                           Exchange<float>& exchange) {
    const float of_warp = over_row(own, Sum());
    if (sizes.team_bits == 0) return of_warp;
    const float* of_warps = exchange.put(sizes, of_warp);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
        if (i < 1 << sizes.team_bits) sum += of_warps[i * ROWS];
    return sum;
}

__device__ __forceinline__ void store(const Pairs& pairs, const Parameters& p, const Place& place,
                                      i64 offset, float sum, float scale, u32 at) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const u32 block = at + place.ahead + k * place.apart, slot = place.first + block;
        if (block >= place.blocks) continue;
        Chunk plain, scaled;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            const float y = convert<float>(pairs.y[k].element[e]);
            const float found = y * (convert<float>(pairs.grad[k].element[e]) - sum);
            plain.element[e] = convert<InputT>(found);
            scaled.element[e] = convert<InputT>(found * scale);
        }
        const i64 to = offset + slot * p.out_strides.slot;
        if (p.to_logits) write_chunk(p.to_logits + to, p.out_strides.column, plain);
        if (p.to_x) write_chunk(p.to_x + to, p.out_strides.column, scaled);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
blocksparse_softmax_gradient(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    Exchange<float> exchange{reinterpret_cast<float*>(shared)};
    const Place place = place_of(p, p.row_ranks, p.counts);
    const float scale = read_scalar<float>(p.scale, 0);
    const u32 step = place.apart * CHUNKS;
    Pairs pairs;
    for (u32 entry = blockIdx.y; entry < p.batch; entry += gridDim.y) {
        const InputT* y = p.y + offset_of(p.y_strides, p, place, entry);
        const InputT* grad = p.grad + offset_of(p.grad_strides, p, place, entry);
        const i64 offset = offset_of(p.out_strides, p, place, entry);
        float sum = 0.0f;
        bool is_summed = false;  // the whole row
        for (u32 at = 0;;) {
            load_pairs(pairs, y, grad, p, place, at);
            if (!is_summed) {
                sum += product_of(pairs, accesses(place, at));
                if (at + step < place.blocks) {
                    at += step;
                    continue;
                }
                sum = whole_sum(sum, p, exchange);
                is_summed = true;
            }
            store(pairs, p, place, offset, sum, scale, at);  // first the end, which is there still
            if (at == 0) break;
            at -= step;
        }
    }
    if (p.to_logits) clear_slots(p.to_logits, p.out_strides, p, *p.counts);
    if (p.to_x) clear_slots(p.to_x, p.out_strides, p, *p.counts);
}
