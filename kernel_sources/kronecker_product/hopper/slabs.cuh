// Several runs of factors (hopper.cuh) in one launch: what one makes of a slab of rows waits for
// the next in the L2 cache, as modes/slabs.cuh has it: where its result will be, or in a ring. Each
// group of threads takes tickets of its own (modes/counters.cuh).
//
// Facts, struct Fixed, AllRuns and AllMatrices: class HopperSlabs of
// kernlib/families/kronecker_product/kernels/hopper.py.
#pragma once

#include "kronecker_product/hopper/tile.cuh"
#include "kronecker_product/modes/counters.cuh"

constexpr int SLAB_ROWS = Config::SLAB_ROWS;  // rows of a slab

// A group's tickets, each of several tiles of a row.
struct Tickets {
    const Parameters& p;
    const Counters counters;
    const u32 count;
    u32 following;  // number of a ticket that is asked for
    Taken taken;

    __device__ __forceinline__ Tickets(const Parameters& p, int)
        : p(p), counters(p), count(ticket_count(p)), following(0), taken{-1, 0, 0, 1} {
        if (threadIdx.x % 32 == 0) following = atomicAdd(counters.next, 1u);
    }
    __device__ __forceinline__ Taken next() {
        ++taken.tile;
        if (taken.is_last) take();
        else taken.is_last = (taken.tile + 1) % p.runs[0].ticket_tiles == 0;
        return taken;
    }
    // The next ticket there is, once what it waits for is done. Those of rows that the last slab
    // lacks are done.
    __device__ __forceinline__ void take() {
        const u32 tiles = p.runs[0].ticket_tiles;
        taken.run = -1;
        while (following < count) {
            const Ticket ticket(p, following);
            following = atomicAdd(counters.next, 1u);
            if (!ticket.exists) continue;
            taken = {ticket.run, u32(ticket.slab), u32(ticket.tile) * tiles, 1};
            const u32 row_tiles = u32(p.runs[taken.run].tiles) * tiles / SLAB_ROWS;
            const i64 rows = p.runs[0].columns - i64(taken.slab) * SLAB_ROWS;
            if (taken.tile < rows * row_tiles) {
                ticket.wait(p, counters);
                taken.is_last = tiles == 1;
                return;
            }
            finish(p, taken);
            taken.run = -1;
        }
    }
    // Once all of a group have written a tile.
    __device__ __forceinline__ static void finish(const Parameters& p, const Taken& taken) {
        if (taken.is_last) add_release(Counters(p).done(taken.run, taken.slab), 1);
    }
};

// Rows of a ring are those of slabs in turn.
__device__ __forceinline__ i64 row_of(const Layout& side, u32 slab, u32 own) {
    const u32 place = side.ring ? slab % u32(side.ring) : slab;
    return i64(place) * SLAB_ROWS + own;
}
template <class R>
__device__ __forceinline__ Origin origin_of(const Parameters& p, const Taken& taken) {
    const RunFixed& run = p.runs[R::INDEX];
    const u32 slab = taken.slab, own = taken.tile / R::ROW_TILES;
    const i64 source = row_of(run.source, slab, own), target = row_of(run.target, slab, own);
    const i64 row = i64(slab) * SLAB_ROWS + own;
    return {source, target, row, feature_of_tile<R>(taken.tile % R::ROW_TILES)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_product_hopper_slabs(const __grid_constant__ Parameters p) {
    run_block<Tickets>(p, AllRuns{});
}
