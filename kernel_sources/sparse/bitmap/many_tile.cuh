// A tile of the product of a bitmap matrix with many vectors, or a part of one, by a CTA.
#pragma once

#include "sparse/bitmap/many_store.cuh"

// A warp's chunks, one behind the other along the columns, on their way from device memory.
struct Chunks {
    const unsigned char* data;
    const u32* place;   // of the chunk that is asked for next
    u32 begin, end;     // of the ring, in shared memory
    u32 chunk, parity;  // the warp's next one
    u32 from, to;       // of the chunk that is asked for next, in 16 bytes
    int left, slot_bytes;

    __device__ __forceinline__ Chunks(const Parameters& p, u32 slots, int warp, const Task& task)
        : data(p.data), parity(0), slot_bytes(p.slot_bytes) {
        int bytes = p.slots * slot_bytes, lane = threadIdx.x % 32;
        begin = uniform(slots + warp * bytes);
        end = begin + bytes;
        int slab = task.row_tile * WARPS + warp;
        left = slab < p.slabs ? task.last - task.first : 0;
        place = p.offsets + i64(slab) * p.kchunks + task.first;
        if (lane < p.slots) {
            barrier_init(barrier(begin + lane * slot_bytes), 1);
            fence_barrier_init();
        }
        __syncwarp();
        read_place();
#pragma unroll 1
        for (chunk = begin; chunk != end; chunk += slot_bytes) ask();
        chunk = begin;
    }

    __device__ static u64* barrier(u32 chunk) {
        return static_cast<u64*>(__cvta_shared_to_generic(chunk - 16));
    }

    __device__ __forceinline__ void read_place() {
        from = to = 0;
        if (left <= 0) return;
        from = place[0];
        to = place[1];
    }

    // Asks for the next chunk, if there is one, where the one that has been decoded lies.
    __device__ __forceinline__ void ask() {
        if (left <= 0) return;
        if (elect_lane()) {
            int bytes = int(to - from) * 16;
            barrier_expect(barrier(chunk), bytes);
            load_bytes(__cvta_shared_to_generic(chunk), data + i64(from) * 16, barrier(chunk),
                       bytes);
        }
        --left;
        ++place;
        read_place();
    }

    __device__ __forceinline__ void wait() { barrier_wait(barrier(chunk), parity); }

    // On to the next one, by a warp all of whose lanes have read this one.
    __device__ __forceinline__ void step() {
        ask();
        chunk += slot_bytes;
        if (chunk == end) {
            chunk = begin;
            parity ^= 1;
        }
    }
};

// Left operands of 32 columns, number `block` of a chunk: of their two planes.
__device__ __forceinline__ void decode_columns(Fragment& first, Fragment& second, u32 words,
                                               u32 ranks, int block, const Lane& lane) {
    int swap = block / 2 * 16;
    auto word = load_words((words ^ swap) + block * 64);
    auto rank = load_words((ranks ^ swap) + block * 64);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        u32 w = word.element[group];
        u32 at = rank.element[group] + 2 * __popc(w & lane.below);
        Fragment& to = group % 2 ? second : first;
        load_four(to[group / 2], to[2 + group / 2], w >> lane.bit & BYTES, at, lane);
    }
}

// Stages of x: the one that is next, and those before it whose products may still run.
struct Stages {
    Shared& s;
    int stage, parity;

    __device__ __forceinline__ void wait() { barrier_wait(&s.full[stage], parity); }

    __device__ __forceinline__ u64 descriptor() const {
        return matrix_descriptor(shared_address(s.x[stage]), 16, 8 * 128);
    }

    __device__ __forceinline__ void release() { barrier_arrive_by_warp(&s.empty[stage]); }

    // The stage before this one is no longer read.
    __device__ __forceinline__ void release_previous() {
        barrier_arrive_by_warp(&s.empty[stage == 0 ? X_STAGES - 1 : stage - 1]);
    }

    __device__ __forceinline__ void next() {
        if (++stage == X_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void bring_x(const Parameters& p, Shared& s, const Task& task) {
    int first = task.first * 4, last = min(task.last * 4, p.depth_blocks);
    Stages stages = {s, 0, 0};
    wait_for_prerequisites();
    const unsigned char* from = p.x + (i64(first) * p.padded + task.n) * 128;
#pragma unroll 1
    for (int block = first; block < last; ++block) {
        barrier_wait(&s.empty[stages.stage], stages.parity ^ 1);
        u64* full = &s.full[stages.stage];
        if (elect_lane()) {
            barrier_expect(full, X_BYTES);
            load_bytes(s.x[stages.stage], from, full, X_BYTES);
        }
        __syncwarp();
        from += i64(p.padded) * 128;
        stages.next();
    }
}

// All of a CTA's work.
__device__ __forceinline__ void multiply_tile(const Parameters& p) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic);
    int warp = uniform(threadIdx.x / 32);
    launch_dependents();
    Task task(p);
    if (task.is_idle) return;
    if (threadIdx.x < X_STAGES) {
        barrier_init(&s.full[threadIdx.x], 1);
        barrier_init(&s.empty[threadIdx.x], WARPS);
        fence_barrier_init();
    }
    __syncthreads();
    if (warp >= WARPS) {
        if constexpr (WIDE) release_registers<24>();
        if (warp == WARPS) bring_x(p, s, task);
        return;
    }
    if constexpr (WIDE) take_registers<240>();
    Chunks chunks(p, uniform(shared_address(dynamic)) + u32(sizeof(Shared)) + RING_OFFSET, warp,
                  task);
    bool has_rows = task.row_tile * WARPS + warp < p.slabs;
    Lane lane(shared_address(s.ranks[warp]));
    Stages stages = {s, 0, 0};
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
    bool is_first = true;
    u32 left[BUFFERS][STEPS][4] = {};
#pragma unroll 1
    for (int k = task.first; k < task.last; ++k) {
        u32 words = chunks.chunk + lane.unit;
        if (has_rows) {
            chunks.wait();
            make_ranks(chunks.chunk, lane);
            __syncwarp();
        }
        int blocks = min(CHUNK_COLUMNS / DEPTH, p.depth_blocks - k * (CHUNK_COLUMNS / DEPTH));
#pragma unroll
        for (int block = 0; block < CHUNK_COLUMNS / DEPTH; ++block) {
            if (block >= blocks) break;
            auto& now = left[block % BUFFERS];
            if (has_rows) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    decode_columns(now[2 * half], now[2 * half + 1], words, lane.ranks,
                                   block * 2 + half, lane);
            }
            keep_words(now);
            stages.wait();
            u64 right = stages.descriptor();
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) multiply(sums, now[step], right + step * 2, 1);
            wgmma_commit();
            if (BUFFERS == 1) {
                wgmma_wait<0>();
                stages.release();
            } else {
                wgmma_wait<1>();
                if (!is_first) stages.release_previous();
                is_first = false;
            }
            stages.next();
        }
        __syncwarp();
        if (has_rows) chunks.step();
    }
    wgmma_wait<0>();
    keep_behind(sums);
    wait_for_prerequisites();
    if constexpr (PAIRS) {
        if (task.is_cut && !exchange(sums, s, task.part, warp)) return;
    } else if (task.is_cut) {
        store_part(sums, p, task, warp);
        return;
    }
    if (!task.is_cut) sync_threads(1 + WARPGROUPS, 32 * WARPS);  // all of x has been read
    store(sums, p, s, task, warp);
}
