// What kernels of the formats u8, u4 and u2 share: x in shared memory, and the products of a lane's
// codes with it. Lanes read their codes from device memory, DEPTH groups ahead.
#pragma once

#include "common/types.cuh"
#include "common/hopper.cuh"
#include "sparse/slices/codes.cuh"

using InputT = Config::InputT;            // storage of the matrix and of x
using RowT = Config::RowT;                // of rows, as unsigned
constexpr int COLUMNS = Config::COLUMNS;  // vectors of x that a block takes at a time: 1, 2, 4 or 8
constexpr int COPIES = Config::COPIES;    // of x in shared memory
constexpr int THREADS = Config::THREADS;  // of a block
constexpr int BLOCKS = Config::BLOCKS;    // of a multiprocessor
constexpr int DEPTH = Config::DEPTH;      // groups of codes that a lane reads ahead

constexpr int WARPS = THREADS / 32;
constexpr int COLUMN_BYTES = COLUMNS * sizeof(InputT);  // of x, for one column of the matrix
constexpr u32 PITCH = COPIES * COLUMN_BYTES;            // from one column of x to the next
constexpr int CHUNK = 16 / sizeof(InputT);              // elements of one copy of x
constexpr int SUMS = COLUMNS == 1 ? 2 : COLUMNS;        // two chains hide the latency of one
constexpr u32 WHOLE_BYTES = WHOLE_CODES * CODE_BYTES<InputT>;
constexpr RowT NO_ROW = RowT(~RowT(0));

// x[n,c] for one column and all n: 2 to 32 bytes.
struct Gathered {
    static constexpr int WORDS = COLUMN_BYTES < 4 ? 1 : COLUMN_BYTES / 4;
    u32 word[WORDS];

    __device__ __forceinline__ explicit Gathered(u32 address) {
        if constexpr (COLUMN_BYTES == 2) {
            u16 x;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
            word[0] = x;
        } else if constexpr (COLUMN_BYTES == 4) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[0]) : "r"(address));
        } else if constexpr (COLUMN_BYTES == 8) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                : "=r"(word[0]), "=r"(word[1]) : "r"(address));
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                    : "=r"(word[i]), "=r"(word[i + 1]), "=r"(word[i + 2]), "=r"(word[i + 3])
                    : "r"(address + 4 * i));
        }
    }
    __device__ __forceinline__ float operator[](int n) const {
        return element<InputT>(word, n);
    }
};

// sums[i] += value * x[n + i] unless the value is all zero bits: no entry, so that neither infinity
// nor NaN there may reach the sum. Predicated, as ptxas branches around what C++ makes conditional.
template <int COUNT>
__device__ __forceinline__ void add_if_entry(float value, const Gathered& x, int n, float* sums) {
    if constexpr (COUNT == 1) {
        asm("{\n\t"
            ".reg .pred p;\n\t"
            "setp.ne.b32 p, %1, 0;\n\t"
            "@p fma.rn.f32 %0, %2, %3, %0;\n\t"
            "}"
            : "+f"(sums[0]) : "r"(__float_as_uint(value)), "f"(value), "f"(x[n]));
    } else {
        asm("{\n\t"
            ".reg .pred p;\n\t"
            "setp.ne.b32 p, %2, 0;\n\t"
            "@p fma.rn.f32 %0, %3, %4, %0;\n\t"
            "@p fma.rn.f32 %1, %3, %5, %1;\n\t"
            "}"
            : "+f"(sums[0]), "+f"(sums[1])
            : "r"(__float_as_uint(value)), "f"(value), "f"(x[n]), "f"(x[n + 1]));
    }
}

