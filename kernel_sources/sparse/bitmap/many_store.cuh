// From the sums of bitmap/many.cuh to memory. A warpgroup has 64 rows of all COLUMNS vectors.
#pragma once

#include "sparse/bitmap/many_config.cuh"

constexpr int ROW_PITCH = 64 * 2 + 16;  // of a vector's 64 rows in shared memory: apart from banks

__device__ __forceinline__ int warpgroup_of(int warp) { return warp / 4; }

// The part of a tile that is cut, as float32 [part][n][row]: eight lanes write 32 bytes.
__device__ __forceinline__ void store_part(float (&sums)[SUMS], const Parameters& p,
                                           const Task& task, int warp) {
    int lane = threadIdx.x % 32;
    float* part = p.sums + i64(task.part) * p.columns * p.cut_rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        i64 row = (i64(task.row_tile) * WARPS + warp) * 16 + half * 8 + lane / 4;
        if (row >= p.rows) continue;
#pragma unroll
        for (int i = 0; i < SUMS / 2; ++i) {
            int n = task.n + i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (n < p.columns)
                part[n * p.cut_rows + row - p.first_cut_row] = sums[i / 2 * 4 + half * 2 + i % 2];
        }
    }
}

// The results of a tile, by way of shared memory, where x was: there the rows of a vector lie side
// by side, as they do in most results.
__device__ __forceinline__ void store(float (&sums)[SUMS], const Parameters& p, Shared& s,
                                      const Task& task, int warp) {
    static_assert(WARPGROUPS * COLUMNS * ROW_PITCH <= X_STAGES * X_BYTES, "results fit");
    int lane = threadIdx.x % 32, thread = threadIdx.x % 128, warpgroup = warpgroup_of(warp);
    i64 first_row = (i64(task.row_tile) * WARPGROUPS + warpgroup) * 64;
    u32 lines = shared_address(s.x) + warpgroup * (COLUMNS * ROW_PITCH);
    Finish finish(Read<Parameters>{p});
    i64 rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        rows[half] = min(first_row + warp % 4 * 16 + half * 8 + lane / 4, p.rows - 1);
    u32 to = lines + (lane / 16 * 8 + lane % 8) * ROW_PITCH + warp % 4 * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i += 2) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* sum = &sums[(i + j / 2) * 4 + j % 2 * 2];
            words[j] = pack<OutputT>(finish(sum[0], rows[j % 2]), finish(sum[1], rows[j % 2]));
        }
        store_matrices<true>(to + i * 8 * ROW_PITCH, words[0], words[1], words[2], words[3]);
    }
    sync_threads(1 + warpgroup, 128);
    bool is_whole = p.out_row_stride == 1 && p.out_vector_stride % 8 == 0 &&
                    reinterpret_cast<u64>(p.out) % 16 == 0;
    i64 row = first_row + thread % 8 * 8;
#pragma unroll 4
    for (int n = thread / 8; n < COLUMNS; n += 16) {
        if (task.n + n >= p.columns || row >= p.rows) continue;
        auto line = load_words(lines + n * ROW_PITCH + thread % 8 * 16);
        OutputT* out = p.out + (task.n + n) * p.out_vector_stride + row * p.out_row_stride;
        if (is_whole && row + 8 <= p.rows) {
            store_vector(reinterpret_cast<u32*>(out), line);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            u16 bits = u16(line.element[e / 2] >> e % 2 * 16);
            if (row + e < p.rows) out[e * p.out_row_stride] = OutputT{bits};
        }
    }
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\t"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void store_remote(u32 address, const float* x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Of the two parts of a tile: each CTA gives the other one the sums of one warpgroup, and has the
// whole sums of the other then. Returns whether this warpgroup has.
__device__ __forceinline__ bool exchange(float (&sums)[SUMS], Shared& s, int part, int warp) {
    static_assert(!PAIRS || WARPGROUPS == 2, "one for each CTA");
    static_assert(SUMS * 4 * 128 <= X_STAGES * X_BYTES, "sums fit where x was");
    u32 at = shared_address(s.x) + threadIdx.x % 128 * 16;
    bool has = warpgroup_of(warp) == part;
    sync_cluster();  // both CTAs have read all of x
    if (!has) {
        u32 to;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(at), "r"(part ^ 1));
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) store_remote(to + i * (128 * 16), &sums[i * 4]);
    }
    sync_cluster();
    if (has) {
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            auto words = load_words(at + i * (128 * 16));
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i * 4 + e] += __uint_as_float(words.element[e]);
        }
        sync_threads(1 + warpgroup_of(warp), 128);  // before results lie there
    }
    return has;
}
