// One operand on its way from device memory over shared memory to the fragments of a warp.
//
// A stage holds 64 bytes of depth of LINES lines (rows of out for left, columns for right), either
//   by lines   64 bytes a line; its four 16-byte chunks change places with bits 1 and 2 of the line
//   by depth   a row of LINES elements for each depth, PAD bytes longer
// so that the eight 16-byte rows of an ldmatrix lie in different banks, as do the 32 words that a
// warp reads of 4-byte elements by depth.
#pragma once

#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "kronecker_sparse/portable/config.cuh"

constexpr int THREADS = 256;
constexpr int LINE_BYTES = 64;
constexpr int DEPTH = LINE_BYTES / sizeof(InputT);  // of a stage
constexpr int CHUNK = 16 / sizeof(InputT);
constexpr int PAD = sizeof(InputT) == 2 ? 16 : 32;

// Lines of one operand from the tile's first one on, and depth from the first that is summed.
struct Lines {
    const InputT* data;
    i64 line_stride, depth_stride;
    int count;         // lines from here to the end, cut to 128
    bool depth_first;  // for gathers: whether neighbouring threads take neighbouring depths
};

template <int LINES, Access ACCESS>
constexpr int stage_bytes = ACCESS == Access::line ? DEPTH * (LINES * int(sizeof(InputT)) + PAD)
                                                   : LINES * LINE_BYTES;

__device__ __forceinline__ int bytes_of(int elements) {
    return max(0, min(elements, CHUNK)) * int(sizeof(InputT));
}

// The part of one thread in moving an operand: begin() starts the next DEPTH, of which `left`
// exist, and end() ends what begin() left in registers. Whatever does not exist becomes zero.
template <int LINES, Access ACCESS>
struct Loader;

template <int LINES>
struct Loader<LINES, Access::depth> {
    static constexpr int ACROSS = LINE_BYTES / 16, STEP = THREADS / ACROSS, RUNS = LINES / STEP;
    const InputT* from;
    i64 step;
    int lines, first, place;

    __device__ __forceinline__ explicit Loader(const Lines& operand) {
        int chunk = threadIdx.x % ACROSS, line = threadIdx.x / ACROSS;
        from = operand.data + line * operand.line_stride + chunk * CHUNK;
        step = STEP * operand.line_stride;
        lines = operand.count - line;
        first = chunk * CHUNK;
        place = line * LINE_BYTES + ((chunk ^ (line >> 1 & 3)) << 4);
    }

    __device__ __forceinline__ void begin(unsigned char* stage, int left) {
        int bytes = bytes_of(left - first);
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            copy_async<16>(stage + place + i * STEP * LINE_BYTES, from + i * step,
                           i * STEP < lines ? bytes : 0);
        }
        from += DEPTH;
    }

    __device__ __forceinline__ void end(unsigned char*) const {}
};

template <int LINES>
struct Loader<LINES, Access::line> {
    static constexpr int ACROSS = LINES / CHUNK, STEP = THREADS / ACROSS, RUNS = DEPTH / STEP;
    static constexpr int PITCH = LINES * sizeof(InputT) + PAD;
    const InputT* from;
    i64 step;
    int bytes, depth, place;

    __device__ __forceinline__ explicit Loader(const Lines& operand) {
        int first = threadIdx.x % ACROSS * CHUNK;
        depth = threadIdx.x / ACROSS;
        from = operand.data + first + depth * operand.depth_stride;
        step = STEP * operand.depth_stride;
        bytes = bytes_of(operand.count - first);
        place = depth * PITCH + first * sizeof(InputT);
    }

    __device__ __forceinline__ void begin(unsigned char* stage, int left) {
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            copy_async<16>(stage + place + i * STEP * PITCH, from,
                           depth + i * STEP < left ? bytes : 0);
            from += step;
        }
    }

    __device__ __forceinline__ void end(unsigned char*) const {}
};

// Element by element into a stage by lines, 4 bytes (a word) of one line at a time: elements of 4
// bytes by cp.async, pairs of 2-byte ones through registers. A thread's words are every 16th line's
// or, with neighbouring threads along the lines, several of one line.
template <int LINES>
struct Loader<LINES, Access::gather> {
    static constexpr int WORDS = LINE_BYTES / 4, RUNS = LINES * WORDS / THREADS;
    static constexpr int PAIR = 4 / sizeof(InputT);
    static constexpr int LINE_STEP = THREADS / WORDS, DEPTH_STEP = THREADS / LINES * PAIR;
    const InputT* from;
    i64 step, depth_stride;
    int lines, first, more, shift, place, place_step;
    u32 pairs[PAIR == 2 ? RUNS : 1];

