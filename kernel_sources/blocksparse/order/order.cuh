// The order in which hopper/schedule.cuh takes the tiles of a product: units, groups of lines of
// blocks of a head, by falling number of steps, and among equals as they come; and a counter of
// tiles, as it is once each CTA has its first one. Where heads would not find their operands in L2
// if those of all were taken at a time, group after group of heads. One block.
// Floors: one launch, 2 us on an H200, of which the product's own launch hides a part; and the bits
// once from L2 to one multiprocessor, 64 bytes a clock: 8 KB, 130 clocks, of 512 units of two lines
// of 64 blocks. To expect of these are 230 instructions a warp, 8 warps a scheduler, one trip to L2
// and four barriers: 2600 clocks, 1.5 us. To compare each unit with all others took 512 steps a
// unit, 9 to 17 us; the product itself takes 10 to 20.
//
// A counting sort: before a unit lie those that take more steps, and of those that take as many
// what is of the runs of warps before, and ahead of it in its own warp's. No atomics, so that the
// order is one and the same each time.
//
// Facts and struct Fixed: class Order of kernlib/families/blocksparse/kernels/order.py.
#pragma once

#include "blocksparse/sums.cuh"
#include "common/hopper.cuh"

constexpr int THREADS = Config::THREADS, WARPS = THREADS / 32;
constexpr int GROUP = Config::GROUP;  // lines of blocks of a tile
constexpr int MOST_UNITS = 4096;
constexpr int KEYS = THREADS;                  // lengths that are told apart, each a thread's
constexpr int TURNS = MOST_UNITS / THREADS;    // units of a thread, at most
// Units whose bits are under way to a thread. Two of 8 lines spill by NVRTC 12.8.
constexpr int AT_ONCE = GROUP < 4 ? 4 : GROUP < 8 ? 2 : 1;

struct Operands {
    const u32* bits;  // of lines of blocks
    u32* order;
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    u32 sums[WARPS];
    u16 keys[MOST_UNITS];     // by unit
    u16 starts[KEYS];         // units of longer keys
    u16 counts[WARPS][KEYS];  // units of a warp of each key; then such units of warps before
};

// The blocks that one of a unit's lines stores, of one word. Lines and units that are not there
// count as the last one once more, so that no load waits for a branch.
__device__ __forceinline__ u32 blocks_of(const Parameters& p, int unit, int word) {
    unit = min(unit, p.units - 1);
    int head = unit / p.groups, first = unit % p.groups * GROUP;
    const u32* from = p.bits + i64(head) * p.lines * p.words + word;
    u32 blocks = 0;
#pragma unroll
    for (int line = 0; line < GROUP; ++line)
        blocks |= from[i64(min(first + line, p.lines - 1)) * p.words];
    return blocks;
}

// What the keys of a unit's group begin with: the first group has the largest.
__device__ __forceinline__ int first_key(const Parameters& p, int unit) {
    int group = p.last_group ? min(int(u32(unit) / u32(p.per_group)), p.last_group) : 0;
    return (p.last_group - group) * p.group_keys;
}

// The key of each unit in its group, COUNT at a time of a thread, which some lanes count together.
template <int COUNT>
__device__ __forceinline__ void count_steps(const Parameters& p, Shared& s) {
    int lanes = 1 << p.share, apart = THREADS >> p.share;
    int lane = threadIdx.x & (lanes - 1), own = threadIdx.x >> p.share;
#pragma unroll 1
    for (int first = 0; first < p.units; first += COUNT * apart) {
        int steps[COUNT] = {};
#pragma unroll 1
        for (int word = lane; word < p.words; word += lanes) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                steps[i] += __popc(blocks_of(p, first + i * apart + own, word));
        }
#pragma unroll 1
        for (int mask = lanes / 2; mask; mask /= 2) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                steps[i] += __shfl_xor_sync(ALL_LANES, steps[i], mask);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            int unit = first + i * apart + own;
            if (lane == 0 && unit < p.units) s.keys[unit] = steps[i] >> p.shift;
        }
    }
}

// A thread's units, one of each 32 of its warp's run, and how many of that run lie before each.
struct Own {
    int turns, warp, lane;
    int key[TURNS], before[TURNS];  // units of the same key

    __device__ __forceinline__ explicit Own(const Parameters& p)
        : turns((p.units + THREADS - 1) / THREADS), warp(threadIdx.x / 32),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ int unit(int turn) const {
        return (warp * turns + turn) * 32 + lane;
    }
    __device__ __forceinline__ void rank(const Parameters& p, Shared& s) {
        u16* counts = s.counts[warp];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            if (i >= turns) break;
            bool exists = unit(i) < p.units;
            key[i] = exists ? first_key(p, unit(i)) + s.keys[unit(i)] : -1;
            u32 same = __match_any_sync(ALL_LANES, key[i]), ahead = same & ((1u << lane) - 1);
            before[i] = exists ? counts[key[i]] + __popc(ahead) : 0;
            __syncwarp();
            if (exists && !ahead) counts[key[i]] = before[i] + __popc(same);
            __syncwarp();
        }
    }
    __device__ __forceinline__ void place(const Parameters& p, const Shared& s) const {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            if (i >= turns || unit(i) >= p.units) break;
            p.order[1 + s.starts[key[i]] + s.counts[warp][key[i]] + before[i]] = unit(i);
        }
    }
};

// From how many units of a key each warp has to how many the warps before it have; and the sum.
__device__ __forceinline__ u32 sum_warps(Shared& s, int key) {
    u32 counts[WARPS], sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) counts[warp] = s.counts[warp][key];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        s.counts[warp][key] = sum;
        sum += counts[warp];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_order(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Shared& s = *reinterpret_cast<Shared*>(shared);
    launch_dependents();  // hopper/hopper.cuh waits where it reads what is written here
    Own own(p);
    for (int key = own.lane; key < p.keys; key += 32) s.counts[own.warp][key] = 0;
    if (p.units <= THREADS >> p.share) count_steps<1>(p, s);
    else count_steps<AT_ONCE>(p, s);
    __syncthreads();
    own.rank(p, s);
    __syncthreads();
    int key = p.keys - 1 - int(threadIdx.x);  // the largest first
    u32 total, sum = key >= 0 ? sum_warps(s, key) : 0;
    u32 ahead = sum_ahead<WARPS>(sum, s.sums, total);
    if (key >= 0) s.starts[key] = ahead;
    __syncthreads();
    own.place(p, s);
    if (threadIdx.x == 0) p.order[0] = p.first;
}
