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
    i64 first = slab.number % run.out.ring * p.places[R::INDEX].slab +
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

constexpr int BIAS = 1024;  // of exponents among unsigned numbers; 0 is that of zero

__device__ __forceinline__ int exponent_with(HalfT x, int exponent) {
    float size = __uint_as_float(__float_as_uint(convert<float>(x)) & 0x7fffffffu);
    return size > 0 && size < 65536.0f ? exponent_of(size) + exponent + BIAS : 0;
}

// Brings a tile to one exponent a column, that of its largest number.
template <class R, class P>
__device__ __forceinline__ void level(Scales& scales, HalfT* tile, const P& p, const Tile& at,
                                      const Slab& slab) {
    static_assert(R::COLUMNS_LAST && THREADS * CHUNK % R::COLUMNS == 0, "as threads keep theirs");
    constexpr int BEFORE = R::INDEX - 1;
    const int own = threadIdx.x * CHUNK % R::COLUMNS;
    Exponents exponents(p.powers[BEFORE], p.places[BEFORE], at,
                        slab.number % p.runs[R::INDEX].in.ring, own);
    int exponent[CHUNK], most[CHUNK] = {};
    for (int index = threadIdx.x * CHUNK; index < R::INPUTS; index += THREADS * CHUNK) {
        exponents.of(index / R::COLUMNS, exponent);
        auto x = load_vector<HalfT, CHUNK>(tile + place(index));
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (own + i < at.columns)
                most[i] = max(most[i], exponent_with(x.element[i], exponent[i]));
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        if (threadIdx.x * CHUNK < R::INPUTS) atomicMax(&scales.columns[own + i], u32(most[i]));
    __syncthreads();
    int shift[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        int found = int(scales.columns[own + i]);
        shift[i] = found ? max(-126, min(126, 14 + BIAS - found)) : 0;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < R::COLUMNS; column += THREADS) {
        int found = int(scales.columns[column]);
        int own_shift = found ? max(-126, min(126, 14 + BIAS - found)) : 0;
        scales.columns[column] = __float_as_uint(power_of_two(own_shift));
    }
    for (int index = threadIdx.x * CHUNK; index < R::INPUTS; index += THREADS * CHUNK) {
        exponents.of(index / R::COLUMNS, exponent);
        auto x = load_vector<HalfT, CHUNK>(tile + place(index));
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float power = power_of_two(max(-126, exponent[i] + shift[i]));
            x.element[i] = convert<HalfT>(convert<float>(x.element[i]) * power);
        }
        store_vector(tile + place(index), x);
    }
}
