// A finished tile of y. The LANES features of each j that a thread has lie side by side; through
// shared memory they become whole 32-byte sectors, rows of which are stored together.
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

// PART_COLUMNS from `first` on of a warp's 16 rows, a line of shared memory for each.
__device__ __forceinline__ void stage_part(const float (&sums)[LANES][COLUMNS / 2],
                                           unsigned char* out, int first,
                                           const Consumer& consumer) {
    constexpr int PIECE = SPAN * 2;  // bytes of a j
    out += consumer.row % 16 * PART_PITCH + consumer.first_lane * 2 + consumer.two * PIECE;
#pragma unroll
    for (int i = 0; i < PART_COLUMNS / 2; i += 2) {
        unsigned char* to = out + i / 2 % 2 * 8 * PART_PITCH + i / 4 * 8 * PIECE;
        // LANES features of two columns, side by side unless other l are between.
        struct alignas(16) { OutputT element[2 * LANES]; } features;
#pragma unroll
        for (int f = 0; f < 2 * LANES; ++f)
            features.element[f] = convert<OutputT>(sums[f % LANES][first / 2 + i + f / LANES]);
        constexpr int WORDS = LANES % 4 == 0 && !WIDE ? 4 : LANES % 2 == 0 ? 2 : 1;
        auto words = reinterpret_cast<const Vector<u32, WORDS>*>(&features);
#pragma unroll
        for (int word = 0; word < LANES / WORDS; ++word)
            store_vector(reinterpret_cast<u32*>(to + word * (WIDE ? PIECE : WORDS * 4)),
                         words[word]);
    }
}

// From there to y, 16 bytes a thread.
__device__ __forceinline__ void copy_part(const Parameters& p, const unsigned char* out,
                                          const Unit& unit, int column, const Consumer& consumer) {
    constexpr int CHUNKS = PART_LINE / 16, LINES = (WIDE ? 128 : 32) / CHUNKS;
    static_assert(LINES > 0, "a line has a thread for each chunk");
    constexpr int PER_COLUMN = WIDE ? SPAN / 8 : 1;  // chunks of a j, if j lie apart
    int thread = threadIdx.x % 32 + (WIDE ? consumer.warpgroup * 32 : 0);
    int line = thread / CHUNKS, chunk = thread % CHUNKS;
    int row = unit.row + consumer.row / 16 * 16 + line;
    int offset = WIDE ? (column + chunk / PER_COLUMN) * p.lanes + chunk % PER_COLUMN * 8
                      : column * LANES + chunk * 8;
    if (offset >= p.columns * p.lanes || line >= LINES) return;
    i64 feature = i64(unit.group) * p.columns * p.lanes + unit.lane + offset;
    OutputT* y = p.y + row * p.y_row + feature;
    auto from = reinterpret_cast<const u32*>(out + line * PART_PITCH + chunk * 16);
    Vector<u32, 4> words[(16 + LINES - 1) / LINES];
#pragma unroll
    for (int i = 0; i < 16; i += LINES)  // a line behind the last one is another warp's, or free
        words[i / LINES] = load_vector<u32, 4>(from + i * PART_PITCH / 4);
#pragma unroll
    for (int i = 0; i < 16; i += LINES) {
        if (row + i >= p.rows || (16 % LINES && line + i >= 16)) return;
        store_chunk(y + i * p.y_row, words[i / LINES]);
    }
}

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
    int warp = WIDE ? consumer.row / 16 : consumer.warpgroup * 4 + threadIdx.x % 128 / 32;
    unsigned char* out = s.out + warp * PART_BYTES;
#pragma unroll
    for (int part = 0; part < COLUMNS; part += PART_COLUMNS) {
        consumer.synchronize_rows();  // what was staged before is read
        stage_part(sums, out, part, consumer);
        consumer.synchronize_rows();
        copy_part(p, out, unit, column + part, consumer);
    }
}
