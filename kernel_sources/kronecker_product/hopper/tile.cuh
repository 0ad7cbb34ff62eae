// What a group of threads does with a tile, from its stage to device memory.
//
// fp32 is two float16 a number (halves/pair.cuh), three products of sums that the matrix unit
// accumulates. Matrices and tiles are scaled so that their largest numbers have an exponent that is
// given: 14, or where another matrix follows, exponents that keep what the first one makes below
// 2^15, as large for one as for the other: half precision holds numbers to 2^-25. What the first
// makes of float16 as it was read is scaled by its own largest number, a warp's at a time. Of
// bfloat16 nothing is scaled. Float16 that launches hand on is scaled as bounds.cuh says. Tiles are
// of one row, or columns of x are scaled each for itself: it is a row's own numbers that decide
// about it.
#pragma once

#include "kronecker_product/hopper/stages.cuh"
#include "kronecker_product/hopper/store.cuh"

constexpr int MATRIX_BYTES = Config::MATRIX_BYTES;  // of all runs' matrices
constexpr int SCALES = Config::SCALES;  // columns of a tile that are scaled for themselves, or 1

constexpr int OF_TILES = 2 * RUNS, GROWTHS_AT = OF_TILES + 2 * SCALES * GROUPS;
constexpr int LARGEST = GROWTHS_AT + GROWTHS * (1 + SUMS_OF_COLUMNS);  // numbers
constexpr int NUMBERS_BYTES = (LARGEST + 2 * SCALES * GROUPS + 3) / 4 * 16;

// Shared memory: stages, matrices, what is said of stages, what undoes the scaling of columns, bits
// of largest numbers.
struct Shared {
    unsigned char *data, *matrices;
    Vector<float, 2>* undone;
    u32 *of_matrices, *of_tiles;  // of each; two of each group, for its tiles in turn
    u32* growths;                 // of matrices, and sums of their columns
    void* rest;
    __device__ __forceinline__ explicit Shared(unsigned char* base) {
        data = base + (-shared_address(base) & 1023);
        matrices = data + ALL_STAGES * STAGE_BYTES;
        undone = reinterpret_cast<Vector<float, 2>*>(matrices + MATRIX_BYTES);
        of_matrices = reinterpret_cast<u32*>(undone + SCALES * GROUPS);
        of_tiles = of_matrices + OF_TILES;
        growths = of_matrices + GROWTHS_AT;
        rest = matrices + MATRIX_BYTES + NUMBERS_BYTES;
    }
    __device__ __forceinline__ Stages stages(int group) const { return {data, rest, group}; }
    // By all threads of the block.
    __device__ __forceinline__ void begin() const {
        for (int i = threadIdx.x; i < LARGEST; i += THREADS) of_matrices[i] = 0;
        if (threadIdx.x == 0) {
            for (int group = 0; group < GROUPS; ++group) stages(group).init();
            fence_barrier_init();
        }
        __syncthreads();
    }
};

// A worker's group.
struct Group {
    const Parameters& p;
    const Finish& finish;
    const Stages stages;
    const unsigned char* matrices;
    const u32 *of_matrices, *growths;
    u32* of_tiles;
    Vector<float, 2>* undone;
    int scaled = 0;  // whose turn it is among of_tiles

    __device__ __forceinline__ Group(const Parameters& p, const Finish& finish, const Shared& s)
        : p(p), finish(finish), stages(s.stages(group_number())), matrices(s.matrices),
          of_matrices(s.of_matrices), growths(s.growths),
          of_tiles(s.of_tiles + 2 * SCALES * group_number()),
          undone(s.undone + SCALES * group_number()) {}

