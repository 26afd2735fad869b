// Products of quantised tiles in vectors of 16 lanes: four products of bytes a lane and step (AVX-512 VNNI).
//
// A lane is a column. Weights are the unsigned operand (8-bit codes + 128, 4-bit codes as they are), activations the signed
// one, their planes of bytes in sums of their own.
#pragma once

#include "quantized_panel.h"

namespace {

// 32 codes from input `at` on: one plane of bytes, or the high bytes and then, a plane further, the low ones.
FORERUN_INLINE void store_codes(const int32_t* whole, const Weight& weight, int8_t* row, long at) {
    long size = padded(weight.k);
    for (long i = 0; i < SUM_GROUP; ++i) {
        int32_t high = (whole[i] + 128) >> 8;
        if (weight.activation_bits == 8) {
            row[at + i] = (int8_t)whole[i];
        } else {
            row[at + i] = (int8_t)high;
            row[size + at + i] = (int8_t)(whole[i] - 256 * high);
        }
    }
}

// One row's sums over all inputs (its columns' integers, the planes put together) to floats.
FORERUN_INLINE void scale_columns(const double* whole, float row_scale, const float* scales, float* y) {
    for (int c = 0; c < QUANTIZED_PANEL; ++c) y[c] = (float)(whole[c] * ((double)row_scale * (double)scales[c]));
}

FORERUN_INLINE vfloat load_half(const uint16_t* at) {
#ifdef __AVX512F__
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#else
    vfloat v;
    for (int i = 0; i < 2; ++i) ((__m256*)&v)[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + i));
    return v;
#endif
}

// One more group of the chain; `whole` are the exact sums of products with code - zero, `sum` that of the activations.
FORERUN_INLINE vfloat next_group(vfloat chain, vint whole, int32_t sum, const uint16_t* scales, bool minima) {
    chain = fma(load_half(scales), __builtin_convertvector(whole, vfloat), chain);
    return minima ? fma(load_half(scales + QUANTIZED_PANEL), splat((float)sum), chain) : chain;
}

#ifndef FORERUN_AMX

constexpr int TILE_ROWS = 12;  // 24 of 32 registers hold sums

FORERUN_INLINE long row_code_bytes(const Weight& weight) { return planes(weight) * padded(weight.k); }

// sums + four products of unsigned bytes of a with signed bytes of b in every lane.
FORERUN_INLINE vint four_products(vint sums, vint a, vint b) {
#ifdef __AVX512VNNI__
    return (vint)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
    for (int i = 0; i < 4; ++i) sums += ((a >> 8 * i) & 255) * ((b << (24 - 8 * i)) >> 24);
    return sums;
#endif
}

template <int ROWS, int PLANES>
FORERUN_INLINE void add_products(vint (&lanes)[ROWS][PLANES], vint weights, const int8_t* x, long size) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < PLANES; ++p) {
            int32_t four;
            memcpy(&four, x + (r * PLANES + p) * size, sizeof four);
            lanes[r][p] = four_products(lanes[r][p], weights, splat_int(four));
        }
}

template <int PLANES>
FORERUN_INLINE vint put_together(const vint (&lanes)[PLANES]) {
    if constexpr (PLANES == 2) return (lanes[0] << 8) + lanes[1];
    return lanes[0];
}

template <int ROWS, int PLANES>
__attribute__((noinline)) void integer_tile(const Weight& weight, const int8_t* x, const int32_t* sums,
                                            const float* row_scales, const char* panel, float* y, Near ahead) {
    long size = padded(weight.k);
    vint lanes[ROWS][PLANES] = {};
    Fetcher fetcher(ahead, size / 4);
    for (long k4 = 0; k4 < size / 4; ++k4) {
        fetcher.next();
        vint weights = *(const vint_at*)(panel + k4 * 64) ^ (int32_t)0x80808080;
        add_products(lanes, weights, x + 4 * k4, size);
    }
    for (int r = 0; r < ROWS; ++r) {
        double excess = 0, whole[QUANTIZED_PANEL];
        for (long i = 0; i < size / SUM_GROUP; ++i) excess += 128.0 * sums[r * (size / SUM_GROUP) + i];
        for (int c = 0; c < QUANTIZED_PANEL; ++c)
            whole[c] = (PLANES == 2 ? 256.0 * lanes[r][0][c] + lanes[r][PLANES - 1][c] : lanes[r][0][c]) - excess;
        scale_columns(whole, row_scales[r], (const float*)(panel + QUANTIZED_PANEL * size), y + r * QUANTIZED_PANEL);
    }
}

