// Hopper's copy engine and matrix unit (sm_90a): mbarriers, tensor copies, wgmma descriptors.
#pragma once

#include "common/types.cuh"

// What cuTensorMapEncodeTiled fills.
struct alignas(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

// Arrives once for all threads of the warp.
__device__ __forceinline__ void barrier_arrive_by_warp(u64* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Arrives, and announces the bytes that tensor copies will bring.
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits until the phase of that parity is over.
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
    asm volatile("{\n\t"
                 ".reg .pred done;\n\t"
                 "WAIT:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@done bra DONE;\n\t"
                 "bra WAIT;\n\t"
                 "DONE:\n\t"
                 "}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Barriers initialised by one thread, before the others and the copy engine use them.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Shared memory written by this thread's ordinary stores, before the copy engine or wgmma reads it.
__device__ __forceinline__ void fence_shared_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier of a whole number of warps, by number: 0 is __syncthreads().
__device__ __forceinline__ void sync_threads(int number, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// Permits the launch behind this one, if it overlaps, to begin once all CTAs have got here.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;");
}

// Waits, if this launch overlaps the one before, until that has ended and what it wrote is seen.
__device__ __forceinline__ void wait_for_prerequisites() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void load_box(void* to, const TensorMap& map, u64* barrier, int x, int y,
                                         int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
                    "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Contiguous bytes, a multiple of 16, from an aligned address.
__device__ __forceinline__ void load_bytes(void* to, const void* from, u64* barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, const void* from, int x, int y,
                                          int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's committed groups still read shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

// Waits until this thread's committed groups have written device memory.
__device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// A matrix of 128-byte rows in shared memory, swizzled by 128 bytes: groups of eight rows
// `group_bytes` apart; for one whose rows run along M or N, `atom_bytes` from 128 bytes of a row to
// the next 128.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, int atom_bytes, int group_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(atom_bytes >> 4) << 16 |
           u64(group_bytes >> 4) << 32 | u64(1) << 62;
}

// A matrix in blocks of eight rows of 16 bytes along k: `depth_bytes` from block to block along k,
// `line_bytes` along M or N.
__device__ __forceinline__ u64 core_matrices_descriptor(u32 address, int depth_bytes,
                                                        int line_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(depth_bytes >> 4) << 16 | u64(line_bytes >> 4) << 32;
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// The nearest TF32 number.
__device__ __forceinline__ float round_to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

// Two numbers of a 2-byte type.
template <class T>
__device__ __forceinline__ u32 pack(float x, float y) {
    return u32(convert<T>(x).bits) | u32(convert<T>(y).bits) << 16;
}

// Four 8x8 matrices of 2-byte elements from a warp's accumulator layout to rows of 16 bytes, whose
// addresses lanes 8i .. 8i+7 give for matrix i.
template <bool TRANSPOSED>
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    if (TRANSPOSED) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    }
}

__device__ __forceinline__ float load_shared(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}

__device__ __forceinline__ void store_shared(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(x) : "memory");
}
