// out[n, r] = Finish(sum_k value[k] x[n, column(k)]), k over the entries of row r of a matrix in
// MACKO's 4-bit delta format.
//
// A CTA takes some rows, or (RANGES) some entries, and its warps equal shares of their entries,
// each a stream of whole 64 entries without regard to rows: loads are aligned, and DEPTH steps of
// 512 are in flight in registers. A lane owns two runs of eight entries of a step: prefix sums of
// their codes within a word, and one scan over lanes for both runs, 16 bits each. What x holds
// there is gathered from shared memory. A warp that begins within a row adds up the codes before it
// for its first column. Sums of a row's parts are added in their order.
//
// Floors, for E entries of 16 bits: 2.5 E bytes over 4.3 TB/s; and at 1.755 GHz on 132 SMs, by step
// of 512 entries of a warp, COLUMNS = 1:
//   load/store unit   16 gathers of 3.6 wavefronts (density 0.1, 8 entries a lane; 3.3 at 0.5), 6
//                     shuffles, 10 of loads = 74 clocks
//   issue             189 instructions / 4 = 47 clocks; a step in which a row ends gathers from
//                     one half of it twice, and takes some 250 more
//   memory            1280 bytes at 85 % of 4.3 TB/s = 81 clocks
// Measured there at 8192 x 28672 and densities .1, .3, .5: 26.7, 53.5, 82.5 us, 2.7 to 3.6 TB/s.
//
// Facts and struct Fixed: class Macko of kernlib/families/sparse/kernels/macko/macko.py.
#pragma once

#include "common/async_copy.cuh"
#include "common/hopper.cuh"
#include "common/parameters.cuh"
#include "sparse/macko/codes.cuh"

using InputT = Config::InputT;            // storage of values and x
using OutputT = Config::OutputT;          // storage of out, float for RANGES
using RowT = Config::RowT;                // of row_ptr: int, or i64 from 2^31 entries on
constexpr int WARPS = Config::WARPS;      // of a CTA
constexpr int DEPTH = Config::DEPTH;      // steps of 512 entries in flight
constexpr int COLUMNS = Config::COLUMNS;  // vectors of x that a CTA multiplies by
constexpr bool SHARED_X = Config::SHARED_X;  // they fit in shared memory, COLUMNS values together
constexpr bool RANGES = Config::RANGES;  // CTAs divide entries, and macko/sum.cuh follows, or rows
constexpr int MOST_ROWS = Config::MOST_ROWS;  // of a CTA, unless RANGES

constexpr int THREADS = 32 * WARPS;
constexpr int RUN = 8;                     // entries of a lane, side by side
constexpr int HALF = 32 * RUN, STEP = 2 * HALF;
constexpr int UNIT = 64;                   // entries between which warps may divide: 128 bytes
constexpr int WORDS = RUN * sizeof(InputT) / 4;
// Places of x, by half a column: bytes of shared memory, of device memory 2 bytes each, as 32 bits
// do not count the bytes of 2^30 float32 columns.
constexpr u32 SCALE = SHARED_X ? sizeof(InputT) / 2 * COLUMNS : 1;
constexpr u32 UNSHARED_BYTES = sizeof(InputT) / 2;
static_assert(SHARED_X || COLUMNS == 1, "x in device memory is that of one vector");

struct Pointers {
    const InputT* values;
    const u32* deltas;
    const RowT* row_ptr;
    const InputT* x;
    OutputT* out;  // for RANGES sums [n][row], then those of begun rows [n][warp]
};

struct Parameters : Pointers,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern __shared__ __align__(16) unsigned char shared_x[];
__shared__ float row_sums[RANGES ? 1 : MOST_ROWS * COLUMNS];
__shared__ float begun_sums[WARPS * COLUMNS];
__shared__ int begun_rows[WARPS];

using XT = Vector<InputT, COLUMNS>;  // of one column of the matrix

// Brings x to shared memory, which the block may read after a barrier.
__device__ __forceinline__ void fetch_x(const Parameters& p, int first_column) {
    constexpr int CHUNK = 16 / sizeof(InputT);
    const InputT* x = p.x + first_column * p.x_stride;
    for (int c = threadIdx.x * CHUNK; c < p.cols; c += THREADS * CHUNK) {
        if (COLUMNS == 1) {
            copy_async<16>(shared_x + c * sizeof(InputT), x + c, 16);
        } else {
            Vector<InputT, CHUNK> read[COLUMNS];
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                read[n] = {};
                if (first_column + n < p.columns)
                    read[n] = load_vector<InputT, CHUNK>(x + n * p.x_stride + c);
            }
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                XT line;
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) line.element[n] = read[n].element[e];
                reinterpret_cast<XT*>(shared_x)[c + e] = line;
            }
        }
    }
}

