// A model's operations as a list that is replayed for every batch in one region of the pool (program.py records it).
#pragma once

#include "operations.h"
#include "work.h"

namespace forerun {

enum Code : int32_t { EMBED = 0, LINEAR = 1, ROTATE = 2, ATTEND = 3, GATE = 4, MIXTURE = 5 };

constexpr int32_t NOTHING = -1;
constexpr int32_t LOGITS = -2;  // as y of a LINEAR: the wanted rows of x are taken, and the step says where y lies

// x, residual, y: numbers of buffers. Of the operation all is set but what differs from step to step: the places of
// activations, what the batch says, where keys and values lie and in which type, the rotary table.
struct Instruction {
    int32_t code, x, residual, y;
    int32_t layer, rotary;
    union {
        Embedding embedding;
        Projection projection;
        Rotation rotation;
        Attention attention;
        Gate gate;
        Mixture mixture;
    };
};

// widths: floats per row of each buffer.
struct Program {
    const Instruction* instructions;
    int64_t count;
    const int64_t* widths;
    int64_t buffers;
};

struct RotaryTable {
    const float *cosines, *sines;  // [positions, half]
    int64_t half;
};

// A batch, the memory of keys and values that it works on, and where the logits go: [wanted, vocabulary].
struct Step {
    const int64_t *token_ids, *positions, *slots, *logit_rows;
    const int64_t *order, *path_of, *groups;
    const Path* paths;
    int64_t rows, wanted, group_count;
    char *keys, *values;
    float *key_scales, *value_scales;    // of INT8
    int64_t layer_bytes, layer_scales;  // from one layer to the next: bytes of keys, and scales
    const RotaryTable* rotary;
    float* logits;
    int32_t format;  // of keys and values
};

// False when memory is short.
bool run(Context& context, const Program& program, const Step& step);

}  // namespace forerun
