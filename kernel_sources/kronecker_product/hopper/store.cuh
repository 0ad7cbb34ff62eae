// Results of a tile to device memory, from a warp's accumulators: in fp32 four neighbours at
// once, or two; 2-byte ones by way of the panel, 16 bytes a lane.
#pragma once

#include "kronecker_product/hopper/bounds.cuh"
#include "kronecker_product/hopper/multiply.cuh"

// What a thread's sums are of: lines line() and eight behind, and of each eight columns, or with
// QUADS of each 16, neighbours from column() on.
template <class R>
struct Place {
    int line, column;
    __device__ __forceinline__ Place() {
        const int thread = own_thread() % GROUP_THREADS, lane = thread % 32;
        line = thread / 32 * 16 + lane / 4;
        column = lane % 4 * (R::QUADS ? 4 : 2);
    }
    // A sum's, from column() on.
    __device__ __forceinline__ static constexpr int column_of(int i) {
        const int eight = i / 4;
        return (R::QUADS ? eight / 2 * 16 + eight % 2 * 2 : eight * 8) + i % 2;
    }
};

// Of an output feature of a row.
template <int COUNT>
struct Summands {
    template <class P, class F>
    __device__ __forceinline__ static float finished(const P& p, const F& finish, float value,
                                                     i64 row, i64 feature) {
        float given[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const Layout& side = p.sides_of_summands[k];
            i64 at = row * side.column_stride + feature * side.feature_stride;
            given[k] = finish.reads(k) ? convert<float>(p.summands[k][at]) : 0.0f;
        }
        return finish(value, feature, given);
    }
};
template <>
struct Summands<0> {
    template <class P, class F>
    __device__ __forceinline__ static float finished(const P&, const F& finish, float value, i64,
                                                     i64 feature) {
        return finish(value, feature);
    }
};

// What undoes the scaling of a tile: two powers for all of it, or for each of its columns.
template <class R>
struct Undo {
    // Those that are scaled as a tile, and those of which all launches know the largest number.
    static constexpr bool BY_COLUMNS =
        R::INSIDE && SCALED && sizeof(typename R::SourceT) == 4;
    static constexpr bool BY_LARGEST = R::INSIDE && (LIFTED || SETTLED);
    int exponent;
    const Vector<float, 2>* of_columns;
    const u32* largest = nullptr;  // of the first column
    int last = 0;                  // that exists

    // Beside what undoes the scaling of the matrices, what float16 is multiplied by that is handed
    // on, or was.
    __device__ __forceinline__ void bound(const Parameters& p, const Origin& origin, int own,
                                          const u32* growths) {
        exponent += common_shift<R>(p, own, growths);
        if constexpr (LIFTED || SETTLED) {
            largest = largest_of_x(p) + origin.row;
            last = int(min(columns_left<R>(p.runs[R::INDEX], origin.row, 0), i64(R::COLUMNS))) - 1;
            if (!R::INSIDE) exponent += shift_of_x(*largest);
        }
    }
    __device__ __forceinline__ Vector<float, 2> of(int column, const Vector<float, 2>& all) const {
        if (BY_COLUMNS) return of_columns[column];
        if (BY_LARGEST) return powers_of_two(exponent + shift_of_x(largest[min(column, last)]));
        return all;
    }
    // All sums, the first of which is of a column.
    __device__ __forceinline__ void apply(Sums<R>& sums, int column) const {
        if (!SCALED) return;
        const Vector<float, 2> all = powers_of_two(exponent);
#pragma unroll
        for (int i = 0; i < Sums<R>::COUNT; i += 4) {
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                const Vector<float, 2> own = of(column + Place<R>::column_of(i + next), all);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& sum = sums[i + 2 * half + next];
                    sum = sum * own.element[0] * own.element[1];
                }
            }
        }
    }
};

// Undoes the scaling, and applies the epilogue.
template <class R>
__device__ __forceinline__ void finish_sums(Sums<R>& sums, const Parameters& p,
                                            const Finish& finish, const Origin& origin,
                                            const Undo<R>& undo) {
    const Place<R> own;
    undo.apply(sums, own.column);
    if constexpr (EPILOGUE && R::ENDS) {
        const i64 first = origin.feature + feature_of<R>(own.line, own.column);
#pragma unroll
        for (int i = 0; i < Sums<R>::COUNT; ++i) {
            const int column = Place<R>::column_of(i);
            const i64 row = origin.row + (R::INSIDE ? own.column + column : 0);
            if (R::INSIDE && row >= p.runs[R::INDEX].columns) continue;
            const i64 feature = first + feature_of<R>(i % 4 / 2 * 8, column);
            sums[i] = Summands<SUMMANDS>::finished(p, finish, sums[i], row, feature);
        }
    }
}

