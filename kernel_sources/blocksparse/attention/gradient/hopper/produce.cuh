// The producer warp, which walks the blocks of a tile's rows, head after head of q that they serve,
// and fills the ring of stages.
#pragma once

#include "blocksparse/attention/gather.cuh"
#include "blocksparse/attention/gradient/hopper/parameters.cuh"

// Until a stage is free, for all lanes: none of them may still be waiting when it is filled, freed
// and filled again.
__device__ __forceinline__ void wait_for_stage(const Shared& s, const Ring& ring) {
    barrier_wait(&s.barriers->empty[ring.stage], ring.parity ^ 1);
    __syncwarp();
}

// The rows' own operands.
__device__ __forceinline__ void load_own(const Parameters& p, const Shared& s,
                                         const Place& place) {
    int lane = threadIdx.x % 32, operand = lane / CHUNKS, chunk = lane % CHUNKS;
    u64* full = &s.barriers->own;
    if (lane == 0) barrier_expect(full, 2 * OWN_BYTES);
    __syncwarp();
    if (lane < 2 * CHUNKS) {
        load_box(s.own + operand * OWN_BYTES + chunk * OWN_CHUNK, p.own_maps[operand], full,
                 chunk * ROW, place.row(), head_of(p.own_shared, operand, place.head),
                 batch_of(p.own_shared, operand, place.batch));
    }
}

// The copies of a stage, one of each lane: 64 features of a piece of an operand; of pieces that
// exist the numbers of each row of q.
__device__ __forceinline__ void load_stage(const Parameters& p, const Shared& s, const Ring& ring,
                                           const Pieces& pieces, int batch, int head) {
    u64* full = &s.barriers->full[ring.stage];
    int lane = threadIdx.x % 32, piece = lane % PIECES, part = lane / PIECES;
    int first = __shfl_sync(ALL_LANES, pieces.column, piece);
    bool exists = __shfl_sync(ALL_LANES, pieces.live, piece) != 0;
    int count = __popc(__ballot_sync(ALL_LANES, lane < PIECES && pieces.live != 0));
    if (lane == 0) {
        int bytes = TRANSPOSED ? count * NUMBERS * PIECE * 4 : 0;
        barrier_expect(full, 2 * SLOT_BYTES + bytes);
    }
    __syncwarp();
    int operand = part / CHUNKS, chunk = part % CHUNKS;
    if (part < 2 * CHUNKS) {
        int of = TRANSPOSED ? head : head / p.group;
        unsigned char* to = s.slot(ring.stage, operand) + chunk * SLOT_CHUNK;
        load_box(to + piece * (PIECE * ROW_BYTES), p.column_maps[operand], full, chunk * ROW, first,
                 head_of(p.column_shared, operand, of), batch_of(p.column_shared, operand, batch));
    } else if (TRANSPOSED && part < 2 * CHUNKS + NUMBERS && exists) {
        int which = part - 2 * CHUNKS;
        const float* from = which == 0 ? p.sums : which == 1 ? p.deltas : p.rests;
        from += (i64(batch) * p.heads + head) * p.padded + first;
        load_bytes(s.numbers(ring.stage, which) + piece * PIECE, from, full, PIECE * 4);
    }
}

// What is said of a stage, before its barrier is told of the bytes that come.
__device__ __forceinline__ void say(const Shared& s, const Ring& ring, const Pieces& pieces,
                                    int head, u32 flags) {
    Note& note = s.notes[ring.stage];
    int lane = threadIdx.x % 32;
    if (lane < PIECES) note.columns[lane] = pieces.column;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        u32 stored = __ballot_sync(ALL_LANES, lane < PIECES && pieces.live >> line & 1);
        if (lane == line) note.stored[line] = stored;
    }
    if (lane == 0) {
        note.flags = flags;
        note.head = head;
    }
    __syncwarp();
}

// What of a tile is left out. Behind the last column that anybody sees operands may hold anything.
__device__ __forceinline__ u32 flags_of(const View& view, const Pieces& pieces, int row) {
    bool is_there = threadIdx.x % 32 < PIECES, exists = is_there && pieces.live;
    bool covered = view.covers(row, TILE_ROWS, pieces.column, PIECE);
    u32 flags = __any_sync(ALL_LANES, is_there && pieces.live != LIVE) ? GAPS : 0;
    if (__any_sync(ALL_LANES, exists && !covered)) flags |= EDGE;
    if (LENGTHS) {
        int end = TRANSPOSED ? view.sight.rows : view.sight.cols;
        if (__any_sync(ALL_LANES, exists && pieces.column + PIECE > end)) flags |= CUT;
    }
    return flags;
}

__device__ __forceinline__ void produce_head(const Parameters& p, const Shared& s, Ring& ring,
                                             const Place& place, int head) {
    int layout = place.batch * p.layout_batch + head * p.layout_head, row = place.row();
    View view = view_of(p, place.batch);
    Range range = view.columns_of(row, TILE_ROWS);
    Bits bits = {p.row_bits + i64(layout) * p.lines * p.line_words, p.lines, p.line_words};
    int end = TRANSPOSED ? p.queries : p.keys;
    Gather<LINES, BLOCK_COLS, PIECE, PIECES> gather(bits, int(i64(row) / BLOCK_ROWS), end, range);
    // What lies behind the last row of all is zeros, or counts for nothing there.
    if (!HAS_SCORE && !HAS_MASK) {
        view.sight.rows = p.rows_open(place.batch, p.queries);
        if (TRANSPOSED) view.sight.cols = p.cols_open(place.batch, p.keys);
    }
    Pieces pieces;
#pragma unroll 1
    while (gather.next(pieces)) {
        u32 flags = flags_of(view, pieces, row);
        wait_for_stage(s, ring);
        say(s, ring, pieces, head, flags);
        load_stage(p, s, ring, pieces, place.batch, head);
        ring.next();
    }
}

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Place place(p);
    Ring ring;
    load_own(p, s, place);
    int first = TRANSPOSED ? place.head * p.group : place.head;
    int last = TRANSPOSED ? first + p.group : first + 1;
#pragma unroll 1
    for (int head = first; head < last; ++head) produce_head(p, s, ring, place, head);
    wait_for_stage(s, ring);
    if (threadIdx.x % 32 == 0) {
        s.notes[ring.stage].flags = END;
        barrier_arrive(&s.barriers->full[ring.stage]);
    }
}
