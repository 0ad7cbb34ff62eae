// The sums of a CTA's warps, which meet in shared memory: of a slab in one of DEPTH places, so that
// a warp need not wait for the others before it goes on to the next slab. Behind the ring lie the
// running sums of slabs, over the ranges that a CTA has walked, if there is another.
#pragma once

#include "sparse/bitmap/ring.cuh"

using Sums = float[TILES][4];

struct Meeting {
    const Parameters& p;
    float* partials;  // [DEPTH][WARPS][PARTIAL]
    u32 own;          // this lane's of place 0
    float* running;   // [slab of the CTA][PARTIAL], from this lane's on
    int first;        // slab of the CTA
    u64 *full, *empty;
    Finish finish;

    __device__ __forceinline__ Meeting(const Parameters& p, const Share& share, u32 sums,
                                       u32 barriers, int warp)
        : p(p), first(share.first), partials(static_cast<float*>(__cvta_shared_to_generic(sums))),
          full(static_cast<u64*>(__cvta_shared_to_generic(barriers))), empty(full + DEPTH),
          finish(Read<Parameters>{p}) {
        int lane = threadIdx.x % 32;
        own = sums + warp * PARTIAL * 4 + (COLUMN_TILES == 0 ? lane / 4 * 4 : lane * 16);
        if (IN_DIGITS) own += lane % 4 * 32;
        keep(own);
        u32 behind = sums + p.running + lane * (COLUMN_TILES == 0 ? 4 : 16);
        running = static_cast<float*>(__cvta_shared_to_generic(behind));
        if constexpr (!COPY_ENGINE) return;
        if (threadIdx.x < DEPTH) {
            barrier_init(&full[threadIdx.x], WARPS);
            barrier_init(&empty[threadIdx.x], 1);
            fence_barrier_init();
        }
        __syncthreads();
    }

    // This warp's sums of the slab that is the CTA's number `turn`: of a single vector 16 rows.
    // arrive() follows, by one thread of the warp once all have got here.
    __device__ __forceinline__ void put(const Sums& sums, u32 turn) {
        int place = int(turn % DEPTH);
        u32 to = own + place * WARPS * PARTIAL * 4;
        if constexpr (COPY_ENGINE) barrier_wait(&empty[place], turn / DEPTH % 2 ^ 1);
        if constexpr (IN_DIGITS) {
            store_one(to, threadIdx.x % 4, sums[0][0]);
        } else if constexpr (COLUMN_TILES == 0) {
            store_pair(to, threadIdx.x % 4, sums[0][0], sums[0][2]);  // rows g and g + 8
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) store_sums(to + tile * 512, sums[tile]);
        }
    }

    __device__ __forceinline__ void arrive(u32 turn) { barrier_arrive(&full[turn % DEPTH]); }

    // Adds up the warps' sums of a slab, in their order, and writes them, or the running sums; by
    // one warp. Another one reads those a range later, when this one has arrived again: it writes
    // at once what is the last of a range, and all else before it arrives for the slab after next.
    __device__ __forceinline__ void write(const Walk& walk, int slab, u32 turn) {
        int lane = threadIdx.x % 32, place = int(turn % DEPTH);
        const float* from = partials + place * WARPS * PARTIAL;
        if constexpr (COPY_ENGINE) barrier_wait(&full[place], turn / DEPTH % 2);
        if (COLUMN_TILES == 0) {
            float sum[1] = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum[0] += from[w * PARTIAL + lane % 16];
            if (lane < 16 && is_complete<1>(sum, walk, slab, 0))
                store(i64(slab) * 16 + lane, walk.range, 0, sum[0]);
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                write_tile(from + tile * 128, walk, slab, tile);
        }
        if constexpr (COPY_ENGINE) barrier_arrive_by_warp(&empty[place]);
    }

    __device__ __forceinline__ void write_tile(const float* from, const Walk& walk, int slab,
                                               int tile) {
        int lane = threadIdx.x % 32;
        i64 row = i64(slab) * 16;
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            auto part = load_vector<float, 4>(from + w * PARTIAL + lane * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += part.element[e];
        }
        if (!is_complete<4>(sum, walk, slab, tile)) return;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            store(row + lane / 4 + e / 2 * 8, walk.range, tile * 8 + lane % 4 * 2 + e % 2, sum[e]);
    }

    // Adds the running sums of the ranges before. False if another range follows, for which these
    // are the running sums then.
    template <int COUNT>
    __device__ __forceinline__ bool is_complete(float (&sum)[COUNT], const Walk& walk, int slab,
                                                int tile) {
        if (SUMS) return true;
        float* at = running + (slab - first) * PARTIAL + tile * 128;
        if (walk.range > 0) {
            auto before = load_vector<float, COUNT>(at);
#pragma unroll
            for (int e = 0; e < COUNT; ++e) sum[e] = before.element[e] + sum[e];
        }
        if (walk.is_last(p)) return true;
        Vector<float, COUNT> x;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) x.element[e] = sum[e];
        store_vector(at, x);
        return false;
    }

    __device__ __forceinline__ void store(i64 row, int range, int n, float sum) {
        if (row >= p.rows || n >= p.columns) return;
        if (SUMS) {
            static_cast<float*>(p.out)[(i64(range) * p.columns + n) * p.rows + row] = sum;
        } else {
            OutputT* to = static_cast<OutputT*>(p.out) + n * p.out_vector_stride;
            to[row * p.out_row_stride] = convert<OutputT>(finish(sum, row));
        }
    }
};
