// The operations themselves, compiled once per instruction set (setup.py says with which flags and FORERUN_OPERATIONS).
#include "operations.h"

#include "attention.h"
#include "product.h"
#include "simd.h"

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

void pack(const void* from, const Weight& weight, long panel) {
    long n = weight.n, k = weight.k, first = panel * PANEL;
    if (weight.format == BFLOAT16)
        pack_panel((const uint16_t*)from, n, k, first, (uint16_t*)weight.values + first * k);
    else
        pack_panel((const float*)from, n, k, first, (float*)weight.values + first * k);
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
        tile_of<PANELS>(count, job.x + row * k, k, w, PANEL * k, k, sums, PANELS * PANEL, false, next);
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

void linear(const Linear& job, long chunk) {
    job.weight->format == BFLOAT16 ? linear_chunk<uint16_t>(job, chunk) : linear_chunk<float>(job, chunk);
}

void norm_row(const float* x, Norm norm, const float* residual, float* y, long size) {
    vfloat squares{};
    for (long i = 0; i < size; i += LANES) {
        vfloat v = load_part(x + i, size - i);
        squares = fma(v, v, squares);
    }
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / size + norm.epsilon);
    for (long i = 0; i < size; i += LANES) {
        vfloat v = load_part(x + i, size - i) * factor * load_part(norm.weight + i, size - i);
        if (residual) v += load_part(residual + i, size - i);
        store_part(y + i, v, size - i);
    }
}

// Norm (if any) and RoPE of one head: first and second half of the turning features turn together.
void rotate_head(const float* x, Norm norm, const float* cosines, const float* sines, long size, long half, float* y) {
    if (norm.weight)
        norm_row(x, norm, nullptr, y, size);
    else
        memcpy(y, x, size * sizeof(float));
    for (long i = 0; i < half; i += LANES) {
        long count = half - i;
        vfloat a = load_part(y + i, count), b = load_part(y + half + i, count);
        vfloat c = load_part(cosines + i, count), s = load_part(sines + i, count);
        store_part(y + i, a * c - b * s, count);
        store_part(y + half + i, b * c + a * s, count);
    }
}

void store_head(const float* x, void* to, bool bf16, long at, long size) {
    if (!bf16) {
        memcpy((float*)to + at, x, size * sizeof(float));
        return;
    }
    for (long i = 0; i < size; i += LANES) store_part((uint16_t*)to + at + i, load_part(x + i, size - i), size - i);
}

void rotate_row(const Rotation& job, long row) {
    float buffer[MAX_HEAD_DIM];
    long size = job.head_dim, features = (job.heads + 2 * job.kv_heads) * size;
    const float* x = job.qkv + row * features;
    const float* cosines = job.cosines + job.positions[row] * job.half;
    const float* sines = job.sines + job.positions[row] * job.half;
    for (long h = 0; h < job.heads; ++h)
        rotate_head(x + h * size, job.query_norm, cosines, sines, size, job.half, job.q + (row * job.heads + h) * size);
    for (long h = 0; h < job.kv_heads; ++h) {
        long at = (job.slots[row] * job.kv_heads + h) * size;
        rotate_head(x + (job.heads + h) * size, job.key_norm, cosines, sines, size, job.half, buffer);
        store_head(buffer, job.keys, job.bf16, at, size);
        // Attention multiplies what a row does not see by 0; a value that is not finite would be seen through that.
        const float* value = x + (job.heads + job.kv_heads + h) * size;
        for (long i = 0; i < size; ++i) buffer[i] = __builtin_isfinite(value[i]) ? value[i] : 0.0f;
        store_head(buffer, job.values, job.bf16, at, size);
    }
}

void gate_row(const float* gate_up, float* y, long size, bool gelu) {
    for (long i = 0; i < size; i += LANES) {
        vfloat gate = load_part(gate_up + i, size - i), up = load_part(gate_up + size + i, size - i);
        if (gelu) {
            vfloat inner = fma(gate * gate * gate, splat(0.044715f), gate) * 0.7978845608f;
            gate = 0.5f * gate * (1.0f + hyperbolic_tangent(inner));
        } else {
            gate = gate / (1.0f + exponential(-gate));
        }
        store_part(y + i, gate * up, size - i);
    }
}

void embed_row(const void* row, bool bf16, float scale, float* y, long size) {
    for (long i = 0; i < size; i += LANES) {
        vfloat v = bf16 ? load_part((const uint16_t*)row + i, size - i) : load_part((const float*)row + i, size - i);
        store_part(y + i, v * scale, size - i);
    }
}

}  // namespace

namespace forerun {

const Operations* FORERUN_OPERATIONS() {
    static constexpr Operations operations = {
        FORERUN_OPERATIONS_NAME, PANEL,      ATTENTION_SCRATCH, pack,    linear,
        norm_row,                rotate_row, attend,            gate_row, embed_row,
    };
    return &operations;
}

}  // namespace forerun