    __device__ __forceinline__ explicit Loader(const Lines& operand) {
        bool along = operand.depth_first;
        int line = along ? threadIdx.x / WORDS : threadIdx.x % LINES;
        int word = along ? threadIdx.x % WORDS : threadIdx.x / LINES;
        first = word * PAIR;
        depth_stride = operand.depth_stride;
        from = operand.data + line * operand.line_stride + first * depth_stride;
        step = along ? LINE_STEP * operand.line_stride : DEPTH_STEP * depth_stride;
        int after = operand.count - line;
        lines = along ? (after + LINE_STEP - 1) / LINE_STEP : after > 0 ? RUNS : 0;
        more = along ? RUNS : 1;
        shift = along ? 31 : DEPTH_STEP == 8 ? 3 : DEPTH_STEP == 4 ? 2 : 1;
        // A run's place has bits that the first one's lacks.
        place = line * LINE_BYTES + (word * 4 ^ (line >> 1 & 3) << 4);
        place_step = along ? LINE_STEP * LINE_BYTES : DEPTH_STEP * int(sizeof(InputT));
    }

    // Runs whose first element is among the next `left` depths.
    __device__ __forceinline__ int runs(int left) const {
        left -= first;
        return left > 0 ? min(lines, (left - 1 >> shift) + more) : 0;
    }

    __device__ __forceinline__ void begin(unsigned char* stage, int left) {
        const InputT* next = from;
        int low_runs = runs(left), high_runs = PAIR == 2 ? runs(left - 1) : 0;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            if constexpr (PAIR == 1) {
                copy_async<4>(stage + (place ^ i * place_step), next, i < low_runs ? 4 : 0);
            } else {
                const u16* bits = reinterpret_cast<const u16*>(next);
                u32 low = 0, high = 0;
                if (i < low_runs) low = bits[0];
                if (i < high_runs) high = bits[depth_stride];
                pairs[i] = low | high << 16;
            }
            next += step;
        }
        from += DEPTH * depth_stride;
    }

    __device__ __forceinline__ void end(unsigned char* stage) const {
        if constexpr (PAIR == 2) {
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                *reinterpret_cast<u32*>(stage + (place ^ i * place_step)) = pairs[i];
            }
        }
    }
};

// Reads 16 lines by 32 bytes of depth: as A's fragment of left, as two of B of right, whose halves
// of lines and of depth take turns the other way round.
template <int LINES, Access ACCESS, bool LEFT>
struct Reader {
    static constexpr bool BY_DEPTH = ACCESS == Access::line, WORDS = sizeof(InputT) == 4;
    static constexpr int PITCH = LINES * sizeof(InputT) + PAD;
    int place;

    __device__ __forceinline__ explicit Reader(int first_line) {
        int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
        int line_half = LEFT ? matrix % 2 : matrix / 2, depth_half = LEFT ? matrix / 2 : matrix % 2;
        if (!BY_DEPTH) {
            int line = first_line + line_half * 8 + row;
            place = line * LINE_BYTES + ((depth_half ^ (line >> 1 & 3)) << 4);
        } else if (!WORDS) {
            place = (depth_half * 8 + row) * PITCH + (first_line + line_half * 8) * 2;
        } else {
            place = lane % 4 * PITCH + (first_line + lane / 4) * 4;
        }
    }

    // Lines from first_line + 16 * group on, the step-th 32 bytes of depth.
    __device__ __forceinline__ void read(u32 (&x)[4], const unsigned char* stage, int group,
                                         int step) const {
        if (!BY_DEPTH) {
            const unsigned char* at = stage + (place ^ step << 5) + group * 16 * LINE_BYTES;
            load_matrices<false>(x, static_cast<u32>(__cvta_generic_to_shared(at)));
        } else if (!WORDS) {
            const unsigned char* at = stage + place + step * 16 * PITCH + group * 32;
            load_matrices<true>(x, static_cast<u32>(__cvta_generic_to_shared(at)));
        } else {
            const unsigned char* at = stage + place + step * 8 * PITCH + group * 64;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int line_half = LEFT ? i % 2 : i / 2, depth_half = LEFT ? i / 2 : i % 2;
                x[i] = *reinterpret_cast<const u32*>(at + depth_half * 4 * PITCH + line_half * 32);
            }
        }
    }
};
