// What CUDA C++ has beside C++, for threads of the host.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes)
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads wait_for_block
#define __syncwarp wait_for_warp

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};
inline thread_local Index threadIdx;
inline Index blockIdx, gridDim;
inline constexpr int SHARED_BYTES = 227 * 1024;
alignas(128) unsigned char shared[SHARED_BYTES];  // of the block that runs

inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
inline void wait_for_block() { block_barrier->arrive_and_wait(); }
inline void wait_for_warp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }

inline unsigned long long __cvta_generic_to_shared(const void* address) {
    return static_cast<const unsigned char*>(address) - shared;
}
inline unsigned handed_on[32][32];  // by warp and lane
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    unsigned(&lanes)[32] = handed_on[threadIdx.x / 32];
    lanes[threadIdx.x % 32] = value;
    wait_for_warp();
    unsigned most = *std::max_element(lanes, lanes + 32);
    wait_for_warp();
    return most;
}

struct alignas(16) int4 {
    int x, y, z, w;
};
template <class T>
T __ldcg(const T* from) { return *from; }
inline unsigned atomicAdd(unsigned* counter, unsigned value) {
    unsigned before = *counter;
    *counter += value;
    return before;
}

inline unsigned atomicMax(unsigned* most, unsigned value) {
    std::atomic_ref<unsigned> own(*most);
    unsigned before = own.load();
    while (before < value && !own.compare_exchange_weak(before, value)) {}
    return before;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof(x));
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
