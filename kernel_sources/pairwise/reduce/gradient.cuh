// First gradients of products and sums with a kernel matrix, for few features: distance, value and
// slope of each pair are computed once, and of the matrix nothing is stored.
//
// What an entry (m, n) is worth is w = sum_c g[m,c] v[n,c]. A launch walks over n for rows in
// registers, as reduce/small.cuh does, and sums for each row, and for the hyperparameters:
//   Role::first    rows of a, lines of b: sum_n w dK/da[m], and sum_mn w dK/dtheta
//   Role::second   rows of b, lines of a: sum_m w dK/db[n], and sum_m K g[m] for v
//   Role::both     one x for a and b: all of it in one pass, of w + its transpose
//
// Floors of the Gaussian of K features, C columns on an H100 (132 SM x 128 lanes x 1.7 GHz, 2.9e13
// slots a second), in issue slots a pair: differences and squares 2 K, scale of the exponent 1, w C
// (both: 2 C), its product with the slope 1, points K, v C, bandwidth 3. One special-function
// operation more, 16 a clock and SM: 2.8 ms for 1e10 pairs.
//   K = 3, both, with v and bandwidth   17 slots   5.9 ms for 1e10 pairs, .24 for 20000 x 20000
//   K = 3, both, points alone           13 slots   4.5 ms, 1.1 for 50000 x 50000
//   K = 3, first, bandwidth alone       12 slots   4.2 ms, 1.0
//   l1, K = 10, both, points alone      55 slots   (difference, sum, sign, comparison, sum each)
//                                                  19 ms, 4.8
//
// Facts, struct Fixed, Finish, and Slopes, by the sum of Finish and by hyperparameters: class
// Backward of kernlib/families/pairwise/kernels/backward.py.
#pragma once

#include "pairwise/gradient/slopes.cuh"
#include "pairwise/reduce/fill.cuh"
#include "pairwise/reduce/math.cuh"
#include "pairwise/reduce/rows.cuh"
#include "pairwise/role.cuh"
#include "pairwise/scalars.cuh"
#include "pairwise/totals.cuh"

using Slope = Config::Slope;                // a struct of gradient/slopes.cuh: of the inner stage
constexpr Role ROLE = Config::ROLE;         // see above
constexpr int COLUMNS = Config::COLUMNS;    // of g and v, 1 to 4
constexpr bool WEIGHTED = Config::WEIGHTED;  // whether there is a v; sums have ones in its place
constexpr bool POINTS = Config::POINTS;     // whether gradients of the rows' points are wanted,
constexpr bool VALUES = Config::VALUES;     // and of v
constexpr int HYPER = Config::HYPER;        // hyperparameters whose gradients are
constexpr bool CURVED = Config::CURVED;     // whether a sum that is NaN makes its slope NaN too
constexpr bool DOT = Config::DOT;           // whether Term is a product
constexpr int SCALARS = Config::SCALARS;

constexpr bool BOTH = ROLE == Role::both;
constexpr bool FIRST = ROLE == Role::first;
constexpr int WEIGHTS = WEIGHTED ? COLUMNS : 0;
// Of a row and of a line behind its point: g, then v, of which a sum has a one for rows that exist.
constexpr int ROW_GIVEN = ROLE == Role::second ? 0 : COLUMNS;
constexpr int ROW_WEIGHTS = FIRST ? 0 : (BOTH && !WEIGHTED ? 1 : WEIGHTS);
constexpr int LINE_GIVEN = FIRST ? 0 : COLUMNS;
constexpr int LINE_WEIGHTS = ROLE == Role::second ? 0 : WEIGHTS;
constexpr int ROW_WORDS = ROW_GIVEN + ROW_WEIGHTS;
constexpr int LINE = (K + LINE_GIVEN + LINE_WEIGHTS + 3) / 4 * 4;

constexpr int RUN = 64 * PARTNERS;  // of a stage's points, between which sums go to totals
// Lines in flight, as many as registers hold: laplace_l1 of 10 features takes 5.2 ms with 2, 5.5
// with 1 (50000 points, H100).
constexpr bool SPACIOUS = LINE <= 12 || (ROWS == 1 && !Inner::BY_LOGARITHM);
constexpr int UNROLL = K <= 4 ? 4 : (SPACIOUS ? 2 : 1);

