// What has no weights: gates, embedding, rotation, attention.
#pragma once

#include "common.h"

namespace {

void check_gate(const Machine& machine) {
    Part part(machine.isa, machine.threads, "gates");
    for (long size : {1, 7, 16, 33, 100}) {
        Random random(size);
        constexpr long ROWS = 10;
        Floats x = random.numbers(ROWS * 2 * size), y(ROWS * size);
        for (long r = 0; r < ROWS; ++r)  // among small ones up to e^200
            for (long i = 0; i < size; ++i) x[r * 2 * size + i] *= (float)(r * r);
        x[2 * size] = 100, x[4 * size] = -100, x[6 * size] = -0.0f;
        for (int gelu : {0, 1}) {
            Gate job = {x.data(), y.data(), ROWS, size, gelu != 0};
            if (forerun_gate(machine.context, &job)) abort();
            for (long i = 0; i < ROWS * size; ++i) {
                double gate = x[i / size * 2 * size + i % size], up = x[i / size * 2 * size + size + i % size];
                double inner = 0.7978845608 * (gate + 0.044715 * gate * gate * gate);
                double want = gelu ? 0.5 * gate * (1 + std::tanh(inner)) * up : gate / (1 + std::exp(-gate)) * up;
                part.near(y[i], want, std::fabs(gate * up) * 1e-6 + 1e-35);
            }
        }
    }
}

void check_embedding(const Machine& machine) {
    Part part(machine.isa, machine.threads, "embedding");
    constexpr long SIZE = 37, ROWS = 19;
    Random random(1);
    Floats table = random.numbers(ROWS * SIZE), y(ROWS * SIZE);
    std::vector<uint16_t> halves;
    for (float one : table) halves.push_back(to_bf16(one));
    std::vector<int64_t> ids;
    for (long i = 0; i < ROWS; ++i) ids.push_back(i * 7 % ROWS);
    for (bool bf16 : {false, true}) {
        const void* from = bf16 ? (const void*)halves.data() : table.data();
        Embedding job = {from, ids.data(), y.data(), ROWS, SIZE, 1.7f, bf16};
        if (forerun_embed(machine.context, &job)) abort();
        for (long i = 0; i < ROWS * SIZE; ++i) {
            long at = ids[i / SIZE] * SIZE + i % SIZE;
            part.equal(y[i], (bf16 ? from_bf16(halves[at]) : table[at]) * 1.7f);
        }
    }
}

// Keys or values, vectors of `size` features, in any format, compared as floats.
struct Store {
    long size;
    int32_t format;
    Floats floats, scales;
    std::vector<uint16_t> halves;
    std::vector<int8_t> codes;

    Store(const Floats& from, long size, int32_t format)
        : size(size), format(format), floats(from), scales(from.size() / size), halves(from.size()), codes(from.size()) {
        for (size_t i = 0; i < scales.size(); ++i) write((long)i, &from[i * size]);
    }
    void write(long vector, const float* from) {
        float greatest = 0;
        for (long i = 0; i < size; ++i) {
            floats[vector * size + i] = from[i];
            halves[vector * size + i] = to_bf16(from[i]);
            greatest = std::fmax(greatest, std::fabs(from[i]));
        }
        scales[vector] = greatest / 127;
        for (long i = 0; i < size; ++i)
            codes[vector * size + i] = greatest == 0 ? 0 : (int8_t)std::nearbyint(from[i] * (127 / greatest));
    }
    void* data() {
        return format == FLOAT32 ? (void*)floats.data() : format == BFLOAT16 ? (void*)halves.data() : codes.data();
    }
    float at(long i) const {
        if (format == INT8) return (float)codes[i] * scales[i / size];
        return format == BFLOAT16 ? from_bf16(halves[i]) : floats[i];
    }
    // How far a number may lie from what was written, when that is known so closely only.
    double step(long i) const {
        if (format == INT8) return scales[i / size] * 1.01;
        return format == BFLOAT16 ? std::fabs(at(i)) / 200 + 1e-5 : 1e-5;
    }
};

// Head `x` of one row after its norm (if any) and its turn: exactly as in float, if there is no norm, and in double.
struct Turned {
    const float *x, *norm, *cosines, *sines;
    long size, half;

