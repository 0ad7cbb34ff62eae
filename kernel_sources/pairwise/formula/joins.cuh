// Ways to put partial results together, for struct Config to name.
#pragma once

struct JoinSums;
struct JoinLogSumExps;
struct JoinMinima;
