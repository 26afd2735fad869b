// Linear layers in every format, and what is made of them: projections with norms, mixtures of experts.
#pragma once

#include "common.h"

namespace {

// A format of weights, and what belongs to it.
struct Form {
    const char* name;
    int32_t format, group, zero, minima;
};

constexpr Form FORMS[] = {
    {"float32", FLOAT32, 0, 0, 0},
    {"bfloat16", BFLOAT16, 0, 0, 0},
    {"int8", INT8, 0, 0, 0},
    {"int8, groups of 32", INT8_GROUPS, 32, 0, 0},
    {"int8, groups of 64", INT8_GROUPS, 64, 0, 0},
    {"int8, groups of 32, minima", INT8_GROUPS, 32, 0, 1},
    {"int8, groups of 64, minima", INT8_GROUPS, 64, 0, 1},
    {"int4, groups of 32", INT4_GROUPS, 32, 8, 0},
    {"int4, groups of 64", INT4_GROUPS, 64, 8, 0},
    {"int4, groups of 32, minima", INT4_GROUPS, 32, 0, 1},
    {"int4, groups of 64, minima", INT4_GROUPS, 64, 0, 1},
};

// A weight as the caller has it, and what a row's product with it should be.
struct Layer {
    const Form& form;
    long n, k;
    int bits;
    Floats floats;
    std::vector<uint16_t> halves, scales, minima;
    std::vector<int8_t> codes;
    Floats row_scales, bias;

    // extreme: every code the least there is.
    Layer(const Form& its_form, long outputs, long inputs, int activation_bits, bool extreme)
        : form(its_form), n(outputs), k(inputs), bits(activation_bits) {
        Random random(n * 31 + k);
        bias = random.numbers(n);
        for (long i = 0; i < n * k; ++i) {
            floats.push_back(random.number());
            halves.push_back(to_bf16(floats.back()));
            int8_t code = form.format == INT4_GROUPS ? (int8_t)(random.bits() >> 28) : (int8_t)(random.bits() >> 24);
            codes.push_back(!extreme ? code : form.format == INT4_GROUPS ? 0 : -128);
        }
        for (long i = 0; i < n; ++i) row_scales.push_back(std::fabs(random.number()) / 100);
        for (long i = 0; form.group && i < n * (k / form.group); ++i) {
            scales.push_back((uint16_t)((random.bits() & 0x83ff) | (7 + random.bits() % 3) << 10));
            minima.push_back((uint16_t)((random.bits() & 0x83ff) | (9 + random.bits() % 3) << 10));
        }
    }

    bool quantized() const { return form.format >= INT8; }

    Weight weight() const {
        Weight weight{};
        weight.bias = bias.data(), weight.n = n, weight.k = k, weight.format = form.format, weight.group = form.group;
        weight.zero = form.zero, weight.minima = form.minima, weight.activation_bits = bits;
        return weight;
    }

    Source source() const {
        if (form.format == FLOAT32) return {floats.data(), nullptr, nullptr};
        if (form.format == BFLOAT16) return {halves.data(), nullptr, nullptr};
        if (form.format == INT8) return {codes.data(), row_scales.data(), nullptr};
        return {codes.data(), scales.data(), form.minima ? minima.data() : nullptr};
    }

    float value(long i) const { return form.format == FLOAT32 ? floats[i] : from_bf16(halves[i]); }

    // One row's products, without the bias. sizes: sums of the magnitudes of the terms, of floats.
    void expected(const float* x, float* y, double* sizes) const {
        if (quantized()) return expected_quantized(x, y);
        for (long c = 0; c < n; ++c) {
            y[c] = 0, sizes[c] = 0;
            for (long i = 0; i < k; ++i) {
                y[c] = std::fma(x[i], value(c * k + i), y[c]);
                sizes[c] += std::fabs((double)x[i] * value(c * k + i));
            }
        }
    }

private:
    void expected_quantized(const float* x, float* y) const {
        float levels = bits == 8 ? 127 : 32512, top = 0, scale;
        bool finite = true;
        for (long i = 0; i < k; ++i) {
            finite &= std::isfinite(x[i]);
            top = std::fmax(top, std::fabs(x[i]));
        }
        scale = !finite ? NAN : top < 1.17549435e-38f * levels ? 0 : top / levels;
        std::vector<int64_t> activations(k);
        for (long i = 0; i < k && scale > 0; ++i) activations[i] = std::lrint(x[i] * (levels / top));
        long group = form.group ? form.group : k;
        for (long c = 0; c < n; ++c) {
            float chain = 0;
            for (long g = 0; g < k / group; ++g) {
                int64_t sum = 0, all = 0;
                for (long i = g * group; i < (g + 1) * group; ++i) {
                    sum += activations[i] * (codes[c * k + i] - form.zero);
                    all += activations[i];
                }
                if (!form.group)
                    y[c] = (float)((double)sum * ((double)scale * row_scales[c]));
                else
                    chain = std::fma(from_half(scales[c * (k / group) + g]), (float)sum, chain);
                if (form.minima) chain = std::fma(from_half(minima[c * (k / group) + g]), (float)all, chain);
            }
            if (form.group) y[c] = chain * scale;
        }
    }
};

// A layer as the library has packed it.
class Packed {
public:
    Packed(const Machine& machine, const Layer& layer) : weight_(layer.weight()) {
        long bytes = forerun_packed_bytes(machine.context, &weight_);
        weight_.values = values_ = aligned_alloc(128, (bytes + 127) / 128 * 128);
        Source source = layer.source();
        forerun_pack(machine.context, &source, &weight_);
    }
    Packed(const Packed&) = delete;
    ~Packed() { free(values_); }

