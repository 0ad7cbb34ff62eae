// A finished tile of y, of which a thread has LANES features side by side for each j.
#pragma once

// The epilogues' vectors, of the features of a warpgroup's tile, in shared memory: loads of them
// from device memory, with their addresses, took longer than both products. In two places by turns,
// as one warp may have the next tile's while another reads.
struct Vectors {
    InputT* staged;
    InputT value[VECTORS > 0 ? VECTORS : 1];
    int turn = 0;
    __device__ __forceinline__ Vectors(const Shared& s, const Consumer& consumer) {
        staged = s.vectors + consumer.warpgroup * 2 * VECTORS * FEATURES;
    }
    __device__ __forceinline__ void load(const Parameters& p, const Unit& unit, int column,
                                         const Consumer& consumer) {
        int thread = threadIdx.x % 128, j = min(column + thread / LANES, p.columns - 1);
        i64 feature = (i64(unit.group) * p.columns + j) * p.lanes + unit.lane +
                      consumer.first_lane + thread % LANES;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) value[k] = p.vector(k)[feature];
    }
    __device__ __forceinline__ void stage(const Consumer& consumer) {
        if (VECTORS == 0) return;
        turn ^= 1;
        int thread = threadIdx.x % 128;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            if (thread < FEATURES) staged[(turn * VECTORS + k) * FEATURES + thread] = value[k];
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

// LANES features of columns `i` and `i` + 1 of a thread's accumulators, rounded: of `two` columns.
struct alignas(16) Features {
    static constexpr int WORDS = LANES % 4 == 0 ? 4 : LANES % 2 == 0 ? 2 : 1;  // of one store
    OutputT element[2 * LANES];
    __device__ __forceinline__ Features(const float (&sums)[LANES][COLUMNS / 2], int i) {
#pragma unroll
        for (int f = 0; f < 2 * LANES; ++f)
            element[f] = convert<OutputT>(sums[f % LANES][i + f / LANES]);
    }
    __device__ __forceinline__ void store(void* to) const {
        auto words = reinterpret_cast<const Vector<u32, WORDS>*>(element);
#pragma unroll
        for (int word = 0; word < LANES / WORDS; ++word)
            store_vector(static_cast<u32*>(to) + word * WORDS, words[word]);
    }
};

#if WIDE
// The l of four warpgroups become whole 32-byte sectors in shared memory. This stages PART_COLUMNS
// from `first` on of a warp's 16 rows.
__device__ __forceinline__ void stage_part(const float (&sums)[LANES][COLUMNS / 2],
                                           unsigned char* out, int first,
                                           const Consumer& consumer) {
    out += consumer.row % 16 * PART_PITCH + consumer.warpgroup * GROUP_PITCH;
    out += consumer.two * LANES * 2;
#pragma unroll
    for (int i = 0; i < PART_COLUMNS / 2; i += 2)
        Features(sums, first / 2 + i)
            .store(out + i / 2 % 2 * 8 * PART_PITCH + i / 4 * 8 * LANES * 2);
}

// 8 l of a j, of two warpgroups.
__device__ __forceinline__ Vector<u32, 4> staged_chunk(const unsigned char* line, int chunk) {
    auto place = reinterpret_cast<const u32*>(line + chunk % 2 * 2 * GROUP_PITCH + chunk / 2 * 8);
    Vector<u32, 2> low = load_vector<u32, 2>(place);
    Vector<u32, 2> high = load_vector<u32, 2>(place + GROUP_PITCH / 4);
    return {low.element[0], low.element[1], high.element[0], high.element[1]};
}

// From there to y, 16 bytes a thread.
__device__ __forceinline__ void copy_part(const Parameters& p, const unsigned char* out,
                                          const Unit& unit, int column, const Consumer& consumer) {
    constexpr int CHUNKS = PART_COLUMNS * 2, LINES = 128 / CHUNKS;
    int thread = threadIdx.x % 32 + consumer.warpgroup * 32;
    int line = thread / CHUNKS, chunk = thread % CHUNKS, j = column + chunk / 2;
    if (j >= p.columns) return;
    int row = unit.row + consumer.row / 16 * 16 + line;
    OutputT* y = p.y + row * p.y_row + (i64(unit.group) * p.columns + j) * p.lanes + unit.lane +
                 chunk % 2 * 8;
    Vector<u32, 4> words[16 / LINES];
#pragma unroll
    for (int i = 0; i < 16; i += LINES)
        words[i / LINES] = staged_chunk(out + (line + i) * PART_PITCH, chunk);
#pragma unroll
    for (int i = 0; i < 16; i += LINES)
        if (row + i < p.rows) store_chunk(y + i * p.y_row, words[i / LINES]);
}

__device__ __forceinline__ void store_sums(const float (&sums)[LANES][COLUMNS / 2],
                                           const Parameters& p, const Shared& s, const Unit& unit,
                                           int column, const Consumer& consumer) {
    unsigned char* out = s.out + consumer.row / 16 * PART_BYTES;
#pragma unroll
    for (int part = 0; part < COLUMNS; part += PART_COLUMNS) {
        consumer.synchronize_rows();  // what was staged before is read
        stage_part(sums, out, part, consumer);
        consumer.synchronize_rows();
        copy_part(p, out, unit, column + part, consumer);
    }
}
#else
// Four threads have 16 bytes for each l side by side.
__device__ __forceinline__ void store_sums(const float (&sums)[LANES][COLUMNS / 2],
                                           const Parameters& p, const Shared& s, const Unit& unit,
                                           int column, const Consumer& consumer) {
    int row = unit.row + consumer.row, j = column + consumer.two;
    OutputT* y = p.y + row * p.y_row + (i64(unit.group) * p.columns + j) * LANES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row + half * 8 >= p.rows) return;
        OutputT* line = y + half * 8 * p.y_row;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 4)
            if (j + i * 2 < p.columns) Features(sums, i + half * 2).store(line + i * 2 * LANES);
    }
}
#endif

__device__ __forceinline__ void store_tile(float (&sums)[LANES][COLUMNS / 2],
                                           const Vectors& vectors, const Parameters& p,
                                           const Shared& s, const Unit& unit, int column,
                                           const Consumer& consumer) {
    if (EPILOGUE) {
        Finish finish(Staged{p, vectors});
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) {
            int feature = (i / 4 * 8 + consumer.two + i % 2) * LANES;
#pragma unroll
            for (int l = 0; l < LANES; ++l) sums[l][i] = finish(sums[l][i], feature + l);
        }
    }
    store_sums(sums, p, s, unit, column, consumer);
}
