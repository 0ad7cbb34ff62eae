// The stages of a tile: of each block of depth that one of its lines stores the panel of dense, and
// the blocks of the lines that do. Nothing is written in the place of those that do not.
#pragma once

#include "blocksparse/portable/parameters.cuh"

constexpr int PART_DEPTH = DEPTH < STAGE_DEPTH ? DEPTH : STAGE_DEPTH;
constexpr int PIECES = STAGE_DEPTH / PART_DEPTH;  // blocks along the depth in a stage
constexpr int PARTS = DEPTH / PART_DEPTH;         // stages of a block
constexpr int FIELD = GROUPS + SPLIT;             // bits of a piece, in a stage's word
constexpr int WORD = FIELD * PIECES;
constexpr int VALUE_BYTES = Stage<TILE_LINES, ACCESS_VALUES>::BYTES;
constexpr int STAGE_BYTES = VALUE_BYTES + Stage<TILE_COLUMNS, ACCESS_DENSE>::BYTES;
static_assert(WORD * (STAGES - 1) < 64, "words of all stages under way in one");

// A stage's word has of each piece which lines store it and, for SPLIT, whether a chain ends before
// it: chains end at multiples of CHAIN of the depth, so that a result's bits do not depend on the
// lines beside it, whose number is the tile's.
struct Loader {
    using ValuesShare = Share<TILE_LINES, ACCESS_VALUES>;
    using DenseShare = Share<TILE_COLUMNS, ACCESS_DENSE>;

    const Parameters& p;
    const InputT *values, *dense;   // this thread's first chunks, of the first slot and block
    Walk walk;
    int values_place, dense_place;  // where these lie in a stage
    int columns;                    // that exist from this thread's own on
    int part, chain;                // of the last block, of the last stage
    int block[PIECES];
    int slot[GROUPS > 1 ? 1 : PIECES];  // of line lane % GROUPS of piece lane / GROUPS, or of each
    u32 live;                           // the word of the last stage

    __device__ __forceinline__ Loader(const Parameters& p, const Tile& tile, i64 batch)
        : p(p), walk(p, p.grid, tile.head, tile.block, tile.range) {
        const Side& view = p.values_view;
        values = p.values + batch * view.batch + tile.offset * view.line;
        dense = p.dense + p.dense_view.at(batch, tile.head, 0, tile.column);
        columns = int(min(p.columns - tile.column, i64(TILE_COLUMNS)));
        if (ACCESS_VALUES != Access::gather)
            values += ValuesShare::line() % LINES * view.line +
                      ValuesShare::depth() % PART_DEPTH * view.column;
        if (ACCESS_DENSE != Access::gather) {
            dense += DenseShare::line() * p.dense_view.column +
                     DenseShare::depth() % PART_DEPTH * p.dense_view.line;
            columns -= DenseShare::line();
        }
        part = chain = 0;
        values_place = ValuesShare::place();
        dense_place = VALUE_BYTES + DenseShare::place();
        // Kept in registers: the compiler would compute them anew for each copy.
        asm volatile("" : "+l"(values), "+l"(dense));
        asm volatile("" : "+r"(values_place), "+r"(dense_place), "+r"(columns));
    }

    // Begins the next stage and answers its word, 0 behind the last one.
    __device__ __forceinline__ u32 begin(unsigned char* stage) {
        if (PARTS == 1 || part == 0) find();
        else live &= LIVE;
        if (SPLIT) end_chains();
        if (live) {
            load_values(stage);
            load_dense(stage);
            if (PARTS > 1) part = part == PARTS - 1 ? 0 : part + 1;
        }
        return live;
    }

