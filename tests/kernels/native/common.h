// What the checks of the instruction sets share: the library's interface, random numbers, small floats, and the judge.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "operations.h"

using namespace forerun;

extern "C" {
int forerun_supported();
void* forerun_create(int isa, int threads);
void forerun_destroy(void* context);
int64_t forerun_packed_bytes(void* context, const Weight* weight);
void forerun_pack(void* context, const Source* from, const Weight* weight);
int forerun_linear(void* context, const Projection* job);
int forerun_rotate(void* context, const Rotation* job);
int forerun_attend(void* context, const Attention* job, const int64_t* groups, long group_count);
int forerun_gate(void* context, const Gate* job);
int forerun_embed(void* context, const Embedding* job);
int forerun_mixture(void* context, const Mixture* job);
}

namespace {

using Floats = std::vector<float>;

// Random numbers that are the same everywhere.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

    uint32_t bits() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)(state_ >> 32);
    }
    float number() { return ((float)(bits() >> 8) / (1 << 23) - 1) + ((float)(bits() >> 8) / (1 << 23) - 1); }
    Floats numbers(long count) {
        Floats all(count);
        for (float& one : all) one = number();
        return all;
    }

private:
    uint64_t state_;
};

float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

float from_bf16(uint16_t value) { return from_bits((uint32_t)value << 16); }

uint16_t to_bf16(float value) {  // not for NaN
    uint32_t bits = to_bits(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_half(uint16_t value) {  // normal numbers only
    return std::ldexp((float)((value & 1023) | 1024), (value >> 10 & 31) - 25) * (value >> 15 ? -1 : 1);
}

bool same(float a, float b) { return to_bits(a) == to_bits(b) || (std::isnan(a) && std::isnan(b)); }

// Compares values and says how the part went when it ends.
class Part {
public:
    Part(const char* isa, int threads, const char* what) : isa_(isa), threads_(threads), what_(what) {}
    ~Part() {
        printf("%-7s %d threads  %-34s %8ld values, %ld wrong, error at most %.3g\n", isa_, threads_, what_, count_,
               wrong_, greatest_);
        fflush(stdout);
        failures += wrong_;
    }

    void equal(float got, float want) { judge(got, want, same(got, want)); }
    // Wrong if further from it than `tolerance`; what is not finite must be of the same kind.
    void near(float got, double want, double tolerance) {
        if (!std::isfinite(want)) return judge(got, want, same(got, (float)want));
        double error = std::fabs(got - want);
        if (error > greatest_) greatest_ = error;
        judge(got, want, error <= tolerance);
    }

    static inline long failures = 0;

private:
    void judge(float got, double want, bool right) {
        ++count_;
        if (!right && ++wrong_ <= 3) printf("  value %ld is %.9g, not %.9g\n", count_ - 1, got, want);
    }

    const char* isa_;
    int threads_;
    const char* what_;
    long count_ = 0, wrong_ = 0;
    double greatest_ = 0;
};

struct Machine {
    const char* isa;
    int threads;
    void* context;
};

}  // namespace
