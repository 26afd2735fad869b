// The C interface of the library: raw pointers in, nothing thrown out. Sizes are checked by the caller (binding.py).
// This file runs on any x86-64 machine and chooses the operations that the machine at hand can execute.
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "choice.h"
#include "program.h"
#include "work.h"

namespace {

using namespace forerun;

// One operation, alone: work(member, operations, memory). 1 when memory is short.
template <typename Work>
int alone(void* self, Need need, const Work& work) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    long own = lines(need.own);
    float* memory = context.memory(lines(need.shared) + own * context.pool.threads() + 1);
    if (!memory) return 1;
    context.pool.region([&](Member& member) {
        work(member, *context.operations, Memory{memory, memory + lines(need.shared) + member.thread * own});
    });
    return 0;
}

// In a build for tests AVX2 stands in for what the machine lacks (see simd.h and amx.h).
#ifdef FORERUN_EMULATE
constexpr bool EMULATED = true;
#else
constexpr bool EMULATED = false;
#endif

// Whether the processor has tiles for bytes and bfloat16, and the system lets this process use them.
bool tiles_permitted() {
    unsigned a, b, c, d;
    constexpr unsigned TILES = 1u << 24, BYTES = 1u << 25, BFLOAT16_PAIRS = 1u << 22, ALL = TILES | BYTES | BFLOAT16_PAIRS;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

}  // namespace

