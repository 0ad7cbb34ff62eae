// One operand of a product on its way from device memory over shared memory to a warp's fragments.
//
// A stage holds STAGE_DEPTH elements of LINES lines (of the left operand, or columns of the right
// one), either
//   by lines   DEPTH_BYTES of a line, whose 16-byte chunks change places with bits of the line
//   by depth   a row of LINES elements for each depth, whose chunks do so with bits of the depth
// so that the eight 16-byte rows of an ldmatrix lie in different banks, as do the 32 words that a
// warp reads of 4-byte elements by depth.
#pragma once

#include "blocksparse/access.cuh"
#include "common/copy_groups.cuh"
#include "common/mma.cuh"

using InputT = Config::InputT;                   // storage of both operands
constexpr int WARPS = Config::WARPS;             // of a CTA
constexpr int DEPTH_BYTES = Config::DEPTH_BYTES;  // of a line in a stage: 64 or 128
constexpr int THREADS = 32 * WARPS;
constexpr int STAGE_DEPTH = DEPTH_BYTES / sizeof(InputT);
constexpr int CHUNK = 16 / sizeof(InputT);
constexpr int CHUNKS = DEPTH_BYTES / 16;  // of a line
constexpr int STEPS = DEPTH_BYTES / 32;   // multiplications along a stage's depth
constexpr int STEP_DEPTH = 32 / sizeof(InputT);

template <int LINES, Access ACCESS>
struct Stage {
    static constexpr bool BY_DEPTH = ACCESS == Access::line;
    static constexpr int PITCH = BY_DEPTH ? LINES * int(sizeof(InputT)) : DEPTH_BYTES;
    static constexpr int BYTES = LINES * DEPTH_BYTES;
    // By depth 4-byte elements change places by pairs of chunks, as a warp reads eight of a row.
    static constexpr int UNIT = BY_DEPTH ? int(sizeof(InputT)) / 2 : 1, UNITS = PITCH / 16 / UNIT;
    static constexpr int PLACES = 8 / UNIT;  // of units in 128 bytes: all banks
    static constexpr int ROWS_AT_ONE = UNITS < PLACES ? PLACES / UNITS : 1;
    static constexpr int PERIOD = PLACES;  // rows after which places repeat

    // Where a chunk of a row lies.
    __device__ __forceinline__ static int place(int row, int chunk) {
        int moved = row / ROWS_AT_ONE % (UNITS < PLACES ? UNITS : PLACES);
        return row * PITCH + ((chunk ^ moved * UNIT) << 4);
    }
};

// How the threads of a CTA share a stage's chunks: each begins at its own line and depth, and takes
// RUNS of them, LINE_RUN lines and DEPTH_RUN depths apart, all powers of two.
template <int LINES, Access ACCESS>
struct Share {
    using Place = Stage<LINES, ACCESS>;
    static constexpr int ACROSS = Place::BY_DEPTH ? LINES / CHUNK : CHUNKS;
    static constexpr int STEP = THREADS / ACROSS, COUNT = Place::BY_DEPTH ? STAGE_DEPTH : LINES;
    static constexpr int RUNS = (COUNT + STEP - 1) / STEP;
    static constexpr int LINE_RUN = Place::BY_DEPTH ? 0 : STEP;
    static constexpr int DEPTH_RUN = Place::BY_DEPTH ? STEP : 0;

    __device__ __forceinline__ static int line() {
        return Place::BY_DEPTH ? threadIdx.x % ACROSS * CHUNK : threadIdx.x / ACROSS;
    }
    __device__ __forceinline__ static int depth() {
        return Place::BY_DEPTH ? threadIdx.x / ACROSS : threadIdx.x % ACROSS * CHUNK;
    }

    __device__ __forceinline__ static int place() {
        static_assert(STEP % Place::PERIOD == 0, "runs have their chunks in one place");
        return Place::BY_DEPTH ? Place::place(depth(), line() / CHUNK)
                               : Place::place(line(), depth() / CHUNK);
    }

