// Gradients of block-sparse attention by mma.sync, on every GPU since sm_80: with weights w, found
// again from the log-sum-exp of a row, and what a dropout multiplies them by
//   dv = (w kept)^T grad,   ds = w (kept (grad v^T) - delta) slope,   dq = scale ds k,
//   dk = scale ds^T q
// where delta is a row's sum of out * grad (deltas.cuh). One launch has dq by rows, another dk and
// dv by columns of the matrix: no sum is shared by two CTAs, and each is added up in one order.
//
// Floors: 6 * rows * columns * head dimension operations of what is stored by rows, and 8 by
// columns, over what mma.sync reaches, 566 TFLOP/s on an H200: 1.5 and 2 times a forward pass.
//
// A CTA has TILE_LINES lines in shared memory: rows of q and grad, or TURNED, rows of k and v; and
// walks over tiles of the others along the layout's words, for each head that shares k and v. A
// fragment is 16 lines of its result, and logits turned come from the product turned, so that
// weights and slopes never leave registers. Of dk and dv of many features a CTA has a part.
//
// What is left out counts nowhere, whatever q, k, v and grad hold there: see
// blocksparse/attention/portable/portable.cuh.
//
// Facts and struct Fixed: class PortableGradient of
// kernlib/families/blocksparse/kernels/attention/gradient/portable.py.
#pragma once

#include "blocksparse/attention/logits.cuh"
#include "blocksparse/attention/gradient/portable/parameters.cuh"
#include "blocksparse/attention/products.cuh"

constexpr bool TURNED = Config::TURNED;            // whether lines are columns of the matrix
constexpr bool NEEDS_FIRST = Config::NEEDS_FIRST;  // whether dq or dk is wanted
constexpr bool NEEDS_SECOND = Config::NEEDS_SECOND;  // whether dv is
constexpr int TILE_DEPTH = Config::TILE_DEPTH;     // of a tile, along the depth
constexpr int STAGES = Config::STAGES;             // tiles under way
// Of the layout: rows and columns of a block, or turned.
constexpr int BLOCK_LINE = Config::BLOCK_LINE, BLOCK_DEPTH = Config::BLOCK_DEPTH;
// Of a row of q and k, and of v and grad: multiples of 16. Of these a CTA has so many of dq or dk,
// and of dv.
constexpr int FEATURES = Config::FEATURES, VALUES = Config::VALUES;
constexpr int FIRST_PART = Config::FIRST_PART, SECOND_PART = Config::SECOND_PART;
// Whether CTAs share the tiles of a line, which has no sums: what is collected is of pairs, and
// nothing else is wanted.
constexpr bool SHARED = Config::SHARED;
constexpr int MIN_BLOCKS = Config::MIN_BLOCKS;  // CTAs that a multiprocessor holds
constexpr int TILE_LINES = 16 * WARPS, GROUPS = TILE_DEPTH / 16;
constexpr int FIRST_LINES = TILE_LINES * pitch_of(FEATURES);
constexpr int LINE_BYTES = FIRST_LINES + TILE_LINES * pitch_of(VALUES);
constexpr int FIRST_STAGE = TILE_DEPTH * pitch_of(FEATURES);
constexpr int SECOND_STAGE = FIRST_STAGE + TILE_DEPTH * pitch_of(VALUES);
constexpr int NUMBERS = 2 + HAS_SCORE;  // of a row
constexpr int STAGE_BYTES = SECOND_STAGE + (TURNED ? NUMBERS * TILE_DEPTH * int(sizeof(float)) : 0);
constexpr bool NEEDS_SLOPES = NEEDS_FIRST || COLLECTED > 0;

using Tiles = Walk<TILE_LINES, TILE_DEPTH, BLOCK_LINE, BLOCK_DEPTH>;
using Collecting = Collection<TURNED>;

// A tile of a head.
struct Item {
    Tile tile;
    int head;
};

// What a CTA has, in order: the tiles of its lines, head after head of those that share them.
struct Cursor {
    const Parameters* p;
    const Sight* sight;
    int batch, head, end, line;
    Tiles walk;

