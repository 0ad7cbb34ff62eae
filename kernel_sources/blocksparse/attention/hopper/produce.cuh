// A team's producer warp, which walks the blocks of tile after tile and fills the ring.
#pragma once

#include "blocksparse/attention/gather.cuh"
#include "blocksparse/attention/hopper/schedule.cuh"

// Until a slot is free, for all lanes: none of them may still be waiting when it is filled, freed
// and filled again.
__device__ __forceinline__ void wait_for_slot(const Shared& s, const Ring& ring) {
    barrier_wait(&s.barriers().empty[ring.stage], ring.parity ^ 1);
    __syncwarp();
}

// The copies of a slot, one of each lane: 64 features of a piece.
__device__ __forceinline__ void load_slot(const Shared& s, const Ring& ring, const TensorMap& map,
                                          int column, int head, int batch) {
    u64* full = &s.barriers().full[ring.stage];
    int lane = threadIdx.x % 32, chunk = lane / PIECES, piece = lane % PIECES;
    int first = __shfl_sync(ALL_LANES, column, piece);
    if (lane == 0) barrier_expect(full, SLOT_BYTES);
    __syncwarp();
    if (lane < CHUNKS * PIECES) {
        unsigned char* to = s.slot(ring.stage) + chunk * SLOT_CHUNK;
        load_box(to + piece * (PIECE * ROW_BYTES), map, full, chunk * ROW, first, head, batch);
    }
}

// What a head of K and V is, where one may serve all.
struct Heads {
    int k_head, k_batch, v_head, v_batch;
    __device__ __forceinline__ Heads(const Parameters& p, const Place& place) {
        int head = place.head / p.group;
        k_head = p.k_strides.head ? head : 0;
        v_head = p.v_strides.head ? head : 0;
        k_batch = p.k_strides.batch ? place.batch : 0;
        v_batch = p.v_strides.batch ? place.batch : 0;
    }
};

// A slot that nothing is copied to: of a tile without blocks, or behind the last tile.
__device__ __forceinline__ void produce_nothing(const Shared& s, Ring& ring, const Place& place,
                                                u32 flags) {
    wait_for_slot(s, ring);
    if (threadIdx.x % 32 == 0) {
        Note& note = s.note(ring.stage);
        note.flags = flags;
        note.tile = place.tile;
        note.head = place.head;
        note.batch = place.batch;
        barrier_arrive(&s.barriers().full[ring.stage]);
    }
    ring.next();
}

__device__ __forceinline__ void say(const Shared& s, const Ring& ring, const Place& place,
                                    const Pieces& pieces, u32 flags) {
    Note& note = s.note(ring.stage);
    int lane = threadIdx.x % 32;
    if (lane < PIECES) note.columns[lane] = pieces.column;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        u32 stored = __ballot_sync(ALL_LANES, lane < PIECES && pieces.live >> line & 1);
        if (lane == line) note.stored[line] = stored;
    }
    if (lane == 0) {
        note.flags = flags;
        note.tile = place.tile;
        note.head = place.head;
        note.batch = place.batch;
    }
    __syncwarp();
}

__device__ __forceinline__ void load_rows(const Parameters& p, const Shared& s, const Place& place,
                                          int parity) {
    barrier_wait(&s.barriers().q_empty, parity ^ 1);
    __syncwarp();
    u64* full = &s.barriers().q_full;
    int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(full, Q_BYTES);
    __syncwarp();
    if (lane < CHUNKS) {
        load_box(s.q + lane * Q_CHUNK, p.q_map, full, lane * ROW, place.tile * TILE_ROWS,
                 p.q_strides.head ? place.head : 0, p.q_strides.batch ? place.batch : 0);
    }
}

// What of a tile of columns is left out, by what is stored and by position.
__device__ __forceinline__ u32 flags_of(const Pieces& pieces, const Sight& sight, int row) {
    bool exists = threadIdx.x % 32 < PIECES, is_whole = pieces.live == LIVE;
    bool is_cut = pieces.live != 0 && !sight.covers(row, TILE_ROWS, pieces.column, PIECE);
    u32 gaps = __any_sync(ALL_LANES, exists && !is_whole) ? GAPS : 0;
    return gaps | (__any_sync(ALL_LANES, exists && is_cut) ? CUT : 0);
}

// K and V of one tile of rows; false if it has none. Rows behind the last one are not left out.
__device__ __forceinline__ bool produce_tile(const Parameters& p, const Shared& s, Ring& ring,
                                             const Place& place, Sight sight, int parity) {
    int row = place.tile * TILE_ROWS;
    Bits bits = {p.row_bits + i64(place.layout) * p.lines * p.line_words, p.lines, p.line_words};
    Gather<LINES, BLOCK_COLS, PIECE, PIECES> gather(bits, int(i64(row) / BLOCK_ROWS), p.keys,
                                                    sight.columns_of(row, TILE_ROWS));
    sight.rows = p.rows_open(place.batch, p.queries);
    Pieces pieces, next;
    if (!gather.next(pieces)) return false;
    Heads heads(p, place);
    int before = -1;  // pieces of the tile whose V is still to come
    bool more = true;
#pragma unroll 1
    while (more) {
        more = gather.next(next);
        u32 flags = flags_of(pieces, sight, row) | (more ? 0 : LAST);
        wait_for_slot(s, ring);
        say(s, ring, place, pieces, flags);
        load_slot(s, ring, p.k_map, pieces.column, heads.k_head, heads.k_batch);
        ring.next();
        if (__shfl_sync(ALL_LANES, before, 0) >= 0) {
            wait_for_slot(s, ring);
            load_slot(s, ring, p.v_map, before, heads.v_head, heads.v_batch);
            ring.next();
        } else {
            load_rows(p, s, place, parity);
        }
        before = pieces.column;
        pieces = next;
    }
    wait_for_slot(s, ring);
    load_slot(s, ring, p.v_map, before, heads.v_head, heads.v_batch);
    ring.next();
    return true;
}

// Tile after tile, then a slot that says that there are no more.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& s, int team) {
    Ring ring;
    Schedule schedule(p, team);
    Place place = {};
    int parity = 0;
    bool exists = true;
#pragma unroll 1
    while (exists) {
        exists = place.find(schedule);
        bool filled = false;
        if (exists) {
            schedule.take();
            Sight sight = sight_of(p, place.batch, p.queries, p.keys);
            filled = produce_tile(p, s, ring, place, sight, parity);
        }
        if (filled) parity ^= 1;
        else produce_nothing(s, ring, place, exists ? EMPTY : EXIT);
        schedule.next();
    }
}