    // A stage's tile to the panel in its place, and what undoes its scaling.
    template <class R>
    __device__ __forceinline__ Undo<R> write_tile(const Turns& turns) {
        const int own = shift_of_matrices<R>(of_matrices + R::MATRIX);
        if constexpr (sizeof(typename R::SourceT) == 2 && !R::TAKES) {
            fence_shared_writes();  // which the copies were
            return {-own, undone};
        } else {
            Numbers numbers;
            numbers.read<R>(stages.stage(turns), stages.powers_of(turns));
            u32* largest = of_tiles + scaled * SCALES;
            if (SCALED) numbers.find_largest<R>(largest);
            sync_group();  // the stage has been read, and its largest numbers are known
            const int shift = write_scaled<R>(numbers, largest, own, stages.stage(turns));
            fence_shared_writes();
            sync_group();
            return {-own - shift, undone};
        }
    }
    // The power of two, as exponent, if there is one for all.
    template <class R>
    __device__ __forceinline__ int write_scaled(const Numbers& numbers, const u32* largest, int own,
                                                unsigned char* panel) {
        constexpr int COUNT = Undo<R>::BY_COLUMNS ? R::COLUMNS : 1;
        const int thread = threadIdx.x % GROUP_THREADS;
        float power[4];
        int shift = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (R::TAKES) shift = BIAS - int(largest[0]);
            else if (SCALED && (COUNT > 1 || e == 0))
                shift = shift_to(R::MOST_EXPONENT, largest[COUNT > 1 ? thread * 4 % COUNT + e : 0]);
            power[e] = power_of_two(shift);
        }
        scaled ^= 1;
        if (SCALED && thread < COUNT) {
            of_tiles[scaled * SCALES + thread] = 0;
            if (COUNT > 1)
                undone[thread] = powers_of_two(-own - shift_to(R::MOST_EXPONENT, largest[thread]));
        }
        numbers.write<R>(panel, power, -shift);
        return shift;
    }

    template <class R>
    __device__ __forceinline__ void compute(const Taken& taken, const Turns& turns) {
        constexpr bool BY_PANEL = sizeof(typename R::TargetT) == 2;
        u64* free = &stages.free[turns.stage.place];
        const Origin origin = origin_of<R>(p, taken);
        Undo<R> undo = write_tile<R>(turns);
        Sums<R> sums;
        multiply_panel<R>(sums, matrices + R::MATRICES, stages.stage(turns));
        if (!BY_PANEL) barrier_arrive_by_warp(free);
        if constexpr (R::SECOND) {
            bool are_zeros;
            if (SCALED && sizeof(typename R::SourceT) == 2)
                undo.exponent -= scale_sums<R>(sums, are_zeros);
            const Fragments<R> fragments(sums);
            multiply_fragments<R>(sums, fragments, matrices + R::MATRICES);
        }
        if (BOUNDED) undo.bound(p, origin, shift_of_matrices<R>(of_matrices), growths);
        store_tile<R>(sums, p, finish, stages.stage(turns), origin, undo);
        if (BY_PANEL) barrier_arrive_by_warp(free);
    }
    template <class... R>
    __device__ __forceinline__ void run() {
        Taken taken;
        Turns turns;
        do {
            barrier_wait(&stages.full[turns.stage.place], turns.stage.parity);
            taken = stages.notes[turns.note.place];
            ((R::INDEX == taken.run ? compute<R>(taken, turns) : void()), ...);
            if (RUNS > 1) barrier_arrive_by_warp(&stages.written[turns.note.place]);
            turns.next();
        } while (taken.run >= 0);
    }
};

template <class... R>
struct Runs {};

// The matrices of all runs.
template <class... M>
struct MatrixList {
    __device__ __forceinline__ static void stage(const Parameters& p, const Shared& s) {
        stage_matrices<M...>(p, s.matrices, s.of_matrices, s.growths);
    }
};

// What a worker does, once its block's matrices are staged.
template <class... R>
__device__ __forceinline__ void work(const Parameters& p, const Shared& s) {
    AllMatrices::stage(p, s);
    if (BOUNDED && threadIdx.x == 0 && blockIdx.x == 0)
        (say_shift<R>(p, shift_of_matrices<R>(s.of_matrices), s.growths), ...);
    const Finish finish(Read<Parameters>{p});
    Group group(p, finish, s);
    group.run<R...>();
}

// A block. `Schedule(p, group)` gives a group's tiles.
template <class Schedule, class... R>
__device__ __forceinline__ void run_block(const Parameters& p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Shared s(shared);
    s.begin();
    if (threadIdx.x < WORKERS) {
        take_registers<Config::WORKER_REGISTERS>();
        work<R...>(p, s);
        return;
    }
    release_registers<Config::HELPER_REGISTERS>();
    const int helper = (threadIdx.x - WORKERS) / 32;
    const Stages stages = s.stages(helper % GROUPS);
    if (helper < GROUPS) {
        Schedule schedule(p, helper);
        copy_tiles<Schedule, R...>(p, stages, schedule);
    } else if constexpr (RUNS > 1) {
        if (helper < 2 * GROUPS && threadIdx.x % 32 == 0) tell_of_tiles<Schedule>(p, stages);
    }
}
template <class Schedule, class... R>
__device__ __forceinline__ void run_block(const Parameters& p, const Runs<R...>&) {
    run_block<Schedule, R...>(p);
}