    __device__ __forceinline__ static Tiles tiles(const Parameters& p, const Sight& sight,
                                                  int batch, int head, int line) {
        const Bits bits = TURNED ? cols_of(p, p.bits, batch, head)
                                 : rows_of(p, p.bits, batch, head);
        Range range = TURNED ? sight.rows_of(line * TILE_LINES, TILE_LINES)
                             : sight.columns_of(line * TILE_LINES, TILE_LINES);
        if (SHARED) {
            const int begin = int(blockIdx.y * p.share);
            range = {max(range.begin, begin), min(range.end, begin + int(p.share))};
        }
        return Tiles(bits, line, range);
    }
    __device__ __forceinline__ Cursor(const Parameters& p, const Sight& sight, int batch, int head,
                                      int count, int line)
        : p(&p), sight(&sight), batch(batch), head(head), end(head + count), line(line),
          walk(tiles(p, sight, batch, head, line)) {}

    __device__ __forceinline__ bool next(Item& item) {
        while (!walk.next(item.tile)) {
            if (++head >= end) return false;
            walk = tiles(*p, *sight, batch, head, line);
        }
        item.head = head;
        return true;
    }
};

// Begins copies of a tile's rows, and turned, of what is known of them.
__device__ __forceinline__ void begin_stage(unsigned char* stage, const Parameters& p,
                                            const Sight& sight, const Item& item, int batch) {
    const Fixed& sizes = p;
    const int first = item.tile.index * TILE_DEPTH, kv = item.head / sizes.group;
    const int own = TURNED ? item.head : kv, end = TURNED ? sight.rows : sight.cols;
    const Strides& a = TURNED ? p.q_strides : p.k_strides;
    const Strides& b = TURNED ? p.grad_strides : p.v_strides;
    load_rows<TILE_DEPTH, FEATURES>(stage, a.of(TURNED ? p.q : p.k, batch, own), a.row, first, end,
                                    sizes.feature_chunks);
    load_rows<TILE_DEPTH, VALUES>(stage + FIRST_STAGE, b.of(TURNED ? p.grad : p.v, batch, own),
                                  b.row, first, end, sizes.value_chunks);
    if (!TURNED) return;
    const i64 of_all = i64(batch) * sizes.heads + item.head;
    const i64 first_lse = of_all * sizes.queries;
    for (int index = threadIdx.x; index < NUMBERS * TILE_DEPTH; index += THREADS) {
        const int row = first + index % TILE_DEPTH, which = index / TILE_DEPTH;
        const bool exists = row < end && (which != 2 || p.rest);
        const float* from = which == 0 ? p.lse + first_lse
                            : which == 1 ? p.deltas + of_all * p.delta_rows : p.rest + first_lse;
        copy_async<4>(stage + SECOND_STAGE + 4 * index, exists ? from + row : p.lse,
                      exists ? 4 : 0);
    }
}

// The log-sum-exp in the units of logits; weights of a row without any are 0 whatever it is.
__device__ __forceinline__ float shift_of(float lse) {
    return lse == lowest() ? 0.0f : lse * (LOG2_E / UNIT);
}

// Of the rows of a lane's elements: two of its lines, or turned, in shared memory.
struct Known {
    float shifts[2], deltas[2], rests[2];
    const float* staged;  // at the lane's first column of the tile

    __device__ __forceinline__ float shift(int n, int i) const {
        return TURNED ? shift_of(staged[8 * n + i % 2]) : shifts[i / 2];
    }
    __device__ __forceinline__ float delta(int n, int i) const {
        return TURNED ? staged[TILE_DEPTH + 8 * n + i % 2] : deltas[i / 2];
    }
    // What a float leaves of the log-sum-exp, of a score's logits.
    __device__ __forceinline__ float rest(int n, int i) const {
        if (!HAS_SCORE) return 0.0f;
        return TURNED ? staged[2 * TILE_DEPTH + 8 * n + i % 2] : rests[i / 2];
    }
};

using Tiled = Logits<1, GROUPS>;

