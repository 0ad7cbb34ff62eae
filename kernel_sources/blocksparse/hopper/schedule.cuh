// Which tiles a CTA computes, one after the other.
#pragma once

#include "blocksparse/hopper/place.cuh"
#include "common/hopper.cuh"

constexpr int NO_TILE = -1;

// Panel after panel, so that CTAs that run together share one in L2; in a panel unit after unit,
// the longest first. In the last panels, together about two tiles a CTA, unit after unit: so the
// shortest tiles of all come last. CTAs take tiles from a counter; without an order, of few tiles,
// each its own. At 4096 and density .25 of blocks of 128 tiles by turns took 1.33 of the mean, so
// 1.06, by count of steps.
//
// Walked by WARPS whole warps together, whose threads begin at a multiple of 128 if they are
// several.
template <int WARPS>
struct Schedule {
    const Fixed& p;
    const Order& order;
    u32 index, taken;  // what is taken next: with an order the first thread's alone

    template <class P>
    __device__ __forceinline__ explicit Schedule(const P& p)
        : p(p), order(p), index(blockIdx.x), taken(0) {}

    __device__ __forceinline__ bool leads() const { return threadIdx.x % (32 * WARPS) == 0; }
    // Asks for the next tile, when the current one begins: next() comes later, and need not wait.
    __device__ __forceinline__ void take() {
        if (!p.ordered) taken = index + gridDim.x;
        else if (leads()) taken = atomicAdd(order.order, 1u);
    }

    // The unit and panel of the tile, unit NO_TILE behind the last one. `shared` is a word for the
    // warps to tell each other.
    __device__ __forceinline__ void now(int& unit, int& panel) const {
        unit = panel = NO_TILE;
        if (index >= p.tiles) return;
        u32 units = p.units, before = (p.panels - p.last) * units, at = index;
        if (at < before) {
            panel = at / units;
            unit = at % units;
        } else {
            at -= before;
            panel = p.panels - p.last + at % p.last;
            unit = at / p.last;
        }
        if (p.ordered) unit = order.order[1 + unit];
    }
    __device__ __forceinline__ void next(u32* shared) {
        if (WARPS == 1) {
            index = __shfl_sync(0xffffffffu, taken, 0);
        } else {
            if (leads()) *shared = taken;
            sync_threads(1 + Config::WARPGROUPS, 32 * WARPS);
            index = *shared;
            sync_threads(1 + Config::WARPGROUPS, 32 * WARPS);
        }
    }
};