    // `exists(i)` and `from(i)` say of run i whether it is wanted and where it is; all lanes call.
    template <class Exists, class From>
    __device__ __forceinline__ static void load(unsigned char* own, const Exists& exists,
                                                const From& from) {
        bool has_all = COUNT % STEP == 0 || threadIdx.x / ACROSS < COUNT;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            const InputT* source = from(i);
            if (exists(i) && has_all) copy_async<16>(own + i * STEP * Place::PITCH, source, 16);
        }
    }
};

// Element by element into a stage by lines, 4 bytes of a line at a time: elements of 4 bytes by
// cp.async, pairs of 2-byte ones through registers. `at(line, depth)` answers where the first one
// is, null if nothing of the line is wanted; of it and what follows, `step` elements on, `count`
// exist, and zeros take the place of the rest. Neighbouring threads take neighbouring depths or
// neighbouring lines.
template <int LINES, class At>
__device__ __forceinline__ void gather(unsigned char* stage, const At& at, i64 step, int count,
                                       bool depth_first) {
    constexpr int WORDS = DEPTH_BYTES / 4, PAIR = 4 / sizeof(InputT);
    static_assert(LINES * WORDS % THREADS == 0, "threads have as many words each");
#pragma unroll(sizeof(InputT) == 4 ? 1 : 4)
    for (int i = 0; i < LINES * WORDS / THREADS; ++i) {
        int index = threadIdx.x + i * THREADS;
        int line = depth_first ? index / WORDS : index % LINES;
        int word = depth_first ? index % WORDS : index / LINES;
        int depth = word * PAIR, there = count - depth;
        const InputT* from = at(line, depth);
        unsigned char* to = stage + Stage<LINES, Access::gather>::place(line, word / 4) +
                            word % 4 * 4;
        if (!from) continue;
        if constexpr (PAIR == 1) {
            copy_async<4>(to, from, there > 0 ? 4 : 0);
        } else {
            const u16* bits = reinterpret_cast<const u16*>(from);
            u32 low = there > 0 ? bits[0] : 0, high = there > 1 ? bits[step] : 0;
            *reinterpret_cast<u32*>(to) = low | high << 16;
        }
    }
}

// Reads 16 lines by 32 bytes of depth: as A's fragment of left, as two of B of right, whose halves
// of lines and of depth take turns the other way round.
template <int LINES, Access ACCESS, bool LEFT>
struct Reader {
    using Place = Stage<LINES, ACCESS>;
    static constexpr bool WORDS = sizeof(InputT) == 4;
    int place;

    __device__ __forceinline__ explicit Reader(int first_line) {
        int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
        int line_half = LEFT ? matrix % 2 : matrix / 2, depth_half = LEFT ? matrix / 2 : matrix % 2;
        if (!Place::BY_DEPTH) {
            place = Place::place(first_line + line_half * 8 + row, depth_half);
        } else if (!WORDS) {
            place = Place::place(depth_half * 8 + row, first_line / 8 + line_half);
        } else {
            int line = first_line + lane / 4;
            place = Place::place(lane % 4, line / 4) + line % 4 * 4;
        }
        asm volatile("" : "+r"(place));  // kept in a register, not computed anew for each read
    }

    // Lines from first_line + 16 * group on, the step-th 32 bytes of depth. Lines and groups of a
    // warp are powers of two, so that bits of a place that its group has are 0.
    __device__ __forceinline__ void read(u32 (&x)[4], const unsigned char* stage, int group,
                                         int step) const {
        if (!Place::BY_DEPTH) {
            const unsigned char* at = stage + (place ^ step << 5) + group * 16 * Place::PITCH;
            load_matrices<false>(x, static_cast<u32>(__cvta_generic_to_shared(at)));
        } else if (!WORDS) {
            const unsigned char* at = stage + (place ^ group << 5) + step * 16 * Place::PITCH;
            load_matrices<true>(x, static_cast<u32>(__cvta_generic_to_shared(at)));
        } else {
            const unsigned char* at = stage + step * 8 * Place::PITCH;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int line_half = LEFT ? i % 2 : i / 2, depth_half = LEFT ? i / 2 : i % 2;
                int own = place ^ group << 6 ^ line_half << 5;
                x[i] = *reinterpret_cast<const u32*>(at + depth_half * 4 * Place::PITCH + own);
            }
        }
    }
};