// In the place of logits the weights that are left of a dropout, and in the place of gradients by
// these those by logits; 0 for what is left out.
template <class Score>
__device__ __forceinline__ void take_slopes(Tiled& weights, Tiled& slopes, const Parameters& p,
                                            const Groups& groups, const Sight& sight,
                                            const Score& score, const Dropout& dropout,
                                            const Known& known, Collecting& collection,
                                            float scale, int batch, int head, int line,
                                            int depth) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const bool is_live = groups.live >> g & 1, is_cut = groups.cut >> g & 1;
        u32 kept = ~0u;
        if (DROPOUT && is_live)
            kept = kept_of<TURNED>(dropout, TURNED ? depth + 16 * g : line,
                                   TURNED ? line : depth + 16 * g);
        if (is_live) collection.fetch(p, line, depth + 16 * g, batch, head);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int n = 2 * g + j / 4, i = j % 4;
            const int own_line = line + i / 2 * 8, own_depth = depth + 8 * n + i % 2;
            const int row = TURNED ? own_depth : own_line, col = TURNED ? own_line : own_depth;
            const float s = weights[0][n][i], of_weight = slopes[0][n][i];
            weights[0][n][i] = slopes[0][n][i] = 0.0f;
            if (!is_live || !is_left(score, is_cut, sight, row, col)) continue;
            const float x = logit(s, scale, score, row, col) - known.shift(n, i);
            const float w = fast_exp2(HAS_SCORE ? fmaf(x, UNIT, -known.rest(n, i)) : x);
            const bool is_kept = kept >> j & 1;
            weights[0][n][i] = is_kept ? w * dropout.scale : 0.0f;
            if (!NEEDS_SLOPES) continue;
            const float own = is_kept ? of_weight * dropout.scale : 0.0f;
            const float gradient = w * (own - known.delta(n, i));
            collection.add(p, score, gradient, s * scale, row, col, j, batch, head);
            slopes[0][n][i] = gradient * slope_of(s * scale, score, row, col);
        }
    }
}

struct Sums {
    float first[1][FIRST_PART / 8][4];    // of dq or dk
    float second[1][SECOND_PART / 8][4];  // of dv
};

// A tile's share of a warp's 16 lines from `first_line` on.
template <class Score>
__device__ __forceinline__ void add_tile(Sums& sums, Collecting& collection, const Parameters& p,
                                         const unsigned char* lines, const unsigned char* stage,
                                         const Item& item, const Sight& sight, const Score& score,
                                         const Dropout& dropout, Known& known, float scale,
                                         int batch, int first_line, int first_at, int second_at) {
    const int lane = threadIdx.x % 32, start = item.tile.index * TILE_DEPTH;
    const int line = first_line + lane / 4, depth = start + lane % 4 * 2;
    const u32 stored = Tiles::template groups_of_line<16>(item.tile.live, first_line % TILE_LINES);
    const Groups groups = groups_of<GROUPS, TURNED>(sight, stored, TURNED ? start : first_line,
                                                    TURNED ? first_line : start);
    if (!groups.live) return;
    known.staged = reinterpret_cast<const float*>(stage + SECOND_STAGE) + lane % 4 * 2;
    const int own = threadIdx.x / 32 * 16;
    Tiled weights, slopes;
    multiply_rows<FEATURES, 1, GROUPS>(weights, lines + own * pitch_of(FEATURES), stage,
                                       groups.live);
    if (NEEDS_SLOPES)
        multiply_rows<VALUES, 1, GROUPS>(slopes, lines + FIRST_LINES + own * pitch_of(VALUES),
                                         stage + FIRST_STAGE, groups.live);
    take_slopes(weights, slopes, p, groups, sight, score, dropout, known, collection, scale, batch,
                item.head, line, depth);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (!(groups.live >> g & 1)) continue;
        const u32 cut = groups.cut >> g & 1;
        auto sees = [&](int, int half, int k) {
            const int own_line = line + 8 * half, own_depth = start + 16 * g + k;
            return sight.keeps(TURNED ? own_depth : own_line, TURNED ? own_line : own_depth);
        };
        u32 a[1][4];
        if constexpr (NEEDS_SECOND) {
            pack_group<1, GROUPS>(a, weights, g);
            add_rows<VALUES, SECOND_PART, 1>(
                sums.second, a, stage + FIRST_STAGE + g * 16 * pitch_of(VALUES) + 2 * second_at, 1,
                cut, sees);
        }
        if constexpr (NEEDS_FIRST) {
            pack_group<1, GROUPS>(a, slopes, g);
            add_rows<FEATURES, FIRST_PART, 1>(
                sums.first, a, stage + g * 16 * pitch_of(FEATURES) + 2 * first_at, 1, cut, sees);
        }
    }
}