    float exact(long i) const {
        if (i >= 2 * half) return x[i];
        float a = x[i] * cosines[i % half], b = x[(i + half) % (2 * half)] * sines[i % half];
        return i < half ? a - b : a + b;
    }
    double normed(long i) const {
        double squares = 0;
        for (long j = 0; j < size; ++j) squares += (double)x[j] * x[j];
        return x[i] / std::sqrt(squares / (double)size + 1e-5) * norm[i];
    }
    double close(long i) const {
        if (i >= 2 * half) return normed(i);
        double a = normed(i) * cosines[i % half], b = normed((i + half) % (2 * half)) * sines[i % half];
        return i < half ? a - b : a + b;
    }
};

void check_rotation(const Machine& machine, long size, long half, int32_t format, bool normed, Part& part) {
    constexpr long HEADS = 6, KV_HEADS = 2, ROWS = 11, POSITIONS = 30, SLOTS = 40;
    Random random(size + half);
    long features = (HEADS + 2 * KV_HEADS) * size;
    Floats qkv = random.numbers(ROWS * features), q(ROWS * HEADS * size), weight = random.numbers(size);
    Floats cosines = random.numbers(POSITIONS * half), sines = random.numbers(POSITIONS * half);
    qkv[2 * features - 1] = NAN, qkv[3 * features - 2] = -INFINITY;  // values, which become 0
    Store keys(Floats(SLOTS * KV_HEADS * size), size, format), values = keys, wanted = keys;
    std::vector<int64_t> positions, slots;
    for (long r = 0; r < ROWS; ++r) positions.push_back(r * 11 % POSITIONS), slots.push_back(r * 7 % SLOTS);
    Rotation job{};
    job.qkv = qkv.data(), job.q = q.data(), job.keys = keys.data(), job.values = values.data();
    job.cosines = cosines.data(), job.sines = sines.data(), job.positions = positions.data(), job.slots = slots.data();
    job.key_scales = keys.scales.data(), job.value_scales = values.scales.data(), job.format = format;
    if (normed) job.query_norm = job.key_norm = {weight.data(), 1e-5f};
    job.rows = ROWS, job.heads = HEADS, job.kv_heads = KV_HEADS, job.head_dim = size, job.half = half;
    if (forerun_rotate(machine.context, &job)) abort();
    for (long r = 0; r < ROWS; ++r) {
        const float *x = &qkv[r * features], *value = x + (HEADS + KV_HEADS) * size;
        for (long h = 0; h < HEADS + KV_HEADS; ++h) {
            long turn = positions[r] * half, key = slots[r] * KV_HEADS + h - HEADS;
            Turned want = {x + h * size, weight.data(), &cosines[turn], &sines[turn], size, half};
            bool is_key = h >= HEADS;
            Floats exact(size);
            for (long i = 0; i < size; ++i) exact[i] = want.exact(i);
            if (is_key) wanted.write(key, exact.data());
            for (long i = 0; i < size; ++i) {
                float got = is_key ? keys.at(key * size + i) : q[(r * HEADS + h) * size + i];
                if (normed)
                    part.near(got, want.close(i), is_key ? keys.step(key * size + i) : 1e-5);
                else
                    part.equal(got, is_key ? wanted.at(key * size + i) : exact[i]);
            }
        }
        for (long h = 0; h < KV_HEADS; ++h) {
            Floats head(value + h * size, value + (h + 1) * size);
            for (float& one : head) one = std::isfinite(one) ? one : 0;
            long at = slots[r] * KV_HEADS + h;
            wanted.write(at, head.data());
            for (long i = 0; i < size; ++i) part.equal(values.at(at * size + i), wanted.at(at * size + i));
        }
    }
}

struct Heads {
    long count, kv_count, size;
};

void check_attention(const Machine& machine, Heads heads, long window, float softcap, int32_t format, Part& part) {
    constexpr long SLOTS = 300, COMMON = 70, ROWS = 19;
    const long query_heads = heads.count, kv_heads = heads.kv_count, size = heads.size;
    Random random(size + window);
    Store keys(random.numbers(SLOTS * kv_heads * size), size, format);
    Store values(random.numbers(SLOTS * kv_heads * size), size, format);
    // Two sequences with a common beginning, and one of its own.
    std::vector<int64_t> slots[3];
    long lengths[] = {140, 97, 33}, next = 0;
    Path paths[3];
    for (int p = 0; p < 3; ++p) {
        for (long i = 0; i < lengths[p]; ++i)
            slots[p].push_back(p == 1 && i < COMMON ? slots[0][i] : next++ * 7 % SLOTS);
        paths[p] = {slots[p].data(), lengths[p], p < 2 ? COMMON : 0};
    }
    std::vector<int64_t> positions(ROWS), rows, path_of, groups = {0, 12, ROWS};
    Floats q = random.numbers(ROWS * query_heads * size), out(q.size()), alone(q.size());
    for (long i = 0; i < ROWS; ++i) {
        long row = i * 4 % ROWS, path = i < 8 ? 0 : i < 12 ? 1 : 2;
        rows.push_back(row), path_of.push_back(path);
        positions[row] = path == 0 ? 132 + i : path == 1 ? 93 + i - 8 : (i - 12) * 5;
    }
    Attention job{};
    job.q = q.data(), job.out = out.data(), job.keys = keys.data(), job.values = values.data(), job.paths = paths;
    job.positions = positions.data(), job.rows = rows.data(), job.path_of = path_of.data();
    job.heads = query_heads, job.kv_heads = kv_heads, job.head_dim = size, job.window = window;
    job.scale = 0.6f, job.softcap = softcap, job.format = format;
    job.key_scales = keys.scales.data(), job.value_scales = values.scales.data();
    if (forerun_attend(machine.context, &job, groups.data(), 2)) abort();
    for (long i = 0; i < ROWS; ++i) {  // each by itself has the same bits
        int64_t own_path = 0, ends[] = {0, 1};
        Attention single = job;
        single.rows = &rows[i], single.path_of = &own_path, single.paths = &paths[path_of[i]];
        single.out = alone.data();
        if (forerun_attend(machine.context, &single, ends, 1)) abort();
    }
    for (long i = 0; i < ROWS; ++i)
        for (long h = 0; h < query_heads; ++h) {
            long row = rows[i], position = positions[row], kv = h / (query_heads / kv_heads);
            long first = window && position >= window ? position - window + 1 : 0;
            std::vector<double> weights, sums(size);
            double top = -INFINITY, total = 0;
            auto at = [&](long j, long d) { return (slots[path_of[i]][j] * kv_heads + kv) * size + d; };
            for (long j = first; j <= position; ++j) {
                double score = 0;
                for (long d = 0; d < size; ++d)
                    score += (double)q[(row * query_heads + h) * size + d] * 0.6f * keys.at(at(j, d));
                weights.push_back(softcap != 0 ? std::tanh(score / softcap) * softcap : score);
                top = std::fmax(top, weights.back());
            }
            for (long j = first; j <= position; ++j) {
                double weight = std::exp(weights[j - first] - top);
                total += weight;
                for (long d = 0; d < size; ++d) sums[d] += weight * values.at(at(j, d));
            }
            for (long d = 0; d < size; ++d) {
                long index = (row * query_heads + h) * size + d;
                part.near(out[index], sums[d] / total, 2e-5);
                part.equal(alone[index], out[index]);
            }
        }
}

}  // namespace