// Adds a group's products. `place` is the address of x at the column of the last code before it,
// with steps that are never 0 at the next one.
template <int COUNT>
__device__ __forceinline__ void add_products(const Group<InputT, COUNT>& group, u32& place,
                                             float (&sums)[SUMS]) {
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
        // The steps up to a code's, times PITCH, in one instruction for each code.
        constexpr u32 UNIT = PITCH * 0x01010101u;
        u32 at = dot_bytes(group.four_steps(e / 4), UNIT >> (24 - 8 * (e % 4)), place);
        if (e % 4 == 3 || e == COUNT - 1) place = at;
        Gathered x(at + e * LEAST_STEP * PITCH);
        float value = element<InputT>(group.values, e);
        if constexpr (COLUMNS == 1) {
            add_if_entry<1>(value, x, 0, &sums[e % 2]);
        } else {
#pragma unroll
            for (int n = 0; n < COLUMNS; n += 2) add_if_entry<2>(value, x, n, sums + n);
        }
    }
    place += COUNT * LEAST_STEP * PITCH;
}

// The codes of one lane in a slice: whole groups, of which DEPTH are on their way, and the rest.
struct Stream {
    static constexpr u32 WHOLE = WHOLE_CODES, HALF = WHOLE / 2, QUARTER = WHOLE / 4;
    using Whole = Group<InputT, WHOLE>;
    const unsigned char* ahead;  // the group to read next
    u32 length;
    Whole ring[DEPTH];
    Group<InputT, HALF> half;
    Group<InputT, QUARTER> quarter;
    Group<InputT, 8 / STEP_BITS> one;  // of u8: lengths of u4 are even, of u2 multiples of 4

    __device__ __forceinline__ void load(Whole& group) {
        group.load(ahead);
        ahead += WHOLE_BYTES;
    }

    // Of `count` codes from a place on.
    __device__ __forceinline__ void open(const unsigned char* data, u32 count) {
        length = count;
        ahead = data;
        const unsigned char* rest = ahead + i64(length & ~(WHOLE - 1)) * CODE_BYTES<InputT>;
#pragma unroll
        for (int k = 0; k < DEPTH; ++k)
            if (WHOLE * k + WHOLE <= length) load(ring[k]);
        if (length & HALF) half.load(rest);
        if (length & QUARTER) quarter.load(rest + (length & HALF) * CODE_BYTES<InputT>);
        if constexpr (STEP_BITS == 8)
            if (length & 1) one.load(rest + (length & 6) * CODE_BYTES<InputT>);
    }

    __device__ __forceinline__ void run(u32 place, float (&sums)[SUMS]) {
        int left = int(length);
#pragma unroll 1
        while (left >= int(WHOLE)) {
#pragma unroll
            for (int k = 0; k < DEPTH; ++k) {
                if (left < int(WHOLE)) break;
                add_products(ring[k], place, sums);
                if (left >= int(WHOLE) * (DEPTH + 1)) load(ring[k]);
                left -= WHOLE;
            }
        }
        if (left & HALF) add_products(half, place, sums);
        if (left & QUARTER) add_products(quarter, place, sums);
        if constexpr (STEP_BITS == 8)
            if (left & 1) add_products(one, place, sums);
    }
};

// Columns [first, last) of COLUMNS vectors from x on, those from `count` on zero, as
// (column, vector) to shared memory. x may be read up to whole 16 bytes.
__device__ __forceinline__ void stage_once(unsigned char* to, const InputT* x, i64 x_stride,
                                           u32 count, u32 first, u32 last) {
    u32 vector = threadIdx.x % COLUMNS;
    const InputT* from = x + vector * x_stride;
#pragma unroll 1
    for (u32 at = first + threadIdx.x / COLUMNS * CHUNK; at < last;
         at += THREADS / COLUMNS * CHUNK) {
        Vector<InputT, CHUNK> part = {};
        if (vector < count) part = load_vector<InputT, CHUNK>(from + at);
        InputT* place = reinterpret_cast<InputT*>(to) + (at - first) * COLUMNS + vector;
        if (COLUMNS == 1) {
            store_vector<InputT, CHUNK>(place, part);
        } else {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) place[e * COLUMNS] = part.element[e];
        }
    }
}

__device__ __forceinline__ void wait_to_begin() {
#if __CUDA_ARCH__ >= 900
    wait_for_prerequisites();
#endif
}
