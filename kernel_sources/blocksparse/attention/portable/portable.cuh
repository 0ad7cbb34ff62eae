// Block-sparse attention by mma.sync, on every GPU since sm_80:
//   out[b, h] = softmax(score(scale q[b, h] k[b, h / group]^T)) v[b, h / group]
// over what the layout stores and rows see, and the logarithms of the sums that divide.
//
// Floors: 4 * rows * columns * head dimension operations of what is stored over what mma.sync
// reaches, 566 TFLOP/s on an H200; of a tile's groups of 16 rows and columns those alone are
// multiplied that are stored and seen. Of each exponential two multiplications by the tensor cores
// take 4 * head dimension operations: below 64 the exponentials decide.
//
// A CTA has a tile of rows of one head, and walks over the tiles of columns that the layout's words
// name (walk.cuh), each warp by itself. While logits are multiplied the tile's rows of v are on
// their way, and the next tile's rows of k while these are added up. Weights are relative to the
// largest logit so far, as powers of 2, and never leave registers.
//
// What is left out is -inf, whatever q and k hold there, and v counts nowhere but where rows see
// it: copies put zeros behind the last row that counts, groups that are not stored are not
// multiplied, and of a group that causality, a window or lengths cut, the rows of v that are not
// finite are added one by one (products.cuh). Where a mask's expression leaves an element out, 0 *
// NaN is NaN.
//
// Facts and struct Fixed: class Portable of
// kernlib/families/blocksparse/kernels/attention/portable.py.
#pragma once

#include "blocksparse/attention/logits.cuh"
#include "blocksparse/attention/parameters.cuh"
#include "blocksparse/attention/products.cuh"

constexpr int FRAGMENTS = Config::FRAGMENTS;  // of 16 rows each, of a warp
constexpr int TILE_COLS = Config::TILE_COLS;
constexpr int BLOCK_ROWS = Config::BLOCK_ROWS, BLOCK_COLS = Config::BLOCK_COLS;  // of the layout
// Of a row of q and k, and of v and out: multiples of 16.
constexpr int FEATURES = Config::FEATURES, VALUES = Config::VALUES;
constexpr int MIN_BLOCKS = Config::MIN_BLOCKS;  // CTAs that a multiprocessor holds
constexpr int WARP_ROWS = 16 * FRAGMENTS, TILE_ROWS = WARPS * WARP_ROWS, GROUPS = TILE_COLS / 16;
constexpr int Q_BYTES = TILE_ROWS * pitch_of(FEATURES), K_BYTES = TILE_COLS * pitch_of(FEATURES);

struct Operands {
    const u32* row_bits;
    const InputT *q, *k, *v;
    InputT* out;
    float *lse, *rest;  // (batch, heads, queries), or null; rest: HAS_SCORE, see rest_of()
};
struct Parameters : Operands,
                    LengthPointers<LENGTHS>,
                    CapturedPointers<CAPTURED>,
                    Numbers,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

using Columns = Walk<TILE_ROWS, TILE_COLS, BLOCK_ROWS, BLOCK_COLS>;

// Of a lane's rows, row + 8 h of fragment f: the largest logit so far, the sum of this lane's
// weights relative to that, and its part of the result.
struct State {
    float most[FRAGMENTS][2], sum[FRAGMENTS][2];
    float out[FRAGMENTS][VALUES / 8][4];
};

// Weights in the place of logits, relative to the largest so far; what was added up before follows.
__device__ __forceinline__ void take_weights(Logits<FRAGMENTS, GROUPS>& logits, State& state) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = state.most[f][h];
#pragma unroll
            for (int n = 0; n < 2 * GROUPS; ++n)
                most = fmaxf(most, fmaxf(logits[f][n][2 * h], logits[f][n][2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            // -inf less -inf is no number: a row without anything so far has weights of 0.
            const float shift = most == lowest() ? 0.0f : most;
            const float before = fast_exp2((state.most[f][h] - shift) * UNIT);
            float sum = state.sum[f][h] * before;
#pragma unroll
            for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) {
                    logits[f][n][i] = fast_exp2((logits[f][n][i] - shift) * UNIT);
                    sum += logits[f][n][i];
                }
            state.most[f][h] = most;
            state.sum[f][h] = sum;
            if (before == 1.0f) continue;
#pragma unroll
            for (int n = 0; n < VALUES / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) state.out[f][n][i] *= before;
        }
}

