// A finished tile of y, of which a thread has LANES features side by side for each j.
#pragma once

#include "common/store_chunk.cuh"
#include "kronecker_sparse/fused_chain/first_product.cuh"
#include "kronecker_sparse/fused_chain/unit.cuh"

// The epilogues' vectors, of the features of a warpgroup's tile, in shared memory: loads of them
// from device memory, with their addresses, took longer than both products. In two places by turns,
// as one warp may have the next tile's while another reads.
struct Vectors {
    InputT* staged;
    static constexpr int COUNT = (FEATURES + 127) / 128;  // values of a thread
    InputT value[VECTORS > 0 ? VECTORS * COUNT : 1];
    int turn = 0;
    __device__ __forceinline__ Vectors(const Shared& s, const Consumer& consumer) {
        staged = s.vectors + consumer.warpgroup * 2 * VECTORS * FEATURES;
    }
    __device__ __forceinline__ void load(const Parameters& p, const Unit& unit, int column,
                                         const Consumer& consumer) {
        i64 first = i64(unit.group) * p.columns * p.lanes + unit.lane + consumer.first_lane;
#pragma unroll
        for (int i = 0; i < VECTORS * COUNT; ++i) {
            int place = threadIdx.x % 128 + i % COUNT * 128;
            int j = min(column + place / LANES, p.columns - 1);
            value[i] = p.vector(i / COUNT)[first + i64(j) * p.lanes + place % LANES];
        }
    }
    __device__ __forceinline__ void stage(const Consumer& consumer) {
        if (VECTORS == 0) return;
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < VECTORS * COUNT; ++i) {
            int place = threadIdx.x % 128 + i % COUNT * 128;
            if (place < FEATURES)
                staged[(turn * VECTORS + i / COUNT) * FEATURES + place] = value[i];
        }
        consumer.synchronize();
    }
};

// What Finish reads.
struct Staged {
    const Parameters& p;
    const Vectors& vectors;
    __device__ __forceinline__ AccT operator()(int index) const { return p.scalar(index); }
    __device__ __forceinline__ const InputT* vector(int index) const {
        return vectors.staged + (vectors.turn * VECTORS + index) * FEATURES;
    }
};

// Columns of a warpgroup's tile that are finished and rounded before the first of them is
// stored, LANES features of two columns side by side: all, where there are registers for it. With
// fewer the compiler takes the same ones for each store, and waits for the store before.
constexpr int FINISHED = GROUPS == 1 ? COLUMNS : PART_COLUMNS;

struct Finished {
    static constexpr int WORDS = LANES % 4 == 0 ? 4 : LANES % 2 == 0 ? 2 : 1;  // of one store
    u32 word[FINISHED / 4 * LANES];
    // From accumulators `first` on.
    __device__ __forceinline__ Finished(const float (&sums)[LANES][COLUMNS / 2],
                                        const Finish& finish, int first, int two) {
#pragma unroll
        for (int i = 0; i < FINISHED / 2; i += 2) {
#pragma unroll
            for (int f = 0; f < 2 * LANES; f += 2) {
                float values[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    int l = (f + e) % LANES, column = (f + e) / LANES;
                    int feature = ((first + i) / 4 * 8 + two + column) * LANES + l;
                    values[e] = sums[l][first + i + column];
                    if (Config::EPILOGUE) values[e] = finish(values[e], feature);
                }
                u32& both = word[i / 2 * LANES + f / 2];
                both = pack<OutputT>(values[0], values[1]);
                if (GROUPS == 1) asm volatile("" : "+r"(both));
            }
        }
    }
    // Those of accumulators `i` and `i` + 1 behind the first.
    __device__ __forceinline__ void store(void* to, int i) const {
#pragma unroll
        for (int at = 0; at < LANES; at += WORDS) {
            Vector<u32, WORDS> words;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) words.element[w] = word[i / 2 * LANES + at + w];
            store_vector(static_cast<u32*>(to) + at, words);
        }
    }
};

// Four threads have 32 bytes of a row side by side, or 16 of one l.
__device__ __forceinline__ void store_direct(const Finished& y, const Parameters& p,
                                             const Unit& unit, int column,
                                             const Consumer& consumer) {
    int row = unit.row + consumer.row, j = column + consumer.two;
    OutputT* to = p.y + row * p.y_row + (i64(unit.group) * p.columns + j) * LANES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row + half * 8 >= p.rows) return;
        OutputT* line = to + half * 8 * p.y_row;
#pragma unroll
        for (int i = 0; i < FINISHED / 2; i += 4)
            if (j + i * 2 < p.columns) y.store(line + i * 2 * LANES, i + half * 2);
    }
}

