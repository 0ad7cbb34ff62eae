// The sums of a CTA's warps, which meet in shared memory: of a slab in one of DEPTH places, so that
// a warp need not wait for the others before it goes on to the next slab.
#pragma once

using Sums = float[TILES][4];

struct Meeting {
    const Parameters& p;
    float* partials;  // [DEPTH][WARPS][PARTIAL]
    u32 own;          // this lane's of place 0
    u64 *full, *empty;
    Finish finish;

    __device__ __forceinline__ Meeting(const Parameters& p, u32 sums, u32 barriers, int warp)
        : p(p), partials(static_cast<float*>(__cvta_shared_to_generic(sums))),
          full(static_cast<u64*>(__cvta_shared_to_generic(barriers))), empty(full + DEPTH),
          finish(Read<Parameters>{p}) {
        int lane = threadIdx.x % 32;
        own = sums + warp * PARTIAL * 4 + (COLUMN_TILES == 0 ? lane / 4 * 4 : lane * 16);
#if IN_DIGITS
        own += lane % 4 * 32;
#endif
        keep(own);
#if COPY_ENGINE
        if (threadIdx.x < DEPTH) {
            barrier_init(&full[threadIdx.x], WARPS);
            barrier_init(&empty[threadIdx.x], 1);
            fence_barrier_init();
        }
        __syncthreads();
#endif
    }

    // This warp's sums of the slab that is the CTA's number `turn`: of a single vector 16 rows.
    // arrive() follows, by one thread of the warp once all have got here.
    __device__ __forceinline__ void put(const Sums& sums, u32 turn) {
        int place = int(turn % DEPTH);
        u32 to = own + place * WARPS * PARTIAL * 4;
#if COPY_ENGINE
        barrier_wait(&empty[place], turn / DEPTH % 2 ^ 1);
#endif
        if (COLUMN_TILES == 0) {
#if IN_DIGITS
            store_one(to, threadIdx.x % 4, sums[0][0]);
#else
            store_pair(to, threadIdx.x % 4, sums[0][0], sums[0][2]);  // rows g and g + 8
#endif
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) store_sums(to + tile * 512, sums[tile]);
        }
    }

    __device__ __forceinline__ void arrive(u32 turn) { barrier_arrive(&full[turn % DEPTH]); }

    // Adds up the warps' sums of a slab, in their order, and writes them; by one warp.
    __device__ __forceinline__ void write(int slab, int range, u32 turn) {
        int lane = threadIdx.x % 32, place = int(turn % DEPTH);
        const float* from = partials + place * WARPS * PARTIAL;
#if COPY_ENGINE
        barrier_wait(&full[place], turn / DEPTH % 2);
#endif
        i64 row = i64(slab) * 16;
        if (COLUMN_TILES == 0) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += from[w * PARTIAL + lane % 16];
            if (lane < 16) store(row + lane, range, 0, sum);
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                write_tile(from + tile * 128, row, range, tile);
        }
#if COPY_ENGINE
        barrier_arrive_by_warp(&empty[place]);
#endif
    }

    __device__ __forceinline__ void write_tile(const float* from, i64 row, int range, int tile) {
        int lane = threadIdx.x % 32;
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            auto part = load_vector<float, 4>(from + w * PARTIAL + lane * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += part.element[e];
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            store(row + lane / 4 + e / 2 * 8, range, tile * 8 + lane % 4 * 2 + e % 2, sum[e]);
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
