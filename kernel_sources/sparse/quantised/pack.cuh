// Chunks of entries and their codes, which lie in the order of codes, and of scales. A CTA makes a
// chunk in shared memory, as it will lie, and copies it out.
//
// Floor: the bytes of values, codes and data, over 4.3 TB/s.
//
// Facts and struct Fixed: class Pack of kernlib/families/sparse/kernels/codecs/quantised.py.
#pragma once

#include "sparse/quantised/layout.cuh"

using BitsT = Config::BitsT;  // an integer as wide as values

struct Pointers {
    const BitsT* values;         // [chunk][4096], of which only zeros are told from others
    const unsigned char* codes;  // likewise
    const u16* scales;           // [chunk][g][group][half]
    const u32* offsets;          // in 16 bytes
    unsigned char* data;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_bitmap_pack(const __grid_constant__ Parameters p) {
    __shared__ Chunk chunk;
    __shared__ u32 begins[WORDS];
    __shared__ unsigned char codes[POSITIONS];
    i64 first = i64(blockIdx.x) * POSITIONS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < POSITIONS / 4; i += THREADS)
        reinterpret_cast<u32*>(codes)[i] = 0;
    const u16* scales = p.scales + i64(blockIdx.x) * 16 * GROUPS;
    if (threadIdx.x < 16 * GROUPS) (&chunk.scales[0][0][0])[threadIdx.x] = scales[threadIdx.x];
    for (int word = warp * 32; word < warp * 32 + 32; ++word) {
        // Bit 4 j + t is of column 8 t + j.
        BitsT bits = p.values[first + word * BLOCK + lane % 4 * 8 + lane / 4];
        u32 present = __ballot_sync(WARP, BitsT(bits << 1) != 0);
        if (lane == 0) chunk.words[Place(word).word()] = present;
    }
    __syncthreads();
    if (warp == 0) make_begins(begins, chunk.words);
    __syncthreads();
    for (int word = warp * 32; word < warp * 32 + 32; ++word) {
        Place place(word);
        u32 present = chunk.words[place.word()];
        int to = begins[word] + __popc(present & below(lane));
        if (CODES == INT4) to += place.half * (POSITIONS / 2);
        if (present >> bit_of(lane) & 1) codes[to] = p.codes[first + word * BLOCK + lane];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < int(sizeof(chunk.codes)); i += THREADS)
        chunk.codes[i] = CODES == INT4 ? codes[i] | codes[POSITIONS / 2 + i] << 4 : codes[i];
    __syncthreads();
    u32 begin = p.offsets[blockIdx.x], units = p.offsets[blockIdx.x + 1] - begin;
    auto* to = reinterpret_cast<Vector<u32, 4>*>(p.data) + begin;
    auto* from = reinterpret_cast<const Vector<u32, 4>*>(&chunk);
    for (u32 i = threadIdx.x; i < units; i += THREADS) to[i] = from[i];
}
