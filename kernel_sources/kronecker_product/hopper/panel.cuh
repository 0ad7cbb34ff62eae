// Where numbers of a tile lie: in device memory, in a stage of shared memory as they arrive, and as
// words of a panel there, which takes the stage's place, and which wgmma reads.
//
// A tile is LINES lines of COLUMNS numbers. Lines are the indices of the first matrix, of each of
// its copies; columns are features too, WIDTH neighbours in device memory, of several groups of
// lines where the factors that run along them are narrower than a panel. With the factors on the
// left they are columns of x instead.
//
// A run is a struct that the generated source has, with
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
//   QUADS                        whether its results lie by quad_place
//   MATRIX, MATRICES             how many are before them, and their bytes
#pragma once

#include "common/async_copy.cuh"
#include "common/hopper.cuh"
#include "kronecker_product/halves/pair.cuh"
#include "kronecker_product/halves/powers.cuh"
#include "kronecker_product/modes/entries.cuh"
#include "kronecker_product/modes/thread.cuh"

using HalfT = Config::HalfT;              // half_t or bfloat16_t
constexpr int WORDS = Config::WORDS;      // of HalfT, that a number is
constexpr bool SCALED = Config::SCALED;   // whether it is half_t
constexpr int LINES = Config::LINES;      // of all tiles, 64 or 128
constexpr int GROUPS = Config::GROUPS;    // of threads with a tile each
constexpr int WORKERS = Config::WORKERS;  // the threads that are in one
constexpr int PANEL = Config::PANEL;      // numbers of the largest tile
constexpr int WARPGROUPS = LINES / 64;  // of a tile
constexpr int GROUP_THREADS = 128 * WARPGROUPS;
constexpr int LINE_BYTES = 128;  // 64 numbers of 2 bytes
constexpr int PANEL_BYTES = PANEL * 2;
static_assert(WORKERS == GROUPS * GROUP_THREADS, "no worker is without a tile");

// Bytes from the first word of an array of so many rows: 64 columns of all rows, then the next 64;
// swizzled as wgmma expects it.
__device__ constexpr int place(int row, int column, int rows) {
    return column / 64 * (rows * LINE_BYTES) + row * LINE_BYTES +
           ((column % 64 / 8 ^ row % 8) << 4) + column % 8 * 2;
}

