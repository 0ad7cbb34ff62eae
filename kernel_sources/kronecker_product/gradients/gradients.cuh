// Gradients of one run of factors in one pass over memory, for every GPU since sm_80 and any
// strides: of z = x F1 .. FN, given x and the gradient g by z, those by each F and that by x, which
// is g times the factors' transposes.
//
// Floors on an H200: (bytes of x, g and the gradient by x) over 4.3 TB/s; where N factors of P x P
// are one run, (3 N - 1) * 2 * P operations an element of x over 94 TFLOP/s in 3xTF32, 282 in TF32,
// 61 in double. A product with N such factors takes 2 N * P operations an element. A tile whose run
// has N factors is read from the L2 cache N - 1 times more, and (N - 1) (N - 2) / 2 times a factor
// is applied again.
//
// A block takes tile after tile, that of x and that of g side by side in shared memory. A factor's
// gradient needs x with the factors before it applied and g with those behind it, transposed. Those
// before it are taken off x by reading x again: what each factor left would be a tile of its own.
// Sums stay in registers (contraction.cuh) until the block's last tile. Then each block has made
// one part of each sum, which sum.cuh adds up, so that the result does not depend on the order in
// which blocks run. The gradient by x may take the place of x, as a tile is written when nothing
// of it is read any more.
//
// Facts, struct Fixed, the runs X and G, of x and of g, and AllStages, in the order in
// which factors are applied to x: class Gradients of
// kernlib/families/kronecker_product/kernels/gradients.py.
// Rows, Widths and the launch's factors are those of x, then those of their transposes.
#pragma once

#include "kronecker_product/gradients/contraction.cuh"

// Elements of shared memory that a tile of each takes.
constexpr int SOURCE_TILE = Config::SOURCE_TILE, GRADIENT_TILE = Config::GRADIENT_TILE;
constexpr int ENTRIES = Config::ENTRIES;  // of a part: those of all matrices
constexpr bool WANTED = Config::WANTED;   // whether the gradient by x is

// A factor as it is applied to x, to g, and its gradient. That of x which comes last is applied to
// nothing, and without a gradient by x that of g which comes first.
template <class Forward_, class Backward_, int DOWN, int ACROSS, int AT>
struct Stage {
    using Forward = Forward_;
    using Backward = Backward_;
    using Sums = Contraction<Forward, DOWN, ACROSS, AT>;
};

template <int INDEX, class First, class... Rest>
struct Nth {
    using Type = typename Nth<INDEX - 1, Rest...>::Type;
};
template <class First, class... Rest>
struct Nth<0, First, Rest...> {
    using Type = First;
};

// The tiles of a block, and where they are of.
struct Tiles {
    AccT *x, *g;
    const AccT* matrices;
    const Parameters& p;
    const Finish& finish;
    Tile from, at;  // of x, of g

    __device__ __forceinline__ Tiles(AccT* shared, const Parameters& p, const Finish& finish,
                                     i64 batch, i64 index)
        : x(shared), g(shared + SOURCE_TILE), matrices(g + GRADIENT_TILE), p(p), finish(finish),
          from(p.runs[0], Slab{batch, batch, 0, true}, index, X::COLUMNS),
          at(p.runs[1], Slab{batch, batch, 0, true}, index, G::COLUMNS) {}

    __device__ __forceinline__ void load_x() const {
        load_tile<X>(x, p, p.runs[0], p.sources[0], from, 0, X::INPUTS);
    }
    __device__ __forceinline__ void load_g() const {
        load_tile<G>(g, p, p.runs[1], p.sources[1], at, 0, G::INPUTS);
    }
    // What `load_x` began may be read behind it.
    __device__ __forceinline__ static void wait() {
        wait_for_copies();
        __syncthreads();
    }
    template <class M>
    __device__ __forceinline__ void apply_to_x() const {
        apply<X, M>(x, matrices, p, nullptr, from, finish);
    }
    template <class M>
    __device__ __forceinline__ void apply_to_g() const {
        auto* out = static_cast<typename G::TargetT*>(p.targets[1]) + at.out;
        apply<G, M>(g, matrices, p, out, at, finish);
    }
};

