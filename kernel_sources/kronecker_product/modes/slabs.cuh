// Several runs of factors (run.cuh), one behind the other, in one launch: x is cut into slabs of
// rows (of columns, with the factors on the left), and what one run makes of a slab waits for the
// next run in a ring of so few slabs that they stay in the L2 cache. Two passes of separate launches
// take 2.0 times the time of one on an H200, through such a ring 1.33 times.
//
// Blocks take tickets from a counter. A phase's tickets are the tiles of slab s of the first run, of
// slab s - lag of the second and so on. A tile waits until all of its slab are done in the run
// before, and until the run behind is done with the slab whose place in the ring it takes. Both have
// earlier tickets, as a ring holds more slabs than the lag, so that what is waited for is under way
// whatever number of blocks run; with a lag of as many tickets as there are blocks it is mostly done.
//
// The generated source defines, beside what run.cuh asks for, before it includes this file:
//   Run0, Run1, ...              of RUNS runs, and RUN_LIST, all of them
//   RESTAGED                     whether shared memory has room for one run's matrices at a time, or
//                                they differ from batch to batch
#pragma once

#include "common/tickets.cuh"
#include "kronecker_product/modes/run.cuh"

// Cleared by a launch before: the next ticket, then the tiles that are done, of each run and slab.
struct Counters {
    u32* next;
    i64 slabs;
    __device__ __forceinline__ explicit Counters(const Parameters& p)
        : next(p.counters), slabs(p.batches * p.slabs) {}
    __device__ __forceinline__ u32* done(int run, i64 slab) const {
        return next + 1 + run * slabs + slab;
    }
};

struct Ticket {
    int run;
    i64 slab, tile;
    bool exists;

    __device__ __forceinline__ Ticket(const Parameters& p, i64 number) {
        slab = number / p.tickets;
        tile = number % p.tickets;
        run = 0;
#pragma unroll
        for (int next = 1; next < RUNS; ++next) {
            if (run == next - 1 && tile >= p.runs[next - 1].tiles) {
                tile -= p.runs[next - 1].tiles;
                slab -= p.lag;
                run = next;
            }
        }
        exists = slab >= 0 && slab < p.batches * p.slabs;
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

struct Block {
    const Parameters& p;
    const Finish& finish;
    AccT *tile, *matrices;
    int staged_run;
    i64 staged_batch;

    template <class R>
    __device__ __forceinline__ void stage(i64 batch) {
        if (!RESTAGED || (staged_run == R::INDEX && staged_batch == batch)) return;
        R::Modes::stage(matrices, p, batch);  // which no thread reads any more
        staged_run = R::INDEX;
        staged_batch = batch;
    }
    template <class R>
    __device__ __forceinline__ void compute(const Ticket& ticket) {
        i64 own = ticket.slab % p.slabs;
        const Slab slab{ticket.slab, ticket.slab / p.slabs, own, own == p.slabs - 1};
        const RunFixed& run = p.runs[R::INDEX];
        Tile at(run, slab, ticket.tile, R::COLUMNS);
        if (at.columns == 0) return;
        stage<R>(slab.batch);
        load_tile<R>(tile, p, run, p.sources[R::INDEX], at, 0, R::INPUTS);
        wait_for_copies();
        __syncthreads();
        R::Modes::template apply_all<R>(tile, matrices, run, p.targets[R::INDEX], at, finish);
    }
};

template <class... R>
struct Runs {
    __device__ __forceinline__ static void stage(Block& block) {
        if (!RESTAGED) (R::Modes::stage(block.matrices, block.p, 0), ...);
    }
    __device__ __forceinline__ static void compute(Block& block, const Ticket& ticket) {
        ((R::INDEX == ticket.run ? block.template compute<R>(ticket) : void()), ...);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_slabs(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    AccT* tile = reinterpret_cast<AccT*>(shared);
    Finish finish(Read<Parameters>{p});
    Block block{p, finish, tile, tile + TILE, -1, -1};
    i64* taken = reinterpret_cast<i64*>(block.matrices + MATRICES);
    Runs<RUN_LIST>::stage(block);
    const Counters counters(p);
    const i64 count = (p.batches * p.slabs + (RUNS - 1) * p.lag) * p.tickets;
    i64 following = 0;
    if (threadIdx.x == 0) following = atomicAdd(counters.next, 1u);
    while (true) {
        if (threadIdx.x == 0) {
            *taken = following;
            if (following < count) {
                Ticket ticket(p, following);
                following = atomicAdd(counters.next, 1u);  // arrives while this one is computed
                if (ticket.exists) wait_for_tiles(p, counters, ticket);
            }
        }
        __syncthreads();
        i64 number = *taken;
        if (number >= count) return;
        Ticket ticket(p, number);
        if (ticket.exists) Runs<RUN_LIST>::compute(block, ticket);
        __syncthreads();
        if (ticket.exists && threadIdx.x == 0)
            add_release(counters.done(ticket.run, ticket.slab), 1);
    }
}
