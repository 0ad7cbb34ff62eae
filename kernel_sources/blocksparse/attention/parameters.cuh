// What the launches of the portable kernels are given beside what score.cuh has, and where a CTA
// is.
#pragma once

// From one batch, head and row of an operand to the next.
struct Strides {
    i64 batch, head, row;
    template <class T>
    __device__ __forceinline__ T* of(T* data, int of_batch, int of_head) const {
        return data + of_batch * batch + of_head * head;
    }
};

struct Sizes {
    int batch, heads, group;    // heads of q, and how many share one of k and v
    int queries, keys;
    int grid_rows, row_words;   // of the layout: blocks of a column, words of a row
    int grid_cols, col_words;
    int layout_batch, layout_head;
    int feature_chunks, value_chunks;  // of 16 bytes
    int tiles;                         // of a head

    __device__ __forceinline__ i64 layout(int of_batch, int of_head) const {
        return i64(of_batch) * layout_batch + i64(of_head) * layout_head;
    }
    // The words of a head's rows of blocks, and of its columns.
    __device__ __forceinline__ Bits rows_of(const u32* bits, int of_batch, int of_head) const {
        i64 lines = layout(of_batch, of_head) * grid_rows;
        return {bits + lines * row_words, grid_rows, row_words};
    }
    __device__ __forceinline__ Bits cols_of(const u32* bits, int of_batch, int of_head) const {
        i64 lines = layout(of_batch, of_head) * grid_cols;
        return {bits + lines * col_words, grid_cols, col_words};
    }
};

// Which tile of which head a CTA has. Those of one head follow each other, its last rows first:
// with CAUSAL these have most to do.
struct Place {
    int batch, head, tile;

    __device__ __forceinline__ Place(const Sizes& sizes, int heads) {
        u32 rest = blockIdx.x / u32(sizes.tiles);
        tile = int(blockIdx.x % u32(sizes.tiles));
        head = int(rest % u32(heads));
        batch = int(rest / u32(heads));
    }
};
