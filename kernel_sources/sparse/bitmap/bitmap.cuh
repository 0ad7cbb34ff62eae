// out[n, r] = Finish(sum_c w[r, c] x[n, c]) of a bitmap matrix, by tensor cores: one decoding
// serves up to 8 * COLUMN_TILES vectors n. Layout: kernlib/families/sparse/formats/bitmap.py.
//
// A warp keeps x of 256 columns in registers, as fragments of mma.sync, and walks down the slabs of
// 16 rows: its chunks come through a ring of its own. The CTA's warps stand side by side along the
// columns of a range and add up their sums slab by slab. Of several ranges a CTA either walks all,
// one after the other, with running sums of its slabs in shared memory, or some: then they meet in
// sum.cuh.
//
// Floors on an H200 for a chunk at density d (16-bit values), in clocks of an SM at 1.72 GHz:
//   memory    512 + 8192 d bytes over 4.31 TB/s on 132 SMs: 243 at d = 0.5
//   shared    wavefronts: 183 of values, which at d = 0.5 spread over more than 32 banks in 43 of
//             100 loads; 32 of words and ranks, 13 to make ranks, 36 of the copy, 8 of sums: 272
//   issue     4 a clock: 519 of the decoding and products, 51 of ranks, 64 of everything else: 158
// Measured at 8192 x 28672: 63, 71 and 95 us at d = 0.3, 0.5 and 0.7 where shared memory alone is
// 69 at 0.5; 67, 83 and 113 us for 8 vectors. Three loads of whole words a lane for its four values
// were 226 wavefronts, but with what selects the halves no faster.
//
// Facts and struct Fixed: class Bitmap of kernlib/families/sparse/kernels/bitmap/bitmap.py; of
// values in fewer bits see quantised/quantised.cuh.
#pragma once

#include "sparse/bitmap/meeting.cuh"
#include "sparse/quantised/quantised.cuh"

constexpr int RING_OFFSET = 128;  // behind the sums: the first slot's barrier

// x of a warp's 256 columns: the right operands of the mma of each 16 of them, in the order in
// which bitmap/fragments.cuh takes columns.
struct Vectors {
    Vector<u32, 4> part[TILES][CHUNK_COLUMNS / 32];

    // All loads first, and nothing with a branch between them, as they would take 0.3 us each.
    __device__ __forceinline__ void read(const Parameters& p, int chunk, u32) {
        int lane = threadIdx.x % 32, first = chunk * CHUNK_COLUMNS + lane % 4 * 8;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            int n = tile * 8 + lane / 4;
            const InputT* from = p.x + n * p.x_stride;
#pragma unroll
            for (int block = 0; block < CHUNK_COLUMNS / 32; ++block) {
                int column = first + block * 32;
                auto& to = part[tile][block];
                to = {0, 0, 0, 0};
                if (n < p.columns && column < p.cols)
                    to = load_vector<u32, 4>(reinterpret_cast<const u32*>(from + column));
            }
        }
        if ((chunk + 1) * CHUNK_COLUMNS > p.cols) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int block = 0; block < CHUNK_COLUMNS / 32; ++block)
                    keep(part[tile][block], p.cols - first - block * 32);
        }
        if constexpr (CODES == INT4) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int block = 0; block < CHUNK_COLUMNS / 32; ++block) arrange(part[tile][block]);
        }
    }

    // The first `count` of 8 elements; what lies behind a vector may be anything.
    __device__ static void keep(Vector<u32, 4>& x, int count) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (2 * i >= count) x.element[i] = 0;
            if (2 * i + 1 == count) x.element[i] &= 0xffff;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_bitmap(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(128) u32 ranks[WARPS][WORDS];
    __shared__ u64 barriers[2 * DEPTH];
    int warp = uniform(threadIdx.x / 32), cta = blockIdx.x;
    Share share(p, cta);
    u32 units = share.units;
    if constexpr (COPY_ENGINE) launch_dependents();
    u32 sums_of_slabs = uniform(shared_address(shared));
    Ring ring(p, share, sums_of_slabs + DEPTH * WARPS * PARTIAL * 4 + RING_OFFSET, warp);
    Select<CODES == PLAIN, Lane, CodeLane> lane(shared_address(ranks[warp]));
    Walk walk = share.at(p, 0);
    Select<IN_DIGITS, Digits, Vectors> x;
    int until_written = warp + 2;  // turns until this warp writes a slab's sums
    // The matrix is read before, x and the epilogue's numbers after this.
    if constexpr (COPY_ENGINE) wait_for_prerequisites();
    Meeting meeting(p, share, sums_of_slabs, uniform(shared_address(barriers)), warp);
    u32 turn = 0;
#pragma unroll 1
    while (turn < units) {  // ranges
        bool takes_part = warp < walk.chunks;
        if (takes_part) x.read(p, walk.first + warp, shared_address(ranks[warp]));
        if (COPY_ENGINE && turn == 0) {
            ring.wait();
            ring.fill();
        }
        int first = walk.slab, end = min(share.end, first + int(units - turn));
#pragma unroll 1
        for (; walk.slab < end; ++walk.slab) {
            Sums sums = {};
            ring.wait();
            if (takes_part) add_chunk(sums, ring.chunk, x, lane);
            meeting.put(sums, turn);
            if constexpr (COPY_ENGINE) {
                __syncwarp();
                if (elect_lane()) {
                    meeting.arrive(turn);
                    ring.copy();
                }
            } else {
                __syncthreads();
                ring.copy();
            }
            ring.advance();
            ring.step();
            // The slab before, once the other warps have had time for it.
            if (--until_written == 0) {
                until_written = WARPS;
                if (walk.slab > first) meeting.write(walk, walk.slab - 1, turn - 1);
            }
            ++turn;
        }
        // The range's last one.
        if (until_written == 1) meeting.write(walk, end - 1, turn - 1);
        walk = Walk(p, walk.range + 1, share.first);
    }
}
