// common/hopper.cuh of kernel_sources, of what one block's own threads do.
#pragma once

#include "common/barrier.cuh"
#include "common/mma_half.cuh"

inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }
inline float load_shared(u32 address) {
    float x;
    std::memcpy(&x, shared + address, sizeof(x));
    return x;
}
inline void store_shared(u32 address, float x) { std::memcpy(shared + address, &x, sizeof(x)); }
inline void fence_shared_writes() {}
inline void fence_barrier_init() {}
inline void launch_dependents() {}
inline float round_to_tf32(float x) {
    return __uint_as_float(round_to_tf32(__float_as_uint(x)));
}
inline void wait_for_prerequisites() {}
template <int REGISTERS>
inline void take_registers() {}
template <int REGISTERS>
inline void release_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}

inline Barrier numbered_barriers[16];
inline void sync_threads(int number, int threads) {
    Barrier& barrier = numbered_barriers[number];
    barrier.count = threads;
    barrier.wait();
}

inline u64 matrix_descriptor(u32 address, int atom_bytes, int group_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(atom_bytes >> 4) << 16 |
           u64(group_bytes >> 4) << 32 | u64(1) << 62;
}

inline u64 core_matrices_descriptor(u32 address, int depth_bytes, int line_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(depth_bytes >> 4) << 16 | u64(line_bytes >> 4) << 32;
}

// Of a matrix of rows of 128 swizzled bytes: along M or N if its LINES are side by side, else along
// K, in which a part of such a row may be given. Or of one of blocks of eight rows of 16 bytes.
template <class T, bool LINES>
inline float number_of_matrix(u64 descriptor, int line, int depth) {
    u32 base = (descriptor & 0x3fff) << 4, atom = (descriptor >> 16 & 0x3fff) << 4;
    u32 group = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 == 0) {
        int row = LINES ? depth : line, along = LINES ? line : depth;
        u32 at = base + depth / 8 * atom + line / 8 * group + row % 8 * 16 + along % 8 * 2;
        T x;
        std::memcpy(&x, shared + at, 2);
        return convert<float>(x);
    }
    if (descriptor >> 62 != 1) std::abort();
    if (LINES ? base % 1024 != 0 : base % 1024 > 96 || base % 32 != 0) std::abort();
    int row = LINES ? depth : line, along = LINES ? line : depth;
    u32 at = base + along / 64 * atom + row / 8 * group + row % 8 * 128 + along % 64 * 2;
    at ^= (at >> 7 & 7) << 4;
    T x;
    std::memcpy(&x, shared + at, 2);
    return convert<float>(x);
}

