// out[f, n] = in[n, f]: batch first to batch last, before the gradient of a weight, d > 1, whose
// sums run over n: batch first has neighbours of n a whole row apart, and the f of one group d. The
// same before a product of large factors, and back behind it, where n are features and f the batch.
//
// Floor: 2 * rows * columns * itemsize bytes over 4.3 TB/s.
//
// Facts and struct Fixed: class Transpose of
// kernlib/families/kronecker_sparse/kernels/steps/transpose.py.
#pragma once

#include "common/mma.cuh"

using InputT = Config::InputT;                   // storage
constexpr bool HALF_INPUT = Config::HALF_INPUT;  // whether that is 2 bytes
constexpr bool BIAS = Config::BIAS;              // whether sums of 64 rows are wanted too:
                                                 // sums[n / 64, f], of half types
constexpr int THREADS = 256;
constexpr int TILE = 64;
constexpr int CHUNK = 16 / sizeof(InputT);
constexpr int ACROSS = TILE / CHUNK;                       // chunks of a line of a tile
constexpr int CHUNKS = TILE * ACROSS / THREADS;            // of a thread

struct Operands {
    const InputT* in;
    InputT* out;
};

template <bool HAS_SUMS>
struct SumsPointer {
    float* sums;  // lines of `columns` numbers
};
template <>
struct SumsPointer<false> {};

struct Parameters : Operands, SumsPointer<BIAS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

union Words {
    Vector<InputT, CHUNK> value;
    u32 word[4];
};

// Into line f of the result. A last chunk that is not full ends in zeros, for which the pitch has
// room.
__device__ __forceinline__ void store_chunk(const Words& x, const Parameters& p, u32 n, u32 f) {
    if (f < p.columns && n < p.rows) store_vector(p.out + i64(f) * p.pitch + n, x.value);
}

// Lines that begin anywhere, of which nothing behind the last number may be written: a warp writes
// 32 neighbours of one line at a time, ``number(n, f)`` of the tile.
template <class Number>
__device__ __forceinline__ void store_numbers(const Parameters& p, u32 row, u32 column,
                                              Number number) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
    for (int i = 0; i < TILE * TILE / THREADS; ++i) {
        u32 n = i % (TILE / 32) * 32 + lane, f = i / (TILE / 32) * (THREADS / 32) + warp;
        if (row + n < p.rows && column + f < p.columns)
            p.out[i64(column + f) * p.pitch + row + n] = number(n, f);
    }
}

// Byte of a chunk of line n of the tile: the eight lines that ldmatrix reads at once, such as n =
// 0, 1, 8, 9, 16, 17, 24 and 25, have it in different banks.
__device__ __forceinline__ u32 place_of(u32 n, u32 chunk) {
    return n * (TILE * 2) + ((chunk ^ (n & 1) ^ (n >> 2 & 6)) << 4);
}

// A warp turns the tile's f of one chunk: matrix m of ldmatrix takes n = 8 t + 2 m and the next, so
// that thread t of a quad gets n = 8 t .. 8 t + 7 of one f.
__device__ __forceinline__ void turn_halves(const Words (&read)[CHUNKS], const Parameters& p,
                                            u32 row, u32 column) {
    __shared__ __align__(128) unsigned char tile[TILE * TILE * 2];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS;
        store_vector(reinterpret_cast<InputT*>(tile + place_of(index / ACROSS, index % ACROSS)),
                     read[i].value);
    }
    __syncthreads();
    if (!p.whole) {
        store_numbers(p, row, column, [&](u32 n, u32 f) {
            return reinterpret_cast<const InputT*>(tile + place_of(n, f / CHUNK))[f % CHUNK];
        });
        return;
    }
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 base = u32(__cvta_generic_to_shared(tile));
    u32 line = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2, f = warp * 8 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Words x;
        u32 n = half * 32 + lane % 4 * CHUNK;
        load_matrices<true>(x.word, base + place_of(half * 32 + line, warp));
        store_chunk(x, p, row + n, column + f);
    }
}

// Whole words, in lines of which a warp's accesses find two words a bank.
__device__ __forceinline__ void turn_words(const Words (&read)[CHUNKS], const Parameters& p,
                                           u32 row, u32 column) {
    constexpr int LINE = TILE + 1;
    __shared__ u32 tile[TILE * LINE];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            tile[index / ACROSS * LINE + index % ACROSS * CHUNK + e] = read[i].word[e];
    }
    __syncthreads();
    if (!p.whole) {
        store_numbers(p, row, column, [&](u32 n, u32 f) {
            return convert<InputT>(__uint_as_float(tile[n * LINE + f]));
        });
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS, f = index / ACROSS, n = index % ACROSS * CHUNK;
        Words line;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) line.word[e] = tile[(n + e) * LINE + f];
        store_chunk(line, p, row + n, column + f);
    }
}

// A thread has lines n and n + 32 of one chunk of a tile, as every eighth thread has.
template <class P>
__device__ __forceinline__ void add_rows(const Words (&read)[CHUNKS], const P& p, u32 row,
                                         u32 column) {
    __shared__ float of_warps[THREADS / 32][TILE];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) sum += convert<float>(read[i].value.element[e]);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (lane < ACROSS) of_warps[warp][lane * CHUNK + e] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= TILE || column + threadIdx.x >= p.columns) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) sum += of_warps[i][threadIdx.x];
    p.sums[i64(row / TILE) * p.columns + column + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_transpose(const __grid_constant__ Parameters p) {
    u32 row = blockIdx.x / p.column_tiles * TILE, column = blockIdx.x % p.column_tiles * TILE;
    Words x[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u32 index = threadIdx.x + i * THREADS, n = row + index / ACROSS;
        u32 f = column + index % ACROSS * CHUNK;
        const InputT* from = p.in + i64(n) * p.row_stride + f;
        x[i] = {};
        if (p.vectors && n < p.rows && f + CHUNK <= p.columns) {
            x[i].value = load_vector<InputT, CHUNK>(from);
        } else if (n < p.rows) {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (f + e < p.columns) x[i].value.element[e] = from[e];
        }
    }
    if constexpr (BIAS) add_rows(x, p, row, column);
    if constexpr (HALF_INPUT) turn_halves(x, p, row, column);
    else turn_words(x, p, row, column);
}
