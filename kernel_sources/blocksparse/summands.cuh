// Tensors of the result's shape that the epilogue adds a multiple of, read beside the results that
// a thread has, before it writes one of these: a summand may be the result itself.
#pragma once

#include "blocksparse/side.cuh"
#include "common/parameters.cuh"

template <int COUNT>
struct SummandPointers {
    const InputT* summands[COUNT];
};
template <>
struct SummandPointers<0> {};

// Each summand at the first element of a warp's results; null for one that does not count.
// Parameters and Finish are types of templates, as they have no members for summands where there
// are none.
template <int COUNT>
struct Beside {
    const InputT* from[COUNT];
    i64 line[COUNT], column[COUNT];

    template <class P, class F>
    __device__ __forceinline__ Beside(const P& p, const F& finish, i64 batch, i64 panel, i64 line_,
                                      i64 column_) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const Side& side = p.sides_of_summands[k];
            from[k] = nullptr;
            if (finish.reads(k)) from[k] = p.summands[k] + side.at(batch, panel, line_, column_);
            line[k] = side.line;
            column[k] = side.column;
        }
    }
};
template <>
struct Beside<0> {
    template <class P, class F>
    __device__ __forceinline__ Beside(const P&, const F&, i64, i64, i64, i64) {}
};

// Each summand's element beside one result, or 0.
template <int COUNT>
struct Given {
    AccT value[COUNT];

    __device__ __forceinline__ void read(const Beside<COUNT>& beside, int line, int column) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            value[k] = 0;
            if (beside.from[k])
                value[k] = convert<AccT>(
                    beside.from[k][line * beside.line[k] + column * beside.column[k]]);
        }
    }
    template <class F>
    __device__ __forceinline__ AccT finished(const F& finish, AccT v, i64 feature) const {
        return finish(v, feature, value);
    }
};
template <>
struct Given<0> {
    __device__ __forceinline__ void read(const Beside<0>&, int, int) {}
    template <class F>
    __device__ __forceinline__ AccT finished(const F& finish, AccT v, i64 feature) const {
        return finish(v, feature);
    }
};