    __device__ __forceinline__ void find() {
        live = 0;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            u32 own;
            int there = 0;
            block[piece] = walk.next(own, there);
            if (GROUPS == 1) slot[piece % (GROUPS > 1 ? 1 : PIECES)] = there;
            else if (threadIdx.x % 32 / GROUPS == piece) slot[0] = there;
            live |= own << piece * FIELD;
        }
    }

    __device__ __forceinline__ void end_chains() {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            int own = block[piece] / (CHAIN / DEPTH);
            if (block[piece] < 0 || own == chain) continue;
            live |= 1u << piece * FIELD + GROUPS;
            chain = own;
        }
    }

    __device__ __forceinline__ bool is_live(int piece, int group) const {
        return (PIECES == 1 && GROUPS == 1) || (live >> piece * FIELD + group & 1);
    }

    // Elements from slot 0 to that of a line of blocks; all lanes call.
    __device__ __forceinline__ i64 slot_at(int piece, int group) const {
        u32 own = GROUPS > 1 ? __shfl_sync(ALL, slot[0], piece * GROUPS + group)
                             : one_of(slot, piece);
        return u64(own) * p.values_view.panel;
    }
    __device__ __forceinline__ i64 block_at(int piece) const {
        return u64(u32(one_of(block, piece))) * (DEPTH * p.dense_view.line);
    }
    template <int COUNT>
    __device__ __forceinline__ static int one_of(const int (&of)[COUNT], int piece) {
        int found = of[0];
#pragma unroll
        for (int i = 1; i < COUNT; ++i) found = piece == i ? of[i] : found;
        return found;
    }

    __device__ __forceinline__ void load_values(unsigned char* stage) const {
        const Side& view = p.values_view;
        const InputT* first = values + part * PART_DEPTH * view.column;
        if constexpr (ACCESS_VALUES != Access::gather) {
            using S = ValuesShare;
            int piece = S::depth() / PART_DEPTH, group = S::line() / LINES;
            S::load(
                stage + values_place,
                [&](int i) {
                    return is_live(piece + i * S::DEPTH_RUN / PART_DEPTH,
                                   group + i * S::LINE_RUN / LINES);
                },
                [&](int i) {
                    return first + slot_at(piece + i * S::DEPTH_RUN / PART_DEPTH,
                                           group + i * S::LINE_RUN / LINES) +
                           i * S::LINE_RUN % LINES * view.line +
                           i * S::DEPTH_RUN % PART_DEPTH * view.column;
                });
        } else {
            auto at = [&](int line, int depth) -> const InputT* {
                int piece = depth / PART_DEPTH, group = line / LINES;
                const InputT* from = first + slot_at(piece, group) + line % LINES * view.line +
                                     depth % PART_DEPTH * view.column;
                return is_live(piece, group) ? from : nullptr;
            };
            gather<TILE_LINES>(stage, at, view.column, STAGE_DEPTH, p.values_depth_first);
        }
    }

    __device__ __forceinline__ void load_dense(unsigned char* stage) const {
        const Side& view = p.dense_view;
        const InputT* first = dense + part * PART_DEPTH * view.line;
        if constexpr (ACCESS_DENSE != Access::gather) {
            using S = DenseShare;
            int piece = S::depth() / PART_DEPTH;
            S::load(
                stage + dense_place,
                [&](int i) {
                    bool there = PIECES == 1 ||
                                 one_of(block, piece + i * S::DEPTH_RUN / PART_DEPTH) >= 0;
                    return there && i * S::LINE_RUN < columns;
                },
                [&](int i) {
                    return first + block_at(piece + i * S::DEPTH_RUN / PART_DEPTH) +
                           i * S::LINE_RUN * view.column +
                           i * S::DEPTH_RUN % PART_DEPTH * view.line;
                });
        } else {
            auto at = [&](int column, int depth) -> const InputT* {
                int piece = depth / PART_DEPTH;
                bool there = PIECES == 1 || one_of(block, piece) >= 0;
                const InputT* from = first + block_at(piece) + column * view.column +
                                     depth % PART_DEPTH * view.line;
                return there && column < columns ? from : nullptr;
            };
            gather<TILE_COLUMNS>(stage + VALUE_BYTES, at, view.line, STAGE_DEPTH,
                                 p.dense_depth_first);
        }
    }
};