template <class... S>
struct StagesOf : S::Sums... {
    static constexpr int COUNT = sizeof...(S);
    template <int INDEX>
    using At = typename Nth<INDEX, S...>::Type;

    __device__ __forceinline__ void clear() { (S::Sums::clear(), ...); }
    __device__ __forceinline__ void write(AccT* room, AccT* part) const {
        (S::Sums::write(room, part), ...);
    }
    template <int INDEX = 0>
    __device__ __forceinline__ static void stage(AccT* matrices, const Parameters& p, i64 batch) {
        using Forward = typename At<INDEX>::Forward;
        using Backward = typename At<INDEX>::Backward;
        if constexpr (INDEX < COUNT - 1) stage_matrix<Forward>(matrices + Forward::AT, p, batch);
        if constexpr (INDEX > 0 || WANTED)
            stage_matrix<Backward>(matrices + Backward::AT, p, batch);
        if constexpr (INDEX < COUNT - 1) stage<INDEX + 1>(matrices, p, batch);
    }

    // The first END factors.
    template <int END, int INDEX = 0>
    __device__ __forceinline__ static void apply_to_x(const Tiles& tiles) {
        if constexpr (INDEX < END) {
            tiles.template apply_to_x<typename At<INDEX>::Forward>();
            apply_to_x<END, INDEX + 1>(tiles);
        }
    }
    // All sums of a tile, for an x with all factors before INDEX applied and a g with all behind
    // it, until nothing is left to apply but the first one to g.
    template <int INDEX = COUNT - 1>
    __device__ __forceinline__ void add_tile(const Tiles& tiles) {
        At<INDEX>::Sums::add(tiles.x, tiles.g);
        __syncthreads();
        if constexpr (INDEX > 0) {
            tiles.load_x();
            tiles.template apply_to_g<typename At<INDEX>::Backward>();
            tiles.wait();
            apply_to_x<INDEX - 1>(tiles);
            add_tile<INDEX - 1>(tiles);
        }
    }
    __device__ __forceinline__ void add_batch(AccT* shared, const Parameters& p,
                                              const Finish& finish, i64 batch) {
        i64 index = blockIdx.x;
        const i64 count = p.runs[0].tiles;
        if (index >= count) return;
        stage(shared + SOURCE_TILE + GRADIENT_TILE, p, batch);
        Tiles tiles(shared, p, finish, batch, index);
        tiles.load_x();
        tiles.load_g();
        while (true) {
            tiles.wait();
            apply_to_x<COUNT - 1>(tiles);
            add_tile(tiles);
            index += gridDim.x;
            Tiles next(shared, p, finish, batch, min(index, count - 1));
            if (index < count) next.load_x();
            if constexpr (WANTED) tiles.template apply_to_g<typename At<0>::Backward>();
            if (index >= count) return;
            next.load_g();
            tiles.from = next.from;
            tiles.at = next.at;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_gradients(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    AccT* room = reinterpret_cast<AccT*>(shared);
    AccT* parts = static_cast<AccT*>(p.targets[0]);
    Finish finish(Read<Parameters>{p});
    const bool is_one_sum = p.slabs;  // of all batches, which have the same factors
    AllStages stages;
    stages.clear();
    i64 part = i64(blockIdx.y) * gridDim.x + blockIdx.x;
    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
        __syncthreads();  // before the matrices of the next take the place of the sums
        stages.add_batch(room, p, finish, batch);
        if (is_one_sum) continue;
        __syncthreads();
        part = batch * gridDim.x + blockIdx.x;
        stages.write(room, parts + part * ENTRIES);
        stages.clear();
    }
    if (!is_one_sum) return;
    __syncthreads();
    stages.write(room, parts + part * ENTRIES);
}
