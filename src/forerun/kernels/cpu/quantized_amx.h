// Products of tiles on AMX: quantised weights, and bfloat16 ones with activations as two planes of bfloat16.
//
// The planes of a row are rows of a tile, one below the other, so that 8 rows fill a tile of activations; two such tiles
// share every tile of weights.
#pragma once

#include "amx.h"
#include "quantized_wide.h"

namespace {

constexpr int TILE_ROWS = 16;

// Of one row of activations in memory: a plane of codes, or of bfloat16.
FORERUN_INLINE long plane_bytes(const Weight& weight) { return padded(weight.k) * (weight.format == BFLOAT16 ? 2 : 1); }
FORERUN_INLINE long row_planes(const Weight& weight) { return weight.format == BFLOAT16 ? 2 : planes(weight); }

FORERUN_INLINE long row_code_bytes(const Weight& weight) { return row_planes(weight) * plane_bytes(weight); }

// bfloat16 panels are [padded k / 2][column][2]: a tile is 32 inputs of 16 columns.
void pack_pairs(const Source& from, const Weight& weight, long chunk) {
    long bytes = QUANTIZED_PANEL * plane_bytes(weight);
    for (long first = chunk * CHUNK_COLUMNS; first < weight.n && first < (chunk + 1) * CHUNK_COLUMNS;
         first += QUANTIZED_PANEL) {
        uint16_t* panel = (uint16_t*)((char*)weight.values + first / QUANTIZED_PANEL * bytes);
        memset(panel, 0, bytes);
        for (long c = 0; c < QUANTIZED_PANEL && first + c < weight.n; ++c) {
            const uint16_t* row = (const uint16_t*)from.values + (first + c) * weight.k;
            for (long k = 0; k < weight.k; ++k) panel[k / 2 * 2 * QUANTIZED_PANEL + 2 * c + k % 2] = row[k];
        }
    }
}

// A row of floats as a sum of two bfloat16 numbers: the upper half of its bits, and what that leaves out.
void encode_pairs(const Weight& weight, const float* x, const Activations& to, long row) {
    long size = padded(weight.k);
    uint16_t* high = (uint16_t*)(to.codes + row * 2 * plane_bytes(weight));
    memset(high, 0, 2 * plane_bytes(weight));
    for (long i = 0; i < weight.k; i += LANES) {
        vfloat v = load_part(x + i, weight.k - i);
        vfloat upper = (vfloat)((vint)v & (int32_t)0xffff0000);
        vfloat rest = v - upper;
        rest = (vfloat)((vint)rest & (rest == rest));  // infinity less itself
        store_part(high + i, upper, weight.k - i);
        store_part(high + size + i, rest, weight.k - i);
    }
}

// The tiles of up to TILE_ROWS rows against one panel.
struct TileJob {
    const char* activations;
    long plane;  // bytes from one row of a tile of activations to the next
    long rows[2];  // of the two tiles of activations (the second may have none)

    const char* second() const { return activations + rows[0] * plane; }

