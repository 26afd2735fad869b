// Compiled for AVX2, which every machine has that runs any of the library.
#include "choice.h"

#include <immintrin.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace forerun {

namespace {

constexpr int64_t LANES = 8;

// The greatest of `size` values that are not NaN; -inf if there are none.
inline float greatest(const float* from, int64_t size) {
    __m256 high = _mm256_set1_ps(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) high = _mm256_max_ps(_mm256_loadu_ps(from + i), high);  // of NaN and high: high
    float lanes[LANES], found = -INFINITY;
    _mm256_storeu_ps(lanes, high);
    for (float lane : lanes) found = lane > found ? lane : found;
    for (; i < size; ++i) found = from[i] > found ? from[i] : found;
    return found;
}

// a * b modulo 2^64, of four numbers and a constant.
inline __m256i multiplied(__m256i a, uint64_t b) {
    const __m256i low = _mm256_set1_epi64x(b & 0xffffffff), high = _mm256_set1_epi64x(b >> 32);
    __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), low), _mm256_mul_epu32(a, high));
    return _mm256_add_epi64(_mm256_mul_epu32(a, low), _mm256_slli_epi64(crossed, 32));
}

// The hash but for its last shift; only the upper half of the result is used, which that shift would leave as it is.
inline __m256i stirred(__m256i bits, const Hash& hash) {
    for (int round = 0; round < 2; ++round) {
        bits = _mm256_xor_si256(bits, _mm256_srl_epi64(bits, _mm_cvtsi32_si128(hash.shifts[round])));
        bits = multiplied(bits, hash.factors[round]);
    }
    return bits;
}

// Unsigned 32-bit integers as floats, rounded once: both halves are exact.
inline __m256 as_floats(__m256i numbers) {
    __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(numbers, 16));
    __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(numbers, _mm256_set1_epi32(0xffff)));
    return _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0f)), low);
}

}  // namespace

void block_maxima(const float* row, int64_t size, float* maxima) {
    for (int64_t start = 0; start < size; start += MAXIMA_BLOCK)
        *maxima++ = greatest(row + start, size - start < MAXIMA_BLOCK ? size - start : MAXIMA_BLOCK);
}

int64_t at_least(const float* row, int64_t size, float threshold, int64_t* places, int64_t room) {
    const __m256 least = _mm256_set1_ps(threshold);
    int64_t found = 0, i = 0;
    auto take = [&](int64_t place) {
        if (found < room) places[found] = place;
        ++found;
    };
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        __m256 reached[4];
        for (int part = 0; part < 4; ++part)
            reached[part] = _mm256_cmp_ps(_mm256_loadu_ps(row + i + part * LANES), least, _CMP_GE_OQ);
        __m256 any = _mm256_or_ps(_mm256_or_ps(reached[0], reached[1]), _mm256_or_ps(reached[2], reached[3]));
        if (_mm256_testz_ps(any, any)) continue;
        for (int part = 0; part < 4; ++part)
            for (unsigned mask = _mm256_movemask_ps(reached[part]); mask; mask &= mask - 1)
                take(i + part * LANES + __builtin_ctz(mask));
    }
    for (; i < size; ++i)
        if (row[i] >= threshold) take(i);
    return found;
}

void score_ceilings(const float* row, int64_t size, float best, float temperature, const Hash& hash, float* ceilings) {
    const __m256 top = _mm256_set1_ps(best), divisor = _mm256_set1_ps(temperature);
    const __m256 slope = _mm256_set1_ps(hash.slope), offset = _mm256_set1_ps(hash.offset);
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    uint64_t first[4];
    for (int lane = 0; lane < 4; ++lane) first[lane] = hash.key + lane * hash.golden;
    __m256i counter = _mm256_loadu_si256((const __m256i*)first);
    const __m256i step = _mm256_set1_epi64x(4 * hash.golden);
    for (int64_t i = 0; i < size; i += LANES) {
        __m256i one = stirred(counter, hash);
        counter = _mm256_add_epi64(counter, step);
        __m256i two = stirred(counter, hash);
        counter = _mm256_add_epi64(counter, step);
        // The upper halves: 0 1 4 5 | 2 3 6 7 after the shuffle, and then in order.
        __m256i halves = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(one), _mm256_castsi256_ps(two), 0xdd));
        __m256i bits = _mm256_castps_si256(as_floats(_mm256_permutevar8x32_epi32(halves, order)));
        __m256 ceiling = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(bits), slope), offset);
        float rest[LANES] = {};
        bool whole = i + LANES <= size;
        if (!whole) memcpy(rest, row + i, (size - i) * sizeof(float));
        __m256 logits = _mm256_loadu_ps(whole ? row + i : rest);
        __m256 sum = _mm256_add_ps(ceiling, _mm256_div_ps(_mm256_sub_ps(logits, top), divisor));
        _mm256_storeu_ps(whole ? ceilings + i : rest, sum);
        if (!whole) memcpy(ceilings + i, rest, (size - i) * sizeof(float));
    }
}

bool move_slots(char* store, const Moves& moves) {
    char* copy = (char*)malloc(moves.count * moves.slot_bytes + 1);
    if (!copy) return false;
    for (int64_t layer = 0; layer < moves.layers; ++layer, store += moves.layer_bytes) {
        for (int64_t i = 0; i < moves.count; ++i)
            memcpy(copy + i * moves.slot_bytes, store + moves.sources[i] * moves.slot_bytes, moves.slot_bytes);
        for (int64_t i = 0; i < moves.count; ++i)
            memcpy(store + moves.targets[i] * moves.slot_bytes, copy + i * moves.slot_bytes, moves.slot_bytes);
    }
    free(copy);
    return true;
}

}  // namespace forerun
