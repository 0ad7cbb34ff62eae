// What the tables of CATEGORIES categorical features add to the sums of a tile, between sum_tile
// and finish: of a pair sum_c T_c[code of a][code of b], NaN where a code is outside its table.
//
// Codes of GROUP features at a time become places in their tables, in shared memory, and so do the
// tables themselves, in order, as far as there is room; others are read from device memory.
//
// Floors on an H200, of M x N pairs with C features:
//   bytes    4 M N of out, and codes 4 or 8 C (M + N): out's alone from a hundred points on
//   gathers  one read of shared memory a pair and feature, 32 lanes a clock and SM (132 SM, 1.98
//            GHz): 0.120 us per million, what two features of Abs take; times the rounds that banks
//            ask for: 1 for tables of up to 32 entries, whose banks all differ, about 2 to 3 for
//            codes drawn at random from larger ones. Places add 3 / 32 of a read: a thread's rows
//            and columns are read once for all of its pairs.
#pragma once

#include "pairwise/mend.cuh"
#include "pairwise/tile.cuh"
#include "pairwise/view.cuh"

constexpr int CATEGORIES = Config::CATEGORIES;

constexpr int GROUP = 8;              // features whose codes wait in shared memory together
constexpr int NOWHERE = -(1 << 30);   // with another place it is below 0; tables are smaller
// As kernlib/families/pairwise/lowering/problem.py has it, and no larger than two stages.
constexpr int GROUP_BYTES = TILE * 256;
constexpr int TABLE_ELEMENTS = (GROUP_BYTES - 2 * GROUP * TILE * 4) / int(sizeof(AccT));

template <int COUNT>
struct TablePointers {
    const void* a_codes;
    const void* b_codes;
    const AccT* tables;  // of all features, one behind the other
};
template <>
struct TablePointers<0> {};

struct Group {
    int a[GROUP][TILE], b[GROUP][TILE];
    AccT tables[TABLE_ELEMENTS];
};
static_assert(sizeof(Group) <= GROUP_BYTES, "what the host asks for");
static_assert(!LONG_K || GROUP_BYTES <= 2 * STAGE * sizeof(AccT), "in the place of the stages");

// Where the tables of a group lie, one feature after the other.
struct TablePlace {
    int elements = 0, base = 0;  // of this table; in shared memory or among all tables
    bool is_shared = false;

    int used = 0, passed;
    __device__ __forceinline__ explicit TablePlace(int first) : passed(first) {}
    __device__ __forceinline__ void next(int size) {
        elements = size * size;
        is_shared = used + elements <= TABLE_ELEMENTS;
        base = is_shared ? used : passed;
        used += is_shared ? elements : 0;
        passed += elements;
    }
};

__device__ __forceinline__ i64 code_at(const void* codes, i64 place, bool wide) {
    return wide ? static_cast<const i64*>(codes)[place] : static_cast<const int*>(codes)[place];
}

// Codes of the tile's points as places, of `count` features from the first of a group on. `codes`
// are those of the tile's first point and the group's first feature.
__device__ __forceinline__ void place_codes(int (*to)[TILE], const void* codes, const View& view,
                                            i64 first, const int* sizes, bool wide, int count,
                                            TablePlace place, bool by_rows, int points) {
    int point = threadIdx.x % TILE, found[GROUP];
    i64 at = first + min(point, points - 1) * view.row_stride;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {  // all reads are on their way before the first is needed
        found[g] = NOWHERE;
        if (g >= count) continue;
        int size = sizes[g];
        place.next(size);
        i64 code = code_at(codes, at + g * view.column_stride, wide);
        bool is_inside = code >= 0 && code < size;
        if (is_inside) found[g] = by_rows ? int(code) * size + place.base : int(code);
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        if (g < count) to[g][point] = found[g];
    }
}

