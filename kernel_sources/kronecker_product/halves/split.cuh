// Numbers of fp32 as pairs of half-precision ones: the nearest, and the nearest to what is left. A
// pair has 22 bits of a number above 2^-3, and all numbers to 2^-25. So columns and matrices are
// scaled by powers of two, and what comes of them in fp32 is scaled back, exactly.
//
// A matrix is scaled so that the sum of a column's magnitudes is below 2^t, t = GROWTH of its mode,
// and at least 2^(t - 2) if its entries are of one size; a column of the tile, so that its largest
// number times 2^(all t) is below 2^15. Then nothing between the modes is above that.
#pragma once

#include "kronecker_product/halves/powers.cuh"
#include "kronecker_product/halves/scales.cuh"
#include "kronecker_product/modes/parameters.cuh"

template <>
struct ScalesOf<2> {
    Vector<float, 2> restoring[COLUMNS_SCALED];  // powers that undo a column's and the matrices'
    u32 columns[COLUMNS_SCALED];  // bits of the largest magnitude
    u32 norms[MODES];             // bits of the largest sum of a chunk's magnitudes
    int restored[RUNS];           // the exponent that undoes what was done to a run's matrices
};

constexpr u32 LARGEST = 0x7f7fffffu;  // bits of the largest number

// Eight numbers of the chunk at a place, as they were copied.
struct Raw {
    float value[CHUNK];
    __device__ __forceinline__ Raw(const HalfT* tile, int at) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            auto four =
                load_vector<float, 4>(reinterpret_cast<const float*>(tile + (at ^ half * REST)));
#pragma unroll
            for (int i = 0; i < 4; ++i) value[4 * half + i] = four.element[i];
        }
    }
};

__device__ __forceinline__ void split_chunk(HalfT* tile, int at, const float (&power)[CHUNK]) {
    const Raw raw(tile, at);
    Vector<u32, 4> high, low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Pair pair(raw.value[2 * i] * power[2 * i], raw.value[2 * i + 1] * power[2 * i + 1]);
        high.element[i] = pair.high;
        low.element[i] = pair.low;
    }
    store_vector(reinterpret_cast<u32*>(tile + at), high);
    store_vector(reinterpret_cast<u32*>(tile + (at ^ REST)), low);
}

// Of a matrix in shared memory the largest sum of a chunk's magnitudes, infinite ones apart.
template <class M>
__device__ __forceinline__ void find_norm(ScalesOf<2>& scales, const HalfT* matrix) {
    float most = 0;
#pragma unroll 1
    for (int index = threadIdx.x * CHUNK; index < M::MATRIX; index += THREADS * CHUNK) {
        Raw raw(matrix, place(index));
        float sum = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float size = fabsf(raw.value[i]);
            sum += size <= __uint_as_float(LARGEST) ? size : 0.0f;
        }
        most = fmaxf(most, fminf(sum, __uint_as_float(LARGEST)));
    }
    u32 found = __reduce_max_sync(~0u, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) atomicMax(&scales.norms[M::NUMBER], found);
}

// The exponent of a matrix.
template <class M>
__device__ __forceinline__ int shift_of_matrix(const ScalesOf<2>& scales) {
    u32 norm = scales.norms[M::NUMBER];
    constexpr int CHUNKS = ceil_log2(M::P / CHUNK);
    int exponent = M::GROWTH - 1 - CHUNKS - exponent_of(__uint_as_float(norm));
    return norm ? max(-126, min(exponent, 127)) : 0;
}

template <class M>
__device__ __forceinline__ void split_matrix(const ScalesOf<2>& scales, HalfT* matrix) {
    float one = power_of_two(shift_of_matrix<M>(scales)), power[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) power[i] = one;
#pragma unroll 1
    for (int index = threadIdx.x * CHUNK; index < M::MATRIX; index += THREADS * CHUNK)
        split_chunk(matrix, place(index), power);
}

// Calls `take` with the index and place of each of a thread's chunks among COUNT numbers.
template <int COUNT, class Take>
__device__ __forceinline__ void each_chunk(const Take& take) {
    constexpr int STEP = THREADS * CHUNK, STEPS = ceil_div(COUNT, STEP);
    constexpr int AT_ONCE = STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1;
    const int own = own_thread() * CHUNK, place_of_own = place(own);
#pragma unroll 1
    for (int first = 0; first < STEPS; first += AT_ONCE) {
        const int begin = place_of_own ^ place(first * STEP);
#pragma unroll
        for (int next = 0; next < AT_ONCE; ++next) {
            int index = own + (first + next) * STEP;
            if (COUNT % STEP == 0 || index < COUNT) take(index, begin ^ place(next * STEP));
        }
    }
}

