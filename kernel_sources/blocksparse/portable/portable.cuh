// Products with block-sparse matrices on every GPU since sm_80, for any strides:
//   out[z, h, l, n] = Finish(sum_k op(S[z, h])[l, k] * dense[z, h, k, n]).
//
// Floors on an H200: the stored blocks, the dense operand and the result once over 4.3 TB/s, which
// decides for few columns; 2 * lines * depth operations a stored block and column over 566 TFLOP/s
// in half types, 282 in TF32, 94 in 3xTF32, what mma.sync reaches. In between stands what goes from
// L2 to the multiprocessors, 9 TB/s: a tile of 128 lines by 128 columns takes of each block of
// depth that one of its lines stores a panel of dense, 256 bytes a depth, and the blocks that are
// stored. That allows 186, 281 and 462 TFLOP/s for blocks of 16 at density .1, .25 and .5, and 292,
// 356 and 485 for blocks of 32.
//
// A tile's lines are several lines of blocks: its panels are read once for all of them, and in the
// largest one every warp takes all lines of a part of the columns, so that all have the same to do
// however blocks are spread. A stage has 16 to 64 of the depth, of one block or of several. Few
// columns take small tiles, of part of a line of blocks, so that there are enough of them to read
// at full speed; 3xTF32 takes 64 by 64, with two sums of each result in registers. Sums run over
// the depth in one order whatever the tile: with one part a result's bits depend on neither batch
// nor columns. Where tiles are few and sums long, several CTAs share a tile: each leaves the sum of
// its part of the depth, so many blocks whether they are stored or not, in a workspace, for
// parts/parts.cuh to add up.
//
// Facts and struct Fixed: class Portable of kernlib/families/blocksparse/kernels/spmm/portable.py.
#pragma once

#include "blocksparse/parts/overlap.cuh"
#include "blocksparse/portable/load.cuh"

constexpr int WARPS_DOWN = TILE_LINES / WARP_LINES;
static_assert(WARPS_DOWN * (TILE_COLUMNS / WARP_COLUMNS) == WARPS, "warps cover a tile");

constexpr u32 OWN = (1u << (WARP_LINES > LINES ? WARP_LINES / LINES : 1)) - 1;  // of a warp

using LeftReader = Reader<TILE_LINES, ACCESS_VALUES, true>;
using RightReader = Reader<TILE_COLUMNS, ACCESS_DENSE, false>;

__device__ __forceinline__ int warp_line() { return threadIdx.x / 32 % WARPS_DOWN * WARP_LINES; }
__device__ __forceinline__ int warp_column() {
    return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
}

// A stage's products, of the fragments whose block is stored. The next fragment is on its way while
// one is multiplied.
__device__ __forceinline__ void multiply_step(Sums& sums, const unsigned char* stage, u32 live,
                                              const LeftReader& left, const RightReader& right,
                                              int step) {
    if (GROUPS > 1) live >>= warp_line() / LINES;
    if (WARPS_DOWN > 1 && !(live & OWN)) return;
    auto is_live = [&](int i) { return GROUPS == 1 || (live >> i * 16 / LINES & 1); };
    u32 a[2][4];
    Right b;
    if (is_live(0)) left.read(a[0], stage, 0, step);
    b.read(right, stage + VALUE_BYTES, 0, step);
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
        if (i + 1 < FRAGMENTS && is_live(i + 1)) left.read(a[(i + 1) % 2], stage, i + 1, step);
        if (is_live(i)) add_products(sums[i], a[i % 2], b);
    }
}

__device__ __forceinline__ void multiply_stage(Sums& total, Sums& sums, const unsigned char* stage,
                                               u32 word, const LeftReader& left,
                                               const RightReader& right) {
#pragma unroll(SPLIT ? 1 : 2)
    for (int step = 0; step < STEPS; ++step) {
        u32 live = word >> step * STEP_DEPTH / PART_DEPTH * FIELD;
        if (PIECES > 1 && !(live & LIVE)) break;
        if (SPLIT && (live >> GROUPS & 1) && step * STEP_DEPTH % PART_DEPTH == 0)
            promote(total, sums);
        multiply_step(sums, stage, live, left, right, step);
    }
}

__device__ __forceinline__ void sum_tile(Sums& total, unsigned char* stages, const Parameters& p,
                                         const Tile& tile, i64 batch) {
    Loader loader(p, tile, batch);
    LeftReader left(warp_line());
    RightReader right(warp_column());
    Sums chain = {};
    Sums& sums = SPLIT ? chain : total;
    u64 words = 0;  // of the stages under way, the next one's last
    int begun = 0;
    unsigned char *read = stages, *write = stages;
    unsigned char* last = stages + (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
    while (true) {
        u32 word = u32(words) & u32((u64(1) << WORD) - 1);
        bool reads = begun == STAGES - 1;
        if (reads) {
            if (word == 0) break;
            wait_for_groups<STAGES - 2>();
            __syncthreads();  // `read` is complete, and nobody reads `write` any more
        } else {
            ++begun;
        }
        words = words >> WORD | u64(loader.begin(write)) << (STAGES - 2) * WORD;
        commit_copies();
        write = write == last ? stages : write + STAGE_BYTES;
        if (!reads) continue;
        multiply_stage(total, sums, read, word, left, right);
        read = read == last ? stages : read + STAGE_BYTES;
    }
    if (SPLIT) promote(total, sums);
    wait_for_groups<0>();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::MIN_BLOCKS)
blocksparse_portable(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Tile tile(p);
    if (PARTIAL) permit_next();
#pragma unroll 1
    for (i64 batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
        Sums sums = {};
        sum_tile(sums, shared, p, tile, batch);
        Finish finish(Read<Parameters>{p});
        i64 line = tile.line + warp_line(), column = tile.column + warp_column();
        Beside<SUMMANDS> beside(p, finish, batch, tile.head, line, column);
        Target target{p.out + tile.part * p.part_stride +
                          p.out_view.at(batch, tile.head, line, column),
                      p.out_view.line,
                      p.out_view.column,
                      line,
                      int(min(p.lines - line, i64(WARP_LINES))),
                      int(min(p.columns - column, i64(WARP_COLUMNS))),
                      p.whole_stores != 0};
        float* waiting = reinterpret_cast<float*>(shared) + threadIdx.x / 32 * WAITING;
        store_warp(waiting, sums, target, finish, beside);
        __syncthreads();
    }
}