    void configure(long step_bytes) const {
        TileShapes shapes;
        for (int i = 0; i < 2; ++i) {
            shapes.set(i, rows[i] ? rows[i] : 1, 64);
            shapes.set(4 + i, rows[i] ? rows[i] : 1, step_bytes);
        }
        shapes.set(6, step_bytes / 4, 64);
        tile_configure(shapes);
    }
};

enum class Multiply { SIGNED, UNSIGNED, BF16 };

template <Multiply KIND, int T, int A>
FORERUN_INLINE void multiply() {
    if constexpr (KIND == Multiply::SIGNED) tile_multiply_signed<T, A, 6>();
    if constexpr (KIND == Multiply::UNSIGNED) tile_multiply_unsigned<T, A, 6>();
    if constexpr (KIND == Multiply::BF16) tile_multiply_bf16<T, A, 6>();
}

// One step of k for both tiles: weights [step / 4][16][4], activations `offset` bytes into their rows.
template <Multiply KIND>
FORERUN_INLINE void tile_step(const TileJob& job, const void* weights, long offset) {
    tile_load<6>(weights, 64);
    tile_load<4>(job.activations + offset, job.plane);
    multiply<KIND, 0, 4>();
    if (!job.rows[1]) return;
    tile_load<5>(job.second() + offset, job.plane);
    multiply<KIND, 1, 5>();
}

FORERUN_INLINE void tiles_zero() {
    tile_zero<0>();
    tile_zero<1>();
}

// Rows of sums: [planes of all rows][16].
FORERUN_INLINE void tiles_store(const TileJob& job, void* sums) {
    tile_store<0>(sums, 64);
    if (job.rows[1]) tile_store<1>((char*)sums + job.rows[0] * 64, 64);
}

template <Multiply KIND>
void whole_rows(const TileJob& job, const char* panel, Near ahead, void* sums) {
    job.configure(64);
    tiles_zero();
    Fetcher fetcher(ahead, job.plane / 64);
    for (long step = 0; step < job.plane / 64; ++step) {
        fetcher.next();
        tile_step<KIND>(job, panel + step * 1024, step * 64);
    }
    tiles_store(job, sums);
}

void integer_rows(const Linear& linear, const TileJob& job, const char* panel, long row, long rows, float* y,
                  Near ahead) {
    alignas(64) int32_t sums[2 * TILE_ROWS][QUANTIZED_PANEL];
    whole_rows<Multiply::SIGNED>(job, panel, ahead, sums);
    const float* scales = (const float*)(panel + QUANTIZED_PANEL * job.plane);
    long count = planes(*linear.weight);
    for (long r = 0; r < rows; ++r) {
        double whole[QUANTIZED_PANEL];
        for (int c = 0; c < QUANTIZED_PANEL; ++c)
            whole[c] = count == 2 ? 256.0 * sums[2 * r][c] + sums[2 * r + 1][c] : sums[r][c];
        scale_columns(whole, linear.activations.scales[row + r], scales, y + r * QUANTIZED_PANEL);
    }
}

void pair_rows(const TileJob& job, const char* panel, long rows, float* y, Near ahead) {
    alignas(64) float sums[2 * TILE_ROWS][QUANTIZED_PANEL];
    whole_rows<Multiply::BF16>(job, panel, ahead, sums);
    for (long r = 0; r < rows; ++r)
        store(y + r * QUANTIZED_PANEL, load(sums[2 * r]) + load(sums[2 * r + 1]));
}

void group_rows(const Linear& linear, const TileJob& job, const char* panel, long row, long rows, float* y, Near ahead) {
    const Weight& weight = *linear.weight;
    long groups = groups_of(weight), blocks = weight.group / SUM_GROUP, count = planes(weight);
    long sums_stride = padded(weight.k) / SUM_GROUP;
    alignas(64) int32_t sums[2 * TILE_ROWS][QUANTIZED_PANEL];
    alignas(64) uint8_t unpacked[16 * 64];
    vfloat chain[TILE_ROWS] = {};
    job.configure(weight.group);
    Fetcher fetcher(ahead, groups);
    for (long g = 0; g < groups; ++g, panel += group_bytes(weight)) {
        fetcher.next();
        tiles_zero();
        if (weight.format == INT4_GROUPS) {
            for (long i = 0; i < blocks * 4; ++i) {
                vint both = *(const vint_at*)(panel + i * 64);
                *(vint_at*)(unpacked + (i / 4 * 8 + i % 4) * 64) = both & 0x0f0f0f0f;
                *(vint_at*)(unpacked + (i / 4 * 8 + i % 4 + 4) * 64) = (both >> 4) & 0x0f0f0f0f;
            }
            tile_step<Multiply::UNSIGNED>(job, unpacked, g * weight.group);
        } else {
            tile_step<Multiply::SIGNED>(job, panel, g * weight.group);
        }
        tiles_store(job, sums);
        for (long r = 0; r < rows; ++r) {
            const int32_t* row_sums = linear.activations.sums + (row + r) * sums_stride + g * blocks;
            int32_t sum = row_sums[0] + (blocks == 2 ? row_sums[1] : 0);
            vint whole = *(const vint_at*)sums[r * count];
            if (count == 2) whole = (whole << 8) + *(const vint_at*)sums[2 * r + 1];
            chain[r] = next_group(chain[r], whole - weight.zero * sum, sum,
                                  (const uint16_t*)(panel + group_code_bytes(weight)), weight.minima);
        }
    }
    for (long r = 0; r < rows; ++r) store(y + r * QUANTIZED_PANEL, chain[r] * linear.activations.scales[row + r]);
}

// y[r][c] = row `row + r` of the activations times column c of the panel.
void quantized_tile(const Linear& job, const char* panel, long row, long rows, float* y, Near ahead) {
    const Weight& weight = *job.weight;
    long tile_rows = rows * row_planes(weight), plane = plane_bytes(weight);
    TileJob tile = {(const char*)job.activations.codes + row * row_planes(weight) * plane, plane,
                    {tile_rows < 16 ? tile_rows : 16, tile_rows < 16 ? 0 : tile_rows - 16}};
    if (weight.format == BFLOAT16)
        pair_rows(tile, panel, rows, y, ahead);
    else if (weight.format == INT8)
        integer_rows(job, tile, panel, row, rows, y, ahead);
    else
        group_rows(job, tile, panel, row, rows, y, ahead);
    tile_release();
}

}  // namespace
