// A formula's value of each pair, (batch, rows, columns), of any number of features.
//
// Floors: each value is stored once, 4 or 8 bytes, at 4.8 TB/s of an H200; a term of K features
// takes 2 K issue slots a pair of 132 SM x 128 lanes x 1.98 GHz, squares of differences, or K,
// products. 16384 x 16384 in float, K = 3: 0.22 and 0.05 ms; K = 64: 0.22 and 1.0 ms.
//
// Facts: class Matrix of kernlib/families/pairwise/formula/kernels/matrix.py.
#pragma once

#include "pairwise/formula/sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, Config::RESIDENT)
formula_matrix(const __grid_constant__ Parameters call) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32 across = call.splits;  // tiles of a row
    int m0 = int(blockIdx.x / across) * TILE, n0 = int(blockIdx.x % across) * TILE;
#pragma unroll 1
    for (i64 l = blockIdx.y; l < call.batch; l += gridDim.y) {
        Tile tile{call, reinterpret_cast<AccT*>(shared), l, m0, n0};
        Formula::of_thread(tile.t, call, l);
        __syncthreads();
        tile.fill_rows();
        AccT scores[SIDE][SIDE];
        tile.compute(scores);
        i64 n = i64(n0) + in_tile(lane(), 0);
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            i64 m = i64(m0) + in_tile(band(), i);
            if (m >= call.rows) continue;
            AccT* to = call.out + (l * call.rows + m) * call.cols + n;
            bool is_whole = n + SIDE <= call.cols &&
                            reinterpret_cast<u64>(to) % (VECTOR * sizeof(AccT)) == 0;
            if (is_whole) {
#pragma unroll
                for (int j = 0; j < SIDE; j += VECTOR) {
                    Vector<AccT, VECTOR> vector;
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) vector.element[e] = scores[i][j + e];
                    store_vector(to + j, vector);
                }
            } else {
#pragma unroll
                for (int j = 0; j < SIDE; ++j) {
                    if (n + j < call.cols) to[j] = scores[i][j];
                }
            }
        }
    }
}
