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
    }
}

// The logarithms of sums of exponentials, once the sums of values need no registers any more.
__device__ __forceinline__ void store_logarithms(const Rows& stats, const Parameters& p, int head,
                                                 int batch, const Sixteen& rows) {
    if (!p.lse || threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = rows.of(h);
        if (row >= p.queries) continue;
        const i64 at = (i64(batch) * p.heads + head) * p.queries + row;
        const float of_sum = log2f(stats.sum[h]), lse = stats.logarithm(h, of_sum);
        p.lse[at] = lse;
        if (HAS_SCORE && p.rest) p.rest[at] = rest_of(lse, stats.most[h], LN_2 * of_sum);
    }
}
