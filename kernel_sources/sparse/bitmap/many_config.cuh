// Facts, parameters and tasks of the product of a bitmap matrix with many vectors, for the headers
// that it is made of.
#pragma once

#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/parameters.cuh"
#include "sparse/bitmap/fragments.cuh"

using OutputT = Config::OutputT;                // storage of out
constexpr int WARPGROUPS = Config::WARPGROUPS;  // of a CTA's tile: 64 rows each
constexpr int COLUMNS = Config::COLUMNS;        // vectors of the tile
constexpr int X_STAGES = Config::X_STAGES;      // blocks of 64 columns of x that are on their way
constexpr bool PAIRS = Config::PAIRS;  // two CTAs of a cluster compute the two parts of a tile

constexpr int WARPS = 4 * WARPGROUPS;
constexpr bool WIDE = COLUMNS > 128;  // sums that need the registers of a producer warpgroup
constexpr int THREADS = 32 * (WARPS + (WIDE ? 4 : 1));
constexpr int DEPTH = 64, STEPS = DEPTH / 16;  // columns of a stage of x, and its products
// Left operands: of wide tiles those of a stage are decoded while those of the one before are
// multiplied; else there are other warpgroups to do so.
constexpr int BUFFERS = WARPGROUPS > 2 ? 1 : 2;
constexpr int X_BYTES = COLUMNS * 128;      // of a stage
constexpr int SUMS = COLUMNS / 2;           // of a thread
constexpr int RING_OFFSET = 128;            // behind x: the first slot's barrier

struct Pointers {
    const unsigned char* data;
    const u32* offsets;
    const unsigned char* x;  // packed
    OutputT* out;
    float* sums;             // of tiles that are cut: [part][n][row - first_cut_row]
};

struct Parameters : Pointers,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    alignas(1024) unsigned char x[X_STAGES][X_BYTES];
    u32 ranks[WARPS][WORDS];
    u64 full[X_STAGES], empty[X_STAGES];
};

// What a CTA computes: rows, vectors, and of the matrix's chunks of columns `first` to `last`.
struct Task {
    int row_tile, n, first, last, part;
    bool is_cut, is_idle;

    __device__ __forceinline__ explicit Task(const Parameters& p) {
        int unit = blockIdx.x, tile = unit;
        part = 0, first = 0, last = p.kchunks;
        is_cut = unit >= p.whole_tiles;
        if (is_cut) {
            tile = p.whole_tiles + (unit - p.whole_tiles) / p.parts;
            part = (unit - p.whole_tiles) % p.parts;
            first = part * p.part_chunks + min(part, p.longer_parts);
            last = first + p.part_chunks + (part < p.longer_parts);
        }
        row_tile = tile / p.n_tiles;
        is_idle = row_tile >= p.row_tiles;
        n = tile % p.n_tiles * COLUMNS;
    }
};
