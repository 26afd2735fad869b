// The operations themselves, compiled once per instruction set (build.py says with which flags and FORERUN_OPERATIONS).
#include "operations.h"

#include "attention.h"
#include "linear.h"
#include "quantized.h"
#include "simd.h"

namespace {

using namespace forerun;

// Whether the product takes activations as they are; or else rows of codes.
bool takes_floats(const Weight& weight) {
#ifdef FORERUN_AMX
    return weight.format == FLOAT32;
#else
    return weight.format == FLOAT32 || weight.format == BFLOAT16;
#endif
}

long packed_bytes(const Weight& weight) { return takes_floats(weight) ? float_bytes(weight) : quantized_bytes(weight); }

long code_bytes(const Weight& weight) { return takes_floats(weight) ? 0 : row_code_bytes(weight); }

void pack(const Source& from, const Weight& weight, long chunk) {
    if (takes_floats(weight)) return pack_float(from, weight, chunk);
#ifdef FORERUN_AMX
    if (weight.format == BFLOAT16) return pack_pairs(from, weight, chunk);
#endif
    pack_quantized(from, weight, chunk);
}

void encode(const Weight& weight, const float* x, const Activations& to, long row) {
#ifdef FORERUN_AMX
    if (weight.format == BFLOAT16) return encode_pairs(weight, x, to, row);
#endif
    encode_row(weight, x, to, row);
}

void linear(const Linear& job, long chunk) {
    if (!takes_floats(*job.weight)) return quantized_chunk(job, chunk);
    job.weight->format == BFLOAT16 ? linear_chunk<uint16_t>(job, chunk) : linear_chunk<float>(job, chunk);
}

void norm_row(const float* x, Norm norm, const float* residual, float* y, long size) {
    vfloat squares{};
    for (long i = 0; i < size; i += LANES) {
        vfloat v = load_part(x + i, size - i);
        squares = fma(v, v, squares);
    }
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / size + norm.epsilon);
    for (long i = 0; i < size; i += LANES) {
        vfloat v = load_part(x + i, size - i) * factor * load_part(norm.weight + i, size - i);
        if (residual) v += load_part(residual + i, size - i);
        store_part(y + i, v, size - i);
    }
}

// `SMALLEST` and `LARGEST_SCALE` of kernels/kv_store.py.
constexpr float SMALLEST = 0x1p-120f, LARGEST_SCALE = 0x1p121f;

// Norm (if any) and RoPE of one head: first and second half of the turning features turn together.
void rotate_head(const float* x, Norm norm, const float* cosines, const float* sines, long size, long half, float* y) {
    if (norm.weight)
        norm_row(x, norm, nullptr, y, size);
    else
        memcpy(y, x, size * sizeof(float));
    for (long i = 0; i < half; i += LANES) {
        long count = half - i;
        vfloat a = load_part(y + i, count), b = load_part(y + half + i, count);
        vfloat c = load_part(cosines + i, count), s = load_part(sines + i, count);
        store_part(y + i, a * c - b * s, count);
        store_part(y + half + i, b * c + a * s, count);
    }
}

FORERUN_INLINE float finite(float x) { return __builtin_isfinite(x) ? x : 0.0f; }

