// What points/points.cuh computes, on the lanes, by differences: behind its gate, and where tensor
// cores do not.
//
// A block has TILE rows and walks over its lines, TILE at a time: threads first have 4 x 4 pairs
// each and leave what these are worth in shared memory, then 4 rows by every 16th feature.
//
// Floors on an H200 (3.345e13 issue slots a second), for a pair: 4.6 slots a feature, and 20.
//   20000 x 20000, K = 20   1.3 ms; K = 64   3.8 ms
//
// Facts: class Direct of kernlib/families/pairwise/kernels/points.py.
#pragma once

#include "pairwise/points/sums.cuh"

constexpr int DEPTH = Config::DEPTH;         // features as padded to 16
constexpr int THREADS = 256, TILE = 64, EACH = 4, ACROSS = TILE / EACH;
constexpr int LINE = TILE + 4;              // floats from feature to feature: other banks
constexpr int FEATURES = DEPTH / ACROSS;    // of a thread
constexpr int CHAIN = 8;                    // features whose terms are summed in one go
constexpr int SUMMED = WANTS_POINTS ? WIDTH : DEPTH;  // features that a sum may have
constexpr int POINT_FLOATS = DEPTH * LINE;
static_assert(DEPTH % ACROSS == 0 && SUMMED % CHAIN == 0, "whole runs of features");

struct Shared {
    float *rows, *lines, *worth, *row_numbers, *line_numbers;
    __device__ __forceinline__ explicit Shared(float* memory)
        : rows(memory), lines(rows + POINT_FLOATS), worth(lines + POINT_FLOATS),
          row_numbers(worth + TILE * LINE), line_numbers(row_numbers + TILE * NUMBERS) {}
};
static_assert(Config::DYNAMIC_BYTES == 4 * (2 * POINT_FLOATS + TILE * LINE + 2 * TILE * NUMBERS),
              "as the host counts it");

// Features of TILE points from `first` on, zeros where there is nothing.
__device__ __forceinline__ void fill(float* to, const InputT* from, const View& view, i64 l,
                                     int first, i64 count, int features) {
    from += l * view.batch_stride;
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        int k = i % DEPTH, point = i / DEPTH;
        bool exists = k < features && first + point < count;
        const InputT* at = from + i64(first + point) * view.row_stride + k * view.column_stride;
        to[k * LINE + point] = exists ? convert<float>(*at) : 0.0f;
    }
}

// The sums of 4 x 4 pairs of a thread, whose first points are `rows` and `lines` in shared memory.
// Behind a feature that outgrows the others each addition may lose half an ulp of the sum, which
// exponents are multiples of: emulated, of 64 features gradients were off by 5.6e-6 of their
// absolute terms in one chain, and are by 1.1e-6 in chains that hand on what is lost. That is 5
// slots a chain.
__device__ __forceinline__ void sum_pairs(float (&sums)[EACH][EACH], const float* rows,
                                          const float* lines) {
    float part[EACH][EACH] = {};
#pragma unroll 1
    for (int first = 0; first < SUMMED; first += CHAIN) {
#pragma unroll
        for (int k = first; k < first + CHAIN; ++k) {
            auto x = load_vector<float, EACH>(rows + k * LINE);
            auto y = load_vector<float, EACH>(lines + k * LINE);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    float v = y.element[j] - x.element[i];
                    part[i][j] = DIFFERENCE ? fmaf(v, v, part[i][j])
                                            : fmaf(x.element[i], y.element[j], part[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) sums[i][j] = add_chain(sums[i][j], part[i][j]);
        }
    }
}

// What a thread's sums of rows on the lanes are: those of EACH rows.
using Own = float[EACH][OWN > 0 ? OWN : 1];

// Leaves what the pairs of a tile are worth in shared memory.
__device__ __forceinline__ void weigh(const Shared& s, Own& own, const Functions& functions,
                                      int row, int line, int lines) {
    float sums[EACH][EACH] = {};
    sum_pairs(sums, s.rows + row, s.lines + line);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const float* given = s.line_numbers + (line + j) * NUMBERS;
        Vector<float, EACH> x;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float w = worth(s.row_numbers + (row + i) * NUMBERS, given);
            x.element[i] = line + j < lines ? functions.add(own[i], sums[i][j], w, given) : 0.0f;
        }
        if (WANTS_POINTS) store_vector(s.worth + (line + j) * LINE + row, x);
    }
}

