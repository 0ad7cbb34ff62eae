// common/types.cuh of kernel_sources, without PTX.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct alignas(2) half_t { u16 bits; };
struct alignas(2) bfloat16_t { u16 bits; };

template <class To, class From>
inline To convert(From x) { return static_cast<To>(x); }

template <>
inline float convert<float, half_t>(half_t x) {
    _Float16 value;
    std::memcpy(&value, &x, sizeof(value));
    return value;
}
template <>
inline half_t convert<half_t, float>(float x) {
    _Float16 value = _Float16(x);
    half_t y;
    std::memcpy(&y, &value, sizeof(y));
    return y;
}
template <>
inline float convert<float, bfloat16_t>(bfloat16_t x) { return __uint_as_float(u32(x.bits) << 16); }
template <>
inline bfloat16_t convert<bfloat16_t, float>(float x) {
    u32 bits = __float_as_uint(x);
    return {u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
    T element[N];
};

inline void check_alignment(const void* address, int bytes) {
    if (reinterpret_cast<u64>(address) % bytes) std::abort();
}
template <class T, int N>
inline Vector<T, N> load_vector(const T* address) {
    check_alignment(address, sizeof(T) * N);
    return *reinterpret_cast<const Vector<T, N>*>(address);
}
template <class T, int N>
inline void store_vector(T* address, const Vector<T, N>& value) {
    check_alignment(address, sizeof(T) * N);
    *reinterpret_cast<Vector<T, N>*>(address) = value;
}

template <class T, int N>
inline Vector<T, N> load_shared_in_order(const T* address) { return load_vector<T, N>(address); }
template <class T, int N>
inline Vector<T, N> load_in_order_if(bool exists, const T* address) {
    return exists ? load_vector<T, N>(address) : Vector<T, N>();
}

struct Scalar {
    double value;
    const void* device;
};
template <class T>
inline T read_scalar(const Scalar& scalar, i64 offset) {
    return scalar.device ? static_cast<const T*>(scalar.device)[offset] : T(scalar.value);
}
