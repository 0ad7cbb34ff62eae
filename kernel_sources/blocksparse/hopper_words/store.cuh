// A warpgroup's finished tile to device memory, from registers, for any strides of the result.
// A warp's store of one accumulator is 8 lines by 4 columns, of two neighbouring ones 8 lines by 8
// columns: whole sectors of 32 bytes, whichever of lines and columns lie side by side.
#pragma once

#include "blocksparse/hopper_words/parameters.cuh"

// The results of one line of a thread: of accumulator i columns 8 * (i / 4) + i % 2 from its first.
struct Line {
    const Finish& finish;
    Beside<SUMMANDS> beside;
    OutputT* out;
    i64 step;
    int line, column, columns;

    __device__ __forceinline__ Line(const Parameters& p, const Finish& finish, const Tile& tile,
                                    int line, int column)
        : finish(finish), beside(p, finish, tile.batch, tile.head, 0, 0),
          out(p.out + tile.batch * p.out_batch + tile.head * p.out_head + line * p.out_line +
              column * p.out_column),
          step(p.out_column), line(line), column(column), columns(p.columns) {}

    __device__ __forceinline__ float finished(float sum, int across) const {
        if (!Config::EPILOGUE) return sum * RESULT_FACTOR;
        Given<SUMMANDS> given;
        given.read(beside, line, column + across);
        return given.finished(finish, sum * RESULT_FACTOR, line);
    }
    __device__ __forceinline__ void store(float sum, int across) const {
        if (column + across < columns) out[across * step] = finished(sum, across);
    }
    // Of an even number of columns, side by side.
    __device__ __forceinline__ void store_pair(float first, float second, int across) const {
        if (column + across >= columns) return;
        Vector<float, 2> pair{{finished(first, across), finished(second, across + 1)}};
        store_vector(out + across, pair);
    }
};

__device__ __forceinline__ void store_tile(const float (&sums)[SUMS], const Finish& finish,
                                           const Parameters& p, const Tile& tile, int warpgroup) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    int line = tile.group * TILE_LINES + warpgroup * 64 + warp * 16 + lane / 4;
    int column = tile.column * TILE_COLUMNS + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half, line += 8) {
        if (line >= p.lines) break;
        Line to(p, finish, tile, line, column);
        if (p.pairs) {
#pragma unroll
            for (int i = 2 * half; i < SUMS; i += 4)
                to.store_pair(sums[i], sums[i + 1], i / 4 * 8);
        } else {
#pragma unroll
            for (int i = 2 * half; i < SUMS; i += 4) {
                to.store(sums[i], i / 4 * 8);
                to.store(sums[i + 1], i / 4 * 8 + 1);
            }
        }
    }
}
