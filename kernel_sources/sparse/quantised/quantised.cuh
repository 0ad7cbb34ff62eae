// Products of a bitmap matrix whose values have fewer bits, by sparse/bitmap/bitmap.cuh.
//
// Floors on an H200 for a chunk at density 0.5, in clocks of an SM at 1.72 GHz, of int8 and int4 by
// digits.cuh and of fp8 by halves.cuh:
//   memory    2592 bytes over 4.31 TB/s on 132 SMs: 137; of int4 1600: 85
//   shared    wavefronts: 66 of codes, in three loads of whole words a lane for its eight columns;
//             16 of words and ranks, 13 to make ranks, 20 of the copy, 5 of sums: 120
//   issue     4 a clock: 356 of ranks, decoding and products of int8, 433 of fp8, 361 of int4, and
//             104 of everything else: 115, 134, 116
//   ALU       2 a clock, of logic, shifts and bytes: 193, 238 and 203, and 38: 116, 138, 121
// Measured at 8192 x 28672, where 16-bit values take 84 us here and 71 in u2: 46, 54 and 46 us of
// int8, fp8 and int4, of which 8, 10 and 8 do not grow with rows: the launches, the first chunks,
// the last sums. 2 to 8 vectors, of which int8 and int4 go by way of halves, take 57 to 60.
// Shifts to the right as the upper half of a product took 1 to 2 us more, digits of float16 x
// without float64 as well; without conversions of e4m3 fp8 would take 4.6 us less.
//
#pragma once

#include "sparse/quantised/digits.cuh"
#include "sparse/quantised/halves.cuh"

// A type of two.
template <bool IS_FIRST, class First, class Second>
struct Selected {
    using Type = First;
};
template <class First, class Second>
struct Selected<false, First, Second> {
    using Type = Second;
};
template <bool IS_FIRST, class First, class Second>
using Select = typename Selected<IS_FIRST, First, Second>::Type;
