// Included before sparse/bitmap/bitmap.cuh for a matrix whose values have fewer bits.
//
// Floors on an H200 for a chunk at density 0.5, in clocks of an SM at 1.72 GHz, of int8 and int4 by
// digits.cuh and of fp8 by halves.cuh:
//   memory    2592 bytes over 4.31 TB/s on 132 SMs: 137; of int4 1600: 85
//   shared    wavefronts: 66 of codes, in three loads of whole words a lane for its eight columns;
//             16 of words and ranks, 13 to make ranks, 20 of the copy, 8 of sums: 123
//   issue     4 a clock: 377 of ranks, decoding and products of int8, 445 of fp8, 383 of int4, and
//             110 of everything else: 122, 139, 123
//   ALU       2 a clock, of logic, shifts and bytes: 205, 267 and 215, and 50: 128, 159, 133
// Measured at 8192 x 28672, where 16-bit values take 80 us here and 71 in u2: 49, 58 and 53 us of
// int8, fp8 and int4. As halves int8 and int4 took 64 and 65; so 2 to 8 vectors take 63 to 66.
//
// The generated source defines, beside what bitmap.cuh asks for, before it includes this file:
//   CODES                  INT8, FP8 or INT4
//   E4M3                   1 where an instruction makes halves of e4m3 (sm_89 and later)
//   IN_DIGITS              1 for integers times a single vector
#pragma once

#include "sparse/quantised/kinds.cuh"
