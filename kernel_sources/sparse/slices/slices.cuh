// part[panel,n,r] = sum_c w[r,c] x[n,c] over the columns c of a panel, w in the format u8, u4
// or u2.
//
// A panel is `width` columns. Its rows, sorted by how many codes they have there, are taken 32 at a
// time: a slice, one row a lane, as many codes for each as the longest has. A code is a value and
// the step to its column from that of the code before. Lanes read their own codes from device
// memory, DEPTH groups ahead, and x from shared memory; a warp takes slice after slice, so
// there is neither a search for rows nor a sum across lanes.
//
// Floor in bytes: itemsize + 1 (u8), + .5 (u4) or + .25 (u2) a code, 2 a row and panel, over the
// bandwidth of memory: at 8192 x 28672, of an H200's 4.31 TB/s, 16.4 us for 70.8 MB of u8 with a
// density of .1, 41.3 us for 178 MB of u4 with .3, 65.6 us for 283 MB of u2 with .5.
// Of 32 codes of a half type, in clocks of a multiprocessor (132, 1.755 GHz):
//                                      u8                 u4                 u2
//   memory, at 4.31 TB/s               5.2                4.3                3.9
//   issue slots / 4 (SASS, sm_90a)     7.8 / 4 = 1.9      8.2 / 4 = 2.0      7.9 / 4 = 2.0
//   load unit: matrix + gathers        .75 + 1.7 to 2.5   .63 + 1.6 to 2.0   .56 + 1.1 to 1.6
// in wavefronts (simulated).
// With N = 8 there are 22.8 (23.1) slots, 5.7 (5.8) clocks, 16 of them conversions and FMAs; with
// N = 4 14.8 (15.1). A gather of 16 bytes is a wavefront for 8 lanes, and where these meet in banks
// 10 for a warp, of 8 bytes 5.5. So there x lies in as many copies as lanes share a wavefront, 128
// bytes a column, each lane reads its own, and there are 4 and 2.
//
// Measured on an H200 at 8192 x 28672: with N = 1 23.0 us for u8 at .1, 48.0 us for u4 at .3, 73.3
// us for u2 at .5, 94.8 us at .7, where cuBLAS takes 117; of 12288 x 49152 4.1 TB/s. With N = 8 39,
// 78 and 131 us: some 7 clocks a gather of 512 bytes, whatever adds it up. mma.sync with x as
// ldmatrix gathers it, of 11.8 slots, took as long.
//
// Facts and struct Fixed: class Slices of kernlib/families/sparse/kernels/slices/slices.py.
#pragma once

#include "sparse/slices/lanes.cuh"

struct Addresses {
    const unsigned char* data;
    const int* offsets;   // of slices, in codes of a lane
    const RowT* rows;     // of each lane of each slice
    const InputT* x;
    float* part;
};
struct Parameters : Addresses, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Where a slice lies, and which row a lane has in it.
struct Head {
    u32 start, length;
    RowT row;

    __device__ __forceinline__ Head(const Parameters& p, u32 slice, bool exists) {
        start = length = 0;
        row = NO_ROW;
        if (exists) {
            start = u32(__ldg(p.offsets + slice));
            length = u32(__ldg(p.offsets + slice + 1)) - start;
            row = p.rows[i64(slice) * 32 + threadIdx.x % 32];
        }
    }
    __device__ __forceinline__ const unsigned char* data(const Parameters& p) const {
        return p.data + i64(start) * CODE_BYTES<InputT>;
    }
};

// The same as (column, copy, vector): 128 bytes a column, of which each lane that takes part in one
// access reads a copy in banks of its own. A warp turns 8 columns of 8 vectors at a time: past
// COLUMNS they are the first ones again.
__device__ __forceinline__ void stage_copies(const Parameters& p, unsigned char* to,
                                             const InputT* x, u32 count, u32 first, u32 last) {
    constexpr int TILES = 4;  // that are read at a time
    u32 group = threadIdx.x % 32 / 4, word = threadIdx.x % 4, vector = group % COLUMNS;
    const InputT* from = x + vector * p.x_stride + 2 * word;
    u32 held = shared_address(to) + group * PITCH + 4 * word;
#pragma unroll 1
    for (u32 begin = first + threadIdx.x / 32 * 8; begin < last; begin += 8 * WARPS * TILES) {
        u32 turned[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            u32 at = begin + 8 * WARPS * i;
            turned[i] = 0;
            if (vector < count && at < last)
                turned[i] = *reinterpret_cast<const u32*>(from + at);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            u32 at = begin + 8 * WARPS * i;
            if (at >= last) break;
            asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(turned[i]));
#pragma unroll
            for (int copy = 0; copy < 8; ++copy)  // lanes write to banks of their own
                asm volatile("st.shared.u32 [%0], %1;"
                             :: "r"(held + (at - first) * PITCH + (group + copy) % 8 * 16),
                                "r"(turned[i]) : "memory");
        }
    }
}

__device__ __forceinline__ void stage(const Parameters& p, unsigned char* to, const InputT* x,
                                      u32 count, u32 first, u32 last) {
    if constexpr (COPIES > 1) stage_copies(p, to, x, count, first, last);
    else stage_once(to, x, p.x_stride, count, first, last);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
sparse_slices(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char memory[];
    u32* counter = reinterpret_cast<u32*>(memory);  // the next slice that no warp has taken
    unsigned char* held = memory + 16;
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    if (!p.ahead) wait_for_prerequisites();
#endif
    u32 chunk = blockIdx.x % p.chunks, range = blockIdx.x / p.chunks;
    u32 warp = threadIdx.x / 32, vector = chunk * COLUMNS;
    u32 count = min(p.columns - vector, u32(COLUMNS));
    u32 first = u32(u64(range) * p.slices / p.ranges);
    u32 last = u32(u64(range + 1) * p.slices / p.ranges);

    u32 own_copy = shared_address(held) + threadIdx.x % 32 % COPIES * COLUMN_BYTES;

    // By as many panels as shared memory holds of x.
    for (u32 begin = first; begin < last;) {
        u32 panel = begin / p.panel_slices;
        u32 end = u32(min(u64(last), u64(panel + p.held) * p.panel_slices));
        u32 slice = begin + warp;
        Head head(p, slice, slice < end);
        Stream stream;
        stream.open(head.data(p), head.length);
        if (begin == first) {
            wait_to_begin();  // x, and what others may use, come after this
        } else {
            __syncthreads();
        }
        if (threadIdx.x == 0) *counter = begin + WARPS;
        u32 from = panel * p.width, behind = (end - 1) / p.panel_slices + 1;
        stage(p, held, p.x + vector * p.x_stride, count, from,
              u32(min(u64(p.cols), u64(behind) * p.width)));
        __syncthreads();
#pragma unroll 1
        while (slice < end) {
            u32 next = 0;
            if (threadIdx.x % 32 == 0) next = atomicAdd(counter, 1);
            next = __shfl_sync(~0u, next, 0);
            Head coming(p, next, next < end);
            u32 own = slice / p.panel_slices;
            float sums[SUMS] = {};
            stream.run(own_copy + (own - panel) * p.width * PITCH, sums);
            if (COLUMNS == 1) sums[0] += sums[1];
            if (head.row != NO_ROW) {
                float* to = p.part + (i64(own) * p.columns + vector) * p.rows_count + head.row;
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n)
                    if (n < count) to[i64(n) * p.rows_count] = sums[n];
            }
            head = coming;
            slice = next;
            stream.open(head.data(p), head.length);
        }
        begin = end;
    }
}
