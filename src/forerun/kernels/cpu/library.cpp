// The C interface of the library: raw pointers in, nothing thrown out. Sizes are checked by the caller (binding.py).
// This file runs on any x86-64 machine and chooses the operations that the machine at hand can execute.
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>

#include "operations.h"
#include "pool.h"

namespace {

using namespace forerun;

struct Context {
    const Operations* operations;
    Pool pool;
    std::mutex busy;  // one operation at a time: they share the pool and the scratch memory
    float* scratch = nullptr;
    long scratch_floats = 0;

    Context(const Operations* chosen, int threads) : operations(chosen), pool(threads) {}
    ~Context() { free(scratch); }

    // At least that many floats, aligned; null when memory is short. Kept, so that a step does not allocate.
    float* memory(long floats) {
        if (floats <= scratch_floats) return scratch;
        free(scratch);
        scratch_floats = 0;
        scratch = (float*)aligned_alloc(128, (floats * sizeof(float) + 127) / 128 * 128);
        if (scratch) scratch_floats = floats;
        return scratch;
    }
};

// Fewer rows than this are not worth a second thread in operations that only pass over the activations.
constexpr long ROWS_TO_SHARE = 8;

template <typename Work>
void for_rows(Context& context, long rows, const Work& work) {
    if (rows < ROWS_TO_SHARE) {
        for (long row = 0; row < rows; ++row) work(row);
        return;
    }
    constexpr long RUN = 4;
    context.pool.run((rows + RUN - 1) / RUN, [&](long piece, int) {
        for (long row = piece * RUN; row < rows && row < (piece + 1) * RUN; ++row) work(row);
    });
}

// Working memory of a projection, side by side.
struct Workspace {
    float *rows = nullptr, *sums = nullptr;  // rows that were gathered or normed; products that a norm follows
    Activations activations{};

