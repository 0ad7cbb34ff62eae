// Powers of two that keep what lies between two modes within half precision. With m the largest
// number of a column and n_i the largest sum of a matrix column's magnitudes, numbers behind mode i
// are at most m * n_1 .. n_i. The first mode multiplies by 2^s so that m 2^s is less than 2^15 and
// 2^14 at least, matrix i is divided by 2^e_i >= n_i, and the last of all, which is not, undoes
// them: in fp32, exactly. Of a matrix what is below 2^-14 n_i may lose bits, to 2^-25 n_i.
// A run that hands on to another leaves that to it, with the power of each of its columns; the
// other brings its tile to one power a column first. Of bfloat16, whose range is that of fp32,
// nothing is scaled.
#pragma once

#include "kronecker_product/halves/powers.cuh"
#include "kronecker_product/halves/scales.cuh"
#include "kronecker_product/modes/parameters.cuh"

template <>
struct ScalesOf<1> {
    u32 columns[COLUMNS_SCALED];  // bits of the largest magnitude, then of 2^s as float
    u32 norms[MODES];             // bits of n_i
    float restored[RUNS];         // 2^(e_1 + ..) of a run
};

// Of a power of two.
__device__ __forceinline__ float inverse(u32 bits) {
    return __uint_as_float((254u << 23) - bits);
}

// Of a matrix in shared memory, into its norm; what is not finite is not counted.
template <class M>
__device__ __forceinline__ void find_norm(ScalesOf<1>& scales, const HalfT* matrix) {
#pragma unroll 1
    for (int q = threadIdx.x; q < M::Q; q += THREADS) {
        float sum = 0;
#pragma unroll 1
        for (int p = 0; p < M::P; ++p) {
            float x = __uint_as_float(
                __float_as_uint(convert<float>(matrix[place(q * M::P + p)])) & 0x7fffffffu);
            sum += x < 65536.0f ? x : 0.0f;
        }
        atomicMax(&scales.norms[M::NUMBER], __float_as_uint(sum));
    }
}

// e_i of a mode, but 0 of the last of all.
template <class R, class M>
__device__ __forceinline__ int shift_of_matrix(const ScalesOf<1>& scales) {
    float norm = __uint_as_float(scales.norms[M::NUMBER]);
    return norm > 0 && !(M::LAST && R::ENDS) ? exponent_of(norm) + 1 : 0;
}

template <class R, class M>
__device__ __forceinline__ void scale_matrix(const ScalesOf<1>& scales, HalfT* matrix) {
    int shift = shift_of_matrix<R, M>(scales);
    if (shift == 0) return;
    float power = power_of_two(-shift);
#pragma unroll 1
    for (int index = threadIdx.x; index < M::MATRIX; index += THREADS) {
        HalfT& entry = matrix[place(index)];
        entry = convert<HalfT>(convert<float>(entry) * power);
    }
}

// The larger of the magnitudes in both halves.
__device__ __forceinline__ u32 larger(u32 most, u32 x) { return __vmaxu2(most, x & 0x7fff7fffu); }

// The largest magnitudes of the tile's columns.
template <class R>
__device__ __forceinline__ void find_largest(ScalesOf<1>& scales, const HalfT* tile) {
    if constexpr (R::COLUMNS_LAST) {
        static_assert(THREADS * CHUNK % R::COLUMNS == 0, "a thread keeps its columns");
        u32 most[CHUNK / 2] = {};
        for (int index = threadIdx.x * CHUNK; index < R::INPUTS; index += THREADS * CHUNK) {
            auto x = load_vector<u32, 4>(reinterpret_cast<const u32*>(tile + place(index)));
#pragma unroll
            for (int i = 0; i < CHUNK / 2; ++i) most[i] = larger(most[i], x.element[i]);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            atomicMax(&scales.columns[(threadIdx.x * CHUNK + i) % R::COLUMNS],
                      most[i / 2] >> i % 2 * 16 & 0xffffu);
    } else {
        constexpr int CHUNKS = R::IN_FEATURES / CHUNK;
        constexpr int GROUPS = R::COLUMNS < WARPS ? ceil_div(WARPS, R::COLUMNS) : 1;
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int unit = warp; unit < R::COLUMNS * GROUPS; unit += WARPS) {
            int column = unit / GROUPS;
            u32 most = 0;
            for (int i = unit % GROUPS * 32 + lane; i < CHUNKS; i += GROUPS * 32) {
                const HalfT* from = tile + place(column * R::IN_FEATURES + i * CHUNK);
                auto x = load_vector<u32, 4>(reinterpret_cast<const u32*>(from));
#pragma unroll
                for (int k = 0; k < 4; ++k) most = larger(most, x.element[k]);
            }
            u32 found = __reduce_max_sync(~0u, max(most & 0xffffu, most >> 16));
            if (lane == 0) atomicMax(&scales.columns[column], found);
        }
    }
}

// The power that brings a number into the range, 1 for what is not finite. Zeros would take any,
// and have one that makes theirs the smallest of all exponents that are handed on.
__device__ __forceinline__ u32 shift_of(float most) {
    bool is_finite = most < 1.7e38f;
    int exponent = most > 0 ? 14 - exponent_of(most) : 100;
    return __float_as_uint(is_finite ? power_of_two(exponent) : 1.0f);
}

// Of all columns, between two barriers.
template <class R>
__device__ __forceinline__ void scale_tile(ScalesOf<1>& scales, const HalfT*) {
    for (int i = threadIdx.x; i < COLUMNS_SCALED; i += THREADS)
        scales.columns[i] = shift_of(convert<float>(half_t{u16(scales.columns[i])}));
}

// Of a run's matrices in shared memory.
template <class R, class... M>
__device__ __forceinline__ void scale_matrices(HalfT* matrices, ScalesOf<1>& scales) {
    if (threadIdx.x == 0) ((scales.norms[M::NUMBER] = 0), ...);
    __syncthreads();
    (find_norm<M>(scales, matrices + M::AT), ...);
    __syncthreads();
    (scale_matrix<R, M>(scales, matrices + M::AT), ...);
    // The last of all modes restores what was done to the others.
    if (threadIdx.x == 0)
        scales.restored[R::INDEX] = (power_of_two(shift_of_matrix<R, M>(scales)) * ...);
}

// What a sum is multiplied by before it is rounded, by the column of the tile where SHIFTED.
template <class R, class M>
struct ScalingOf<R, M, 1> {
    using Of = float;
    static constexpr bool ENDS = M::LAST && R::ENDS;
    static constexpr bool BEGINS = M::NUMBER == 0;  // what another run hands on is shifted before
    static constexpr bool SHIFTED = SCALED && (ENDS || BEGINS);
    static constexpr bool IS_ONE = !SHIFTED || R::COLUMNS == 1;
    const ScalesOf<1>& scales;
    float own;

    __device__ __forceinline__ explicit ScalingOf(const ScalesOf<1>& all) : scales(all), own(1) {
        if (SCALED && ENDS) own = all.restored[R::INDEX];
        if (SHIFTED && IS_ONE) own = shifted(0);
    }
    __device__ __forceinline__ float shifted(int column) const {
        u32 power = scales.columns[column];
        return own * (ENDS ? inverse(power) : __uint_as_float(power));
    }
    __device__ __forceinline__ Of of(int column) const { return IS_ONE ? own : shifted(column); }
    __device__ __forceinline__ static float apply(float sum, Of scale) {
        return SHIFTED ? sum * scale : sum;
    }
};
