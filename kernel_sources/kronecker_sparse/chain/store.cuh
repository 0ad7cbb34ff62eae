// A finished tile of y. The LANES features of each j that a thread has lie side by side; through
// shared memory they become lines of whole 32-byte sectors, rows of which are stored together.
#pragma once

// Vectors of the first epilogues, of the features of a tile, from shared memory: loads from device
// memory, 64 a thread with their addresses, took longer than both products.
struct Staged {
    const Parameters& p;
    const InputT* staged;
    __device__ __forceinline__ AccT operator()(int index) const { return p.scalar(index); }
    __device__ __forceinline__ const InputT* vector(int index) const {
        const void* place = staged + index * TILE_FEATURES;
        return static_cast<const InputT*>(__builtin_assume_aligned(place, 16));
    }
};

__device__ __forceinline__ void stage_vectors(InputT* staged, const Parameters& p,
                                              const Unit& unit, int column,
                                              const Consumer& consumer) {
    i64 first = i64(unit.group) * p.columns * p.lanes + unit.lane + consumer.first_lane();
#pragma unroll
    for (int index = threadIdx.x % 128; index < TILE_FEATURES; index += 128) {
        int j = min(column + index / LANES, p.columns - 1);
        i64 feature = first + i64(j) * p.lanes + index % LANES;
#pragma unroll
        for (int k = 0; k < HEAD_VECTORS; ++k)
            staged[k * TILE_FEATURES + index] = p.vector(k)[feature];
    }
}

// The warps that stage and store the same 16 rows: one, or two that split l.
__device__ __forceinline__ void synchronize_rows(const Consumer& consumer) {
    if (HALVES == 2) {
        sync_threads(3 + consumer.row / 16, 64);
    } else {
        __syncwarp();
    }
}

// PART_COLUMNS from `first` on of a warp's 16 rows, a line of shared memory for each.
__device__ __forceinline__ void stage_part(const float (&sums)[LANES][SECOND_COLUMNS / 2],
                                           unsigned char* out, int first,
                                           const Consumer& consumer) {
    constexpr int PIECE = SPAN * 2;  // bytes of a j
    out += consumer.row % 16 * PART_PITCH + consumer.first_lane() * 2;
#pragma unroll
    for (int i = 0; i < PART_COLUMNS / 2; i += 2) {
        unsigned char* to = out + i / 2 % 2 * 8 * PART_PITCH + (i / 4 * 8 + consumer.pair * 2) * PIECE;
        // LANES features of columns 2 * pair and 2 * pair + 1, side by side unless others are
        // between.
        struct alignas(16) { OutputT element[2 * LANES]; } features;
#pragma unroll
        for (int f = 0; f < 2 * LANES; ++f)
            features.element[f] = convert<OutputT>(sums[f % LANES][first / 2 + i + f / LANES]);
        constexpr int WORDS = LANES % 4 == 0 ? 4 : LANES % 2 == 0 ? 2 : 1;
        auto words = reinterpret_cast<const Vector<u32, WORDS>*>(&features);
#pragma unroll
        for (int word = 0; word < LANES / WORDS; ++word) {
            int place = HALVES == 2 ? word * WORDS * 4 / (LANES * 2) * PIECE : word * WORDS * 4;
            store_vector(reinterpret_cast<u32*>(to + place), words[word]);
        }
    }
}

// Through the costly epilogues to y, 16 bytes a thread: always of the same features.
__device__ __forceinline__ void copy_part(const Parameters& p, const Rest& rest,
                                          const unsigned char* out, const Unit& unit, int column,
                                          const Consumer& consumer) {
    constexpr int CHUNKS = PART_LINE / 16, LINES = 32 * HALVES / CHUNKS;
    static_assert(LINES > 0, "a line has a thread for each chunk");
    constexpr int PER_COLUMN = SPAN / 8 > 0 ? SPAN / 8 : 1;  // chunks of a j, if j lie apart
    int thread = threadIdx.x % 32 + (HALVES == 2 ? consumer.warpgroup * 32 : 0);
    int line = thread / CHUNKS, chunk = thread % CHUNKS;
    int row = unit.row + consumer.row / 16 * 16 + line;
    int offset = HALVES == 2 ? (column + chunk / PER_COLUMN) * p.lanes + chunk % PER_COLUMN * 8
                             : column * LANES + chunk * 8;
    if (offset >= p.columns * p.lanes || line >= LINES) return;
    i64 feature = i64(unit.group) * p.columns * p.lanes + unit.lane + offset;
    OutputT* y = p.y + row * p.y_row + feature;
    auto from = reinterpret_cast<const u32*>(out + line * PART_PITCH + chunk * 16);
    union Values { Vector<u32, 4> words; OutputT element[8]; } values[(16 + LINES - 1) / LINES];
#pragma unroll
    for (int i = 0; i < 16; i += LINES)  // a line behind the last one is another warp's, or free
        values[i / LINES].words = load_vector<u32, 4>(from + i * PART_PITCH / 4);
#pragma unroll
    for (int i = 0; i < 16; i += LINES) {
        Values& value = values[i / LINES];
        if (row + i >= p.rows || (16 % LINES && line + i >= 16)) return;
        if constexpr (REST) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                value.element[e] =
                    convert<OutputT>(rest(convert<AccT>(value.element[e]), feature + e));
        }
        store_chunk(y + i * p.y_row, value.words);
    }
}

__device__ __forceinline__ void store_tile(float (&sums)[LANES][SECOND_COLUMNS / 2],
                                           const Finish& finish, const Rest& rest,
                                           const Parameters& p, const Shared& s, const Unit& unit,
                                           int column, const Consumer& consumer) {
    if (HEAD) {
#pragma unroll
        for (int i = 0; i < SECOND_COLUMNS / 2; ++i) {
            int feature = (i / 4 * 8 + consumer.pair * 2 + i % 2) * LANES;
#pragma unroll
            for (int l = 0; l < LANES; ++l) sums[l][i] = finish(sums[l][i], feature + l);
        }
    }
    unsigned char* out = s.out + consumer.row / 16 * PART_BYTES;
#pragma unroll
    for (int part = 0; part < SECOND_COLUMNS; part += PART_COLUMNS) {
        synchronize_rows(consumer);  // what was staged before is read
        stage_part(sums, out, part, consumer);
        synchronize_rows(consumer);
        copy_part(p, rest, out, unit, column + part, consumer);
    }
}
