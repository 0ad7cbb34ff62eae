// Tiles from device memory to shared memory, as numbers of RawT, each at its place.
#pragma once

#include "common/async_copy.cuh"
#include "kronecker_product/modes/config.cuh"
#include "kronecker_product/modes/parameters.cuh"
#include "kronecker_product/modes/thread.cuh"

template <class T>
__device__ __forceinline__ typename Stored<T>::RawT& raw_element(T* tile, int index) {
    return *reinterpret_cast<typename Stored<T>::RawT*>(tile + Stored<T>::place(index));
}

// Column and feature of an element of the tile that is read.
template <class R>
__device__ __forceinline__ void locate(int index, int& column, int& feature) {
    column = R::COLUMNS_LAST ? index % R::COLUMNS : index / R::IN_FEATURES;
    feature = R::COLUMNS_LAST ? index / R::COLUMNS : index % R::IN_FEATURES;
}

// What another block wrote in this launch is in the L2 cache, and may be older in that of the
// multiprocessor.
template <class R>
__device__ __forceinline__ typename R::SourceT load_element(const typename R::SourceT* from) {
    if constexpr (!R::WRITTEN_HERE) {
        return *from;
    } else if constexpr (sizeof(*from) == 2) {
        return {__ldcg(&from->bits)};
    } else {
        return __ldcg(from);
    }
}

// How threads walk over a tile whose last dimension has LAST elements, a power of two: each takes
// CHUNK of them, and STEP on the next. Places, columns and features of a step are the thread's own
// and the step's, side by side, so that the step's are the same for a warp.
template <int LAST, int CHUNK>
struct Walk {
    static constexpr int STEP = THREADS * CHUNK;
    static constexpr int ALONG = LAST > STEP ? LAST / STEP : 1;   // steps
    static constexpr int ACROSS = LAST < STEP ? STEP / LAST : 1;  // rows of a step
    int own;
    __device__ __forceinline__ Walk() : own(own_thread() * CHUNK) {}
    // Elements from a tensor's first one to the thread's, and to a step's.
    __device__ __forceinline__ i64 of_thread(i64 stride) const {
        return own % LAST + own / LAST * stride;
    }
    // Of as many as STEPS, which may all be along the same row.
    template <int STEPS>
    __device__ __forceinline__ static i64 of_step(int step, i64 stride) {
        if (ALONG >= STEPS) return step * STEP;
        return step % ALONG * STEP + step / ALONG * (ACROSS * stride);
    }
};

// Steps of a walk over COUNT elements that are written out: places of all but the first are known
// to the compiler then.
template <int COUNT, int STEP>
struct Unrolled {
    static constexpr int STEPS = ceil_div(COUNT, STEP), AT_ONCE = STEPS < 2 ? STEPS : 2;
    static constexpr bool WHOLE = COUNT % (STEP * AT_ONCE) == 0;
};

// Elements `begin` up to `end` of a whole tile, from aligned memory; all of them, if not PART.
// Copies are under way then.
template <class R, int LAST, bool PART, class T>
__device__ __forceinline__ void copy_tile(T* tile, const typename R::SourceT* x, i64 stride,
                                          int begin, int end) {
    using SourceT = typename R::SourceT;
    using OwnWalk = Walk<LAST, 16 / sizeof(SourceT)>;
    constexpr int STEP = OwnWalk::STEP;
    using Steps = Unrolled<R::INPUTS, STEP>;
    const OwnWalk walk;
    const int own = Stored<T>::place(walk.own);
    x += walk.of_thread(stride);
#pragma unroll 1
    for (int first = begin / STEP & -Steps::AT_ONCE; first * STEP < end; first += Steps::AT_ONCE) {
        const int to = own ^ Stored<T>::place(first * STEP);
        const SourceT* from = x + OwnWalk::template of_step<Steps::STEPS>(first, stride);
#pragma unroll
        for (int next = 0; next < Steps::AT_ONCE; ++next) {
            int index = walk.own + (first + next) * STEP;
            if ((PART || !Steps::WHOLE) && (index < begin || index >= end)) continue;
            copy_async<16>(tile + (to ^ Stored<T>::place(next * STEP)),
                           from + OwnWalk::template of_step<Steps::STEPS>(next, stride), 16);
        }
    }
}

// Where elements of a tile come from and go to. Those of columns that do not exist are zeros.
template <class R>
struct Gather {
    using SourceT = typename R::SourceT;
    const SourceT* x;
    const Layout& side;
    int columns;
    bool columns_first;  // which neighbours in memory are, though not in the tile

    // How many of COUNT neighbours from an index on exist, where they are and where they go.
    template <int COUNT>
    __device__ __forceinline__ int find(int index, const SourceT*& from, int& to) const {
        int column, feature;
        if (COUNT == 1 && columns_first) {
            column = index % R::COLUMNS;
            feature = index / R::COLUMNS;
            to = R::COLUMNS_LAST ? index : column * R::IN_FEATURES + feature;
        } else {
            locate<R>(index, column, feature);
            to = index;
        }
        from = x + column * side.column_stride + feature * side.feature_stride;
        return R::COLUMNS_LAST ? max(0, min(COUNT, columns - column))
                               : column < columns ? COUNT : 0;
    }
};

