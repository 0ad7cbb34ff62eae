// out[l,m,n] (+)= Epilogue(Outer(sum_k Inner(Op(a[l,m,k], b[l,n,k])))) of few pairs: patches of 4 x
// 4 pairs, each summed by `slices` warps of one CTA, whose lanes lie along the features.
//
// A feature of a patch is 8 reads of 4 bytes a lane, 2 bytes a pair, which L2 delivers in 0.36 us
// a million pair-features: six times what a full tile of direct/direct.cuh takes. That walks along
// all features in 64 ns each, however few pairs there are, and this in a round of loads for each
// 1024 of them.
//
// Facts and struct Fixed: class Few of kernlib/families/pairwise/kernels/few.py.
#pragma once

#include "pairwise/mend.cuh"
#include "pairwise/scalars.cuh"

using InputT = Config::InputT;                 // storage of a and b
using OutputT = Config::OutputT;               // storage of out
constexpr bool SYMMETRIC = Config::SYMMETRIC;  // b is a

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int SIDE = 4, PAIRS = SIDE * SIDE;  // of a patch
constexpr int AHEAD = 16 / sizeof(AccT);      // features of a lane whose loads wait together
constexpr int CHAIN = 64;                     // terms of a running sum: PROMOTE_K of tile.cuh

// Whether sums of lanes can leave the range of their type on either side.
template <class Inner, class T> constexpr bool OVERFLOWS = false;
template <> constexpr bool OVERFLOWS<Identity, float> = true;

struct Operands {
    const InputT* a;
    const InputT* b;
    OutputT* out;
};

struct Parameters : Operands, ScalarValues<Config::SCALARS>, Fixed {};

using ReadScalar = ScalarReader<Parameters>;
using Numbers = InnerNumbers<AccT>;

// All points of one batch entry.
struct Points {
    const InputT* data;
    i64 point_stride;
    i64 feature_stride;
    int count;     // of points
    int features;  // K
};

__device__ __forceinline__ Points points_of(const InputT* data, const View& view, i64 l, int count,
                                            int k) {
    return {data + l * view.batch_stride, view.row_stride, view.column_stride, count, k};
}

// One patch of out: its first pair, and whether it is to be computed.
struct Patch {
    int m, n;
    bool exists;
    __device__ __forceinline__ Patch(const Parameters& parameters, int place) {
        u32 index = blockIdx.x * u32(WARPS >> parameters.slice_bits) + place;
        m = int(index / u32(parameters.across)) * SIDE;
        n = int(index % u32(parameters.across)) * SIDE;
        exists = index < u32(parameters.patches) && !(SYMMETRIC && n + SIDE <= m);
    }
    // Its points of a whole entry, of which the first is `first`.
    __device__ __forceinline__ static Points of(const Points& all, int first) {
        return {all.data + first * all.point_stride, all.point_stride, all.feature_stride,
                min(all.count - first, SIDE), all.features};
    }
};

using Sums = AccT[PAIRS];

// What the lanes of a warp have of pair lane / 2 together: at each of four steps a lane keeps HALF
// of its pairs and gives its partner the others. A step a function: unrolled late, loops over the
// steps are branches.
template <int HALF>
__device__ __forceinline__ AccT fold_lanes(const AccT (&sums)[2 * HALF], const Numbers& numbers) {
    bool upper = threadIdx.x & 2 * HALF;
    AccT halved[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        AccT kept = upper ? sums[HALF + i] : sums[i], given = upper ? sums[i] : sums[HALF + i];
        halved[i] = Inner::merge(kept, __shfl_xor_sync(~0u, given, 2 * HALF), numbers);
    }
    if constexpr (HALF > 1) return fold_lanes<HALF / 2>(halved, numbers);
    else return Inner::merge(halved[0], __shfl_xor_sync(~0u, halved[0], 1), numbers);
}

