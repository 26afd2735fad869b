// Panels of quantised weights: how they lie in memory, the same for every instruction set, and packing them.
#pragma once

#include "linear.h"

namespace {

// A panel is a record of QUANTIZED_PANEL columns:
//   BFLOAT16 (on AMX alone): pairs [padded k / 2][column][2].
//   INT8: codes [padded k / 4][column][4], then the columns' scales (float32).
//   with groups, for each group: the codes of its inputs, then the columns' scales, then their minima, if any (float16).
// Codes of a group are [inputs / 4][column][4] for 8 bits; for 4 bits each 32 inputs are [4][column][4] bytes, whose low
// halves are the inputs 0 .. 15 and whose high halves are the inputs 16 .. 31.
constexpr int QUANTIZED_PANEL = 16;
constexpr long K_STEP = 64;  // k is padded to this with zeros: a row of a tile
constexpr long SUM_GROUP = 32;

FORERUN_INLINE long padded(long k) { return (k + K_STEP - 1) / K_STEP * K_STEP; }
FORERUN_INLINE long planes(const Weight& weight) { return weight.activation_bits / 8; }
FORERUN_INLINE long groups_of(const Weight& weight) { return weight.k / weight.group; }

FORERUN_INLINE long group_code_bytes(const Weight& weight) {
    return QUANTIZED_PANEL * weight.group / (weight.format == INT4_GROUPS ? 2 : 1);
}
FORERUN_INLINE long group_bytes(const Weight& weight) {
    return group_code_bytes(weight) + QUANTIZED_PANEL * 2 * (weight.minima ? 2 : 1);
}
FORERUN_INLINE long panel_bytes(const Weight& weight) {
    if (weight.format == BFLOAT16) return QUANTIZED_PANEL * padded(weight.k) * 2;
    if (weight.format == INT8) return QUANTIZED_PANEL * (padded(weight.k) + 4);
    return groups_of(weight) * group_bytes(weight);
}

// Memory that will be wanted soon, a share of which is fetched in each of the steps of a computation.
struct Near {
    const char* at;
    long bytes;

    Near part(long index, long parts) const { return {at + bytes / parts * index, bytes / parts}; }
};

class Fetcher {
public:
    __attribute__((always_inline)) Fetcher(Near near, long steps) : at_(near.at), step_(near.bytes / steps), lines_((step_ + 63) / 64) {}
    __attribute__((always_inline)) void next() {
        for (long line = 0; line < lines_; ++line) __builtin_prefetch(at_ + line * 64, 0, 2);
        at_ += step_;
    }

private:
    const char* at_;
    long step_, lines_;
};

long quantized_bytes(const Weight& weight) {
    return (weight.n + QUANTIZED_PANEL - 1) / QUANTIZED_PANEL * panel_bytes(weight);
}

void pack_codes(const uint8_t* codes, const Weight& weight, long column, long k_first, long count, uint8_t* to) {
    const uint8_t* row = codes + column * weight.k;
    long lane = column % QUANTIZED_PANEL * 4;
    for (long i = 0; i < count; ++i) {
        uint8_t code = k_first + i < weight.k ? row[k_first + i] : 0;
        if (weight.format == INT4_GROUPS)
            to[i / 32 * 256 + i % 16 / 4 * 64 + lane + i % 4] |= code << (i % 32 < 16 ? 0 : 4);
        else
            to[i / 4 * 64 + lane + i % 4] = code;
    }
}

void pack_quantized(const Source& from, const Weight& weight, long chunk) {
    long bytes = panel_bytes(weight);
    for (long first = chunk * CHUNK_COLUMNS; first < weight.n && first < (chunk + 1) * CHUNK_COLUMNS;
         first += QUANTIZED_PANEL) {
        uint8_t* panel = (uint8_t*)weight.values + first / QUANTIZED_PANEL * bytes;
        memset(panel, 0, bytes);
        long columns = weight.n - first < QUANTIZED_PANEL ? weight.n - first : QUANTIZED_PANEL;
        for (long c = 0; c < columns; ++c) {
            const uint8_t* codes = (const uint8_t*)from.values;
            if (weight.format == INT8) {
                pack_codes(codes, weight, first + c, 0, weight.k, panel);
                ((float*)(panel + QUANTIZED_PANEL * padded(weight.k)))[c] = ((const float*)from.scales)[first + c];
                continue;
            }
            long groups = groups_of(weight);
            for (long g = 0; g < groups; ++g) {
                uint8_t* record = panel + g * group_bytes(weight);
                pack_codes(codes, weight, first + c, g * weight.group, weight.group, record);
                uint16_t* numbers = (uint16_t*)(record + group_code_bytes(weight));
                numbers[c] = ((const uint16_t*)from.scales)[(first + c) * groups + g];
                if (weight.minima)
                    numbers[QUANTIZED_PANEL + c] = ((const uint16_t*)from.minima)[(first + c) * groups + g];
            }
        }
    }
}

}  // namespace
