// Where numbers of a tile lie: in device memory, in registers as they arrive, and as words of a
// panel in shared memory, which wgmma reads.
//
// A tile is LINES lines of COLUMNS numbers. Lines are the indices of the first matrix, of each of
// its copies; columns are features too, WIDTH neighbours in device memory, of several groups of
// lines where the factors that run along them are narrower than a panel. With the factors on the
// left they are columns of x instead.
//
// The generated source defines, beside what modes/parameters.cuh asks for, before it includes this
// file:
//   HalfT, WORDS                 half_t or bfloat16_t, and how many of them a number is
//   SCALED                       whether it is half_t
//   LINES                        of all tiles, 64 or 128
//   GROUPS, THREADS              of threads with a tile each; of a block
//   PANEL                        numbers of the largest tile
// and, behind matrices.cuh, of each run a struct with
//   INDEX, BEGINS, ENDS          its number, and whether it is the first one and the last
//   SourceT, TargetT             storage of what it reads and writes
//   COLUMNS                      of a tile, 64 or 128
//   INSIDE                       whether they are columns of x, behind its features
//   PITCH, UNIT_STEP             features from one line to the next, and from one copy of the first
//                                matrix to the next
//   WIDTH, GROUP_STEP            neighbours among columns; features from one group to the next
//   ROW_TILES, CHUNKS            tiles of a row, and of what is the same to the first matrix
//   LEFT_STEP, CHUNK_STEP        features from these to the next, and from one chunk to the next
//   MOST_EXPONENT                of a number of the panel
//   HANDS, TAKES, Before         whether exponents go beside its float16 to the next run, and come
//                                from the one before
//   First, Second, SECOND        its matrices, each a Merged, and whether there is a second one
//   MATRICES                     bytes before them
#pragma once

#include "common/hopper.cuh"
#include "kronecker_product/halves/pair.cuh"
#include "kronecker_product/halves/powers.cuh"
#include "kronecker_product/modes/entries.cuh"
#include "kronecker_product/modes/thread.cuh"

constexpr int WARPGROUPS = LINES / 64;  // of a tile
constexpr int GROUP_THREADS = 128 * WARPGROUPS;
constexpr int LINE_BYTES = 128;  // 64 numbers of 2 bytes
constexpr int PANEL_BYTES = PANEL * 2;
static_assert(THREADS == GROUPS * GROUP_THREADS, "no thread is without a tile");

// Bytes from the first word of an array of so many rows: 64 columns of all rows, then the next 64;
// swizzled as wgmma expects it.
__device__ constexpr int place(int row, int column, int rows) {
    return column / 64 * (rows * LINE_BYTES) + row * LINE_BYTES +
           ((column % 64 / 8 ^ row % 8) << 4) + column % 8 * 2;
}

// Features from a tile's first one. Sizes are powers of two, and a feature is the sum of those of
// its indices' bits.
template <class R>
__device__ constexpr int feature_of(int line, int column) {
    int found = line % R::First::P * R::PITCH + line / R::First::P * R::UNIT_STEP;
    return R::INSIDE ? found
                     : found + column % R::WIDTH + column / R::WIDTH * R::GROUP_STEP;
}
template <class R>
__device__ __forceinline__ i64 feature_of_tile(u32 tile) {
    return i64(tile / R::CHUNKS) * R::LEFT_STEP + i64(tile % R::CHUNKS) * R::CHUNK_STEP;
}

// Rows of x, or first columns of it, that a tile is read from, written to, and of in the result;
// its first feature.
struct Origin {
    i64 source, target, row, feature;
};

// Elements of a tensor from one feature to the next, and from one row or column of x.
struct Strides {
    i64 feature, column;
    template <class R>
    __device__ __forceinline__ static Strides of(const Side& side, bool is_aligned) {
        return {!R::INSIDE && is_aligned ? 1 : side.feature_stride,
                R::INSIDE && is_aligned ? 1 : side.column_stride};
    }
    __device__ __forceinline__ i64 first(i64 row, i64 feature) const {
        return row * this->column + feature * this->feature;
    }
    // From a tile's first element on.
    template <class R>
    __device__ __forceinline__ i64 element(int line, int column) const {
        return feature_of<R>(line, column) * feature + (R::INSIDE ? column * this->column : 0);
    }
    // From one number of a line to the next.
    template <class R>
    __device__ __forceinline__ i64 next() const { return R::INSIDE ? column : feature; }
};

