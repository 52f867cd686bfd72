// The C ABI between hf_paged/kernels/cpu/native.py and the kernels: plain structs, pointers and strides. No torch here.
// Whoever changes a struct changes native.py and HFP_ABI_VERSION with it.
//
// Layout of one layer (G = block_size / 16 groups of 16 tokens a block, DV = v_head_dim rounded up to 16):
//
//   fp32, fp16   K [block][kv_head][G][Dk][16 tokens]          V [block][kv_head][G][16 tokens][DV]
//   bf16         K [block][kv_head][G][Dk / 2][16 tokens][2]   V [block][kv_head][G][8 token pairs][DV][2]
//
// One 64-byte register thus holds one dimension (or pair of dimensions) of 16 keys, which makes q.k a sum over rows
// without any horizontal reduction, and the same bytes are the B operand of vdpbf16ps and of an AMX tile. The layout
// depends on the dtype only, never on the instruction set in use.
#pragma once

#include <stdint.h>

#define HFP_ABI_VERSION 10

enum hfp_dtype { HFP_F32 = 0, HFP_BF16 = 1, HFP_F16 = 2 };

// Ascending: a level implies those below it on the machines we know.
enum hfp_isa { HFP_PORTABLE = 0, HFP_AVX2 = 1, HFP_AVX512 = 2, HFP_AVX512_BF16 = 3, HFP_AMX = 4 };

enum hfp_status { HFP_OK = 0, HFP_BAD_BLOCK = 1, HFP_BAD_TABLE = 2, HFP_NO_MEMORY = 3, HFP_BAD_SLOT = 4 };

extern "C" {

struct hfp_layer {
    void* k;
    void* v;
    int64_t num_blocks;
    int32_t num_kv_heads;
    int32_t dk;
    int32_t dv;
    int32_t block_size;
    int32_t dtype;
    int32_t isa;
    int64_t used_blocks;  // one more than the highest block ever written; kept by hfp_write and hfp_copy_blocks
};

// Fields as in AttentionMetadata. Tables are row-major with table_stride entries a row.
// Group g: sequences group_members[group_starts[g] .. group_starts[g + 1]), one query each, the tables of which begin
// with the same group_blocks[g] blocks. A sequence is in one group at most. hfp_find_groups fills these fields.
struct hfp_batch {
    const int32_t* cu_seqlens_q;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    int64_t table_stride;
    int32_t num_seqs;
    int32_t table_width;
    const int32_t* group_members;
    const int32_t* group_starts;
    const int32_t* group_blocks;
    int64_t num_groups;
};

// Fields as in AttentionParams; 0 means "not set" for window, chunk and softcap.
struct hfp_params {
    float scaling;
    float softcap;
    int32_t window;
    int32_t chunk;
};
}

// What the per-ISA entry points receive.
struct hfp_attend_args {
    const hfp_layer* layer;
    const hfp_batch* batch;
    const hfp_params* params;
    const float* sinks;
    const float* alibi;
    const char* q;
    char* out;
    int64_t q_stride_t;  // in elements
    int64_t q_stride_h;
    int64_t num_tokens;  // rows of q and out; rows past the last sequence become zero
    int32_t num_q_heads;
    int32_t num_threads;
};

typedef int (*hfp_attend_fn)(const hfp_attend_args*);

int hfp_attend_portable(const hfp_attend_args*);
#ifdef HFP_X86
int hfp_attend_avx2(const hfp_attend_args*);
int hfp_attend_avx512(const hfp_attend_args*);
int hfp_attend_avx512_bf16(const hfp_attend_args*);
int hfp_attend_amx(const hfp_attend_args*);
#endif
