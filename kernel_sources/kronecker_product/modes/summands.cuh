// Tensors of the result's shape that the epilogue adds a multiple of, read beside the results that
// a thread has, before it writes one of these. A summand may be the result itself: no load would be
// moved up past a store, and each would take its whole latency.
#pragma once

#include "kronecker_product/modes/parameters.cuh"

// What a slice of a mode's results is of: a column of the tile, and what stands before and behind
// the mode's own index.
template <class R, class M>
struct Slice {
    static constexpr int BEHIND = R::COLUMNS_LAST ? M::R / R::COLUMNS : M::R;
    static constexpr int BEFORE = R::COLUMNS_LAST ? M::L : M::L / R::COLUMNS;
    static_assert(BEHIND > 0, "columns are a part of what is behind");
    int column, before, behind;

    __device__ __forceinline__ explicit Slice(int slice) {
        int left = slice / M::R, right = slice % M::R;
        column = R::COLUMNS_LAST ? right % R::COLUMNS : left / BEFORE;
        before = R::COLUMNS_LAST ? left : left % BEFORE;
        behind = R::COLUMNS_LAST ? right / R::COLUMNS : right;
    }
    __device__ __forceinline__ int feature(int q) const {
        return (before * M::Q + q) * BEHIND + behind;
    }
};

// Where the elements of summands lie beside a slice of results, from its column q on: null for one
// that does not count or is not there. Parameters and Finish are types of templates, as they have
// no members for summands where there are none.
template <int COUNT>
struct Beside {
    const InputT* from[COUNT];
    i64 step[COUNT];  // from one column of the mode to the next

    template <class P, class F, class S>
    __device__ __forceinline__ Beside(const P& p, const F& finish, const Tile& at, const S& slice,
                                      int q, bool exists) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const Layout& side = p.sides_of_summands[k];
            step[k] = S::BEHIND * side.feature_stride;
            from[k] = nullptr;
            if (exists && finish.reads(k))
                from[k] = p.summands[k] + at.begin(side, at.slab) +
                          slice.column * side.column_stride +
                          slice.feature(q) * side.feature_stride;
        }
    }
};
template <>
struct Beside<0> {
    template <class P, class F, class S>
    __device__ __forceinline__ Beside(const P&, const F&, const Tile&, const S&, int, bool) {}
};

// Each summand's element beside one result, or 0.
template <int COUNT>
struct Given {
    AccT value[COUNT];

    __device__ __forceinline__ void read(const Beside<COUNT>& beside, int columns_on, bool exists) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            value[k] = 0;
            if (exists && beside.from[k])
                value[k] = convert<AccT>(beside.from[k][columns_on * beside.step[k]]);
        }
    }
    template <class F>
    __device__ __forceinline__ AccT finished(const F& finish, AccT v, i64 feature) const {
        return finish(v, feature, value);
    }
};
template <>
struct Given<0> {
    __device__ __forceinline__ void read(const Beside<0>&, int, bool) {}
    template <class F>
    __device__ __forceinline__ AccT finished(const F& finish, AccT v, i64 feature) const {
        return finish(v, feature);
    }
};
