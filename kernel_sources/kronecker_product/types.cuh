// What the generated text in front of a kernel's header names: parts of struct Fixed, and templates
// that the header defines.
#pragma once

#include "common/types.cuh"

// Elements from one batch, outer index, inner one, column and feature to the next, and from one
// slab to the next: of a batch, or of a ring's slabs, where `ring` is their number and not 0.
struct Layout {
    i64 batch_stride, outer_stride, inner_stride, column_stride, feature_stride;
    i64 slab_stride, ring;
};

struct Matrix {
    i64 row_stride, column_stride, batch_stride;
};

// Of halves/slabs.cuh. An element of a run's tile is of that column of the run before whose number
// is the sum of these strides: from one outer index, feature and inner index to the next, of the
// inner index modulo `inners` and of the column modulo `columns`. A slab of a ring has `slab` of
// them.
struct PowerPlace {
    i64 outer, feature, inner, inners, columns, slab;
};

// Numbers that the compiler knows, by their index.
template <int... N>
struct Sizes {
    __device__ __forceinline__ static constexpr int at(int index) {
        constexpr int ALL[] = {N...};
        return ALL[index];
    }
};

template <int... N>
struct Mode;  // of modes/tile.cuh or halves/tile.cuh
template <class... M>
struct List;  // of Modes, in modes/run.cuh or halves/run.cuh
template <int... N>
struct Merged;  // hopper/matrices.cuh
template <class... R>
struct Runs;  // modes/tickets.cuh or hopper/tile.cuh
template <class... M>
struct MatrixList;  // hopper/tile.cuh
template <class Forward, class Backward, int DOWN, int ACROSS, int AT>
struct Stage;  // gradients/gradients.cuh
template <class... S>
struct StagesOf;

__device__ constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }
__device__ constexpr bool is_power(int x) { return (x & (x - 1)) == 0; }

template <bool FIRST, class A, class B>
struct Chosen {
    using Type = A;
};
template <class A, class B>
struct Chosen<false, A, B> {
    using Type = B;
};
