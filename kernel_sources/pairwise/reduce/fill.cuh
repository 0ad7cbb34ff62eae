// How lines of a stage are filled: lanes one after the other along memory, since lanes with a point
// each read as many sectors as there are lanes, 250 blocks of 2000 points of 9 features in 9 us.
//
// STAGE points at a time and THREADS of a block are defined ahead of this.
#pragma once

#include "pairwise/scalars.cuh"

// Numbers OFFSET to OFFSET + WIDTH of the lines of `count` points, of which the first has its own at
// `from`; zeros in place of those that do not exist. Reads past the last point are of that one, so
// that several are on their way.
template <int WIDTH, int OFFSET, int LINE, class T, class Input>
__device__ __forceinline__ void fill_lines(T (*lines)[LINE], const Input* from, const View& view,
                                           int count, int existing = WIDTH) {
    constexpr int EACH = (STAGE * WIDTH + THREADS - 1) / THREADS, MOST = 64 / sizeof(T);
    constexpr int BATCH = EACH < MOST ? EACH : MOST;
    int total = count * WIDTH;
#pragma unroll 1
    for (int first = threadIdx.x; first < total; first += BATCH * THREADS) {
        T numbers[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            int i = min(first + j * THREADS, total - 1), n = i / WIDTH, c = i % WIDTH;
            i64 place = n * view.row_stride + min(c, existing - 1) * view.column_stride;
            numbers[j] = c < existing ? convert<T>(from[place]) : T(0);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            int i = first + j * THREADS;
            if (i < total) lines[i / WIDTH][OFFSET + i % WIDTH] = numbers[j];
        }
    }
}
