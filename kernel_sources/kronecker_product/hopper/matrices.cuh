// The matrices of a pass as words in shared memory: copies of a product of factors along the
// diagonal, as many as make it SIZE wide.
//
// fp32 and float16 are scaled by a power of two, so that the exponent of a matrix's largest number
// is EXPONENT.
#pragma once

#include "kronecker_product/hopper/panel.cuh"

// Launches before this one, and behind it, that float16 is handed on between (bounds.cuh).
constexpr int BEFORE = Config::BEFORE, BEHIND = Config::BEHIND;
constexpr bool BOUNDED = BEFORE + BEHIND > 0;
// Of all matrices of a launch that hands on: sums of columns, each in 128 places, and the largest.
constexpr int SUMS_OF_COLUMNS = BEHIND > 0 ? 128 : 0, GROWTHS = BEHIND > 0 ? 2 : 0;
constexpr int SUM_BITS = 9;  // behind the point: 128 numbers below 2^15 are less than 2^31 then

// The exponent that a sum of magnitudes is less than.
__device__ __forceinline__ int growth_of(u32 sum) { return 32 - __clz(int(sum)) - SUM_BITS; }

// P x P, the product of the PARTS factors from FIRST on; its columns by quad_place with QUADS.
template <int P_, int FIRST_, int PARTS_, int SIZE_, int EXPONENT_, int QUADS_>
struct Merged<P_, FIRST_, PARTS_, SIZE_, EXPONENT_, QUADS_> {
    static constexpr int P = P_, Q = P_, FIRST = FIRST_, PARTS = PARTS_, SIZE = SIZE_;
    static constexpr int EXPONENT = EXPONENT_, BYTES = SIZE * SIZE * 2;  // of a word
    static constexpr bool QUADS = QUADS_;
};

constexpr u32 FINITE = 0x7f7fffffu;  // bits of the largest number

// The power of two, as exponent, that gives a number of these bits an exponent; 0 for zeros and for
// what is not finite.
__device__ __forceinline__ int shift_to(int exponent, u32 bits) {
    const int shift = exponent - exponent_of(__uint_as_float(bits));
    return bits && bits <= FINITE ? max(-126, min(shift, 127)) : 0;
}
// What an entry is made in: of several factors that fp32 has no more rounded than one.
template <class M>
using EntryT = typename Chosen<WORDS == 2 && (M::PARTS > 1), double, float>::Type;

// A worker's entries of a matrix: along rows or, if a column's entries are neighbours in device
// memory, along columns.
template <class M>
struct Part {
    static constexpr int COUNT = M::SIZE * M::SIZE / WORKERS;
    static constexpr int STEP = WORKERS / M::SIZE;  // of what they do not lie along
    const bool along_columns;
    const int own, first;
    __device__ __forceinline__ explicit Part(const Parameters& p)
        : along_columns(p.matrices[M::FIRST + M::PARTS - 1].row_stride == 1),
          own(threadIdx.x % M::SIZE), first(threadIdx.x / M::SIZE) {}
    __device__ __forceinline__ int row(int i) const {
        return along_columns ? own : first + i * STEP;
    }
    __device__ __forceinline__ int column(int i) const {
        return along_columns ? first + i * STEP : own;
    }
    __device__ __forceinline__ EntryT<M> value(const Parameters& p, int i) const {
        if (row(i) / M::P != column(i) / M::P) return 0;
        return entry_of<M, EntryT<M>>(p, 0, row(i) % M::P, column(i) % M::P);
    }
    // So many of them, from one on.
    template <int AT_ONCE>
    __device__ __forceinline__ void load(const Parameters& p, int from,
                                         EntryT<M> (&values)[AT_ONCE]) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) values[i] = value(p, from + i);
    }
    template <int AT_ONCE>
    __device__ __forceinline__ void write(unsigned char* matrix, float power, int from,
                                          const EntryT<M> (&values)[AT_ONCE]) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int own = column(from + i), at = M::QUADS ? quad_place(own) : own;
            HalfT* to = reinterpret_cast<HalfT*>(matrix + place(row(from + i), at, M::SIZE));
            const EntryT<M> scaled = values[i] * power;
            *to = convert<HalfT>(float(scaled));
            if (WORDS == 2)
                to[M::BYTES / 2] = convert<HalfT>(float(scaled - convert<float>(*to)));
        }
    }
};