// The largest magnitudes of the tile's columns, infinite ones too.
template <class R>
__device__ __forceinline__ void find_largest(ScalesOf<2>& scales, const HalfT* tile) {
    constexpr int STEP = THREADS * CHUNK;
    const int own = threadIdx.x * CHUNK, lane = threadIdx.x % 32;
    if constexpr (R::COLUMNS_LAST) {
        static_assert(STEP % R::COLUMNS == 0, "a thread keeps its columns");
        float most[CHUNK] = {};
        each_chunk<R::INPUTS>([&](int, int from) {
            Raw raw(tile, from);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) most[i] = fmaxf(most[i], fabsf(raw.value[i]));
        });
        constexpr int LANES = R::COLUMNS / CHUNK;  // after which columns are the same
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
            for (int mask = 16; mask >= LANES; mask /= 2)
                most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], mask));
            if (lane < LANES)
                atomicMax(&scales.columns[(own + i) % R::COLUMNS], __float_as_uint(most[i]));
        }
    } else {
        // The lanes of a warp have chunks side by side, of one column or of several.
        constexpr bool IS_SAME = R::COLUMNS == 1;
        constexpr bool IS_ONE = R::IN_FEATURES % (32 * CHUNK) == 0;
        float most = 0;
        each_chunk<R::INPUTS>([&](int index, int from) {
            Raw raw(tile, from);
            float found = IS_SAME ? most : 0.0f;
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) found = fmaxf(found, fabsf(raw.value[i]));
            most = found;
            if (IS_SAME) return;
            u32 bits = __float_as_uint(found);
            if (IS_ONE) bits = __reduce_max_sync(~0u, bits);
            if (!IS_ONE || lane == 0) atomicMax(&scales.columns[index / R::IN_FEATURES], bits);
        });
        if (IS_SAME) {
            u32 bits = __reduce_max_sync(~0u, __float_as_uint(most));
            if (lane == 0) atomicMax(&scales.columns[0], bits);
        }
    }
}

// The exponent of a column of a run's tile: none for zeros and for what is not finite.
template <class R>
__device__ __forceinline__ int shift_of_column(const ScalesOf<2>& scales, int column) {
    u32 most = scales.columns[column];
    int exponent = min(14 - R::GROWTH - exponent_of(__uint_as_float(most)), 127);
    return most && most <= LARGEST ? exponent : 0;
}

// Numbers as they were copied to pairs, and the powers that undo what is done to columns.
template <class R>
__device__ __forceinline__ void scale_tile(ScalesOf<2>& scales, HalfT* tile) {
    if (threadIdx.x < R::COLUMNS) {
        int shift = shift_of_column<R>(scales, threadIdx.x);
        scales.restoring[threadIdx.x] = powers_of_two(scales.restored[R::INDEX] - shift);
    }
    constexpr bool IS_KEPT = R::COLUMNS_LAST || R::COLUMNS == 1;
    const int own = threadIdx.x * CHUNK;
    float power[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        power[i] = power_of_two(shift_of_column<R>(scales, (own + i) % R::COLUMNS));
    each_chunk<R::INPUTS>([&](int index, int at) {
        if (!IS_KEPT) {
            float one = power_of_two(shift_of_column<R>(scales, index / R::IN_FEATURES));
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) power[i] = one;
        }
        split_chunk(tile, at, power);
    });
}

// Of a run's matrices in shared memory, which are pairs then.
template <class R, class... M>
__device__ __forceinline__ void scale_matrices(HalfT* matrices, ScalesOf<2>& scales) {
    if (threadIdx.x == 0) ((scales.norms[M::NUMBER] = 0), ...);
    __syncthreads();
    (find_norm<M>(scales, matrices + M::AT * WORDS), ...);
    __syncthreads();
    (split_matrix<M>(scales, matrices + M::AT * WORDS), ...);
    if (threadIdx.x == 0) scales.restored[R::INDEX] = -(shift_of_matrix<M>(scales) + ...);
}

// What the last mode's sums are multiplied by.
template <class R, class M>
struct ScalingOf<R, M, 2> {
    using Of = Vector<float, 2>;
    static_assert(R::COLUMNS <= THREADS, "a thread makes a column's powers");
    const ScalesOf<2>& scales;
    Of own;

    __device__ __forceinline__ explicit ScalingOf(const ScalesOf<2>& all) : scales(all), own() {
        if (M::LAST && R::COLUMNS == 1) own = all.restoring[0];
    }
    __device__ __forceinline__ Of of(int column) const {
        return !M::LAST || R::COLUMNS == 1 ? own : scales.restoring[column];
    }
    __device__ __forceinline__ static float apply(float sum, const Of& powers) {
        return M::LAST ? sum * powers.element[0] * powers.element[1] : sum;
    }
};
