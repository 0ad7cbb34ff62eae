// Points as split/split.cuh reads them: words of fp16 in the order in which wgmma reads them from
// shared memory, with what the words leave out (PointInfo). For each tile of points and each DEPTH
// features: high words, then low ones; of either for each 8 features (16 bytes) the tile's points.
// What lies outside the operand is zero. Reads each number twice, the second time from the cache:
// (M + N) * K * (itemsize + 2 * COPIES) bytes over 4.1 TB/s on an H200.
//
// A CTA takes 8 neighbouring points, which are 128 bytes of what it writes; lane r + 8 c of a warp
// has chunk c of point r. The last PROBES CTAs compute a sample of pairs directly and count those
// that split/split.cuh would find doubtful: if they are many, it leaves the work to the direct
// kernel.
//
// Facts, struct Side (an operand, and where it goes) and struct Fixed: class Pack of
// kernlib/families/pairwise/kernels/pack.py.
#pragma once

#include "common/hopper.cuh"
#include "pairwise/split/parameters.cuh"
#include "pairwise/view.cuh"

using InputT = Config::InputT;          // storage
constexpr int DEPTH = Config::DEPTH;    // features of a stage of split/split.cuh
constexpr int COPIES = Config::COPIES;  // 2 for high and low words, else 1
constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = 8;
constexpr int PASS = WARPS * 32;        // features that a CTA takes at once
constexpr int SIDE = 64;                // probed points of a, and of b
constexpr int PROBES = SIDE * SIDE / WARPS;
constexpr int LEAST_TOP = -98;          // of features near 2^-98 both powers of two are normal

struct Operands {
    const InputT* a;
    const InputT* b;
    const float* centre;
    u32* doubtful;
    unsigned char* packed_a;
    unsigned char* packed_b;
    PointInfo* a_info;
    PointInfo* b_info;
};

struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Features k .. k + 7 of a point without the centre, zero past the last one.
__device__ __forceinline__ void read_chunk(float (&x)[CHUNK], const InputT* point, i64 step,
                                           bool vectors, const float* centre, int k, int count) {
    constexpr int EACH = 16 / sizeof(InputT);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) x[e] = 0.0f;
    if (vectors && k + CHUNK <= count) {
#pragma unroll
        for (int part = 0; part < CHUNK; part += EACH) {
            auto read = load_vector<InputT, EACH>(point + k + part);
#pragma unroll
            for (int e = 0; e < EACH; ++e) x[part + e] = convert<float>(read.element[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            if (k + e < count) x[e] = convert<float>(point[(k + e) * step]);
    }
    if (!DIFFERENCE) return;
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        if (k + e < count) x[e] -= centre[k + e];
}

// 2^exponent of a normal number.
__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}

// The largest feature of each of a CTA's points, the sum of squares, and a sum that is NaN where a
// feature is not finite.
struct Extent {
    float largest, squares, check;
    __device__ __forceinline__ void add(const float (&x)[CHUNK]) {
        float part = 0.0f;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            largest = fmaxf(largest, fabsf(x[e]));
            part = fmaf(x[e], x[e], part);
            check = fmaf(x[e], 0.0f, check);
        }
        squares += part;
    }
    __device__ __forceinline__ void merge(float other_largest, float other_squares,
                                          float other_check) {
        largest = fmaxf(largest, other_largest);
        squares += other_squares;
        check += other_check;
    }
};

// Over the lanes, then the warps, that share a point.
__device__ __forceinline__ void merge_in_block(Extent& extent) {
    __shared__ float shared[3][WARPS][GROUP];
    for (int step = GROUP; step < 32; step *= 2) {
        extent.merge(__shfl_xor_sync(~0u, extent.largest, step),
                     __shfl_xor_sync(~0u, extent.squares, step),
                     __shfl_xor_sync(~0u, extent.check, step));
    }
    int warp = threadIdx.x / 32, point = threadIdx.x % GROUP;
    if (threadIdx.x % 32 < GROUP) {
        shared[0][warp][point] = extent.largest;
        shared[1][warp][point] = extent.squares;
        shared[2][warp][point] = extent.check;
    }
    __syncthreads();
    extent = {};
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
        extent.merge(shared[0][i][point], shared[1][i][point], shared[2][i][point]);
}

__device__ __forceinline__ void store_words(unsigned char* to, int copy_bytes,
                                            const float (&x)[CHUNK], float scale) {
    Vector<u32, CHUNK / 2> high, low;
#pragma unroll
    for (int e = 0; e < CHUNK; e += 2) {
        float first = x[e] * scale, second = x[e + 1] * scale;
        half_t first_word = convert<half_t>(first), second_word = convert<half_t>(second);
        high.element[e / 2] = u32(first_word.bits) | u32(second_word.bits) << 16;
        low.element[e / 2] = pack<half_t>(first - convert<float>(first_word),
                                          second - convert<float>(second_word));
    }
    store_vector(reinterpret_cast<u32*>(to), high);
    if (COPIES == 2) store_vector(reinterpret_cast<u32*>(to + copy_bytes), low);
}

