// A warp's chunks on their way from device memory, some ahead of the one it decodes.
#pragma once

#include "common/async_copy.cuh"
#include "common/hopper.cuh"
#include "sparse/bitmap/config.cuh"
#include "sparse/bitmap/instructions.cuh"

// A unit: a slab of a range of chunk columns. Walked, as a division costs as much as 30 entries.
struct Walk {
    int slab, range, first, chunks;

    __device__ __forceinline__ Walk(const Parameters& p, int range, int slab)
        : slab(slab), range(range) {
        first = range * p.range_chunks + min(range, p.wider_ranges);
        chunks = p.range_chunks + (range < p.wider_ranges);
    }

    // Where the unit's chunk of a warp begins and ends in `offsets`.
    __device__ __forceinline__ const u32* place(const Parameters& p, int warp) const {
        return p.offsets + i64(slab) * p.kchunks + first + warp;
    }

    __device__ __forceinline__ bool is_last(const Parameters& p) const {
        return range + 1 == p.ranges;
    }
};

// A CTA's units: those of each range lie one behind the other, from the slab `first` to `end`.
struct Share {
    int first, end, begin;  // begin: the number of its first unit among those
    int units;

    __device__ __forceinline__ Share(const Parameters& p, int cta) {
        begin = cta * p.cta_units + min(cta, p.longer_ctas);
        units = p.cta_units + (cta < p.longer_ctas);
        first = 0;
        end = p.slabs;
        if (SUMS) return;
        first = begin;
        end = begin + units;
        begin = 0;
        units *= p.ranges;
    }

    __device__ __forceinline__ Walk at(const Parameters& p, int unit) const {
        unit += begin;
        return Walk(p, unit / (end - first), first + unit % (end - first));
    }
};

// A slot holds a chunk and 16 bytes more, of which decoding reads up to 12 for nothing and the last
// 8 are free for the barrier of the slot behind: one address serves for a chunk and its barrier.
struct Ring {
    const Parameters& p;
    const Share& share;
    u32 begin, end, chunk;  // in shared memory; chunk: that of the warp's next unit
    u32 parity;             // of its barrier
    int warp, range;        // of the unit that is asked for next
    int run, left;          // units to ask for: of its range, behind it
    const u32* place;       // its chunk's, if there is one
    bool exists;
    u32 from, to;           // read when it is next: used later, so that no warp waits for them
    // 0, of which the compiler knows no more, of codes, than that lanes may differ: what is read of
    // an address that is the same in all of them it may move to where all have it, and wait there.
    int apart = CODES == PLAIN ? 0 : threadIdx.x % 32 * (gridDim.y - 1);

    __device__ __forceinline__ Ring(const Parameters& p, const Share& share, u32 slots, int warp)
        : p(p), share(share), parity(0), warp(warp), left(share.units) {
        int bytes = p.stages * p.slot_bytes, lane = threadIdx.x % 32;
        begin = uniform(slots + warp * bytes);
        end = begin + bytes;
        if (COPY_ENGINE && lane < p.stages) {
            barrier_init(barrier(begin + lane * p.slot_bytes), 1);
            fence_barrier_init();
        }
        __syncwarp();
        // The places of the first chunks together: one after the other they would take 1 us each.
        if (lane <= p.stages && lane < share.units) {
            Walk walk = share.at(p, lane);
            if (warp < walk.chunks) prefetch(walk.place(p, warp));
        }
        enter(share.at(p, 0));
        read_place();
        chunk = begin;
        if (leads()) copy();
        advance();
        if constexpr (!COPY_ENGINE) fill();
    }

    // Asks for the chunks of all slots behind the first. With the copy engine once the first is
    // there, which all at once would delay: 3 us of codes, 1 to 2 of 16-bit values on an H200.
    __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (chunk = begin + p.slot_bytes; chunk != end; chunk += p.slot_bytes) {
            if (leads()) copy();
            advance();
        }
        chunk = begin;
    }

    __device__ static u64* barrier(u32 chunk) {
        return static_cast<u64*>(__cvta_shared_to_generic(chunk - 16));
    }

    // The one thread of a warp that asks and arrives.
    __device__ static bool leads() {
        if constexpr (COPY_ENGINE) return elect_lane();
        return true;
    }

    __device__ __forceinline__ void enter(const Walk& ahead) {
        range = ahead.range;
        run = min(share.end - ahead.slab, left);
        left -= run;
        exists = run > 0 && warp < ahead.chunks;
        place = ahead.place(p, warp);
    }

    __device__ __forceinline__ void read_place() {
        from = to = 0;
        if (!exists) return;
        from = place[apart];
        to = place[apart + 1];
    }

    // Asks for the chunk whose place has been read, by the thread that leads(): no bytes where the
    // warp has none, as behind the last unit.
    __device__ __forceinline__ void copy() {
        int count = int(to - from);
        const unsigned char* source = p.data + i64(from) * 16;
        void* target = __cvta_shared_to_generic(chunk);
        if constexpr (COPY_ENGINE) {
            barrier_expect(barrier(chunk), count * 16);
            if (count) load_bytes(target, source, barrier(chunk), count * 16);
        } else {
            for (int i = threadIdx.x % 32; i < count; i += 32)
                copy_async<16>(static_cast<unsigned char*>(target) + i * 16, source + i * 16, 16);
        }
    }

    // Reads the place of the chunk behind the one that has been asked for.
    __device__ __forceinline__ void advance() {
        place += p.kchunks;
        if (--run == 0) enter(Walk(p, range + 1, share.first));
        read_place();
    }

    // Until the chunk is there.
    __device__ __forceinline__ void wait() {
        if constexpr (COPY_ENGINE) {
            barrier_wait(barrier(chunk), parity);
        } else {
            wait_for_copies();
            __syncwarp();
        }
    }

    // On to the next one.
    __device__ __forceinline__ void step() {
        chunk += p.slot_bytes;
        if (chunk == end) {
            chunk = begin;
            parity ^= 1;
        }
    }
};
