// Of common/math.cuh of kernel_sources what epilogues of the tests need.
#pragma once

template <class T>
inline T absolute(T x) { return std::fabs(x); }
template <class T>
inline T maximum(T x, T y) { return x > y || x != x ? x : y; }
template <class T>
inline T minimum(T x, T y) { return -maximum(-x, -y); }
template <class T>
inline T ndtr(T x) { return T(0.5 * std::erfc(-0.7071067811865476 * double(x))); }
