// The result of a chain's first factor with each l of the second one by itself:
//   h[n; g,l,k] = sum_c first[i, j, c] * x[n; i, c]
// where feature (i, j) of it, counted through, is feature (g, k, l); for the gradient of the second
// weight by interleaved_gradient/interleaved_gradient.cuh.
// Floors: batch * (features of x and of h) * itemsize bytes over 4.3 TB/s on an H200, and 2 * batch
// times the weight's numbers of operations over 770 TFLOP/s. On an H200 25216 rows of (6,64,64,1)
// in bfloat16 take 13 us, where floors are 9 and 2, and of (6,64,256,1) 29 (23 and 6).
//
// Persistent CTAs: one producer thread, and two warpgroups of 64 rows each. A unit of work is 128
// rows of the batch, and as many blocks as have whole lines of 64 k of each l, or all blocks.
//
// Facts and struct Fixed: class Hidden of
// kernlib/families/kronecker_sparse/kernels/chain/hidden.py.
#pragma once

#include "kronecker_sparse/fused_chain/first_product.cuh"

struct Maps {
    TensorMap x, first, h;
};

struct Parameters : Maps, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    unsigned char* h;
    unsigned char* stages;
    u64 *full, *empty;
};

// A unit's place. Its group is a share of blocks, counted through.
struct Unit {
    static constexpr int lane = 0;
    int row, group;
    __device__ __forceinline__ Unit(const Parameters& p, u32 index) {
        row = index % p.row_tiles * TILE_ROWS;
        group = index / p.row_tiles;
    }
};

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring(1);
    int chunks = ceil_div(p.depth, ROW);
    for (u32 index = blockIdx.x; index < p.units; index += gridDim.x) {
        Unit unit(p, index);
        for (int block = 0; block < p.blocks; ++block)
            for (int chunk = 0; chunk < chunks; ++chunk)
                load_first(p, s, ring, unit, unit.group * p.blocks + block, chunk);
    }
}

// The copy engine writes no k behind the last one, and no row.
__device__ __forceinline__ void store_h(const Parameters& p, const Shared& s, const Unit& unit,
                                        const Consumer& consumer) {
    int first = unit.group % p.shares * p.span, row = unit.row + consumer.first_row;
    for (int l = 0; l < LANES; ++l)
        for (int chunk = 0; chunk < H_CHUNKS; ++chunk)
            store_box(p.h, s.h + l * H_LANE_BYTES + chunk * H_CHUNK_BYTES +
                               consumer.first_row * ROW_BYTES,
                      first + chunk * ROW, l, row, unit.group / p.shares);
    commit_stores();
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    Consumer consumer;
    Ring ring(0);
    bool leads = threadIdx.x % 128 == 0;
    for (u32 index = blockIdx.x; index < p.units; index += gridDim.x) {
        Unit unit(p, index);
        if (leads) wait_for_reads<0>();  // of h of the unit before
        consumer.synchronize_pair();
        first_product(p, s, ring, consumer);
        fence_shared_writes();
        consumer.synchronize_pair();
        if (leads) store_h(p, s, unit, consumer);
    }
    if (leads) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_sparse_hidden(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];
    unsigned char* base = shared + (-shared_address(shared) & 1023);
    Shared s = {base, base + H_BYTES, barriers, barriers + STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    launch_dependents();
    if (threadIdx.x < 128) {
        release_registers<40>();
        if (threadIdx.x == 0) produce(parameters, s);
    } else {
        take_registers<232>();
        consume(parameters, s);
    }
}
