// What the launches of the portable kernels have in common: the words of a layout, and where a CTA
// is.
#pragma once

#include "blocksparse/attention/walk.cuh"

// The words of a head's rows of blocks, and of its columns.
__device__ __forceinline__ i64 layout_of(const Fixed& p, int batch, int head) {
    return i64(batch) * p.layout_batch + i64(head) * p.layout_head;
}
__device__ __forceinline__ Bits rows_of(const Fixed& p, const u32* bits, int batch, int head) {
    i64 lines = layout_of(p, batch, head) * p.grid_rows;
    return {bits + lines * p.row_words, p.grid_rows, p.row_words};
}
__device__ __forceinline__ Bits cols_of(const Fixed& p, const u32* bits, int batch, int head) {
    i64 lines = layout_of(p, batch, head) * p.grid_cols;
    return {bits + lines * p.col_words, p.grid_cols, p.col_words};
}

// Which tile of which head a CTA has. Those of one head follow each other, its last rows first:
// with CAUSAL these have most to do.
struct Place {
    int batch, head, tile;

    __device__ __forceinline__ Place(const Fixed& p, int heads) {
        u32 rest = blockIdx.x / u32(p.tiles);
        tile = int(blockIdx.x % u32(p.tiles));
        head = int(rest % u32(heads));
        batch = int(rest / u32(heads));
    }
};
