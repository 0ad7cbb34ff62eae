// How lines of a stage are filled. Lanes with a point each read as many sectors as there are lanes:
// where partners meet few rows, and 250 blocks all of 2000 points of 9 features, that took 9 us. There
// lanes go along memory, if points lie side by side.
//
// STAGE points at a time, PARTNERS, and THREADS of a block are defined ahead of this.
#pragma once

#include "pairwise/scalars.cuh"

// Numbers OFFSET to OFFSET + WIDTH of the lines of `count` points, of which the first has its own at
// `from`. What number each thread has next, and of which point, is known but for a wrap: reads and
// stores take no arithmetic. Lines past the last point get zeros.
template <int WIDTH, int OFFSET, int LINE, class T, class Input>
__device__ __forceinline__ void fill_side_by_side(T (*lines)[LINE], const Input* from, int count) {
    constexpr int EACH = (STAGE * WIDTH + THREADS - 1) / THREADS;
    int total = count * WIDTH, own = threadIdx.x, c = own % WIDTH;
    T* to = lines[own / WIDTH] + OFFSET + c;
    T numbers[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        numbers[i] = own + i * THREADS < total ? convert<T>(from[own + i * THREADS]) : T(0);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int points = i * THREADS / WIDTH, rest = i * THREADS % WIDTH;
        int wrapped = c >= WIDTH - rest ? LINE - WIDTH : 0;
        bool exists = STAGE % THREADS == 0 || own + i * THREADS < STAGE * WIDTH;
        if (exists) to[points * LINE + rest + wrapped] = numbers[i];
    }
}

// The same of points anywhere, each by one thread; zeros in place of numbers that do not exist.
template <int WIDTH, int OFFSET, int LINE, class T, class Input>
__device__ __forceinline__ void fill_lines(T (*lines)[LINE], const Input* from, const View& view,
                                           int count, int existing = WIDTH) {
    if constexpr (PARTNERS > 1) {
        if (view.column_stride == 1 && view.row_stride == WIDTH && existing == WIDTH) {
            fill_side_by_side<WIDTH, OFFSET>(lines, from, count);
            return;
        }
    }
#pragma unroll 1
    for (int n = threadIdx.x; n < count; n += THREADS) {
        const Input* point = from + n * view.row_stride;
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            bool exists = c < existing;
            lines[n][OFFSET + c] = exists ? convert<T>(point[c * view.column_stride]) : T(0);
        }
    }
}