// What a lane has of a step.
struct Stage {
    u32 values[2][WORDS];
    u32 codes[2][1];
};

// What lies there, if it `exists`; else, without reading, what was in the registers.
__device__ __forceinline__ void load_words(u32 (&to)[1], const u32* from, int exists) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t"
                 "@p ld.global.nc.L1::no_allocate.u32 %0, [%1];\n\t}"
                 : "+r"(to[0]) : "l"(from), "r"(exists));
}

__device__ __forceinline__ void load_words(u32 (&to)[4], const u32* from, int exists) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                 : "l"(from), "r"(exists));
}

__device__ __forceinline__ void load_words(u32 (&to)[8], const u32* from, int exists) {
    load_words(reinterpret_cast<u32(&)[4]>(to), from, exists);
    load_words(reinterpret_cast<u32(&)[4]>(to[4]), from + 4, exists);
}

// Entries of a warp, from a whole unit on, as a lane reads them: its part of the next step.
struct Stream {
    const u32* values;
    const u32* codes;
    int left;  // entries from this lane's first one to the end of the warp's, maybe none

    // Runs that begin behind the last entry keep what they held.
    __device__ __forceinline__ void fetch(Stage& stage) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int exists = left > h * HALF;
            load_words(stage.values[h], values + h * HALF * int(sizeof(InputT)) / 4, exists);
            load_words(stage.codes[h], codes + h * HALF / RUN, exists);
        }
        values += STEP * sizeof(InputT) / 4;
        codes += STEP / RUN;
        left -= STEP;
    }
};

// Bits of value k of a run, 0 for either zero.
__device__ __forceinline__ u32 magnitude_of(const u32 (&words)[WORDS], int k) {
    if (sizeof(InputT) == 4) return words[k % WORDS] & 0x7fffffff;
    return words[k / 2 % WORDS] & (k % 2 ? 0x7fff0000 : 0x7fff);
}

__device__ __forceinline__ float value_of(const u32 (&words)[WORDS], int k) {
    if (sizeof(InputT) == 4) return __uint_as_float(words[k % WORDS]);
    return pair_value<InputT>(words[k / 2 % WORDS], k % 2);
}

// The vectors' x of one column of the matrix as words, two of 16 bits in each.
struct Gathered {
    static constexpr int BYTES = COLUMNS * sizeof(InputT);
    u32 words[BYTES > 4 ? BYTES / 4 : 1];

    // Zeros, without reading, where `exists` is 0.
    __device__ __forceinline__ Gathered(u32 place, const char* x, u32 exists) {
        if (!SHARED_X) {
            words[0] = 0;
            x += u64(place) * UNSHARED_BYTES;
            if (exists) words[0] = sizeof(InputT) == 2 ? *reinterpret_cast<const u16*>(x)
                                                       : *reinterpret_cast<const u32*>(x);
        } else if (BYTES == 2) {
            asm("{\n\t.reg .pred p;\n\t.reg .b16 h;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b16 h, 0;\n\t"
                "@p ld.shared.u16 h, [%1];\n\tcvt.u32.u16 %0, h;\n\t}"
                : "=r"(words[0]) : "r"(place), "r"(exists));
        } else if (BYTES == 4) {
            asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t"
                "@p ld.shared.u32 %0, [%1];\n\t}"
                : "=r"(words[0]) : "r"(place), "r"(exists));
        } else if (BYTES == 8) {
            asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.b32 %0, 0;\n\t"
                "mov.b32 %1, 0;\n\t@p ld.shared.v2.u32 {%0, %1}, [%2];\n\t}"
                : "=r"(words[0]), "=r"(words[BYTES > 4]) : "r"(place), "r"(exists));
        } else {
            asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.b32 %0, 0;\n\t"
                "mov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
                "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                : "=r"(words[0]), "=r"(words[BYTES > 4]), "=r"(words[BYTES > 8 ? 2 : 0]),
                  "=r"(words[BYTES > 8 ? 3 : 0])
                : "r"(place), "r"(exists));
        }
    }
    __device__ __forceinline__ float operator[](int n) const {
        return sizeof(InputT) == 4 ? __uint_as_float(words[n * sizeof(InputT) / 4])
                                   : pair_value<InputT>(words[n / 2], n % 2);
    }
};

// A warp's walk over its entries: the row it is in, and that row's sums so far, by lane.
struct Walk {
    const Parameters& p;
    i64 begin;            // of the stream, an entry of the matrix
    int lane, part, first_row, first_column;
    int window, ends;     // lane l: the end of row window + l, an entry of the stream
    int row, row_end, from;   // where in the next step its entries begin: 0 but for new rows
    bool begun;           // before the stream
    u32 origin, base;     // where x begins, and the column at which the next step does
    const char* x_begin;  // in device memory, where x is not in shared
    float sums[2][COLUMNS];

