// out = Finish(sum over parts, in order, of partial[part]): of a product whose sums several CTAs
// share, the same bits at every run. In slots that hold no block zeros, of which no part is read.
//
// Floors: the parts once over the bandwidth of L2, where portable/portable.cuh or
// sampled/sampled.cuh have left them, 5.5 TB/s on an H100; one launch, of which what is before the
// wait is hidden; and two trips to L2.
//
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT      storage of vectors and summands; arithmetic (float); storage of out
//   ALONG_LINES                whether lines lie closer together than columns
//   SLOTTED                    whether a panel is a slot, else a head
//   VECTORS, SUMMANDS, SCALARS, EPILOGUE, Finish   the epilogue
//   PARAMETER_BYTES            what lowering makes of Parameters
#pragma once

#include "blocksparse/parts/overlap.cuh"
#include "blocksparse/summands.cuh"

constexpr int RUN = 4;                  // results of a thread
constexpr int OWNERS = 64, SHARES = 4;  // of a CTA: threads with results, and those that share each
constexpr int THREADS = OWNERS * SHARES;

struct Operands {
    const float* partial;  // (part, batch, panel, far, near), near ones padded to whole runs
    const int* rows;       // SLOTTED: of each slot, -1 of one without a block
    OutputT* out;
};
struct Fixed {
    Side out_view;
    i64 part_stride;
    u32 parts, panels, far, near, runs, total;  // runs of RUN: along near ones, and in all
    u32 whole_stores, unused;                   // whether runs are aligned in out
};

// Laid out by kernlib/families/blocksparse/lowering/parts.py.
struct Parameters : Operands,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    Fixed,
                    SummandSides<SUMMANDS> {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

using Run = Vector<float, RUN>;

__device__ __forceinline__ void add(Run& sum, const Run& other) {
#pragma unroll
    for (int e = 0; e < RUN; ++e) sum.element[e] += other.element[e];
}

// Where a run's results are.
struct Place {
    i64 batch, panel, line, column;
    int count;  // that exist

    __device__ __forceinline__ Place(const Parameters& p, u32 index) {
        u32 first = index % p.runs * RUN, far = index / p.runs % p.far;
        u32 outer = index / p.runs / p.far;
        panel = outer % p.panels;
        batch = outer / p.panels;
        line = ALONG_LINES ? first : far;
        column = ALONG_LINES ? far : first;
        count = int(p.near - first);
    }
};

__device__ __forceinline__ void store_run(const Parameters& p, const Place& place, const Run& sum,
                                          bool is_stored) {
    Finish finish(Read<Parameters>{p});
    Beside<SUMMANDS> beside(p, finish, place.batch, place.panel, place.line, place.column);
    Vector<OutputT, RUN> result;
#pragma unroll
    for (int e = 0; e < RUN; ++e) {
        AccT value = sum.element[e];
        if (EPILOGUE && is_stored && e < place.count) {
            Given<SUMMANDS> given;
            given.read(beside, ALONG_LINES ? e : 0, ALONG_LINES ? 0 : e);
            value = given.finished(finish, value, place.line + (ALONG_LINES ? e : 0));
        }
        result.element[e] = convert<OutputT>(value);
    }
    OutputT* to = p.out + p.out_view.at(place.batch, place.panel, place.line, place.column);
    i64 step = ALONG_LINES ? p.out_view.line : p.out_view.column;
    if (p.whole_stores && place.count >= RUN) {
        store_vector(to, result);
        return;
    }
#pragma unroll
    for (int e = 0; e < RUN; ++e)
        if (e < place.count) to[e * step] = result.element[e];
}

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_parts(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    Run* sums = reinterpret_cast<Run*>(shared);
    u32 owner = threadIdx.x % OWNERS, share = threadIdx.x / OWNERS;
    u32 index = blockIdx.x * OWNERS + owner;
    bool exists = index < p.total;
    const Place place(p, exists ? index : 0);
    bool is_stored = exists && (!SLOTTED || p.rows[place.panel] >= 0);
    wait_for_last();
    Run sum = {};
    if (is_stored) {
        const float* from = p.partial + i64(index) * RUN + share * p.part_stride;
#pragma unroll 8
        for (u32 part = share; part < p.parts; part += SHARES, from += SHARES * p.part_stride)
            add(sum, load_vector<float, RUN>(from));
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (share != 0 || !exists) return;
#pragma unroll
    for (int other = 1; other < SHARES; ++other) add(sum, sums[other * OWNERS + owner]);
    store_run(p, place, sum, is_stored);
}
