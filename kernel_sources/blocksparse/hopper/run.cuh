// What a CTA does: a producer warp fills the ring of stages, and warpgroups add up and store tile
// after tile.
//
// `Product` is a warpgroup's part of it:
//   SUMS                                  accumulators of a thread
//   Product(p, s, warpgroup)
//   multiply(sums, s, ring, unit, panel)  everything of one tile; answers where that lies
//   store(sums, tile)
//   end()                                 behind the last tile
#pragma once

#include "blocksparse/hopper/produce.cuh"

template <class Product, class P>
__device__ __forceinline__ void consume(const P& p, const Shared& s, int warpgroup) {
    Product product(p, s, warpgroup);
    Ring ring;
    while (true) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const u32* words = s.words + ring.stage * Config::WORDS;
        int unit = words[1], panel = words[2];
        if (unit < 0) break;
        float sums[Product::SUMS];
        Tile tile = product.multiply(sums, s, ring, unit, panel);
        product.store(sums, tile);
    }
    product.end();
}

template <class Product, class Copies, class P>
__device__ __forceinline__ void run(const P& p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(1);
    wait_for_prerequisites();  // order/order.cuh, where it is launched before
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == Config::WARPGROUPS) {
        release_registers<88>();
        if (threadIdx.x / 32 == 4 * Config::WARPGROUPS) produce<Copies>(p, s);
    } else {
        take_registers<208>();
        consume<Product>(p, s, warpgroup);
    }
}
