// The one inner loop: a block of rows times a panel of columns. Linear layers and both products of attention use it.
//
// Promise: each element of the result is one chain of fused multiply-adds in the order of k, whatever the block, the
// vector width or the instruction set. So a row's bits depend on that row and the weights alone.
#pragma once

#include "simd.h"

namespace {

#if FORERUN_LANES == 16
constexpr int BLOCK_ROWS = 12;  // 24 of 32 registers hold sums
#else
constexpr int BLOCK_ROWS = 6;  // 12 of 16
#endif

// Two vectors of a panel: columns 0 .. LANES - 1 and LANES .. PANEL - 1. In a bf16 panel the columns of the two halves
// alternate, so that a shift and a mask part them without a shuffle.
FORERUN_INLINE void load_pair(const float* at, vfloat& first, vfloat& second) {
    first = load(at);
    second = load(at + LANES);
}

FORERUN_INLINE void load_pair(const uint16_t* at, vfloat& first, vfloat& second) {
    vint both = *(const vint_at*)at;
    first = (vfloat)(both << 16);
    second = (vfloat)(both & (int32_t)0xffff0000);
}

// Where the next panel lies and how far each step of k moves in it, so that it is in the cache when its turn comes.
// Memory is then read while the rows are multiplied, not before: all linear layers of SmolLM2-135M on one Zen 3 core take
// 34 ms instead of 47-60 for 8 rows, and 57 instead of 73-95 for 16 (and the same 20-25 for one).
struct Ahead {
    const char* at;
    long step;
};

// out[r][p * PANEL + c] = sum over k of x[r][k] * panel p [k][c], for ROWS rows and PANELS panels.
template <int ROWS, int PANELS, typename T>
__attribute__((noinline)) void tile(const float* x, long x_stride, const T* w, long w_stride, long k_count, float* out,
                                    long out_stride, Ahead ahead) {
    vfloat sums[ROWS][2 * PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2 * PANELS; ++v) sums[r][v] = vfloat{};
    const float* base[(ROWS + 2) / 3];  // three rows per pointer: base, base + stride, base + 2 * stride
    for (int i = 0; i < (ROWS + 2) / 3; ++i) base[i] = x + 3 * i * x_stride;
    for (long k = 0; k < k_count; ++k) {
        __builtin_prefetch(ahead.at, 0, 2);
        ahead.at += ahead.step;
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            vfloat first, second;
            load_pair(w + p * w_stride + k * PANEL, first, second);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                vfloat value = splat(base[r / 3][r % 3 * x_stride + k]);
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

template <int PANELS, typename T>
FORERUN_INLINE void tile_of(long rows, const float* x, long x_stride, const T* w, long w_stride, long k_count,
                            float* out, long out_stride, Ahead ahead) {
#define FORERUN_TILE(R)                                                                              \
    case R:                                                                                          \
        if constexpr (R <= BLOCK_ROWS && (PANELS == 1 || R <= BLOCK_ROWS / 2))                       \
            tile<R, PANELS, T>(x, x_stride, w, w_stride, k_count, out, out_stride, ahead);             \
        break;
    switch (rows) {
        FORERUN_TILE(1) FORERUN_TILE(2) FORERUN_TILE(3) FORERUN_TILE(4) FORERUN_TILE(5) FORERUN_TILE(6)
        FORERUN_TILE(7) FORERUN_TILE(8) FORERUN_TILE(9) FORERUN_TILE(10) FORERUN_TILE(11) FORERUN_TILE(12)
    }
#undef FORERUN_TILE
}

// Row at which block i begins when `rows` rows are cut into blocks as equal as can be.
FORERUN_INLINE long blocks_of(long rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
FORERUN_INLINE long block_start(long rows, long i) { return rows * i / blocks_of(rows); }

}  // namespace