constexpr int POINT_SUMS = POINTS ? K : 0;
constexpr int OUTPUTS = POINT_SUMS + (VALUES ? COLUMNS : 0);  // sums of a row
constexpr int COUNT = (ROWS * OUTPUTS + HYPER + 3) / 4 * 4;
constexpr int TOTALS = HYPER > 0 ? HYPER : 1;

struct Operands {
    const InputT* a;
    const InputT* b;
    const InputT* g;
    const InputT* v;
    AccT* points;   // (splits, batch, M, K)
    AccT* values;   // (splits, batch, M, columns)
    AccT* totals;   // (blocks, batch, HYPER)
};

struct Parameters : Operands, ScalarValues<SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Hyperparameters of batch entry l, each read once: what Finish and Slopes make of the same numbers
// is then computed once.
struct Numbers {
    AccT value[SCALARS];

    __device__ __forceinline__ Numbers(const Parameters& parameters, i64 l) {
        ScalarReader<Parameters> read{parameters, l};
#pragma unroll
        for (int i = 0; i < SCALARS; ++i) value[i] = read(i);
    }
    __device__ __forceinline__ AccT operator()(int index) const { return value[index]; }
};

// The part of one block.
struct Part {
    i64 m0, first, last;  // its first row, its n from first on
    i64 split;

    __device__ __forceinline__ explicit Part(const Parameters& parameters)
        : m0(i64(blockIdx.x % parameters.row_blocks) * ROWS * SLOTS),
          first(blockIdx.x / parameters.row_blocks * parameters.per_split),
          last(min(first + parameters.per_split, parameters.n)),
          split(blockIdx.x / parameters.row_blocks) {}
};

template <int SIZE>
__device__ __forceinline__ void read_columns(AccT* to, const InputT* from, const View& view, i64 l,
                                             i64 point, int columns) {
    from += l * view.batch_stride + point * view.row_stride;
#pragma unroll
    for (int c = 0; c < SIZE; ++c) {
        to[c] = c < columns ? convert<AccT>(from[c * view.column_stride]) : AccT(0);
    }
}

struct Stage {
    alignas(16) AccT line[STAGE][LINE];

    // Point n, by the thread of its place.
    __device__ __forceinline__ void fill(const Parameters& parameters, i64 l, i64 n) {
        if (threadIdx.x >= STAGE || n >= parameters.n) return;
        fill_line(line[threadIdx.x], parameters, l, n);
    }

    // The points from n0 on, of partners.
    __device__ __forceinline__ void fill(const Parameters& from, i64 l, i64 n0, i64 last) {
        int count = int(min(last - n0, i64(STAGE)));
        Source<InputT> points(from.b, from.b_view, l, n0, K);
        Source<InputT> given(from.g, from.g_view, l, n0, from.columns);
        Source<InputT> weights(from.v, from.v_view, l, n0, from.columns);
        if (points.is_side_by_side<K>() && given.is_side_by_side<LINE_GIVEN>() &&
            weights.is_side_by_side<LINE_WEIGHTS>()) {
            Carried<K, 0, AccT> first;
            Carried<LINE_GIVEN, K, AccT> second;
            Carried<LINE_WEIGHTS, K + LINE_GIVEN, AccT> third;
            first.load(points, count);
            second.load(given, count);
            third.load(weights, count);
            first.store(line);
            second.store(line);
            third.store(line);
            return;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) fill_line(line[i], from, l, n0 + i);
    }

    static __device__ __forceinline__ void fill_line(AccT* to, const Parameters& parameters, i64 l,
                                                     i64 n) {
        read_columns<K>(to, parameters.b, parameters.b_view, l, n, K);
        const Parameters& from = parameters;
        read_columns<LINE_GIVEN>(to + K, from.g, from.g_view, l, n, from.columns);
        to += K + LINE_GIVEN;
        read_columns<LINE_WEIGHTS>(to, from.v, from.v_view, l, n, from.columns);
    }

