// Several runs of factors (hopper.cuh) in one launch: what one makes of a slab of rows waits for
// the next in the L2 cache, as modes/slabs.cuh has it: where its result will be, or in a ring. Each
// group of threads takes tickets of its own (modes/counters.cuh). The next one is asked for while a
// tile is multiplied; if what it reads is there by then, it is read before the tile after that.
//
// The generated source defines, beside what hopper.cuh asks for but Run, before it includes this
// file:
//   Run0, Run1, ...              of RUNS runs, and RUN_LIST, all of them
//   SLAB_ROWS                    rows of a slab
#pragma once

#include "kronecker_product/hopper/tile.cuh"
#include "kronecker_product/modes/counters.cuh"

// What one thread of a group finds for all: the run, below 0 at the end, its tile, and whether what
// that waits for is done.
struct Taken {
    int run;
    u32 slab, tile, is_ready;
};

// A group's tickets, by one of its threads.
struct Tickets {
    const Parameters& p;
    const Counters counters;
    const u32 count;
    u32 following;  // number of a ticket that is asked for
    Taken next;

    __device__ __forceinline__ explicit Tickets(const Parameters& p)
        : p(p), counters(p), count(ticket_count(p)), following(0), next{} {
        if (leads_group()) following = atomicAdd(counters.next, 1u);
    }
    // The next ticket there is. Tiles of rows that the last slab lacks are done.
    __device__ __forceinline__ void find() {
        next = {-1, 0, 0, 1};
        while (following < count) {
            const Ticket ticket(p, following);
            following = atomicAdd(counters.next, 1u);
            if (!ticket.exists) continue;
            const Taken found{ticket.run, u32(ticket.slab), u32(ticket.tile), 0};
            const u32 row_tiles = u32(p.runs[found.run].tiles) / SLAB_ROWS;
            const i64 rows = p.runs[0].columns - i64(found.slab) * SLAB_ROWS;
            if (found.tile >= rows * row_tiles) {
                finish(found);
                continue;
            }
            next = found;
            next.is_ready = ticket.is_ready(p, counters);
            return;
        }
    }
    __device__ __forceinline__ void wait(const Taken& taken) const {
        Ticket ticket(p, 0);
        ticket.run = taken.run;
        ticket.slab = int(taken.slab);
        ticket.wait(p, counters);
    }
    // Once all of the group have written a tile.
    __device__ __forceinline__ void finish(const Taken& taken) const {
        add_release(counters.done(taken.run, taken.slab), 1);
    }
};

// Rows of a ring are those of slabs in turn.
__device__ __forceinline__ i64 row_of(const Side& side, u32 slab, u32 own) {
    const u32 place = side.ring ? slab % u32(side.ring) : slab;
    return i64(place) * SLAB_ROWS + own;
}
template <class R>
__device__ __forceinline__ Origin origin_of(const Parameters& p, const Taken& taken) {
    const RunFixed& run = p.runs[R::INDEX];
    const u32 slab = taken.slab, own = taken.tile / R::ROW_TILES;
    const i64 source = row_of(run.in, slab, own), target = row_of(run.out, slab, own);
    const i64 row = i64(slab) * SLAB_ROWS + own;
    return {source, target, row, feature_of_tile<R>(taken.tile % R::ROW_TILES)};
}

struct Group {
    const Parameters& p;
    const Finish& finish;
    const Shared& s;
    Tickets& tickets;
    Taken& published;  // to all threads of the group
    Numbers numbers;

    __device__ __forceinline__ void publish() const {
        if (leads_group()) published = tickets.next;
    }
    __device__ __forceinline__ void find() const {
        if (leads_group()) tickets.find();
    }
    template <class R>
    __device__ __forceinline__ void load(const Taken& taken) {
        numbers.load<R>(p, origin_of<R>(p, taken));
    }
    // A tile to its panel, and the next ticket to all threads; what undoes the scaling.
    template <class R>
    __device__ __forceinline__ int write(int turn) const {
        return write_tile<R>(numbers, s, turn, [&] { publish(); }).exponent;
    }
    template <class R>
    __device__ __forceinline__ void compute(const Taken& taken, int exponent) const {
        const Undo<R> undo{exponent, s.undone};
        compute_tile<R>(p, finish, s, origin_of<R>(p, taken), undo, [&] { find(); });
    }
    template <class... R>
    __device__ __forceinline__ void run() {
        find();
        publish();
        find();
        sync_group();
        Taken taken = published;
        bool is_loaded = false;
#pragma unroll 1
        for (int turn = 0; taken.run >= 0; turn ^= 1) {
            if (!is_loaded) {
                if (leads_group()) tickets.wait(taken);
                sync_group();
                ((R::INDEX == taken.run ? load<R>(taken) : void()), ...);
            }
            int exponent = 0;
            ((R::INDEX == taken.run ? void(exponent = write<R>(turn)) : void()), ...);
            const Taken next = published;
            is_loaded = next.is_ready;
            if (is_loaded) ((R::INDEX == next.run ? load<R>(next) : void()), ...);
            ((R::INDEX == taken.run ? compute<R>(taken, exponent) : void()), ...);
            sync_group();
            if (leads_group()) tickets.finish(taken);
            taken = next;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_product_hopper_slabs(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Shared s(shared);
    stage_all<RUN_LIST>(p, s);
    const Finish finish(Read<Parameters>{p});
    Tickets tickets(p);
    Taken* taken = static_cast<Taken*>(s.end());
    Group group{p, finish, s, tickets, taken[group_number()], {}};
    group.run<RUN_LIST>();
}