__device__ __forceinline__ void pack_group(const Parameters& p, const InputT* data,
                                           const Side& side, u32 index, float factor,
                                           unsigned char* packed, PointInfo* info) {
    i64 l = index / side.groups;
    int lane = threadIdx.x % 32, point = index % side.groups * GROUP + lane % GROUP;
    int first = threadIdx.x / 32 * 32 + lane / GROUP * CHUNK;
    int count = point < side.points ? p.k : 0;
    const InputT* from = data + l * side.view.batch_stride + point * side.view.row_stride;
    const float* centre = p.centre + l * p.centre_stride;
    float x[CHUNK];

    Extent extent = {};
#pragma unroll 1
    for (int k = first; k < count; k += PASS) {
        read_chunk(x, from, side.view.column_stride, side.vectors, centre, k, count);
        extent.add(x);
    }
    merge_in_block(extent);
    int top = (__float_as_int(extent.largest) >> 23) - 127;  // a NaN is not the largest
    int exponent = TOP - min(max(top, LEAST_TOP), 127);
    float norm = DIFFERENCE ? extent.squares : 0.0f;
    bool usable = extent.check == 0.0f && norm <= LARGEST_NORM;
    if (threadIdx.x < GROUP) {
        norm = usable ? norm : __int_as_float(0x7fffffff);
        info[l * side.info_stride + point] = {norm, factor * power_of_two(-exponent)};
    }

    float scale = usable ? power_of_two(exponent) : 0.0f;
    int copy_bytes = side.tile * DEPTH * 2;
    unsigned char* to = packed + l * side.packed_stride +
                        i64(point / side.tile) * p.stages * (COPIES * copy_bytes) +
                        point % side.tile * 16;
#pragma unroll 1
    for (int k = first; k < p.stages * DEPTH; k += PASS) {
        read_chunk(x, from, side.view.column_stride, side.vectors, centre, k, count);
        if (!usable) {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) x[e] = 0.0f;
        }
        store_words(to + i64(k / DEPTH) * (COPIES * copy_bytes) +
                        k % DEPTH / CHUNK * (side.tile * 16),
                    copy_bytes, x, scale);
    }
}

// One pair of points by a warp, far from each other among those of a and of b.
__device__ __forceinline__ void probe(const Parameters& p, int index) {
    int i = index / SIDE, j = index % SIDE;
    i64 l = (i + j) % p.batch;
    i64 m = i * p.a_side.points / SIDE, n = (2 * j + 1) * p.b_side.points / (2 * SIDE);
    const View &left = p.a_side.view, &right = p.b_side.view;
    const InputT* a = p.a + l * left.batch_stride + m * left.row_stride;
    const InputT* b = p.b + l * right.batch_stride + n * right.row_stride;
    const float* centre = p.centre + l * p.centre_stride;
    float value = 0.0f, norms = 0.0f;
#pragma unroll 4
    for (int k = threadIdx.x % 32; k < p.k; k += 32) {
        float x = convert<float>(a[k * left.column_stride]);
        float y = convert<float>(b[k * right.column_stride]);
        if (DIFFERENCE) {
            float c = centre[k];
            value = fmaf(x - y, x - y, value);
            norms = fmaf(x - c, x - c, fmaf(y - c, y - c, norms));
        } else {
            value = fmaf(x, 0.0f, fmaf(y, 0.0f, value));
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_xor_sync(~0u, value, step);
        norms += __shfl_xor_sync(~0u, norms, step);
    }
    bool doubtful = is_doubtful(value, norms) || norms > LARGEST_NORM;
    if (DIFFERENCE) doubtful = doubtful || value < LEAST_SQUARES;
    if (threadIdx.x % 32 == 0 && doubtful) atomicAdd(p.doubtful, 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_split_pack(const __grid_constant__ Parameters p) {
    u32 index = blockIdx.x, of_a = u32(p.a_side.groups) * p.a_side.entries;
    u32 of_b = u32(p.b_side.groups) * p.b_side.entries;
    if (index < of_a) {
        pack_group(p, p.a, p.a_side, index, DIFFERENCE ? -2.0f : 1.0f, p.packed_a, p.a_info);
    } else if (index - of_a < of_b) {
        pack_group(p, p.b, p.b_side, index - of_a, 1.0f, p.packed_b, p.b_info);
    } else {
        probe(p, int(index - of_a - of_b) * WARPS + threadIdx.x / 32);
    }
}