// Of a tile so many columns from one on exist.
template <class R>
__device__ __forceinline__ i64 columns_left(const RunFixed& run, i64 first, int column) {
    return R::INSIDE ? run.columns - first - column : R::COLUMNS;
}

// Of Parameters that have them.
template <class P>
__device__ __forceinline__ short* powers_of(const P& p, int index) {
    if constexpr (POWERS > 0) return p.powers[index];
    else return nullptr;
}

// What a run of float16 hands to the next beside its results: for the 16 lines of each warp the
// exponent by which they are to be multiplied. The place of that of a row's feature.
template <class R>
__device__ __forceinline__ short* handed(const Parameters& parameters, i64 row, u32 feature) {
    u32 tile, line;
    if (R::SECOND) {
        tile = feature / (LINES * R::COLUMNS);
        line = feature / R::WIDTH % LINES;
    } else {
        constexpr u32 COPIES = LINES / R::First::P;
        const u32 chunk = feature % R::PITCH / R::COLUMNS;
        tile = feature / R::LEFT_STEP * R::CHUNKS + chunk / COPIES;
        line = chunk % COPIES * R::First::P + feature / R::PITCH % R::First::P;
    }
    const i64 of_row = i64(R::ROW_TILES) * (LINES / 16);
    return powers_of(parameters, R::INDEX) + row * of_row + tile * (LINES / 16) + line / 16;
}

// The threads that share a tile.
__device__ __forceinline__ int group_number() { return threadIdx.x / GROUP_THREADS; }
__device__ __forceinline__ bool leads_group() { return threadIdx.x % GROUP_THREADS == 0; }
__device__ __forceinline__ void sync_group() { sync_threads(1 + group_number(), GROUP_THREADS); }

constexpr int BIAS = 1 << 15;  // of exponents among unsigned numbers

struct Four {
    float value[4];
    __device__ __forceinline__ explicit Four(const int4& x)
        : value{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                __uint_as_float(x.w)} {}
};

// A thread's part of a tile, as it lies in device memory: 16 bytes a unit.
struct Numbers {
    int4 unit[PANEL / GROUP_THREADS / 4];
    short exponent[PANEL / GROUP_THREADS / 8];  // of units of float16 that have been handed on

    template <class R>
    struct Walk {
        static constexpr int CHUNK = 16 / sizeof(typename R::SourceT);
        static constexpr int UNITS = LINES * R::COLUMNS / (GROUP_THREADS * CHUNK);
        static constexpr int STEP = GROUP_THREADS * CHUNK / R::COLUMNS;  // lines
        static_assert(STEP % 4 == 0, "lines of a thread and of a step are other bits");
    };

    template <class R>
    __device__ __forceinline__ void load(const Parameters& p, const Origin& origin) {
        using SourceT = typename R::SourceT;
        using W = Walk<R>;
        const RunFixed& run = p.runs[R::INDEX];
        const bool is_aligned = !R::BEGINS || run.aligned;
        const Strides strides = Strides::of<R>(run.in, is_aligned);
        const int own = own_thread() % GROUP_THREADS * W::CHUNK, column = own % R::COLUMNS;
        const SourceT* from = static_cast<const SourceT*>(p.sources[R::INDEX]) +
                              strides.first(origin.source, origin.feature) +
                              strides.element<R>(own / R::COLUMNS, column);
        const i64 left = columns_left<R>(run, origin.source, column);
        if (is_aligned && left >= W::CHUNK) {
#pragma unroll
            for (int u = 0; u < W::UNITS; ++u)
                unit[u] = __ldcg(
                    reinterpret_cast<const int4*>(from + strides.element<R>(u * W::STEP, 0)));
        } else {
            const int exist = int(left < W::CHUNK ? left : W::CHUNK);
#pragma unroll
            for (int u = 0; u < W::UNITS; ++u)
                unit[u] = gather(from + strides.element<R>(u * W::STEP, 0), strides.next<R>(),
                                 exist);
        }
        if constexpr (R::TAKES) {
            const int first = feature_of<R>(own / R::COLUMNS, column);
#pragma unroll
            for (int u = 0; u < W::UNITS; ++u)
                exponent[u] = __ldcg(handed<typename R::Before>(
                    p, origin.source,
                    u32(origin.feature) + first + feature_of<R>(u * W::STEP, 0)));
        }
    }
    // So many numbers, and zeros.
    __device__ __forceinline__ static int4 gather(const float* x, i64 stride, int exist) {
        int bits[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) bits[e] = e < exist ? __float_as_uint(x[e * stride]) : 0;
        return {bits[0], bits[1], bits[2], bits[3]};
    }
    template <class T>
    __device__ __forceinline__ static int4 gather(const T* x, i64 stride, int exist) {
        u32 bits[4] = {};
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (e < exist) bits[e / 2] |= u32(x[e * stride].bits) << e % 2 * 16;
        return {int(bits[0]), int(bits[1]), int(bits[2]), int(bits[3])};
    }