// What one feature adds to the thread's PER_SIDE rows of one chunk of columns.
__device__ __forceinline__ void gather(AccT (&added)[PER_SIDE][CHUNK], const int* a, const int* b,
                                       const AccT* table) {
    auto columns = load_vector<int, CHUNK>(b);
    AccT nothing = infinity(AccT()) - infinity(AccT());
#pragma unroll
    for (int r = 0; r < CHUNKS; ++r) {
        auto rows = load_vector<int, CHUNK>(a + r * CHUNK_STEP);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                int place = rows.element[i] + columns.element[e];
                added[r * CHUNK + i][e] += place < 0 ? nothing : table[place];
            }
        }
    }
}

// Takes the thread's own sums out of the tile's unit.
__device__ __forceinline__ void leave_unit(AccT* total, const Place& place, const Points& a,
                                           const Points& b, const Numbers& numbers) {
    Rescale rescale(numbers);
    Range range(numbers.p, a.features);
#pragma unroll 1
    for (int index = 0; index < PER_SIDE * CHUNKS; ++index) {
        int at = place.sums(index / CHUNKS, index % CHUNKS);
        auto value = load_vector<AccT, CHUNK>(total + at);
        mend_sums(value, at / LINE, at % LINE, a, b, range, numbers.p);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) value.element[e] = rescale(value.element[e]);
        store_vector(total + at, value);
    }
}

// Adds what the tables have for the thread's own sums. `memory` is where the stages were, of which
// the first barrier waits for the last reader, or behind the sums.
template <class Pointers, class Tables>
__device__ __forceinline__ void add_categories(AccT* total, AccT* memory, const Pointers& pointers,
                                               const Tables& categories, const Place& place, i64 m0,
                                               i64 n0, int rows, int columns, i64 l) {
    const View &a_view = categories.a_view, &b_view = categories.b_view;
    const AccT* tables = pointers.tables + l * categories.table_batch;
    Group& shared = *reinterpret_cast<Group*>(memory);
    int passed = 0;
#pragma unroll 1
    for (int group = 0; group < CATEGORIES; group += GROUP) {
        int count = min(CATEGORIES - group, GROUP);
        __syncthreads();
        TablePlace first(passed), each(passed);
        // Half of the threads, or a quarter, take the codes of a, as many those of b.
        if (threadIdx.x < TILE) {
            i64 start = l * a_view.batch_stride + m0 * a_view.row_stride;
            place_codes(shared.a, pointers.a_codes, a_view, start + group * a_view.column_stride,
                        categories.sizes + group, categories.wide, count, first,
                        categories.by_rows, rows);
        } else if (threadIdx.x < 2 * TILE) {
            i64 start = l * b_view.batch_stride + n0 * b_view.row_stride;
            place_codes(shared.b, pointers.b_codes, b_view, start + group * b_view.column_stride,
                        categories.sizes + group, categories.wide, count, first,
                        !categories.by_rows, columns);
        }
#pragma unroll 1
        for (int g = 0; g < count; ++g) {
            each.next(categories.sizes[group + g]);
            if (!each.is_shared) continue;
            const AccT* from = tables + each.passed - each.elements;
            for (int i = threadIdx.x; i < each.elements; i += THREADS)
                shared.tables[each.base + i] = from[i];
        }
        passed = each.passed;
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < CHUNKS; ++c) {
            AccT added[PER_SIDE][CHUNK] = {};
            TablePlace at = first;
#pragma unroll 1
            for (int g = 0; g < count; ++g) {
                at.next(categories.sizes[group + g]);
                const int *a = shared.a[g] + place.a, *b = shared.b[g] + place.b + c * CHUNK_STEP;
                if (at.is_shared) gather(added, a, b, shared.tables);
                else gather(added, a, b, tables);
            }
#pragma unroll
            for (int i = 0; i < PER_SIDE; ++i) {
                AccT* address = total + place.sums(i, c);
                auto value = load_vector<AccT, CHUNK>(address);
#pragma unroll
                for (int e = 0; e < CHUNK; ++e) value.element[e] += added[i][e];
                store_vector(address, value);
            }
        }
    }
}