// PART columns from `at` on of a warp's 16 lines, by way of shared memory where the lines were; of
// these `from` to `to` are stored, as chunks of 16 bytes.
template <int PART>
__device__ __forceinline__ void store_part(const float (&sums)[PART / 8][4], unsigned char* staged,
                                           InputT* out, i64 stride, float scale, int first_line,
                                           int lines, int at, int from, int to) {
    constexpr int PITCH = pitch_of(PART), ACROSS = PART / CHUNK;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < PART / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<u32*>(staged + (lane / 4 + 8 * half) * PITCH + n * 16 +
                                    lane % 4 * 4) =
                pack<InputT>(sums[n][2 * half] * scale, sums[n][2 * half + 1] * scale);
    __syncwarp();
#pragma unroll 1
    for (int index = lane; index < 16 * ACROSS; index += 32) {
        const int line = first_line + index / ACROSS, chunk = at / CHUNK + index % ACROSS;
        if (line >= lines || chunk < from || chunk >= to) continue;
        auto x = load_vector<u32, 4>(reinterpret_cast<const u32*>(
            staged + index / ACROSS * PITCH + index % ACROSS * 16));
        store_vector<u32, 4>(reinterpret_cast<u32*>(out + line * stride + chunk * CHUNK), x);
    }
}

// Begins copies of a CTA's lines.
__device__ __forceinline__ void begin_lines(unsigned char* shared, const Parameters& p,
                                            const Sight& sight, int batch, int head, int tile) {
    const int first = tile * TILE_LINES, end = TURNED ? sight.cols : sight.rows;
    const Strides& a = TURNED ? p.k_strides : p.q_strides;
    const Strides& b = TURNED ? p.v_strides : p.grad_strides;
    load_rows<TILE_LINES, FEATURES>(shared, a.of(TURNED ? p.k : p.q, batch, head), a.row, first,
                                    end, p.feature_chunks);
    load_rows<TILE_LINES, VALUES>(shared + FIRST_LINES, b.of(TURNED ? p.v : p.grad, batch, head),
                                  b.row, first, end, p.value_chunks);
}

// Of a lane's two rows, `line` and 8 further on.
__device__ __forceinline__ Known known_of(const Parameters& p, const Sight& sight, int batch,
                                          int head, int line) {
    const i64 of_all = i64(batch) * p.heads + head;
    Known known = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = line + 8 * half;
        if (row >= sight.rows) continue;
        known.shifts[half] = shift_of(p.lse[of_all * p.queries + row]);
        if (HAS_SCORE && p.rest) known.rests[half] = p.rest[of_all * p.queries + row];
        known.deltas[half] = p.deltas[of_all * p.delta_rows + row];
    }
    return known;
}

