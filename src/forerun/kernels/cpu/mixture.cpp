// Mixtures of experts: rows are gathered by expert, go through the experts' products, and come back weighted.
//
// How many experts have work is known only when the router's logits are; how the work is cut must be known before (see
// Member::share). So there are pieces for as many experts as there can be, and those past the last one do nothing.
#include <algorithm>
#include <cstring>

#include "work.h"

namespace forerun {

namespace {

// Where the parts of an operation's shared memory lie. An entry is a row with one of its experts; `place` is where it
// stands when entries are sorted by expert, and then by row.
struct Parts {
    long entries, most;  // most: experts that can have work
    float *normed, *logits, *shares, *gathered, *gate_up, *gated;
    float* encoded;  // inputs of the product at hand
    int32_t *chosen, *place, *next, *active, *start;
    long floats;

    Parts(const Mixture& job, const Operations& operations, float* memory) {
        long features = job.router->k, inner = job.down[0]->k, used = 0;
        entries = job.rows * job.top_k;
        most = entries < job.experts ? entries : job.experts;
        auto take = [&](long count) {
            float* at = memory ? memory + used : nullptr;
            used += lines(count);
            return at;
        };
        normed = take(job.rows * features);
        logits = take(job.rows * job.experts);
        shares = take(entries);
        gathered = take(entries * features);  // then the outputs of the experts
        gate_up = take(entries * 2 * inner);
        gated = take(entries * inner);
        long inputs[] = {encoded_floats(operations, *job.router, job.rows),
                         encoded_floats(operations, *job.gate_up[0], entries),
                         encoded_floats(operations, *job.down[0], entries)};
        encoded = take(*std::max_element(inputs, inputs + 3));
        chosen = (int32_t*)take(entries);
        place = (int32_t*)take(entries);
        next = (int32_t*)take(job.experts);
        active = (int32_t*)take(most);
        start = (int32_t*)take(most + 1);
        floats = used;
    }
};

void sort_by_expert(const Mixture& job, const Parts& parts) {
    memset(parts.next, 0, job.experts * sizeof(int32_t));
    for (long i = 0; i < parts.entries; ++i) ++parts.next[parts.chosen[i]];
    long count = 0;
    int32_t sum = 0;
    for (long expert = 0; expert < job.experts; ++expert) {
        int32_t own = parts.next[expert];
        parts.next[expert] = sum;
        if (!own) continue;
        parts.active[count] = (int32_t)expert;
        parts.start[count++] = sum;
        sum += own;
    }
    parts.start[count] = sum;
    for (; count < parts.most; ++count) parts.active[count] = -1;
    for (long i = 0; i < parts.entries; ++i) parts.place[i] = parts.next[parts.chosen[i]]++;
}

Activations encode(Member& member, const Operations& operations, const Parts& parts, const Weight& weight,
                   const float* x, long rows) {
    Activations to = encoded_at(operations, weight, rows, parts.encoded);
    if (to.codes)
        share_units(member, rows, [&](long row) { operations.encode_row(weight, x + row * weight.k, to, row); });
    return to;
}

// All experts take their inputs in the same form.
void multiply_by_experts(Member& member, const Operations& operations, const Parts& parts,
                         const Weight* const* weights, const float* x, float* y) {
    const Weight& any = *weights[0];
    Activations inputs = encode(member, operations, parts, any, x, parts.entries);
    long chunks = chunks_of(any), code_bytes = operations.code_bytes(any), sums = sums_of(any);
    member.share(parts.most * chunks, [&](long piece) {
        long i = piece / chunks;
        if (parts.active[i] < 0) return;
        const Weight& weight = *weights[parts.active[i]];
        long first = parts.start[i], rows = parts.start[i + 1] - first;
        Activations own{};
        if (inputs.codes)
            own = {inputs.codes + first * code_bytes, inputs.sums + first * sums, inputs.scales + first};
        operations.linear({x + first * weight.k, own, &weight, weight.bias, nullptr, y + first * weight.n, rows, 0.0f},
                          piece % chunks);
    });
}

}  // namespace

Need need_of(const Mixture& job, const Operations& operations) { return {Parts(job, operations, nullptr).floats, 0}; }

void mix(Member& member, const Operations& operations, const Mixture& job, Memory memory) {
    Parts parts(job, operations, memory.shared);
    long features = job.router->k, inner = job.down[0]->k, top_k = job.top_k;
    const float* x = job.x;
    if (job.before.weight) {
        norm(member, operations, x, job.before, parts.normed, job.rows, features);
        x = parts.normed;
    }
    Activations inputs = encode(member, operations, parts, *job.router, x, job.rows);
    Linear routing = {x, inputs, job.router, job.router->bias, nullptr, parts.logits, job.rows, 0.0f};
    member.share(chunks_of(*job.router), [&](long chunk) { operations.linear(routing, chunk); });
    share_units(member, job.rows, [&](long row) {
        operations.route_row(parts.logits + row * job.experts, job.experts, top_k, job.renormalise,
                             parts.chosen + row * top_k, parts.shares + row * top_k);
    });
    member.share(1, [&](long) { sort_by_expert(job, parts); });
    share_units(member, parts.entries, [&](long i) {
        memcpy(parts.gathered + parts.place[i] * features, x + i / top_k * features, features * sizeof(float));
    });
    multiply_by_experts(member, operations, parts, job.gate_up, parts.gathered, parts.gate_up);
    gate(member, operations, {parts.gate_up, parts.gated, parts.entries, inner, job.gelu});
    multiply_by_experts(member, operations, parts, job.down, parts.gated, parts.gathered);
    share_units(member, job.rows, [&](long row) {
        operations.combine_row(parts.gathered, parts.place + row * top_k, parts.shares + row * top_k, top_k,
                               job.residual ? job.residual + row * features : nullptr, job.y + row * features,
                               features);
    });
}

}  // namespace forerun
