// The warp that brings the rows of a and the panels of b which some line of blocks needs, and says
// of each stage which blocks these are.
#pragma once

#include "blocksparse/stationary/parameters.cuh"

// Of a unit a lane's line of blocks: a word of its bits, and one ahead.
struct Line {
    i64 at;  // among the layout's words
    bool exists;
    u32 bits, next_bits;
    int rank, next_rank;  // the slot of the word's first block

    __device__ __forceinline__ Line(const Parameters& p, const Unit& unit) {
        int lane = threadIdx.x % 32, own = unit.first_line() + lane;
        exists = lane < LINES && own < p.grid_rows;
        at = (i64(unit.head) * p.grid_rows + own) * p.row_words;
        bits = rank = 0;
        read(p, unit.first / WORD_PANELS, unit);
    }
    // Begins to read a word, if the unit has panels of it.
    __device__ __forceinline__ void read(const Parameters& p, int word, const Unit& unit) {
        bool wanted = exists && word < p.row_words && i64(word) * WORD_PANELS < unit.end;
        next_bits = wanted ? p.row_bits[at + word] : 0;
        next_rank = wanted ? p.row_ranks[at + word] : 0;
    }
    __device__ __forceinline__ void next(const Parameters& p, int word, const Unit& unit) {
        bits = next_bits;
        rank = next_rank;
        read(p, word + 1, unit);
    }
};

// One stage: each piece asked for by a lane of its own, `first` lines of the operand from its
// start, and the words are those that lanes have put there before.
template <bool LINES_LAST>
__device__ __forceinline__ void load_panel(const Shared& s, const Ring& ring, const TensorMap& map,
                                           int first, int head, int batch) {
    int lane = threadIdx.x % 32;
    u64* full = &s.full[ring.stage];
    __syncwarp();  // the words are there
    if (lane == 0) barrier_expect(full, STAGE_BYTES);
    __syncwarp();
    if (lane < PIECES_ACROSS * PIECES_DEEP) {
        int line = first + lane % PIECES_ACROSS * 64, depth = lane / PIECES_ACROSS * 64;
        load_box(s.stages + ring.stage * STAGE_BYTES + lane * PIECE_BYTES, map, full,
                 LINES_LAST ? line : depth, LINES_LAST ? depth : line, head, batch);
    }
}

__device__ __forceinline__ void load_rows(const Parameters& p, const Shared& s, Ring& ring,
                                          const Unit& unit) {
    int left = (p.grid_rows - unit.first_line()) * BLOCK;
#pragma unroll 1
    for (int part = 0; part < LEFT_STAGES && part * PANEL < left; ++part) {
        wait_for_stage(s, ring);
        if (threadIdx.x % 32 == 0) {
            s.words[WORDS * ring.stage + KIND] = part;
            s.words[WORDS * ring.stage + BATCH] = unit.batch;
        }
        load_panel<LEFT_LINES>(s, ring, p.a, unit.first_line() * BLOCK + part * PANEL,
                               unit.head * p.a_heads, unit.batch * p.a_batches);
        ring.next();
    }
}

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    int lane = threadIdx.x % 32;
    Ring ring;
#pragma unroll 1
    for (u32 index = blockIdx.x; index < p.units; index += gridDim.x) {
        Unit unit(p, index);
        Line line(p, unit);
        bool has_rows = false;
#pragma unroll 1
        for (int panel = unit.first; panel < unit.end; ++panel) {
            int place = panel % WORD_PANELS * PANEL_BLOCKS;
            if (panel == unit.first || place == 0) line.next(p, panel / WORD_PANELS, unit);
            u32 own = line.bits >> place & PANEL_BITS;
            if (!__any_sync(ALL, own != 0)) continue;
            if (!has_rows) load_rows(p, s, ring, unit);
            has_rows = true;
            wait_for_stage(s, ring);
            u32* words = s.words + WORDS * ring.stage;
            if (lane < LINES) {
                words[2 * lane] = own;
                words[2 * lane + 1] = line.rank + __popc(line.bits & ((1u << place) - 1));
            }
            if (lane == 0) words[KIND] = COLUMNS_OF_B;
            load_panel<RIGHT_LINES>(s, ring, p.b, panel * PANEL, unit.head * p.b_heads,
                                    unit.batch * p.b_batches);
            ring.next();
        }
    }
    wait_for_stage(s, ring);
    if (lane == 0) {
        s.words[WORDS * ring.stage + KIND] = END;
        barrier_arrive(&s.full[ring.stage]);
    }
}