    __device__ __forceinline__ void read(AccT (&to)[LINE], int n) const {
#pragma unroll
        for (int c = 0; c < LINE; c += 4) {
            auto chunk = load_vector<AccT, 4>(line[n] + c);
#pragma unroll
            for (int e = 0; e < 4; ++e) to[c + e] = chunk.element[e];
        }
    }
};

// g and v of a thread's rows; zeros of those that do not exist, whose w is 0 then.
using Words = AccT[ROWS][ROW_WORDS > 0 ? ROW_WORDS : 1];

__device__ __forceinline__ void read_words(Words& words, const Parameters& from, i64 l, i64 m0) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        i64 m = m0 + i * SLOTS;
        int columns = m < from.m ? from.columns : 0;
        m = min(m, from.m - 1);
        read_columns<ROW_GIVEN>(words[i], from.g, from.g_view, l, m, columns);
        if (BOTH && !WEIGHTED) words[i][ROW_GIVEN] = columns > 0 ? AccT(1) : AccT(0);
        else read_columns<ROW_WEIGHTS>(words[i] + ROW_GIVEN, from.v, from.v_view, l, m, columns);
    }
}

// w of a row's words and what lies behind a line's point.
__device__ __forceinline__ AccT worth(const AccT* row, const AccT* line) {
    if (!WEIGHTED) {
        if (BOTH) return multiply_add(row[ROW_GIVEN], line[0], row[0]);
        return FIRST ? row[0] : line[0];
    }
    AccT sum = row[0] * line[BOTH ? LINE_GIVEN : 0];
    if (BOTH) sum = multiply_add(row[ROW_GIVEN], line[0], sum);
#pragma unroll
    for (int c = 1; c < COLUMNS; ++c) {
        sum = multiply_add(row[c], line[(BOTH ? LINE_GIVEN : 0) + c], sum);
        if (BOTH) sum = multiply_add(row[ROW_GIVEN + c], line[c], sum);
    }
    return sum;
}

// Adds x times the slope of each feature. A comparison loses a NaN: then x is one as well, if it is
// CURVED, and the row is lost.
__device__ __forceinline__ void add_slopes(AccT* sums, const AccT (&row)[K], const AccT* line,
                                           AccT x, const Exponents<AccT>& exponents) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        AccT v = Term::of(row[k], line[k]);
        if (Slope::SIGN && CURVED) {
            if (v != AccT(0)) sums[k] += flip(x, v);
        } else {
            AccT slope = Slope::at(v, exponents);
            sums[k] = multiply_add(DOT ? slope * line[k] : slope, x, sums[k]);
        }
    }
}

// The sum of what all threads of a block have, in one order; thread 0 gets it.
__device__ __forceinline__ AccT sum_of_block(AccT* shared, AccT sum) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = AccT(0);
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += shared[warp];
    return sum;
}

// The gradients of row i of the thread.
__device__ __forceinline__ void store_row(const AccT* sums, const Parameters& to, const Part& part,
                                          i64 l, i64 m, AccT constant, AccT factor, bool lost) {
    if (m >= to.m) return;
    i64 row = (part.split * to.batch + l) * to.m + m;
#pragma unroll
    for (int k = 0; k < POINT_SUMS; ++k) {
        AccT sum = constant * sums[k] * factor;
        to.points[row * K + k] = lost ? nan_of(sum) : sum;
    }
    if (!VALUES) return;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        if (c < to.columns) to.values[row * to.columns + c] = sums[POINT_SUMS + c];
    }
}

__shared__ Stage stage;
__shared__ alignas(16) AccT memory[COUNT * THREADS];
__shared__ u32 word;

