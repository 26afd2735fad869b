// How attention reads what the cache holds, and the one inner loop of both its products (queries with keys, weights
// with values). An element type of the cache needs three things: load_pair() (product.h), lay_out_eight() and
// store_features() (here). Codes are laid out as the floats that they stand for, keys and values both.
//
// Promise: each score is one chain of fused multiply-adds in the order of the features, each output in a block one
// chain in the order of the keys, however many queries there are.
#pragma once

#include "operations.h"
#include "product.h"

namespace {

using namespace forerun;

// What the products work on: codes are multiplied with their scales first, so that the rest is that of floats.
template <typename T>
struct Multiplied {
    using type = T;
};
template <>
struct Multiplied<int8_t> {
    using type = float;
};

// Where the positions of one block of a path lie, counted in elements and in scales from the first slot. Positions that
// the path does not have lie where its first one does: nothing of them is ever seen.
struct KeyBlock {
    const Path* path = nullptr;
    long number = -1;
    long offsets[KEY_BLOCK], scales[KEY_BLOCK];

    // False, and nothing changed, if the path has no such block.
    bool find(const Path& wanted, long block, long kv_heads, long size) {
        if (path == &wanted && number == block) return true;
        long first = block * KEY_BLOCK, known = wanted.length - first;
        if (known <= 0) return false;
        path = &wanted, number = block;
        for (long i = 0; i < KEY_BLOCK; ++i) {
            scales[i] = wanted.slots[first + (i < known ? i : 0)] * kv_heads;
            offsets[i] = scales[i] * size;
        }
        return true;
    }
};

// Eight features of PANEL keys as words of four bytes, [feature][word]: eight keys for float, and for bf16 eight pairs
// of the keys i and i + LANES, which load_pair() parts again.
FORERUN_INLINE void lay_out_eight(const float* keys, const long* offsets, float* words, long stride) {
    __m256 rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(keys + offsets[i]);
    transpose_8x8(rows, words, stride);
}

FORERUN_INLINE void lay_out_eight(const uint16_t* keys, const long* offsets, float* words, long stride) {
    auto eight = [&](long i) { return _mm_loadu_si128((const __m128i*)(keys + offsets[i])); };
    __m256i pairs[2][4];  // [features 0-3 or 4-7][keys i and i + 4]
    for (int i = 0; i < 4; ++i) {
        __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(eight(i)), eight(i + 4), 1);
        __m256i second = _mm256_inserti128_si256(_mm256_castsi128_si256(eight(i + LANES)), eight(i + 4 + LANES), 1);
        pairs[0][i] = _mm256_unpacklo_epi16(first, second);
        pairs[1][i] = _mm256_unpackhi_epi16(first, second);
    }
    for (int half = 0; half < 2; ++half) {
        __m256i a = _mm256_unpacklo_epi32(pairs[half][0], pairs[half][1]);
        __m256i b = _mm256_unpackhi_epi32(pairs[half][0], pairs[half][1]);
        __m256i c = _mm256_unpacklo_epi32(pairs[half][2], pairs[half][3]);
        __m256i d = _mm256_unpackhi_epi32(pairs[half][2], pairs[half][3]);
        float* to = words + 4 * half * stride;
        _mm256_storeu_si256((__m256i*)to, _mm256_unpacklo_epi64(a, c));
        _mm256_storeu_si256((__m256i*)(to + stride), _mm256_unpackhi_epi64(a, c));
        _mm256_storeu_si256((__m256i*)(to + 2 * stride), _mm256_unpacklo_epi64(b, d));
        _mm256_storeu_si256((__m256i*)(to + 3 * stride), _mm256_unpackhi_epi64(b, d));
    }
}

// The first `count` keys of a block to [feature][KEY_BLOCK], whole panels of it, so that lanes can be keys.
template <typename T>
void lay_out_keys(const T* keys, const float*, const KeyBlock& block, long count, long size, T* panels) {
    constexpr long WORDS = PANEL * sizeof(T) / sizeof(float);
    for (long first = 0; first < count; first += PANEL)
        for (long word = 0; word < WORDS; word += 8)
            for (long d = 0; d < size; d += 8)
                lay_out_eight(keys + d, block.offsets + first + word, (float*)(panels + d * KEY_BLOCK + first) + word,
                              KEY_BLOCK * sizeof(T) / sizeof(float));
}

