// out[n, r] = Finish(sum_c w[r, c] x[n, c]) of a bitmap matrix and many vectors n, by wgmma: a warp
// decodes its chunks into registers, as left operands, and x is the right operand in shared memory.
//
// A CTA has 64 * WARPGROUPS rows and COLUMNS vectors, and walks along the columns of the matrix. A
// consumer warp has 16 rows, whose chunks come through a ring of its own; a producer warp brings x,
// packed by sparse/pack.cuh in the order of bitmap/fragments.cuh. While the matrix unit multiplies
// 64 columns, warps decode the next 64. The last tiles, which would leave multiprocessors idle, are
// cut along the columns into `parts`, whose sums meet in sum.cuh, or in the shared memory of PAIRS.
//
// Floors for 16 rows and 256 columns at density 0.5, in clocks of an SM, N being COLUMNS:
//   matrix unit  2 N
//   shared       183 wavefronts of values, 32 of words and ranks, 13 to make ranks, 36 of the copy;
//                N for wgmma to read x, and N / WARPGROUPS to bring it
//   issue        570 of the decoding over 4 a clock: 143
// So shared memory limits it: 87 us for 8192 x 28672 by 64 vectors, and 69 us for 12288 x 4096 by
// 512, for which the matrix unit alone would take 54. On an H200 they take 102 and 88 us, and the
// first one by 16 and 32 vectors 84 and 89; dense matrices by cuBLAS 120 and 68, 114 and 116. The
// second one takes 62 us without decoding and 49 without products: a warp issues one behind the
// other.
//
// The generated source defines before it includes this file:
//   InputT, OutputT, AccT, VECTORS, SCALARS, EPILOGUE, Finish
//   WARPGROUPS, COLUMNS    of a CTA's tile: 64 rows each, and vectors
//   X_STAGES               blocks of 64 columns of x that are on their way at a time
//   PAIRS                  1 where two CTAs of a cluster compute the two parts of a tile
//   multiply               a wgmma of 64 rows by COLUMNS, its left operand in registers
//   COPY_ENGINE            1
//   PARAMETER_BYTES        Parameters as lowering lays them out
//   Fixed                  of lowering: what a plan fixes
#pragma once

#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/parameters.cuh"

constexpr int WARPS = 4 * WARPGROUPS;
constexpr bool WIDE = COLUMNS > 128;  // sums that need the registers of a producer warpgroup
constexpr int THREADS = 32 * (WARPS + (WIDE ? 4 : 1));
constexpr int CHUNK_COLUMNS = 256, WORDS = 128, BITMAP_BYTES = 4 * WORDS;
constexpr int DEPTH = 64, STEPS = DEPTH / 16;  // columns of a stage of x, and its products
// Left operands: of wide tiles those of a stage are decoded while those of the one before are
// multiplied; else there are other warpgroups to do so.
constexpr int BUFFERS = WARPGROUPS > 2 ? 1 : 2;
constexpr int TILES = 1;
constexpr int X_BYTES = COLUMNS * 128;      // of a stage
constexpr int SUMS = COLUMNS / 2;           // of a thread
constexpr int RING_OFFSET = 128;            // behind x: the first slot's barrier

struct Pointers {
    const unsigned char* data;
    const u32* offsets;
    const unsigned char* x;  // packed
    OutputT* out;
    float* sums;             // of tiles that are cut: [part][n][row - first_cut_row]
};

// Laid out by kernlib/families/sparse/lowering/bitmap_many.py.
struct Parameters : Pointers, VectorPointers<VECTORS>, Scalars<SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

#include "sparse/bitmap/warp.cuh"
#include "sparse/bitmap/fragments.cuh"

struct Shared {
    alignas(1024) unsigned char x[X_STAGES][X_BYTES];
    u32 ranks[WARPS][WORDS];
    u64 full[X_STAGES], empty[X_STAGES];
};

// What a CTA computes: rows, vectors, and of the matrix's chunks of columns `first` to `last`.
struct Task {
    int row_tile, n, first, last, part;
    bool is_cut, is_idle;

    __device__ __forceinline__ explicit Task(const Parameters& p) {
        int unit = blockIdx.x, tile = unit;
        part = 0, first = 0, last = p.kchunks;
        is_cut = unit >= p.whole_tiles;
        if (is_cut) {
            tile = p.whole_tiles + (unit - p.whole_tiles) / p.parts;
            part = (unit - p.whole_tiles) % p.parts;
            first = part * p.part_chunks + min(part, p.longer_parts);
            last = first + p.part_chunks + (part < p.longer_parts);
        }
        row_tile = tile / p.n_tiles;
        is_idle = row_tile >= p.row_tiles;
        n = tile % p.n_tiles * COLUMNS;
    }
};

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

#include "sparse/bitmap/many_store.cuh"

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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if PAIRS
__cluster_dims__(2, 1, 1)
#endif
sparse_bitmap_many(const __grid_constant__ Parameters p) {
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
    if (PAIRS && task.is_cut && !exchange(sums, s, task.part, warp)) return;
    if (!PAIRS && task.is_cut) {
        store_part(sums, p, task, warp);
        return;
    }
    if (!task.is_cut) sync_threads(1 + WARPGROUPS, 32 * WARPS);  // all of x has been read
    store(sums, p, s, task, warp);
}
