// First gradients of products and sums with a kernel matrix, of many features, by tensor cores:
// what reduce/gradient.cuh leaves, for squared distances and dot products. Of the matrix nothing is
// stored.
//
// A pair (m, n) is worth x = w K'(s), with w of its g and v (`worth`), s its sum and K' the
// derivative of what follows that. The gradient by a row's point is
//     sum_n x (row - line) = row sum_n x - sum_n x line
// of points without the centre: so tensor cores compute s of a tile (product/tile_of_words.cuh),
// the lanes make x of it where it lies in registers, and with it sums of K g for v and of the
// hyperparameters, and tensor cores multiply x, as words of 16 bits, by the features of the lines.
// That g and v are in x costs 3 issue slots a pair, and saves half of the columns of products of
// K' with [v, v line] and [g, g line].
//
// row sum_n x and sum_n x line are larger than their difference by |row| / |row - line|. Pairs
// whose squared distance is below TAU of both norms (split/parameters.cuh), and would lose more
// than 5.7 times, are zeros among the words, and added as differences. What is left is held by sums
// that begin anew with each tile, low words first, as tensor cores truncate: emulated, 4e-6 of the
// absolute terms at most where all terms of a row have one sign and come from a cluster that is
// just not doubtful, 4e-7 of others.
//
// Expected on an H200, for a pair: 6 operations a feature, twice, over 770 TFLOP/s; 24 issue slots
// as compiled, of K = 20 21 (sum 5, value 2, w 2, x 1, v 1, bandwidth 1, words 5, the rest loops,
// barriers and descriptors), 3.345e13 a second. Times add up, as of product/product.cuh.
//   20000 x 20000, K = 64, one column, all gradients   .20 + .20 + .29 = .69 ms
//   the same of K = 20                                 .10 + .08 + .25 = .43 ms
//
// One producer thread, WARPGROUPS warpgroups of 64 rows each; a stage has TILE_N lines. A value
// that is not finite closes the gate, and so do too many doubtful pairs of the sample: then the
// kernel behind it (points/direct.cuh) does the whole launch.
//
// Facts, Finish, Slopes and multiply(), one wgmma of 64 x WIDTH x 16 with its left operand in
// registers and one of 64 x TILE_N x 16 from shared memory: class Points of
// kernlib/families/pairwise/kernels/points.py.
#pragma once

#include "pairwise/points/sums.cuh"
#include "pairwise/product/tile_of_words.cuh"
#include "pairwise/split/ring.cuh"

constexpr int STAGE_BYTES = POINT_BYTES + LINES_BYTES;
static_assert(Config::DYNAMIC_BYTES == A_BYTES + STAGES * STAGE_BYTES, "as the host counts it");
static_assert(COPIES == 2 && V_COPIES == 2, "high and low words");

__device__ __forceinline__ bool is_needed(Gate& gate) {
    if (gate.closed) return false;
    if (gate.doubtful <= Config::DOUBTFUL) return true;
    gate.closed = CLOSED;
    return false;
}

__device__ __forceinline__ void produce(const PointsLaunch& p, const Shared& s,
                                        const Share& share) {
    Ring<STAGES> stage(1);
    i64 tile = share.first / TILE_N, l = share.l;
    const Byte* b = p.packed_b + l * p.b_packed_stride + tile * WORD_BYTES;
    const PointInfo* info = p.b_info + l * p.b_info_stride + share.first;
    const Byte* lines = p.packed_lines + l * p.lines_stride + tile * LINES_BYTES;
    barrier_expect(s.resident_full, A_BYTES);
    load_bytes(s.resident, p.packed_a + l * p.a_packed_stride + i64(share.m0 / TILE_M) * A_BYTES,
               s.resident_full, A_BYTES);
#pragma unroll 1
    for (int n0 = share.first; n0 < share.last; n0 += TILE_N) {
        Byte* to = s.stages + stage.place * STAGE_BYTES;
        u64* barrier = &s.full[stage.place];
        barrier_wait(&s.empty[stage.place], stage.parity);
        barrier_expect(barrier, STAGE_BYTES);
        load_bytes(to, b, barrier, WORD_BYTES);
        load_bytes(to + WORD_BYTES, info, barrier, INFO_BYTES);
        load_bytes(to + POINT_BYTES, lines, barrier, LINES_BYTES);
        b += WORD_BYTES;
        info += TILE_N;
        lines += LINES_BYTES;
        stage.advance();
    }
}

