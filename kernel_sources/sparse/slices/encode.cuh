// Counts the codes of each (panel, row) of the formats u8, u4 and u2, or writes them: a warp each.
// Both read the dense matrix once; to write u2, a warp counts first, and finds its row in L1 again.
//
// Floor: the bytes of the dense matrix, and of what is written, over the bandwidth of memory.
//
// The generated source defines before it includes this file:
//   BitsT              unsigned, as wide as an element
//   RowT               storage of rows, as unsigned
//   STEP_BITS          8, 4 or 2
//   ACTION_COUNT or ACTION_WRITE
//   PARAMETER_BYTES    what lowering makes of Parameters
#pragma once

#include "common/types.cuh"
#include "sparse/slices/codes.cuh"

constexpr int AHEAD = 8;  // blocks of 32 columns that are read at a time

struct Fixed {
    i64 row_stride, column_stride;
    u32 lines, cols, width, panels;  // lines of the matrix
    u32 slices;  // of a panel
    u32 parts;   // into which the codes of a lane are cut
};

// Laid out by kernlib/families/sparse/formats/slices_gpu.py.
#ifdef ACTION_COUNT
struct Addresses {
    const BitsT* dense;
    int* lengths;  // (panel, row)
};
#else
struct Addresses {
    const BitsT* dense;
    const int* offsets;
    RowT* rows;  // of each slice, and behind them the columns where parts begin, which are written
    unsigned char* data;
};
#endif
struct Parameters : Addresses, Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

// Codes before an entry's own for a step.
__device__ __forceinline__ u32 extra_codes(u32 step) {
    return step > LONGEST_STEP ? (step - 1) / LONGEST_STEP : 0;
}

// The codes of a row in a panel, and the column of its last entry.
struct Walked {
    u32 codes, last;
};

// Calls take(code, column, step, bits) for each entry of a row in a panel by the lane that read it,
// with the number of its code.
template <class Take>
__device__ __forceinline__ Walked walk(const Parameters& p, i64 row, u32 panel, const Take& take) {
    u32 lane = threadIdx.x % 32, first = panel * p.width, count = min(p.width, p.cols - first);
    const BitsT* from = p.dense + row * p.row_stride + i64(first) * p.column_stride;
    // Before the next block of columns: codes, and of the last entry the column.
    u32 codes = 0, last = 0u - LEAST_STEP;
    for (u32 begin = 0; begin < count; begin += 32 * AHEAD) {
        BitsT bits[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            u32 column = begin + 32 * k + lane;
            bits[k] = column < count ? from[i64(column) * p.column_stride] : BitsT(0);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            bool entry = BitsT(bits[k] << 1) != 0;  // neither 0.0 nor -0.0
            u32 set = __ballot_sync(~0u, entry), below = set & ((1u << lane) - 1);
            if (set == 0) continue;
            u32 block = begin + 32 * k, before = below ? block + 31 - __clz(below) : last;
            u32 step = block + lane - before, extra = extra_codes(block + __ffs(set) - 1 - last);
            u32 code = codes + extra + __popc(below);
            codes += extra + __popc(set);
            if constexpr (LONGEST_STEP < 31) {  // entries of a block may be as far from each other
                u32 own = entry && below ? extra_codes(step) : 0, to_here = ~0u >> (31 - lane);
#pragma unroll
                for (u32 bit = 1; bit <= 30 / LONGEST_STEP; bit *= 2) {
                    u32 having = __ballot_sync(~0u, own & bit);
                    code += bit * __popc(having & to_here);
                    codes += bit * __popc(having);
                }
            }
            if (entry) take(code, block + lane, step, u32(bits[k]));
            last = block + 31 - __clz(set);
        }
    }
    return {codes, last};
}

struct Ignore {
    __device__ __forceinline__ void operator()(u32, u32, u32, u32) const {}
};

#ifdef ACTION_COUNT

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_slices_count(const __grid_constant__ Parameters p) {
    i64 line = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (line >= i64(p.panels) * p.lines) return;
    u32 codes = walk(p, line % p.lines, u32(line / p.lines), Ignore()).codes;
    if (threadIdx.x % 32 == 0) p.lengths[line] = int(codes);
}

#else

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

#endif
