// Shared memory: stages that the producer fills and warpgroups multiply, and parts of results.
//
// Reads of struct Config:
//   STAGES, STAGE_BYTES   under way, and the size of one
//   OUT_BYTES             of parts of results on their way out
//   WORDS                 of each stage, which say what of it is multiplied
//   WARPGROUPS            that multiply
#pragma once

#include "common/hopper.cuh"

struct Shared {
    static constexpr int STAGES = Config::STAGES;

    unsigned char* stages;
    unsigned char* out;
    u64 *full, *empty;
    u32* words;  // WORDS of each stage, which say what of it is multiplied, and one more

    __device__ __forceinline__ explicit Shared(unsigned char* base) {
        stages = base + (-shared_address(base) & 1023);  // as the swizzle has it
        out = stages + STAGES * Config::STAGE_BYTES;
        full = reinterpret_cast<u64*>(out + Config::OUT_BYTES);
        empty = full + STAGES;
        words = reinterpret_cast<u32*>(empty + STAGES);
    }
    // By all threads of the block, with so many arrivals at a stage that is full.
    __device__ __forceinline__ void begin(int arrivals) const {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(&full[stage], arrivals);
                barrier_init(&empty[stage], 4 * Config::WARPGROUPS);
            }
            fence_barrier_init();
        }
        __syncthreads();
    }
};

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == Config::STAGES) stage = 0, parity ^= 1;
    }
};

// Until a stage is free, for all lanes: none of them may still be waiting when it is filled, freed
// and filled again.
__device__ __forceinline__ void wait_for_stage(const Shared& s, const Ring& ring) {
    barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
    __syncwarp();
}
