// The stored blocks of a product of dense matrices whose depth is at most 128, on Hopper, for
// square blocks of 16, 32 and 64 and half types:
//   values[z, slot] = Finish(a[z, h, rows of the slot, :] * b[z, h, :, its columns]), 0 in slots
// that hold no block.
// Floors on an H200: the blocks written once at 3.37 TB/s, which is all: 80 us at 16 heads of
// 4096 x 4096 and a density of 0.5. Beside it, there and at a depth of 64: b from L2 once for each
// 512 rows, 67 MB or 7 us at 9 TB/s; 17 GFLOP or 30 us at the 566 TFLOP/s of mma.sync. A product
// block by block takes 36 bytes of each depth from L2 for a block of 16, eight in a row: 1.2 GB.
// Reached on an H100, of 3.26 TB/s: 116, 113 and 115 us for blocks of 16, 32 and 64, whose bytes
// take 82; 127, 126 and 128 at a depth of 128. At a density of .1, of 16 us of bytes, 34, 32, 32.
//
// So the rows of a stay and the columns of b stream past. Persistent CTAs take units: 512 rows of a
// head and batch beside some or all of the panels of 128 columns. A producer warp looks at the bits
// of the unit's lines of blocks, a lane at each, and brings panels that some line needs, behind
// 64 x 64 pieces of the rows; with a panel goes what each line stores of it and in which slot, so
// that the others never wait for a list. 16 warps keep 32 rows by the whole depth as fragments, 32
// or 64 registers, and go through the panel's blocks of their lines; a dead block costs nothing, a
// panel 45 to 57 instructions. A ring of 128 to 192 KB lets warps be some panels apart, as lines
// have blocks in different places.
//
// Instructions of a warp, of SASS without an epilogue, at depths of 64 and 128:
//   16 x 16, of one of its two lines   71, 86; of both lines 93, 112 for two blocks
//   32 x 32                            87, 171
//   64 x 64, of half the rows          208, 296
// A multiprocessor has to write 512 bytes in 35 clocks, 140 instructions; at a density of 0.5 it
// issues 66 for these at blocks of 16, 24 at 32. Shared memory gives 35 * 128 bytes meanwhile, and
// blocks of 16 at a depth of 128 take 30 * 128 of them, more than anything else does.
//
// 640 threads have 96 registers each at launch; the warps that multiply take 112 of them, from the
// producer's warpgroup. Blocks of 16 have no way over shared memory: two lanes change words and
// each stores 8 bytes, as the 512 bytes of a block lie side by side. Larger ones go through rows of
// their warp, 16 bytes a lane.
//
// Sums are in order of depth, one after the other: bits depend on neither layout nor batch.
//
// Facts and struct Fixed: class Stationary of
// kernlib/families/blocksparse/kernels/sdd/stationary.py.
#pragma once

#include "blocksparse/stationary/fragments.cuh"
#include "blocksparse/stationary/produce.cuh"
#include "blocksparse/stationary/store.cuh"

// What a warp keeps over all panels of a unit.
struct Rows {
    Left left;
    OutputT* to;  // this lane's place in slot 0
    int batch;
};

// Of each of a warp's lines of blocks the bits of a panel, and the slot of the first.
using Said = Vector<u32, 2 * WARP_LINES>;

// Where a lane of a warp begins to write, in elements from the first of a slot.
__device__ __forceinline__ int own_place() {
    int lane = threadIdx.x % 32;
    if (BLOCK == 16) return lane / 4 * BLOCK + exchanged_column();
    return threadIdx.x / 32 * WARP_ROWS % BLOCK * BLOCK + lane * 8;
}

