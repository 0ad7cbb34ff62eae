// What becomes of a row's values, one after the other: reductions over n, in registers.
//
// A reducer has
//   COLUMNS   values of v that it reads for each n
//   WIDE      whether these are stored in AccT, whatever points are
//   OUTPUTS   values that it writes for each row
//   LINEAR    whether adding x + y is adding x, then y
//   INDEXED   whether it writes the place of its value too
//   GROUPED   whether add_exponentials() takes values of several n and rows at once
//   add(x, n, v)   takes the value of one n; v points to its COLUMNS values of v
//   settle()       ends a run of adds: runs are summed apart and added up, as a chain of n equal
//                  terms may be off by 1.5e-8 n
//   merge(other)   takes what another thread found, after settle()
//   output(c), index()
// and starts empty. A reducer that is INDEXED starts with the place of the first n it may see. No
// value is added for what does not exist: an epilogue makes anything of a zero.
#pragma once

#include "common/approximate.cuh"
#include "common/double_exponential.cuh"
#include "common/math.cuh"

using AccT = Config::AccT;  // arithmetic: float or double

// sum_n x[n] v[n,c] for WIDTH columns c.
template <int WIDTH>
struct Matmul {
    static constexpr int COLUMNS = WIDTH, OUTPUTS = WIDTH;
    static constexpr bool LINEAR = true, INDEXED = false, WIDE = false, GROUPED = false;
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
    static constexpr bool LINEAR = true, INDEXED = false, WIDE = false, GROUPED = false;
    AccT run = 0, total = 0;

    __device__ __forceinline__ RowSum(int = 0) {}
    __device__ __forceinline__ void add(AccT x, int, const AccT*) { run += x; }
    __device__ __forceinline__ void settle() { total = add_chain(total, run); }
    __device__ __forceinline__ void merge(const RowSum& other) { total += other.total; }
    __device__ __forceinline__ AccT output(int) const { return total; }
    __device__ __forceinline__ int index() const { return 0; }
};

// e^x of what is summed at once.
__device__ __forceinline__ float exponential(float x) { return exp2_approximate(x * LOG2_E); }
__device__ __forceinline__ double exponential(double x) { return branchless::exp(x); }

__device__ __forceinline__ float largest_number(float) { return 3.402823466e38f; }
__device__ __forceinline__ double largest_number(double) { return 1.7976931348623157e308; }

// The largest x and a sum of exp(x - largest), in a run and what was before it. The largest stays
// finite, so that the difference of two infinite ones never becomes a NaN.
template <class T>
struct Exponentials {
    T largest = -largest_number(T(0)), run = T(0), total = T(0);

    __device__ __forceinline__ void raise(T to) {
        T scale = exponential(largest - to);
        run *= scale;
        total *= scale;
        largest = to;
    }
};

__device__ __forceinline__ void add_exponential(Exponentials<float>& sum, float x) {
    if (x > sum.largest) sum.raise(fminf(x, largest_number(x)));
    sum.run += exponential(x - sum.largest);
}
// Adds the exponentials of some values of each row, as far as the largest ones that were there are
// near enough: a row's group is worth NEAR of them at most, so that the logarithm of what is summed
// adds 4e-7 to the error. Values far above them come a few times in a row of any length; one branch
// a group, where a comparison and a second exponential a value take as long as the rest. A largest
// whose product is infinite makes the group a NaN, which is not near.
constexpr float NEAR = 256.0f;

template <class R, int COUNT, int ROWS>
__device__ __forceinline__ void add_exponentials(R (&reducers)[ROWS],
                                                 const float (&values)[COUNT][ROWS]) {
    float groups[ROWS];
    bool far = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float shift = reducers[i].sum.largest * LOG2_E;
        groups[i] = shift * 0.0f;
#pragma unroll
        for (int e = 0; e < COUNT; ++e)
            groups[i] += exp2_approximate(multiply_add(values[e][i], LOG2_E, -shift));
        far = far || !(groups[i] <= NEAR);
    }
    if (far) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            auto& sum = reducers[i].sum;
            float top = values[0][i];
