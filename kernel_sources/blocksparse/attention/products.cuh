// Rows of operands in shared memory, and their products by mma.sync: 16 rows a fragment, columns
// and depth in groups of 16, of which those are left out that nobody needs.
//
// A row in shared memory has WIDTH features, a multiple of 16, zeros behind those that there are.
// It is 16 bytes longer than that, an odd number of 16-byte chunks: the eight rows of an ldmatrix
// lie in different banks.
#pragma once

#include "blocksparse/attention/walk.cuh"
#include "common/copy_groups.cuh"
#include "common/mma_half.cuh"

using InputT = Config::InputT;         // half_t or bfloat16_t
constexpr int WARPS = Config::WARPS;   // of a CTA
constexpr int THREADS = 32 * WARPS;

constexpr int CHUNK = 8;  // elements of 16 bytes

__device__ constexpr int pitch_of(int width) { return 2 * width + 16; }

// Begins copies of ROWS rows from `first` on: zeros for those from `end` on, and behind `chunks`.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_rows(unsigned char* to, const InputT* from, i64 stride,
                                          int first, int end, int chunks) {
    constexpr int ACROSS = WIDTH / CHUNK, COUNT = ROWS * ACROSS;
#pragma unroll 1
    for (int index = threadIdx.x; index < COUNT; index += THREADS) {
        int row = index / ACROSS, chunk = index % ACROSS;
        bool exists = first + row < end && chunk < chunks;
        const InputT* at = exists ? from + (first + row) * stride + chunk * CHUNK : from;
        copy_async<16>(to + row * pitch_of(WIDTH) + chunk * 16, at, exists ? 16 : 0);
    }
}

__device__ __forceinline__ u32 address_of(const unsigned char* at) {
    return u32(__cvta_generic_to_shared(at));
}
// Where a lane points ldmatrix: at rows of a left operand or, transposed, of a right one whose rows
// are its depth; and at rows of a right operand whose columns are its depth.
template <int WIDTH>
__device__ __forceinline__ u32 lane_by_rows() {
    int lane = threadIdx.x % 32;
    return lane % 16 * pitch_of(WIDTH) + lane / 16 * 16;
}
template <int WIDTH>
__device__ __forceinline__ u32 lane_by_columns() {
    int lane = threadIdx.x % 32;
    return (lane % 8 + lane / 16 * 8) * pitch_of(WIDTH) + lane / 8 % 2 * 16;
}

__device__ __forceinline__ void multiply_pair(float (&first)[4], float (&second)[4],
                                              const u32 (&a)[4], const u32 (&b)[4]) {
    const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    multiply_fragments<InputT>(first, a, left);
    multiply_fragments<InputT>(second, a, right);
}

template <int FRAGMENTS, int GROUPS>
using Logits = float[FRAGMENTS][2 * GROUPS][4];

// sums = left right^T: 16 * FRAGMENTS rows of `left` by 16 * GROUPS of `right`, each of WIDTH
// features, of those groups that are `wanted`; the others stay 0.
template <int WIDTH, int FRAGMENTS, int GROUPS>
__device__ __forceinline__ void multiply_rows(Logits<FRAGMENTS, GROUPS>& sums,
                                              const unsigned char* left,
                                              const unsigned char* right, u32 wanted) {
    constexpr int PITCH = pitch_of(WIDTH), STEPS = WIDTH / 16;
    constexpr int AT_ONCE = STEPS < 4 ? STEPS : 4;
    const u32 a_at = address_of(left) + lane_by_rows<WIDTH>();
    const u32 b_at = address_of(right) + lane_by_columns<WIDTH>();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[f][n][i] = 0.0f;
    u32 a[FRAGMENTS][4], b[4];
    if (wanted == (1u << GROUPS) - 1) {
#pragma unroll(AT_ONCE)
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f)
                load_matrices<false>(a[f], a_at + f * 16 * PITCH + step * 32);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                load_matrices<false>(b, b_at + g * 16 * PITCH + step * 32);
#pragma unroll
                for (int f = 0; f < FRAGMENTS; ++f)
                    multiply_pair(sums[f][2 * g], sums[f][2 * g + 1], a[f], b);
            }
        }
        return;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (!(wanted >> g & 1)) continue;
