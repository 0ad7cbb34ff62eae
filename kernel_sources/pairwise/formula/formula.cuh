// What every kernel of formulas is launched with, and the words of a formula.
//
// The generated source defines struct Formula and the structs Pointers and Fixed before it includes
// this file (lowering/source.py, lowering/problem.py). A formula has words that are computed once a
// thread (t), a row (r) and a column (c); of a loop over features each group of terms has further
// ones (tf, rf, cf) for each feature:
//   of_thread(t, call, l), of_row(r, t, call, l, row), of_col(c, t, call, l, col)
//   thread_feature(Nth<G>, tf, t, call, l, 0, k), row_feature(...), col_feature(...)
//   term(Nth<I>, t, r, c, tf, rf, cf, call, l, row, col, k)   a summand of sums[I]
//   score(t, r, c, sums, call, l, row, col)
//   unit(t, r, c, tf, rf, cf, call, l, row, col, k)
// T, R and C are the numbers of words without features, T_WIDTH[G] and so on those of a feature. If
// SIZE[G], the features of a group, are known, its words lie behind the others from T_AT[G] on, one
// feature's side by side, and there are T_WORDS in all. OF_PAIR[I] is false of sums that depend on
// less than a pair, which words are computed from.
#pragma once

#include "pairwise/formula/values.cuh"

using AccT = Config::AccT;               // arithmetic: float or double
constexpr bool RANGED = Config::RANGED;  // whether rows have a first and an end column

template <int COUNT>
struct FormulaScalars {
    Scalar scalars[COUNT];
};
template <>
struct FormulaScalars<0> {};

struct Parameters : Pointers, FormulaScalars<Config::SCALARS>, Fixed {};

constexpr int TERMS = Formula::TERMS;
template <int COUNT>
constexpr int AT_LEAST_ONE = COUNT > 0 ? COUNT : 1;
constexpr int SUMS = AT_LEAST_ONE<TERMS>;

// The columns of a row, as it lies in those of a block.
struct Columns {
    int first, last;
};

__device__ __forceinline__ Columns columns_of(const Parameters& call, int row, i64 first,
                                              i64 last) {
    if (RANGED) {
        first = min(max(first, call.ranges[2 * i64(row)]), last);
        last = max(min(last, call.ranges[2 * i64(row) + 1]), first);
    }
    return {int(first), int(last)};
}
