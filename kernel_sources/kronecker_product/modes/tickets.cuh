// How the blocks of a launch of several runs share out its tiles.
//
// Blocks take tickets from a counter. A phase's tickets are the tiles of slab s of the first run,
// of slab s - lag of the second and so on. A tile waits until all of its slab are done in the run
// before, and until the run behind is done with the slab whose place in the ring it takes. Both
// have earlier tickets, as a ring holds more slabs than the lag, so that what is waited for is
// under way whatever number of blocks run; with a lag of as many tickets as there are blocks it is
// mostly done.
//
// The generated source defines, beside what run.cuh asks for:
//   TICKET_BYTES                 of shared memory, for what one thread finds for all
//   RESTAGED                     whether shared memory has room for one run's matrices at a time,
//                                or they differ from batch to batch
#pragma once

#include "common/tickets.cuh"
#include "kronecker_product/modes/parameters.cuh"

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

// What one thread finds for all: the run, below 0 at the end, and the tile.
struct alignas(16) Taken {
    int run;
    Tile at;
};
static_assert(sizeof(Taken) <= TICKET_BYTES, "as lowering leaves room for it");

// The runs of a launch, for a Block that knows how to stage and compute each of them.
template <class... R>
struct Runs {
    __device__ __forceinline__ static int columns(int run) {
        int found = 0;
        ((found = R::INDEX == run ? R::COLUMNS : found), ...);
        return found;
    }
    template <class Block>
    __device__ __forceinline__ static void stage(Block& block) {
        if (!RESTAGED) (block.template stage<R>(0), ...);
    }
    template <class Block>
    __device__ __forceinline__ static void compute(Block& block, int run, const Tile& at) {
        ((R::INDEX == run ? compute_one<R>(block, at) : void()), ...);
    }
    template <class R_, class Block>
    __device__ __forceinline__ static void compute_one(Block& block, const Tile& at) {
        if (at.columns == 0) return;
        if (RESTAGED && (block.staged_run != R_::INDEX || block.staged_batch != at.slab.batch)) {
            block.template stage<R_>(at.slab.batch);  // over what no thread reads any more
            block.staged_run = R_::INDEX;
            block.staged_batch = at.slab.batch;
        }
        block.template compute<R_>(at);
    }
};

// The tickets of a block, by one thread, which asks for the next one while another is computed.
struct Tickets {
    const Parameters& p;
    const Counters counters;
    const i64 count;
    i64 following;

    __device__ __forceinline__ Tickets(const Parameters& p, bool is_one)
        : p(p), counters(p), count((p.batches * p.slabs + (RUNS - 1) * p.lag) * p.tickets),
          following(is_one ? atomicAdd(counters.next, 1u) : 0) {}

    // The next tile there is, once what it reads is there.
    template <class Runs>
    __device__ __forceinline__ void take(Taken& taken) {
        while (following < count) {
            Ticket ticket(p, following);
            following = atomicAdd(counters.next, 1u);
            if (!ticket.exists) continue;
            i64 own = ticket.slab % p.slabs;
            const Slab slab{ticket.slab, ticket.slab / p.slabs, own, own == p.slabs - 1};
            taken.run = ticket.run;
            taken.at = Tile(p.runs[ticket.run], slab, ticket.tile, Runs::columns(ticket.run));
            wait_for_tiles(p, counters, ticket);
            return;
        }
        taken.run = -1;
    }
};

// The work of a block: `block` computes a tile of a run in its slab.
template <class Runs, class Block>
__device__ __forceinline__ void take_tickets(const Parameters& p, Taken& taken, Block& block) {
    Tickets tickets(p, threadIdx.x == 0);
    while (true) {
        if (threadIdx.x == 0) tickets.take<Runs>(taken);
        __syncthreads();
        const int run = taken.run;
        if (run < 0) return;
        const Tile at = taken.at;
        Runs::compute(block, run, at);
        __syncthreads();
        if (threadIdx.x == 0) add_release(tickets.counters.done(run, at.slab.number), 1);
    }
}
