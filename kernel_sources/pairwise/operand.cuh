// One operand's tile on its way from device memory to shared memory: TILE points by TILE_K
// features, kept feature first (tile[k][point]), so that a thread reads neighbouring points of one
// feature as 16-byte vectors at fixed offsets.
//
// Rows of features are read 16 bytes at a time and turned round in registers, one run of a thread
// at a time so that only 4 registers wait; cp.async of 4 bytes would need none, but its 16 requests
// a tile slow every other shared-memory access (p = 1, 30000 x 30000 x 1024: 80 ms against 67).
// Rows of points need no turning and travel by cp.async, as does, element by element, whatever is
// not aligned. fp16 and bf16 always pass through registers, where they become fp32.
#pragma once

#include "common/async_copy.cuh"
#include "common/types.cuh"
#include "pairwise/access.cuh"

using InputT = Config::InputT;      // storage
using AccT = Config::AccT;          // arithmetic
constexpr int TILE = Config::TILE;  // points of a tile

constexpr int TILE_K = 16;
constexpr int THREADS = 256;
constexpr int CHUNK = 16 / sizeof(AccT);  // neighbouring points of one 16-byte access
constexpr int LINE = TILE + CHUNK;        // from one feature of a tile to the next
constexpr bool CONVERTS = sizeof(InputT) != sizeof(AccT);

// One batch entry's points from the tile's first one on.
struct Points {
    const InputT* data;
    i64 point_stride;
    i64 feature_stride;
    int count;     // points from here to the end, cut to TILE
    int features;  // K
};

// The part of one thread in moving an operand: PER_THREAD runs of RUN elements each tile.
template <Access ACCESS>
struct Operand {
    static constexpr bool ALONG_POINTS = ACCESS == Access::points;
    static constexpr bool IN_REGISTERS = CONVERTS || ACCESS == Access::features;
    static constexpr int RUN = CONVERTS ? 4 : CHUNK;
    static constexpr int RUNS = TILE * TILE_K / RUN;
    static constexpr int PER_THREAD = (RUNS + THREADS - 1) / THREADS;
    static constexpr int ACROSS = (ALONG_POINTS ? TILE : TILE_K) / RUN;  // runs side by side
    static constexpr int STEP = THREADS / ACROSS;  // lines from one run of a thread to its next
    using Run = Vector<InputT, RUN>;

    const InputT* cursor[PER_THREAD];
    i64 feature_stride;
    int k;      // first feature of run 0
    int place;  // of run 0 in the tile
    bool points_exist;
    Run run;

    __device__ __forceinline__ explicit Operand(const Points& points) {
        int first = threadIdx.x % ACROSS * RUN, line = threadIdx.x / ACROSS;
        k = ALONG_POINTS ? line : first;
        place = ALONG_POINTS ? line * LINE + first : first * LINE + line;
        feature_stride = ACCESS == Access::features ? 1 : points.feature_stride;
        points_exist = !ALONG_POINTS || first < points.count;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            // Points past the last one never reach the output: read the last one in their place.
            int point = ALONG_POINTS ? first : min(line + i * STEP, points.count - 1);
            int feature = ALONG_POINTS ? line + i * STEP : first;
            cursor[i] = points.data + point * points.point_stride + feature * feature_stride;
        }
    }

    __device__ __forceinline__ static bool takes_part(int i) {
        return i < PER_THREAD && (RUNS % THREADS == 0 || threadIdx.x + i * THREADS < RUNS);
    }

    // Begins run i of the next TILE_K features, of which `left` exist. Those past the last become
    // zeros, and the term of two zeros is zero unless !Inner::ZERO_ADDS_NOTHING. No branches: the
    // arithmetic around it is then scheduled as one block (71 ms with them, 67 without).
    __device__ __forceinline__ void begin(AccT* tile, int i, int left) {
        if (!takes_part(i)) return;
        AccT* to = tile + place + i * STEP * (ALONG_POINTS ? LINE : 1);
        const InputT* from = cursor[i];
        int inside = left - k - (ALONG_POINTS ? i * STEP : 0);  // features from the run's first on
        if (ACCESS == Access::strided) {
            copy_elements(to, from, inside);
        } else if (IN_REGISTERS) {
            run = load_in_order_if<InputT, RUN>(inside > 0 && points_exist, from);
        } else {
            copy_async<16>(to, from, inside > 0 && points_exist ? 16 : 0);
        }
        cursor[i] += TILE_K * feature_stride;
    }

    __device__ __forceinline__ void copy_elements(AccT* to, const InputT* from, int inside) {
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            if (IN_REGISTERS) {
                run.element[e] = e < inside ? from[e * feature_stride] : InputT();
            } else {
                copy_async<sizeof(InputT)>(to + e * LINE, from + e * feature_stride,
                                           e < inside ? sizeof(InputT) : 0);
            }
        }
    }

    // Ends what begin() left in registers.
    __device__ __forceinline__ void end(AccT* tile, int i) const {
        if (!IN_REGISTERS || !takes_part(i)) return;
        AccT* to = tile + place + i * STEP * (ALONG_POINTS ? LINE : 1);
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            to[e * (ALONG_POINTS ? 1 : LINE)] = convert<AccT>(run.element[e]);
        }
    }
};
