// A warpgroup's finished tile, through shared memory, to device memory by the copy engine.
#pragma once

#include "blocksparse/hopper/parameters.cuh"
#include "blocksparse/hopper/stage_part.cuh"

constexpr int OUT_PARTS = 2;  // of a warpgroup's result under way

// What becomes of each accumulator before it is rounded: `row` and `column` are those of the part's
// first one, `line` and `column` of the result. 0 for what lies outside of it.
struct Finisher {
    const Finish& finish;
    Beside<Config::SUMMANDS> beside;
    int lines, columns;

    __device__ __forceinline__ Finisher(const Parameters& p, const Finish& finish, const Tile& tile)
        : finish(finish), beside(p, finish, tile.batch, tile.head, 0, 0), lines(p.lines),
          columns(p.columns) {}

    // Number i of a part that begins at a line and a column of the result.
    __device__ __forceinline__ float operator()(float sum, int i, int line, int column) const {
        int lane = threadIdx.x % 32;
        int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
        int across = i / 4 * 8 + lane % 4 * 2 + i % 2;
        line = min(line + (Config::SUMS_ACROSS ? across : row), lines - 1);
        column = min(column + (Config::SUMS_ACROSS ? row : across), columns - 1);
        Given<Config::SUMMANDS> given;
        given.read(beside, line, column);
        return given.finished(finish, sum, line);
    }
};

// One part to its place in the result, by way of the shared memory that the copy engine has read
// longest ago.
template <class F>
__device__ __forceinline__ void store_part(const F& sums, const Parameters& p, unsigned char* out,
                                           int& place, const Tile& tile, int warpgroup, int line,
                                           int column) {
    bool leader = threadIdx.x % 128 == 0;
    unsigned char* staged = out + place * PIECE_BYTES;
    if (leader) wait_for_reads<OUT_PARTS - 1>();
    sync_threads(1 + warpgroup, 128);
    stage_part(sums, shared_address(staged));
    fence_shared_writes();
    sync_threads(1 + warpgroup, 128);
    if (leader && line < p.lines && column < p.columns) {
        int inner = Config::LINES_LAST ? line : column, outer = Config::LINES_LAST ? column : line;
        store_box(p.out, staged, inner, outer, tile.head, tile.batch);
    }
    if (leader) commit_stores();
    if (++place == OUT_PARTS) place = 0;
}
