#include "program.h"

namespace forerun {

namespace {

void larger(Need& need, Need other) {
    need.shared = need.shared > other.shared ? need.shared : other.shared;
    need.own = need.own > other.own ? need.own : other.own;
}

// Layers with as many heads cut their attention the same way.
struct Units {
    long heads, kv_heads;
    std::vector<AttentionUnit> units;
};

// One step: instructions become operations by adding what the step knows.
class Replay {
public:
    Replay(Context& context, const Program& program, const Step& step)
        : operations_(*context.operations), program_(program), step_(step), buffers_(program.buffers) {
        int threads = context.pool.threads();
        for (long i = 0; i < program.count; ++i) prepare(program.instructions[i], threads);
        long used = 0;
        for (long i = 0; i < program.buffers; ++i) used += lines(step.rows * program.widths[i]);
        float* memory = context.memory(used + need_.shared + threads * lines(need_.own) + 1);
        if (!memory) throw std::bad_alloc();
        for (long i = 0; i < program.buffers; ++i) {
            buffers_[i] = memory;
            memory += lines(step.rows * program.widths[i]);
        }
        shared_ = memory;
        own_ = memory + need_.shared;
    }

    void replay(Member& member) const {
        Memory memory = {shared_, own_ + member.thread * lines(need_.own)};
        for (long i = 0; i < program_.count && !member.left_behind(); ++i)
            execute(member, program_.instructions[i], memory);
    }

private:
    float* at(int32_t buffer) const { return buffer < 0 ? nullptr : buffers_[buffer]; }

    Projection projection(const Instruction& instruction) const {
        Projection job = instruction.projection;
        bool logits = instruction.y == LOGITS;
        job.x = at(instruction.x);
        job.residual = at(instruction.residual);
        job.y = logits ? step_.logits : at(instruction.y);
        job.row_index = logits ? step_.logit_rows : nullptr;
        job.rows = logits ? step_.wanted : step_.rows;
        return job;
    }

    // Where the layer's keys and values lie.
    template <typename Job>
    void place(Job& job, int32_t layer) const {
        job.keys = step_.keys + layer * step_.layer_bytes;
        job.values = step_.values + layer * step_.layer_bytes;
        job.key_scales = step_.format == INT8 ? step_.key_scales + layer * step_.layer_scales : nullptr;
        job.value_scales = step_.format == INT8 ? step_.value_scales + layer * step_.layer_scales : nullptr;
        job.format = step_.format;
    }

    Rotation rotation(const Instruction& instruction) const {
        Rotation job = instruction.rotation;
        const RotaryTable& table = step_.rotary[instruction.rotary];
        job.qkv = at(instruction.x);
        job.q = at(instruction.y);
        place(job, instruction.layer);
        job.cosines = table.cosines;
        job.sines = table.sines;
        job.half = table.half;
        job.positions = step_.positions;
        job.slots = step_.slots;
        job.rows = step_.rows;
        return job;
    }

    Attention attention(const Instruction& instruction) const {
        Attention job = instruction.attention;
        job.q = at(instruction.x);
        job.out = at(instruction.y);
        place(job, instruction.layer);
        job.paths = step_.paths;
        job.positions = step_.positions;
        job.rows = step_.order;
        job.path_of = step_.path_of;
        return job;
    }

    Mixture mixture(const Instruction& instruction) const {
        Mixture job = instruction.mixture;
        job.x = at(instruction.x);
        job.residual = at(instruction.residual);
        job.y = at(instruction.y);
        job.rows = step_.rows;
        return job;
    }

    const std::vector<AttentionUnit>* units(const Attention& job) const {
        for (const Units& made : units_)
            if (made.heads == job.heads && made.kv_heads == job.kv_heads) return &made.units;
        return nullptr;
    }

    void prepare(const Instruction& instruction, int threads) {
        if (instruction.code == LINEAR) larger(need_, need_of(projection(instruction), operations_));
        if (instruction.code == MIXTURE) larger(need_, need_of(mixture(instruction), operations_));
        if (instruction.code != ATTEND) return;
        Attention job = instruction.attention;
        job.format = step_.format;
        larger(need_, need_of(job, operations_));
        if (!units(job))
            units_.push_back(
                {job.heads, job.kv_heads, attention_units(job, step_.groups, step_.group_count, threads)});
    }

    void execute(Member& member, const Instruction& instruction, Memory memory) const {
        switch (instruction.code) {
            case EMBED: {
                Embedding job = instruction.embedding;
                job.token_ids = step_.token_ids;
                job.y = at(instruction.y);
                job.rows = step_.rows;
                return embed(member, operations_, job);
            }
            case LINEAR:
                return project(member, operations_, projection(instruction), memory);
            case ROTATE:
                return rotate(member, operations_, rotation(instruction));
            case ATTEND:
                return attend(member, operations_, attention(instruction), *units(instruction.attention), memory);
            case GATE:
                return gate(member, operations_,
                            {at(instruction.x), at(instruction.y), step_.rows, instruction.gate.size,
                             instruction.gate.gelu});
            case MIXTURE:
                return mix(member, operations_, mixture(instruction), memory);
        }
    }

    const Operations& operations_;
    const Program& program_;
    const Step& step_;
    std::vector<float*> buffers_;
    std::vector<Units> units_;
    Need need_;
    float* shared_;
    float* own_;
};

}  // namespace

bool run(Context& context, const Program& program, const Step& step) {
    try {
        Replay replay(context, program, step);
        context.pool.region([&](Member& member) { replay.replay(member); });
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace forerun