    // Bits of the largest magnitudes of fp32, infinite ones too: of the tile, or of its columns. Or
    // the largest exponent of the tile.
    template <class R>
    __device__ __forceinline__ void find_largest(u32* largest) const {
        if constexpr (R::TAKES) {
            int most = -BIAS;
#pragma unroll
            for (int u = 0; u < Walk<R>::UNITS; ++u) most = max(most, int(exponent[u]));
            const u32 found = __reduce_max_sync(~0u, u32(most + BIAS));
            if (threadIdx.x % 32 == 0) atomicMax(largest, found);
            return;
        }
        float most[4] = {};
#pragma unroll
        for (int u = 0; u < Walk<R>::UNITS; ++u) {
            const Four x(unit[u]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& found = most[R::INSIDE ? e : 0];
                found = fmaxf(found, fabsf(x.value[e]));
            }
        }
        const int lane = threadIdx.x % 32, column = threadIdx.x * 4 % R::COLUMNS;
        if constexpr (R::INSIDE) {
            static_assert(R::COLUMNS == 64, "16 lanes have a line");
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float found = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], 16));
                if (lane < 16) atomicMax(&largest[column + e], __float_as_uint(found));
            }
        } else {
            const u32 found = __reduce_max_sync(~0u, __float_as_uint(most[0]));
            if (lane == 0) atomicMax(largest, found);
        }
    }

    // To a panel, those of fp32 multiplied by powers of two, and those with an exponent by what is
    // between that and the largest.
    template <class R>
    __device__ __forceinline__ void write(unsigned char* panel, const float (&power)[4],
                                          int largest) const {
        using W = Walk<R>;
        const int own = threadIdx.x % GROUP_THREADS * W::CHUNK;
        const int to = place(own / R::COLUMNS, own % R::COLUMNS, LINES);
#pragma unroll
        for (int u = 0; u < W::UNITS; ++u) {
            const int at = (to + u * W::STEP * LINE_BYTES) ^ u * W::STEP % 8 << 4;
            u32* word = reinterpret_cast<u32*>(panel + at);
            if constexpr (R::TAKES)
                *reinterpret_cast<int4*>(word) = scaled(unit[u], exponent[u] - largest);
            else if constexpr (sizeof(typename R::SourceT) == 2)
                *reinterpret_cast<int4*>(word) = unit[u];
            else write_words(word, Four(unit[u]), power);
        }
    }
    // Eight of float16. What half precision does not tell apart beside the largest is lost, as it
    // would be in a sum.
    __device__ __forceinline__ static int4 scaled(const int4& x, int exponent) {
        if (exponent == 0) return x;
        const float power = power_of_two(exponent);
        return {scaled(x.x, power), scaled(x.y, power), scaled(x.z, power), scaled(x.w, power)};
    }
    __device__ __forceinline__ static int scaled(int two, float power) {
        return int(pack<half_t>(convert<float>(half_t{u16(two)}) * power,
                                convert<float>(half_t{u16(u32(two) >> 16)}) * power));
    }
    __device__ __forceinline__ static void write_words(u32* to, const Four& x,
                                                       const float (&power)[4]) {
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = SCALED ? x.value[e] * power[e] : x.value[e];
        if (WORDS == 2) {
            const Pair one(v[0], v[1]), other(v[2], v[3]);
            store_vector(to, Vector<u32, 2>{one.high, other.high});
            store_vector(to + PANEL_BYTES / 4, Vector<u32, 2>{one.low, other.low});
        } else {
            store_vector(to, Vector<u32, 2>{pack<HalfT>(v[0], v[1]), pack<HalfT>(v[2], v[3])});
        }
    }
};
