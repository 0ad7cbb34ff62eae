// The k smallest of a row's values, or the k largest, beside those who compute them.
//
// A list belongs to one thread and lies in shared memory: KEPT entries in order, of which k are
// used, and WAITING more that have passed its bound since it was last put in order. After the first
// points few values pass, of one lane of a warp at a time; where they wait, the lanes of a warp put
// theirs in order together, in a fifth of the steps.
//
// An entry is a value's key above its place. Entries are never equal, so that their order is that
// of values, the lowest place first among equal ones, whoever compares them when.
#pragma once

#include "pairwise/topk/keys.cuh"

constexpr int KEPT = Config::KEPT, WAITING = Config::WAITING;
constexpr int LISTS = Config::LISTS;  // of a block

constexpr u64 NOTHING = ~u64(0);  // behind every entry

struct List {
    u64* entries;  // slot s at s * LISTS
    int k, waiting;
    // What a value must be below: a NaN, which bounds nothing, where that is not all there is to
    // know, so that entries are compared.
    float bound;

    __device__ __forceinline__ void begin(u64* memory, int count) {
        entries = memory;
        k = count;
        waiting = 0;
        bound = number_of(~0u);
#pragma unroll 1
        for (int slot = 0; slot < k; ++slot) at(slot) = NOTHING;
    }

    __device__ __forceinline__ u64& at(int slot) { return entries[slot * LISTS]; }

    // Whether a value may be among the k.
    __device__ __forceinline__ bool passes(float x) const { return !(x >= bound); }

    __device__ __forceinline__ bool has_room(int count) const {
        return waiting <= WAITING - count;
    }

    // Takes a value that passes, where there is room.
    __device__ __forceinline__ void push(float x, int place) {
        u64 entry = u64(key_of(x)) << 32 | u32(place);
        if (x < bound || entry < at(k - 1)) at(KEPT + waiting++) = entry;
    }

    // Puts what waits in order among the kept.
    __device__ __forceinline__ void settle() {
        if (waiting == 0) return;
        sort();
        merge();
        waiting = 0;
        bound = number_of(u32(at(k - 1) >> 32));
    }

    // What waits in order, NOTHING behind it.
    __device__ __forceinline__ void sort() {
        u64 entry[WAITING];
#pragma unroll
        for (int s = 0; s < WAITING; ++s) entry[s] = s < waiting ? at(KEPT + s) : NOTHING;
#pragma unroll
        for (int pass = 0; pass < WAITING; ++pass) {
#pragma unroll
            for (int s = pass % 2; s + 1 < WAITING; s += 2) {
                u64 low = min(entry[s], entry[s + 1]), high = max(entry[s], entry[s + 1]);
                entry[s] = low, entry[s + 1] = high;
            }
        }
#pragma unroll
        for (int s = 0; s < WAITING; ++s) at(KEPT + s) = entry[s];
    }

    // From the end on, so that no entry is overwritten before it is read.
    __device__ __forceinline__ void merge() {
        int kept = k - 1, last = waiting - 1, to = k + last;
        u64 mine = at(kept), theirs = at(KEPT + last);
#pragma unroll 1
        while (true) {
            bool stays = kept >= 0 && mine > theirs;  // behind what waits
            if (to < k) at(to) = stays ? mine : theirs;
            --to;
            if (stays) {
                if (--kept >= 0) mine = at(kept);
            } else {
                if (--last < 0) return;
                theirs = at(KEPT + last);
            }
        }
    }

    // Writes the list, of entries whose places count from `first`; -1 is that of none.
    __device__ __forceinline__ void store(float* values, i64* places, i64 first) {
#pragma unroll 1
        for (int slot = 0; slot < k; ++slot) {
            u64 entry = at(slot);
            float x = number_of(u32(entry >> 32));
            values[slot] = LARGEST ? 0.0f - x : x;  // no -0
            places[slot] = entry == NOTHING ? -1 : first + u32(entry);
        }
    }
};
