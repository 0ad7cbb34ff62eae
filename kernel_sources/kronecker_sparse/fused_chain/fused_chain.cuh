// Chains of two Kronecker-sparse factors on Hopper, half types, batch first, in one launch:
//   h[n; i, j]    = sum_k first[i, j, k] * x[n; i, k]
//   y[n; g, j, l] = Finish(sum_k second[g, l, j, k] * h[n; g, k, l])
// where feature (i, j) of h, counted through, is feature (g, k, l). h is rounded to the type of x,
// as the result of a first call is, and stays in shared memory.
// Floors: (in + out) * batch * itemsize bytes over 4.3 TB/s on an H200, and 2 * batch times both
// weights' numbers of operations over 770 TFLOP/s. Beside them: the second weight comes from L2
// for every tile of rows, the first and x for every unit of one.
//
// What was reached on an H200: 25088 rows of 384 features to 1536, (6,64,64,1) and (1,768,192,2),
// take 51 us, where floors are 22 and 23 (70 us with a GELU), and two launches took 61. 384 to 384
// takes 13 (9 and 3; 22), 8192 rows of 4096 to 16384 take 230 (78 and 31; 340). Finishing y takes
// warps about as long as both products. The wide ones wait for L2: weights for every 64 rows, and x
// for every 16 l.
//
// Persistent CTAs: one producer thread, and warpgroups in pairs of one or two. A unit of work is
// TILE_ROWS rows of the batch, SPAN neighbouring l, and a share of the columns j. Each pair
// computes h of 64 rows, or of a half of the l, into shared memory, for wgmma's left operand: for
// each l TILE_ROWS rows along k. Then it multiplies that by the second weight, SECOND_COLUMNS j at
// a time: of its columns, or of its l, each warpgroup takes a part, LANES l together, so that
// features of y that lie side by side meet in one thread.
//
// Facts and struct Fixed: fused_chain/tiles.cuh and fused_chain/unit.cuh.
#pragma once

#include "kronecker_sparse/fused_chain/first_product.cuh"
#include "kronecker_sparse/fused_chain/second_product.cuh"
#include "kronecker_sparse/fused_chain/store.cuh"

__device__ __forceinline__ void load_second(const Parameters& p, const Shared& s, Ring& ring,
                                            const Unit& unit, int tile, int stage, int stages) {
    barrier_wait(&s.empty[ring.stage], ring.parity);
    i64 place = (i64(unit.group) * p.spans + unit.lane / SPAN) * p.column_tiles + tile;
    barrier_expect(&s.full[ring.stage], SECOND_BYTES);
    load_bytes(s.stages + ring.stage * STAGE_BYTES,
               p.second + (place * stages + stage) * SECOND_BYTES, &s.full[ring.stage],
               SECOND_BYTES);
    ring.next();
}

// The packing of the second weight may still be under way when this kernel begins.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring(1);
    int chunks = ceil_div(p.depth, ROW), stages = ceil_div(p.second_depth, SECOND_DEPTH);
    bool is_packed = false;
    for (u32 index = blockIdx.x; index < p.units; index += gridDim.x) {
        Unit unit(p, index);
        for (int block = 0; block < p.blocks; ++block)
            for (int chunk = 0; chunk < chunks; ++chunk)
                load_first(p, s, ring, unit, unit.group * p.blocks + block, chunk);
        if (!is_packed) wait_for_prerequisites();
        is_packed = true;
        for (int tile = unit.first_tile; tile < unit.last_tile; ++tile)
            for (int stage = 0; stage < stages; ++stage)
                load_second(p, s, ring, unit, tile, stage, stages);
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    Consumer consumer;
    Ring ring(0);
    Vectors vectors(s, consumer);
    for (u32 index = blockIdx.x; index < p.units; index += gridDim.x) {
        Unit unit(p, index);
        consumer.synchronize_pair();  // no warp still multiplies h of the unit before
        first_product(p, s, ring, consumer);
        fence_shared_writes();
        consumer.synchronize_pair();
#pragma unroll 1
        for (int tile = unit.first_tile; tile < unit.last_tile; ++tile) {
            float sums[LANES][COLUMNS / 2];
            int column = tile * SECOND_COLUMNS + first_column(consumer);
            vectors.load(p, unit, column, consumer);
            second_product(sums, p, s, ring, consumer);
            vectors.stage(consumer);
            store_tile(sums, vectors, p, s, unit, column, consumer);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_sparse_chain(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];
    unsigned char* base = shared + (-shared_address(shared) & 1023);
    unsigned char* stages = base + H_BYTES;
    unsigned char* out = stages + STAGES * STAGE_BYTES;
    Shared s = {base, stages, out, reinterpret_cast<InputT*>(out + OUT_BYTES), barriers,
                barriers + STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        release_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == 0) produce(parameters, s);
    } else {
        take_registers<WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 160 : 112>();
        consume(parameters, s);
    }
}
