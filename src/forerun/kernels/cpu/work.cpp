#include "work.h"

#include <algorithm>

namespace forerun {

namespace {

// What every thread may rather do for itself than wait until others have done their share: so many floats (norms of
// rows take some 0.1 ns each, to wait for another thread 0.2 us or more).
constexpr long CHEAP = 8192;

constexpr long GATE_COLUMNS = 256;

// What is done to rows before their product: they are gathered or normed (to `rows`), and encoded.
struct Inputs {
    const Projection& job;
    bool copies, each_for_itself;  // the latter: by every thread in its own memory
    float* rows = nullptr;
    Activations activations{};

    explicit Inputs(const Projection& job)
        : job(job), copies(job.before.weight || job.row_index), each_for_itself(job.rows * job.weight->k <= CHEAP) {}

    long copied_floats() const { return copies ? lines(job.rows * job.weight->k) : 0; }

    void place(const Operations& operations, float* memory) {
        rows = memory;
        activations = encoded_at(operations, *job.weight, job.rows, memory + copied_floats());
    }

    bool needed() const { return copies || activations.codes; }
    const float* x() const { return copies ? rows : job.x; }

    void make(const Operations& operations, long row) const {
        long k = job.weight->k;
        const float* from = job.x + (job.row_index ? job.row_index[row] : row) * k;
        if (job.before.weight)
            operations.norm_row(from, job.before, nullptr, rows + row * k, k);
        else if (copies)
            operations.embed_row(from, false, 1.0f, rows + row * k, k);
        if (activations.codes) operations.encode_row(*job.weight, x() + row * k, activations, row);
    }
};

}  // namespace

float* Context::memory(long floats) {
    if (floats <= scratch_floats) return scratch;
    free(scratch);
    scratch_floats = 0;
    scratch = (float*)aligned_alloc(128, lines(floats) * sizeof(float));
    if (scratch) scratch_floats = floats;
    return scratch;
}

void embed(Member& member, const Operations& operations, const Embedding& job) {
    share_units(member, job.rows, [&](long row) {
        const char* from = (const char*)job.table + job.token_ids[row] * job.size * (job.bf16 ? 2 : 4);
        operations.embed_row(from, job.bf16, job.scale, job.y + row * job.size, job.size);
    });
}

void norm(Member& member, const Operations& operations, const float* x, Norm norm, float* y, long rows, long size) {
    share_units(member, rows,
                [&](long row) { operations.norm_row(x + row * size, norm, nullptr, y + row * size, size); });
}

long encoded_floats(const Operations& operations, const Weight& weight, long rows) {
    long bytes = operations.code_bytes(weight);
    return bytes ? lines((rows * bytes + 3) / 4) + lines(rows * sums_of(weight)) + lines(rows) : 0;
}

Activations encoded_at(const Operations& operations, const Weight& weight, long rows, float* memory) {
    long bytes = operations.code_bytes(weight);
    if (!bytes) return {};
    float* sums = memory + lines((rows * bytes + 3) / 4);
    return {(int8_t*)memory, (int32_t*)sums, sums + lines(rows * sums_of(weight))};
}

Need need_of(const Projection& job, const Operations& operations) {
    Inputs inputs(job);
    long rows = inputs.copied_floats() + encoded_floats(operations, *job.weight, job.rows);
    long sums = job.after.weight ? lines(job.rows * job.weight->n) : 0;
    return inputs.each_for_itself ? Need{sums, rows} : Need{sums + rows, 0};
}

// In this order: norm before, encoding, product, bias, norm after, residual, soft cap.
void project(Member& member, const Operations& operations, const Projection& job, Memory memory) {
    const Weight& weight = *job.weight;
    long rows = job.rows, n = weight.n;
    if (!rows) return;
    bool after = job.after.weight;
    float* sums = after ? memory.shared : job.y;
    Inputs inputs(job);
    inputs.place(operations, inputs.each_for_itself ? memory.own : memory.shared + (after ? lines(rows * n) : 0));
    bool ready = !inputs.needed();
    if (!ready && !inputs.each_for_itself) {
        share_units(member, rows, [&](long row) { inputs.make(operations, row); });
        ready = true;
    }
    Linear linear = {inputs.x(), inputs.activations, &weight, weight.bias, after ? nullptr : job.residual,
                     sums,       rows,               job.softcap};
    member.share(chunks_of(weight), [&](long chunk) {
        if (!ready)  // only now: a thread that is late for this work must not do it
            for (long row = 0; row < rows; ++row) inputs.make(operations, row);
        ready = true;
        operations.linear(linear, chunk);
    });
    if (after)
        share_units(member, rows, [&](long row) {
            operations.norm_row(sums + row * n, job.after, job.residual ? job.residual + row * n : nullptr,
                                job.y + row * n, n);
        });
}

void rotate(Member& member, const Operations& operations, const Rotation& job) {
    share_units(member, job.rows * job.kv_heads,
                [&](long unit) { operations.rotate(job, unit / job.kv_heads, unit % job.kv_heads); });
}

std::vector<AttentionUnit> attention_units(const Attention& job, const int64_t* groups, long group_count, int threads) {
    constexpr long FULL = MAX_QUERIES / 12 * 12;  // whole blocks of rows in the products of every instruction set
    constexpr long NEAR_BYTES = 512;              // at each position: blocks of so many heads share the cache
    long group = job.heads / job.kv_heads, bytes = job.head_dim * element_bytes(job.format), longest = 1;
    for (long g = 0; g < group_count; ++g) longest = std::max(longest, (long)(groups[g + 1] - groups[g]));
    long tile = std::min(longest, std::max(1L, FULL / group));
    auto count = [&](long rows, long heads) {
        long parts = 0;
        for (long g = 0; g < group_count; ++g) parts += (groups[g + 1] - groups[g] + rows - 1) / rows;
        return parts * ((job.kv_heads + heads - 1) / heads);
    };
    while (tile > 1 && tile * group > 12 && threads > 1 && count(tile, 1) < 2 * threads) tile = (tile + 1) / 2;
    auto load = [&](long heads) { return (count(tile, heads) + threads - 1) / threads * heads; };  // of one thread
    long heads = 1, most = std::min({job.kv_heads, MAX_QUERIES / (group * tile), NEAR_BYTES / bytes});
    for (long candidate = 2; candidate <= most; ++candidate)
        if (load(candidate) <= load(heads)) heads = candidate;
    std::vector<AttentionUnit> units;
    units.reserve(count(tile, heads));
    for (long g = 0; g < group_count; ++g) {
        long rows = groups[g + 1] - groups[g], parts = (rows + tile - 1) / tile;
        for (long i = 0; i < parts; ++i)
            for (long head = 0; head < job.kv_heads; head += heads)
                units.push_back({groups[g] + rows * i / parts, groups[g] + rows * (i + 1) / parts, head,
                                 std::min(head + heads, job.kv_heads)});
    }
    return units;
}

void attend(Member& member, const Operations& operations, const Attention& job,
            const std::vector<AttentionUnit>& units, Memory memory) {
    member.share((long)units.size(), [&](long piece) { operations.attend(job, units[piece], memory.own); });
}

void gate(Member& member, const Operations& operations, const Gate& job) {
    long parts = (job.size + GATE_COLUMNS - 1) / GATE_COLUMNS;
    share_units(member, job.rows * parts, [&](long unit) {
        long row = unit / parts, first = unit % parts * GATE_COLUMNS;
        long count = job.size - first < GATE_COLUMNS ? job.size - first : GATE_COLUMNS;
        const float* from = job.gate_up + row * 2 * job.size + first;
        operations.gate_part(from, from + job.size, job.y + row * job.size + first, count, job.gelu);
    });
}

}  // namespace forerun
