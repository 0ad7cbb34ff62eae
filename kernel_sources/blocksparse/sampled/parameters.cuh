// What a launch of sampled.cuh is given, and what its CTAs compute.
#pragma once

#include "blocksparse/store.cuh"

constexpr int ROWS = Config::ROWS, COLS = Config::COLS;  // of a block
constexpr int SLOTS = Config::SLOTS;                     // blocks of a CTA
constexpr int STAGES = Config::STAGES;                   // under way
// Whether out has float32 sums of parts of the depth, those of one part behind those of another,
// and the epilogue is empty.
constexpr bool PARTIAL = Config::PARTIAL;
constexpr Access ACCESS_A = Config::ACCESS_A, ACCESS_B = Config::ACCESS_B;

constexpr u32 ALL = 0xffffffffu;  // lanes

struct Operands {
    const int* rows;
    const int* cols;
    const InputT* a;
    const InputT* b;
    OutputT* out;
};

struct Parameters : Operands,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// The part of the depth that a CTA sums up.
struct Part {
    int index, first, depth;

    __device__ __forceinline__ explicit Part(const Parameters& p) {
        index = PARTIAL ? blockIdx.x / p.groups : 0;
        first = PARTIAL ? index * int(p.part_depth) : 0;
        depth = PARTIAL ? min(int(p.depth) - first, int(p.part_depth)) : int(p.depth);
    }
};

// The slots of a CTA, of which lane i of each warp has what is of the i-th.
struct Slots {
    i64 first;
    i64 left, right;  // elements from a and b to the lines of this lane's block
    u32 live;         // slots that hold a block
    int panel;        // the first slot of the CTA with this lane's rows of a, all but one skipped

    __device__ __forceinline__ explicit Slots(const Parameters& p) {
        int lane = threadIdx.x % 32;
        first = i64(PARTIAL ? blockIdx.x % p.groups : blockIdx.x) * SLOTS;
        bool exists = lane < SLOTS && first + lane < p.capacity;
        int row = exists ? p.rows[first + lane] : -1, col = exists ? p.cols[first + lane] : -1;
        live = __ballot_sync(ALL, row >= 0);
        int before = __shfl_up_sync(ALL, row, 1);
        u32 begins = __ballot_sync(ALL, lane == 0 || row != before);
        panel = 31 - __clz(int(begins & (2u << lane) - 1));
        int head = max(row, 0) / int(p.grid_rows);
        left = head * p.a_view.panel + i64(row - head * int(p.grid_rows)) * ROWS * p.a_view.line;
        right = head * p.b_view.panel + i64(col) * COLS * p.b_view.line;
    }
    __device__ __forceinline__ bool is_live(int slot) const { return live >> slot & 1; }
    __device__ __forceinline__ int panel_of(int slot) const {
        return SLOTS == 1 ? 0 : __shfl_sync(ALL, panel, slot);
    }
};