// A thread's part of 64 x N sums of 16 products, whose left operand `left(row, depth)` gives.
template <class T, int N, bool LINES, class Left>
inline void multiply_matrices(float (&d)[N / 2], u64 right, int accumulate, const Left& left) {
    int lane = threadIdx.x % 32;
    float a[2][16], b[16];
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k) a[half][k] = left(lane / 4 + 8 * half, k);
    for (int i = 0; i < N / 8; ++i)
        for (int next = 0; next < 2; ++next) {
            int line = i * 8 + lane % 4 * 2 + next;
            for (int k = 0; k < 16; ++k) b[k] = number_of_matrix<T, LINES>(right, line, k);
            for (int half = 0; half < 2; ++half) {
                float& sum = d[4 * i + 2 * half + next];
                double whole = accumulate ? sum : 0;
                for (int k = 0; k < 16; ++k) whole += double(a[half][k]) * b[k];
                sum = float(whole);
            }
        }
}
template <class T, int N, bool LEFT_LINES, bool RIGHT_LINES>
inline void multiply_warpgroup(float (&d)[N / 2], u64 left, u64 right, int accumulate) {
    int first = threadIdx.x % 128 / 32 * 16;  // of the warp's rows
    multiply_matrices<T, N, RIGHT_LINES>(d, right, accumulate, [&](int row, int k) {
        return number_of_matrix<T, LEFT_LINES>(left, first + row, k);
    });
}
template <class T, int N, bool LEFT_LINES, bool RIGHT_LINES>
inline void multiply_warpgroup(float (&d)[N / 2], const u32 (&left)[4], u64 right, int accumulate) {
    int warp = threadIdx.x / 32;
    for (int i = 0; i < 4; ++i) words_of_lanes[warp][threadIdx.x % 32][i] = left[i];
    wait_for_warp();
    multiply_matrices<T, N, RIGHT_LINES>(d, right, accumulate, [&](int row, int k) {
        u32 word = words_of_lanes[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        return half_of<T>(word, k % 2);
    });
    wait_for_warp();
}

template <bool TRANSPOSED>
inline void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    check_alignment(shared + address, 16);
    words_of_lanes[warp][lane][0] = address;
    wait_for_warp();
    u32 words[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        for (int next = 0; next < 2; ++next) {
            int row = lane / 4, column = lane % 4 * 2 + next;
            if (TRANSPOSED) row = column, column = lane / 4;
            u32 to = words_of_lanes[warp][i * 8 + row][0] + column * 2;
            u16 half = u16(words[i] >> 16 * next);
            std::memcpy(shared + to, &half, 2);
        }
    wait_for_warp();
}

// A tensor map as the tests encode it in place of the driver: sizes and box in elements, innermost
// first, strides in bytes from the second dimension on.
struct alignas(64) TensorMap {
    u64 address;
    u32 sizes[4];
    u64 strides[3];
    u16 box[4];
    u32 itemsize, swizzle;
    u64 unused[6];
};
static_assert(sizeof(TensorMap) == 128);

// Each element of a box: where it is in device memory, null outside of the tensor, and in shared
// memory.
template <class Each>
inline void walk_box(const TensorMap& map, void* box, const int (&from)[4], const Each& each) {
    u32 base = shared_address(box);
    if (map.swizzle != 128 || map.box[0] * map.itemsize != 128 || base % 1024) std::abort();
    u32 place = 0;
    for (int w = 0; w < map.box[3]; ++w)
        for (int z = 0; z < map.box[2]; ++z)
            for (int y = 0; y < map.box[1]; ++y)
                for (int x = 0; x < map.box[0]; ++x, place += map.itemsize) {
                    i64 at[4] = {from[0] + x, from[1] + y, from[2] + z, from[3] + w};
                    bool inside = true;
                    i64 offset = at[0] * map.itemsize;
                    for (int i = 0; i < 4; ++i) {
                        inside &= at[i] >= 0 && at[i] < i64(map.sizes[i]);
                        if (i) offset += at[i] * i64(map.strides[i - 1]);
                    }
                    u32 to = base + place;
                    to ^= (to >> 7 & 7) << 4;
                    each(inside ? reinterpret_cast<unsigned char*>(map.address) + offset : nullptr,
                         shared + to);
                }
}
inline int box_bytes(const TensorMap& map) {
    return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.itemsize;
}
inline void load_box(void* to, const TensorMap& map, u64* barrier, int x, int y, int z, int w) {
    walk_box(map, to, {x, y, z, w}, [&](const unsigned char* from, unsigned char* place) {
        if (from) std::memcpy(place, from, map.itemsize);
        else std::memset(place, 0, map.itemsize);
    });
    barrier_bytes(barrier, box_bytes(map));
}
inline void load_bytes(void* to, const void* from, u64* barrier, int bytes) {
    check_alignment(to, 16);
    check_alignment(from, 16);
    if (bytes <= 0 || bytes % 16) std::abort();
    std::memcpy(to, from, bytes);
    barrier_bytes(barrier, bytes);
}
inline void store_box(const TensorMap& map, const void* from, int x, int y, int z, int w) {
    walk_box(map, const_cast<void*>(from), {x, y, z, w},
             [&](unsigned char* to, const unsigned char* place) {
        if (to) std::memcpy(to, place, map.itemsize);
    });
}
inline void commit_stores() {}
template <int PENDING>
inline void wait_for_reads() {}
inline void wait_for_stores() {}
