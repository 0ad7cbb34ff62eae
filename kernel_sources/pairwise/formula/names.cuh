// What struct Config may name of formula/join.cuh and formula/log_sums.cuh.
#pragma once

struct JoinSums;
struct JoinLogSumExps;
struct JoinMinima;
struct LogSums;