// A thread's two rows.
struct Rows {
    int l, m[2];
    PointInfo info[2];
    float numbers[2][NUMBERS];

    __device__ __forceinline__ Rows(const PointsLaunch& p, int l, int first)
        : l(l), m{first, first + 8} {
        const PointInfo* from = p.a_info + l * p.a_info_stride + first;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            info[i] = from[8 * i];
            read_row(numbers[i], p, l, m[i]);
        }
    }
};

// Sums of the thread's rows on the lanes, and what their pairs are worth, where these have no
// column of their own.
using Own = float[2][OWN > 0 ? OWN : 1];
constexpr bool IS_SUMMED = WANTS_POINTS && DIFFERENCE && !COUNTED;

// Sums of a tile become what its pairs are worth, of which `flags` are left to add_differences.
// With CAREFUL there are pairs that do not exist.
template <bool CAREFUL>
__device__ __forceinline__ void weigh(float (&values)[VALUES], Own& own, const Rows& rows,
                                      const Functions& functions, const float* numbers,
                                      const Tile& tile, i64 m) {
    constexpr int COUNT = 2 * NUMBERS, EACH = COUNT % 4 ? 2 : 4;  // of two neighbouring lines
#pragma unroll
    for (int i = 0; i < VALUES; i += 4) {
        float lines[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c += EACH) {
            auto read = load_vector<float, EACH>(numbers + column_of(i) * NUMBERS + c);
#pragma unroll
            for (int e = 0; e < EACH; ++e) lines[c + e] = read.element[e];
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int row = e / 2;
            const float* line = lines + e % 2 * NUMBERS;
            bool exists = !CAREFUL || (column_of(i + e) < tile.columns && rows.m[row] < m);
            float x = 0.0f;
            if (exists)
                x = functions.add(own[row], values[i + e], worth(rows.numbers[row], line), line);
            values[i + e] = x;
        }
    }
}

// The differences of pairs that are zeros among the words: `flags` of each thread, of sums computed
// again, times what they are worth, by the four lanes that have the row's totals.
__device__ __forceinline__ void add_differences(Totals& totals, u32 flags, const Rows& rows,
                                                const Scales& scales, const Functions& functions,
                                                const float* numbers, const PointsLaunch& p,
                                                const Tile& tile) {
    u32 lanes = __ballot_sync(~0u, flags);
#pragma unroll 1
    while (lanes) {
        int source = __ffs(lanes) - 1;
        lanes &= lanes - 1;
        u32 waiting = __shfl_sync(~0u, flags, source);
#pragma unroll 1
        while (waiting) {
            int bit = __ffs(waiting) - 1, row = bit / 2 % 2;
            int column = bit / 4 * 8 + source % 4 * 2 + bit % 2;
            waiting &= waiting - 1;
            int m = __shfl_sync(~0u, row ? rows.m[1] : rows.m[0], source), n = tile.n0 + column;
            float own[NUMBERS];
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i)
                own[i] = __shfl_sync(~0u, row ? rows.numbers[1][i] : rows.numbers[0][i], source);
            float x = worth(own, numbers + column * NUMBERS) *
                      functions.slopes(sum_directly(p, rows.l, m, n));
            float factor = __shfl_sync(~0u, row ? scales.factor[1] : scales.factor[0], source);
            if (threadIdx.x % 32 / 4 != source / 4) continue;
            const InputT* a = p.a + rows.l * p.a_view.batch_stride + m * p.a_view.row_stride;
            const InputT* b = p.b + rows.l * p.b_view.batch_stride + n * p.b_view.row_stride;
#pragma unroll
            for (int i = 0; i < SUMS; ++i) {
                int k = column_of(i);
                if (row_of(i) != row || k >= p.k) continue;
                float line = convert<float>(b[k * p.b_view.column_stride]);
                if (DIFFERENCE) line -= convert<float>(a[k * p.a_view.column_stride]);
                totals.total[i] = fmaf(x * line, factor, totals.total[i]);  // equal points add 0
            }
        }
        __syncwarp();
    }
}

