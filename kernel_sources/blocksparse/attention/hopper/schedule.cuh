// Which tiles of rows a team computes, one after the other, walked by its producer warp.
#pragma once

#include "blocksparse/attention/hopper/parameters.cuh"

// A unit is a tile of rows of a head of the layout, a panel what shares it: the batches and heads
// that one head of the layout serves. Panel after panel, so that teams that run together share K
// and V in L2; in a panel unit after unit, the longest first, of a causal matrix those of the last
// rows. In the last panels, together about two tiles a team, unit after unit: so the shortest tiles
// of all come last. Teams take tiles from a counter; without an order each its own, by turns.
struct Schedule {
    const Parameters& p;
    u32 index, taken;  // the first lane's, with an order

    __device__ __forceinline__ Schedule(const Parameters& p, int team)
        : p(p), index(team * gridDim.x + blockIdx.x), taken(0) {}

    // Asks for the next tile, when the current one begins: next() comes later, and need not wait.
    __device__ __forceinline__ void take() {
        if (!p.ordered) taken = index + TEAMS * gridDim.x;
        else if (threadIdx.x % 32 == 0) taken = atomicAdd(p.order, 1u);
    }
    __device__ __forceinline__ void next() { index = __shfl_sync(ALL_LANES, taken, 0); }
};

// A tile of rows: of a batch and head, and the layout's head for these.
struct Place {
    int tile, head, batch, layout;

    // False behind the last one.
    __device__ __forceinline__ bool find(const Schedule& schedule) {
        const Parameters& p = schedule.p;
        u32 at = schedule.index, units = p.units, before = (p.panels - p.last) * units;
        if (at >= p.tiles) return false;
        u32 panel = at / units, unit = at % units;
        if (at >= before) {
            at -= before;
            panel = p.panels - p.last + at % p.last;
            unit = at / p.last;
        }
        if (CAUSAL && !WINDOW) {
            u32 layouts = units / p.row_tiles;
            unit = unit % layouts * p.row_tiles + (p.row_tiles - 1 - unit / layouts);
        } else if (p.ordered) {
            unit = p.order[1 + unit];
        }
        u32 own = unit / p.row_tiles;
        tile = unit % p.row_tiles;
        head = own % p.unit_heads + panel % p.panel_heads;
        batch = own / p.unit_heads + panel / p.panel_heads;
        layout = batch * p.layout_batch + head * p.layout_head;
        return true;
    }
};
