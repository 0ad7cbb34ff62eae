// How partners fill the lines of a stage, which few rows meet: lanes go along memory, if points lie
// side by side. Lanes with a point each read as many sectors as there are lanes: 250 blocks that
// read 2000 points of 9 features each took 9 us for that.
#pragma once

#include "pairwise/reduce/config.cuh"
#include "pairwise/view.cuh"

// Where WIDTH numbers of each point are: those of point n0 of batch entry l, and how far apart, and
// how many of them exist.
template <class Input>
struct Source {
    const Input* from;
    const View& view;
    int existing;

    __device__ __forceinline__ Source(const Input* data, const View& view, i64 l, i64 n0,
                                      int existing)
        : from(data + l * view.batch_stride + n0 * view.row_stride), view(view),
          existing(existing) {}

    template <int WIDTH>
    __device__ __forceinline__ bool is_side_by_side() const {
        if (WIDTH == 0) return true;
        return view.column_stride == 1 && view.row_stride == WIDTH && existing == WIDTH;
    }
};

// Numbers of points that lie side by side, on their way to places OFFSET to OFFSET + WIDTH of
// lines. Which number each thread has next, and of which point, is known but for a wrap: neither
// takes arithmetic. Lines past the last point get zeros.
template <int WIDTH, int OFFSET, class T>
struct Carried {
    static constexpr int EACH = (STAGE * WIDTH + THREADS - 1) / THREADS;
    T numbers[EACH > 0 ? EACH : 1];

    template <class Input>
    __device__ __forceinline__ void load(const Source<Input>& source, int count) {
        const Input* own = source.from + threadIdx.x;
        int left = count * WIDTH - int(threadIdx.x);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            numbers[i] = i * THREADS < left ? convert<T>(own[i * THREADS]) : T(0);
        }
    }

    template <int LINE>
    __device__ __forceinline__ void store(T (*lines)[LINE]) const {
        if constexpr (WIDTH > 0) {
            int c = threadIdx.x % WIDTH;
            T* own = lines[threadIdx.x / WIDTH] + OFFSET + c;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                int points = i * THREADS / WIDTH, rest = i * THREADS % WIDTH;
                bool exists = STAGE % THREADS == 0 || i * THREADS + threadIdx.x < STAGE * WIDTH;
                int wrapped = c >= WIDTH - rest ? LINE - WIDTH : 0;
                if (exists) own[points * LINE + rest + wrapped] = numbers[i];
            }
        }
    }
};
