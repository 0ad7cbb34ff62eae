// The sums of one tile: TILE x TILE outputs by 256 threads of (TILE / 16)^2 each.
//
// Per feature and thread that is 64 terms against 4 16-byte reads of shared memory, so a term of
// two issue slots costs about 2.1. Two CTAs share an SM at 128 registers. Sums wait in shared
// memory between promotions, where they cost no register: fp32 chains of n equal terms are off by
// up to 1.5e-8 n, totals of chains of PROMOTE_K by 1.1e-6 up to 1000 features, for 1.9 % of the
// slots. Those of 10000 would be off by 2.4e-6: of MANY features totals keep what they round off,
// and are off by 1e-6 again, for 2.2 % more.
#pragma once

#include "pairwise/operand.cuh"
#include "pairwise/unit.cuh"

constexpr bool LONG_K = Config::LONG_K;  // whether K > PROMOTE_K

constexpr int PROMOTE_K = 64;
constexpr int MANY = 2048;
constexpr int PER_SIDE = TILE / 16;      // rows (and columns) of a thread
constexpr int CHUNKS = PER_SIDE / CHUNK;
constexpr int CHUNK_STEP = 16 * CHUNK;   // from one run of a thread's points to the next
constexpr int OPERAND = TILE_K * LINE;
constexpr int STAGE = 2 * OPERAND;

// The thread's place in the tile: a warp covers 4 x 8 of the 16 x 16 threads, so that its reads of
// either operand are broadcasts.
struct Place {
    int a, b;
    __device__ __forceinline__ Place() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        a = (warp / 2 * 4 + lane / 8) * CHUNK;
        b = (warp % 2 * 8 + lane % 8) * CHUNK;
    }
    // Offset of the thread's output row i, chunk c, in a tile of sums.
    __device__ __forceinline__ int sums(int i, int c) const {
        return (a + i / CHUNK * CHUNK_STEP + i % CHUNK) * LINE + b + c * CHUNK_STEP;
    }
};

using Sums = AccT[PER_SIDE][PER_SIDE];
using Numbers = InnerNumbers<AccT>;

__device__ __forceinline__ void read_points(AccT (&values)[PER_SIDE], const AccT* line) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        auto chunk = load_shared_in_order<AccT, CHUNK>(line + c * CHUNK_STEP);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) values[c * CHUNK + e] = chunk.element[e];
    }
}

// One feature: a and b are the thread's first points in its line of either operand.
__device__ __forceinline__ void accumulate(Sums& sums, const AccT* a, const AccT* b,
                                           const Numbers& numbers) {
    AccT left[PER_SIDE], right[PER_SIDE];
    read_points(left, a);
    read_points(right, b);
#pragma unroll
    for (int i = 0; i < PER_SIDE; ++i) {
#pragma unroll
        for (int c = 0; c < PER_SIDE; ++c) {
            sums[i][c] = Term::add(sums[i][c], left[i], right[c], numbers);
        }
    }
}

enum class Promotion { write, merge, merge_exactly };

// Moves the running sums to shared memory, where they are written or merged, and starts anew.
// Every sum starts from zero, the maximum of absolute values included, or with what an exact merge
// left.
template <Promotion HOW>
__device__ __forceinline__ void promote(AccT* total, Sums& sums, const Place& place,
                                        const Numbers& numbers) {
#pragma unroll
    for (int i = 0; i < PER_SIDE; ++i) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            AccT* address = total + place.sums(i, c);
            Vector<AccT, CHUNK> value;
            if (HOW != Promotion::write) value = load_vector<AccT, CHUNK>(address);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                AccT& sum = sums[i][c * CHUNK + e];
                AccT& whole = value.element[e];
                if (HOW == Promotion::merge_exactly) {
                    whole = Inner::merge_exactly(whole, sum, numbers);
                } else {
                    whole = HOW == Promotion::merge ? Inner::merge(whole, sum, numbers) : sum;
                    sum = AccT(0);
                }
            }
            store_vector(address, value);
        }
    }
}

// Zeros for the first merge, which a barrier separates from this.
__device__ __forceinline__ void clear(AccT* total) {
#pragma unroll 1
    for (int i = threadIdx.x * CHUNK; i < TILE * LINE; i += THREADS * CHUNK) {
        store_vector(total + i, Vector<AccT, CHUNK>());
    }
}

// Leaves the sums of one tile in `total`, whose memory may be that of the stages if !LONG_K, and
// their unit in `numbers`.
__device__ __forceinline__ void sum_tile(AccT* total, AccT* stages, const Points& a,
                                         const Points& b, const Place& place,
                                         Numbers& numbers) {
    Operand<Config::ACCESS_A> left(a);
    Operand<Config::ACCESS_B> right(b);
    Sums sums = {};
    if (LONG_K) clear(total);
    int features = a.features;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        left.begin(stages, i, features);
        right.begin(stages + OPERAND, i, features);
        left.end(stages, i);
        right.end(stages + OPERAND, i);
    }
    // Its word of shared memory pads a line of the first stage.
    if constexpr (SCALED)
        numbers.unit = sample_unit(reinterpret_cast<u32*>(stages + TILE), a, b, numbers.p);
    int stage = 0;
#pragma unroll 1
    for (int done = 0; done < features; done += TILE_K) {
        const AccT* line = stages + stage;
        AccT* next = stages + (STAGE - stage);
        stage = STAGE - stage;
        wait_for_copies();
        __syncthreads();  // this stage is complete, and nobody reads the other one any more
        int ahead = features - done - TILE_K;
        // Each quarter of the arithmetic covers the way of one of a thread's four runs. After the
        // last feature the runs are zeros that nobody reads.
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            if (quarter % 2 == 0) left.begin(next, quarter / 2, ahead);
            else right.begin(next + OPERAND, quarter / 2, ahead);
            // Features past the last one are zeros, which some stages would count.
            int count = TILE_K / 4;
            if (!Inner::ZERO_ADDS_NOTHING) count = min(count, features - done - quarter * count);
#pragma unroll Inner::UNROLL_K
            for (int k = 0; k < count; ++k) {
                accumulate(sums, line + place.a, line + OPERAND + place.b, numbers);
                line += LINE;
            }
            if (quarter % 2 == 0) left.end(next, quarter / 2);
            else right.end(next + OPERAND, quarter / 2);
        }
        bool full = done % PROMOTE_K == PROMOTE_K - TILE_K;
        if (!LONG_K || !(full || ahead <= 0)) continue;
        if (features > MANY) promote<Promotion::merge_exactly>(total, sums, place, numbers);
        else promote<Promotion::merge>(total, sums, place, numbers);
    }
    wait_for_copies();
    if (LONG_K) return;
    __syncthreads();  // nobody reads the stages any more, where the sums go now
    promote<Promotion::write>(total, sums, place, numbers);
}
