// The order in which hopper/schedule.cuh takes the tiles of a product: units, groups of lines of
// blocks of a head, by falling number of steps, and among equals as they come; and a counter of
// tiles, as it is once each CTA has its first one. One block.
// Floor: one launch, 2 us on an H200, of which the product's own launch hides a part.
//
// The generated source defines before it includes this file:
//   GROUP                of lines of blocks
//   PARAMETER_BYTES      what lowering makes of Parameters
#pragma once

#include "common/hopper.cuh"

constexpr int THREADS = 1024, MOST_UNITS = 4096;

struct Parameters {
    // written at each launch
    const u32* bits;  // of lines of blocks
    u32* order;
    // fixed by the plan
    int groups, units, lines, words;  // of a head, of all; lines of blocks of a head, their words
    u32 first;                        // tile that the counter gives first
    int unused;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_order(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    int* steps = reinterpret_cast<int*>(shared);
    launch_dependents();  // hopper/hopper.cuh waits where it reads what is written here
    int lane = threadIdx.x % 32;
    for (int unit = threadIdx.x / 32; unit < p.units; unit += THREADS / 32) {
        int group = unit % p.groups, present = min(GROUP, p.lines - group * GROUP);
        const u32* from = p.bits + (i64(unit / p.groups) * p.lines + group * GROUP) * p.words;
        int count = 0;
        for (int word = lane; word < p.words; word += 32) {
            u32 bits = 0;
            for (int line = 0; line < present; ++line) bits |= from[i64(line) * p.words + word];
            count += __popc(bits);
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) count += __shfl_xor_sync(0xffffffffu, count, mask);
        if (lane == 0) steps[unit] = count;
    }
    __syncthreads();
    for (int unit = threadIdx.x; unit < p.units; unit += THREADS) {
        int own = steps[unit], rank = 0;
        for (int other = 0; other < p.units; ++other)
            rank += steps[other] > own || (steps[other] == own && other < unit);
        p.order[1 + rank] = unit;
    }
    if (threadIdx.x == 0) p.order[0] = p.first;
}