// Zeros in the place of weights that are dropped, of a group.
__device__ __forceinline__ void drop(Logits<FRAGMENTS, GROUPS>& weights, const Dropout& dropout,
                                     int g, int row, int col) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        const u32 kept = kept_of(dropout, row + 16 * f, col + 16 * g);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(kept >> (4 * n + i) & 1)) weights[f][2 * g + n][i] = 0.0f;
    }
}

// A tile's share, `row` and `col` being the lane's first ones: `stage` has its rows of k, and
// `wait` returns when it also has those of v.
template <class Score, class Wait>
__device__ __forceinline__ void add_tile(State& state, const unsigned char* q,
                                         const unsigned char* k, const unsigned char* v,
                                         const Tile& tile, const Sight& sight, const Score& score,
                                         const Dropout& dropout, float scale, int first_row,
                                         const Wait& wait) {
    const int lane = threadIdx.x % 32, first_col = tile.index * TILE_COLS;
    const int row = first_row + lane / 4, col = first_col + lane % 4 * 2;
    Groups groups[FRAGMENTS];
    u32 wanted = 0;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        const int own = first_row + 16 * f;
        const u32 stored = Columns::groups_of_line<16>(tile.live, own % TILE_ROWS);
        groups[f] = groups_of<GROUPS>(sight, stored, own, first_col);
        wanted |= groups[f].live;
    }
    Logits<FRAGMENTS, GROUPS> logits;
    if (wanted) multiply_rows<FEATURES, FRAGMENTS, GROUPS>(logits, q, k, wanted);
    wait();
    if (!wanted) return;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n) {
            const bool is_live = groups[f].live >> n / 2 & 1, is_cut = groups[f].cut >> n / 2 & 1;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own_row = row + 16 * f + i / 2 * 8, own_col = col + 8 * n + i % 2;
                float x = lowest();
                if (is_live && is_left(score, is_cut, sight, own_row, own_col))
                    x = logit(logits[f][n][i], scale, score, own_row, own_col);
                logits[f][n][i] = x;
            }
        }
    take_weights(logits, state);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        u32 live = 0, cut = 0;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            live |= (groups[f].live >> g & 1) << f;
            cut |= (groups[f].cut >> g & 1) << f;
        }
        if (!live) continue;
        if (DROPOUT) drop(logits, dropout, g, row, col);
        u32 a[FRAGMENTS][4];
        pack_group<FRAGMENTS, GROUPS>(a, logits, g);
        add_rows<VALUES, VALUES, FRAGMENTS>(
            state.out, a, v + g * 16 * pitch_of(VALUES), live, cut, [&](int f, int half, int k) {
                return sight.keeps(row + 16 * f + 8 * half, first_col + 16 * g + k);
            });
    }
}

// Results by way of shared memory, 16 bytes at a time, and the logarithms of sums.
__device__ __forceinline__ void store(const State& state, unsigned char* staged, InputT* out,
                                      i64 stride, float* lse, float* rest, float kept_scale,
                                      int first_row, const Fixed& sizes) {
    constexpr int PITCH = pitch_of(VALUES), ACROSS = VALUES / CHUNK;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = state.sum[f][h];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const int line = 16 * f + 8 * h + lane / 4;
            const bool is_empty = sum == 0.0f;
            const float factor = kept_scale / sum;
#pragma unroll
            for (int n = 0; n < VALUES / 8; ++n) {
                const float x = is_empty ? 0.0f : state.out[f][n][2 * h] * factor;
                const float y = is_empty ? 0.0f : state.out[f][n][2 * h + 1] * factor;
                *reinterpret_cast<u32*>(staged + line * PITCH + n * 16 + lane % 4 * 4) =
                    pack<InputT>(x, y);
            }
            if (!lse || lane % 4 != 0 || first_row + line >= sizes.queries) continue;
            const float most = state.most[f][h] * (HAS_SCORE ? 1.0f : LN_2), of_sum = logf(sum);
            const float whole = is_empty ? lowest() : most + of_sum;
            lse[first_row + line] = whole;
            if (HAS_SCORE && rest) rest[first_row + line] = rest_of(whole, most, of_sum);
        }
    __syncwarp();
