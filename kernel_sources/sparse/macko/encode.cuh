// The entries of a matrix in MACKO's 4-bit delta format: how many each row has (COUNT), and then
// the entries themselves, where row_ptr says. A warp walks a row, 256 columns at a time, eight a
// lane.
//
// A value at column c, the one before it at p (-1 at a row's start), makes (c - p - 1) / 16 pads at
// columns p + 16, p + 32 and so on, and an entry with code (c - p - 1) % 16. Only the first value
// of a lane's eight may have pads, and its p is the last value of some lane below, or of a step
// before.
//
// Floor: the bytes of the matrix over 4.3 TB/s, once to count and once to encode.
//
// The generated source defines before it includes this file:
//   BitsT              a value's bits
//   RowT               of row_ptr
//   MAGNITUDE, INFINITE   bits behind the sign, all and the infinity's
//   COUNT              1 to count
//   PARAMETER_BYTES    Parameters as the codec lays them out
#pragma once

#include "common/types.cuh"

constexpr int THREADS = 128;
constexpr int RUN = 8;
constexpr int LAST_CODE = 15;
constexpr u32 ALL_LANES = 0xffffffff;

// Laid out by kernlib/families/sparse/formats/macko_gpu.py.
struct Parameters {
    // written at each launch
    const BitsT* dense;
#if COUNT
    int* counts;     // of entries, then of values, by row
#else
    const RowT* row_ptr;
    BitsT* values;
    u32* deltas;     // zeros
#endif
    // fixed by the plan
    i64 rows, columns, row_stride;
    u64 vectors;     // whether runs of eight columns take 16-byte loads
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as the codec lays it out");

__device__ __forceinline__ bool is_value(BitsT bits) { return (bits & MAGNITUDE) != 0; }

// A lane's columns of a step, zeros behind the last one.
__device__ __forceinline__ void read_run(BitsT (&run)[RUN], const Parameters& p, const BitsT* row,
                                         i64 column) {
    constexpr int CHUNK = 16 / sizeof(BitsT);
    if (p.vectors && column + RUN <= p.columns) {
#pragma unroll
        for (int i = 0; i < RUN; i += CHUNK) {
            auto read = load_vector<BitsT, CHUNK>(row + column + i);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) run[i + e] = read.element[e];
        }
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) run[i] = column + i < p.columns ? row[column + i] : BitsT(0);
    }
}

#if !COUNT
// Codes of neighbouring entries, put into their words together.
struct Codes {
    u32* deltas;
    i64 place;  // of the next entry
    u32 word;

    __device__ __forceinline__ void flush(i64 last) {
        if (word) atomicOr(deltas + last / 8, word);
        word = 0;
    }
    __device__ __forceinline__ void put(u32 code) {
        word |= code << (place % 8 * 4);
        if (++place % 8 == 0) flush(place - 1);
    }
};

// The entries of a lane's run, from `place` on; `before` is the column of the value before it.
__device__ __forceinline__ void write_run(const Parameters& p, const BitsT* row,
                                          const BitsT (&run)[RUN], i64 column, i64 before,
                                          i64 place) {
    Codes codes{p.deltas, place, 0};
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        if (!is_value(run[i])) continue;
        i64 gap = column + i - before - 1;
        for (; gap > LAST_CODE; gap -= LAST_CODE + 1) {
            before += LAST_CODE + 1;
            p.values[codes.place] = row[before];  // either zero
            codes.put(LAST_CODE);
        }
        bool is_number = (run[i] & MAGNITUDE) <= INFINITE;
        p.values[codes.place] = is_number ? run[i] : MAGNITUDE;
        codes.put(u32(gap));
        before = column + i;
    }
    codes.flush(codes.place);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
#if COUNT
sparse_macko_count(const __grid_constant__ Parameters p) {
#else
sparse_macko_encode(const __grid_constant__ Parameters p) {
#endif
    int lane = threadIdx.x % 32;
    i64 index = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (index >= p.rows) return;
    const BitsT* row = p.dense + index * p.row_stride;
    i64 last = -1;  // column of the last value so far
    int values = 0;
#if COUNT
    int entries = 0;
#else
    i64 place = p.row_ptr[index];
#endif
    for (i64 first = 0; first < p.columns; first += 32 * RUN) {
        i64 column = first + lane * RUN;
        BitsT run[RUN];
        read_run(run, p, row, column);
        u32 mask = 0;
#pragma unroll
        for (int i = 0; i < RUN; ++i) mask |= u32(is_value(run[i])) << i;
        u32 lanes = __ballot_sync(ALL_LANES, mask != 0);
        if (lanes == 0) continue;
        u32 below = lanes & ((1u << lane) - 1);
        int own = lane * RUN + 31 - __clz(mask);  // its last value
        int other = __shfl_sync(ALL_LANES, own, below ? 31 - __clz(below) : 0);
        int end = __shfl_sync(ALL_LANES, own, 31 - __clz(lanes));
        i64 before = below ? first + other : last;
        last = first + end;
        int count = 0;
        if (mask) count = __popc(mask) + int((column + __ffs(mask) - 2 - before) / (LAST_CODE + 1));
#if COUNT
        entries += count;
        values += __popc(mask);
#else
        int sum = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int lower = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += lower;
        }
        if (mask) write_run(p, row, run, column, before, place + sum - count);
        place += __shfl_sync(ALL_LANES, sum, 31);
#endif
    }
#if COUNT
    entries = __reduce_add_sync(ALL_LANES, entries);
    values = __reduce_add_sync(ALL_LANES, values);
    if (lane == 0) {
        p.counts[index] = entries;
        p.counts[p.rows + index] = values;
    }
#endif
}