#pragma unroll(AT_ONCE)
        for (int step = 0; step < STEPS; ++step) {
            load_matrices<false>(b, b_at + g * 16 * PITCH + step * 32);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                load_matrices<false>(a[f], a_at + f * 16 * PITCH + step * 32);
                multiply_pair(sums[f][2 * g], sums[f][2 * g + 1], a[f], b);
            }
        }
    }
}

// Group g of sums as a left operand: their columns become the depth.
template <int FRAGMENTS, int GROUPS>
__device__ __forceinline__ void pack_group(u32 (&a)[FRAGMENTS][4],
                                           const Logits<FRAGMENTS, GROUPS>& sums, int g) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&from)[4] = sums[f][2 * g + i / 2];
            a[f][i] = pack<InputT>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
}

template <class T>
constexpr u32 EXPONENT = 0x7c00u;
template <>
constexpr u32 EXPONENT<bfloat16_t> = 0x7f80u;

// Whether COLUMNS features of 16 rows have neither an infinity nor a NaN. All lanes call.
template <int COLUMNS, int PITCH>
__device__ __forceinline__ bool are_finite(const unsigned char* rows) {
    // An exponent of ones carries into the place of the sign, in each half of a word.
    constexpr u32 ones = EXPONENT<InputT> * 0x10001u, one = 0x80008000u - ones;
    u32 found = 0;
#pragma unroll 4
    for (int index = threadIdx.x % 32; index < 2 * COLUMNS; index += 32) {
        auto x = load_vector<u32, 4>(
            reinterpret_cast<const u32*>(rows + index % 16 * PITCH + index / 16 * 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) found |= (x.element[i] & ones) + one;
    }
    return !__any_sync(ALL_LANES, (found & 0x80008000u) != 0);
}

// sums += a rows, 16 of them, one after the other: of each only to the lines of the result that
// `sees(half, k)`, for those without and with 8 more, as 0 * NaN is NaN.
template <int COLUMNS, int PITCH, class Sees>
__device__ __forceinline__ void add_one_by_one(float (&sums)[COLUMNS / 8][4], const u32 (&a)[4],
                                               const unsigned char* rows, const Sees& sees) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int k = 0; k < 16; ++k) {
        float weight[2];
        bool seen[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 own = k < 8 ? a[half] : a[2 + half];
            u32 word = __shfl_sync(ALL_LANES, own, (lane & ~3) + k % 8 / 2);
            weight[half] = convert<float>(InputT{u16(word >> 16 * (k % 2))});
            seen[half] = sees(half, k);
        }
        const unsigned char* from = rows + k * PITCH + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            auto x = load_vector<InputT, 2>(reinterpret_cast<const InputT*>(from + n * 16));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (seen[i / 2]) sums[n][i] += weight[i / 2] * convert<float>(x.element[i % 2]);
        }
    }
}

// sums += a rows: COLUMNS of the WIDTH features of 16 rows, which are the depth. Fragments that are
// not `live` stay as they are, and those that are `cut` take what they see alone.
template <int WIDTH, int COLUMNS, int FRAGMENTS, class Sees>
__device__ __forceinline__ void add_rows(float (&sums)[FRAGMENTS][COLUMNS / 8][4],
                                         const u32 (&a)[FRAGMENTS][4], const unsigned char* rows,
                                         u32 live, u32 cut, const Sees& sees) {
    if (cut && !are_finite<COLUMNS, pitch_of(WIDTH)>(rows)) {
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
            if (live >> f & 1)
                add_one_by_one<COLUMNS, pitch_of(WIDTH)>(
                    sums[f], a[f], rows, [&](int half, int k) { return sees(f, half, k); });
        return;
    }
    const u32 at = address_of(rows) + lane_by_rows<WIDTH>();
    u32 b[4];
    if (live == (1u << FRAGMENTS) - 1) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; ++n) {
            load_matrices<true>(b, at + n * 32);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f)
                multiply_pair(sums[f][2 * n], sums[f][2 * n + 1], a[f], b);
        }
        return;
    }
    if constexpr (FRAGMENTS > 1) {
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            if (!(live >> f & 1)) continue;
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) {
                load_matrices<true>(b, at + n * 32);
                multiply_pair(sums[f][2 * n], sums[f][2 * n + 1], a[f], b);
            }
        }
    }
}
