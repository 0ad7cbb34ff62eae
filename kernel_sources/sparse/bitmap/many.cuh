// out[n, r] = Finish(sum_c w[r, c] x[n, c]) of a bitmap matrix and many vectors n, by wgmma: a warp
// decodes its chunks into registers, as left operands, and x is the right operand in shared memory.
//
// A CTA has 64 * WARPGROUPS rows and COLUMNS vectors, and walks along the columns of the matrix. A
// consumer warp has 16 rows, whose chunks come through a ring of its own; a producer warp brings x,
// packed by sparse/pack.cuh in the order of bitmap/fragments.cuh. While the matrix unit multiplies
// 64 columns, warps decode the next 64. The last tiles, which would leave multiprocessors idle, are
// cut along the columns into `parts`, whose sums meet in sum.cuh, or in the shared memory of PAIRS.
//
// Floors for 16 rows and 256 columns at density 0.5, in clocks of an SM, N being COLUMNS:
//   matrix unit  2 N
//   shared       183 wavefronts of values, 32 of words and ranks, 13 to make ranks, 36 of the copy;
//                N for wgmma to read x, and N / WARPGROUPS to bring it
//   issue        570 of the decoding over 4 a clock: 143
// So shared memory limits it: 87 us for 8192 x 28672 by 64 vectors, and 69 us for 12288 x 4096 by
// 512, for which the matrix unit alone would take 54. On an H200 they take 102 and 88 us, and the
// first one by 16 and 32 vectors 84 and 89; dense matrices by cuBLAS 120 and 68, 114 and 116. The
// second one takes 62 us without decoding and 49 without products: a warp issues one behind the
// other.
//
// Facts and struct Fixed: class BitmapMany of kernlib/families/sparse/kernels/bitmap/many.py; and
// the function multiply, a wgmma of 64 rows by COLUMNS whose left operand is in registers.
#pragma once

#include "sparse/bitmap/many_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_bitmap_many(const __grid_constant__ Parameters p) {
    multiply_tile(p);
}