extern "C" {

// Which sources this was compiled from (identity() of build.py): binding.py takes a library of its own sources only, since
// the structures that others expect may be laid out differently.
__attribute__((visibility("default"))) const char* forerun_identity() { return FORERUN_IDENTITY; }

// Bit i: the machine can execute instruction set i of these: AVX2 (with FMA and F16C), AVX-512 (with VNNI), AMX.
__attribute__((visibility("default"))) int forerun_supported() {
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vnni");
#ifdef FORERUN_AVX2_ALONE
    avx512 = false;
#endif
    return (avx2 || EMULATED) + 2 * (avx512 || EMULATED) + 4 * (EMULATED || (avx512 && tiles_permitted()));
}

// isa: as in forerun_supported(). Null when memory or threads are short.
__attribute__((visibility("default"))) void* forerun_create(int isa, int threads) {
#ifdef FORERUN_AVX2_ALONE
    const Operations* operations[] = {avx2_operations()};
#else
    const Operations* operations[] = {avx2_operations(), avx512_operations(), amx_operations()};
#endif
    try {
        return new Context(operations[isa], threads);
    } catch (...) {
        return nullptr;
    }
}

__attribute__((visibility("default"))) void forerun_destroy(void* context) { delete (Context*)context; }

// Memory that the packed values of a weight take; its other fields must be set.
__attribute__((visibility("default"))) int64_t forerun_packed_bytes(void* context, const Weight* weight) {
    return ((Context*)context)->operations->packed_bytes(*weight);
}

// Ask for huge pages, so that prefetching does not wait for page tables. (No gain was measured on Zen 3; harmless.)
__attribute__((visibility("default"))) void forerun_huge_pages(void* at, long bytes) {
#ifdef MADV_HUGEPAGE
    madvise(at, bytes, MADV_HUGEPAGE);
#endif
}

__attribute__((visibility("default"))) void forerun_pack(void* self, const Source* from, const Weight* weight) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    context.pool.run((weight->n + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS,
                     [&](long chunk, int) { context.operations->pack(*from, *weight, chunk); });
}

__attribute__((visibility("default"))) int forerun_linear(void* self, const Projection* job) {
    return alone(self, need_of(*job, *((Context*)self)->operations), [&](Member& member, const Operations& operations, Memory memory) {
        project(member, operations, *job, memory);
    });
}

__attribute__((visibility("default"))) int forerun_rotate(void* self, const Rotation* job) {
    return alone(self, {}, [&](Member& member, const Operations& operations, Memory) {
        rotate(member, operations, *job);
    });
}

// groups: where each group of rows begins in job->rows, and the end of the last one.
__attribute__((visibility("default"))) int forerun_attend(void* self, const Attention* job, const int64_t* groups,
                                                          long group_count) {
    Context& context = *(Context*)self;
    try {
        auto units = attention_units(*job, groups, group_count, context.pool.threads());
        return alone(self, need_of(*job, *context.operations),
                     [&](Member& member, const Operations& operations, Memory memory) {
                         attend(member, operations, *job, units, memory);
                     });
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

__attribute__((visibility("default"))) int forerun_gate(void* self, const Gate* job) {
    return alone(self, {}, [&](Member& member, const Operations& operations, Memory) {
        gate(member, operations, *job);
    });
}

__attribute__((visibility("default"))) int forerun_embed(void* self, const Embedding* job) {
    return alone(self, {}, [&](Member& member, const Operations& operations, Memory) {
        embed(member, operations, *job);
    });
}

__attribute__((visibility("default"))) int forerun_mixture(void* self, const Mixture* job) {
    return alone(self, need_of(*job, *((Context*)self)->operations), [&](Member& member, const Operations& operations, Memory memory) {
        mix(member, operations, *job, memory);
    });
}

// A whole step. 1 when memory is short.
__attribute__((visibility("default"))) int forerun_run(void* self, const Program* program, const Step* step) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    return run(context, *program, *step) ? 0 : 1;
}

// Reads memory once, as fast as plain loads go, and returns the sum of its 64-bit words (of a rest, nothing): what any
// use of the weights must at least cost. Several streams side by side, as a product has them.
__attribute__((visibility("default"))) int64_t forerun_read(void* self, const void* at, long bytes) {
    typedef uint64_t Words __attribute__((vector_size(64), aligned(8)));  // a cache line
    constexpr long PIECE = 1 << 14, STREAMS = 4, AHEAD = 32;              // in lines: 1 MB, and 2 KB
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    const Words* lines = (const Words*)at;
    long count = bytes / sizeof(Words);
    std::atomic<uint64_t> total{0};
    context.pool.run((count + PIECE - 1) / PIECE, [&](long piece, int) {
        const Words* from = lines + piece * PIECE;
        long size = count - piece * PIECE < PIECE ? count - piece * PIECE : PIECE, part = size / STREAMS;
        Words sums[STREAMS] = {};
        for (long i = 0; i < part; ++i)
            for (long stream = 0; stream < STREAMS; ++stream) {
                const Words* line = from + stream * part + i;
                __builtin_prefetch(line + AHEAD);
                sums[stream] += *line;
            }
        for (long i = part * STREAMS; i < size; ++i) sums[0] += from[i];
        uint64_t sum = 0;
        for (long i = 0; i < 8; ++i) sum += sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    const uint64_t* words = (const uint64_t*)at;
    for (long i = count * 8; i < bytes / 8; ++i) total += words[i];
    return (int64_t)total.load();
}

// The passes over a row of logits, and the moves of slots: see choice.h. They need no context and no threads.
__attribute__((visibility("default"))) void forerun_block_maxima(const float* row, int64_t size, float* maxima) {
    block_maxima(row, size, maxima);
}

__attribute__((visibility("default"))) int64_t forerun_at_least(const float* row, int64_t size, float threshold,
                                                                int64_t* places, int64_t room) {
    return at_least(row, size, threshold, places, room);
}

__attribute__((visibility("default"))) void forerun_score_ceilings(const float* row, int64_t size, float best,
                                                                   float temperature, const Hash* hash,
                                                                   float* ceilings) {
    score_ceilings(row, size, best, temperature, *hash, ceilings);
}

__attribute__((visibility("default"))) int forerun_move_slots(void* store, const Moves* moves) {
    return move_slots((char*)store, *moves) ? 0 : 1;
}

}  // extern "C"