template <int ROWS, int PLANES>
__attribute__((noinline)) void group_tile(const Weight& weight, const int8_t* x, const int32_t* sums,
                                          const float* row_scales, const char* panel, float* y, Near ahead) {
    long size = padded(weight.k), groups = groups_of(weight), blocks = weight.group / SUM_GROUP;
    bool four_bits = weight.format == INT4_GROUPS;
    vfloat chain[ROWS] = {};
    Fetcher fetcher(ahead, groups);
    for (long g = 0; g < groups; ++g, panel += group_bytes(weight)) {
        fetcher.next();
        vint lanes[ROWS][PLANES] = {};
        for (long block = 0; block < blocks; ++block) {
            const int8_t* from = x + (g * blocks + block) * SUM_GROUP;
            if (four_bits)
                for (long j = 0; j < 4; ++j) {
                    vint both = *(const vint_at*)(panel + block * 256 + j * 64);
                    add_products(lanes, both & 0x0f0f0f0f, from + 4 * j, size);
                    add_products(lanes, (both >> 4) & 0x0f0f0f0f, from + 16 + 4 * j, size);
                }
            else
                for (long j = 0; j < 8; ++j) {
                    vint weights = *(const vint_at*)(panel + block * 512 + j * 64) ^ (int32_t)0x80808080;
                    add_products(lanes, weights, from + 4 * j, size);
                }
        }
        for (int r = 0; r < ROWS; ++r) {
            int32_t sum = 0;
            for (long block = 0; block < blocks; ++block) sum += sums[r * (size / SUM_GROUP) + g * blocks + block];
            vint whole = put_together(lanes[r]) - (four_bits ? weight.zero : 128) * sum;
            chain[r] = next_group(chain[r], whole, sum, (const uint16_t*)(panel + group_code_bytes(weight)),
                                  weight.minima);
        }
    }
    for (int r = 0; r < ROWS; ++r) store(y + r * QUANTIZED_PANEL, chain[r] * row_scales[r]);
}

template <int ROWS>
FORERUN_INLINE void tile_of(const Linear& job, const char* panel, long row, float* y, Near ahead) {
    const Weight& weight = *job.weight;
    const int8_t* x = job.activations.codes + row * row_code_bytes(weight);
    const int32_t* sums = job.activations.sums + row * (padded(weight.k) / SUM_GROUP);
    const float* scales = job.activations.scales + row;
    if (weight.format == INT8)
        planes(weight) == 2 ? integer_tile<ROWS, 2>(weight, x, sums, scales, panel, y, ahead)
                            : integer_tile<ROWS, 1>(weight, x, sums, scales, panel, y, ahead);
    else
        planes(weight) == 2 ? group_tile<ROWS, 2>(weight, x, sums, scales, panel, y, ahead)
                            : group_tile<ROWS, 1>(weight, x, sums, scales, panel, y, ahead);
}

// y[r][c] = row `row + r` of the activations times column c of the panel.
void quantized_tile(const Linear& job, const char* panel, long row, long rows, float* y, Near ahead) {
#define FORERUN_TILE(R) \
    case R: return tile_of<R>(job, panel, row, y, ahead);
    switch (rows) {
        FORERUN_TILE(1) FORERUN_TILE(2) FORERUN_TILE(3) FORERUN_TILE(4) FORERUN_TILE(5) FORERUN_TILE(6)
        FORERUN_TILE(7) FORERUN_TILE(8) FORERUN_TILE(9) FORERUN_TILE(10) FORERUN_TILE(11) FORERUN_TILE(12)
    }
#undef FORERUN_TILE
}

#endif

}  // namespace
