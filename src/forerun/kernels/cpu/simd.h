// Vectors of LANES floats, and the elementary functions on them. Included by the files that are compiled once per
// instruction set; nothing here may be seen by code that runs on every machine.
//
// GCC/Clang vector types carry the arithmetic, so that one source serves AVX2 (8 lanes) and AVX-512 (16 lanes). Only a
// fused multiply-add is an intrinsic: contraction is off (-ffp-contract=off), so what is fused is what says so.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define FORERUN_INLINE static inline __attribute__((always_inline))

namespace {

#ifndef FORERUN_LANES
#ifdef __AVX512F__
#define FORERUN_LANES 16
#else
#define FORERUN_LANES 8
#endif
#endif

constexpr int LANES = FORERUN_LANES;
constexpr int PANEL = 2 * LANES;  // columns of a weight panel: two vectors

typedef float vfloat __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t vint __attribute__((vector_size(LANES * 4), may_alias));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2), may_alias));
typedef int8_t vbyte __attribute__((vector_size(LANES), may_alias));
typedef float vfloat_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // at any address
typedef int32_t vint_at __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t vhalf_at __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t vbyte_at __attribute__((vector_size(LANES), aligned(1), may_alias));

FORERUN_INLINE vfloat load(const float* at) { return *(const vfloat_at*)at; }
FORERUN_INLINE void store(float* at, vfloat v) { *(vfloat_at*)at = v; }

FORERUN_INLINE vfloat splat(float value) {
#if FORERUN_LANES == 8
    return (vfloat)_mm256_set1_ps(value);
#elif defined(__AVX512F__)
    return (vfloat)_mm512_set1_ps(value);
#else
    vfloat v;
    for (int i = 0; i < LANES; ++i) v[i] = value;
    return v;
#endif
}

FORERUN_INLINE vint splat_int(int32_t value) { return value - vint{}; }

// a * b + c, rounded once.
FORERUN_INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if FORERUN_LANES == 8
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__AVX512F__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; ++i) x[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&a, x, sizeof x);
    return a;
#endif
}

// bfloat16, in natural order.
FORERUN_INLINE vfloat load(const uint16_t* at) {
    return (vfloat)(__builtin_convertvector(*(const vhalf_at*)at, vint) << 16);
}

// Nearest even; NaN stays NaN.
FORERUN_INLINE void store(uint16_t* at, vfloat v) {
    vint bits = (vint)v;
    vint rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vint nan = v != v;
    rounded = (rounded & ~nan) | ((bits | 0x400000) & nan);
    *(vhalf_at*)at = __builtin_convertvector(rounded >> 16, vhalf);
}

// Integers that fit.
FORERUN_INLINE void store(int8_t* at, vint v) { *(vbyte_at*)at = __builtin_convertvector(v, vbyte); }

// The first `count` values (0 < count <= LANES), the rest zero; and the reverse.
template <typename T>
FORERUN_INLINE vfloat load_part(const T* at, long count) {
    if (count >= LANES) return load(at);
    T buffer[LANES] = {};
    memcpy(buffer, at, count * sizeof(T));
    return load(buffer);
}

template <typename T, typename Vector>
FORERUN_INLINE void store_part(T* at, Vector v, long count) {
    if (count >= LANES) return store(at, v);
    T buffer[LANES];
    store(buffer, v);
    memcpy(at, buffer, count * sizeof(T));
}

// Rows of eight to columns of eight: out[i * stride + j] = in[j][i]. And what fills the rows.
FORERUN_INLINE void transpose_8x8(const __m256 (&in)[8], float* out, long stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

FORERUN_INLINE __m256 load_eight(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
}

FORERUN_INLINE vfloat larger(vfloat a, vfloat b) { return a > b ? a : b; }
FORERUN_INLINE vfloat smaller(vfloat a, vfloat b) { return a < b ? a : b; }

// Over the lanes, always in the same tree: of the upper and the lower half, until one is left.
FORERUN_INLINE __m256 eight_of(vfloat v, int half) {
    __m256 halves[LANES / 8];
    memcpy(halves, &v, sizeof v);
    return halves[half];
}

FORERUN_INLINE float sum(vfloat v) {
    __m256 eight = eight_of(v, 0);
    if (LANES == 16) eight = _mm256_add_ps(eight, eight_of(v, LANES / 8 - 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return two[0] + two[1];
}

FORERUN_INLINE float largest(vfloat v) {
    __m256 eight = eight_of(v, 0);
    if (LANES == 16) eight = _mm256_max_ps(eight, eight_of(v, LANES / 8 - 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
}

// e^x within 1 ulp or so; 0 below the smallest normal number (so also for -inf), the largest finite scale above 88.7.
// x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r, and n added to the exponent.
FORERUN_INLINE vfloat exponential(vfloat x) {
    const vfloat tiny = splat(-87.33654f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vint underflow = x < tiny;
    x = smaller(larger(x, tiny), splat(88.72283f));
    vfloat shifted = fma(x, splat(1.44269504f), magic);
    vfloat n = shifted - magic;
    vfloat r = fma(n, splat(-0.693145752f), x);
    r = fma(n, splat(-1.42860677e-6f), r);
    vfloat p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p * r, r, r) + 1.0f;
    // n may be 128, whose power is not a float: half of the way twice.
    vint whole = (vint)shifted - (vint)magic, half = whole >> 1;
    vfloat result = p * (vfloat)((half + 127) << 23) * (vfloat)((whole - half + 127) << 23);
    return (vfloat)((vint)result & ~underflow);
}

// Small arguments by a polynomial in x^2 (Cephes' tanhf), others by the exponential.
FORERUN_INLINE vfloat hyperbolic_tangent(vfloat x) {
    vfloat magnitude = (vfloat)((vint)x & 0x7fffffff), square = x * x;
    vfloat p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    vfloat near = fma(p * square, x, x);
    vfloat far = 1.0f - 2.0f / (exponential(magnitude + magnitude) + 1.0f);
    far = (vfloat)((vint)far | ((vint)x & (int32_t)0x80000000));
    return magnitude < splat(0.625f) ? near : far;
}

}  // namespace