// The points of a patch, each at the lane's next feature.
struct Cursor {
    const InputT* at[SIDE];
    i64 step;
    __device__ __forceinline__ Cursor(const Points& points, int first, int step)
        : step(step * points.feature_stride) {
        const InputT* point = points.data + first * points.feature_stride;
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            at[i] = point;
            // Points past the last one never reach the output: read the last one in their place.
            if (i + 1 < points.count) point += points.point_stride;
        }
    }
    __device__ __forceinline__ void read(AccT (&values)[SIDE], bool inside) {
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            values[i] = convert<AccT>(inside ? *at[i] : InputT());
            at[i] += step;
        }
    }
};

// Adds the lane's next COUNT features, the first of which is k.
template <int COUNT>
__device__ __forceinline__ void add_features(Sums& sums, Cursor& left, Cursor& right, int k,
                                             int step, int features, const Numbers& numbers) {
    AccT x[COUNT][SIDE], y[COUNT][SIDE];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        left.read(x[j], k + j * step < features);
        right.read(y[j], k + j * step < features);
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        // Features past the last one are zeros, which some stages would count. A branch for the
        // others would have ptxas sink loads behind it, a whole latency too late.
        if (!Inner::ZERO_ADDS_NOTHING && k + j * step >= features) break;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            sums[pair] = Term::add(sums[pair], x[j][pair / SIDE], y[j][pair % SIDE], numbers);
        }
    }
}

// The sum of pair lane / 2 of a patch over the features of a warp: every `step`-th run of 32 from
// `begin` on. Sums of chains meet in totals that keep what they round off, so that the error does
// not grow with K.
__device__ __forceinline__ AccT sum_features(const Points& a, const Points& b, int begin, int step,
                                             const Numbers& numbers) {
    int lane = threadIdx.x % 32;
    Cursor left(a, begin + lane, step), right(b, begin + lane, step);
    if (a.features <= step) {  // of up to 256 features in all, at most one a lane
        Sums sums = {};
        add_features<1>(sums, left, right, begin + lane, step, a.features, numbers);
        return fold_lanes<PAIRS / 2>(sums, numbers);
    }
    AccT total = AccT(0), rest = AccT(0);
#pragma unroll 1
    while (begin < a.features) {
        Sums sums = {};
#pragma unroll 1
        for (int terms = 0; terms < CHAIN && begin < a.features; terms += AHEAD) {
            add_features<AHEAD>(sums, left, right, begin + lane, step, a.features, numbers);
            begin += AHEAD * step;
        }
        rest = Inner::merge(rest, fold_lanes<PAIRS / 2>(sums, numbers), numbers);
        total = Inner::merge_exactly(total, rest, numbers);
    }
    return total;
}

// The largest of a patch in the bits of a float, of what each of its warps has sampled.
__device__ __forceinline__ u32 largest_of_patch(const u32* sampled, int place, int bits) {
    u32 largest = 0;
#pragma unroll 1
    for (int slice = 0; slice < 1 << bits; ++slice) {
        largest = max(largest, sampled[(place << bits) + slice]);
    }
    return largest;
}

// The sum of a pair of which lanes have left the range of float: infinities of both signs meet as
// a NaN, where a sum in the order of the features is one of them. In double, which holds every
// product of floats and the sum of as many as there can be.
__device__ __noinline__ float sum_in_double(const Points& a, const Points& b, int row,
                                            int column) {
    const InputT* x = a.data + row * a.point_stride;
    const InputT* y = b.data + column * b.point_stride;
    double sum = 0.0;
#pragma unroll 4
    for (int k = 0; k < a.features; ++k) {
        sum += Term::of(convert<double>(convert<float>(x[k * a.feature_stride])),
                        convert<double>(convert<float>(y[k * b.feature_stride])));
    }
    return float(sum);
}

__device__ __forceinline__ void store(OutputT* to, AccT value, bool accumulate) {
    if (accumulate) value += convert<AccT>(*to);
    *to = convert<OutputT>(value);
}

