// Several runs of factors (run.cuh), one behind the other, in one launch: x is cut into slabs of
// rows (of columns, with the factors on the left), and what one run makes of a slab waits for the
// next run in a ring of so few slabs that they stay in the L2 cache. Two passes of separate launches
// take 2.0 times the time of one on an H200, through such a ring 1.33 times.
//
// Blocks take tickets from a counter. A phase's tickets are the tiles of slab s of the first run, of
// slab s - 1 of the second and so on. A tile waits until all of its slab are done in the run before,
// and until the run behind is done with the slab whose place in the ring it takes; both have earlier
// tickets, so that what is waited for is under way whatever number of blocks run.
//
// The generated source defines, beside what run.cuh asks for, before it includes this file:
//   Run0, Run1, ...              of RUNS runs, and RUN_LIST, all of them
#pragma once

#include "common/tickets.cuh"
#include "kronecker_product/modes/run.cuh"

// In the place of Pointers::counters, cleared by a launch before: the next ticket, then the tiles
// that are done, of each run and slab.
struct Counters {
    u32* next;
    i64 slabs;
    __device__ __forceinline__ u32* done(int run, i64 slab) const {
        return next + 1 + run * slabs + slab;
    }
};

struct Ticket {
    int run;
    i64 slab, tile;

    __device__ __forceinline__ Ticket(const Parameters& p, i64 number) {
        i64 phase = number / p.tickets;
        tile = number % p.tickets;
        run = 0;
#pragma unroll
        for (int next = 1; next < RUNS; ++next) {
            if (run == next - 1 && tile >= p.runs[next - 1].tiles) {
                tile -= p.runs[next - 1].tiles;
                run = next;
            }
        }
        slab = phase - run;
    }
};

// By one thread.
__device__ __forceinline__ void wait_for_tiles(const Parameters& p, const Counters& counters,
                                               const Ticket& ticket) {
    int run = ticket.run;
    if (run > 0) wait_for_count(counters.done(run - 1, ticket.slab), u32(p.runs[run - 1].tiles));
    i64 before = ticket.slab - p.runs[run].out.ring;
    if (run < RUNS - 1 && before >= 0)
        wait_for_count(counters.done(run + 1, before), u32(p.runs[run + 1].tiles));
}

template <class R>
__device__ __forceinline__ void tile_of(AccT* tile, const AccT* matrices, const Parameters& p,
                                        const Ticket& ticket, const Finish& finish) {
    const RunFixed& run = p.runs[R::INDEX];
    Tile at(run, 0, ticket.slab, ticket.slab == p.slabs - 1, ticket.tile, R::COLUMNS);
    if (at.columns == 0) return;
    load_tile<R>(tile, p, run, p.sources[R::INDEX], at, 0, R::INPUTS);
    wait_for_copies();
    __syncthreads();
    R::Modes::template apply_all<R>(tile, matrices, run, p.targets[R::INDEX], at, finish);
}

template <class... R>
struct Runs {
    __device__ __forceinline__ static void stage(AccT* matrices, const Parameters& p) {
        (R::Modes::stage(matrices, p, 0), ...);
    }
    __device__ __forceinline__ static void compute(AccT* tile, const AccT* matrices,
                                                   const Parameters& p, const Ticket& ticket,
                                                   const Finish& finish) {
        ((R::INDEX == ticket.run ? tile_of<R>(tile, matrices, p, ticket, finish) : void()), ...);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_slabs(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    AccT* tile = reinterpret_cast<AccT*>(shared);
    AccT* matrices = tile + TILE;
    i64* taken = reinterpret_cast<i64*>(matrices + MATRICES);
    Runs<RUN_LIST>::stage(matrices, p);
    Finish finish(Read<Parameters>{p});
    Counters counters{p.counters, p.slabs};
    const i64 count = (p.slabs + RUNS - 1) * p.tickets;
    i64 following = 0;
    if (threadIdx.x == 0) following = atomicAdd(counters.next, 1u);
    while (true) {
        if (threadIdx.x == 0) {
            *taken = following;
            // The next one's number arrives while this one is computed.
            if (following < count) {
                Ticket ticket(p, following);
                following = atomicAdd(counters.next, 1u);
                if (ticket.slab >= 0 && ticket.slab < p.slabs)
                    wait_for_tiles(p, counters, ticket);
            }
        }
        __syncthreads();
        i64 number = *taken;
        if (number >= count) return;
        Ticket ticket(p, number);
        if (ticket.slab < 0 || ticket.slab >= p.slabs) {
            __syncthreads();  // before the next number takes this one's place
            continue;
        }
        Runs<RUN_LIST>::compute(tile, matrices, p, ticket, finish);
        __syncthreads();
        if (threadIdx.x == 0) add_release(counters.done(ticket.run, ticket.slab), 1);
    }
}
