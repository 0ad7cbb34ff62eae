// The sums of a tile: left through registers, one fragment of wgmma for each l.
#pragma once

#include "kronecker_sparse/interleaved_gradient/tile.cuh"

// Steps whose fragments a thread holds at once: as many as there are registers for.
constexpr int HELD = LANES * (SUMS + 8) > 192 ? 1 : TILE_DEPTH / STEP;
// Neighbouring l that a thread reads at once: as many as divide d and 16 bytes.
constexpr int TOGETHER = LANES % 8 == 0 ? 8 : LANES % 4 == 0 ? 4 : LANES % 2 == 0 ? 2 : 1;
constexpr int READS = LANES / TOGETHER;

using Read = Vector<InputT, TOGETHER>;

// Numbers `low` and `high` side by side.
__device__ __forceinline__ u32 side_by_side(InputT low, InputT high) {
    return u32(low.bits) | u32(high.bits) << 16;
}

// Where a thread finds its elements in a stage. Of wgmma's rows and depth it has rows g and g + 8
// of its warp's sixteen, and n = 2t, 2t + 1, 2t + 8, 2t + 9.
struct Fragments {
    u32 place[2][READS];  // of row g or g + 8, n = 2t; of n = 2t + 1 the chunk beside it
    __device__ __forceinline__ explicit Fragments(int warpgroup) {
        int lane = threadIdx.x % 32, n = lane % 4 * 2;
        int row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
            for (int read = 0; read < READS; ++read) {
                int element = (row + 8 * side) * LANES + read * TOGETHER;
                int chunk = element % ROW / 8 ^ n;
                place[side][read] = element / ROW * BOX_BYTES + n * ROW_BYTES + chunk * 16 +
                                    element % 8 * 2;
            }
        }
    }

    __device__ __forceinline__ void load(u32 (&a)[LANES][4], const unsigned char* stage,
                                         int step) const {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
#pragma unroll
            for (int read = 0; read < READS; ++read) {
                u32 at = place[part % 2][read] + (step * STEP + part / 2 * 8) * ROW_BYTES;
                Read x = *reinterpret_cast<const Read*>(stage + at);
                Read y = *reinterpret_cast<const Read*>(stage + ((at + ROW_BYTES) ^ 16));
#pragma unroll
                for (int l = 0; l < TOGETHER; ++l)
                    a[read * TOGETHER + l][part] = side_by_side(x.element[l], y.element[l]);
            }
        }
    }
};

// Both numbers of a word of a fragment.
template <class T>
__device__ __forceinline__ float low_number(u32 word) { return convert<float>(T{u16(word)}); }
template <class T>
__device__ __forceinline__ float high_number(u32 word) {
    return convert<float>(T{u16(word >> 16)});
}
template <>
__device__ __forceinline__ float high_number<bfloat16_t>(u32 word) {
    return __uint_as_float(word & 0xffff0000u);
}

// Sums of left over the n of a step, of rows g and g + 8.
__device__ __forceinline__ void add_left(float (&sums)[LANES][2], const u32 (&a)[LANES][4]) {
#pragma unroll
    for (int l = 0; l < LANES; ++l) {
#pragma unroll
        for (int part = 0; part < 4; ++part)
            sums[l][part % 2] += low_number<InputT>(a[l][part]) + high_number<InputT>(a[l][part]);
    }
}

// The other warpgroup multiplies while this one reads fragments: ptxas would serialise wgmma whose
// fragments are read while others are under way.
__device__ __forceinline__ void multiply_tile(float (&sums)[LANES][SUMS],
                                              float (&of_left)[LANES][2], const Shared& s,
                                              const Fragments& fragments, int depth, Ring& ring) {
#pragma unroll 1
    for (int block = 0; block < depth; ++block) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const unsigned char* stage = s.stages + ring.stage * STAGE_BYTES;
        u64 right = matrix_descriptor(shared_address(stage) + LEFT_BYTES, BOX_BYTES, 8 * ROW_BYTES);
#pragma unroll
        for (int first = 0; first < TILE_DEPTH / STEP; first += HELD) {
            u32 a[HELD][LANES][4];
#pragma unroll
            for (int i = 0; i < HELD; ++i) fragments.load(a[i], stage, first + i);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
#pragma unroll
                for (int l = 0; l < LANES; ++l) {
                    int place = l * RIGHT_BYTES + (first + i) * STEP * ROW_BYTES;
                    multiply(sums[l], a[i][l], right + (place >> 4), block + first + i > 0);
                }
            }
            wgmma_commit();
            if (BIAS) {
#pragma unroll
                for (int i = 0; i < HELD; ++i) add_left(of_left, a[i]);
            }
            wgmma_wait<0>();
        }
        barrier_arrive_by_warp(&s.empty[ring.stage]);
        ring.next();
    }
}