// As `encode` of kernels/kv_store.py does. Returns the scale.
float store_codes(const float* x, int8_t* codes, long size) {
    const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    float greatest = 0;
    for (long i = 0; i < size; ++i) {
        float magnitude = __builtin_fabsf(finite(x[i]));
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    if (greatest < SMALLEST) {
        memset(codes, 0, size);
        return 0;
    }
    float factor = 127.0f / greatest;
    for (long i = 0; i < size; i += LANES) {
        vfloat part = load_part(x + i, size - i);
        part = (vfloat)((vint)part & (vint)(part - part == vfloat{}));  // what is not finite to 0
        vint whole = (vint)(part * factor + magic) - (vint)magic;
        store_part(codes + i, whole, size - i);
    }
    float scale = greatest / 127.0f;
    return scale < LARGEST_SCALE ? scale : LARGEST_SCALE;
}

void store_head(const float* x, void* to, float* scales, int32_t format, long head, long size) {
    long at = head * size;
    if (format == FLOAT32)
        memcpy((float*)to + at, x, size * sizeof(float));
    else if (format == INT8)
        scales[head] = store_codes(x, (int8_t*)to + at, size);
    else
        for (long i = 0; i < size; i += LANES)
            store_part((uint16_t*)to + at + i, load_part(x + i, size - i), size - i);
}

void rotate(const Rotation& job, long row, long kv_head) {
    float buffer[MAX_HEAD_DIM];
    long size = job.head_dim, features = (job.heads + 2 * job.kv_heads) * size, group = job.heads / job.kv_heads;
    const float* x = job.qkv + row * features;
    const float* cosines = job.cosines + job.positions[row] * job.half;
    const float* sines = job.sines + job.positions[row] * job.half;
    for (long h = kv_head * group; h < (kv_head + 1) * group; ++h)
        rotate_head(x + h * size, job.query_norm, cosines, sines, size, job.half, job.q + (row * job.heads + h) * size);
    long to = job.slots[row] * job.kv_heads + kv_head;
    rotate_head(x + (job.heads + kv_head) * size, job.key_norm, cosines, sines, size, job.half, buffer);
    store_head(buffer, job.keys, job.key_scales, job.format, to, size);
    // Attention multiplies what a row does not see by 0; a value that is not finite would be seen through that.
    const float* value = x + (job.heads + job.kv_heads + kv_head) * size;
    for (long i = 0; i < size; ++i) buffer[i] = finite(value[i]);
    store_head(buffer, job.values, job.value_scales, job.format, to, size);
}

void gate_part(const float* gates, const float* ups, float* y, long size, bool gelu) {
    for (long i = 0; i < size; i += LANES) {
        vfloat gate = load_part(gates + i, size - i), up = load_part(ups + i, size - i);
        if (gelu) {
            vfloat inner = fma(gate * gate * gate, splat(0.044715f), gate) * 0.7978845608f;
            gate = 0.5f * gate * (1.0f + hyperbolic_tangent(inner));
        } else {
            gate = gate / (1.0f + exponential(-gate));
        }
        store_part(y + i, gate * up, size - i);
    }
}

void embed_row(const void* row, bool bf16, float scale, float* y, long size) {
    for (long i = 0; i < size; i += LANES) {
        vfloat v = bf16 ? load_part((const uint16_t*)row + i, size - i) : load_part((const float*)row + i, size - i);
        store_part(y + i, v * scale, size - i);
    }
}

// Softmax over all experts, then the greatest shares, the first of equal ones; ordered by expert at the end.
void route_row(float* logits, long experts, long top_k, bool renormalise, int32_t* chosen, float* shares) {
    float top = logits[0], total = 0;
    for (long i = 1; i < experts; ++i) top = logits[i] > top ? logits[i] : top;
    for (long i = 0; i < experts; i += LANES)
        store_part(logits + i, exponential(load_part(logits + i, experts - i) - top), experts - i);
    for (long i = 0; i < experts; ++i) total += logits[i];
    float picked = 0;
    for (long rank = 0; rank < top_k; ++rank) {
        long best = -1;
        for (long i = 0; i < experts; ++i) {
            bool taken = false;
            for (long j = 0; j < rank; ++j) taken |= chosen[j] == i;
            if (!taken && (best < 0 || logits[i] > logits[best])) best = i;
        }
        chosen[rank] = (int32_t)best;
        shares[rank] = logits[best] / total;
        picked += shares[rank];
    }
    if (renormalise)
        for (long rank = 0; rank < top_k; ++rank) shares[rank] = shares[rank] / picked;
    for (long i = 1; i < top_k; ++i) {
        int32_t expert = chosen[i];
        float share = shares[i];
        long j = i;
        for (; j > 0 && chosen[j - 1] > expert; --j) chosen[j] = chosen[j - 1], shares[j] = shares[j - 1];
        chosen[j] = expert, shares[j] = share;
    }
}

void combine_row(const float* rows, const int32_t* place, const float* shares, long count, const float* residual,
                 float* y, long size) {
    for (long i = 0; i < size; i += LANES) {
        vfloat sum{};
        for (long j = 0; j < count; ++j) sum += load_part(rows + place[j] * size + i, size - i) * shares[j];
        if (residual) sum = load_part(residual + i, size - i) + sum;
        store_part(y + i, sum, size - i);
    }
}

}  // namespace

namespace forerun {

const Operations* FORERUN_OPERATIONS() {
    static constexpr Operations operations = {
        FORERUN_OPERATIONS_NAME, ATTENTION_SCRATCH, packed_bytes, pack,      code_bytes, encode,    linear,
        norm_row,                rotate,            attend,       gate_part, embed_row,  route_row, combine_row,
    };
    return &operations;
}

}  // namespace forerun
