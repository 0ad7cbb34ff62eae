// The names of reducers, which struct Config may have one of.
#pragma once

#include "common/reducer_names.cuh"

struct Nearest;  // topk/nearest.cuh
