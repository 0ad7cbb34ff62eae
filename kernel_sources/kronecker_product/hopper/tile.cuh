// What a group of threads does with a tile, from registers to device memory.
//
// fp32 is two float16 a number (halves/pair.cuh), three products of sums that the matrix unit
// accumulates. Matrices and tiles are scaled so that their largest numbers have an exponent that is
// given: 14, or where another matrix follows, exponents that keep what the first one makes below
// 2^15, as large for one as for the other: half precision holds numbers to 2^-25. What the first
// makes of float16 as it was read is scaled by its own largest number, a warp's at a time. Of
// bfloat16 nothing is scaled. Tiles are of one row, or columns of x are scaled each for itself: it
// is a row's own numbers that decide about it.
//
// The generated source defines before it includes this file MATRIX_BYTES, of all runs' matrices,
// and SCALES, the columns of a tile that are scaled for themselves, or 1.
#pragma once

#include "kronecker_product/hopper/store.cuh"

constexpr int LARGEST = 2 * RUNS + 2 * SCALES * GROUPS;  // numbers

// Shared memory: panels, matrices, what undoes the scaling of columns, bits of largest numbers.
struct Shared {
    unsigned char *panel, *matrices;
    Vector<float, 2>* undone;
    u32 *of_matrices, *of_tiles;  // two of each run; those of the group's tiles, in turn
    __device__ __forceinline__ explicit Shared(unsigned char* base) {
        base += -shared_address(base) & 1023;
        const int group = group_number();
        panel = base + group * (WORDS * PANEL_BYTES);
        matrices = base + GROUPS * WORDS * PANEL_BYTES;
        undone = reinterpret_cast<Vector<float, 2>*>(matrices + MATRIX_BYTES);
        of_matrices = reinterpret_cast<u32*>(undone + SCALES * GROUPS);
        undone += SCALES * group;
        of_tiles = of_matrices + 2 * RUNS + 2 * SCALES * group;
    }
    __device__ __forceinline__ void clear() const {
        for (int i = threadIdx.x; i < LARGEST; i += THREADS) of_matrices[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ void* end() const { return of_matrices + LARGEST; }
};

// Matrices of all runs, by all threads of the block.
template <class... R>
__device__ __forceinline__ void stage_all(const Parameters& p, const Shared& s) {
    s.clear();
    (stage<R>(p, s.matrices + R::MATRICES, s.of_matrices + 2 * R::INDEX), ...);
    fence_shared_writes();
    __syncthreads();
}

// A tile from registers to its panel, and what undoes its scaling. The group's threads have read
// the panel's last tile when they meet, and this one's largest numbers are known. Does something
// else before they meet again.
template <class R, class Between>
__device__ __forceinline__ Undo<R> write_tile(const Numbers& numbers, const Shared& s, int turn,
                                              const Between& between) {
    constexpr bool COUNTS = SCALED && (sizeof(typename R::SourceT) == 4 || R::TAKES);
    constexpr int COUNT = Undo<R>::BY_COLUMNS ? R::COLUMNS : 1;
    const u32* largest = s.of_tiles + turn * SCALES;
    if (COUNTS) numbers.find_largest<R>(s.of_tiles + turn * SCALES);
    sync_group();
    const int of_matrices = shift_of_matrices<R>(s.of_matrices + 2 * R::INDEX);
    const int thread = threadIdx.x % GROUP_THREADS;
    float power[4];
    int shift = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (R::TAKES) shift = BIAS - int(largest[0]);
        else if (COUNTS && (COUNT > 1 || e == 0))
            shift = shift_to(R::MOST_EXPONENT, largest[COUNT > 1 ? thread * 4 % COUNT + e : 0]);
        power[e] = power_of_two(shift);
    }
    if (SCALED && thread < COUNT) {
        s.of_tiles[(turn ^ 1) * SCALES + thread] = 0;  // of a tile of another run too
        if (COUNT > 1)
            s.undone[thread] =
                powers_of_two(-of_matrices - shift_to(R::MOST_EXPONENT, largest[thread]));
    }
    between();
    numbers.write<R>(s.panel, power, -shift);
    fence_shared_writes();
    sync_group();
    return {-of_matrices - shift, s.undone};
}

// A tile of a panel to device memory.
template <class R, class Meanwhile>
__device__ __forceinline__ void compute_tile(const Parameters& p, const Finish& finish,
                                             const Shared& s, const Origin& origin, Undo<R> undo,
                                             const Meanwhile& meanwhile) {
    const unsigned char* matrices = s.matrices + R::MATRICES;
    Sums<R> sums;
    multiply_panel<R>(sums, matrices, s.panel, meanwhile);
    if constexpr (R::SECOND) {
        bool are_zeros;
        if (SCALED && sizeof(typename R::SourceT) == 2)
            undo.exponent -= scale_sums<R>(sums, are_zeros);
        const Fragments<R> fragments(sums);
        multiply_fragments<R>(sums, fragments, matrices);
    }
    store_tile<R>(sums, p, finish, s.panel, origin, undo);
}
