// The sums of left over n, the gradient of a bias, by the warps that the producer leaves idle.
#pragma once

constexpr int BIAS_WARPS = 3, BIAS_THREADS = 32 * BIAS_WARPS;
constexpr int CHUNK = 8;                            // features of 16 bytes, which a thread sums
constexpr int CHUNKS = TILE_ROWS * LANES / CHUNK;   // of a tile
constexpr int SHARES = 2;                           // threads of a chunk: every other n
constexpr int TURN = 8;                             // n after which the swizzle is the same
static_assert(!BIAS || CHUNKS * SHARES <= BIAS_THREADS, "one chunk for each thread");

// Both numbers of a word.
template <class T>
__device__ __forceinline__ float low_number(u32 word) { return convert<float>(T{u16(word)}); }
template <class T>
__device__ __forceinline__ float high_number(u32 word) {
    return convert<float>(T{u16(word >> 16)});
}
template <>
__device__ __forceinline__ float high_number<bfloat16_t>(u32 word) {
    return __uint_as_float(word & 0xffff0000u);
}

// `places` are those of a thread's chunk in its rows of a turn.
__device__ __forceinline__ void add_stage(float (&sums)[CHUNK], const unsigned char* stage,
                                          const u32 (&places)[TURN / SHARES]) {
#pragma unroll
    for (int first = 0; first < TILE_DEPTH; first += TURN) {
#pragma unroll
        for (int i = 0; i < TURN / SHARES; ++i) {
            const unsigned char* from = stage + places[i] + first * ROW_BYTES;
            auto words = *reinterpret_cast<const Vector<u32, CHUNK / 2>*>(from);
#pragma unroll
            for (int e = 0; e < CHUNK; e += 2) {
                sums[e] += low_number<InputT>(words.element[e / 2]);
                sums[e + 1] += high_number<InputT>(words.element[e / 2]);
            }
        }
    }
}

// The first two tiles of the same j take turns, stage by stage. Each of their threads has a place
// in a run of four numbers.
__device__ __forceinline__ void sum_left(const Parameters& p, const Shared& s) {
    int thread = threadIdx.x - 32, chunk = thread % CHUNKS, share = thread / CHUNKS;
    u32 places[TURN / SHARES];
#pragma unroll
    for (int i = 0; i < TURN / SHARES; ++i) {
        int n = share + i * SHARES;
        places[i] = chunk / CHUNK * BOX_BYTES + n * ROW_BYTES + ((chunk % CHUNK ^ n) << 4);
    }
    Ring ring(0);
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        int turns = min(p.column_tiles, 2);
        bool sums_any = tile.column < turns && share < SHARES;
        float sums[CHUNK] = {};
        for (int block = 0; block < tile.depth; ++block) {
            barrier_wait(&s.full[ring.stage], ring.parity);
            if (sums_any && block % turns == tile.column)
                add_stage(sums, s.stages + ring.stage * STAGE_BYTES, places);
            barrier_arrive_by_warp(&s.empty[ring.stage]);
            ring.next();
        }
        if (!sums_any) continue;
        int first = chunk * CHUNK;
        asm volatile("" : "+r"(first));  // else its places would take registers all the time
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            int element = first + e, row = tile.row * TILE_ROWS + element / LANES;
            if (row >= p.rows) continue;
            float* run = line_of(p, tile, row + element % LANES * p.rows) + p.pitch - 4;
            run[2 * share + tile.column] = sums[e];
            if (turns == 1) run[2 * share + 1] = 0.0f;
        }
    }
}
