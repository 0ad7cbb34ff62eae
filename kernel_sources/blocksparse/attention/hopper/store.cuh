// A warp's sixteen finished rows to device memory, 16 bytes a lane, and their logarithms.
#pragma once

#include "blocksparse/attention/hopper/softmax.cuh"

// Of a matrix of words, of which the four lanes of a row have a column each, a row each.
__device__ __forceinline__ void turn(u32 (&words)[4]) {
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
        bool upper = lane & apart;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & apart) continue;
            u32 &low = words[i], &high = words[i + apart];
            u32 other = __shfl_xor_sync(ALL_LANES, upper ? low : high, apart);
            if (upper) low = other;
            else high = other;
        }
    }
}

// Sums of values, of which those of a row without weights may be anything.
__device__ __forceinline__ void store_rows(const float (&sums)[WIDTH / 2], const Rows& stats,
                                           const Parameters& p, int head, int batch,
                                           const Sixteen& rows, float factor) {
    const Strides& strides = p.out_strides;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = rows.of(h);
        float share = stats.share(h) * factor;
        bool none = stats.sum[h] == 0.0f, exists = row < p.queries;
        InputT* to = p.out + batch * strides.batch + head * strides.head + row * strides.row;
#pragma unroll
        for (int first = 0; first < WIDTH / 8; first += 4) {
            u32 words[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + i >= WIDTH / 8) break;
                const float* pair = sums + 4 * (first + i) + 2 * h;
                words[i] = none ? 0 : pack<InputT>(pair[0] * share, pair[1] * share);
            }
            turn(words);
            int column = (first + int(threadIdx.x) % 4) * 8;
            if (!exists || column >= p.values) continue;
            store_vector(reinterpret_cast<u32*>(to + column),
                         Vector<u32, 4>{words[0], words[1], words[2], words[3]});
        }
        if (p.lse && exists && threadIdx.x % 4 == 0)
            p.lse[(i64(batch) * p.heads + head) * p.queries + row] = stats.logarithm(h);
    }
}
