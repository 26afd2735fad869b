// The operations as threads do them together: each one cut into pieces that a Member shares with the others.
// Whether an operation comes alone (library.cpp) or in a program (program.cpp), this is what is done.
#pragma once

#include <cstdlib>
#include <mutex>
#include <vector>

#include "operations.h"
#include "pool.h"

namespace forerun {

struct Context {
    const Operations* operations;
    Pool pool;
    std::mutex busy;  // one call at a time: they share the pool and the scratch memory
    float* scratch = nullptr;
    long scratch_floats = 0;

    Context(const Operations* chosen, int threads) : operations(chosen), pool(threads) {}
    ~Context() { free(scratch); }
    Context(const Context&) = delete;

    // At least that many floats, aligned; null when memory is short. Kept, so that a step does not allocate.
    float* memory(long floats);
};

// Working memory in floats: `shared` by the threads, and `own` of each. What an operation needs, and where it is.
struct Need {
    long shared = 0, own = 0;
};

struct Memory {
    float *shared, *own;
};

// Rows together read the cache once, and key/value heads together read it in one piece; but every thread wants work.
std::vector<AttentionUnit> attention_units(const Attention& job, const int64_t* groups, long group_count, int threads);

Need need_of(const Projection& job, const Operations& operations);
Need need_of(const Mixture& job, const Operations& operations);
inline Need need_of(const Attention&, const Operations& operations) { return {0, operations.scratch_floats}; }

void embed(Member& member, const Operations& operations, const Embedding& job);
void norm(Member& member, const Operations& operations, const float* x, Norm norm, float* y, long rows, long size);
void project(Member& member, const Operations& operations, const Projection& job, Memory memory);
void rotate(Member& member, const Operations& operations, const Rotation& job);
void attend(Member& member, const Operations& operations, const Attention& job,
            const std::vector<AttentionUnit>& units, Memory memory);
void gate(Member& member, const Operations& operations, const Gate& job);
void mix(Member& member, const Operations& operations, const Mixture& job, Memory memory);

// The sizes of parts of a larger memory: each begins at a cache line, and adjacent lines are not shared.
inline long lines(long floats) { return (floats + 31) / 32 * 32; }

// Calls work(unit) for every unit; units are small, so several are taken at a time.
template <typename Work>
void share_units(Member& member, long units, const Work& work) {
    constexpr long PIECES = 16;
    long pieces = units < PIECES ? units : PIECES;
    member.share(pieces, [&](long piece) {
        for (long unit = units * piece / pieces; unit < units * (piece + 1) / pieces; ++unit) work(unit);
    });
}

inline long chunks_of(const Weight& weight) { return (weight.n + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS; }

// Sums of one row's codes (Activations::sums): k is padded to 64, and 32 have a sum.
inline long sums_of(const Weight& weight) { return (weight.k + 63) / 64 * 2; }

// Rows of activations as a product with the weight wants them, in memory of encoded_floats(); codes are null where it
// takes the floats themselves, and then there is nothing to do for encode_row().
long encoded_floats(const Operations& operations, const Weight& weight, long rows);
Activations encoded_at(const Operations& operations, const Weight& weight, long rows, float* memory);

}  // namespace forerun
