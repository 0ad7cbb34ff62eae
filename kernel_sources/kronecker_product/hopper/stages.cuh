// Tiles on their way from device memory to a group of threads: a ring of stages in shared memory.
//
// A warp of each group's own copies its tiles, one after another, while the group computes another.
// Where tiles wait for each other (slabs.cuh), a second warp tells of those that have been written,
// so that no group waits for its own stores.
#pragma once

#include "kronecker_product/hopper/panel.cuh"

constexpr int STAGES = Config::STAGES, STAGE_BYTES = Config::STAGE_BYTES;  // of a group; of each
constexpr int THREADS = Config::THREADS;  // of a block: workers and helpers

// A tile: of a run, below 0 at the end, and of a slab of rows; whether it is its ticket's last.
struct alignas(16) Taken {
    int run;
    u32 slab, tile, is_last;
};

// Where it lies; as hopper.cuh or slabs.cuh has it.
template <class R>
__device__ __forceinline__ Origin origin_of(const Parameters& p, const Taken& taken);

// Which of a ring's places is next, and how often it has been, as mbarriers count.
template <int PLACES>
struct Turn {
    int place = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++place == PLACES) {
            place = 0;
            parity ^= 1;
        }
    }
};

// Tiles of a group that are under way: in a stage, and until they have been told of.
constexpr int NOTES = STAGES + 2;
struct Turns {
    Turn<STAGES> stage;
    Turn<NOTES> note;
    __device__ __forceinline__ void next() {
        stage.next();
        note.next();
    }
};

constexpr int ALL_STAGES = GROUPS * STAGES, ALL_NOTES = GROUPS * NOTES;
constexpr int STAGE_POWERS = RUNS > 1 && POWERS > 0 ? TILE_POWERS : 0;
constexpr int WARPS = GROUP_THREADS / 32;  // of a group

// Of a group. A stage is full once its tile has arrived, and free once it has been read. What a
// note says has been written once all warps have done so, and is told then.
struct Stages {
    unsigned char* data;
    Taken* notes;
    u64 *full, *free, *written, *told;
    short* powers;
    // Of all groups: data, and from `rest` on what else there is.
    __device__ __forceinline__ Stages(unsigned char* data, void* rest, int group) {
        notes = static_cast<Taken*>(rest) + group * NOTES;
        u64* barriers = reinterpret_cast<u64*>(static_cast<Taken*>(rest) + ALL_NOTES);
        this->data = data + group * (STAGES * STAGE_BYTES);
        full = barriers + group * STAGES;
        free = full + ALL_STAGES;
        written = barriers + 2 * ALL_STAGES + group * NOTES;
        told = written + ALL_NOTES;
        powers = reinterpret_cast<short*>(barriers + 2 * (ALL_STAGES + ALL_NOTES)) +
                 group * (STAGES * STAGE_POWERS);
    }
    __device__ __forceinline__ unsigned char* stage(const Turns& turns) const {
        return data + turns.stage.place * STAGE_BYTES;
    }
    __device__ __forceinline__ short* powers_of(const Turns& turns) const {
        return powers + turns.stage.place * STAGE_POWERS;
    }
    // By one thread of the block.
    __device__ __forceinline__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&full[stage], 33);
            barrier_init(&free[stage], WARPS);
        }
        for (int note = 0; note < NOTES; ++note) {
            barrier_init(&written[note], WARPS);
            barrier_init(&told[note], 1);
        }
    }
};

// Copies a tile's units by a warp: 16 bytes at once, zeros behind the last column of x.
template <class R, bool ALIGNED>
__device__ __forceinline__ void copy_units(const Parameters& p, const Origin& origin,
                                           unsigned char* stage) {
    using SourceT = typename R::SourceT;
    using W = Walk<R, 32>;
    const RunFixed& run = p.runs[R::INDEX];
    const Strides<R, ALIGNED> strides(run.source);
    const W walk(threadIdx.x % 32);
    const SourceT* from = static_cast<const SourceT*>(p.sources[R::INDEX]) +
                          strides.first(origin.source, origin.feature) +
                          strides.element(walk.line, walk.column);
    const i64 left = columns_left<R>(run, origin.source, walk.column);
    const int exist = int(max(min(left, i64(W::CHUNK)), i64(0)));
#pragma unroll(ALIGNED ? 64 : 1)
    for (int u = 0; u < W::UNITS; ++u) {
        const SourceT* at = from + strides.element(u * W::STEP, 0);
        unsigned char* to = stage + walk.place_of(u);
        if constexpr (ALIGNED) {
            copy_async<16>(to, at, exist * int(sizeof(SourceT)));
        } else {
#pragma unroll 1
            for (int e = 0; e < W::CHUNK; ++e)
                reinterpret_cast<SourceT*>(to)[e] =
                    e < exist ? at[e * strides.next()] : convert<SourceT>(0.0f);
        }
    }
}

// A tile, and the exponents that come with it.
template <class R>
__device__ __forceinline__ void copy_tile(const Parameters& p, const Origin& origin,
                                          unsigned char* stage, short* powers) {
    if constexpr (R::TAKES) {
        for (int i = threadIdx.x % 32; i < LINES * R::COLUMNS / 64; i += 32)
            powers[i] = __ldcg(handed<typename R::Before>(
                p, origin.source,
                u32(origin.feature) + feature_of<R>(i % LINES, i / LINES * 64)));
    }
    if (!R::BEGINS || p.runs[R::INDEX].aligned) copy_units<R, true>(p, origin, stage);
    else copy_units<R, false>(p, origin, stage);
}

// The warp that copies a group's tiles, as a schedule gives them.
template <class Schedule, class... R>
__device__ __forceinline__ void copy_tiles(const Parameters& p, const Stages& stages,
                                           Schedule& schedule) {
    const bool leads = threadIdx.x % 32 == 0;
    Taken taken{0, 0, 0, 0};
    Turns turns;
    for (int round = 0; taken.run >= 0; turns.next()) {
        if (leads) taken = schedule.next();
        if (round >= STAGES) barrier_wait(&stages.free[turns.stage.place], turns.stage.parity ^ 1);
        if (RUNS > 1 && round >= NOTES)
            barrier_wait(&stages.told[turns.note.place], turns.note.parity ^ 1);
        round = min(round + 1, NOTES);
        if (leads) stages.notes[turns.note.place] = taken;
        __syncwarp();
        taken = stages.notes[turns.note.place];
        ((R::INDEX == taken.run ? copy_tile<R>(p, origin_of<R>(p, taken), stages.stage(turns),
                                               stages.powers_of(turns))
                                : void()),
         ...);
        arrive_after_copies(&stages.full[turns.stage.place]);
        barrier_arrive_by_warp(&stages.full[turns.stage.place]);
    }
    wait_for_copies();
}

// The thread that tells of a group's tiles.
template <class Schedule>
__device__ __forceinline__ void tell_of_tiles(const Parameters& p, const Stages& stages) {
    for (Turn<NOTES> turn;; turn.next()) {
        barrier_wait(&stages.written[turn.place], turn.parity);
        const Taken taken = stages.notes[turn.place];
        if (taken.run < 0) return;
        Schedule::finish(p, taken);
        barrier_arrive(&stages.told[turn.place]);
    }
}