// What the partners of a row have summed, put together in one order: the first of them gets it.
__device__ __forceinline__ void meet(AccT* sums) {
    __syncthreads();  // all totals have been read
#pragma unroll
    for (int i = 0; i < ROWS * OUTPUTS; ++i) memory[i * THREADS + threadIdx.x] = sums[i];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * OUTPUTS * SLOTS; i += THREADS) {
        AccT* own = memory + i / SLOTS * THREADS + i % SLOTS;
        AccT sum = own[0];
#pragma unroll
        for (int other = 1; other < PARTNERS; ++other) sum += own[other * SLOTS];
        own[0] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS * OUTPUTS; ++i) sums[i] = memory[i * THREADS + threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_reduce_gradient(const __grid_constant__ Parameters parameters) {
    Part part(parameters);
    i64 m0 = part.m0 + slot();
    Totals<AccT, COUNT, THREADS> totals(memory);
#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        Numbers read(parameters, l);
        Finish finish(read);
        Slopes slopes(read);
        InnerNumbers<AccT> numbers = {read(INNER_P), read(INNER_SCALE)};
        Exponents<AccT> exponents = {numbers.p, numbers.p - AccT(1), numbers.scale * LOG2_E,
                                     AccT(1.17549435e-38)};
        Rows rows;
        Words words;
        read_rows(rows, parameters, l, m0);
        read_words(words, parameters, l, m0);
        if constexpr (SCALED)
            numbers.unit = sample_unit(&word, rows, parameters, part, l, numbers.p);
        Rescale rescale(numbers);
        AccT sums[COUNT] = {};
        AccT lost[ROWS] = {};  // NaN if an x was
        totals.clear();
#pragma unroll 1
        for (i64 n0 = part.first; n0 < part.last; n0 += STAGE) {
            __syncthreads();
            if constexpr (PARTNERS == 1) stage.fill(parameters, l, n0 + threadIdx.x);
            else stage.fill(parameters, l, n0, part.last);
            __syncthreads();
            int count = int(min(part.last - n0, i64(STAGE)));
#pragma unroll 1
            for (int run = 0; run < count; run += RUN) {
                int end = min(run + RUN, count);
#pragma unroll UNROLL
                for (int n = run + partner(); n < end; n += PARTNERS) {
                    AccT line[LINE];
                    stage.read(line, n);
                    AccT hyper[TOTALS] = {};
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
                        AccT* own = sums + i * OUTPUTS;
                        AccT sum = AccT(0);
#pragma unroll
                        for (int k = 0; k < K; ++k)
                            sum = Term::add(sum, rows[i][k], line[k], numbers);
                        AccT s = rescale(sum), w = worth(words[i], line + K);
                        AccT x = w * slopes(s);
                        if (POINTS) add_slopes(own, rows[i], line, x, exponents);
                        if (POINTS && Slope::SIGN && CURVED) lost[i] += x;
                        if (VALUES) {
                            AccT value = finish(s, rescale.unit);
#pragma unroll
                            for (int c = 0; c < COLUMNS; ++c) {
                                AccT& total = own[POINT_SUMS + c];
                                total = multiply_add(value, line[K + c], total);
                            }
                        }
                        slopes.add(hyper, s, w, x);
                    }
#pragma unroll
                    for (int h = 0; h < HYPER; ++h) sums[ROWS * OUTPUTS + h] += hyper[h];
                }
                totals.add<true>(sums);
            }
        }
        totals.finish(sums);
        if constexpr (PARTNERS > 1) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int k = 0; k < POINT_SUMS; ++k) {
                    if (lost[i] != lost[i]) sums[i * OUTPUTS + k] = lost[i];
                }
            }
            meet(sums);
        }
        AccT factor = AccT(parameters.factor);
        if (parameters.times_p) factor *= numbers.p;
        if (parameters.times_scale) factor *= numbers.scale;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (partner() > 0) break;
            store_row(sums + i * OUTPUTS, parameters, part, l, m0 + i * SLOTS, slopes.constant,
                      factor, lost[i] != lost[i]);
        }
#pragma unroll
        for (int h = 0; h < HYPER; ++h) {
            AccT total = sum_of_block(memory, sums[ROWS * OUTPUTS + h]);
            total = slopes.whole(h, BOTH ? total * AccT(0.5) : total);
            i64 place = (i64(blockIdx.x) * parameters.batch + l) * HYPER + h;
            if (threadIdx.x == 0) parameters.totals[place] = total;
        }
        __syncthreads();
    }
}
