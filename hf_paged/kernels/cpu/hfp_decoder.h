// The C ABI of the native decoder: layers of a transformer as plain structs over packed weights, see decoder.inl.
//
// Packed weights of a product y = x W^T + b, W [n, k], in panels of 32 outputs, n and k padded with zeros to whole ones:
//
//   fp32   [n / 32][k][32 outputs]
//   bf16   [n / 32][k / 32][2][16 pairs][16 outputs][2], k padded to a multiple of 32
//   int8   [n / 32][k / 64][2][16 quads][16 outputs][4], k padded to a multiple of 64
//
// or, bf16, as they are, [n][k], k a multiple of 32.
//
// A thread that computes a panel reads it from front to end. The layout depends on the dtype only: 64 bytes are one row
// of an AMX tile, the operand of vdpbf16ps or vpdpbusd, or a vector of floats, and 1 KiB in one piece is a tile.
#pragma once

#include "hfp_abi.h"

enum hfp_act { HFP_SILU = 0, HFP_GELU_TANH = 1, HFP_GELU = 2, HFP_RELU = 3 };

extern "C" {

// Root mean square norm over the last dimension, x / sqrt(mean(x^2) + eps) * w; absent where w is null.
struct hfp_norm {
    const float* w;
    float eps;
};

// Weights in 8 bits have a scale. Where they have offsets too, so are the rows that are multiplied with them, each with a
// scale of its own: what torchao calls dynamic activation quantization, symmetric and by row.
struct hfp_linear {
    const void* w;           // packed or as they are; null where there is none
    const float* bias;       // [n] or null
    const float* scale;      // [n, padded] of weights in 8 bits, null of others
    const int32_t* offsets;  // [n, padded] 128 times the sum of an output's weights, or null
    int32_t n;
    int32_t k;
    int32_t as_they_are;
};

// One decoder layer. The stream x is fp32:
//   x += after_attn(o(attend(rope(qk_norm(qkv(before_attn(x)))))))
//   x += after_mlp(down(act(gate) * up)), gate and up of before_mlp(x)
// gate_up holds 16 gate outputs and the 16 up outputs that belong to them in every panel. Layers whose gate_up is null
// end after the attention.
struct hfp_decoder_layer {
    hfp_norm before_attn, after_attn, before_mlp, after_mlp, q_norm, k_norm;
    hfp_linear qkv, o, gate_up, down;
    hfp_layer* kv;
    const hfp_params* params;
    const float* sinks;
    int32_t act;
    int32_t whole_qk_norm;  // q_norm and k_norm are over all heads together
};

struct hfp_decoder {
    const hfp_decoder_layer* layers;
    int32_t hidden, heads, kv_heads, head_dim;
    int32_t rotary_dim;  // leading dimensions of a head that are rotated, in halves
    int32_t dtype;       // of weights, blocks and what products read: HFP_F32 or HFP_BF16
    int32_t isa;
    int32_t num_threads;
};

// Rows of every buffer are padded to a multiple of 32, and columns of `a` and `h` likewise; `a` begins zeroed.
struct hfp_workspace {
    void* a;    // dtype [rows, round(hidden)]
    void* h;    // dtype [rows, round(intermediate)], or null
    void* q;    // dtype [rows, heads * head_dim]
    void* k;    // dtype [rows, kv_heads * head_dim]
    void* v;    // the same
    void* o;    // dtype [rows, heads * head_dim]
    float* y;   // fp32 [rows, max(qkv outputs, hidden)]
    void* q8;   // int8 [rows, round(the most that a product reads, 64)], or null where no rows are in 8 bits
    float* scales;  // fp32 [rows], with q8
};
}

struct hfp_decode_args {
    const hfp_decoder* decoder;
    const hfp_workspace* work;
    const hfp_batch* batch;
    const int64_t* slots;
    float* x;  // [tokens, hidden]
    const float* cos;  // [tokens, rotary_dim]
    const float* sin;
    int64_t tokens;
    int32_t first, last;  // layers [first, last)
};

struct hfp_project_args {
    const hfp_decoder* decoder;
    const hfp_norm* norm;
    const hfp_linear* linear;  // null: `out` is the normed rows, in the decoder's dtype
    const hfp_workspace* work;
    const float* x;            // [rows, hidden]
    void* out;                 // fp32 [rows, n]
    int64_t rows;
};

#define HFP_DECODER_ENTRIES(ISA)                 \
    int hfp_decode_##ISA(const hfp_decode_args*); \
    int hfp_project_##ISA(const hfp_project_args*);

HFP_DECODER_ENTRIES(portable)
#ifdef HFP_X86
HFP_DECODER_ENTRIES(avx2)
HFP_DECODER_ENTRIES(avx512)
HFP_DECODER_ENTRIES(avx512_bf16)
HFP_DECODER_ENTRIES(amx)
#endif

// common.cpp
extern "C" int hfp_attend(const hfp_layer*, const hfp_batch*, const hfp_params*, void*, const void*, int64_t, int64_t, int64_t,
                          int32_t, int32_t, const float*, const float*);
extern "C" int hfp_write(hfp_layer*, const void*, const void*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t);