    static constexpr long BLOCK = 128;
    static long rounded(long bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

    // False when memory is short.
    bool take(Context& context, const Projection& job, bool copies) {
        const Weight& weight = *job.weight;
        long code_bytes = context.operations->code_bytes(weight), sum_count = code_bytes ? weight.k / 32 + 2 : 0;
        long parts[] = {copies ? job.rows * weight.k * 4 : 0, job.after.weight ? job.rows * weight.n * 4 : 0,
                        job.rows * code_bytes, job.rows * sum_count * 4, code_bytes ? job.rows * 4 : 0};
        long total = BLOCK;
        for (long part : parts) total += rounded(part);
        char* at = (char*)context.memory(total / sizeof(float));
        if (!at) return false;
        void* places[5];
        for (int i = 0; i < 5; at += rounded(parts[i++])) places[i] = at;
        rows = (float*)places[0], sums = (float*)places[1];
        activations = {(int8_t*)(code_bytes ? places[2] : nullptr), (int32_t*)places[3], (float*)places[4]};
        return true;
    }
};

// False when memory is short.
bool project(Context& context, const Projection& job) {
    const Operations& operations = *context.operations;
    const Weight& weight = *job.weight;
    long rows = job.rows, k = weight.k, n = weight.n;
    if (!rows) return true;
    bool copies = job.before.weight || job.row_index, after = job.after.weight;
    Workspace space;
    if (!space.take(context, job, copies)) return false;
    const float* x = copies ? space.rows : job.x;
    if (copies || space.activations.codes)
        for_rows(context, rows, [&](long row) {
            const float* from = job.x + (job.row_index ? job.row_index[row] : row) * k;
            if (job.before.weight)
                operations.norm_row(from, job.before, nullptr, space.rows + row * k, k);
            else if (copies)
                operations.embed_row(from, false, 1.0f, space.rows + row * k, k);
            if (space.activations.codes) operations.encode_row(weight, x + row * k, space.activations, row);
        });
    float* sums = after ? space.sums : job.y;
    Linear linear = {x,    space.activations, &weight, weight.bias, after ? nullptr : job.residual,
                     sums, rows,              job.softcap};
    context.pool.run((n + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS,
                     [&](long chunk, int) { operations.linear(linear, chunk); });
    if (after)
        for_rows(context, rows, [&](long row) {
            operations.norm_row(sums + row * n, job.after, job.residual ? job.residual + row * n : nullptr,
                                job.y + row * n, n);
        });
    return true;
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

// Rows together read the cache once, and key/value heads together read it in one piece; but every thread wants work.
// Returns the number of units; 0 when memory is short.
long cut_attention(const Attention& job, const int64_t* groups, long group_count, long threads,
                   std::unique_ptr<AttentionUnit[]>& units) {
    constexpr long FULL = MAX_QUERIES / 12 * 12;  // whole blocks of rows in the products of every instruction set
    constexpr long NEAR_BYTES = 512;              // at each position: blocks of so many heads share the cache
    long group = job.heads / job.kv_heads, bytes = job.head_dim * (job.bf16 ? 2 : 4), longest = 1;
    for (long g = 0; g < group_count; ++g) longest = std::max(longest, (long)(groups[g + 1] - groups[g]));
    long tile = std::min(longest, std::max(1L, FULL / group));
    auto count = [&](long rows, long heads) {
        long parts = 0;
        for (long g = 0; g < group_count; ++g) parts += (groups[g + 1] - groups[g] + rows - 1) / rows;
        return parts * ((job.kv_heads + heads - 1) / heads);
    };
    while (tile * group > 12 && threads > 1 && count(tile, 1) < 2 * threads) tile = (tile + 1) / 2;
    auto load = [&](long heads) { return (count(tile, heads) + threads - 1) / threads * heads; };  // of one thread
    long heads = 1, most = std::min({job.kv_heads, MAX_QUERIES / (group * tile), NEAR_BYTES / bytes});
    for (long candidate = 2; candidate <= most; ++candidate)
        if (load(candidate) <= load(heads)) heads = candidate;
    units.reset(new (std::nothrow) AttentionUnit[count(tile, heads)]);
    if (!units) return 0;
    long n = 0;
    for (long g = 0; g < group_count; ++g) {
        long rows = groups[g + 1] - groups[g], parts = (rows + tile - 1) / tile;
        for (long i = 0; i < parts; ++i)
            for (long head = 0; head < job.kv_heads; head += heads)
                units[n++] = {groups[g] + rows * i / parts, groups[g] + rows * (i + 1) / parts, head,
                              std::min(head + heads, job.kv_heads)};
    }
    return n;
}

}  // namespace

extern "C" {

// Bit i: the machine can execute instruction set i of these: AVX2 (with FMA and F16C), AVX-512 (with VNNI), AMX.
__attribute__((visibility("default"))) int forerun_supported() {
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vnni");
    return (avx2 || EMULATED) + 2 * (avx512 || EMULATED) + 4 * (EMULATED || (avx512 && tiles_permitted()));
}

// isa: as in forerun_supported(). Null when memory or threads are short.
__attribute__((visibility("default"))) void* forerun_create(int isa, int threads) {
    const Operations* operations[] = {avx2_operations(), avx512_operations(), amx_operations()};
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
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    return project(context, *job) ? 0 : 1;
}

__attribute__((visibility("default"))) void forerun_norm(void* self, const float* x, long rows, long size,
                                                         const float* weight, float epsilon, float* y) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    for_rows(context, rows, [&](long row) {
        context.operations->norm_row(x + row * size, {weight, epsilon}, nullptr, y + row * size, size);
    });
}

__attribute__((visibility("default"))) void forerun_rotate(void* self, const Rotation* job, long rows) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    for_rows(context, rows, [&](long row) { context.operations->rotate_row(*job, row); });
}

// groups: where each group of rows begins in job->rows, and the end of the last one.
__attribute__((visibility("default"))) int forerun_attend(void* self, const Attention* job, const int64_t* groups,
                                                          long group_count) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    long scratch = context.operations->scratch_floats, threads = context.pool.threads();
    float* memory = context.memory(scratch * threads);
    if (!memory) return 1;
    std::unique_ptr<AttentionUnit[]> units;
    long count = cut_attention(*job, groups, group_count, threads, units);
    if (!count) return 1;
    context.pool.run(count, [&](long piece, int thread) {
        context.operations->attend(*job, units[piece], memory + thread * scratch);
    });
    return 0;
}

__attribute__((visibility("default"))) void forerun_gate(void* self, const float* gate_up, long rows, long size,
                                                         int gelu, float* y) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    for_rows(context, rows, [&](long row) {
        context.operations->gate_row(gate_up + row * 2 * size, y + row * size, size, gelu != 0);
    });
}

__attribute__((visibility("default"))) void forerun_embed(void* self, const void* table, int bf16,
                                                          const int64_t* token_ids, long rows, long size, float scale,
                                                          float* y) {
    Context& context = *(Context*)self;
    std::lock_guard<std::mutex> lock(context.busy);
    for_rows(context, rows, [&](long row) {
        const char* from = (const char*)table + token_ids[row] * size * (bf16 ? 2 : 4);
        context.operations->embed_row(from, bf16 != 0, scale, y + row * size, size);
    });
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

}  // extern "C"
