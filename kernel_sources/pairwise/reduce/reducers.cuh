// What becomes of a row's values, one after the other: reductions over n, in registers.
//
// A reducer has
//   COLUMNS   values of v that it reads for each n
//   OUTPUTS   values that it writes for each row
//   LINEAR    whether adding x + y is adding x, then y
//   INDEXED   whether it writes the place of its value too
//   add(x, n, v)   takes the value of one n; v points to its COLUMNS values of v
//   settle()       ends a run of adds: runs are summed apart and added up, as a chain of n equal
//                  terms may be off by 1.5e-8 n
//   merge(other)   takes what another thread found, after settle()
//   output(c), index()
// and starts empty. All are of floats but those of sums, which are of AccT. A reducer that is
// INDEXED starts with the place of the first n it may see. No value is added for what does not
// exist: an epilogue makes anything of a zero.
#pragma once

#include "pairwise/reduce/math.cuh"

// sum_n x[n] v[n,c] for WIDTH columns c.
template <int WIDTH>
struct Matmul {
    static constexpr int COLUMNS = WIDTH, OUTPUTS = WIDTH;
    static constexpr bool LINEAR = true, INDEXED = false;
    AccT run[WIDTH] = {}, total[WIDTH] = {};

    __device__ __forceinline__ Matmul(int = 0) {}

    __device__ __forceinline__ void add(AccT x, int, const AccT* v) {
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) run[c] = multiply_add(x, v[c], run[c]);
    }

    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) total[c] = add_chain(total[c], run[c]);
    }

    __device__ __forceinline__ void merge(const Matmul& other) {
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) total[c] += other.total[c];
    }

    __device__ __forceinline__ AccT output(int c) const { return total[c]; }
    __device__ __forceinline__ int index() const { return 0; }
};

// sum_n x[n].
struct RowSum {
    static constexpr int COLUMNS = 0, OUTPUTS = 1;
    static constexpr bool LINEAR = true, INDEXED = false;
    AccT run = 0, total = 0;

    __device__ __forceinline__ RowSum(int = 0) {}
    __device__ __forceinline__ void add(AccT x, int, const AccT*) { run += x; }
    __device__ __forceinline__ void settle() { total = add_chain(total, run); }
    __device__ __forceinline__ void merge(const RowSum& other) { total += other.total; }
    __device__ __forceinline__ AccT output(int) const { return total; }
    __device__ __forceinline__ int index() const { return 0; }
};

// log sum_n exp(x[n]) as the largest x and a sum of exp(x - largest). The largest stays finite, so
// that the difference of two infinite ones never becomes a NaN.
struct LogSumExp {
    static constexpr int COLUMNS = 0, OUTPUTS = 1;
    static constexpr bool LINEAR = false, INDEXED = false;
    static constexpr float LARGEST = 3.402823466e38f;
    float largest = -LARGEST, run = 0.0f, total = 0.0f;

    __device__ __forceinline__ LogSumExp(int = 0) {}

    __device__ __forceinline__ void raise(float to) {
        float scale = exp2_approximate((largest - to) * LOG2_E);
        run *= scale;
        total *= scale;
        largest = to;
    }

    __device__ __forceinline__ void add(float x, int, const float*) {
        if (x > largest) raise(fminf(x, LARGEST));
        run += exp2_approximate((x - largest) * LOG2_E);
    }

    __device__ __forceinline__ void settle() { total = add_chain(total, run); }

    __device__ __forceinline__ void merge(LogSumExp other) {
        if (other.largest > largest) raise(other.largest);
        other.raise(largest);
        total += other.total;
    }

    __device__ __forceinline__ float output(int) const { return largest + logf(total); }
    __device__ __forceinline__ int index() const { return 0; }
};

// The smallest x[n] and the first n that has it; the first NaN if there is one.
struct Minimum {
    static constexpr int COLUMNS = 0, OUTPUTS = 1;
    static constexpr bool LINEAR = false, INDEXED = true;
    float smallest = infinity(0.0f);
    int place;

    __device__ __forceinline__ Minimum(int first = 0) : place(first) {}

    __device__ __forceinline__ void add(float x, int n, const float*) {
        if (!(x >= smallest) && smallest == smallest) {
            smallest = x;
            place = n;
        }
    }

    __device__ __forceinline__ void settle() {}

    __device__ __forceinline__ void merge(const Minimum& other) {
        bool ours = smallest != smallest, theirs = other.smallest != other.smallest;
        bool same = smallest == other.smallest || (ours && theirs);
        bool better = theirs ? !ours : other.smallest < smallest;
        if (same ? other.place < place : better) *this = other;
    }

    __device__ __forceinline__ float output(int) const { return smallest; }
    __device__ __forceinline__ int index() const { return place; }
};
