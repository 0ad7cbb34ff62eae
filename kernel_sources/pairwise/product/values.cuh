// Values of a tile as words of fp16: those that wgmma takes from registers. An accumulator of a
// thread is where the operand of the next product has it, so that nothing moves between them:
// number 8 q + 2 h + e of a tile's 32 is of column 16 q + 8 (h / 2) + 2 (lane % 4) + e and of row
// lane / 4 + 8 (h % 2) of its warp's sixteen.
#pragma once

#include "common/math.cuh"
#include "pairwise/product/block.cuh"

constexpr int VALUES = TILE_N / 2;      // of a thread
constexpr int STEPS = TILE_N / STEP;    // of a tile
constexpr int SUMS = WIDTH / 2;         // accumulators of a thread

__device__ __forceinline__ int column_of(int value) {
    return value / 4 * 8 + threadIdx.x % 4 * 2 + value % 2;
}
__device__ __forceinline__ constexpr int row_of(int value) { return value / 2 % 2; }

// Of a thread's two rows: what their values are multiplied by, powers of two.
struct Scales {
    static constexpr int MOST = 126, AIM = 11;
    float factor[2] = {8.507059173e37f, 8.507059173e37f};  // 2^MOST: the least number becomes 1
};

// What a thread has summed: two rows of its columns, from each GROUP of n on its way to all.
struct Totals {
    float total[SUMS] = {}, run[SUMS] = {};

    __device__ __forceinline__ void settle(const float* scales) {
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            auto scale = load_vector<float, 2>(scales + column_of(i));
#pragma unroll
            for (int e = 0; e < 4; ++e)
                total[i + e] = fmaf(run[i + e], scale.element[e % 2], total[i + e]);
        }
    }
};

struct Words {
    u32 high[STEPS][4], low[STEPS][4];
};

__device__ __forceinline__ u32 pack_pair(float x, float y) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

// The larger magnitudes of two pairs, NaN where there is one.
__device__ __forceinline__ u32 larger(u32 x, u32 y) {
    u32 z;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// Whether one of the thread's words is no finite number.
__device__ __forceinline__ bool split_values(Words& words, const float (&values)[VALUES],
                                             const Scales& scales) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i += 2) {
        float factor = scales.factor[row_of(i)], x = values[i] * factor, y = values[i + 1] * factor;
        u32 pair = pack_pair(x, y);
        words.high[i / 8][i % 8 / 2] = pair;
        if (COPIES == 2) {
            words.low[i / 8][i % 8 / 2] =
                pack_pair(x - convert<float>(half_t{u16(pair)}),
                          y - convert<float>(half_t{u16(pair >> 16)}));
        }
        largest = larger(largest, pair);
    }
    return (((largest & 0x7fff7fff) + 0x04000400) & 0x80008000) != 0;
}

// Smaller factors for rows of a warp whose values have outgrown theirs, and for what was summed
// with them. Whether all values are finite.
__device__ __forceinline__ bool lower_scales(Scales& scales, const float (&values)[VALUES],
                                             Totals& totals) {
    bool finite = true;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (row_of(i) == row) largest = maximum(largest, absolute(values[i]));
        largest = maximum(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = maximum(largest, __shfl_xor_sync(~0u, largest, 2));
        bool known = largest < infinity(largest);
        finite = finite && known;
        float ratio = 1.0f;
        if (known && !(largest * scales.factor[row] < 65504.0f)) {
            int exponent = Scales::AIM - ((__float_as_int(largest) >> 23) - 127);
            float factor = __int_as_float((min(exponent, Scales::MOST) + 127) << 23);
            ratio = factor / scales.factor[row];
            scales.factor[row] = factor;
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            if (row_of(i) == row) totals.run[i] *= ratio, totals.total[i] *= ratio;
        }
    }
    return __all_sync(~0u, finite);
}
