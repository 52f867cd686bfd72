// Everything but attention: choice of the instruction set, writing, reading back and copying blocks, checksums.
// Compiled for the baseline of the architecture; the code here is bound by memory, not by arithmetic.
#include "hfp_abi.h"

#include <string.h>

#if defined(__linux__) && defined(HFP_X86)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(HFP_X86)
#include <cpuid.h>
#endif

namespace {

constexpr int kGroup = 16;
constexpr int64_t kSerialElements = 32 << 10;  // below this a second thread costs more than it brings

// Runs body(i) for i in [0, n). Static chunks: which thread does what must not matter, and does not.
template <class Body>
inline void parallel_for(int64_t n, int num_threads, Body body) {
#ifdef _OPENMP
    if (num_threads > 1 && n > 1) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (int64_t i = 0; i < n; i++) body(i);
        return;
    }
#endif
    (void)num_threads;
    for (int64_t i = 0; i < n; i++) body(i);
}

// Where token t of a group lies: element (t, d) of K at k_first + d * k_step, and so on. See hfp_abi.h.
struct Shape {
    int64_t k_group, v_group;  // elements in one group of 16 tokens of one head
    int dvp, per_block;
    bool paired;
};

inline Shape shape_of(const hfp_layer* l) {
    Shape s;
    s.dvp = (l->dv + kGroup - 1) / kGroup * kGroup;
    s.k_group = static_cast<int64_t>(kGroup) * l->dk;
    s.v_group = static_cast<int64_t>(kGroup) * s.dvp;
    s.per_block = l->block_size / kGroup;
    s.paired = l->dtype == HFP_BF16;
    return s;
}

inline int64_t group_index(const hfp_layer* l, const Shape& s, int64_t slot, int head) {
    const int64_t block = slot / l->block_size;
    return (block * l->num_kv_heads + head) * s.per_block + slot % l->block_size / kGroup;
}

template <class E>
inline void put_plain(const hfp_layer* l, const Shape& s, int64_t slot, int head, const E* key, const E* value) {
    const int64_t group = group_index(l, s, slot, head);
    const int t = static_cast<int>(slot % kGroup);
    E* k = static_cast<E*>(l->k) + group * s.k_group + t;
    for (int d = 0; d < l->dk; d++) k[d * kGroup] = key[d];
    memcpy(static_cast<E*>(l->v) + group * s.v_group + t * s.dvp, value, sizeof(E) * static_cast<size_t>(l->dv));
}

inline void put_paired(const hfp_layer* l, const Shape& s, int64_t slot, int head, const uint16_t* key, const uint16_t* value) {
    const int64_t group = group_index(l, s, slot, head);
    const int t = static_cast<int>(slot % kGroup);
    uint16_t* k = static_cast<uint16_t*>(l->k) + group * s.k_group + 2 * t;
    for (int d = 0; d < l->dk; d += 2) memcpy(k + d * kGroup, key + d, 4);
    uint16_t* v = static_cast<uint16_t*>(l->v) + group * s.v_group + t / 2 * (2 * s.dvp) + t % 2;
    for (int d = 0; d < l->dv; d++) v[2 * d] = value[d];
}

template <class E>
inline void get_plain(const hfp_layer* l, const Shape& s, int64_t slot, int head, E* key, E* value) {
    const int64_t group = group_index(l, s, slot, head);
    const int t = static_cast<int>(slot % kGroup);
    const E* k = static_cast<const E*>(l->k) + group * s.k_group + t;
    for (int d = 0; d < l->dk; d++) key[d] = k[d * kGroup];
    memcpy(value, static_cast<const E*>(l->v) + group * s.v_group + t * s.dvp, sizeof(E) * static_cast<size_t>(l->dv));
}

inline void get_paired(const hfp_layer* l, const Shape& s, int64_t slot, int head, uint16_t* key, uint16_t* value) {
    const int64_t group = group_index(l, s, slot, head);
    const int t = static_cast<int>(slot % kGroup);
    const uint16_t* k = static_cast<const uint16_t*>(l->k) + group * s.k_group + 2 * t;
    for (int d = 0; d < l->dk; d += 2) memcpy(key + d, k + d * kGroup, 4);
    const uint16_t* v = static_cast<const uint16_t*>(l->v) + group * s.v_group + t / 2 * (2 * s.dvp) + t % 2;
    for (int d = 0; d < l->dv; d++) value[d] = v[2 * d];
}

