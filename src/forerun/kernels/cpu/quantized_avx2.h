// Products of quantised tiles on AVX2: 16-bit activations times weights widened to 16 bits (vpmaddwd), 4 inputs a time.
//
// A register of sums holds 4 columns, each in two lanes (inputs 0, 1 and inputs 2, 3 of every 4).
#pragma once

#include "quantized_panel.h"

namespace {

constexpr int TILE_ROWS = 6;

FORERUN_INLINE long row_code_bytes(const Weight& weight) { return 2 * padded(weight.k); }

FORERUN_INLINE void store_codes(const int32_t* whole, const Weight&, int8_t* row, long at) {
    int16_t* to = (int16_t*)row + at;
    for (long i = 0; i < SUM_GROUP; ++i) to[i] = (int16_t)whole[i];
}

// Two registers of sums += four inputs of a row times two registers of weights. As one piece of assembly, because GCC
// orders a loop of these so that it needs more registers than there are.
FORERUN_INLINE void multiply_add(__m256i (&sums)[2], const int16_t* x, const __m256i (&weights)[2]) {
    __m256i four, product;
    asm volatile("vpbroadcastq %[x], %[four]\n\t"
        "vpmaddwd %[first], %[four], %[product]\n\t"
        "vpaddd %[product], %[sum], %[sum]\n\t"
        "vpmaddwd %[second], %[four], %[four]\n\t"
        "vpaddd %[four], %[other], %[other]"
        : [sum] "+x"(sums[0]), [other] "+x"(sums[1]), [four] "=&x"(four), [product] "=&x"(product)
        : [x] "m"(*(const int16_t(*)[4])x), [first] "x"(weights[0]), [second] "x"(weights[1]));
}

// INT8: exact sums over all of k as doubles, sums[r][c] for the PAIRS * 8 columns that begin at w.
template <int ROWS, int PAIRS>
__attribute__((noinline)) void integer_tile(const int16_t* x, long stride, const int8_t* w, long k4_count, double* sums,
                                            Near ahead) {
    constexpr long SAFE = 256;  // steps of 4 inputs until a lane could overflow: 2 * 32512 * 128 * 256 < 2^31
    const long step = ahead.bytes / k4_count;  // hardly more than a line
    for (long begin = 0; begin < k4_count; begin += SAFE) {
        long end = begin + SAFE < k4_count ? begin + SAFE : k4_count;
        __m256i lanes[ROWS][PAIRS][2] = {};
        for (long k4 = begin; k4 < end; ++k4) {
            __builtin_prefetch(ahead.at, 0, 2);
            ahead.at += step;
#pragma GCC unroll 2
            for (int p = 0; p < PAIRS; ++p) {
                const __m128i* codes = (const __m128i*)(w + k4 * 64 + p * 32);
                __m256i weights[2] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(codes)),
                                      _mm256_cvtepi8_epi16(_mm_loadu_si128(codes + 1))};
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) multiply_add(lanes[r][p], x + r * stride + 4 * k4, weights);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * PAIRS; ++v) {
                __m256i whole = lanes[r][v / 2][v % 2];
                __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(whole));
                __m256d high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(whole, 1));
                __m256d columns = _mm256_permute4x64_pd(_mm256_hadd_pd(low, high), 0xd8);
                double* to = sums + r * QUANTIZED_PANEL + v * 4;
                _mm256_storeu_pd(to, begin ? _mm256_add_pd(_mm256_loadu_pd(to), columns) : columns);
            }
    }
}

