// What hopper.cuh and scaled/scaled.cuh do alike of a warpgroup's part of tiles: its results go to
// device memory in parts of 64 columns.
#pragma once

#include "blocksparse/hopper/config.cuh"
#include "blocksparse/hopper/load.cuh"
#include "blocksparse/hopper/run.cuh"
#include "blocksparse/hopper/store.cuh"

struct Part {
    static constexpr int SUMS = ::SUMS;
    const Parameters& p;
    unsigned char* out;
    int warpgroup, place = 0;

    __device__ __forceinline__ Part(const Parameters& p, const Shared& s, int warpgroup)
        : p(p), out(s.out + warpgroup * OUT_PARTS * PIECE_BYTES), warpgroup(warpgroup) {}

    // `finish(sums, line, column)` finishes 32 of a thread's sums, which begin there in the result.
    template <class F>
    __device__ __forceinline__ void store_parts(float (&sums)[SUMS], const Tile& tile,
                                                const F& finish) {
        int line = tile.group * TILE_LINES + warpgroup * 64, first = tile.column * TILE_COLUMNS;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            int column = first + part * 64;
            finish(sums + part * 32, line, column);
            store_part([&](int i) { return sums[part * 32 + i]; }, p, out, place, tile, warpgroup,
                       line, column);
        }
    }
    __device__ __forceinline__ void end() const {
        if (threadIdx.x % 128 == 0) wait_for_stores();
    }
};
