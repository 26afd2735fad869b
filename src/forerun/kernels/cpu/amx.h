// The tile unit (AMX): eight tiles of up to 16 rows of 64 bytes, and products of two tiles added to a third.
//
// Own inline assembly: in compilers before GCC 13.3 the intrinsics do not say what memory they read and write, so that
// stores in front of them are dropped. With FORERUN_EMULATE_AMX the same interface is plain C++, for tests elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// 0 .. 3 hold sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, long its_rows, long bytes) { rows[tile] = (uint8_t)its_rows, row_bytes[tile] = (uint16_t)bytes; }
};
static_assert(sizeof(TileShapes) == 64, "what ldtilecfg reads");

#ifndef FORERUN_EMULATE_AMX

inline void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* at, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* at, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride), "i"(T) : "memory");
}
// T += A B: signed bytes with signed or unsigned ones, or pairs of bfloat16.
template <int T, int A, int B>
inline void tile_multiply_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}
template <int T, int A, int B>
inline void tile_multiply_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}
template <int T, int A, int B>
inline void tile_multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}

#else

struct Tiles {
    TileShapes shapes;
    int8_t bytes[8][16][64];
};
thread_local Tiles tiles;

inline void tile_configure(const TileShapes& shapes) { tiles.shapes = shapes, memset(tiles.bytes, 0, sizeof tiles.bytes); }
inline void tile_release() { tiles.shapes = TileShapes{}; }

template <int T>
inline void tile_zero() {
    memset(tiles.bytes[T], 0, sizeof tiles.bytes[T]);
}
template <int T>
inline void tile_load(const void* at, long stride) {
    tile_zero<T>();
    for (int r = 0; r < tiles.shapes.rows[T]; ++r)
        memcpy(tiles.bytes[T][r], (const char*)at + r * stride, tiles.shapes.row_bytes[T]);
}
template <int T>
inline void tile_store(void* at, long stride) {
    for (int r = 0; r < tiles.shapes.rows[T]; ++r)
        memcpy((char*)at + r * stride, tiles.bytes[T][r], tiles.shapes.row_bytes[T]);
}
template <int T, int A, int B, typename Element, typename Sum, typename Other = Element, typename Product>
inline void tile_multiply(const Product& product) {
    constexpr int PER_WORD = 4 / sizeof(Element);
    for (int m = 0; m < tiles.shapes.rows[T]; ++m)
        for (int n = 0; n < tiles.shapes.row_bytes[T] / 4; ++n) {
            Sum sum;
            memcpy(&sum, tiles.bytes[T][m] + 4 * n, 4);
            for (int k = 0; k < tiles.shapes.row_bytes[A] / 4; ++k)
                for (int i = 0; i < PER_WORD; ++i) {
                    Element a;
                    Other b;
                    memcpy(&a, tiles.bytes[A][m] + 4 * k + i * sizeof a, sizeof a);
                    memcpy(&b, tiles.bytes[B][k] + 4 * n + i * sizeof b, sizeof b);
                    sum += product(a, b);
                }
            memcpy(tiles.bytes[T][m] + 4 * n, &sum, 4);
        }
}
template <int T, int A, int B>
inline void tile_multiply_signed() {
    tile_multiply<T, A, B, int8_t, int32_t>([](int a, int b) { return a * b; });
}
template <int T, int A, int B>
inline void tile_multiply_unsigned() {
    tile_multiply<T, A, B, int8_t, int32_t, uint8_t>([](int a, int b) { return a * b; });
}
template <int T, int A, int B>
inline void tile_multiply_bf16() {
    tile_multiply<T, A, B, uint16_t, float>([](uint16_t a, uint16_t b) {
        uint32_t words[] = {(uint32_t)a << 16, (uint32_t)b << 16};
        float x, y;
        memcpy(&x, words, 4), memcpy(&y, words + 1, 4);
        return x * y;
    });
}

#endif

}  // namespace
