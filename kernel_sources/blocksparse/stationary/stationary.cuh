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

// Where a lane of a warp begins to write, in elements from the first of a slot.
__device__ __forceinline__ i64 own_place(i64 row_step) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * WARP_ROWS % BLOCK;
    if (BLOCK == 16) return lane / 4 * row_step + exchanged_column();
    return (row + lane / CHUNKS) * row_step + lane % CHUNKS * 8;
}

// Two lines of blocks of 16: of each column of blocks that one of them stores the fragments of b
// are read once.
__device__ __forceinline__ void multiply_lines(const Rows& rows, const Parameters& p,
                                               const Finish& finish, const RightReader& reader,
                                               const u32* words, u32 stage) {
    auto said = load_vector<u32, 4>(words + 4 * (threadIdx.x / 32));
    u32 bits[2] = {said.element[0], said.element[2]};
    int slot[2] = {int(said.element[1]), int(said.element[3])};
    int lane = threadIdx.x % 32;
    u32 either = bits[0] | bits[1];
#pragma unroll 1
    while (either) {
        int at = __ffs(int(either)) - 1;
        either &= either - 1;
        u32 live = (bits[0] >> at & 1) | (bits[1] >> at & 1) << 1;
        u32 begin = reader.begin(stage, at);
        Sums sums;
        if (live == 3) multiply<3>(sums, rows.left, begin);
        else if (live == 1) multiply<1>(sums, rows.left, begin);
        else multiply<2>(sums, rows.left, begin);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!(live >> i & 1)) continue;
            Beside<SUMMANDS> beside(p, finish, rows.batch, slot[i], lane / 4, lane % 4 * 2);
            finish_sums(sums[i], finish, beside, 0, 0);
            store_sums(sums[i], rows.to + slot[i] * p.slot_step, p.row_step);
            ++slot[i];
        }
    }
}

// A line of larger blocks, or half of one's rows.
__device__ __forceinline__ void multiply_line(const Rows& rows, const Parameters& p,
                                              const Finish& finish, const RightReader& reader,
                                              const u32* words, u32 stage, unsigned char* staging) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto said = load_vector<u32, 2>(words + warp * WARP_ROWS / BLOCK * 2);
    u32 bits = said.element[0];
    int slot = int(said.element[1]);
#pragma unroll 1
    for (; bits; bits &= bits - 1, ++slot) {
        int first = (__ffs(int(bits)) - 1) * (BLOCK / 16);
        Beside<SUMMANDS> beside(p, finish, rows.batch, slot,
                                warp * WARP_ROWS % BLOCK + lane / 4, lane % 4 * 2);
#pragma unroll(EPILOGUE || DEPTH > 64 ? 1 : 2)  // as there are registers
        for (int group = 0; group < BLOCK / 16; ++group) {
            Sums sums;
            multiply<3>(sums, rows.left, reader.begin(stage, first + group));
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                finish_sums(sums[tile], finish, beside, tile * 16, group * 16);
                stage_sums(sums[tile], shared_address(staging), tile, group);
            }
        }
        __syncwarp();
        store_rows(staging, rows.to + slot * p.slot_step, p.row_step);
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
        if (kind == END) break;
        if (kind == COLUMNS_OF_B) {
            if constexpr (BLOCK == 16)
                multiply_lines(rows, p, finish, reader, words, stage);
            else
                multiply_line(rows, p, finish, reader, words, stage,
                              s.out + warp * WARP_ROWS * BLOCK * int(sizeof(OutputT)));
        } else if (int(kind) == warp * WARP_ROWS / PANEL) {
            read_left(rows.left, stage, warp * WARP_ROWS % PANEL / 16);
            rows.batch = int(words[BATCH]);
            rows.to = p.out + rows.batch * p.batch_step + own_place(p.row_step);
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
        clear_rest(p);
        consume(p, s);
    }
}