inline uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

constexpr uint64_t kMixA = 0x9e3779b97f4a7c15ull, kMixB = 0xbf58476d1ce4e5b9ull, kMixC = 0x94d049bb133111ebull;

inline uint64_t finalize(uint64_t x) {
    x = (x ^ (x >> 30)) * kMixB;
    x = (x ^ (x >> 27)) * kMixC;
    return x ^ (x >> 31);
}

// A core's own prefetchers leave half of the bandwidth unused on the servers we measured. Reading past the end of an
// array this way is harmless.
inline void prefetch_ahead(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + 4096, 0, 2); }

// One piece of a checksum: eight independent chains, so that the multiplier and not its latency is the limit. Without
// the rotation a flipped top bit would stay a top bit and two of them would cancel.
uint64_t checksum_piece(const unsigned char* p, int64_t n, uint64_t seed) {
    uint64_t h[8];
    for (int i = 0; i < 8; i++) h[i] = finalize(seed * 8 + static_cast<uint64_t>(i) + kMixA);
    int64_t at = 0;
    for (; at + 64 <= n; at += 64) {
        prefetch_ahead(p + at);
        uint64_t w[8];
        memcpy(w, p + at, 64);
        for (int i = 0; i < 8; i++) h[i] = rotate((h[i] ^ w[i]) * kMixA, 29);
    }
    if (at < n) {
        uint64_t w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        memcpy(w, p + at, static_cast<size_t>(n - at));
        for (int i = 0; i < 8; i++) h[i] = rotate((h[i] ^ w[i]) * kMixA, 29);
    }
    uint64_t total = static_cast<uint64_t>(n);
    for (int i = 0; i < 8; i++) total = finalize(total ^ h[i]) + kMixA;
    return total;
}

#if defined(HFP_X86)
inline uint64_t enabled_states() {
    uint32_t eax, edx;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return (static_cast<uint64_t>(edx) << 32) | eax;
}

bool amx_permitted() {
#if defined(__linux__)
    // Tile data is off until a process asks: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}
#endif

// The highest level both compiled in and runnable here.
int detect_isa() {
#if defined(HFP_X86)
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return HFP_PORTABLE;
    const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12), f16c = c & (1u << 29);
    if (!osxsave || !avx || !fma || !f16c) return HFP_PORTABLE;
    const uint64_t states = enabled_states();
    if ((states & 0x6) != 0x6) return HFP_PORTABLE;
    uint32_t a7, b7, c7, d7;
    if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return HFP_PORTABLE;
    if (!(b7 & (1u << 5))) return HFP_PORTABLE;
    const bool avx512 = (b7 & (1u << 16)) && (b7 & (1u << 17)) && (b7 & (1u << 30)) && (b7 & (1u << 31));
    if (!avx512 || (states & 0xe6) != 0xe6) return HFP_AVX2;
    uint32_t a71, b71, c71, d71;
    if (!__get_cpuid_count(7, 1, &a71, &b71, &c71, &d71) || !(a71 & (1u << 5))) return HFP_AVX512;
    const bool amx = (d7 & (1u << 22)) && (d7 & (1u << 24)) && (states & 0x60000) == 0x60000;
    if (!amx || !amx_permitted()) return HFP_AVX512_BF16;
    return HFP_AMX;
#else
    return HFP_PORTABLE;
#endif
}

}  // namespace

#define HFP_EXPORT extern "C" __attribute__((visibility("default")))

HFP_EXPORT int hfp_abi_version(void) { return HFP_ABI_VERSION; }

HFP_EXPORT int hfp_best_isa(void) {
    static const int isa = detect_isa();
    return isa;
}

