// What the portable part (library.cpp) asks of the part that exists once per instruction set.
// Plain data and function pointers only: templates of the standard library must not be instantiated on both sides.
#pragma once

#include <cstdint>

namespace forerun {

constexpr long KEY_BLOCK = 64;      // attention visits keys in blocks of so many absolute positions
constexpr long CHUNK_COLUMNS = 32;  // columns of a weight that one thread takes at a time
constexpr long MAX_HEAD_DIM = 256;
constexpr long MAX_QUERIES = 64;  // (row, head) pairs that one attention unit holds

struct Norm {
    const float* weight;  // null: no norm
    float epsilon;
};

// What a weight's values are. The meaning of the quantised ones is said in kernels/quantized.py.
// Keys and values have the first three: INT8 with a scale per vector (kernels/kv_store.py).
enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT8_GROUPS = 3, INT4_GROUPS = 4 };

constexpr long element_bytes(int32_t format) { return format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1; }

// A packed linear layer with n outputs and k inputs.
struct Weight {
    const void* values;  // panels, see linear.h and quantized_panel.h
    const float* bias;   // [n] or null
    int64_t n, k;
    int32_t format;
    int32_t group, zero, minima;   // of formats with groups: inputs in a group, code of zero, whether there are minima
    int32_t activation_bits;       // of quantised formats: 8 or 16
};

// What pack() reads: values [n, k] in their format (codes a byte each), scales and minima as in kernels/quantized.py.
struct Source {
    const void *values, *scales, *minima;
};

// Rows of activations as a product wants them: codes [rows][planes][padded k], sums [rows][padded k / 32] over each 32 of
// the codes, scales [rows]. Unused (codes null) where the product takes the floats themselves.
struct Activations {
    int8_t* codes;
    int32_t* sums;
    float* scales;
};

struct Linear {
    const float* x;  // [rows, k]
    Activations activations;
    const Weight* weight;
    const float* bias;      // [n] or null
    const float* residual;  // [rows, n] or null
    float* y;               // [rows, n]
    int64_t rows;
    float softcap;  // 0: off
};

// What the library is asked for: y = softcap(residual + after(before(x[row_index]) W^T + bias)), all but x, W and y
// optional. A soft cap goes with no norm after.
struct Projection {
    const float* x;            // [rows, k], or what row_index reaches
    const int64_t* row_index;  // [rows] or null: row i of the work is x[row_index[i]]
    Norm before;
    const Weight* weight;
    Norm after;
    const float* residual;  // [rows, n] or null
    float* y;               // [rows, n]
    int64_t rows;
    float softcap;  // 0: off
};

struct Embedding {
    const void* table;  // [entries, size]
    const int64_t* token_ids;  // [rows]
    float* y;                  // [rows, size]
    int64_t rows, size;
    float scale;
    bool bf16;
};

struct Rotation {
    const float* qkv;  // [rows, (heads + 2 kv_heads) * head_dim]
    float* q;          // [rows, heads * head_dim]
    void *keys, *values;               // [slots, kv_heads, head_dim]
    float *key_scales, *value_scales;  // of INT8: [slots, kv_heads]
    const float *cosines, *sines;  // [positions, half]
    const int64_t *positions, *slots;  // [rows]
    Norm query_norm, key_norm;
    int64_t rows, heads, kv_heads, head_dim, half;
    int32_t format;  // of keys and values
};

struct Path {
    const int64_t* slots;
    int64_t length, shared;
};

struct Attention {
    const float* q;  // [rows, heads * head_dim]
    float* out;
    const void *keys, *values;               // [slots, kv_heads, head_dim]
    const float *key_scales, *value_scales;  // of INT8: [slots, kv_heads]
    const Path* paths;
    const int64_t* positions;  // [rows]
    const int64_t* rows;       // rows of the batch, those of a group together
    const int64_t* path_of;    // for each entry of `rows`
    long heads, kv_heads, head_dim, window;  // window 0: all
    float scale, softcap;                    // softcap 0: off
    int32_t format;                          // of keys and values
};

// What one thread does at a time: entries [first, last) of Attention::rows, which belong to one sequence, and key/value
// heads [first_head, last_head). At most MAX_QUERIES pairs of a row and a query head, unless it is one key/value head.
struct AttentionUnit {
    long first, last, first_head, last_head;
};

struct Gate {
    const float* gate_up;  // [rows, 2 * size]
    float* y;              // [rows, size]
    int64_t rows, size;
    bool gelu;
};

// y = residual + the sum, in the order of the experts, of share * down(gate(gate_up(before(x)))) over the chosen ones.
// All gate_up have one shape, and so have all down.
struct Mixture {
    const float* x;  // [rows, features]
    Norm before;
    const Weight* router;
    const Weight* const* gate_up;  // [experts]
    const Weight* const* down;     // [experts]
    const float* residual;         // [rows, features] or null
    float* y;                      // [rows, features]
    int64_t rows, experts, top_k;
    bool renormalise, gelu;
};

struct Operations {
    const char* name;
    long scratch_floats;  // working memory of attend(), per thread
    long (*packed_bytes)(const Weight&);
    void (*pack)(const Source& from, const Weight& weight, long chunk);  // fills the chunk's part of weight.values
    long (*code_bytes)(const Weight&);  // of one row's codes; 0 if the product takes floats
    void (*encode_row)(const Weight&, const float* x, const Activations&, long row);
    void (*linear)(const Linear&, long chunk);
    void (*norm_row)(const float* x, Norm norm, const float* residual, float* y, long size);
    void (*rotate)(const Rotation&, long row, long kv_head);  // with the query heads that go with it
    void (*attend)(const Attention&, const AttentionUnit&, float* scratch);
    void (*gate_part)(const float* gate, const float* up, float* y, long size, bool gelu);
    void (*embed_row)(const void* row, bool bf16, float scale, float* y, long size);
    // The top_k experts of a row, ascending, and their shares; overwrites the logits.
    void (*route_row)(float* logits, long experts, long top_k, bool renormalise, int32_t* chosen, float* shares);
    // y = residual + sum over i of rows[place[i]] * shares[i].
    void (*combine_row)(const float* rows, const int32_t* place, const float* shares, long count, const float* residual,
                        float* y, long size);
};

const Operations* avx2_operations();
const Operations* avx512_operations();
const Operations* amx_operations();

}  // namespace forerun
