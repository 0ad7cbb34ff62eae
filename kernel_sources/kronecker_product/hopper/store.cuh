// Results of a tile to device memory, from a warp's accumulators: in fp32 pairs of neighbours,
// whole sectors by four lanes; 2-byte ones by way of the panel, 16 bytes a lane.
#pragma once

#include "kronecker_product/hopper/multiply.cuh"

// What a thread's sums are of: lines line() and eight behind, columns column() and one on, and the
// same of each eight columns.
struct Place {
    int line, column;
    __device__ __forceinline__ Place() {
        const int thread = own_thread() % GROUP_THREADS, lane = thread % 32;
        line = thread / 32 * 16 + lane / 4;
        column = lane % 4 * 2;
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
            const Side& side = p.sides_of_summands[k];
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
    static constexpr bool BY_COLUMNS =
        R::INSIDE && SCALED && sizeof(typename R::SourceT) == 4;
    int exponent;
    const Vector<float, 2>* of_columns;

    // All sums, the first of which is of a column.
    __device__ __forceinline__ void apply(Sums<R>& sums, int column) const {
        if (!SCALED) return;
        const Vector<float, 2> own = powers_of_two(exponent);
#pragma unroll
        for (int i = 0; i < Sums<R>::COUNT; ++i) {
            const Vector<float, 2> powers =
                BY_COLUMNS ? of_columns[column + i / 4 * 8 + i % 2] : own;
            sums[i] = sums[i] * powers.element[0] * powers.element[1];
        }
    }
};

// Undoes the scaling, and applies the epilogue.
template <class R>
__device__ __forceinline__ void finish_sums(Sums<R>& sums, const Parameters& p,
                                            const Finish& finish, const Origin& origin,
                                            const Undo<R>& undo) {
    const Place own;
    undo.apply(sums, own.column);
    if constexpr (EPILOGUE && R::ENDS) {
        const i64 first = origin.feature + feature_of<R>(own.line, own.column);
#pragma unroll
        for (int i = 0; i < Sums<R>::COUNT; ++i) {
            const int column = i / 4 * 8 + i % 2;
            const i64 row = origin.row + (R::INSIDE ? own.column + column : 0);
            if (R::INSIDE && row >= p.runs[R::INDEX].columns) continue;
            const i64 feature = first + feature_of<R>(i % 4 / 2 * 8, column);
            sums[i] = Summands<SUMMANDS>::finished(p, finish, sums[i], row, feature);
        }
    }
}

// `out` is the tile's first element.
template <class R>
__device__ __forceinline__ void store_numbers(const Sums<R>& sums, typename R::TargetT* out,
                                              const Strides& strides, i64 columns,
                                              bool is_aligned) {
    using TargetT = typename R::TargetT;
    const Place own;
    out += strides.element<R>(own.line, own.column);
    columns -= own.column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < R::COLUMNS / 8; ++i) {
            TargetT* to = out + strides.element<R>(half * 8, i * 8);
            const float one = sums[4 * i + 2 * half], other = sums[4 * i + 2 * half + 1];
            if (sizeof(TargetT) == 4 && is_aligned && columns > i * 8 + 1) {
                store_vector(reinterpret_cast<float*>(to), Vector<float, 2>{one, other});
            } else {
                if (columns > i * 8) *to = convert<TargetT>(one);
                if (columns > i * 8 + 1) to[strides.next<R>()] = convert<TargetT>(other);
            }
        }
}

// A warp's 16 lines to the panel, and from there.
template <class R>
__device__ __forceinline__ void store_by_panel(const Sums<R>& sums, unsigned char* panel,
                                               typename R::TargetT* out, const Strides& strides,
                                               i64 columns) {
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
    out += strides.element<R>(line, column);
    columns -= column;
#pragma unroll
    for (int i = 0; i < 16 / STEP; ++i) {
        TargetT* at = out + strides.element<R>(i * STEP, 0);
        const unsigned char* from = panel + place(line + i * STEP, column, LINES);
        if (columns >= CHUNK) {
            *reinterpret_cast<int4*>(at) = *reinterpret_cast<const int4*>(from);
        } else {
            for (int e = 0; e < columns; ++e)
                at[e * strides.next<R>()] = reinterpret_cast<const TargetT*>(from)[e];
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
    const Place own;
    if (threadIdx.x % 32 == 0)
        *handed<R>(p, origin.target, u32(origin.feature) + feature_of<R>(own.line, 0)) =
            short(are_zeros ? OF_ZEROS : undo.exponent - shift);
}

template <class R>
__device__ __forceinline__ void store_tile(Sums<R>& sums, const Parameters& p, const Finish& finish,
                                           unsigned char* panel, const Origin& origin,
                                           const Undo<R>& undo) {
    const RunFixed& run = p.runs[R::INDEX];
    if constexpr (R::HANDS) hand_on<R>(sums, p, origin, undo);
    else finish_sums<R>(sums, p, finish, origin, undo);
    const bool is_aligned = !R::ENDS || run.aligned_out;
    const Strides strides = Strides::of<R>(run.out, is_aligned);
    auto out = static_cast<typename R::TargetT*>(p.targets[R::INDEX]) +
               strides.first(origin.target, origin.feature);
    const i64 columns = columns_left<R>(run, origin.target, 0);
    if constexpr (sizeof(typename R::TargetT) == 2) {
        if (is_aligned) {
            sync_group();  // the panel has been read
            store_by_panel<R>(sums, panel, out, strides, columns);
            return;
        }
    }
    store_numbers<R>(sums, out, strides, columns, is_aligned);
}