// Adds the terms of a tile's lines to the sums of EACH rows from `row` on and features `first`,
// `first` + ACROSS ...
__device__ __forceinline__ void add_terms(float (&totals)[FEATURES][EACH], const Shared& s, int row,
                                          int first) {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) {
        int k = first + f * ACROSS;
        auto x = load_vector<float, EACH>(s.rows + k * LINE + row);
        float part[EACH] = {};
#pragma unroll 4
        for (int n = 0; n < TILE; n += EACH) {
            auto y = load_vector<float, EACH>(s.lines + k * LINE + n);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                auto w = load_vector<float, EACH>(s.worth + (n + j) * LINE + row);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    float v = DIFFERENCE ? x.element[i] - y.element[j] : y.element[j];
                    part[i] = fmaf(w.element[i], v, part[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) totals[f][i] += part[i];
    }
}

// Writes or adds what a span has summed.
__device__ __forceinline__ void store(const float (&totals)[FEATURES][EACH], Own& own,
                                      const Functions& functions, const PointsLaunch& p,
                                      const Share& share, bool first) {
    int column = threadIdx.x % ACROSS, row = threadIdx.x / ACROSS * EACH, m0 = share.m0;
    asm volatile("" : "+r"(m0));         // no address is known ahead, in registers
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
#pragma unroll
            for (int step = 1; step < ACROSS; step *= 2)
                own[i][c] += __shfl_xor_sync(~0u, own[i][c], step);
        }
        int m = m0 + row + i;
        if (column == 0 && m < p.m) put_own(p, share, m, own[i], functions, first);
    }
    if (!WANTS_POINTS) return;
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) {
        int k = threadIdx.x / ACROSS + f * ACROSS;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int m = m0 + column * EACH + i;
            if (k < p.k && m < p.m) put_point(p, share, m, k, totals[f][i], functions, first);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_points_direct(const __grid_constant__ PointsLaunch p) {
    extern __shared__ __align__(16) unsigned char shared[];
    if (Config::GATED && !p.gate->closed) return;  // a gate that is not closed leaves nothing to do
    Shared s(reinterpret_cast<float*>(shared));
    Share share(p, TILE);
    Functions functions(Hyperparameters(p, share.l));
    int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    float totals[FEATURES][EACH] = {};
    Own own = {};
    fill(s.rows, p.a, p.a_view, share.l, share.m0, p.m, p.k);
    if (threadIdx.x < TILE) {
        float numbers[NUMBERS];
        read_row(numbers, p, share.l, share.m0 + threadIdx.x);
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) s.row_numbers[threadIdx.x * NUMBERS + i] = numbers[i];
    }
    int tiles = 0;
    bool first = true;
#pragma unroll 1
    for (int n0 = share.first; n0 < share.last; n0 += TILE) {
        __syncthreads();  // nobody reads the lines of the tile before
        fill(s.lines, p.b, p.b_view, share.l, n0, p.n, p.k);
        if (threadIdx.x < TILE) {
            float numbers[NUMBERS];
            read_line(numbers, p, share.l, n0 + threadIdx.x);
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i)
                s.line_numbers[threadIdx.x * NUMBERS + i] = numbers[i];
        }
        __syncthreads();
        int lines = min(share.last - n0, TILE);
        weigh(s, own, functions, down * EACH, across * EACH, lines);
        if (WANTS_POINTS) {
            __syncthreads();
            add_terms(totals, s, across * EACH, down);
        }
        if (++tiles == SPAN || n0 + TILE >= share.last) {
            store(totals, own, functions, p, share, first);
#pragma unroll
            for (int f = 0; f < FEATURES; ++f) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) totals[f][i] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int c = 0; c < OWN; ++c) own[i][c] = 0.0f;
            }
            tiles = 0;
            first = false;
        }
    }
}