// Two lines of blocks of 16: of each column of blocks that one of them stores the fragments of b
// are read once.
__device__ __forceinline__ void multiply_lines(const Rows& rows, const Parameters& p,
                                               const Finish& finish, const RightReader& reader,
                                               const Said& said, u32 stage) {
    u32 bits[2] = {said.element[0], said.element[2]}, either = bits[0] | bits[1];
    int slot[2] = {int(said.element[1]), int(said.element[3])}, lane = threadIdx.x % 32;
    Columns columns;
    u32 at = __ffs(int(either)) - 1;
    if (either) columns.begin(reader.begin(stage, at));
#pragma unroll 1
    while (either) {
        u32 live = (bits[0] >> at & 1) | (bits[1] >> at & 1) << 1;
        Sums sums;
        if (live == 3) multiply<3>(sums, rows.left, columns);
        else if (live == 1) multiply<1>(sums, rows.left, columns);
        else multiply<2>(sums, rows.left, columns);
        either &= either - 1;
        at = __ffs(int(either)) - 1;
        if (either) columns.begin(reader.begin(stage, at));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!(live >> i & 1)) continue;
            Beside<SUMMANDS> beside(p, finish, rows.batch, slot[i], lane / 4, lane % 4 * 2);
            finish_sums(sums[i], finish, beside, 0, 0);
            store_sums(sums[i], rows.to + i64(slot[i]) * BLOCK_SIZE);
            ++slot[i];
        }
    }
}

// A line of larger blocks, or half of one's rows.
__device__ __forceinline__ void multiply_line(const Rows& rows, const Parameters& p,
                                              const Finish& finish, const RightReader& reader,
                                              const Said& said, u32 stage, unsigned char* staging) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 bits = said.element[0];
    int slot = int(said.element[1]);
#pragma unroll 1
    for (; bits; bits &= bits - 1, ++slot) {
        u32 first = (__ffs(int(bits)) - 1) * (BLOCK / 16);
        Beside<SUMMANDS> beside(p, finish, rows.batch, slot,
                                warp * WARP_ROWS % BLOCK + lane / 4, lane % 4 * 2);
#pragma unroll(Config::EPILOGUE || DEPTH > 64 ? 1 : 2)  // as there are registers
        for (int group = 0; group < BLOCK / 16; ++group) {
            Sums sums;
            Columns columns;
            columns.begin(reader.begin(stage, first + group));
            multiply<3>(sums, rows.left, columns);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                finish_sums(sums[tile], finish, beside, tile * 16, group * 16);
                stage_sums(sums[tile], shared_address(staging), tile, group);
            }
        }
        __syncwarp();
        store_rows(staging, rows.to + i64(slot) * BLOCK_SIZE);
        __syncwarp();  // the rows have been read
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    int warp = threadIdx.x / 32;
    Finish finish(Read<Parameters>{p});
    RightReader reader;
    Rows rows = {};
    Ring ring;
#pragma unroll 1
    while (true) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const u32* words = s.words + WORDS * ring.stage;
        u32 stage = shared_address(s.stages) + ring.stage * STAGE_BYTES, kind = words[KIND];
        Said said = load_vector<u32, 2 * WARP_LINES>(words + warp * WARP_ROWS / BLOCK * 2);
        if (kind == END) break;
        if (kind == COLUMNS_OF_B) {
            if constexpr (BLOCK == 16)
                multiply_lines(rows, p, finish, reader, said, stage);
            else
                multiply_line(rows, p, finish, reader, said, stage,
                              s.out + warp * WARP_ROWS * BLOCK * int(sizeof(OutputT)));
        } else if (int(kind) == warp * WARP_ROWS / PANEL) {
            read_left(rows.left, stage, warp * WARP_ROWS % PANEL / 16);
            rows.batch = int(words[BATCH]);
            rows.to = p.out + rows.batch * p.batch_step + own_place();
        }
        barrier_arrive_by_warp(&s.empty[ring.stage]);
        ring.next();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_stationary(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(1);
    if (threadIdx.x / 32 >= WARPS) {
        release_registers<32>();
        if (threadIdx.x / 32 == WARPS) produce(p, s);
    } else {
        take_registers<112>();
        clear_rest<BLOCK, WARPS>(p);
        consume(p, s);
    }
}
