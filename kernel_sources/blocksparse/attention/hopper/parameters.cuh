// Tiles of the forward kernel, its shared memory, and what a launch is given.
//
// A team is one or two warpgroups that share a tile of 64 rows each, and the K and V that come for
// it through a ring of slots: for tile i of columns K in one slot, V in one behind K of tile i + 1.
#pragma once

#include "blocksparse/attention/score.cuh"
#include "common/hopper.cuh"

using InputT = Config::InputT;
constexpr int TEAMS = Config::TEAMS, MEMBERS = Config::MEMBERS;  // of a CTA; warpgroups of a team
constexpr int PRODUCER_REGISTERS = Config::PRODUCER_REGISTERS;   // of a thread
constexpr int CONSUMER_REGISTERS = Config::CONSUMER_REGISTERS;
constexpr int BLOCK_ROWS = Config::BLOCK_ROWS, BLOCK_COLS = Config::BLOCK_COLS;  // of the layout
constexpr int TILE_COLS = Config::TILE_COLS, STAGES = Config::STAGES;  // slots of a team's ring
// Depth of scores, a multiple of 16, and columns of values, of 64.
constexpr int FEATURES = Config::FEATURES, WIDTH = Config::WIDTH;
constexpr int ROW_BYTES = 128, ROW = 64;       // of shared memory: swizzled, elements
constexpr int STEP = 16;                       // depth of one wgmma
constexpr int TILE_ROWS = 64 * MEMBERS;
constexpr int WARPGROUPS = TEAMS * MEMBERS, THREADS = 128 * (WARPGROUPS + 1);
constexpr int LINES = TILE_ROWS > BLOCK_ROWS ? TILE_ROWS / BLOCK_ROWS : 1;  // of blocks, of a tile
constexpr u32 LIVE = (1u << LINES) - 1;        // a bit of each
// A tile's columns are those of so many blocks, wherever these lie, or of a part of one.
constexpr int PIECE = BLOCK_COLS < TILE_COLS ? BLOCK_COLS : TILE_COLS;
constexpr int PIECES = TILE_COLS / PIECE;
constexpr int CHUNKS = ((FEATURES > WIDTH ? FEATURES : WIDTH) + ROW - 1) / ROW;  // of 64 features
constexpr int SLOT_CHUNK = TILE_COLS * ROW_BYTES, SLOT_BYTES = CHUNKS * SLOT_CHUNK;
constexpr int Q_CHUNK = TILE_ROWS * ROW_BYTES, Q_BYTES = CHUNKS * Q_CHUNK;
static_assert(CHUNKS * PIECES <= 32, "each copy of a slot is a lane's");
static_assert(STAGES >= 2, "K of the next tile comes before V of this one");

// Flags of a note: GAPS where some line does not store some piece, CUT where some row does not see
// all of a piece.
constexpr u32 LAST = 1, GAPS = 2, CUT = 4, EMPTY = 8, EXIT = 16;

// What the producer says of a slot of K: its tile of rows, and which columns and blocks it holds.
struct Note {
    u32 flags;
    int tile, head, batch;
    int columns[PIECES];  // the first of each piece
    u32 stored[LINES];    // of each line of blocks, a bit for each piece that it stores
};

struct Barriers {
    u64 full[STAGES], empty[STAGES], q_full, q_empty;
};
constexpr int SAID = Q_BYTES + STAGES * SLOT_BYTES;  // where barriers and notes lie
constexpr int TEAM_BYTES =
    (SAID + int(sizeof(Barriers)) + STAGES * int(sizeof(Note)) + 1023) / 1024 * 1024;
static_assert(Config::DYNAMIC_BYTES == 1024 + TEAMS * TEAM_BYTES, "as the host counts it");

// A team's part of shared memory.
struct Shared {
    unsigned char* q;

    __device__ __forceinline__ Shared(unsigned char* base, int team)
        : q(base + (-shared_address(base) & 1023) + team * TEAM_BYTES) {}  // as the swizzle has it

    __device__ __forceinline__ unsigned char* slot(int stage) const {
        return q + Q_BYTES + stage * SLOT_BYTES;
    }
    __device__ __forceinline__ Barriers& barriers() const {
        return *reinterpret_cast<Barriers*>(q + SAID);
    }
    __device__ __forceinline__ Note& note(int stage) const {
        return reinterpret_cast<Note*>(q + SAID + sizeof(Barriers))[stage];
    }
    __device__ __forceinline__ void begin() const {
        Barriers& own = barriers();
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&own.full[stage], 1);
            barrier_init(&own.empty[stage], 4 * MEMBERS);
        }
        barrier_init(&own.q_full, 1);
        barrier_init(&own.q_empty, 4 * MEMBERS);
    }
};

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Maps {
    TensorMap q_map, k_map, v_map;
};
struct Operands {
    const InputT *q, *k, *v;
    InputT* out;
    float *lse, *rest;  // null where nobody wants them; rest: HAS_SCORE, see rest_of()
    const u32* row_bits;
    u32* order;  // by order/order.cuh: a counter of tiles, and units by falling length
};
struct Parameters : Maps,
                    Operands,
                    LengthPointers<LENGTHS>,
                    CapturedPointers<CAPTURED>,
                    Numbers,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");
