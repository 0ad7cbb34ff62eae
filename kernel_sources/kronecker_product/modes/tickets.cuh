// The work of a block of a launch of several runs (counters.cuh).
#pragma once

#include "kronecker_product/modes/counters.cuh"

// Whether shared memory has room for one run's matrices at a time, or they differ from batch to
// batch.
constexpr bool RESTAGED = Config::RESTAGED;

// What one thread finds for all: the run, below 0 at the end, and the tile.
struct alignas(16) Taken {
    int run;
    Tile at;
};
static_assert(sizeof(Taken) <= Config::TICKET_BYTES, "as lowering leaves room for it");

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
    const u32 count;
    u32 following;

    __device__ __forceinline__ Tickets(const Parameters& p, bool is_one)
        : p(p), counters(p), count(ticket_count(p)),
          following(is_one ? atomicAdd(counters.next, 1u) : 0) {}

    // The next tile there is, once what it reads is there.
    template <class Runs>
    __device__ __forceinline__ void take(Taken& taken) {
        while (following < count) {
            Ticket ticket(p, following);
            following = atomicAdd(counters.next, 1u);
            if (!ticket.exists) continue;
            const u32 slabs = u32(p.slabs), number = u32(ticket.slab), own = number % slabs;
            const Slab slab{number, number / slabs, own, own == slabs - 1};
            taken.run = ticket.run;
            taken.at = Tile(p.runs[ticket.run], slab, ticket.tile, Runs::columns(ticket.run));
            ticket.wait(p, counters);
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
