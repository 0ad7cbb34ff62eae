// Softmax over the stored blocks of each row of a block-sparse matrix, of
// x * scale + rpe + masks, in float; rows without a finite logit are 0.
//
// Floor on an H200: (bytes of the stored x and of out, and what is read of rpe at stored blocks)
// over 4.3 TB/s; where a row does not fit into its warps' registers x and rpe are read twice.
//
// Each thread keeps the largest of its logits and the sum of exponentials relative to that, by
// which results are finished: an exponential of each logit, once where the row fits.
//
// Facts and struct Fixed: class SoftmaxRows of kernlib/families/blocksparse/kernels/softmax.py.
#pragma once

#include "blocksparse/softmax/rows.cuh"

constexpr bool CAUSAL = Config::CAUSAL;  // whether columns behind the row are left out
constexpr bool RPE = Config::RPE;        // whether it is there
constexpr int KEY = Config::KEY, ATTN = Config::ATTN;  // kinds of masks of columns, of the matrix
using KeyT = Config::KeyT;                             // of their elements
using AttnT = Config::AttnT;
constexpr int NONE = 0, ADDED = 1, MULTIPLIED = 2, CHOSEN = 3;  // kinds of masks; CHOSEN: of bools
constexpr int DENSE = RPE + (KEY != NONE) + (ATTN != NONE);            // operands beside x
constexpr bool PLACED = CAUSAL || DENSE > 0;                           // where a block is counts
constexpr int RESIDENT = VECTORS && CHUNKS == 2 && DENSE < 3 ? 3 : 2;  // of 80 registers or 128
constexpr int GROUP = VECTORS && DENSE == 1 ? 2 : 1;  // chunks beside which they are read at once

struct Pointers {
    const int* row_ranks;
    const int* cols;
    const int* counts;
    const InputT* x;
    InputT* out;
    const InputT* rpe;
    const KeyT* key;
    const AttnT* attn;
    Scalar scale;
};
struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Logits of float16 are in units of ln 2, which is one multiplication less for each exponential.
// bfloat16 and float hold what is no float any more in these units, such as the least number, which
// masks add.
template <class T>
constexpr float UNIT_OF = 1.0f;
template <>
constexpr float UNIT_OF<half_t> = 1.44269504f;
constexpr bool EXACT = sizeof(InputT) == 4;
constexpr float LOG2_E = 1.44269504f, UNIT = UNIT_OF<InputT>;

// Of a difference of logits.
__device__ __forceinline__ float exponential(float x) {
    return EXACT ? expf(x) : exp2f(x * (LOG2_E / UNIT));
}

__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000); }

// A largest logit to take others relative to: 0 where all are -inf.
__device__ __forceinline__ float shift_of(float most) { return most == lowest() ? 0.0f : most; }

// The largest of some logits, and the sum of their exponentials relative to that.
struct Found {
    float most, sum;
};

// Where the operands of one entry of the batch begin for a thread.
struct Operands {
    const InputT* x;
    const InputT* rpe;
    const KeyT* key;
    const AttnT* attn;
};

template <class T>
__device__ __forceinline__ const T* begin(const T* from, const DenseStrides& strides,
                                          const Fixed& sizes, const Place& place, u32 entry) {
    const u32 head = place.line / sizes.grid_rows;
    const u32 line = place.line % sizes.grid_rows * sizes.block_rows + place.row;
    return from + entry / sizes.inner * strides.outer + entry % sizes.inner * strides.inner +
           head * strides.head + line * strides.line;
}

__device__ __forceinline__ Operands operands_of(const Parameters& p, const Place& place,
                                                u32 entry) {
    Operands found = {p.x + offset_of(p.x_strides, p, place, entry)};
    if (RPE) found.rpe = begin(p.rpe, p.rpe_strides, p, place, entry);
    if (KEY != NONE) found.key = begin(p.key, p.key_strides, p, place, entry);
    if (ATTN != NONE) found.attn = begin(p.attn, p.attn_strides, p, place, entry);
    return found;
}

// What is read beside a chunk of x.
struct Beside {
    Chunk rpe;
    Vector<KeyT, CHUNK> key;
    Vector<AttnT, CHUNK> attn;
};

// A chunk of a dense operand at a column.
template <bool READ, class T>
__device__ __forceinline__ void read_at(Vector<T, CHUNK>& to, const T* from,
                                        const DenseStrides& strides, u32 column) {
    if (READ) to = read_chunk(from + column * strides.column, strides.column);
}

__device__ __forceinline__ void load_beside(Beside& to, const Parameters& p, const Operands& from,
                                            u32 column) {
    read_at<RPE>(to.rpe, from.rpe, p.rpe_strides, column);
    read_at<KEY != NONE>(to.key, from.key, p.key_strides, column);
    read_at<ATTN != NONE>(to.attn, from.attn, p.attn_strides, column);
}

__device__ __forceinline__ void add_to(float (&logits)[CHUNK], Chunk given) {
    keep_packed(given);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) logits[e] += convert<float>(given.element[e]) * UNIT;
}

__device__ __forceinline__ bool is_out(unsigned char element) { return !element; }
template <class T>
__device__ __forceinline__ bool is_out(T element) { return convert<float>(element) == 0.0f; }

// What a mask leaves out is -inf, whatever it was.
template <int KIND, class T>
__device__ __forceinline__ void choose(float (&logits)[CHUNK], const Vector<T, CHUNK>& mask) {
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        if (KIND > ADDED && is_out(mask.element[e])) logits[e] = lowest();
}
template <int KIND, class T>
__device__ __forceinline__ void add_mask(float (&logits)[CHUNK], const Vector<T, CHUNK>& mask) {
    if constexpr (KIND == ADDED) add_to(logits, mask);
}