// Elements `begin` up to `end`, COUNT neighbours at a time, by copies that are under way then.
template <class R, int COUNT, class T>
__device__ __forceinline__ void copy_elements(T* tile, const Gather<R>& gather, int begin,
                                              int end) {
    using SourceT = typename R::SourceT;
    constexpr int SIZE = sizeof(SourceT);
#pragma unroll 2
    for (int index = begin + threadIdx.x * COUNT; index < end; index += THREADS * COUNT) {
        const SourceT* from;
        int to, exist = gather.template find<COUNT>(index, from, to);
        copy_async<COUNT * SIZE>(&raw_element(tile, to), exist ? from : gather.x, exist * SIZE);
    }
}

// By registers, as many at once as wait for memory together.
template <class R, int COUNT, class T>
__device__ __forceinline__ void load_elements(T* tile, const Gather<R>& gather, int begin,
                                              int end) {
    using SourceT = typename R::SourceT;
    using RawT = typename Stored<T>::RawT;
    constexpr int AT_ONCE = COUNT == 1 ? 8 : 2;
#pragma unroll 1
    for (int first = begin + threadIdx.x * COUNT; first < end; first += AT_ONCE * THREADS * COUNT) {
        Vector<SourceT, COUNT> values[AT_ONCE] = {};
        int to[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int index = first + i * THREADS * COUNT;
            if (index >= end) continue;
            const SourceT* from;
            int exist = gather.template find<COUNT>(index, from, to[i]);
            if constexpr (COUNT == 1) {
                if (exist) values[i].element[0] = load_element<R>(from);
            } else if (exist == COUNT) {
                values[i] = load_vector<SourceT, COUNT>(from);
            } else {
#pragma unroll
                for (int e = 0; e < COUNT; ++e)
                    if (e < exist) values[i].element[e] = from[e];
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * THREADS * COUNT >= end) continue;
#pragma unroll
            for (int e = 0; e < COUNT; ++e)
                raw_element(tile, to[i] + e) = convert<RawT>(values[i].element[e]);
        }
    }
}

// Elements `begin` up to `end` of a tile, in multiples of CHUNK, which are a PART or all of them.
// Copies may be under way still.
template <class R, bool PART = false, class T>
__device__ __forceinline__ void load_tile(T* tile, const Parameters& p, const RunFixed& run,
                                          const void* source, const Tile& at, int begin, int end) {
    using SourceT = typename R::SourceT;
    constexpr int CHUNK = 16 / sizeof(SourceT);
    constexpr bool IS_COPY = sizeof(SourceT) == sizeof(typename Stored<T>::RawT);
    // Of the tile's last dimension, in which 16-byte copies run.
    constexpr int LAST = R::COLUMNS_LAST ? R::COLUMNS : R::IN_FEATURES;
    const SourceT* x = static_cast<const SourceT*>(source) + at.in;
    const Layout& side = run.source;
    if constexpr (IS_COPY && is_power(LAST) && LAST % CHUNK == 0) {
        if (run.aligned && at.columns == R::COLUMNS) {
            i64 stride = R::COLUMNS_LAST ? side.feature_stride : side.column_stride;
            copy_tile<R, LAST, PART>(tile, x, stride, begin, end);
            return;
        }
    }
    const bool is_whole = begin == 0 && end == R::INPUTS;
    const Gather<R> gather{x, side, int(at.columns), is_whole && run.columns_first};
    if constexpr (LAST % CHUNK == 0) {
        if (run.aligned) {
            if constexpr (IS_COPY) copy_elements<R, CHUNK>(tile, gather, begin, end);
            else load_elements<R, CHUNK>(tile, gather, begin, end);
            return;
        }
    }
    // A copy of 4 or 8 bytes would find what another block wrote as the multiprocessor had it.
    if constexpr (IS_COPY && sizeof(SourceT) >= 4 && !R::WRITTEN_HERE)
        copy_elements<R, 1>(tile, gather, begin, end);
    else
        load_elements<R, 1>(tile, gather, begin, end);
}

// The part of the next tile of a block that the current one leaves free, or the REST of it: tiles
// lie in turn at the front and AHEAD elements behind it.
template <class R, bool REST, class T>
__device__ __forceinline__ void read_ahead(T* tiles, const Parameters& p, const Tile& at,
                                           bool is_behind) {
    constexpr int FIRST = TILE - AHEAD;
    int begin, end;
    if (REST) {
        begin = is_behind ? 0 : AHEAD;
        end = is_behind ? FIRST : TILE;
    } else {
        begin = is_behind ? FIRST : 0;
        end = is_behind ? TILE : AHEAD;
    }
    tiles += is_behind * AHEAD * Stored<T>::WORDS;
    load_tile<R, true>(tiles, p, p.runs[R::INDEX], p.sources[R::INDEX], at,
                       min(begin, R::INPUTS), min(end, R::INPUTS));
}
