// Elementary functions of values that are summed as soon as they are there.
#pragma once

#include "common/approximate.cuh"