    const Weight* get() const { return &weight_; }

private:
    Weight weight_;
    void* values_;
};

constexpr long MOST_ROWS = 100;

void check_layer(const Machine& machine, const Layer& layer, const std::vector<long>& row_counts, Part& part) {
    long n = layer.n, k = layer.k;
    Packed packed(machine, layer);
    Random random(k);
    Floats x = random.numbers(MOST_ROWS * k), residual = random.numbers(MOST_ROWS * n);
    Floats y(MOST_ROWS * n), want(MOST_ROWS * n), alone(MOST_ROWS * n);
    std::vector<double> sizes(MOST_ROWS * n);
    memset(&x[3 * k], 0, k * sizeof(float));
    x[5 * k + k / 2] = NAN;
    x[8 * k + k - 1] = INFINITY;
    for (long i = 0; i < k; ++i) x[11 * k + i] = 1e-42f;
    for (long i = 0; i < k; ++i) x[12 * k + i] = 1;
    for (long row = 0; row < MOST_ROWS; ++row) layer.expected(&x[row * k], &want[row * n], &sizes[row * n]);

    bool exact = layer.form.format != BFLOAT16 || strcmp(machine.isa, "amx") != 0;
    for (long row = 0; row < MOST_ROWS && !exact; ++row) {
        Projection job{};
        job.x = &x[row * k], job.weight = packed.get(), job.y = &alone[row * n], job.rows = 1;
        if (forerun_linear(machine.context, &job)) abort();
    }
    for (long rows : row_counts) {
        long start = rows * 7 % (MOST_ROWS + 1 - rows);
        bool adds = rows % 2;
        Projection job{};
        job.x = &x[start * k], job.weight = packed.get(), job.residual = adds ? residual.data() : nullptr;
        job.y = y.data(), job.rows = rows;
        std::fill(y.begin(), y.end(), -1.0f);
        if (forerun_linear(machine.context, &job)) abort();
        for (long i = 0; i < rows * n; ++i) {
            float product = want[start * n + i], bias = layer.bias[i % n], other = adds ? residual[i] : 0;
            // Of an activation AMX has 16 bits, the rest of its bfloat16 pair cut off.
            double tolerance = sizes[start * n + i] * 2e-5 + 1e-6;
            if (exact) {
                part.equal(y[i], product + bias + other);
                continue;
            }
            part.near(y[i], (double)product + bias + other, tolerance);
            part.equal(y[i], alone[start * n + i] + other);  // in any company
        }
        for (long i = rows * n; i < MOST_ROWS * n; ++i)
            if (y[i] != -1) part.equal(y[i], -1);
    }
}

void check_products(const Machine& machine) {
    std::vector<long> every, some = {1, 2, 5, 8, 12, 13, 16, 17, 24, 33, 48, 49, MOST_ROWS};
    for (long rows = 1; rows <= 33; ++rows) every.push_back(rows);
    every.insert(every.end(), {47, 48, 49, 64, 97});
    for (const Form& form : FORMS)
        for (int bits : {16, 8}) {
            if (form.format < INT8 && bits == 8) continue;
            char name[64];
            snprintf(name, sizeof name, "%s%s", form.name, form.format < INT8 ? "" : bits == 8 ? " x 8" : " x 16");
            Part part(machine.isa, machine.threads, name);
            check_layer(machine, Layer(form, 50, 192, bits, false), every, part);
            check_layer(machine, Layer(form, 1, 64, bits, false), some, part);
            check_layer(machine, Layer(form, 15, 1088, bits, false), {1, 9, 40}, part);
            check_layer(machine, Layer(form, 3, 4096, bits, true), {2, 20}, part);
            if (form.group <= 32) check_layer(machine, Layer(form, 33, 96, bits, false), some, part);
            if (!form.group)
                for (long k : {1, 3, 37, 100}) check_layer(machine, Layer(form, 20, k, bits, false), some, part);
        }
}

// Norm before and after, gathered rows, soft cap.
void check_projection(const Machine& machine) {
    Part part(machine.isa, machine.threads, "norms, gathered rows, soft cap");
    Layer layer(FORMS[0], 50, 72, 16, false);
    Packed packed(machine, layer);
    Random random(3);
    constexpr long ROWS = 21;
    Floats x = random.numbers(ROWS * layer.k), before = random.numbers(layer.k), after = random.numbers(layer.n);
    Floats y(ROWS * layer.n);
    std::vector<int64_t> index;
    for (long i = 0; i < ROWS; ++i) index.push_back(i * 5 % ROWS);
    auto factor = [](const std::vector<double>& row) {
        double squares = 0;
        for (double one : row) squares += one * one;
        return 1 / std::sqrt(squares / (double)row.size() + 1e-5);
    };
    for (bool with_after : {false, true}) {
        Projection job{};
        job.x = x.data(), job.row_index = index.data(), job.weight = packed.get(), job.y = y.data(), job.rows = ROWS;
        job.before = {before.data(), 1e-5f};
        if (with_after)
            job.after = {after.data(), 1e-5f};
        else
            job.softcap = 3;
        if (forerun_linear(machine.context, &job)) abort();
        for (long r = 0; r < ROWS; ++r) {
            std::vector<double> row(&x[index[r] * layer.k], &x[index[r] * layer.k] + layer.k), out;
            double scale = factor(row);
            for (long c = 0; c < layer.n; ++c) {
                double sum = layer.bias[c];
                for (long i = 0; i < layer.k; ++i) sum += row[i] * scale * before[i] * layer.floats[c * layer.k + i];
                out.push_back(sum);
            }
            double after_scale = factor(out);
            for (long c = 0; c < layer.n; ++c) {
                double want = with_after ? out[c] * after_scale * after[c] : std::tanh(out[c] / 3) * 3;
                part.near(y[r * layer.n + c], want, 1e-5);
            }
        }
    }
}

// Every row goes to the two of four experts that its logits like best.
void check_mixture(const Machine& machine) {
    Part part(machine.isa, machine.threads, "mixture of experts");
    constexpr long FEATURES = 40, INNER = 24, EXPERTS = 4, ROWS = 23;
    Layer router(FORMS[0], EXPERTS, FEATURES, 16, false), gate_up(FORMS[0], 2 * INNER, FEATURES, 16, false);
    Layer down(FORMS[0], FEATURES, INNER, 16, false), other_down(FORMS[0], FEATURES, INNER, 16, false);
    for (float& one : other_down.floats) one = -one / 2;
    Packed packed_router(machine, router), packed_gate_up(machine, gate_up), packed_down(machine, down);
    Packed packed_other(machine, other_down);
    const Weight *gates[EXPERTS], *downs[EXPERTS];
    for (long e = 0; e < EXPERTS; ++e) {
        gates[e] = packed_gate_up.get();
        downs[e] = (e % 2 ? packed_other : packed_down).get();
    }
    Random random(9);
    Floats x = random.numbers(ROWS * FEATURES), residual = random.numbers(ROWS * FEATURES), y(ROWS * FEATURES);
    Mixture job{};
    job.x = x.data(), job.router = packed_router.get(), job.gate_up = gates, job.down = downs;
    job.residual = residual.data(), job.y = y.data(), job.rows = ROWS, job.experts = EXPERTS, job.top_k = 2;
    job.renormalise = true;
    if (forerun_mixture(machine.context, &job)) abort();
    auto product = [](const Layer& layer, const double* in) {
        std::vector<double> out;
        for (long c = 0; c < layer.n; ++c) {
            out.push_back(layer.bias[c]);
            for (long i = 0; i < layer.k; ++i) out[c] += in[i] * layer.floats[c * layer.k + i];
        }
        return out;
    };
    for (long r = 0; r < ROWS; ++r) {
        std::vector<double> row(&x[r * FEATURES], &x[r * FEATURES] + FEATURES), logits = product(router, row.data());
        std::vector<double> both = product(gate_up, row.data());
        std::vector<double> want(&residual[r * FEATURES], &residual[r * FEATURES] + FEATURES);
        for (long i = 0; i < INNER; ++i) both[i] = both[i] / (1 + std::exp(-both[i])) * both[INNER + i];
        long first = 0, second = -1;
        for (long e = 1; e < EXPERTS; ++e) first = logits[e] > logits[first] ? e : first;
        for (long e = 0; e < EXPERTS; ++e)
            if (e != first && (second < 0 || logits[e] > logits[second])) second = e;
        double share = 1 / (1 + std::exp(logits[second] - logits[first]));
        for (long e : {first, second}) {
            std::vector<double> out = product(e % 2 ? other_down : down, both.data());
            for (long i = 0; i < FEATURES; ++i) want[i] += out[i] * (e == first ? share : 1 - share);
        }
        for (long i = 0; i < FEATURES; ++i) part.near(y[r * FEATURES + i], want[i], 1e-4);
    }
}

}  // namespace