// The logits of one chunk of x, whose first element is in `column` of the matrix.
__device__ __forceinline__ void finish_logits(float (&logits)[CHUNK], const Parameters& p,
                                              const Place& place, const Beside& beside,
                                              u32 column) {
    if (RPE) add_to(logits, beside.rpe);
    add_mask<KEY>(logits, beside.key);
    add_mask<ATTN>(logits, beside.attn);
    choose<KEY>(logits, beside.key);
    choose<ATTN>(logits, beside.attn);
    if (!CAUSAL) return;
    const u32 row = place.line % p.grid_rows * p.block_rows + place.row;
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        if (column + e > row) logits[e] = lowest();
}

// The logits of CHUNKS chunks, from block `at` of the line on; -inf behind its end. What is beside
// them is read GROUP chunks at a time: for more of them there are no registers.
__device__ __forceinline__ void load_logits(float (&logits)[CHUNKS][CHUNK], const Parameters& p,
                                            const Place& place, const Operands& from, float scale,
                                            u32 at, int count) {
    Chunk x[CHUNKS];
    u32 columns[CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const u32 block = at + place.ahead + k * place.apart, slot = place.first + block;
        x[k] = Chunk{};
        columns[k] = 0;
        if (block >= place.blocks) continue;
        x[k] = read_chunk(from.x + slot * p.x_strides.slot, p.x_strides.column);
        if (PLACED) columns[k] = p.cols[slot] * BLOCK_COLUMNS + place.column;
    }
#pragma unroll
    for (int first = 0; first < CHUNKS; first += GROUP) {
        Beside beside[GROUP] = {};
#pragma unroll
        for (int k = 0; k < GROUP; ++k)
            if (at + place.ahead + (first + k) * place.apart < place.blocks)
                load_beside(beside[k], p, from, columns[first + k]);
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            float(&own)[CHUNK] = logits[first + k];
            keep_packed(x[first + k]);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                own[e] = convert<float>(x[first + k].element[e]) * scale;
            finish_logits(own, p, place, beside[k], columns[first + k]);
            if (at + place.ahead + (first + k) * place.apart < place.blocks) continue;
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) own[e] = lowest();
        }
    }
}

__device__ __forceinline__ float largest(const float (&logits)[CHUNKS][CHUNK], int count,
                                         float most) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        if (k >= count) break;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) most = fmaxf(most, logits[k][e]);
    }
    return most;
}

// Exponentials in the place of logits, relative to `most`, and their sum.
__device__ __forceinline__ float take_exponentials(float (&logits)[CHUNKS][CHUNK], int count,
                                                   float most) {
    const float shift = shift_of(most);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        if (k >= count) break;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            logits[k][e] = exponential(logits[k][e] - shift);
            sum += logits[k][e];
        }
    }
    return sum;
}

// What the thread's exponentials are multiplied by. A NaN is in the sum, but not in the largest.
__device__ __forceinline__ float factor_of(const Found& own, const Fixed& sizes,
                                           Exchange<Found>& exchange) {
    Found row = {over_row(own.most, Larger())};
    row.sum = over_row(own.sum * exponential(own.most - shift_of(row.most)), Sum());
    if (sizes.team_bits) {
        const Found* of_warps = exchange.put(sizes, row);
        Found parts[WARPS];
        row = Found{lowest(), 0.0f};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            parts[i] = Found{lowest(), 0.0f};
            if (i < 1 << sizes.team_bits) parts[i] = of_warps[i * ROWS];
            row.most = fmaxf(row.most, parts[i].most);
        }
#pragma unroll
        for (int i = 0; i < WARPS; ++i)
            row.sum += parts[i].sum * exponential(parts[i].most - shift_of(row.most));
    }
    return row.sum == 0.0f ? 0.0f : exponential(own.most - shift_of(row.most)) / row.sum;
}

__device__ __forceinline__ void store(InputT* out, const Parameters& p, const Place& place,
                                      const float (&values)[CHUNKS][CHUNK], float factor, u32 at) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const u32 block = at + place.ahead + k * place.apart, slot = place.first + block;
        if (block >= place.blocks) continue;
        Chunk y;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) y.element[e] = convert<InputT>(values[k][e] * factor);
        write_chunk(out + slot * p.out_strides.slot, p.out_strides.column, y);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
blocksparse_softmax(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    Exchange<Found> exchange{reinterpret_cast<Found*>(shared)};
    const Place place = place_of(p, p.row_ranks, p.counts);
    const float scale = read_scalar<float>(p.scale, 0) * UNIT;
    const u32 step = place.apart * CHUNKS;
    float values[CHUNKS][CHUNK];
    for (u32 entry = blockIdx.y; entry < p.batch; entry += gridDim.y) {
        const Operands from = operands_of(p, place, entry);
        InputT* out = p.out + offset_of(p.out_strides, p, place, entry);
        Found own = {lowest(), 0.0f};
        float factor = 0.0f;
        bool is_met = false;  // the whole row
        for (u32 at = 0;;) {
            const int count = accesses(place, at);
            load_logits(values, p, place, from, scale, at, count);
            const float most = is_met ? own.most : largest(values, count, own.most);
            const float sum = take_exponentials(values, count, most);
            if (!is_met) {
                own = Found{most, own.sum * exponential(own.most - shift_of(most)) + sum};
                if (at + step < place.blocks) {
                    at += step;
                    continue;
                }
                factor = factor_of(own, p, exchange);
                is_met = true;
            }
            store(out, p, place, values, factor, at);  // first the end, which is there still
            if (at == 0) break;
            at -= step;
        }
    }
    clear_slots(p.out, p.out_strides, p, *p.counts);
}
