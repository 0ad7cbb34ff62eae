// The producer warp, which walks the steps of tile after tile and fills the ring of stages.
//
// Reads of struct Config: DEPTH, of a block of op(S); what ring.cuh, lists.cuh and schedule.cuh do.
// `Copies` is what brings a stage:
//   BYTES_A_PIECE, BYTES_A_PANEL   what comes for a warpgroup that has a block, and for all
//   load(...)                      the copies
#pragma once

#include "blocksparse/hopper/pieces.cuh"
#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/hopper/schedule.cuh"

constexpr u32 BOTH = (1u << Config::WARPGROUPS) - 1;  // a bit a warpgroup
constexpr u32 LAST = 1u << Config::WARPGROUPS;        // beside these: of a tile's last stage

// What is said of a stage, before its barrier is told of the bytes that come. The slot for those
// who have a word for it, of the tile's first line of blocks.
__device__ __forceinline__ void say(const Shared& s, int stage, u32 word, int unit, int panel,
                                    int slot = 0) {
    u32* words = s.words + stage * Config::WORDS;
    words[0] = word;
    words[1] = unit;
    words[2] = panel;
    if (Config::WORDS > 3) words[3] = slot;
}

// A tile and the walk of its steps, which begins to read the layout when it is made.
struct Work {
    int unit, panel;
    Tile tile;
    Walk walk;

    template <class P>
    __device__ __forceinline__ Work(const P& p, const Schedule<1>& schedule)
        : tile(find(p, schedule)),
          // behind the last tile lines that do not exist, of which nothing is read
          walk(p, p.grid, tile.head, unit < 0 ? p.grid.lines : tile.group * Config::GROUPS) {}

    __device__ __forceinline__ Tile find(const Fixed& p, const Schedule<1>& schedule) {
        schedule.now(unit, panel);
        return Tile(p, unit, panel);
    }
};

// A stage that nothing is copied to: of a tile without steps, or behind the last tile.
__device__ __forceinline__ void produce_empty(const Shared& s, Ring& ring, int unit, int panel) {
    wait_for_stage(s, ring);
    if (threadIdx.x % 32 == 0) {
        say(s, ring.stage, LAST, unit, panel);
        barrier_arrive(&s.full[ring.stage]);
    }
    ring.next();
}

// The stages of one step, of a block along the depth. Moves to the next one and answers its block,
// or -1.
template <class Copies, class P>
__device__ __forceinline__ int produce_step(const P& p, const Shared& s, Ring& ring,
                                            Work& work, int block, u32& live, int& slot) {
    constexpr int STEPS = Config::DEPTH / STEP_DEPTH;
    u32 live_then;
    int slot_then, then = work.walk.next(live_then, slot_then);
    if (Config::GROUPS == 1) live = BOTH;
#pragma unroll 1
    for (int part = 0; part < STEPS; ++part) {
        wait_for_stage(s, ring);
        bool last = then < 0 && part == STEPS - 1;
        if (threadIdx.x % 32 == 0) {
            say(s, ring.stage, live | (last ? LAST : 0), work.unit, work.panel, slot);
            barrier_expect(&s.full[ring.stage],
                           __popc(live) * Copies::BYTES_A_PIECE + Copies::BYTES_A_PANEL);
        }
        __syncwarp();
        Copies::load(p, s, work.tile, ring, slot, live, block, part);
        ring.next();
    }
    live = live_then;
    slot = slot_then;
    return then;
}

// The stages of one tile. The next one is looked up behind the first step: its place in the order,
// its bits and its ranks are three loads of which each waits for the one before, and the copies of
// the stages under way take longer.
template <class Copies, class P>
__device__ __forceinline__ void produce_tile(const P& p, const Shared& s, Ring& ring,
                                             Schedule<1>& schedule, Work& work) {
    u32 live;
    int slot, block = work.walk.next(live, slot);
    if (block < 0) produce_empty(s, ring, work.unit, work.panel);
    else block = produce_step<Copies>(p, s, ring, work, block, live, slot);
    schedule.next(nullptr);
    Work following(p, schedule);
    while (block >= 0) block = produce_step<Copies>(p, s, ring, work, block, live, slot);
    work = following;
}

// The producer warp: tile after tile, then a stage that says that there are no more.
template <class Copies, class P>
__device__ __forceinline__ void produce(const P& p, const Shared& s) {
    Ring ring;
    Schedule<1> schedule(p);
    Work work(p, schedule);
    while (work.unit >= 0) {
        schedule.take();
        produce_tile<Copies>(p, s, ring, schedule, work);
    }
    produce_empty(s, ring, NO_TILE, 0);
}