// Adds a worker's entries, as they are multiplied, to the sums of their columns, infinite ones
// apart.
template <class M, int COUNT>
__device__ __forceinline__ void add_to_columns(u32* sums, const Part<M>& part, float power,
                                               int from, const EntryT<M> (&values)[COUNT]) {
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float size = fabsf(float(values[i])) * power;
        const u32 units = size > 0 && size < 65536.0f ? u32(size * (1 << SUM_BITS)) + 1 : 0;
        if (part.along_columns) {  // a warp has entries of one column
            const u32 all = __reduce_add_sync(~0u, units);
            if (threadIdx.x % 32 == 0) atomicAdd(&sums[part.column(from + i)], all);
        } else {
            own += units;
        }
    }
    if (!part.along_columns) atomicAdd(&sums[part.own], own);
}

// Of so many entries, infinite ones apart.
template <int COUNT, class T>
__device__ __forceinline__ float largest_of(const T (&values)[COUNT]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float size = fabsf(float(values[i]));
        most = fmaxf(most, size <= __uint_as_float(FINITE) ? size : 0.0f);
    }
    return most;
}
__device__ __forceinline__ void find_largest_of(float most, u32& largest) {
    const u32 found = __reduce_max_sync(~0u, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) atomicMax(&largest, found);
}

// A worker's entries of one matrix after another, all of which are asked for before any is awaited.
// Those that are too many to be kept in registers are read twice.
template <class... M>
struct Staged {
    __device__ __forceinline__ explicit Staged(const Parameters&) {}
    __device__ __forceinline__ void find_largest(u32*) const {}
    __device__ __forceinline__ void write(unsigned char*, const u32*, u32*) const {}
};
template <class M, class... Rest>
struct Staged<M, Rest...> {
    static constexpr int COUNT = Part<M>::COUNT;
    static constexpr bool KEPT = COUNT <= 16;
    static constexpr int AT_ONCE = KEPT ? COUNT : 32;
    const Parameters& p;
    const Part<M> part;
    EntryT<M> values[AT_ONCE];
    Staged<Rest...> rest;
    __device__ __forceinline__ explicit Staged(const Parameters& p) : p(p), part(p), rest(p) {
        part.load(p, 0, values);
    }
    __device__ __forceinline__ void find_largest(u32* largest) {
        float most = largest_of(values);
        for (int from = AT_ONCE; from < COUNT; from += AT_ONCE) {
            part.load(p, from, values);
            most = fmaxf(most, largest_of(values));
        }
        find_largest_of(most, *largest);
        rest.find_largest(largest + 1);
    }
    __device__ __forceinline__ void write(unsigned char* matrix, const u32* largest, u32* sums) {
        const float power = SCALED ? power_of_two(shift_to(M::EXPONENT, *largest)) : 1.0f;
        for (int from = 0; from < COUNT; from += AT_ONCE) {
            if (from > 0 || (SCALED && !KEPT)) part.load(p, from, values);
            part.write(matrix, power, from, values);
            if (BEHIND > 0) add_to_columns<M>(sums, part, power, from, values);
        }
        rest.write(matrix + WORDS * M::BYTES, largest + 1, sums + SUMS_OF_COLUMNS);
    }
};

__device__ __forceinline__ void sync_workers() { sync_threads(1 + GROUPS, WORKERS); }

// By all workers; `largest` are zeros before, and bits of each matrix's largest number behind; and
// `growths` each matrix's largest sum of a column, and sums of all, where that is asked for.
template <class... M>
__device__ __forceinline__ void stage_matrices(const Parameters& p, unsigned char* matrices,
                                               u32* largest, u32* growths) {
    u32* sums = growths + GROWTHS;
    Staged<M...> staged(p);
    if (SCALED) {
        staged.find_largest(largest);
        sync_workers();
    }
    staged.write(matrices, largest, sums);
    fence_shared_writes();
    sync_workers();
    if constexpr (BEHIND > 0) {
        if (threadIdx.x < sizeof...(M) * SUMS_OF_COLUMNS)
            atomicMax(&growths[threadIdx.x / SUMS_OF_COLUMNS], sums[threadIdx.x]);
        sync_workers();
    }
}

// The power of two, as exponent, that a run's matrices were multiplied by.
template <class R>
__device__ __forceinline__ int shift_of_matrices(const u32* largest) {
    if (!SCALED) return 0;
    return shift_to(R::First::EXPONENT, largest[0]) +
           (R::SECOND ? shift_to(R::Second::EXPONENT, largest[1]) : 0);
}
