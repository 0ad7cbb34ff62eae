// Stages of both operands: of each slot its rows of a, once where slots side by side share them,
// and its columns of b. Behind the last depth come zeros; nothing is written for a slot without a
// block.
#pragma once

#include "blocksparse/sampled/parameters.cuh"

// One operand, SLOTS times SIZE lines of it.
template <int SIZE, Access ACCESS>
struct Loader {
    static constexpr int LINES = SLOTS * SIZE;
    static constexpr bool GATHERS = ACCESS == Access::gather;
    using S = Share<LINES, ACCESS>;
    const InputT* from[GATHERS ? 1 : S::RUNS];  // of each run's chunk
    i64 step;                                   // from one depth to the next
    int place, first_depth;                     // of this thread's chunks
    u32 wanted;                                 // runs, or slots of a gather

    // Of slots that are `wanted`, `at` elements from data on.
    __device__ __forceinline__ Loader(const InputT* data, const Side& view, u32 wanted_slots,
                                      i64 at) {
        step = view.column;
        from[0] = data;
        wanted = wanted_slots;
        if constexpr (!GATHERS) {
            place = S::place();
            first_depth = S::depth();
            wanted = 0;
#pragma unroll
            for (int i = 0; i < S::RUNS; ++i) {
                int line = S::line() + i * S::LINE_RUN, depth = S::depth() + i * S::DEPTH_RUN;
                int slot = line / SIZE % SLOTS;
                bool exists = line < LINES && depth < STAGE_DEPTH && wanted_slots >> slot & 1;
                wanted |= u32(exists) << i;
                from[i] = data + __shfl_sync(ALL, at, slot) + line % SIZE * view.line +
                          depth * view.column;
            }
            asm volatile("" : "+r"(place), "+r"(first_depth));
        }
    }

    // Begins the next stage, `left` depths before the end. All lanes call.
    __device__ __forceinline__ void begin(unsigned char* stage, int left, const Side& view, i64 at,
                                          bool depth_first) {
        if constexpr (GATHERS) {
            auto source = [&](int line, int depth) -> const InputT* {
                int slot = line / SIZE;
                i64 own = __shfl_sync(ALL, at, slot);
                return wanted >> slot & 1
                           ? from[0] + own + line % SIZE * view.line + depth * view.column
                           : nullptr;
            };
            gather<LINES>(stage, source, step, left, depth_first);
            from[0] += STAGE_DEPTH * step;
        } else {
#pragma unroll
            for (int i = 0; i < S::RUNS; ++i) {
                bool exists = first_depth + i * S::DEPTH_RUN < left;
                if (wanted >> i & 1)
                    copy_async<16>(stage + place + i * S::STEP * S::Place::PITCH,
                                   exists ? from[i] : from[0], exists ? 16 : 0);
                from[i] += STAGE_DEPTH * step;
            }
        }
    }
};
