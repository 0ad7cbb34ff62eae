// common/chosen.cuh of kernel_sources, without PTX.
#pragma once

inline int chosen(bool first, int x, int y) { return first ? x : y; }
