// Linear layers with weights in float32 or bfloat16: panels of columns, and the loops over them.
#pragma once

#include "operations.h"
#include "product.h"

namespace {

using namespace forerun;

FORERUN_INLINE __m256 words(const float* at, const float*) { return at ? _mm256_loadu_ps(at) : _mm256_setzero_ps(); }

FORERUN_INLINE __m256 words(const uint16_t* low, const uint16_t* high) {
    __m128i a = low ? _mm_loadu_si128((const __m128i*)low) : _mm_setzero_si128();
    __m128i b = high ? _mm_loadu_si128((const __m128i*)high) : _mm_setzero_si128();
    return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)));
}

// A panel [k][PANEL] of the columns `first` and following, which are rows of the weight; zeros past the n-th. Eight steps
// of k at a time, as squares of eight by eight words: a word is a float, or the bf16 pair that load_pair() parts again.
template <typename T>
void pack_panel(const T* weight, long n, long k_count, long first, T* panel) {
    constexpr long WORDS = PANEL * sizeof(T) / 4;
    auto row = [&](long column, long k) { return first + column < n ? weight + (first + column) * k_count + k : nullptr; };
    long k = 0;
    for (; k + 8 <= k_count; k += 8)
        for (long word = 0; word < WORDS; word += 8) {
            __m256 eight[8];
            for (long i = 0; i < 8; ++i) eight[i] = words(row(word + i, k), row(word + i + LANES, k));
            transpose_8x8(eight, (float*)(panel + k * PANEL) + word, WORDS);
        }
    for (; k < k_count; ++k)
        for (long c = 0; c < PANEL; ++c) {
            const T* at = row(c, k);
            panel[k * PANEL + (sizeof(T) == 2 ? c % LANES * 2 + c / LANES : c)] = at ? *at : 0;
        }
}

void pack_float(const Source& from, const Weight& weight, long chunk) {
    long n = weight.n, k = weight.k;
    for (long first = chunk * CHUNK_COLUMNS; first < n && first < (chunk + 1) * CHUNK_COLUMNS; first += PANEL)
        if (weight.format == BFLOAT16)
            pack_panel((const uint16_t*)from.values, n, k, first, (uint16_t*)weight.values + first * k);
        else
            pack_panel((const float*)from.values, n, k, first, (float*)weight.values + first * k);
}

long float_bytes(const Weight& weight) {
    return (weight.n + PANEL - 1) / PANEL * PANEL * weight.k * (weight.format == BFLOAT16 ? 2 : 4);
}

// From the sums of a block of rows to y: bias, residual, soft cap, in this order.
void finish(const Linear& job, const float* sums, long stride, long row, long rows, long column, long columns) {
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < columns; c += LANES) {
            long at = (row + r) * job.weight->n + column + c, count = columns - c;
            vfloat v = load(sums + r * stride + c);
            if (job.bias) v += load_part(job.bias + column + c, count);
            if (job.residual) v += load_part(job.residual + at, count);
            if (job.softcap != 0) v = hyperbolic_tangent(v / job.softcap) * job.softcap;
            store_part(job.y + at, v, count);
        }
    }
}

// Rows that share the second-level cache with the panels of a chunk.
constexpr long NEAR_ROWS = 4 * BLOCK_ROWS;
constexpr long CHUNK_PANELS = CHUNK_COLUMNS / PANEL;

template <int PANELS, typename T>
void linear_panels(const Linear& job, long panel, long start, long rows, const T* ahead, long pass, long passes) {
    float sums[BLOCK_ROWS * PANELS * PANEL];
    long n = job.weight->n, k = job.weight->k;
    const T* w = (const T*)job.weight->values + panel * PANEL * k;
    long column = panel * PANEL, columns = n - column < PANELS * PANEL ? n - column : PANELS * PANEL;
    long bytes = CHUNK_COLUMNS * sizeof(T);
    for (long i = 0; i < blocks_of(rows); ++i, ++pass) {
        long row = start + block_start(rows, i), count = start + block_start(rows, i + 1) - row;
        Ahead next = {(const char*)ahead + pass * (bytes * k / passes), bytes / passes};
        tile_of<PANELS>(count, job.x + row * k, k, w, PANEL * k, k, sums, PANELS * PANEL, next);
        finish(job, sums, PANELS * PANEL, row, count, column, columns);
    }
}

template <typename T>
void linear_chunk(const Linear& job, long chunk) {
    long panels = (job.weight->n + PANEL - 1) / PANEL;
    long first = chunk * CHUNK_PANELS, last = first + CHUNK_PANELS < panels ? first + CHUNK_PANELS : panels;
    const T* ahead = (const T*)job.weight->values + last * PANEL * job.weight->k;
    // Two panels together, while the registers last (with three bf16 rows on AVX2 they do not: 2x slower).
    constexpr long PAIRED_ROWS = LANES == 8 && sizeof(T) == 2 ? 2 : BLOCK_ROWS / 2;
    if (CHUNK_PANELS == 2 && last - first == 2 && job.rows <= PAIRED_ROWS)
        return linear_panels<CHUNK_PANELS, T>(job, first, 0, job.rows, ahead, 0, 1);
    for (long start = 0; start < job.rows; start += NEAR_ROWS) {
        long rows = job.rows - start < NEAR_ROWS ? job.rows - start : NEAR_ROWS;
        long passes = blocks_of(rows) * (last - first);
        for (long panel = first; panel < last; ++panel)
            linear_panels<1, T>(job, panel, start, rows, ahead, (panel - first) * blocks_of(rows), passes);
    }
}

}  // namespace