// With groups: the chain over the groups as floats, y[r][c] for the PAIRS * 8 columns from `first` on.
template <int ROWS, int PAIRS, bool FOUR_BITS>
__attribute__((noinline)) void group_tile(const Weight& weight, const int16_t* x, long stride, const int32_t* sums,
                                          long sums_stride, const char* panel, long first, float* y, Near ahead) {
    const __m256i low_half = _mm256_set1_epi16(15);
    const long groups = groups_of(weight), blocks = weight.group / 32;
    const long code_bytes = group_code_bytes(weight), record_bytes = group_bytes(weight);
    const bool minima = weight.minima;
    const int32_t zero = weight.zero;
    __m256 chain[ROWS][PAIRS] = {};
    Fetcher fetcher(ahead, groups);
    for (long g = 0; g < groups; ++g, panel += record_bytes) {
        fetcher.next();
        __m256i lanes[ROWS][PAIRS][2] = {};
        const int16_t* activations = x + g * weight.group;
        const char* codes = panel + first * 4;
        for (long block = 0; block < blocks; ++block, activations += 32, codes += FOUR_BITS ? 256 : 512) {
            for (long j = 0; j < (FOUR_BITS ? 4 : 8); ++j) {
#pragma GCC unroll 2
                for (int p = 0; p < PAIRS; ++p) {
                    const __m128i* bytes = (const __m128i*)(codes + j * 64 + p * 32);
                    if constexpr (FOUR_BITS) {
                        __m256i both[2] = {_mm256_cvtepu8_epi16(_mm_loadu_si128(bytes)),
                                           _mm256_cvtepu8_epi16(_mm_loadu_si128(bytes + 1))};
                        __m256i low[2] = {_mm256_and_si256(both[0], low_half), _mm256_and_si256(both[1], low_half)};
#pragma GCC unroll 8
                        for (int r = 0; r < ROWS; ++r)
                            multiply_add(lanes[r][p], activations + r * stride + 4 * j, low);
                        __m256i high[2] = {_mm256_srli_epi16(both[0], 4), _mm256_srli_epi16(both[1], 4)};
#pragma GCC unroll 8
                        for (int r = 0; r < ROWS; ++r)
                            multiply_add(lanes[r][p], activations + r * stride + 16 + 4 * j, high);
                    } else {
                        __m256i weights[2] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
                                              _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
#pragma GCC unroll 8
                        for (int r = 0; r < ROWS; ++r)
                            multiply_add(lanes[r][p], activations + r * stride + 4 * j, weights);
                    }
                }
            }
        }
        const uint16_t* scales = (const uint16_t*)(panel + code_bytes) + first;
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; ++p) {
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(scales + p * 8)));
            __m256 minimum = scale;
            if (minima) minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(scales + QUANTIZED_PANEL + p * 8)));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                int32_t sum = sums[r * sums_stride + g * blocks];
                if (blocks == 2) sum += sums[r * sums_stride + g * blocks + 1];
                __m256i whole = _mm256_hadd_epi32(lanes[r][p][0], lanes[r][p][1]);
                whole = _mm256_permute4x64_epi64(whole, 0xd8);
                if (FOUR_BITS) whole = _mm256_sub_epi32(whole, _mm256_set1_epi32(zero * sum));
                chain[r][p] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(whole), chain[r][p]);
                if (minima) chain[r][p] = _mm256_fmadd_ps(minimum, _mm256_set1_ps((float)sum), chain[r][p]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; ++p) _mm256_storeu_ps(y + r * QUANTIZED_PANEL + first + p * 8, chain[r][p]);
}

template <int ROWS, int PAIRS>
FORERUN_INLINE void tile_of(const Linear& job, const char* panel, long row, float* y, Near ahead) {
    const Weight& weight = *job.weight;
    long stride = padded(weight.k), sums_stride = stride / SUM_GROUP;
    const int16_t* x = (const int16_t*)job.activations.codes + row * stride;
    const int32_t* sums = job.activations.sums + row * sums_stride;
    const float* scales = job.activations.scales + row;
    constexpr long PASSES = 2 / PAIRS;
    if (weight.format == INT8) {
        double whole[ROWS * QUANTIZED_PANEL];
        for (long pass = 0; pass < PASSES; ++pass)
            integer_tile<ROWS, PAIRS>(x, stride, (const int8_t*)panel + pass * PAIRS * 32, stride / 4,
                                        whole + pass * PAIRS * 8, ahead.part(pass, PASSES));
        const float* weight_scales = (const float*)(panel + QUANTIZED_PANEL * stride);
        for (int r = 0; r < ROWS; ++r) {
            __m256d scale = _mm256_set1_pd(scales[r]);
            for (int c = 0; c < QUANTIZED_PANEL; c += 4) {
                __m256d factor = _mm256_mul_pd(scale, _mm256_cvtps_pd(_mm_loadu_ps(weight_scales + c)));
                __m256d product = _mm256_mul_pd(_mm256_loadu_pd(whole + r * QUANTIZED_PANEL + c), factor);
                _mm_storeu_ps(y + r * QUANTIZED_PANEL + c, _mm256_cvtpd_ps(product));
            }
        }
        return;
    }
    for (long pass = 0; pass < PASSES; ++pass) {
        long first = pass * PAIRS * 8;
        if (weight.format == INT4_GROUPS)
            group_tile<ROWS, PAIRS, true>(weight, x, stride, sums, sums_stride, panel, first, y,
                                            ahead.part(pass, PASSES));
        else
            group_tile<ROWS, PAIRS, false>(weight, x, stride, sums, sums_stride, panel, first, y,
                                            ahead.part(pass, PASSES));
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < QUANTIZED_PANEL; ++c) y[r * QUANTIZED_PANEL + c] *= scales[r];
}

// y[r][c] = row `row + r` of the activations times column c of the panel.
void quantized_tile(const Linear& job, const char* panel, long row, long rows, float* y, Near ahead) {
    switch (rows) {
        case 1: return tile_of<1, 2>(job, panel, row, y, ahead);
        case 2: return tile_of<2, 2>(job, panel, row, y, ahead);
        case 3: return tile_of<3, 2>(job, panel, row, y, ahead);
        case 4: return tile_of<4, 1>(job, panel, row, y, ahead);
        case 5: return tile_of<5, 1>(job, panel, row, y, ahead);
        default: return tile_of<6, 1>(job, panel, row, y, ahead);
    }
}

}  // namespace
