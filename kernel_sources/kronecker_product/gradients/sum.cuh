// Gradients of factors from the parts that blocks of gradients.cuh have made: sums over parts, in
// order, so that they have the same bits at every run, rounded once. Factors that were applied as
// one matrix have theirs of its gradient d:
//
//   gradient of factor i at (p, q) = sum d[row, column] * entries of all other factors there
//
// over the rows and columns of the matrix whose indices of factor i are p and q.
//
// Floor: parts * entries * 4 bytes (8 of double) over the bandwidth of the L2 cache.
//
// Facts and struct Fixed: class Sum of kernlib/families/kronecker_product/kernels/sum.py.
#pragma once

#include "common/types.cuh"

using InputT = Config::InputT;  // storage of factors and of their gradients
using AccT = Config::AccT;      // of parts
constexpr int FACTORS = Config::FACTORS, MATRICES = Config::MATRICES;
constexpr int LANES = 32, GROUPS = 16, THREADS = LANES * GROUPS;
constexpr int MOST_MERGED = 256;  // entries of a matrix that is several factors

struct Pointers {
    const AccT* parts;
    InputT* gradients[FACTORS];
    const InputT* factors[FACTORS];
};

struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    AccT groups[GROUPS][LANES];
    AccT sums[MOST_MERGED];
};

// The sum of an entry, in the threads of the first group.
__device__ __forceinline__ AccT sum_of_parts(Shared& shared, const AccT* from, bool exists,
                                             const Matrix& m) {
    u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    AccT sum = 0;
    if (exists) {
#pragma unroll 8
        for (u32 part = group; part < m.parts; part += GROUPS) sum += from[part * m.entries];
    }
    shared.groups[group][lane] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int other = 0; other < GROUPS; ++other) sum += shared.groups[other][lane];
    __syncthreads();
    return sum;
}

__device__ __forceinline__ void write(const Parameters& p, i64 batch, u32 factor, u32 row,
                                      u32 column, AccT value) {
    const Factor& to = p.shapes[factor];
    p.gradients[factor][batch * to.to_batch_stride + row * to.to_row_stride +
                        column * to.to_column_stride] = convert<InputT>(value);
}

// Of factor `own`, at (row, column), the terms of one entry of the matrix: zero where that has
// other indices of this factor.
__device__ __forceinline__ AccT term(const Parameters& p, const Matrix& m, i64 batch, u32 own,
                                     u32 row, u32 column, u32 entry, AccT value) {
    u32 rows = entry / m.columns, columns = entry % m.columns;
    for (u32 part = m.first + m.factors; part-- > m.first;) {
        const Factor& factor = p.shapes[part];
        u32 r = rows % factor.rows, c = columns % factor.columns;
        rows /= factor.rows;
        columns /= factor.columns;
        if (part != own)
            value *= convert<AccT>(p.factors[part][batch * factor.batch_stride +
                                                   r * factor.row_stride +
                                                   c * factor.column_stride]);
        else if (r != row || c != column) return 0;
    }
    return value;
}

__device__ __forceinline__ void of_merged(const Parameters& p, const Matrix& m, i64 batch,
                                          const AccT* sums) {
    for (u32 own = m.first; own < m.first + m.factors; ++own) {
        u32 columns = p.shapes[own].columns, size = p.shapes[own].rows * columns;
        for (u32 index = threadIdx.x / LANES; index < size; index += GROUPS) {
            AccT sum = 0;
            for (u32 entry = threadIdx.x % LANES; entry < m.rows * m.columns; entry += LANES)
                sum += term(p, m, batch, own, index / columns, index % columns, entry, sums[entry]);
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
                sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (threadIdx.x % LANES == 0)
                write(p, batch, own, index / columns, index % columns, sum);
        }
    }
}

__device__ __forceinline__ void one_batch(Shared& shared, const Parameters& p, const Matrix& m,
                                          i64 batch) {
    u32 size = m.rows * m.columns;
    u32 begin = m.factors == 1 ? (blockIdx.x - m.block) * LANES : 0;
    u32 end = m.factors == 1 ? min(begin + LANES, size) : size;
    const AccT* from = p.parts + m.at + batch * m.parts * m.entries;
    for (; begin < end; begin += LANES) {
        u32 entry = begin + threadIdx.x % LANES;
        bool exists = entry < end;
        AccT sum = sum_of_parts(shared, from + entry, exists, m);
        if (!exists || threadIdx.x >= LANES) continue;
        if (m.factors > 1) shared.sums[entry] = sum;
        else write(p, batch, m.first, entry / m.columns, entry % m.columns, sum);
    }
    if (m.factors == 1) return;
    __syncthreads();
    of_merged(p, m, batch, shared.sums);
    __syncthreads();  // before the sums of the next batch take the place of these
}

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_product_sum(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    int index = 0;
#pragma unroll 1
    for (int next = 1; next < MATRICES; ++next)
        if (blockIdx.x >= p.matrices[next].block) index = next;
    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y)
        one_batch(*reinterpret_cast<Shared*>(shared), p, p.matrices[index], batch);
}
