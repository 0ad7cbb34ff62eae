// The k smallest of a row's values, or the k largest, beside those who compute them.
//
// A row belongs to one thread, its list to shared memory: KEPT entries in order, of which k are
// used, and WAITING more that have passed the row's bound since the list was last put in order.
// After the first points few pass, one lane of a warp at a time; where they wait, the lanes of a
// warp put theirs in order together, in a fifth of the steps.
//
// An entry is a value's key above its place. Entries are never equal, so that their order is that of
// values, the lowest place first among equal ones, whoever compares them when.
//
// The generated source defines KEPT, ROWS, THREADS and what topk/keys.cuh needs.
#pragma once

#include "pairwise/topk/keys.cuh"

constexpr int WAITING = 8;
constexpr u64 NOTHING = ~u64(0);  // behind every entry

// The lists of a thread's rows, (slot, row, thread) in shared memory.
struct Lists {
    static constexpr int STEP = ROWS * THREADS;
    u64* entries;
    int k;
    // What a value must be below: a NaN, which bounds nothing, where that is not all there is to
    // know, so that keys are compared.
    float bound[ROWS];
    int waiting[ROWS];

    __device__ __forceinline__ Lists(u64* shared, int k) : entries(shared + threadIdx.x), k(k) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            bound[i] = number_of(~0u);
            waiting[i] = 0;
#pragma unroll 1
            for (int slot = 0; slot < k; ++slot) at(i, slot) = NOTHING;
        }
    }

    __device__ __forceinline__ u64& at(int i, int slot) {
        return entries[slot * STEP + i * THREADS];
    }

    // Whether a value may be among the k of row i.
    __device__ __forceinline__ bool passes(int i, float x) const { return !(x >= bound[i]); }

    // Takes a value that passes, while fewer than WAITING wait.
    __device__ __forceinline__ void push(int i, float x, int place) {
        u64 entry = u64(key_of(x)) << 32 | u32(place);
        if (entry < at(i, k - 1)) at(i, KEPT + waiting[i]++) = entry;
    }

    __device__ __forceinline__ bool has_room(int count) const {
        bool room = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) room &= waiting[i] <= WAITING - count;
        return room;
    }

    // Puts what waits in order among the kept.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (waiting[i] == 0) continue;
            sort(i);
            merge(i);
            waiting[i] = 0;
            bound[i] = number_of(u32(at(i, k - 1) >> 32));
        }
    }

    // What waits in row i in order, NOTHING behind it.
    __device__ __forceinline__ void sort(int i) {
        u64 entry[WAITING];
#pragma unroll
        for (int s = 0; s < WAITING; ++s)
            entry[s] = s < waiting[i] ? at(i, KEPT + s) : NOTHING;
#pragma unroll
        for (int pass = 0; pass < WAITING; ++pass) {
#pragma unroll
            for (int s = pass % 2; s + 1 < WAITING; s += 2) {
                u64 low = min(entry[s], entry[s + 1]), high = max(entry[s], entry[s + 1]);
                entry[s] = low, entry[s + 1] = high;
            }
        }
#pragma unroll
        for (int s = 0; s < WAITING; ++s) at(i, KEPT + s) = entry[s];
    }

    // From the end on, so that no entry is overwritten before it is read.
    __device__ __forceinline__ void merge(int i) {
        int kept = k - 1, last = waiting[i] - 1, to = k + last;
        u64 mine = at(i, kept), theirs = at(i, KEPT + last);
#pragma unroll 1
        while (true) {
            bool stays = kept >= 0 && mine > theirs;  // behind what waits
            if (to < k) at(i, to) = stays ? mine : theirs;
            --to;
            if (stays) {
                if (--kept >= 0) mine = at(i, kept);
            } else {
                if (--last < 0) return;
                theirs = at(i, KEPT + last);
            }
        }
    }

    // Writes the list of row i, of entries whose places count from `first`; -1 is that of none.
    __device__ __forceinline__ void store(int i, float* values, i64* places, i64 first) {
#pragma unroll 1
        for (int slot = 0; slot < k; ++slot) {
            u64 entry = at(i, slot);
            float x = number_of(u32(entry >> 32));
            values[slot] = LARGEST ? -x : x;
            places[slot] = entry == NOTHING ? -1 : first + u32(entry);
        }
    }
};