// Products of a tile's words and those of features at `address`, low ones first: what tensor cores
// add to a sum truncates that.
__device__ __forceinline__ void multiply_words(float (&run)[SUMS], const Words& words,
                                               u32 address) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u64 high = core_matrices_descriptor(address + step * V_STEP, WIDTH * 16, 128);
        multiply(run, words.low[step], high, step > 0);
        multiply(run, words.high[step], high + V_WORDS / 16, 1);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u64 high = core_matrices_descriptor(address + step * V_STEP, WIDTH * 16, 128);
        multiply(run, words.high[step], high, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

// Adds what pairs of a tile are worth to their rows' points, times the features at `address`.
__device__ __forceinline__ void multiply_lines(Totals& totals, Scales& scales,
                                               const float (&values)[VALUES],
                                               u32* closed, u32 address, const float* back) {
    Words words;
    bool exceeds = split_values(words, values, scales);
    while (__any_sync(~0u, exceeds)) {
        if (!lower_scales(scales, values, totals)) {
            *closed = CLOSED;
            break;
        }
        exceeds = split_values(words, values, scales);
    }
    multiply_words(totals.run, words, address);
    totals.settle(back);
}

// The sum of what a row's pairs are worth where it is that of the ones behind the features, scaled.
__device__ __forceinline__ float counted(const Totals& totals, int row, int k) {
    constexpr int LAST = SUMS - 4;       // of the last 8 columns, which a row's four lanes have
    float sum = k % 2 ? totals.total[LAST + 2 * row + 1] : totals.total[LAST + 2 * row];
    return __shfl_sync(~0u, sum, (threadIdx.x & 28) + k % 8 / 2);
}

// Over the four lanes that have parts of a row.
__device__ __forceinline__ float sum_of_row(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Writes or adds what a span has summed. A sum that is not finite closes the gate.
__device__ __forceinline__ void store(const Totals& totals, Own& own, const float (&sums)[2],
                                      const Scales& scales, const Rows& rows,
                                      const Functions& functions, const PointsLaunch& p,
                                      const Share& share, bool first) {
    bool finite = true;
    float whole[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            own[row][i] = sum_of_row(own[row][i]);
            finite = finite && fabsf(own[row][i]) < infinity(0.0f);
        }
        float back = 1.0f / scales.factor[row];
        whole[row] = COUNTED ? counted(totals, row, p.k) * back : sum_of_row(sums[row]);
        finite = finite && fabsf(whole[row]) < infinity(0.0f);
    }
    const float* centre = p.centre + share.l * p.centre_stride;
    asm volatile("" : "+l"(centre));     // nothing of this is read ahead, into registers
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        int m = rows.m[row];
        asm volatile("" : "+r"(m));
        if (m >= p.m) continue;
        if (threadIdx.x % 4 == 0) put_own(p, share, m, own[row], functions, first);
        if (!WANTS_POINTS) continue;
        const InputT* a = p.a + share.l * p.a_view.batch_stride + m * p.a_view.row_stride;
        float back = 1.0f / scales.factor[row];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            int k = column_of(i);
            if (row_of(i) != row || k >= p.k) continue;
            finite = finite && fabsf(totals.total[i]) < infinity(0.0f);
            float sum = totals.total[i] * back;
            if (DIFFERENCE) {
                float x = convert<float>(a[k * p.a_view.column_stride]) - centre[k];
                sum = fmaf(x, whole[row], -sum);
            }
            put_point(p, share, m, k, sum, functions, first);
        }
    }
    if (!finite) p.gate->closed = CLOSED;
}