#pragma unroll 4
    for (int index = lane; index < WARP_ROWS * ACROSS; index += 32) {
        const int line = index / ACROSS, chunk = index % ACROSS;
        if (first_row + line >= sizes.queries || chunk >= sizes.value_chunks) continue;
        auto x = load_vector<u32, 4>(
            reinterpret_cast<const u32*>(staged + line * PITCH + chunk * 16));
        InputT* to = out + (first_row + line) * stride + chunk * CHUNK;
        store_vector<u32, 4>(reinterpret_cast<u32*>(to), x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
blocksparse_attention(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char *k_rows = shared + Q_BYTES, *v_rows = k_rows + K_BYTES;
    const Fixed& sizes = p;
    const Place place(sizes, sizes.heads);
    if (place.batch >= sizes.batch) return;
    const int tile_row = (sizes.tiles - 1 - place.tile) * TILE_ROWS, kv = place.head / sizes.group;
    const int first_row = tile_row + int(threadIdx.x / 32) * WARP_ROWS;
    const InputT* k = p.k_strides.of(p.k, place.batch, kv);
    const InputT* v = p.v_strides.of(p.v, place.batch, kv);
    const Sight sight = sight_of(p, place.batch, sizes.queries, sizes.keys);
    const Score score = score_of<Score>(p, place.batch, place.head);
    const Dropout dropout = dropout_of(p, u32(place.batch * sizes.heads + place.head));
    const float scale = read_scalar<float>(p.scale, 0) * (HAS_SCORE ? 1.0f : LOG2_E);
    auto begin_k = [&](const Tile& tile) {
        load_rows<TILE_COLS, FEATURES>(k_rows, k, p.k_strides.row, tile.index * TILE_COLS,
                                       sight.cols, sizes.feature_chunks);
    };

    Columns walk(rows_of(p, p.row_bits, place.batch, place.head), tile_row / TILE_ROWS,
                 sight.columns_of(tile_row, TILE_ROWS));
    State state = {};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) state.most[f][0] = state.most[f][1] = lowest();
    Tile tile;
    bool is_there = walk.next(tile);
    if (is_there) {
        load_rows<TILE_ROWS, FEATURES>(shared, p.q_strides.of(p.q, place.batch, place.head),
                                       p.q_strides.row, tile_row, sight.rows,
                                       sizes.feature_chunks);
        begin_k(tile);
    }
    commit_copies();
#pragma unroll 1
    while (is_there) {
        wait_for_groups<0>();
        __syncthreads();  // rows of k are there, and nobody reads those of v any more
        load_rows<TILE_COLS, VALUES>(v_rows, v, p.v_strides.row, tile.index * TILE_COLS,
                                     sight.cols, sizes.value_chunks);
        commit_copies();
        Tile next;
        is_there = walk.next(next);
        add_tile(state, shared + threadIdx.x / 32 * WARP_ROWS * pitch_of(FEATURES), k_rows, v_rows,
                 tile, sight, score, dropout, scale, first_row, [&]() {
                     wait_for_groups<0>();
                     __syncthreads();  // rows of v are there, and nobody reads those of k any more
                     if (is_there) begin_k(next);
                     commit_copies();
                 });
        tile = next;
    }
    __syncthreads();
    const i64 line = (i64(place.batch) * sizes.heads + place.head) * sizes.queries;
    store(state, shared + threadIdx.x / 32 * WARP_ROWS * pitch_of(VALUES),
          p.out_strides.of(p.out, place.batch, place.head), p.out_strides.row,
          p.lse ? p.lse + line : nullptr, p.rest ? p.rest + line : nullptr,
          DROPOUT ? dropout.scale : 1.0f, first_row, sizes);
}