// Where a column of results is among those of a product, so that a thread has four neighbours
// instead of two: it has columns 2 l, 2 l + 1, 2 l + 8, 2 l + 9 of each 16, of lane l of four.
__device__ constexpr int quad_place(int column) {
    return column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
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

// Elements of a tensor from one feature to the next, and from one row or column of x: 1 between
// neighbours of an aligned one.
template <class R, bool ALIGNED>
struct Strides {
    i64 feature_stride, column_stride;
    __device__ __forceinline__ explicit Strides(const Layout& side)
        : feature_stride(side.feature_stride), column_stride(side.column_stride) {}
    __device__ __forceinline__ i64 feature() const {
        return ALIGNED && !R::INSIDE ? 1 : feature_stride;
    }
    __device__ __forceinline__ i64 column() const {
        return ALIGNED && R::INSIDE ? 1 : column_stride;
    }
    __device__ __forceinline__ i64 first(i64 row, i64 feature) const {
        return row * column() + feature * this->feature();
    }
    // From a tile's first element on.
    __device__ __forceinline__ i64 element(int line, int column) const {
        return feature_of<R>(line, column) * feature() + (R::INSIDE ? column * this->column() : 0);
    }
    // From one number of a line to the next.
    __device__ __forceinline__ i64 next() const { return R::INSIDE ? column() : feature(); }
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
__device__ __forceinline__ void sync_group() { sync_threads(1 + group_number(), GROUP_THREADS); }

constexpr int BIAS = 1 << 15;  // of exponents among unsigned numbers

struct Four {
    float value[4];
    __device__ __forceinline__ explicit Four(const int4& x)
        : value{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                __uint_as_float(x.w)} {}
};

// Units of 16 bytes that so many threads, each after another, have of a tile.
template <class R, int THREADS_>
struct Walk {
    static constexpr int CHUNK = 16 / sizeof(typename R::SourceT);
    static constexpr int UNITS = LINES * R::COLUMNS / (THREADS_ * CHUNK);
    static constexpr int STEP = THREADS_ * CHUNK / R::COLUMNS;  // lines
    int line, column;  // of the first unit
    __device__ __forceinline__ explicit Walk(int thread)
        : line(thread * CHUNK / R::COLUMNS), column(thread * CHUNK % R::COLUMNS) {}
    // Bytes of a stage before a unit: as they lie in a panel, or those of fp32 one after another.
    __device__ __forceinline__ int place_of(int unit) const {
        if (sizeof(typename R::SourceT) == 4)
            return (line + unit * STEP) * (R::COLUMNS * 4) + column * 4;
        return in_panel(unit);
    }
    __device__ __forceinline__ int in_panel(int unit) const {
        return by_line(place(line, column, LINES), unit);
    }
    // Of the first two of four numbers; the others are 16 bytes from there, by exclusive or.
    __device__ __forceinline__ int in_quads(int unit) const {
        return by_line(place(line, quad_place(column), LINES), unit);
    }
    __device__ __forceinline__ static int by_line(int first, int unit) {
        return (first + unit * STEP * LINE_BYTES) ^ unit * STEP % 8 << 4;
    }
};

// Exponents of a tile, of 64 neighbours each.
constexpr int TILE_POWERS = PANEL / 64;

// A thread's part of a tile.
struct Numbers {
    int4 unit[PANEL / GROUP_THREADS / 4];
    short exponent[PANEL / GROUP_THREADS / 8];  // of units of float16 that have been handed on

    template <class R>
    using OwnWalk = Walk<R, GROUP_THREADS>;

    template <class R>
    __device__ __forceinline__ void read(const unsigned char* stage, const short* powers) {
        const OwnWalk<R> walk(threadIdx.x % GROUP_THREADS);
#pragma unroll
        for (int u = 0; u < OwnWalk<R>::UNITS; ++u) {
            unit[u] = *reinterpret_cast<const int4*>(stage + walk.place_of(u));
            if constexpr (R::TAKES)
                exponent[u] =
                    powers[walk.line + u * OwnWalk<R>::STEP + walk.column / 64 * LINES];
        }
    }

    // Bits of the largest magnitudes of fp32, infinite ones too: of the tile, or of its columns. Or
    // the largest exponent of the tile.
    template <class R>
    __device__ __forceinline__ void find_largest(u32* largest) const {
        if constexpr (R::TAKES) {
            int most = -BIAS;
#pragma unroll
            for (int u = 0; u < OwnWalk<R>::UNITS; ++u) most = max(most, int(exponent[u]));
            const u32 found = __reduce_max_sync(~0u, u32(most + BIAS));
            if (threadIdx.x % 32 == 0) atomicMax(largest, found);
            return;
        }
        float most[4] = {};
#pragma unroll
        for (int u = 0; u < OwnWalk<R>::UNITS; ++u) {
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
        const OwnWalk<R> walk(threadIdx.x % GROUP_THREADS);
#pragma unroll
        for (int u = 0; u < OwnWalk<R>::UNITS; ++u) {
            if constexpr (R::TAKES) {
                *reinterpret_cast<int4*>(panel + walk.in_panel(u)) =
                    scaled(unit[u], exponent[u] - largest);
            } else if constexpr (R::QUADS && !R::SECOND) {
                const int at = walk.in_quads(u);
                write_words(panel + at, panel + (at ^ 16), Four(unit[u]), power);
            } else {
                const int at = walk.in_panel(u);
                write_words(panel + at, panel + at + 4, Four(unit[u]), power);
            }
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
    // The first two and the others.
    __device__ __forceinline__ static void write_words(unsigned char* to, unsigned char* others,
                                                       const Four& x, const float (&power)[4]) {
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = SCALED ? x.value[e] * power[e] : x.value[e];
        if (WORDS == 2) {
            const Pair one(v[0], v[1]), other(v[2], v[3]);
            write_two(to, others, one.high, other.high);
            write_two(to + PANEL_BYTES, others + PANEL_BYTES, one.low, other.low);
        } else {
            write_two(to, others, pack<HalfT>(v[0], v[1]), pack<HalfT>(v[2], v[3]));
        }
    }
    __device__ __forceinline__ static void write_two(unsigned char* to, unsigned char* other,
                                                     u32 one, u32 next) {
        if (other == to + 4) {
            store_vector(reinterpret_cast<u32*>(to), Vector<u32, 2>{one, next});
        } else {
            *reinterpret_cast<u32*>(to) = one;
            *reinterpret_cast<u32*>(other) = next;
        }
    }
};
