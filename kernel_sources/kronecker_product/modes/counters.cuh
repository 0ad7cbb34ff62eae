// How the tiles of a launch of several runs are shared out.
//
// Blocks take tickets from a counter. A phase's tickets are the tiles of slab s of the first run,
// of slab s - lag of the second and so on. A tile waits until all of its slab are done in the run
// before, and until the run behind is done with the slab whose place in the ring it takes. Both
// have earlier tickets, as a ring holds more slabs than the lag, so that what is waited for is
// under way whatever number of blocks run; with a lag of as many tickets as there are blocks it is
// mostly done. Where there is no ring each slab has a place of its own.
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

// Of a launch; those behind it are less than 2^32.
__device__ __forceinline__ u32 ticket_count(const Parameters& p) {
    return u32((p.batches * p.slabs + (RUNS - 1) * p.lag) * p.tickets);
}

struct Ticket {
    int run, slab, tile;
    bool exists;

    __device__ __forceinline__ Ticket(const Parameters& p, u32 number) {
        slab = int(number / u32(p.tickets));
        tile = int(number % u32(p.tickets));
        run = 0;
#pragma unroll
        for (int next = 1; next < RUNS; ++next) {
            if (run == next - 1 && tile >= p.runs[next - 1].tiles) {
                tile -= int(p.runs[next - 1].tiles);
                slab -= int(p.lag);
                run = next;
            }
        }
        exists = slab >= 0 && slab < p.batches * p.slabs;
    }

    // Calls `await(counter, count)` with what the tile waits for.
    template <class Await>
    __device__ __forceinline__ void each_count(const Parameters& p, const Counters& counters,
                                               const Await& await) const {
        if (run > 0) await(counters.done(run - 1, slab), u32(p.runs[run - 1].tiles));
        const i64 ring = p.runs[run].target.ring, before = slab - ring;
        if (run < RUNS - 1 && ring > 0 && before >= 0)
            await(counters.done(run + 1, before), u32(p.runs[run + 1].tiles));
    }
    // By one thread.
    __device__ __forceinline__ void wait(const Parameters& p, const Counters& counters) const {
        each_count(p, counters, [](const u32* at, u32 count) { wait_for_count(at, count); });
    }
    __device__ __forceinline__ bool is_ready(const Parameters& p, const Counters& counters) const {
        bool found = true;
        each_count(p, counters, [&](const u32* at, u32 count) { found &= has_count(at, count); });
        return found;
    }
};
