// out = Finish(sum over parts, in order, of partial[part]): of a product whose sums several CTAs
// share, the same bits at every run. In slots that hold no block zeros, of which no part is read.
//
// Floors: the parts once over the bandwidth of L2, where portable/portable.cuh or
// sampled/sampled.cuh have left them, 5.5 TB/s on an H100; one launch, of which what is before the
// wait is hidden; and two trips to L2.
//
// Facts and struct Fixed: class Parts of kernlib/families/blocksparse/kernels/parts.py.
#pragma once

#include "blocksparse/parts/overlap.cuh"
#include "blocksparse/summands.cuh"

using InputT = Config::InputT;    // storage of vectors and summands
using AccT = Config::AccT;        // arithmetic, float
using OutputT = Config::OutputT;  // storage of out
constexpr bool ALONG_LINES = Config::ALONG_LINES;  // lines lie closer together than columns
constexpr bool SLOTTED = Config::SLOTTED;          // a panel is a slot, else a head
constexpr int SUMMANDS = Config::SUMMANDS;
constexpr int RUN = 4;                  // results of a thread
constexpr int OWNERS = 64, SHARES = 4;  // of a CTA: threads with results, and those that share each
constexpr int THREADS = OWNERS * SHARES;

struct Operands {
    const float* partial;  // (part, batch, panel, far, near), near ones padded to whole runs
    const int* rows;       // SLOTTED: of each slot, -1 of one without a block
    OutputT* out;
};
struct Parameters : Operands,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

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
        if (Config::EPILOGUE && is_stored && e < place.count) {
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
