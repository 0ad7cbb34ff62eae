// The dense matrix of one in the format u8, u4 or u2: a warp for a part of a slice, and a row for a
// lane.
//
// A lane lays out WINDOW columns of its row in shared memory: zeros, and its codes over them. Then
// the warp writes its lanes' windows, each in lines of 128 bytes. Windows begin at whole lines, so
// those of lanes begin at columns of their own. A group of codes that reaches beyond a window is
// taken again for the next one: at a density of .5 that is one in five.
//
// Floor: the bytes of both matrices over the bandwidth of memory: of an H200's 4.31 TB/s 12.5 us
// for 4096 x 4096 of u2 with a density of .5, 67 us for 22016 x 4096. Some 10 instructions a code
// are half of that. Reached: 24 and 131 us in panels, 35 and 190 in parts. Lanes take different
// numbers of groups for a window and wait for each of theirs; parts begin and end inside windows.
// Bringing codes to L2 before they are read gained nothing.
//
// Facts and struct Fixed: class Read of kernlib/families/sparse/kernels/codecs/slices.py.
#pragma once

#include "common/types.cuh"
#include "sparse/slices/codes.cuh"

using BitsT = Config::BitsT;  // unsigned, as wide as an element
using RowT = Config::RowT;    // storage of rows, as unsigned

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int WINDOW_BYTES = 256;  // of a row that a lane lays out at a time
constexpr int WINDOW = WINDOW_BYTES / sizeof(BitsT), CHUNK = 16 / sizeof(BitsT);
constexpr int CHUNKS = WINDOW / CHUNK;
constexpr u32 CODES = WHOLE_CODES;

struct Pointers {
    const unsigned char* data;
    const int* offsets;
    const RowT* rows;
    BitsT* dense;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// A lane's window: where its first column would lie in the matrix, and which columns are the
// lane's.
struct alignas(16) Line {
    BitsT* to;
    int first, last;
};
struct alignas(16) Window {
    BitsT bits[WINDOW];
    Line line;  // which keeps lanes apart by other than a whole 128 bytes
};

using Whole = Group<BitsT, CODES>;

// A lane's codes: as many as each lane of its warp has.
struct Codes {
    const unsigned char* data;
    u32 length, begin;  // begin: of the group to load next

    // The next group. Of the rest behind the last whole one, what is missing is zero.
    __device__ __forceinline__ Whole next() {
        Whole all = {};
        u32 at = begin;
        if (at >= length) return all;
        begin += CODES;
        if (length - at >= CODES) {
            all.load(data + i64(at) * CODE_BYTES<BitsT>);
            return all;
        }
        take<0, CODES / 2>(all, at);
        take<CODES / 2, CODES / 4>(all, at);
        if (STEP_BITS == 8) take<CODES * 3 / 4, 8 / STEP_BITS>(all, at);
        return all;
    }