__device__ __forceinline__ void consume(const PointsLaunch& p, const Shared& s,
                                        const Share& share) {
    Ring<STAGES> stage(0);
    // By a shuffle, so that the compiler knows it is the same of a warp, as descriptors are.
    const Byte* left = rows_of(s.resident, __shfl_sync(~0u, int(threadIdx.x / 128) - 1, 0));
    Rows rows(p, share.l, share.m0 + (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4);
    Functions functions(Hyperparameters(p, share.l));
    Scales scales;
    Totals totals;
    Own own = {};
    float sums[2] = {};                  // of what the rows' pairs are worth, if IS_SUMMED
    bool rows_end = share.m0 + TILE_M > p.m, first = true;
    int tiles = 0;
    barrier_wait(s.resident_full, 0);
#pragma unroll 1
    for (int n0 = share.first; n0 < share.last; n0 += TILE_N) {
        const Byte* from = s.stages + stage.place * STAGE_BYTES;
        const Byte* lines = from + POINT_BYTES;
        auto points = reinterpret_cast<const PointInfo*>(from + WORD_BYTES);
        auto numbers = reinterpret_cast<const float*>(lines + FEATURE_BYTES);
        Tile tile = {n0, min(share.last - n0, TILE_N)};
        barrier_wait(&s.full[stage.place], stage.parity);
        float values[VALUES];
        u32 flags = 0;
        Own part = {};
        bool fine = multiply_tile(values, rows.info, left, from);
        if (!fine) flags = mend_sums(values, rows, points, p, tile);
        if (rows_end || tile.columns < TILE_N) {
            weigh<true>(values, part, rows, functions, numbers, tile, p.m);
        } else {
            weigh<false>(values, part, rows, functions, numbers, tile, p.m);
        }
        if (WANTS_POINTS) {
            if (!fine) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i)
                    values[i] = flags >> i & 1 ? 0.0f : values[i];
            }
            if (IS_SUMMED) {
                float worths[2] = {};
#pragma unroll
                for (int i = 0; i < VALUES; ++i) worths[row_of(i)] += values[i];
                sums[0] += worths[0], sums[1] += worths[1];
            }
            multiply_lines(totals, scales, values, &p.gate->closed, shared_address(lines),
                           reinterpret_cast<const float*>(lines + STEPS * V_STEP));
            if (!fine)
                add_differences(totals, flags, rows, scales, functions, numbers, p, tile);
        }
        barrier_arrive_by_warp(&s.empty[stage.place]);
        stage.advance();
#pragma unroll
        for (int i = 0; i < OWN; ++i) own[0][i] += part[0][i], own[1][i] += part[1][i];
        if (++tiles == SPAN || n0 + TILE_N >= share.last) {
            store(totals, own, sums, scales, rows, functions, p, share, first);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) totals.total[i] = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN; ++i) own[0][i] = own[1][i] = 0.0f;
            sums[0] = sums[1] = 0.0f;
            tiles = 0;
            first = false;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_points_main(const __grid_constant__ PointsLaunch launch) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 barriers[BARRIERS];
    __shared__ bool closed;              // another block may close the gate at any moment
    Shared s = {dynamic, dynamic + A_BYTES, barriers, barriers + STAGES, barriers + 2 * STAGES};
    if (threadIdx.x == 0) {
        closed = !is_needed(*launch.gate);
        begin_barriers(s);
    }
    __syncthreads();
    if (closed) return;
    Share share(launch, TILE_M);
    if (threadIdx.x < 128) {
        release_registers<OF_PRODUCERS>();
        if (threadIdx.x == 0) produce(launch, s, share);
    } else {
        take_registers<OF_CONSUMERS>();
        consume(launch, s, share);
    }
}
