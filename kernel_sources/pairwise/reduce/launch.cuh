// What reductions on the lanes are launched with, behind a gate or without one.
#pragma once

#include "pairwise/gate.cuh"
#include "pairwise/reduce/parameters.cuh"

struct Launch : BehindGate<Config::GATED>, Parameters {};