    // A group of COUNT, if there is one, as the codes from number TO on.
    template <u32 TO, u32 COUNT>
    __device__ __forceinline__ void take(Whole& all, u32& at) const {
        if (!(length & COUNT)) return;
        Group<BitsT, COUNT> some;
        some.load(data + i64(at) * CODE_BYTES<BitsT>);
        at += COUNT;
#pragma unroll
        for (int i = 0; i < (COUNT * sizeof(BitsT) + 3) / 4; ++i)
            all.values[TO * sizeof(BitsT) / 4 + i] = some.values[i];
#pragma unroll
        for (int i = 0; i < (COUNT + 3) / 4; ++i)
            all.set_four_steps(TO / 4 + i, some.four_steps(i) << (TO % 4 * 8));
    }
};

// Lays out what of a group lies in the window. `column` is that of the code before the group,
// counted from the window's first one; the result is that of its last code.
__device__ __forceinline__ u32 lay_out(const Whole& group, u32 column, BitsT* window) {
#pragma unroll
    for (int e = 0; e < int(CODES); ++e) {
        constexpr u32 ONES = 0x01010101u;
        u32 steps = group.four_steps(e / 4) + LEAST_STEP * ONES;
        u32 at = dot_bytes(steps, ONES >> (24 - 8 * (e % 4)), column);
        if (e % 4 == 3) column = at;
        BitsT bits = group.values[e * sizeof(BitsT) / 4];
        if constexpr (sizeof(BitsT) == 2)
            if (e % 2) bits = BitsT(group.values[e / 2] >> 16);
        if (at < WINDOW && bits != 0) window[at] = bits;
    }
    return column;
}

// Writes the windows of all lanes.
__device__ __forceinline__ void write(const Window* windows) {
    int lane = threadIdx.x % 32, at = lane % CHUNKS * CHUNK;
#pragma unroll 4
    for (int i = 0; i < CHUNKS; ++i) {
        const Window& window = windows[i * (32 / CHUNKS) + lane / CHUNKS];
        Line line = window.line;
        Vector<BitsT, CHUNK> chunk = load_vector<BitsT, CHUNK>(window.bits + at);
        if (line.first <= at && at + CHUNK <= line.last) {
            store_vector<BitsT, CHUNK>(line.to + at, chunk);
        } else if (line.first < at + CHUNK && at < line.last) {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (line.first <= at + e && at + e < line.last) line.to[at + e] = chunk.element[e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_slices_read(const __grid_constant__ Parameters p) {
    __shared__ Window windows[WARPS][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 item = i64(blockIdx.x) * WARPS + warp, slice = item / p.parts;
    if (slice >= p.slices) return;
    u32 part = u32(item % p.parts);
    const RowT* rows = p.rows + slice * 32 * (p.parts > 1 ? 1 + p.parts : 1) + lane;
    RowT row = rows[0];

    u32 start = min(u32(p.offsets[slice]), p.codes);
    u32 end = min(u32(p.offsets[slice + 1]), p.codes), length = end > start ? end - start : 0;
    constexpr u32 UNIT = 8 / STEP_BITS;  // whole bytes of steps
    length = length / p.parts / UNIT * UNIT;
    i64 first_code = i64(start / UNIT * UNIT) + i64(part) * length;
    Codes codes{p.data + first_code * CODE_BYTES<BitsT>, length, 0};
    Whole group = codes.next(), behind = codes.next();
    u32 left = (length + CODES - 1) / CODES;  // groups

    // The lane's columns in the panel, from `first` to before `last`, and that before its codes.
    i64 panel = slice / p.panel_slices * p.width;
    int limit = int(min(i64(p.width), p.cols - panel)), first = 0, last = limit, column = -1;
    if (part) {
        column = int(rows[32 * (1 + part)]) - int(LEAST_STEP);
        first = max(0, min(column + 1, limit));
    } else if (LEAST_STEP == 0) {
        column = 0;
    }
    if (part + 1 < p.parts) last = min(int(rows[32 * (2 + part)]) + 1 - int(LEAST_STEP), limit);
    BitsT* to = p.dense + i64(row) * p.cols + panel;
    if (row >= p.lines) last = first;  // none, or one that cannot be

    Window& mine = windows[warp][lane];
    int window = first - int((reinterpret_cast<u64>(to + first) / sizeof(BitsT)) % WINDOW);
    while (__any_sync(~0u, window < last)) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) store_vector<BitsT, CHUNK>(mine.bits + i * CHUNK, {});
        mine.line = {to + window, first - window, last - window};
        while (left) {
            constexpr u32 HALF = CODES / 2;
            int before = column;
            // Steps of a missing half, which are none.
            if (LEAST_STEP && left == 1 && length % CODES && !(length & HALF)) before -= HALF;
            int end = int(lay_out(group, u32(before - window), mine.bits));
            if (end >= WINDOW) break;
            column = window + end;
            group = behind;
            behind = codes.next();
            --left;
        }
        __syncwarp();
        write(windows[warp]);
        __syncwarp();
        window += WINDOW;
    }
}