// The same of codes: the numbers that they stand for.
inline void lay_out_keys(const int8_t* keys, const float* scales, const KeyBlock& block, long count, long size,
                         float* panels) {
    for (long first = 0; first < (count + PANEL - 1) / PANEL * PANEL; first += 8) {
        __m256 factors[8];
        for (int i = 0; i < 8; ++i) factors[i] = _mm256_set1_ps(scales[block.scales[first + i]]);
        for (long d = 0; d < size; d += 8) {
            __m256 rows[8];
            for (int i = 0; i < 8; ++i)
                rows[i] = _mm256_mul_ps(load_eight(keys + block.offsets[first + i] + d), factors[i]);
            transpose_8x8(rows, panels + d * KEY_BLOCK + first, KEY_BLOCK);
        }
    }
}

// The first `count` values of a block as numbers, one behind the other, with zeros up to the padded size.
inline void lay_out_values(const int8_t* values, const float* scales, const KeyBlock& block, long count, long size,
                           long padded, float* to) {
    for (long i = 0; i < count; ++i, to += padded) {
        __m256 factor = _mm256_set1_ps(scales[block.scales[i]]);
        for (long d = 0; d < size; d += 8)
            _mm256_storeu_ps(to + d, _mm256_mul_ps(load_eight(values + block.offsets[i] + d), factor));
        memset(to + size, 0, (padded - size) * sizeof(float));
    }
}

template <typename T>
void lay_out_values(const T* values, const float*, const KeyBlock& block, long count, long size, long padded, T* to) {
    for (long i = 0; i < count; ++i, to += padded) {
        memcpy(to, values + block.offsets[i], size * sizeof(T));
        memset(to + size, 0, (padded - size) * sizeof(T));
    }
}

// What a product fetches into the cache meanwhile: in step k the memory line lines[k >> shift], counted from `base`.
struct Fetch {
    const char* base;
    const int32_t* lines;
    int shift;

    void step(long k) const { __builtin_prefetch(base + ((long)lines[k >> shift] << 6), 0, 3); }
};

// The memory lines of the block that comes next, keys first, then values, each in the order of addresses. The products
// fetch them one every few of their steps, so that memory is neither idle nor waited for.
class LinesAhead {
public:
    void clear() { count_ = 0; }

    // The first `bytes` (or 512) at each of the block's positions. Values are taken to lie in their lines as keys do.
    template <typename T>
    void find(const T* keys, const T* values, const KeyBlock& block, long bytes) {
        long inside = (uintptr_t)keys % 64, each = (inside + bytes + 63) / 64;
        if (each > MOST) each = MOST;
        keys_ = (const char*)keys - inside;
        values_ = (const char*)values - (uintptr_t)values % 64;
        const __m256i upwards = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for (long i = 0; i < KEY_BLOCK; ++i) {  // what is written too much, the next position writes again
            int32_t line = (block.offsets[i] * (long)sizeof(T) + inside) >> 6;
            _mm256_storeu_si256((__m256i*)(lines_ + i * each), _mm256_add_epi32(_mm256_set1_epi32(line), upwards));
        }
        count_ = KEY_BLOCK * each;
        memcpy(lines_ + count_, lines_, count_ * sizeof(int32_t));
    }

    // To be fetched in the course of so many steps.
    void spread(long steps) {
        next_ = 0, shift_ = 0;
        while (steps >> shift_ > 2 * count_) ++shift_;
    }

    // For the coming `steps` steps.
    Fetch take(long steps) {
        Fetch those = {next_ < count_ ? keys_ : values_, lines_ + next_, shift_};
        next_ += steps >> shift_;
        return those;
    }

    void fetch_rest() {
        for (; next_ < 2 * count_; ++next_) take(0).step(0);
    }

private:
    static constexpr long MOST = 8;  // per position
    int32_t lines_[2 * KEY_BLOCK * MOST + 8] = {};
    const char *keys_ = nullptr, *values_ = nullptr;
    long count_ = 0, next_ = 0;
    int shift_ = 0;
};

// Sums of a panel of value features, as load_pair() parted them, to their places; the first `count` of them.
FORERUN_INLINE void store_features(const float*, float* to, const float* sums, long count) {
    for (long i = 0; i < count; ++i) to[i] = sums[i];
}

FORERUN_INLINE void store_features(const uint16_t*, float* to, const float* sums, long count) {
    for (long i = 0; i < count / 2; ++i) to[2 * i] = sums[i], to[2 * i + 1] = sums[LANES + i];
}

