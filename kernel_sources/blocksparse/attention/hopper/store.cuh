// A warp's sixteen finished rows to device memory, 16 bytes a lane, and their logarithms.
#pragma once

#include "blocksparse/attention/hopper/softmax.cuh"
#include "blocksparse/attention/store_rows.cuh"

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
        store_row(sums, h, to, exists, p.values, share, none);
        if (!p.lse || !exists || threadIdx.x % 4 != 0) continue;
        const i64 at = (i64(batch) * p.heads + head) * p.queries + row;
        p.lse[at] = stats.logarithm(h);
        if (HAS_SCORE && p.rest) p.rest[at] = stats.rest(h);
    }
}
