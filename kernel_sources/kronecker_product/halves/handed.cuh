// What a run of float16 hands to the next beside its results: of each column the exponent by which
// these are to be multiplied.
#pragma once

#include "kronecker_product/halves/run.cuh"

// P: the Parameters of a kernel whose runs hand exponents on, which others lack.

// To the next run, by the threads that clear these columns.
template <class R, class P>
__device__ __forceinline__ void hand_on(const Scales& scales, const P& p, const Tile& at,
                                        const Slab& slab) {
    const RunFixed& run = p.runs[R::INDEX];
    i64 first = slab.number % run.target.ring * p.places[R::INDEX].slab +
                (at.outer * run.inners + at.inner) * run.columns + at.column;
    int restored = exponent_of(scales.restored[R::INDEX]);
    for (int column = threadIdx.x; column < R::COLUMNS; column += THREADS)
        if (column < at.columns)
            p.powers[R::INDEX][first + column] =
                short(restored - exponent_of(__uint_as_float(scales.columns[column])));
}

// The exponents of eight columns of a tile, from `own` on, for feature after feature.
struct Exponents {
    const short* first;
    i64 feature;
    int offset[CHUNK];
    bool is_one, is_run;  // all the same; side by side and aligned

    __device__ __forceinline__ Exponents(const short* powers, const PowerPlace& place,
                                         const Tile& at, i64 slot, int own) {
        first = powers + slot * place.slab + at.outer * place.outer +
                at.inner % place.inners * place.inner;
        feature = place.feature;
        is_one = place.columns == 1;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) offset[i] = int((at.column + own + i) % place.columns);
        is_run = offset[CHUNK - 1] == offset[0] + CHUNK - 1 && feature % CHUNK == 0 &&
                 reinterpret_cast<u64>(first + offset[0]) % 16 == 0;
    }
    __device__ __forceinline__ void of(int number, int (&exponent)[CHUNK]) const {
        const short* from = first + number * feature;
        if (is_one) {
            int one = __ldcg(from);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) exponent[i] = one;
        } else if (is_run) {
            int4 four = __ldcg(reinterpret_cast<const int4*>(from + offset[0]));
            const int words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) exponent[i] = short(words[i / 2] >> i % 2 * 16);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) exponent[i] = __ldcg(from + offset[i]);
        }
    }
};

constexpr int BIAS = 1024;  // of exponents among unsigned numbers; 0 is that of no column

// The largest of each column's exponents: of all columns the same, or of each its own.
template <class R>
__device__ __forceinline__ void find_exponents(Scales& scales, const Exponents& exponents,
                                               int columns, int own) {
    int exponent[CHUNK], most[CHUNK] = {};
    for (int index = threadIdx.x * CHUNK; index < R::INPUTS; index += THREADS * CHUNK) {
        exponents.of(index / R::COLUMNS, exponent);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (own + i < columns) most[i] = max(most[i], exponent[i] + BIAS);
    }
    if (exponents.is_one) {
        u32 found = __reduce_max_sync(~0u, u32(most[0]));
        for (int column = threadIdx.x % 32; column < R::COLUMNS; column += 32)
            atomicMax(&scales.columns[column], found);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) atomicMax(&scales.columns[own + i], u32(most[i]));
    }
}

// Brings a tile to one exponent a column, its largest. What is smaller by more than half precision
// tells apart is lost beside it, as it would be in a sum.
template <class R, class P>
__device__ __forceinline__ void level(Scales& scales, HalfT* tile, const P& p, const Tile& at,
                                      const Slab& slab) {
    static_assert(R::COLUMNS_LAST && THREADS * CHUNK % R::COLUMNS == 0, "as threads keep theirs");
    constexpr int BEFORE = R::INDEX - 1;
    const int own = threadIdx.x * CHUNK % R::COLUMNS;
    const Exponents exponents(p.powers[BEFORE], p.places[BEFORE], at,
                              slab.number % p.runs[R::INDEX].source.ring, own);
    find_exponents<R>(scales, exponents, at.columns, own);
    __syncthreads();
    int exponent[CHUNK], shift[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) shift[i] = BIAS - int(scales.columns[own + i]);
    __syncthreads();
    for (int column = threadIdx.x; column < R::COLUMNS; column += THREADS)
        scales.columns[column] =
            __float_as_uint(power_of_two(BIAS - int(scales.columns[column])));
    for (int index = threadIdx.x * CHUNK; index < R::INPUTS; index += THREADS * CHUNK) {
        exponents.of(index / R::COLUMNS, exponent);
        int least = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) least = min(least, exponent[i] + shift[i]);
        if (least == 0) continue;
        auto x = load_vector<HalfT, CHUNK>(tile + place(index));
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float power = power_of_two(min(exponent[i] + shift[i], 0));
            x.element[i] = convert<HalfT>(convert<float>(x.element[i]) * power);
        }
        store_vector(tile + place(index), x);
    }
}