// Sums one pair over the slices, in their order, and stores it: by a thread for each pair, with all
// lanes of its warp.
__device__ __forceinline__ void finish_pair(const AccT* sums, const u32* sampled,
                                            const Parameters& parameters, Numbers numbers,
                                            const Points& a, const Points& b, i64 l) {
    int place = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS, bits = parameters.slice_bits;
    Patch patch(parameters, place);
    int row = patch.m + pair / SIDE, column = patch.n + pair % SIDE;
    bool exists = place < WARPS >> bits && patch.exists && row < a.count && column < b.count;
    Vector<AccT, 1> sum = {AccT(1)};  // which mend.cuh leaves alone
    if (exists) {
        const AccT* from = sums + (place << bits) * PAIRS + pair;
        sum.element[0] = *from;
#pragma unroll 1
        for (int slice = 1; slice < 1 << bits; ++slice) {
            sum.element[0] = Inner::merge(sum.element[0], from[slice * PAIRS], numbers);
        }
        if constexpr (OVERFLOWS<Inner, AccT>) {
            AccT whole = sum.element[0];
            if (whole - whole != AccT(0)) sum.element[0] = sum_in_double(a, b, row, column);
        }
        if constexpr (SCALED) {
            numbers.unit = unit_of(largest_of_patch(sampled, place, bits), numbers.p);
        }
    }
    Rescale rescale(numbers);
    Range range(numbers.p, a.features);
    mend_sums(sum, exists ? row : a.count, column, a, b, range, numbers.p);
    if (!exists || (SYMMETRIC && column < row)) return;
    ReadScalar read{parameters, l};
    AccT result = Finish(read)(rescale(sum.element[0]), rescale.unit);
    if (column - row == parameters.diagonal) result += read(REGULARIZATION);
    const View& view = parameters.out_view;
    OutputT* out = parameters.out + l * view.batch_stride;
    store(out + row * view.row_stride + column * view.column_stride, result,
          parameters.accumulate);
    if (SYMMETRIC && column > row) {
        store(out + column * view.row_stride + row * view.column_stride, result,
              parameters.accumulate);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_few(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(16) unsigned char shared[];
    AccT* sums = reinterpret_cast<AccT*>(shared);                // of each warp's pairs
    u32* sampled = reinterpret_cast<u32*>(sums + WARPS * PAIRS);  // by each warp, if SCALED
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, bits = parameters.slice_bits;
    int begin = (warp & ((1 << bits) - 1)) * 32, step = 32 << bits;
    Patch patch(parameters, warp >> bits);

    i64 l = blockIdx.y;
    auto a = points_of(parameters.a, parameters.a_view, l, parameters.m, parameters.k);
    auto b = points_of(parameters.b, parameters.b_view, l, parameters.n, parameters.k);
    ReadScalar read{parameters, l};
    Numbers numbers = {read(INNER_P), read(INNER_SCALE)};
    if constexpr (SCALED) {
        float size = 0.0f;
        if (patch.exists) {
            size = largest_sampled(Patch::of(a, patch.m), Patch::of(b, patch.n), begin + lane,
                                   step);
        }
        u32 largest = __reduce_max_sync(~0u, finite_bits(size));
        if (lane == 0) sampled[warp] = largest;
        __syncthreads();
        numbers.unit = unit_of(largest_of_patch(sampled, warp >> bits, bits), numbers.p);
    }
    if (patch.exists) {
        AccT sum = sum_features(Patch::of(a, patch.m), Patch::of(b, patch.n), begin, step,
                                numbers);
        if (lane % 2 == 0) sums[warp * PAIRS + lane / 2] = sum;
    }
    __syncthreads();
    if (warp < max(1, (WARPS >> bits) * PAIRS / 32)) {
        finish_pair(sums, sampled, parameters, numbers, a, b, l);
    }
}