// Query [T, Hq, Dk] with strides in elements; out [T, Hq, Dv] contiguous. sinks, alibi: float [Hq] or null.
HFP_EXPORT int hfp_attend(const hfp_layer* layer, const hfp_batch* batch, const hfp_params* params, void* out, const void* query,
                          int64_t num_tokens, int64_t stride_t, int64_t stride_h, int32_t num_q_heads, int32_t num_threads, const float* sinks,
                          const float* alibi) {
    hfp_attend_args args;
    args.layer = layer;
    args.batch = batch;
    args.params = params;
    args.sinks = sinks;
    args.alibi = alibi;
    args.q = static_cast<const char*>(query);
    args.out = static_cast<char*>(out);
    args.q_stride_t = stride_t;
    args.q_stride_h = stride_h;
    args.num_tokens = num_tokens;
    args.num_q_heads = num_q_heads;
    args.num_threads = num_threads;
    const int isa = layer->dtype != HFP_BF16 && layer->isa > HFP_AVX512 ? HFP_AVX512 : layer->isa;
    switch (isa) {
#if defined(HFP_X86)
        case HFP_AVX2: return hfp_attend_avx2(&args);
        case HFP_AVX512: return hfp_attend_avx512(&args);
        case HFP_AVX512_BF16: return hfp_attend_avx512_bf16(&args);
        case HFP_AMX: return hfp_attend_amx(&args);
#endif
        default: return hfp_attend_portable(&args);
    }
}

// key [T, Hkv, Dk], value [T, Hkv, Dv] with strides in elements; slots [T], -1 to skip.
HFP_EXPORT int hfp_write(const hfp_layer* layer, const void* key, const void* value, const int64_t* slots, int64_t num_tokens,
                         int64_t k_stride_t, int64_t k_stride_h, int64_t v_stride_t, int64_t v_stride_h, int32_t num_threads) {
    const Shape s = shape_of(layer);
    const int64_t limit = layer->num_blocks * layer->block_size;
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] >= limit) return HFP_BAD_SLOT;
    }
    const int64_t elements = num_tokens * layer->num_kv_heads * (layer->dk + layer->dv);
    parallel_for(num_tokens, elements < kSerialElements ? 1 : num_threads, [&](int64_t t) {
        const int64_t slot = slots[t];
        if (slot < 0) return;
        for (int h = 0; h < layer->num_kv_heads; h++) {
            const int64_t k_at = t * k_stride_t + h * k_stride_h, v_at = t * v_stride_t + h * v_stride_h;
            if (layer->dtype == HFP_F32) {
                put_plain(layer, s, slot, h, static_cast<const float*>(key) + k_at, static_cast<const float*>(value) + v_at);
            } else if (s.paired) {
                put_paired(layer, s, slot, h, static_cast<const uint16_t*>(key) + k_at, static_cast<const uint16_t*>(value) + v_at);
            } else {
                put_plain(layer, s, slot, h, static_cast<const uint16_t*>(key) + k_at, static_cast<const uint16_t*>(value) + v_at);
            }
        }
    });
    return HFP_OK;
}

// key [N, Hkv, Dk] and value [N, Hkv, Dv], contiguous, from slots [N]; -1 gives zeros.
HFP_EXPORT int hfp_gather(const hfp_layer* layer, void* key, void* value, const int64_t* slots, int64_t num_tokens, int32_t num_threads) {
    const Shape s = shape_of(layer);
    const int64_t limit = layer->num_blocks * layer->block_size;
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] >= limit) return HFP_BAD_SLOT;
    }
    const int64_t elements = num_tokens * layer->num_kv_heads * (layer->dk + layer->dv);
    parallel_for(num_tokens, elements < kSerialElements ? 1 : num_threads, [&](int64_t t) {
        const int64_t slot = slots[t];
        for (int h = 0; h < layer->num_kv_heads; h++) {
            const int64_t k_at = (t * layer->num_kv_heads + h) * layer->dk, v_at = (t * layer->num_kv_heads + h) * layer->dv;
            if (layer->dtype == HFP_F32) {
                float *k = static_cast<float*>(key) + k_at, *v = static_cast<float*>(value) + v_at;
                if (slot >= 0) {
                    get_plain(layer, s, slot, h, k, v);
                } else {
                    memset(k, 0, sizeof(float) * static_cast<size_t>(layer->dk));
                    memset(v, 0, sizeof(float) * static_cast<size_t>(layer->dv));
                }
            } else {
                uint16_t *k = static_cast<uint16_t*>(key) + k_at, *v = static_cast<uint16_t*>(value) + v_at;
                if (slot < 0) {
                    memset(k, 0, 2 * static_cast<size_t>(layer->dk));
                    memset(v, 0, 2 * static_cast<size_t>(layer->dv));
                } else if (s.paired) {
                    get_paired(layer, s, slot, h, k, v);
                } else {
                    get_plain(layer, s, slot, h, k, v);
                }
            }
        }
    });
    return HFP_OK;
}

