// What CUDA C++ has beside C++, for one thread of the host that takes the threads of a block in turn,
// each up to its next barrier.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>  // of common/barrier.cuh, here as this header is compiled once

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __shared__
#define __align__(bytes)
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads wait_for_block
#define __syncwarp wait_for_warp

template <class T>
constexpr T max(T x, T y) { return x > y ? x : y; }
template <class T>
constexpr T min(T x, T y) { return x < y ? x : y; }

struct Index {
    unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim, blockDim;
inline constexpr int SHARED_BYTES = 227 * 1024;
alignas(128) unsigned char shared[SHARED_BYTES];  // of the block that runs

// The threads of the block that runs.
inline constexpr int MOST_THREADS = 1024, STACK_BYTES = 128 * 1024;
inline ucontext_t contexts[MOST_THREADS], caller;  // as they begin
inline jmp_buf places[MOST_THREADS];               // where they wait, without a system call
inline char* stacks = static_cast<char*>(std::malloc(size_t(MOST_THREADS) * STACK_BYTES));
inline bool is_begun[MOST_THREADS], is_over[MOST_THREADS];
inline int thread_count, threads_left;

inline void next_thread() {
    int from = threadIdx.x, next = from;
    do next = (next + 1) % thread_count;
    while (is_over[next]);
    if (next == from) return;
    threadIdx.x = next;
    if (_setjmp(places[from])) return;
    if (is_begun[next]) _longjmp(places[next], 1);
    is_begun[next] = true;
    setcontext(&contexts[next]);
}

struct Barrier {
    int count, arrived;
    unsigned phase;
    void wait() {
        unsigned own = phase;
        if (++arrived == count) {
            arrived = 0;
            ++phase;
        }
        while (phase == own) next_thread();
    }
};
inline Barrier block_barrier, warp_barriers[MOST_THREADS / 32];
inline void wait_for_block() { block_barrier.wait(); }
inline void wait_for_warp() { warp_barriers[threadIdx.x / 32].wait(); }

inline int __syncthreads_or(int flag) {
    static bool flags[MOST_THREADS];
    flags[threadIdx.x] = flag != 0;
    wait_for_block();
    bool any = false;
    for (int thread = 0; thread < thread_count; ++thread) any |= flags[thread];
    wait_for_block();
    return any;
}

inline unsigned long long __cvta_generic_to_shared(const void* address) {
    return static_cast<const unsigned char*>(address) - shared;
}
inline unsigned handed_on[32][32];  // by warp and lane
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    unsigned(&lanes)[32] = handed_on[threadIdx.x / 32];
    lanes[threadIdx.x % 32] = value;
    wait_for_warp();
    unsigned most = 0;
    for (unsigned lane : lanes) most = max(most, lane);
    wait_for_warp();
    return most;
}

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    unsigned(&lanes)[32] = handed_on[threadIdx.x / 32];
    lanes[threadIdx.x % 32] = value;
    wait_for_warp();
    unsigned sum = 0;
    for (unsigned lane : lanes) sum += lane;
    wait_for_warp();
    return sum;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    unsigned(&lanes)[32] = handed_on[threadIdx.x / 32];
    lanes[threadIdx.x % 32] = value;
    wait_for_warp();
    unsigned all = 0;
    for (unsigned lane : lanes) all |= lane;
    wait_for_warp();
    return all;
}
inline unsigned __match_any_sync(unsigned, unsigned value) {
    unsigned(&lanes)[32] = handed_on[threadIdx.x / 32];
    lanes[threadIdx.x % 32] = value;
    wait_for_warp();
    unsigned same = 0;
    for (int lane = 0; lane < 32; ++lane) same |= unsigned(lanes[lane] == value) << lane;
    wait_for_warp();
    return same;
}
inline unsigned __ballot_sync(unsigned mask, int flag) {
    return __reduce_or_sync(mask, unsigned(flag != 0) << threadIdx.x % 32);
}
inline int __any_sync(unsigned mask, int flag) { return __ballot_sync(mask, flag) != 0; }
inline int __all_sync(unsigned mask, int flag) { return __ballot_sync(mask, !flag) == 0; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned chosen = 0;
    for (int byte = 0; byte < 4; ++byte)
        chosen |= unsigned(both >> 8 * (selector >> 4 * byte & 7) & 255) << 8 * byte;
    return chosen;
}
// x and y as bytes without a sign: the sum of their products, added to `sum`.
inline unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
    for (int bit = 0; bit < 32; bit += 8) sum += (x >> bit & 0xff) * (y >> bit & 0xff);
    return sum;
}
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned turned = 0;
    for (int bit = 0; bit < 32; ++bit) turned |= (x >> bit & 1) << (31 - bit);
    return turned;
}

struct alignas(16) int4 {
    int x, y, z, w;
};
// The value of another lane: from is that lane's number.
template <class T>
T value_of_lane(T value, int from) {
    static T lanes[32][32];
    unsigned warp = threadIdx.x / 32;
    lanes[warp][threadIdx.x % 32] = value;
    wait_for_warp();
    T other = lanes[warp][from];
    wait_for_warp();
    return other;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return value_of_lane(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) { return value_of_lane(value, lane & 31); }
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned apart) {
    int lane = threadIdx.x % 32;
    return value_of_lane(value, lane < int(apart) ? lane : lane - int(apart));
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned apart) {
    int lane = threadIdx.x % 32;
    return value_of_lane(value, lane + int(apart) > 31 ? lane : lane + int(apart));
}

template <class T>
T __ldg(const T* from) { return *from; }
template <class T>
T __ldcg(const T* from) { return *from; }
template <class T>
void __stcg(T* to, const T& value) { *to = value; }
inline unsigned atomicAdd(unsigned* counter, unsigned value) {
    unsigned before = *counter;
    *counter += value;
    return before;
}
inline unsigned atomicOr(unsigned* bits, unsigned value) {
    unsigned before = *bits;
    *bits |= value;
    return before;
}

inline unsigned __vmaxu2(unsigned x, unsigned y) {
    return max(x >> 16, y >> 16) << 16 | max(x & 0xffffu, y & 0xffffu);
}
inline unsigned atomicMax(unsigned* most, unsigned value) {
    unsigned before = *most;
    *most = max(before, value);
    return before;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof(x));
    return bits;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
inline int __double2hiint(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof(x));
    return int(bits >> 32);
}
inline int __double2loint(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof(x));
    return int(bits);
}
inline long long __double2ll_rn(double x) { return std::llrint(x); }
inline double __hiloint2double(int high, int low) {
    long long bits = (long long)(high) << 32 | unsigned(low);
    double x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(unsigned(bits)); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fmul_rd(float x, float y) {
    float product = x * y;
    return product > double(x) * double(y) ? std::nextafter(product, -INFINITY) : product;
}