    __device__ __forceinline__ void look_at(int first) {
        window = first;
        i64 end = i64(p.row_ptr[min(i64(first) + lane + 1, i64(p.rows))]) - begin;
        ends = int(min(end, i64(0x7fffffff)));
    }

    // To the row of an entry that lies in some row from `window` on.
    __device__ __forceinline__ void enter(int entry) {
        u32 beyond = __ballot_sync(ALL_LANES, ends > entry);
        if (beyond == 0) {
            look_at(find_row(p.row_ptr, begin + entry, window + 32, p.rows));
            beyond = 1;
        }
        int place = __ffs(beyond) - 1;
        row = window + place;
        row_end = __shfl_sync(ALL_LANES, ends, place);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) sums[0][n] = sums[1][n] = 0;
    }

    // The column where entry `first` of the matrix begins, in a row that begun before it: all codes
    // from there on, each with the column of its own. Whole units lie before `first`.
    __device__ __forceinline__ u32 columns_before(i64 first) const {
        i64 start = p.row_ptr[row];
        i64 chunk = start / 32 + lane, last = first / 32;  // of 16 bytes
        int skip = lane == 0 ? int(start % 32) : 0;
        u32 sum = 0;
        while (__any_sync(ALL_LANES, chunk < last)) {
            u32 words[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) words[i][j] = 0;
                if (chunk + 32 * i < last) {
                    auto read = load_vector<u32, 4>(p.deltas + (chunk + 32 * i) * 4);
#pragma unroll
                    for (int j = 0; j < 4; ++j) words[i][j] = read.element[j];
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[0][j] &= ~first_nibbles(0xffffffff, min(max(skip - 8 * j, 0), 8));
            skip = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 bytes = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) bytes += pair_sums(words[i][j]);
                sum = add_bytes(bytes, sum);
            }
            chunk += 4 * 32;
        }
        return __reduce_add_sync(ALL_LANES, sum) + u32(first - start);
    }

    __device__ __forceinline__ void start(int first_of_search, int last_of_search, i64 first) {
        window = find_row(p.row_ptr, first, first_of_search, last_of_search);
        look_at(window);
        from = int(first - begin);
        enter(from);
        begun = i64(p.row_ptr[row]) < first;
        base = origin + (begun ? 2 * SCALE * columns_before(first) : 0);
    }

    // The end of a row's entries in this stream.
    __device__ __forceinline__ void flush() {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            float sum = sums[0][n] + sums[1][n];
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                sum += __shfl_xor_sync(ALL_LANES, sum, step);
            if (lane == 0) put(n, sum);
        }
        if (lane == 0 && begun && !RANGES) begun_rows[part] = row;
        begun = false;
    }

    __device__ __forceinline__ void put(int n, float sum) const {
        if (!RANGES) {
            if (begun) {
                begun_sums[part * COLUMNS + n] = sum;
            } else {
                row_sums[(row - first_row) * COLUMNS + n] = sum;
            }
        } else if (first_column + n < p.columns) {
            i64 column = first_column + n, parts = i64(gridDim.x) * WARPS;
            i64 at = column * p.rows + row;
            if (begun) at = i64(p.columns) * p.rows + column * parts + part;
            reinterpret_cast<float*>(p.out)[at] = sum;
        }
    }

    // Entries of one row in a run of a lane that begins at `place`. Pads, being zeros, add nothing,
    // whatever x is there.
    __device__ __forceinline__ void gather(const u32 (&words)[WORDS], const Columns& columns,
                                           u32 place, float (&to)[COLUMNS]) const {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            u32 exists = magnitude_of(words, k);
            Gathered x(place_of(columns, k, SCALE, place), x_begin, exists);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) to[n] = fmaf(value_of(words, k), x[n], to[n]);
        }
    }

    // Entries from `first` to before `last` of a step, in those of its halves where there are some.
    __device__ __forceinline__ void gather_part(const Stage& stage, const Columns (&columns)[2],
                                                const u32 (&before)[2], int first, int last) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (first >= (h + 1) * HALF || last <= h * HALF) continue;
            int at = h * HALF + lane * RUN;
            u32 from = 0xff << min(max(first - at, 0), RUN);
            u32 bits = from & ~(0xff << min(max(last - at, 0), RUN));
            u32 words[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                u32 mask;
                if (WORDS == RUN) {
                    mask = 0 - (bits >> i & 1);
                } else {
                    mask = (bits >> 2 * i & 1) * 0xffff | (bits >> (2 * i + 1) & 1) * 0xffff0000;
                }
                words[i] = stage.values[h][i] & mask;
            }
            gather(words, columns[h], base + SCALE * before[h], sums[h]);
        }
    }

    // Columns passed before entry `at` of a step, doubled.
    __device__ __forceinline__ u32 passed(const Stage& stage, const u32 (&before)[2],
                                          int at) const {
        int h = at / HALF, count = at % RUN;
        u32 word = first_nibbles(h ? stage.codes[1][0] : stage.codes[0][0], count);
        u32 own = (h ? before[1] : before[0]) + 2 * (add_bytes(pair_sums(word), 0) + count);
        return __shfl_sync(ALL_LANES, own, at % HALF / RUN);
    }

    __device__ __forceinline__ void step(const Stage& stage, int position, int stop) {
        Columns columns[2] = {Columns(stage.codes[0][0]), Columns(stage.codes[1][0])};
        u32 total, both = columns[0].width() | columns[1].width() << 16;
        u32 scanned = scan_lanes(both, total);  // at most 256 * 32 in either half
        u32 middle = total & 0xffff, width = middle + (total >> 16);
        u32 before[2] = {scanned & 0xffff, (scanned >> 16) + middle};
        if (from == 0 && row_end - position > STEP && stop - position >= STEP) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                gather(stage.values[h], columns[h], base + SCALE * before[h], sums[h]);
            base += SCALE * width;
            return;
        }
        if (from > 0) base -= SCALE * passed(stage, before, from);
        while (true) {
            int last = min(min(row_end, stop) - position, STEP);
            gather_part(stage, columns, before, from, last);
            bool ends_here = row_end - position <= last;
            if (ends_here) flush();
            if (!ends_here || row_end >= stop) break;
            enter(position + last);
            from = last;
            if (from == STEP) {
                from = 0;
                base = origin;
                return;
            }
            base = origin - SCALE * passed(stage, before, from);
        }
        from = 0;
        base += SCALE * width;
    }
};