// Copies block src[i] to dst[i], i ascending, in each of num_tensors arrays of blocks of block_bytes[j] bytes.
HFP_EXPORT int hfp_copy_blocks(void* const* tensors, const int64_t* block_bytes, const int64_t* num_blocks, int64_t num_tensors,
                               const int64_t* src, const int64_t* dst, int64_t num_pairs, int32_t num_threads) {
    int64_t bytes = 0;
    for (int64_t j = 0; j < num_tensors; j++) {
        bytes += block_bytes[j] * num_pairs;
        for (int64_t i = 0; i < num_pairs; i++) {
            if (src[i] < 0 || dst[i] < 0 || src[i] >= num_blocks[j] || dst[i] >= num_blocks[j]) return HFP_BAD_BLOCK;
        }
    }
    parallel_for(num_tensors, bytes < kSerialElements ? 1 : num_threads, [&](int64_t j) {
        char* base = static_cast<char*>(tensors[j]);
        for (int64_t i = 0; i < num_pairs; i++) {
            if (src[i] != dst[i]) memcpy(base + dst[i] * block_bytes[j], base + src[i] * block_bytes[j], static_cast<size_t>(block_bytes[j]));
        }
    });
    return HFP_OK;
}

// A 64-bit digest of raw bytes at about the speed of memory. Depends on every bit and its place, not on num_threads.
// Against accidents (a changed, swapped or negated weight), not against adversaries.
HFP_EXPORT uint64_t hfp_checksum(const void* data, int64_t num_bytes, int32_t num_threads) {
    constexpr int64_t piece = 1 << 18;
    const int64_t pieces = (num_bytes + piece - 1) / piece;
    const unsigned char* bytes = static_cast<const unsigned char*>(data);
    uint64_t total = 0;
    const int threads = pieces > 1 && num_threads > 1 ? num_threads : 1;
    // Pieces carry their number in their seed, so their sum may be taken in any order.
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total) if (threads > 1)
#endif
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t n = num_bytes - i * piece < piece ? num_bytes - i * piece : piece;
        total += checksum_piece(bytes + i * piece, n, static_cast<uint64_t>(i));
    }
    (void)threads;
    return finalize(total + static_cast<uint64_t>(num_bytes));
}

// Reads num_bytes (a multiple of 64 is read) as fast as loads go: the yardstick of benchmarks/kernels.py.
HFP_EXPORT uint64_t hfp_read(const void* data, int64_t num_bytes, int32_t num_threads) {
    typedef uint64_t V8 __attribute__((vector_size(64), may_alias));
    constexpr int64_t piece = 1 << 20;
    const int64_t pieces = num_bytes / piece;
    const char* bytes = static_cast<const char*>(data);
    uint64_t total = 0;
#ifdef _OPENMP
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(^ : total)
#endif
    for (int64_t i = 0; i < pieces; i++) {
        V8 a = {}, b = {}, c = {}, d = {};
        for (int64_t at = 0; at < piece / 4; at += 64) {
            V8 w[4];
            for (int j = 0; j < 4; j++) prefetch_ahead(bytes + i * piece + at + piece / 4 * j);
            for (int j = 0; j < 4; j++) memcpy(&w[j], bytes + i * piece + at + piece / 4 * j, 64);
            a ^= w[0];
            b ^= w[1];
            c ^= w[2];
            d ^= w[3];
        }
        const V8 x = (a ^ b) ^ (c ^ d);
        for (int j = 0; j < 8; j++) total ^= x[j];
    }
    (void)num_threads;
    return total;
}