// Through shared memory they become whole 32-byte sectors. The warps that stage and store the same
// 16 rows are one or, if WIDE, those of all warpgroups, which split l.
__device__ __forceinline__ void synchronize_rows(const Consumer& consumer) {
    if (WIDE) {
        sync_threads(8 + consumer.row / 16, 32 * WARPGROUPS);
    } else {
        __syncwarp();
    }
}

// PART_COLUMNS from `first` on of a warp's 16 rows.
__device__ __forceinline__ void stage_part(const Finished& y, unsigned char* out, int first,
                                           const Consumer& consumer) {
    out += consumer.row % 16 * PART_PITCH + consumer.two * LANES * 2;
    if (WIDE) out += consumer.warpgroup * GROUP_PITCH;
#pragma unroll
    for (int i = 0; i < PART_COLUMNS / 2; i += 2)
        y.store(out + i / 2 % 2 * 8 * PART_PITCH + i / 4 * 8 * LANES * 2, first / 2 + i);
}

// 16 bytes of y from their place in a line: if WIDE, 8 l of a j.
__device__ __forceinline__ Vector<u32, 4> staged_chunk(const unsigned char* line, int chunk) {
    if (!WIDE) return load_vector<u32, 4>(reinterpret_cast<const u32*>(line + chunk * 16));
    auto place = reinterpret_cast<const u32*>(line + chunk % 2 * 2 * GROUP_PITCH + chunk / 2 * 8);
    Vector<u32, 2> low = load_vector<u32, 2>(place);
    Vector<u32, 2> high = load_vector<u32, 2>(place + GROUP_PITCH / 4);
    return {low.element[0], low.element[1], high.element[0], high.element[1]};
}

// From there to y, 16 bytes a thread.
__device__ __forceinline__ void copy_part(const Parameters& p, const unsigned char* out,
                                          const Unit& unit, int column, const Consumer& consumer) {
    constexpr int CHUNKS = PART_LINE / 16, LINES = (WIDE ? 32 * WARPGROUPS : 32) / CHUNKS;
    static_assert(LINES > 0, "a line has a thread for each chunk");
    int thread = threadIdx.x % 32 + (WIDE ? consumer.warpgroup * 32 : 0);
    int line = thread / CHUNKS, chunk = thread % CHUNKS;
    int row = unit.row + consumer.row / 16 * 16 + line;
    int feature = WIDE ? (column + chunk / 2) * p.lanes : column * LANES + chunk * 8;
    if (feature >= p.columns * p.lanes || line >= LINES) return;
    if (WIDE) feature += unit.lane + chunk % 2 * 8;
    OutputT* y = p.y + row * p.y_row + i64(unit.group) * p.columns * p.lanes + feature;
    Vector<u32, 4> words[(16 + LINES - 1) / LINES];
#pragma unroll
    for (int i = 0; i < 16; i += LINES)
        if (16 % LINES == 0 || line + i < 16)
            words[i / LINES] = staged_chunk(out + (line + i) * PART_PITCH, chunk);
#pragma unroll
    for (int i = 0; i < 16; i += LINES) {
        if (row + i >= p.rows || (16 % LINES && line + i >= 16)) return;
        store_chunk(y + i * p.y_row, words[i / LINES]);
    }
}

__device__ __forceinline__ void store_staged(const Finished& y, const Parameters& p,
                                             const Shared& s, const Unit& unit, int column,
                                             const Consumer& consumer) {
    int warp = WIDE ? consumer.row / 16 : consumer.warpgroup * 4 + threadIdx.x % 128 / 32;
    unsigned char* out = s.out + warp * PART_BYTES;
#pragma unroll
    for (int part = 0; part < FINISHED; part += PART_COLUMNS) {
        synchronize_rows(consumer);  // what was staged before is read
        stage_part(y, out, part, consumer);
        synchronize_rows(consumer);
        copy_part(p, out, unit, column + part, consumer);
    }
}

__device__ __forceinline__ void store_tile(const float (&sums)[LANES][COLUMNS / 2],
                                           const Vectors& vectors, const Parameters& p,
                                           const Shared& s, const Unit& unit, int column,
                                           const Consumer& consumer) {
    Finish finish(Staged{p, vectors});
#pragma unroll
    for (int first = 0; first < COLUMNS; first += FINISHED) {
        Finished y(sums, finish, first / 2, consumer.two);
        if constexpr (DIRECT) store_direct(y, p, unit, column + first, consumer);
        else store_staged(y, p, s, unit, column + first, consumer);
    }
}
