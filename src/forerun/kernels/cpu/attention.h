// Causal attention of some rows of one sequence, one key/value head at a time.
//
// Keys are visited in blocks of KEY_BLOCK absolute positions, in order, with a running maximum and sum (online softmax,
// arXiv 1805.02867). A row that does not see a key gives it the weight 0, and adding 0 * value changes no bit; so it
// does not matter which rows share a block, nor how many keys of it exist yet.
#pragma once

#include "operations.h"
#include "product.h"

namespace {

using namespace forerun;

constexpr long PADDED_HEAD = MAX_HEAD_DIM;  // a multiple of PANEL
// Queries, outputs, keys, values, weights, running maximum and sum.
constexpr long ATTENTION_SCRATCH =
    2 * MAX_QUERIES * PADDED_HEAD + 2 * KEY_BLOCK * PADDED_HEAD + MAX_QUERIES * (KEY_BLOCK + 2) + 64;

// The heads of one block's positions; null where the path has no position.
template <typename T>
struct Block {
    const T* at[KEY_BLOCK];

    Block(const T* base, const Path& path, long first, long row_size) {
        for (long i = 0; i < KEY_BLOCK; ++i)
            at[i] = first + i < path.length ? base + path.slots[first + i] * row_size : nullptr;
    }

    void prefetch(long size) const {
        for (long i = 0; i < KEY_BLOCK && at[i]; ++i)
            for (long j = 0; j < size; j += 64 / sizeof(T)) __builtin_prefetch(at[i] + j, 0, 3);
    }
};

// Keys to panels of PANEL positions: [panel][feature][position]. Lanes over keys make each score one chain over features.
template <typename T>
void lay_out_keys(const Block<T>& block, long keys, long size, float* panels) {
    for (long i = 0; i < (keys + PANEL - 1) / PANEL * PANEL; i += 8) {
        float* out = panels + i / PANEL * (size * PANEL) + i % PANEL;
        for (long d = 0; d < size; d += 8) {
            __m256 eight[8];
            for (int j = 0; j < 8; ++j)
                eight[j] = block.at[i + j] ? load_eight(block.at[i + j] + d) : _mm256_setzero_ps();
            transpose_8x8(eight, out + d * PANEL, PANEL);
        }
    }
}

// Values to panels of PANEL features: [panel][position][feature], zeros past the head's size.
template <typename T>
void lay_out_values(const Block<T>& block, long keys, long size, long padded, float* panels) {
    for (long i = 0; i < keys; ++i)
        for (long d = 0; d < padded; d += 8) {
            float* out = panels + d / PANEL * (KEY_BLOCK * PANEL) + i * PANEL + d % PANEL;
            bool known = block.at[i] && d < size;
            _mm256_storeu_ps(out, known ? load_eight(block.at[i] + d) : _mm256_setzero_ps());
        }
}

// Scores of one query in a block to weights e^(score - maximum), 0 outside [low, high); outputs are scaled to the new
// maximum.
FORERUN_INLINE void weigh(float* scores, long low, long high, float softcap, float& top, float& total, float* out,
                          long padded) {
    const vfloat nothing = splat(-__builtin_inff());
    vint lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    vfloat greatest = nothing;
    for (long i = 0; i < KEY_BLOCK; i += LANES) {
        vfloat s = load(scores + i);
        if (softcap != 0) s = hyperbolic_tangent(s / softcap) * softcap;
        vint position = lane + (int32_t)i;
        s = (position >= (int32_t)low) & (position < (int32_t)high) ? s : nothing;
        store(scores + i, s);
        greatest = larger(s, greatest);
    }
    float before = top;
    top = largest(greatest);
    top = top > before ? top : before;
    vfloat sums{};
    for (long i = 0; i < KEY_BLOCK; i += LANES) {
        vfloat weight = exponential(load(scores + i) - top);
        store(scores + i, weight);
        sums += weight;
    }
    if (top != before) {  // with an equal maximum the factor is exactly 1
        float factor = exponential(splat(before - top))[0];
        total *= factor;
        for (long d = 0; d < padded; d += LANES) store(out + d, load(out + d) * factor);
    }
    total += sum(sums);
}

// Which positions of a block a row sees: [low, high) from the block's start; empty when low >= high.
struct Span {
    long low, high;
};

FORERUN_INLINE Span visible(const Attention& job, long position, long block) {
    long first = job.window && position >= job.window ? position - job.window + 1 : 0, start = block * KEY_BLOCK;
    long low = first > start ? first - start : 0, high = position - start + 1;
    return {low, high < KEY_BLOCK ? high : KEY_BLOCK};
}

template <typename T>
void attend_tile(const Attention& job, long first, long last, long kv_head, float* scratch) {
    long size = job.head_dim, padded = (size + PANEL - 1) / PANEL * PANEL, group = job.heads / job.kv_heads;
    long queries = (last - first) * group, row_size = job.kv_heads * size;
    float* q = scratch;
    float* out = q + MAX_QUERIES * PADDED_HEAD;
    float* keys = out + MAX_QUERIES * PADDED_HEAD;
    float* values = keys + KEY_BLOCK * PADDED_HEAD;
    float* weights = values + KEY_BLOCK * PADDED_HEAD;
    float* top = weights + MAX_QUERIES * KEY_BLOCK;
    float* total = top + MAX_QUERIES;
    const T* all_keys = (const T*)job.keys + kv_head * size;
    const T* all_values = (const T*)job.values + kv_head * size;

    long lowest = INT64_MAX, highest = 0;
    for (long i = first; i < last; ++i) {
        long row = job.rows[i], position = job.positions[row];
        long begin = job.window && position >= job.window ? position - job.window + 1 : 0;
        lowest = begin < lowest ? begin : lowest;
        highest = position > highest ? position : highest;
        const float* from = job.q + (row * job.heads + kv_head * group) * size;
        float* to = q + (i - first) * group * size;
        for (long d = 0; d < group * size; ++d) to[d] = from[d] * job.scale;
    }
    for (long i = 0; i < queries; ++i) top[i] = -__builtin_inff(), total[i] = 0;
    memset(out, 0, queries * padded * sizeof(float));

    for (long block = lowest / KEY_BLOCK; block <= highest / KEY_BLOCK; ++block) {
        for (long i = first, next; i < last; i = next) {
            // Rows of one path see the same slots; so do all rows of the group in a block of the common context.
            const Path& path = job.paths[job.path_of[i]];
            bool shared = (block + 1) * KEY_BLOCK <= path.shared;
            long count = 0;  // keys of the block that any of the rows sees
            for (next = i; next < last && (shared || job.path_of[next] == job.path_of[i]); ++next) {
                Span span = visible(job, job.positions[job.rows[next]], block);
                if (span.low < span.high && span.high > count) count = span.high;
            }
            if (!count) continue;
            Block<T> block_keys(all_keys, path, block * KEY_BLOCK, row_size);
            Block<T> block_values(all_values, path, block * KEY_BLOCK, row_size);
            block_values.prefetch(size);
            long those = (next - i) * group, from = (i - first) * group;
            lay_out_keys(block_keys, count, size, keys);
            product(those, q + from * size, size, keys, size * PANEL, (count + PANEL - 1) / PANEL, size, weights,
                    KEY_BLOCK, false);
            Block<T>(all_keys, path, (block + 1) * KEY_BLOCK, row_size).prefetch(size);
            for (long j = i; j < next; ++j) {
                Span span = visible(job, job.positions[job.rows[j]], block);
                for (long g = 0; g < group; ++g) {
                    long n = (j - first) * group + g;
                    float* own = weights + (n - from) * KEY_BLOCK;
                    if (span.low >= span.high)
                        memset(own, 0, KEY_BLOCK * sizeof(float));
                    else
                        weigh(own, span.low, span.high, job.softcap, top[n], total[n], out + n * padded, padded);
                }
            }
            lay_out_values(block_values, count, size, padded, values);
            product(those, weights, KEY_BLOCK, values, KEY_BLOCK * PANEL, padded / PANEL, count, out + from * padded,
                    padded, true);
        }
    }
    for (long i = first; i < last; ++i)
        for (long g = 0; g < group; ++g) {
            long n = (i - first) * group + g;
            float* to = job.out + (job.rows[i] * job.heads + kv_head * group + g) * size;
            for (long d = 0; d < size; ++d) to[d] = out[n * padded + d] / total[n];
        }
}

void attend(const Attention& job, long first, long last, long kv_head, float* scratch) {
    job.bf16 ? attend_tile<uint16_t>(job, first, last, kv_head, scratch)
             : attend_tile<float>(job, first, last, kv_head, scratch);
}

}  // namespace
