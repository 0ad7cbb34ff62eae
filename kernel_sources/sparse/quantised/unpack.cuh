// The dense matrix, contiguous, of chunks: before a product with many vectors, and to have a matrix
// back. A CTA copies a chunk into shared memory and writes 16 rows of 256 columns.
//
// Floor: the bytes of data + rows * cols * itemsize, over 4.3 TB/s.
//
// Facts and struct Fixed: class Unpack of kernlib/families/sparse/kernels/codecs/quantised.py.
#pragma once

#include "sparse/bitmap/fetch.cuh"
#include "sparse/quantised/layout.cuh"

using OutputT = Config::OutputT;  // of values

struct Pointers {
    const unsigned char* data;
    const u32* offsets;  // in 16 bytes
    OutputT* out;
    const unsigned char* data_end;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

__device__ __forceinline__ float number_of(u32 code) {
    if (CODES == INT8) return float(int(code) - 128);
    if (CODES == INT4) return float(int(code ^ 8) - 8);
    // e4m3 as a float whose exponent is 120 less; no infinities, one NaN.
    if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fffffff);
    float magnitude = __uint_as_float((code & 0x7f) << 20) * __uint_as_float(0x7b800000);
    return code & 0x80 ? -magnitude : magnitude;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_bitmap_unpack(const __grid_constant__ Parameters p) {
    __shared__ Chunk chunk;
    __shared__ u32 begins[WORDS];
    fetch<THREADS>(chunk, p);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) make_begins(begins, chunk.words);
    __syncthreads();
    i64 first_row = i64(blockIdx.x / p.kchunks) * CHUNK_ROWS;
    i64 first_column = i64(blockIdx.x % p.kchunks) * CHUNK_COLUMNS;
    for (int word = warp * 32; word < warp * 32 + 32; ++word) {
        Place place(word);
        i64 row = first_row + place.row(), column = first_column + place.block * BLOCK + lane;
        u32 present = chunk.words[place.word()];
        float value = 0;
        if (present >> bit_of(lane) & 1) {
            u32 code = chunk.codes[begins[word] + __popc(present & below(lane))];
            if (CODES == INT4) code = place.half ? code >> 4 : code & 15;
            u32 scale = chunk.scales[place.g][place.group()][place.half];
            value = __fmul_rn(number_of(code), __uint_as_float(scale << 16));
        }
        if (row < p.rows && column < p.cols) p.out[row * p.cols + column] = convert<OutputT>(value);
    }
}
