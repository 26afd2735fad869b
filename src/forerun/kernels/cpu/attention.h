// Causal attention of some rows of one sequence and some key/value heads.
//
// Keys are visited in blocks of KEY_BLOCK absolute positions, in order, with a running maximum and sum (online softmax,
// arXiv 1805.02867), to the base 2. A row that does not see a key gives it the weight 0, and adding 0 * value changes
// no bit; so it does not matter which rows share a block, nor how many keys of it exist yet.
#pragma once

#include <type_traits>

#include "attention_product.h"

namespace {

using namespace forerun;

constexpr long PADDED_HEAD = MAX_HEAD_DIM;  // a multiple of PANEL
// Queries, outputs, keys, values, weights; running maximum, sum and the outputs' next factor.
constexpr long ATTENTION_SCRATCH =
    2 * MAX_QUERIES * PADDED_HEAD + 2 * KEY_BLOCK * PADDED_HEAD + MAX_QUERIES * (KEY_BLOCK + 3) + 64;

constexpr float LOWEST = -3e38f;  // finite, so that its difference with itself is 0
constexpr float LOG2_E = 1.44269504f;

// 2^x within 1 ulp for x <= 0; 0 below the smallest normal number. x = n + f with |f| <= 1/2, the polynomial of degree
// 6 with the least relative error (2.6e-9) and value 1 at 0 for 2^f, and n added to the exponent.
FORERUN_INLINE vfloat power_of_two(vfloat x) {
    const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vfloat shifted = x + magic, f = x - (shifted - magic);
    vfloat p = splat(1.5594678e-4f);
    p = fma(p, f, splat(1.34066434e-3f));
    p = fma(p, f, splat(9.61769279e-3f));
    p = fma(p, f, splat(5.55031039e-2f));
    p = fma(p, f, splat(2.40226522e-1f));
    p = fma(p, f, splat(6.93147242e-1f));
    p = fma(p, f, splat(1.0f));
    return (vfloat)(((vint)p + ((vint)shifted << 23)) & ~(vint)(x < splat(-126.0f)));
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

FORERUN_INLINE void hide(float* scores, Span span, long count) {
    vint lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    for (long i = 0; i < count; i += LANES) {
        vint position = lane + (int32_t)i;
        vint seen = (position >= (int32_t)span.low) & (position < (int32_t)span.high);
        store(scores + i, seen ? load(scores + i) : splat(-__builtin_inff()));
    }
}

// The scores of one query with `count` keys as they are compared: soft cap, -inf outside of the span. Returns the
// largest.
FORERUN_INLINE float settle(float* scores, Span span, long count, float softcap) {
    if (softcap != 0)
        for (long i = 0; i < count; i += LANES)
            store(scores + i, hyperbolic_tangent(load(scores + i) / softcap) * (softcap * LOG2_E));
    if (span.low > 0 || span.high < (count + LANES - 1) / LANES * LANES) hide(scores, span, count);
    vfloat greatest = load(scores);
    for (long i = LANES; i < count; i += LANES) greatest = larger(load(scores + i), greatest);
    return largest(greatest);
}

// Scores to weights 2^(score - top). Returns their sum.
FORERUN_INLINE float weigh(float* scores, long count, float top) {
    vfloat sums{};
    for (long i = 0; i < count; i += LANES) {
        vfloat weight = power_of_two(load(scores + i) - top);
        store(scores + i, weight);
        sums += weight;
    }
    return sum(sums);
}

// Some rows of one sequence, and some key/value heads with the query heads that share them. A query is a row and a
// head; those of one key/value head lie together.
template <typename T>
class Tile {
    using Number = typename Multiplied<T>::type;

public:
    Tile(const Attention& job, AttentionUnit unit, float* scratch)
        : job_(job), unit_(unit), group_(job.heads / job.kv_heads), size_(job.head_dim),
          padded_((size_ + PANEL - 1) / PANEL * PANEL), per_head_((unit.last - unit.first) * group_) {
        long queries = per_head_ * (unit.last_head - unit.first_head);
        queries_ = scratch;
        outputs_ = queries_ + queries * size_;
        weights_ = outputs_ + queries * padded_;
        panels_ = (Number*)(weights_ + per_head_ * KEY_BLOCK);
        copies_ = panels_ + size_ * KEY_BLOCK;
        tops_ = scratch + ATTENTION_SCRATCH - 64 - 3 * MAX_QUERIES;
        totals_ = tops_ + MAX_QUERIES;
        factors_ = totals_ + MAX_QUERIES;
        float scale = job.softcap != 0 ? job.scale : job.scale * LOG2_E;
        for_queries([&](long n, long row, long head) {
            const float* from = job.q + (row * job.heads + head) * size_;
            for (long d = 0; d < size_; ++d) queries_[n * size_ + d] = from[d] * scale;
            tops_[n] = LOWEST;
            totals_[n] = 0;
        });
        memset(outputs_, 0, queries * padded_ * sizeof(float));
    }

    void run() {
        long lowest = INT64_MAX, highest = 0;
        for (long i = unit_.first; i < unit_.last; ++i) {
            long position = job_.positions[job_.rows[i]];
            long begin = job_.window && position >= job_.window ? position - job_.window + 1 : 0;
            lowest = begin < lowest ? begin : lowest;
            highest = position > highest ? position : highest;
        }
        for (long block = lowest / KEY_BLOCK; block <= highest / KEY_BLOCK; ++block)
            for (long i = unit_.first, next; i < unit_.last; i = next) {
                // Rows of one path see the same slots; so do all rows of the group in a block of the common context.
                const Path& path = job_.paths[job_.path_of[i]];
                bool shared = (block + 1) * KEY_BLOCK <= path.shared;
                long count = 0;  // keys of the block that any of the rows sees
                for (next = i; next < unit_.last && (shared || job_.path_of[next] == job_.path_of[i]); ++next) {
                    Span span = visible(job_, job_.positions[job_.rows[next]], block);
                    if (span.low < span.high && span.high > count) count = span.high;
                }
                if (count) visit(path, block, count, i, next);
            }
        finish();
    }

private:
    template <typename Work>
    void for_queries(const Work& work) {
        for (long head = unit_.first_head, n = 0; head < unit_.last_head; ++head)
            for (long i = unit_.first; i < unit_.last; ++i)
                for (long g = 0; g < group_; ++g, ++n) work(n, job_.rows[i], head * group_ + g);
    }

    // One block of keys and the rows of entries i .. next - 1.
    void visit(const Path& path, long block, long count, long i, long next) {
        long heads = unit_.last_head - unit_.first_head;
        long queries = (next - i) * group_, key_panels = (count + PANEL - 1) / PANEL, value_panels = padded_ / PANEL;
        KeyBlock &now = blocks_[block % 2], &then = blocks_[(block + 1) % 2];
        now.find(path, block, job_.kv_heads, size_);
        const T* keys = (const T*)job_.keys + unit_.first_head * size_;
        const T* values = (const T*)job_.values + unit_.first_head * size_;
        ahead_.clear();
        if (then.find(path, block + 1, job_.kv_heads, size_)) ahead_.find(keys, values, then, heads * size_ * sizeof(T));
        ahead_.spread(heads * (steps_of(queries, key_panels, size_) + steps_of(queries, value_panels, count)));
        for (long h = 0; h < heads; ++h, keys += size_, values += size_) {
            long from = h * per_head_ + (i - unit_.first) * group_;
            lay_out_keys(keys, scales_of(job_.key_scales, h), now, count, size_, panels_);
            multiply_all(queries, queries_ + from * size_, size_, LaidOut<Number>{panels_}, key_panels, size_, weights_,
                         KEY_BLOCK, nullptr, ahead_);
            weigh_all(block, count, i, next, from);
            multiply_all(queries, weights_, KEY_BLOCK, in_panels(values, h, now, count), value_panels, count,
                         outputs_ + from * padded_, padded_, factors_, ahead_);
        }
        ahead_.fetch_rest();
    }

    // Scores of the queries `from` and following to weights, and the factors that their outputs so far must take.
    void weigh_all(long block, long count, long i, long next, long from) {
        float *tops = tops_ + from, *totals = totals_ + from, *own = weights_;
        long n = 0;
        for (long j = i; j < next; ++j) {
            Span span = visible(job_, job_.positions[job_.rows[j]], block);
            for (long g = 0; g < group_; ++g, ++n, own += KEY_BLOCK) {
                factors_[n] = tops[n];
                if (span.low < span.high) {
                    float top = settle(own, span, count, job_.softcap);
                    tops[n] = top > tops[n] ? top : tops[n];
                } else {
                    for (long k = 0; k < count; k += LANES) store(own + k, splat(-__builtin_inff()));
                }
            }
        }
        for (long k = 0; k < n; k += LANES) store(factors_ + k, power_of_two(load(factors_ + k) - load(tops + k)));
        for (long k = 0; k < n; ++k)
            totals[k] = totals[k] * factors_[k] + weigh(weights_ + k * KEY_BLOCK, count, tops[k]);
    }

    const float* scales_of(const float* scales, long h) const { return scales ? scales + unit_.first_head + h : nullptr; }

    // Values are read where they lie, if whole panels of numbers can be.
    Scattered<Number> in_panels(const T* values, long h, const KeyBlock& block, long count) {
        if constexpr (std::is_same_v<T, Number>)
            if (padded_ == size_) return {values, block.offsets};
        lay_out_values(values, scales_of(job_.value_scales, h), block, count, size_, padded_, copies_);
        for (long i = 0; i < count; ++i) in_copies_[i] = i * padded_;
        return {copies_, in_copies_};
    }

    void finish() {
        for_queries([&](long n, long row, long head) {
            float *sums = outputs_ + n * padded_, *to = job_.out + (row * job_.heads + head) * size_;
            for (long d = 0; d < padded_; d += LANES) store(sums + d, load(sums + d) / totals_[n]);
            for (long d = 0; d < size_; d += PANEL)
                store_features((const Number*)nullptr, to + d, sums + d, size_ - d < PANEL ? size_ - d : PANEL);
        });
    }

    const Attention& job_;
    const AttentionUnit unit_;
    const long group_, size_, padded_, per_head_;
    float *queries_, *outputs_, *weights_, *tops_, *totals_, *factors_;
    Number *panels_, *copies_;  // keys laid out; values with zeros behind, where they cannot be read where they lie
    long in_copies_[KEY_BLOCK];
    KeyBlock blocks_[2];
    LinesAhead ahead_;
};

void attend(const Attention& job, const AttentionUnit& unit, float* scratch) {
    switch (job.format) {
        case FLOAT32: return Tile<float>(job, unit, scratch).run();
        case BFLOAT16: return Tile<uint16_t>(job, unit, scratch).run();
        case INT8: return Tile<int8_t>(job, unit, scratch).run();
    }
}

}  // namespace
