// Writes the codes of each (panel, row) of the formats u8, u4 and u2: a warp each. To write u2 it
// counts first, and finds its row in L1 again.
//
// Floor: the bytes of the dense matrix, and of what is written, over the bandwidth of memory.
//
// Facts and struct Fixed: class Write of kernlib/families/sparse/kernels/codecs/slices.py.
#pragma once

#include "sparse/slices/walk.cuh"

using RowT = Config::RowT;  // storage of rows, as unsigned

struct Pointers {
    const BitsT* dense;
    const int* offsets;
    RowT* rows;  // of each slice, and behind them the columns where parts begin, which are written
    unsigned char* data;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Says where those parts begin whose first codes lie behind code `before`, up to code `last`.
// `column` is that of code `before`, and `left` the bits of the steps behind it. This is a call,
// for it stands in an unrolled loop, and few codes begin a part.
__device__ __noinline__ void start_parts(RowT* starts, u32 each, u64 portion, int before, int last,
                                         int column, int left) {
    u32 part = u32(u64(before + int(each)) * portion >> 32);
    for (int first = int(part * each); first <= last; first += int(each), ++part) {
        int codes = first - 1 - before;  // behind `before`, of which all but the last are full
        starts[part * 32] = RowT(
            column + min(left, codes * int(STEP_MASK)) + (codes + 1) * int(LEAST_STEP));
    }
}

struct Write {
    unsigned char* slice;
    RowT* starts;  // of the lane's parts, 32 from each other
    u32 parts, each, lane;  // each: codes of a part
    u64 portion;            // 2^32 / each, the next number above it
    int lacking;  // codes that fill up the row, which come first if steps are never 0

    __device__ __forceinline__ Place<BitsT> place(u32 code) const {
        u32 part = u32(code * portion >> 32);  // code / each: both are at most 2^16
        Place<BitsT> place(code - part * each, each, lane);
        place.value += part * each * CODE_BYTES<BitsT>;
        place.step += part * each * CODE_BYTES<BitsT>;
        return place;
    }

    __device__ __forceinline__ void operator()(u32 code, u32 column, u32 step, u32 bits) const {
        int number = int(code), before = number - int(extra_codes(step)) - 1;
        if constexpr (LEAST_STEP > 0) {
            number = min(number + lacking, int(column));
            before = min(before + lacking, int(column) - int(step));
        }
        *reinterpret_cast<BitsT*>(slice + place(u32(number)).value) = BitsT(bits);
        int left = int(step) - int(LEAST_STEP) * (number - before);
        if (parts > 1) start_parts(before, number, int(column) - int(step), left);
        for (; left > 0; left -= STEP_MASK)  // codes of a zero value come before it
            set_step(place(u32(++before)), min(u32(left), STEP_MASK));
    }

    __device__ __forceinline__ void start_parts(int before, int last, int column, int left) const {
        ::start_parts(starts, each, portion, before, last, column, left);
    }

    // Over zeros. Other lanes set the other bits of a byte.
    __device__ __forceinline__ void set_step(const Place<BitsT>& place, u32 step) const {
        if constexpr (STEP_BITS == 8) {
            slice[place.step] = static_cast<unsigned char>(step);
        } else {
            u32* word = reinterpret_cast<u32*>(slice + (place.step & ~3u));
            atomicOr(word, step << (8 * (place.step & 3) + place.shift));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_slices_write(const __grid_constant__ Parameters p) {
    i64 line = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, slice = line / 32;
    if (slice >= i64(p.panels) * p.slices) return;
    RowT* rows = p.rows + slice * 32 * (p.parts > 1 ? 1 + p.parts : 1);
    RowT row = rows[line % 32];
    u32 start = u32(p.offsets[slice]), length = u32(p.offsets[slice + 1]) - start;
    if (length == 0) return;
    u32 panel = u32(slice / p.slices);
    unsigned char* to = p.data + i64(start) * CODE_BYTES<BitsT>;
    u32 each = length / p.parts, lane = u32(line % 32);
    Write take{to, rows + 32 + lane, p.parts, each, lane, (u64(1) << 32) / each + 1, 0};
    Walked walked{0, 0u - LEAST_STEP};
    if (row != RowT(~RowT(0))) {
        if constexpr (LEAST_STEP > 0)
            take.lacking = int(length - walk(p, row, panel, Ignore()).codes);
        walked = walk(p, row, panel, take);
    }
    if (p.parts > 1 && threadIdx.x % 32 == 0) {  // parts behind the row's last entry
        int last = int(walked.codes) - 1, column = int(walked.last);
        if constexpr (LEAST_STEP > 0) last = min(last + take.lacking, column);
        take.start_parts(last, int(length) - 1, column, 0);
    }
}