#pragma unroll
            for (int e = 1; e < COUNT; ++e) top = fmaxf(top, values[e][i]);
            if (top > sum.largest) sum.raise(fminf(top, largest_number(top)));
            groups[i] = 0.0f;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) groups[i] += exponential(values[e][i] - sum.largest);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) reducers[i].sum.run += groups[i];
}

// What a reducer that is GROUPED takes the exponential of.
template <class R>
__device__ __forceinline__ AccT shifted(AccT x, const AccT* v) {
    if constexpr (R::COLUMNS > 0) return x + v[0];
    else return x;
}

__device__ __forceinline__ float logarithm(float largest, float total) {
    return largest + logf(total);
}

// The high word of a largest x that is infinite, whatever the low one: an infinite sum would be a
// NaN times 0. So x counts as infinite from 1.79769228e308 on.
constexpr int INFINITE = 0x7fefffff;

// One exponential serves a larger x and a smaller one, without a branch, so that several go through
// the pipe side by side: 17 operations of the FP64 lanes.
__device__ __forceinline__ void add_exponential(Exponentials<double>& sum, double x) {
    double above = x - sum.largest, scale = exponential(-absolute(above));
    bool raised = __double2hiint(above) > 0;
    double to = __hiloint2double(min(__double2hiint(x), INFINITE), __double2loint(x));
    double kept = raised ? scale : 1.0;
    sum.run = multiply_add(sum.run, kept, raised ? 1.0 : scale);
    sum.total *= kept;
    sum.largest = raised ? to : sum.largest;
}
// 130 instructions, once a row.
__device__ __noinline__ double logarithm(double largest, double total) {
    bool infinite = __double2hiint(largest) == INFINITE;
    return (infinite ? infinity(0.0) : largest) + log(total);
}

// log sum_n exp(x[n]).
struct LogSumExp {
    static constexpr int COLUMNS = 0, OUTPUTS = 1;
    static constexpr bool LINEAR = false, INDEXED = false, WIDE = false;
    static constexpr bool GROUPED = sizeof(AccT) == 4;
    Exponentials<AccT> sum;

    __device__ __forceinline__ LogSumExp(int = 0) {}
    __device__ __forceinline__ void add(AccT x, int, const AccT*) { add_exponential(sum, x); }
    __device__ __forceinline__ void settle() { sum.total = add_chain(sum.total, sum.run); }

    __device__ __forceinline__ void merge(LogSumExp other) {
        if (other.sum.largest > sum.largest) sum.raise(other.sum.largest);
        other.sum.raise(sum.largest);
        sum.total += other.sum.total;
    }

    __device__ __forceinline__ AccT output(int) const { return logarithm(sum.largest, sum.total); }
    __device__ __forceinline__ int index() const { return 0; }
};

// log sum_n exp(x[n] + v[n]).
struct ShiftedLogSumExp : LogSumExp {
    static constexpr int COLUMNS = 1;
    static constexpr bool WIDE = true;

    __device__ __forceinline__ ShiftedLogSumExp(int = 0) {}
    __device__ __forceinline__ void add(AccT x, int, const AccT* v) {
        add_exponential(sum, x + v[0]);
    }
};

__device__ __forceinline__ bool is_nan(float x) { return x != x; }
// Of a NaN that arithmetic has made quiet, without an operation of the FP64 lanes.
__device__ __forceinline__ bool is_nan(double x) {
    return (__double2hiint(x) & 0x7fffffff) > 0x7ff00000;
}

// The smallest x[n] and the first n that has it; the first NaN if there is one.
struct Minimum {
    static constexpr int COLUMNS = 0, OUTPUTS = 1;
    static constexpr bool LINEAR = false, INDEXED = true, WIDE = false, GROUPED = false;
    AccT smallest = infinity(AccT(0));
    int place;

    __device__ __forceinline__ Minimum(int first = 0) : place(first) {}

    __device__ __forceinline__ void add(AccT x, int n, const AccT*) {
        if (!(x >= smallest) && !is_nan(smallest)) {
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

    __device__ __forceinline__ AccT output(int) const { return smallest; }
    __device__ __forceinline__ int index() const { return place; }
};