// `out` is the tile's first element, of so many columns that exist.
template <class R, bool ALIGNED>
__device__ __forceinline__ void store_numbers(const Sums<R>& sums, typename R::TargetT* out,
                                              const Strides<R, ALIGNED>& strides, i64 columns) {
    using TargetT = typename R::TargetT;
    constexpr int RUN = R::QUADS ? 4 : 2;  // neighbours
    const Place<R> own;
    out += strides.element(own.line, own.column);
    columns -= own.column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2 * R::COLUMNS / 4; i += RUN / 2 * 4) {
            const int first = i + 2 * half, column = Place<R>::column_of(i);
            Vector<float, RUN> found;
#pragma unroll
            for (int e = 0; e < RUN; ++e) found.element[e] = sums[first + e / 2 * 4 + e % 2];
            TargetT* to = out + strides.element(half * 8, column);
            if (sizeof(TargetT) == 4 && ALIGNED && (!R::INSIDE || columns >= column + RUN)) {
                store_vector(reinterpret_cast<float*>(to), found);
            } else {
#pragma unroll
                for (int e = 0; e < RUN; ++e)
                    if (columns > column + e)
                        to[e * strides.next()] = convert<TargetT>(found.element[e]);
            }
        }
}

// A warp's 16 lines to the panel, and from there.
template <class R>
__device__ __forceinline__ void store_by_panel(const Sums<R>& sums, unsigned char* panel,
                                               typename R::TargetT* out,
                                               const Strides<R, true>& strides, i64 columns) {
    using TargetT = typename R::TargetT;
    const int thread = own_thread() % GROUP_THREADS, lane = thread % 32, lines = thread / 32 * 16;
    const u32 to = shared_address(panel) +
                   place(lines + lane % 8 + lane / 8 % 2 * 8, lane / 16 * 8, LINES);
#pragma unroll
    for (int i = 0; i < R::COLUMNS / 16; ++i) {
        u32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            word[k] = pack<HalfT>(sums[8 * i + 2 * k], sums[8 * i + 2 * k + 1]);
        // Of the swizzled place of a line's 16 bytes a step changes other bits than a lane.
        store_matrices<false>((to + i / 4 * LINES * LINE_BYTES) ^ i % 4 << 5, word[0], word[1],
                              word[2], word[3]);
    }
    __syncwarp();
    constexpr int CHUNK = 8, STEP = 32 * CHUNK / R::COLUMNS;  // lines
    const int line = lines + lane * CHUNK / R::COLUMNS, column = lane * CHUNK % R::COLUMNS;
    out += strides.element(line, column);
    columns -= column;
#pragma unroll
    for (int i = 0; i < 16 / STEP; ++i) {
        TargetT* at = out + strides.element(i * STEP, 0);
        const unsigned char* from = panel + place(line + i * STEP, column, LINES);
        if (columns >= CHUNK) {
            *reinterpret_cast<int4*>(at) = *reinterpret_cast<const int4*>(from);
        } else {
            for (int e = 0; e < columns; ++e)
                at[e * strides.next()] = reinterpret_cast<const TargetT*>(from)[e];
        }
    }
}

constexpr int OF_ZEROS = 1 - BIAS;  // less than any other exponent

// Scales a warp's sums for the next run, and hands their exponent on.
template <class R>
__device__ __forceinline__ void hand_on(Sums<R>& sums, const Parameters& p, const Origin& origin,
                                        const Undo<R>& undo) {
    bool are_zeros;
    const int shift = scale_sums<R>(sums, are_zeros);
    const Place<R> own;
    if (threadIdx.x % 32 == 0)
        *handed<R>(p, origin.target, u32(origin.feature) + feature_of<R>(own.line, 0)) =
            short(are_zeros ? OF_ZEROS : undo.exponent - shift);
}

template <class R, bool ALIGNED>
__device__ __forceinline__ void store_sums(const Sums<R>& sums, const Parameters& p,
                                           unsigned char* panel, const Origin& origin) {
    using TargetT = typename R::TargetT;
    const Strides<R, ALIGNED> strides(p.runs[R::INDEX].target);
    TargetT* out = static_cast<TargetT*>(p.targets[R::INDEX]) +
                   strides.first(origin.target, origin.feature);
    const i64 columns = columns_left<R>(p.runs[R::INDEX], origin.target, 0);
    if constexpr (ALIGNED && sizeof(TargetT) == 2) {
        sync_group();  // the panel has been read
        store_by_panel<R>(sums, panel, out, strides, columns);
    } else {
        store_numbers<R>(sums, out, strides, columns);
    }
}

template <class R>
__device__ __forceinline__ void store_tile(Sums<R>& sums, const Parameters& p, const Finish& finish,
                                           unsigned char* panel, const Origin& origin,
                                           const Undo<R>& undo) {
    if constexpr (R::HANDS) hand_on<R>(sums, p, origin, undo);
    else finish_sums<R>(sums, p, finish, origin, undo);
    if (!R::ENDS || p.runs[R::INDEX].aligned_out) store_sums<R, true>(sums, p, panel, origin);
    else store_sums<R, false>(sums, p, panel, origin);
}
