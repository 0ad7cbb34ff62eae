// Rows of stored blocks, as softmax and its gradient read them: the values of a line of blocks lie
// side by side, from its first slot to that of the next line.
//
// A task is ROWS rows of a line of blocks, read by 1 to 8 of a block's warps. A warp's access is of
// LANES neighbours, 128 bytes at least, of each of BLOCKS blocks; a thread has CHUNKS of these
// chunks in registers, and begins anew where a row is longer. Slots that hold no block are cleared
// by the same launch.
//
// Facts and struct Fixed: class Rows of kernlib/families/blocksparse/kernels/softmax.py.
#pragma once

#include "blocksparse/softmax/strides.cuh"

using InputT = Config::InputT;           // of values
constexpr int CHUNKS = Config::CHUNKS;   // that a thread keeps in registers
constexpr int BLOCK_COLUMNS = Config::BLOCK_COLUMNS;
// Whether chunks are 16 bytes side by side, aligned, of each operand.
constexpr bool VECTORS = Config::VECTORS;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int CHUNK = 16 / sizeof(InputT);
constexpr int ROW_LANES = BLOCK_COLUMNS / CHUNK;       // lanes that read a row of a block
constexpr int LANES = ROW_LANES < 8 ? 8 : ROW_LANES;  // that read a task's rows of one
constexpr int ROWS = LANES / ROW_LANES, BLOCKS = 32 / LANES;

typedef Vector<InputT, CHUNK> Chunk;

// What one thread reads of each entry of the batch.
struct Place {
    u32 first, blocks;         // slot of its line's first block, and how many there are
    u32 line, row, column;     // line of blocks, row in it, first column of its chunks in a block
    u32 ahead, apart;          // its first block of the line, and from chunk to chunk
};

__device__ __forceinline__ Place place_of(const Fixed& sizes, const int* row_ranks,
                                          const int* counts) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 task = (blockIdx.x * WARPS + warp) >> sizes.team_bits;
    const u32 tasks = sizes.block_rows / ROWS;  // of a line, a power of 2
    const u32 warps = 1u << sizes.team_bits;
    Place place = {};
    place.line = task >> sizes.task_bits;
    place.row = (task & (tasks - 1)) * ROWS + lane / ROW_LANES % ROWS;
    place.column = lane % ROW_LANES * CHUNK;
    place.ahead = (warp & (warps - 1)) * BLOCKS + lane / LANES;
    place.apart = warps * BLOCKS;
    if (place.line < sizes.lines) {
        const int* begin = row_ranks + i64(place.line) * sizes.words;
        place.first = *begin;
        const bool last = place.line + 1 == sizes.lines;
        place.blocks = (last ? *counts : begin[sizes.words]) - place.first;
    }
    return place;
}

// How many of CHUNKS accesses from block `at` of the line on have a block for some lane of a warp.
// The others are left out by branches that the warp takes together: few rows are as long as there
// are registers for, and exponentials of what is not there cost as many instructions.
__device__ __forceinline__ int accesses(const Place& place, u32 at) {
    const u32 first = at + place.ahead - threadIdx.x % 32 / LANES;
    int count = 0;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) count += first + k * place.apart < place.blocks;
    return count;
}

// How far a thread's part of slot 0 is from the first value, for an entry of the batch.
__device__ __forceinline__ i64 offset_of(const SlotStrides& strides, const Fixed& sizes,
                                         const Place& place, u32 entry) {
    return entry / sizes.inner * strides.outer + entry % sizes.inner * strides.inner +
           place.row * strides.row + place.column * strides.column;
}

// The same chunk, of which the compiler knows nothing: else it keeps elements of half types as
// floats, in twice the registers, from their first use to the last.
__device__ __forceinline__ void keep_packed(Chunk& chunk) {
    u32* words = reinterpret_cast<u32*>(&chunk);
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
}

template <class T>
__device__ __forceinline__ Vector<T, CHUNK> read_chunk(const T* from, i64 stride) {
    if constexpr (VECTORS) {
        return load_vector<T, CHUNK>(from);
    } else {
        Vector<T, CHUNK> found;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) found.element[e] = from[e * stride];
        return found;
    }
}

__device__ __forceinline__ void write_chunk(InputT* to, i64 stride, const Chunk& value) {
    if constexpr (VECTORS) {
        // A plain store becomes one of 4 bytes for each pair of halves.
        __stcg(reinterpret_cast<int4*>(to), *reinterpret_cast<const int4*>(&value));
    } else {
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) to[e * stride] = value.element[e];
    }
}

// Combines the values of a warp's lanes that read the same row.
template <class Combine>
__device__ __forceinline__ float over_row(float value, Combine combine) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
        if (mask < ROW_LANES || mask >= LANES)
            value = combine(value, __shfl_xor_sync(0xffffffff, value, mask));
    return value;
}

struct Larger {
    __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
};
struct Sum {
    __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};

// What each warp has found of a task's rows, in one of two places by turns: so one barrier is
// enough, as nobody writes what is still read.
template <class T>
struct Exchange {
    T* found;  // of shared memory: 2 * WARPS * ROWS
    u32 turn = 0;

    // Hands on a value of this thread's row, and begins what `next` then goes through.
    __device__ __forceinline__ const T* put(const Fixed& sizes, const T& value) {
        const u32 warp = threadIdx.x / 32, row = threadIdx.x % 32 / ROW_LANES % ROWS;
        T* here = found + turn * (WARPS * ROWS);
        here[warp * ROWS + row] = value;
        __syncthreads();
        turn ^= 1;
        return here + (warp >> sizes.team_bits << sizes.team_bits) * ROWS + row;
    }
};

// Zeros in the slots behind the live ones.
__device__ __forceinline__ void clear_slots(InputT* out, const SlotStrides& strides,
                                            const Fixed& sizes, u32 live) {
    for (u32 slot = live + blockIdx.x; slot < sizes.capacity; slot += gridDim.x)
        for (u32 entry = blockIdx.y; entry < sizes.batch; entry += gridDim.y)
            for (u32 i = threadIdx.x; i < sizes.block_rows * ROW_LANES; i += THREADS) {
                Place place = {};
                place.row = i / ROW_LANES;
                place.column = i % ROW_LANES * CHUNK;
                InputT* to = out + slot * strides.slot;
                write_chunk(to + offset_of(strides, sizes, place, entry), strides.column, Chunk{});
            }
}
