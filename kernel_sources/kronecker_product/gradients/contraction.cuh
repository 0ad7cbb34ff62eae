// The gradient of one matrix: of tiles (L, P, R) and (L, Q, R) the sums over all slices
//
//   d[p, q] += sum x[l, p, r] * g[l, q, r]
//
// by tensor cores, as multiply.cuh multiplies. Warps share out fragments of d, then slices; each
// keeps its sums in registers from the block's first tile to its last.
#pragma once

#include "kronecker_product/modes/run.cuh"

// What a lane reads of a tile (L, N, R): of one index n two neighbouring slices, which are a
// fragment's depths t and t + 4; zeros where there are none. All warps together ask for COVER
// indices n.
template <int SLICES, int N, int R, int COVER>
struct Pairs {
    static constexpr bool ADJACENT = R % 2 == 0;
    int base[ADJACENT ? 1 : 2];
    bool exists[ADJACENT ? 1 : 2];

    __device__ __forceinline__ explicit Pairs(int slice) {
#pragma unroll
        for (int next = 0; next < (ADJACENT ? 1 : 2); ++next, ++slice) {
            base[next] = slice / R * (N * R) + slice % R;
            exists[next] = SLICES % 8 == 0 || slice < SLICES;
        }
    }
    __device__ __forceinline__ Vector<AccT, 2> read(const AccT* tile, int n) const {
        Vector<AccT, 2> pair = {};
        bool there = COVER == N || n < N;
        if constexpr (ADJACENT) {
            if (there && exists[0]) pair = load_vector<AccT, 2>(tile + place(base[0] + n * R));
        } else {
#pragma unroll
            for (int next = 0; next < 2; ++next)
                if (there && exists[next]) pair.element[next] = tile[place(base[next] + n * R)];
        }
        return pair;
    }
};

// Products of one step, rounded to nearest where a tensor core's own additions would truncate: all
// rows of a call are one sum.
__device__ __forceinline__ void add_rounded(AccT (&d)[4], const Slices& a, const Factor& b) {
    if constexpr (sizeof(AccT) == 8 || PRODUCTS == 3) {
        add_products(d, a, b, false);
    } else {
        AccT step[4] = {};
        add_products(step, a, b, true);
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] += step[i];
    }
}

// Of mode M, DOWN x ACROSS fragments of 16 x 8 to a warp; its entries begin AT behind a part's.
template <class M, int DOWN, int ACROSS, int AT>
struct Contraction {
    static constexpr int PLACES_ACROSS = ceil_div(ceil_div(M::Q, 8), ACROSS);
    static constexpr int PLACES_DOWN = ceil_div(ceil_div(M::P, 16), DOWN);
    static constexpr int PLACES = PLACES_DOWN * PLACES_ACROSS;
    using Left = Pairs<M::SLICES, M::P, M::R, PLACES_DOWN * DOWN * 16>;
    using Right = Pairs<M::SLICES, M::Q, M::R, PLACES_ACROSS * ACROSS * 8>;
    static constexpr int SHARES = WARPS / PLACES, STEPS = ceil_div(M::SLICES, 8);
    static constexpr int UNROLLED = DOWN * ACROSS >= 4 ? 1 : 2;
    static_assert(PLACES <= WARPS, "a warp for each place");

    AccT sums[DOWN][ACROSS][4];

    // A lane's share of slices, and the first fragment's row and column.
    struct Lane {
        int share, row, column, group, pair;
        __device__ __forceinline__ Lane() {
            int thread = threadIdx.x;
            // Else all addresses would be computed before the first tile, and spill.
            asm volatile("" : "+r"(thread));
            int warp = thread / 32, lane = thread % 32, place = warp % PLACES;
            share = warp / PLACES;
            row = place / PLACES_ACROSS * (DOWN * 16);
            column = place % PLACES_ACROSS * (ACROSS * 8);
            group = lane / 4;
            pair = lane % 4 * 2;
        }
    };

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < DOWN * ACROSS * 4; ++i) sums[i / 4 / ACROSS][i / 4 % ACROSS][i % 4] = 0;
    }

    __device__ __forceinline__ void add(const AccT* x, const AccT* g) {
        const Lane lane;
        if (lane.share >= SHARES) return;
        int row = lane.row + lane.group, column = lane.column + lane.group;
#pragma unroll(UNROLLED)
        for (int step = lane.share; step < STEPS; step += SHARES) {
            Left left(step * 8 + lane.pair);
            Right right(step * 8 + lane.pair);
            Factor b[ACROSS];
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) b[j].set(right.read(g, column + j * 8));
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                auto upper = left.read(x, row + i * 16);
                auto lower = left.read(x, row + i * 16 + 8);
                Operand values{{upper.element[0], lower.element[0], upper.element[1],
                                lower.element[1]}};
                Slices a(values);
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) add_rounded(sums[i][j], a, b[j]);
            }
        }
    }

    // The sums of all shares, in turn, to a part in device memory by way of shared memory.
    __device__ __forceinline__ void write(AccT* room, AccT* part) const {
        const Lane lane;
#pragma unroll 1
        for (int turn = 0; turn < SHARES; ++turn) {
            if (lane.share == turn) add_to(room, lane, turn == 0);
            __syncthreads();
        }
        for (int index = threadIdx.x; index < M::P * M::Q; index += THREADS)
            part[AT + index] = room[index];
        __syncthreads();
    }
    __device__ __forceinline__ void add_to(AccT* room, const Lane& lane, bool is_first) const {
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    int p = lane.row + i * 16 + k / 2 * 8 + lane.group;
                    int q = lane.column + j * 8 + lane.pair + k % 2;
                    if (p >= M::P || q >= M::Q) continue;
                    AccT& sum = room[p * M::Q + q];
                    sum = is_first ? sums[i][j][k] : sum + sums[i][j][k];
                }
            }
        }
    }
};
