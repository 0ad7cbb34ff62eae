// The names of reducers, which struct Config may have one of: see common/reducers.cuh.
#pragma once

template <int WIDTH>
struct Matmul;
struct RowSum;
struct LogSumExp;
struct ShiftedLogSumExp;
struct Minimum;