// What a CTA leaves of a tile of lines of one head; turned, of one of k and v.
__device__ __forceinline__ void run(const Parameters& p, unsigned char* shared, int batch,
                                    int own_head, int tile_line) {
    const Fixed& sizes = p;
    const int lines = TURNED ? sizes.keys : sizes.queries;
    const int first_line = tile_line * TILE_LINES + int(threadIdx.x / 32) * 16;
    const int line = first_line + int(threadIdx.x) % 32 / 4;
    const Sight sight = sight_of(p, batch, sizes.queries, sizes.keys);
    const float natural = read_scalar<float>(p.scale, 0);
    const float scale = natural * (HAS_SCORE ? 1.0f : LOG2_E);
    const int first_head = TURNED ? own_head * sizes.group : own_head;
    Cursor cursor(p, sight, batch, first_head, TURNED ? sizes.group : 1, tile_line);

    Item item;
    bool is_there = cursor.next(item);
    unsigned char* stages = shared + LINE_BYTES;
    if (is_there) {
        begin_lines(shared, p, sight, batch, TURNED ? own_head : first_head, tile_line);
        begin_stage(stages, p, sight, item, batch);
    }
    commit_copies();

    Known known = TURNED ? Known{} : known_of(p, sight, batch, first_head, line);
    int head = first_head;
    Score score = score_of<Score>(p, batch, head);
    Dropout dropout = dropout_of(p, u32(batch * sizes.heads + head));
    // Each part has PART columns, the last one of those up to the end.
    const int part = blockIdx.y;
    const int first_at = min(part * FIRST_PART, FEATURES - FIRST_PART);
    const int second_at = min(part * SECOND_PART, VALUES - SECOND_PART);
    Sums sums = {};
    Collecting collection = {};
    int stage = 0;
#pragma unroll 1
    while (is_there) {
        Item next;
        bool is_more = false;
        if (STAGES > 1) {
            is_more = cursor.next(next);
            if (is_more) begin_stage(stages + (stage ^ 1) * STAGE_BYTES, p, sight, next, batch);
            commit_copies();
        }
        if (TURNED && item.head != head) {
            if (part == 0) collection.store(p, line, lines, batch, head);
            head = item.head;
            score = score_of<Score>(p, batch, head);
            dropout = dropout_of(p, u32(batch * sizes.heads + head));
        }
        wait_for_groups<STAGES - 1>();
        __syncthreads();  // the tile is there
        add_tile(sums, collection, p, shared, stages + stage * STAGE_BYTES, item, sight, score,
                 dropout, known, scale, batch, first_line, first_at, second_at);
        __syncthreads();  // nobody reads it any more
        if (STAGES == 1) {
            is_more = cursor.next(next);
            if (is_more) begin_stage(stages, p, sight, next, batch);
            commit_copies();
        } else {
            stage ^= 1;
        }
        item = next;
        is_there = is_more;
    }
    if (part == 0) collection.store(p, line, lines, batch, head);
    unsigned char* own = shared + threadIdx.x / 32 * 16 * pitch_of(FEATURES);
    if constexpr (NEEDS_FIRST)
        store_part<FIRST_PART>(sums.first[0], own,
                               p.first_strides.of(p.first, batch, own_head),
                               p.first_strides.row, natural, first_line, lines, first_at,
                               part * FIRST_PART / CHUNK, sizes.feature_chunks);
    own = shared + FIRST_LINES + threadIdx.x / 32 * 16 * pitch_of(VALUES);
    if constexpr (NEEDS_SECOND)
        store_part<SECOND_PART>(sums.second[0], own,
                                p.second_strides.of(p.second, batch, own_head),
                                p.second_strides.row, 1.0f, first_line, lines, second_at,
                                part * SECOND_PART / CHUNK, sizes.value_chunks);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
blocksparse_attention_gradient(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Fixed& sizes = p;
    const int heads = TURNED ? sizes.heads / sizes.group : sizes.heads;
    const int of_cta = SUMMED ? p.heads_of_cta : 1, batches = SUMMED ? p.batches_of_cta : 1;
    const Place place(sizes, heads / of_cta);
    // With CAUSAL the last rows, and the first columns, have most to do.
    const int tile_line = TURNED ? place.tile : sizes.tiles - 1 - place.tile;
#pragma unroll 1
    for (int index = 0; index < batches * of_cta; ++index) {
        const int batch = place.batch * batches + index / of_cta;
        if (batch >= sizes.batch) break;
        run(p, shared, batch, place.head * of_cta + index % of_cta, tile_line);
        if (SUMMED) __syncthreads();  // nobody reads what the next one's lines are copied to
    }
}
