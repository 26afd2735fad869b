// What is done to a whole row of logits before a token is chosen, and the moves of accepted slots. Nothing here decides
// between tokens: ids that cannot be chosen are left out, by comparisons and by arithmetic that numpy does alike.
#pragma once

#include <cstdint>

namespace forerun {

// Places of the values >= threshold, ascending, to `places`; their number, which may exceed `room`: then the first ones.
int64_t at_least(const float* row, int64_t size, float threshold, int64_t* places, int64_t room);

// The highest value of every MAXIMA_BLOCK values, the last of them fewer; NaN is passed over.
constexpr int64_t MAXIMA_BLOCK = 32;
void block_maxima(const float* row, int64_t size, float* maxima);

// For each token id i: (row[i] - best) / temperature, and a bound of its noise, added up. The bound is that of
// verification/noise.py, whose key and constants these are.
struct Hash {
    uint64_t key, golden, factors[2];
    int32_t shifts[2];
    float slope, offset;
};
void score_ceilings(const float* row, int64_t size, float best, float temperature, const Hash& hash, float* ceilings);

// One store of keys or values: layers of slots. Copies slots `sources` onto `targets` (both [count]), all at once, in
// every layer. False when memory is short.
struct Moves {
    const int64_t *sources, *targets;
    int64_t count, layers, layer_bytes, slot_bytes;
};
bool move_slots(char* store, const Moves& moves);

}  // namespace forerun