// Sums of a CTA's rows, with those of its warps that began within them, to their places.
__device__ __forceinline__ void store_rows(const Parameters& p, int first_row, int rows,
                                           int first_column) {
    Finish finish(Read<Parameters>{p});
    for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS) {
        int row = first_row + i / COLUMNS, n = i % COLUMNS;
        float sum = row_sums[i];
#pragma unroll 4
        for (int warp = 0; warp < WARPS; ++warp) {
            float part = begun_sums[warp * COLUMNS + n];
            if (begun_rows[warp] == row) sum += part;
        }
        if (first_column + n < p.columns) {
            i64 at = (first_column + n) * p.out_vector_stride + row * p.out_row_stride;
            p.out[at] = convert<OutputT>(finish(sum, row));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_macko(const __grid_constant__ Parameters p) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_column = blockIdx.y * COLUMNS;
    int first_row = RANGES ? 0 : blockIdx.x * p.rows_of_cta;
    int last_row = RANGES ? p.rows : min(first_row + p.rows_of_cta, p.rows);
    i64 first = RANGES ? 0 : i64(p.row_ptr[first_row]), last = p.row_ptr[last_row];
    if (SHARED_X) fetch_x(p, first_column);
    if (!RANGES) {
        for (int i = threadIdx.x; i < MOST_ROWS * COLUMNS; i += THREADS) row_sums[i] = 0;
        if (threadIdx.x < WARPS) begun_rows[threadIdx.x] = -1;
    }
    int part = RANGES ? blockIdx.x * WARPS + warp : warp;
    i64 parts = RANGES ? i64(gridDim.x) * WARPS : WARPS;
    i64 unit = first / UNIT, units = (last + UNIT - 1) / UNIT - unit;
    i64 begin = (unit + units * part / parts) * UNIT;
    int stop = int(min((unit + units * (part + 1) / parts) * UNIT, last) - begin);
    if (first == last) stop = 0;
    Stream stream{reinterpret_cast<const u32*>(p.values + begin) + lane * WORDS,
                  p.deltas + begin / RUN + lane, stop - lane * RUN};
    Stage stages[DEPTH] = {};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) stream.fetch(stages[i]);
    Walk walk{p, begin, lane, part, first_row, first_column};
    walk.origin = SHARED_X ? shared_address(shared_x) : 0;
    walk.x_begin = reinterpret_cast<const char*>(p.x + first_column * p.x_stride);
    if (stop > 0) walk.start(first_row, last_row, max(begin, first));
    if constexpr (Config::DEPENDENTS) launch_dependents();
    if (COLUMNS == 1) wait_for_copies();
    __syncthreads();
    for (int position = 0; position < stop;) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (position < stop) {
                walk.step(stages[i], position, stop);
                stream.fetch(stages[i]);
                position += STEP;
            }
        }
    }
    if (stop > 0 && walk.row_end > stop) walk.flush();
    if (RANGES) return;
    __syncthreads();
    store_rows(p, first_row, last_row - first_row, first_column);
}
