// Linear layers with quantised weights: activations become integers, tiles of them products, and the products floats.
//
// Sums of products are integers that never overflow, so no order of adding them shows; what is done with them in floating
// point is said in kernels/quantized.py, and every instruction set does just that.
#pragma once

#include <cfloat>

#include "quantized_panel.h"
#ifdef FORERUN_AMX
#include "quantized_amx.h"
#elif FORERUN_LANES == 16
#include "quantized_wide.h"
#else
#include "quantized_avx2.h"
#endif

namespace {

// A row of floats to codes, their sums over each SUM_GROUP, and the row's scale.
void encode_row(const Weight& weight, const float* x, const Activations& to, long row) {
    long k = weight.k, size = padded(k);
    float levels = weight.activation_bits == 8 ? 127.0f : 32512.0f;
    vfloat most{};
    vint finite = splat_int(-1);
    for (long i = 0; i < k; i += LANES) {
        vfloat magnitude = (vfloat)((vint)load_part(x + i, k - i) & 0x7fffffff);
        finite &= magnitude <= FLT_MAX;
        most = larger(magnitude, most);
    }
    bool usable = true;
    for (int i = 0; i < LANES; ++i) usable &= finite[i] != 0;
    float top = largest(most);
    to.scales[row] = usable ? top / levels : __builtin_nanf("");
    if (top < FLT_MIN * levels) {
        usable = false;
        if (to.scales[row] == to.scales[row]) to.scales[row] = 0;
    }
    float factor = usable ? levels / top : 0;
    const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    int8_t* codes = to.codes + row * row_code_bytes(weight);
    int32_t* sums = to.sums + row * (size / SUM_GROUP);
    for (long i = 0; i < size; i += SUM_GROUP) {
        int32_t whole[SUM_GROUP] = {};
        vint total{};
        for (long j = 0; j < SUM_GROUP && usable && i + j < k; j += LANES) {
            vint code = (vint)(load_part(x + i + j, k - i - j) * factor + magic) - (vint)magic;
            total += code;
            memcpy(whole + j, &code, sizeof code);
        }
        store_codes(whole, weight, codes, i);
        int32_t sum = 0;
        for (int j = 0; j < LANES; ++j) sum += total[j];
        sums[i / SUM_GROUP] = sum;
    }
}

// y of a chunk of columns. The panels of a chunk stay near while all rows pass; meanwhile the next chunk is fetched.
void quantized_chunk(const Linear& job, long chunk) {
    const Weight& weight = *job.weight;
    long panels = (weight.n + QUANTIZED_PANEL - 1) / QUANTIZED_PANEL, per_chunk = CHUNK_COLUMNS / QUANTIZED_PANEL;
    long first = chunk * per_chunk, last = first + per_chunk < panels ? first + per_chunk : panels;
    const char* values = (const char*)weight.values;
    long bytes = panel_bytes(weight), blocks = (job.rows + TILE_ROWS - 1) / TILE_ROWS;
    long share = bytes / blocks;  // of the next chunk, for each tile
    float sums[TILE_ROWS * QUANTIZED_PANEL];
    for (long start = 0; start < job.rows; start += NEAR_ROWS) {
        long rows = job.rows - start < NEAR_ROWS ? job.rows - start : NEAR_ROWS;
        for (long panel = first; panel < last; ++panel)
            for (long row = start; row < start + rows; row += TILE_ROWS) {
                long count = start + rows - row < TILE_ROWS ? start + rows - row : TILE_ROWS;
                long pass = (panel - first) * blocks + row / TILE_ROWS;
                Near ahead = {values + last * bytes + pass * share, share};
                quantized_tile(job, values + panel * bytes, row, count, sums, ahead);
                long column = panel * QUANTIZED_PANEL, columns = weight.n - column;
                finish(job, sums, QUANTIZED_PANEL, row, count, column,
                       columns < QUANTIZED_PANEL ? columns : QUANTIZED_PANEL);
            }
    }
}

}  // namespace