// The rows of the right-hand matrix of a product: keys that were laid out, or values where they lie.
template <typename T>
struct LaidOut {
    const T* at;
    const T* operator()(long k) const { return at + k * KEY_BLOCK; }
};

template <typename T>
struct Scattered {
    const T* at;
    const long* offsets;
    const T* operator()(long k) const { return at + offsets[k]; }
};

// out[r][c] = out[r][c] * factors[r] + sum over k of x[r][k] * row k [c]; without factors the sum alone.
template <int ROWS, int PANELS, typename Matrix>
__attribute__((noinline)) void multiply(const float* x, long x_stride, Matrix matrix, long k_count, float* out,
                                        long out_stride, const float* factors, Fetch fetch) {
    vfloat sums[ROWS][2 * PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2 * PANELS; ++v)
            sums[r][v] = factors ? load(out + r * out_stride + v * LANES) * factors[r] : vfloat{};
    const float* base[(ROWS + 2) / 3];  // three rows per pointer: base, base + stride, base + 2 * stride
    for (int i = 0; i < (ROWS + 2) / 3; ++i) base[i] = x + 3 * i * x_stride;
    for (long k = 0; k < k_count; ++k) {
        fetch.step(k);
        auto row = matrix(k);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            vfloat first, second;
            load_pair(row + p * PANEL, first, second);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const float* at = base[r / 3];
                if (PANELS > 1) asm volatile("" : "+r"(at));  // else GCC keeps what it loaded and lacks registers
                vfloat value = splat(at[r % 3 * x_stride + k]);
                sums[r][2 * p] = fma(value, first, sums[r][2 * p]);
                sums[r][2 * p + 1] = fma(value, second, sums[r][2 * p + 1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2 * PANELS; ++v) store(out + r * out_stride + v * LANES, sums[r][v]);
}

// Panels that so many rows take together: enough sums to hide the latency of an addition, no more than registers hold.
constexpr int panels_of(int rows) {
    if (LANES == 16) return rows <= BLOCK_ROWS / 2 ? 2 : 1;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

template <int ROWS, typename Matrix>
void multiply_panels(const float* x, long x_stride, Matrix matrix, long panels, long k_count, float* out,
                     long out_stride, const float* factors, LinesAhead& ahead) {
    constexpr int TOGETHER = panels_of(ROWS);
    long p = 0;
    for (; p + TOGETHER <= panels; p += TOGETHER, matrix.at += TOGETHER * PANEL, out += TOGETHER * PANEL)
        multiply<ROWS, TOGETHER>(x, x_stride, matrix, k_count, out, out_stride, factors, ahead.take(k_count));
    if constexpr (TOGETHER > 1)
        for (; p < panels; ++p, matrix.at += PANEL, out += PANEL)
            multiply<ROWS, 1>(x, x_stride, matrix, k_count, out, out_stride, factors, ahead.take(k_count));
}

// Steps of k that multiply_all() takes altogether.
inline long steps_of(long rows, long panels, long k_count) {
    long passes = 0;
    for (long i = 0; i < blocks_of(rows); ++i) {
        long together = panels_of(block_start(rows, i + 1) - block_start(rows, i));
        passes += panels / together + panels % together;
    }
    return passes * k_count;
}

// Any number of rows and panels.
template <typename Matrix>
void multiply_all(long rows, const float* x, long x_stride, Matrix matrix, long panels, long k_count, float* out,
                  long out_stride, const float* factors, LinesAhead& ahead) {
    for (long i = 0; i < blocks_of(rows); ++i) {
        long start = block_start(rows, i), count = block_start(rows, i + 1) - start;
        const float* xs = x + start * x_stride;
        float* ys = out + start * out_stride;
        const float* fs = factors ? factors + start : nullptr;
#define FORERUN_ROWS(R)                                                                              \
    case R:                                                                                          \
        if constexpr (R <= BLOCK_ROWS)                                                               \
            multiply_panels<R>(xs, x_stride, matrix, panels, k_count, ys, out_stride, fs, ahead);    \
        break;
        switch (count) {
            FORERUN_ROWS(1) FORERUN_ROWS(2) FORERUN_ROWS(3) FORERUN_ROWS(4) FORERUN_ROWS(5) FORERUN_ROWS(6)
            FORERUN_ROWS(7) FORERUN_ROWS(8) FORERUN_ROWS(9) FORERUN_ROWS(10) FORERUN_ROWS(11) FORERUN_ROWS(12)
        }
#undef FORERUN_ROWS
    }
}

}  // namespace
