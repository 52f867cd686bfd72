// Everything but attention: choice of the instruction set, writing, reading back and copying blocks, checksums.
// Compiled for the baseline of the architecture; the code here is bound by memory, not by arithmetic.
#include "hfp_decoder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
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

// ---------------------------------------------------------------------------------------------- huge pages
//
// Attention reads a pool block by block in no order, and with pages of 4 KiB it waits for their translation again and
// again. A pool is reserved for the largest use and touched from the lowest block up, so asking for huge pages at once
// would make the first block of every tensor cost 2 MiB. They are asked for as the pool fills: small pages until the
// first 2 MiB are full, which are then collapsed into one, and from there on each 2 MiB when it is entered. A tensor
// thus takes at most one huge page that is not in use yet, and that only once it has filled another.

#if defined(__linux__) && defined(MADV_HUGEPAGE)
constexpr uintptr_t kHugePage = 2 << 20;  // where they are of another size, advice on 2 MiB does no harm
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older ones say EINVAL and leave the job to khugepaged
#endif

inline uintptr_t huge_floor(uintptr_t x) { return x & ~(kHugePage - 1); }
inline uintptr_t huge_ceil(uintptr_t x) { return huge_floor(x + kHugePage - 1); }

// Whether huge pages are switched off on this machine. MADV_COLLAPSE would not ask.
bool huge_pages_allowed() {
    static const bool allowed = [] {
        char text[64] = {0};
        FILE* file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
        if (!file) return false;
        const size_t n = fread(text, 1, sizeof(text) - 1, file);
        fclose(file);
        return n > 0 && !strstr(text, "[never]");
    }();
    return allowed;
}

// Bytes [0, before) of a tensor have been in use, and now [0, now) are. Advice may be refused; it is only advice. Only
// huge pages that lie within the tensor: the rest of one would be memory nobody asked for.
void advise_tensor(void* data, int64_t size, int64_t before, int64_t now) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = huge_ceil(base), end = huge_floor(base + static_cast<uintptr_t>(size));
    if (base + static_cast<uintptr_t>(now) <= first + kHugePage) return;
    const bool entered = base + static_cast<uintptr_t>(before) > first + kHugePage;
    const uintptr_t from = entered ? huge_ceil(base + static_cast<uintptr_t>(before)) : first;
    const uintptr_t reached = huge_ceil(base + static_cast<uintptr_t>(now)), to = reached < end ? reached : end;
    if (from >= to || !huge_pages_allowed()) return;
    madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
    if (!entered && before > 0) madvise(reinterpret_cast<void*>(first), kHugePage, MADV_COLLAPSE);
}
#else
void advise_tensor(void*, int64_t, int64_t, int64_t) {}
#endif

inline int64_t block_bytes(const hfp_layer* l, const Shape& s, bool value) {
    const int64_t group = (value ? s.v_group : s.k_group) * (l->dtype == HFP_F32 ? 4 : 2);
    return group * s.per_block * l->num_kv_heads;
}

// To be called before blocks below `end` are written. Threads may race here: each advises what it moved the mark over.
inline void use_blocks(hfp_layer* l, int64_t end) {
    constexpr int order = __ATOMIC_RELAXED;
    int64_t before = __atomic_load_n(&l->used_blocks, order);
    do {
        if (before >= end) return;
    } while (!__atomic_compare_exchange_n(&l->used_blocks, &before, end, false, order, order));
    const Shape s = shape_of(l);
    const int64_t k = block_bytes(l, s, false), v = block_bytes(l, s, true);
    advise_tensor(l->k, l->num_blocks * k, before * k, end * k);
    advise_tensor(l->v, l->num_blocks * v, before * v, end * v);
}

// ---------------------------------------------------------------------------------------------- slots

inline int64_t highest_slot(const int64_t* slots, int64_t n) {
    int64_t top = -1;
    for (int64_t t = 0; t < n; t++) top = slots[t] > top ? slots[t] : top;
    return top;
}

inline int threads_for_tokens(const hfp_layer* l, int64_t num_tokens, int num_threads) {
    return num_tokens * l->num_kv_heads * (l->dk + l->dv) < kSerialElements ? 1 : num_threads;
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

// ---------------------------------------------------------------------------------------------- groups
//
// Sequences sorted by their tables are a tree: those that begin with the same n blocks are neighbours. One level of it
// is used, the cut through the tree that spares the most blocks.

constexpr int kLeastBlock = 16;  // tokens; the batch does not know how many a block has

struct Sorted {
    const int32_t* table;
    int32_t seq;
    int32_t length;  // entries that may be compared
    int32_t common;  // with the one before
};

inline int32_t common_blocks(const Sorted& a, const Sorted& b) {
    const int32_t n = a.length < b.length ? a.length : b.length;
    int32_t at = 0;
    while (at < n && a.table[at] == b.table[at]) at++;
    return at;
}

inline bool precedes(const Sorted& a, const Sorted& b) {
    const int32_t at = common_blocks(a, b);
    const bool a_ends = at == a.length, b_ends = at == b.length;
    if (a_ends || b_ends) return a_ends && b_ends ? a.seq < b.seq : a_ends;
    return a.table[at] < b.table[at];
}

struct Group {
    int32_t first, end, blocks;
};

// Appends the best groups among rows [first, end) and returns how many blocks they spare.
int64_t choose_groups(const Sorted* rows, int32_t first, int32_t end, Group* groups, int64_t* num_groups) {
    if (end - first < 2) return 0;
    int32_t least = rows[first + 1].common;
    for (int32_t i = first + 2; i < end; i++) least = rows[i].common < least ? rows[i].common : least;
    const int64_t whole = static_cast<int64_t>(least) * (end - first - 1), before = *num_groups;
    int64_t apart = 0;
    for (int32_t from = first, i = first + 1; i <= end; i++) {
        if (i < end && rows[i].common > least) continue;
        apart += choose_groups(rows, from, i, groups, num_groups);
        from = i;
    }
    if (whole < apart || whole == 0) return apart;
    *num_groups = before;
    groups[(*num_groups)++] = {first, end, least};
    return whole;
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
    if (!(c7 & (1u << 11))) return HFP_AVX512;  // every processor that has bf16 has vnni
    const bool amx = (d7 & (1u << 22)) && (d7 & (1u << 24)) && (d7 & (1u << 25)) && (states & 0x60000) == 0x60000;
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

#if defined(HFP_X86)
#define HFP_DISPATCH(NAME, ARGS)                                                              \
    switch ((ARGS)->decoder->isa) {                                                           \
        case HFP_AVX2: return NAME##_avx2(ARGS);                                              \
        case HFP_AVX512: return NAME##_avx512(ARGS);                                          \
        case HFP_AVX512_BF16: return NAME##_avx512_bf16(ARGS);                                \
        case HFP_AMX: return NAME##_amx(ARGS);                                                \
        default: return NAME##_portable(ARGS);                                                \
    }
#else
#define HFP_DISPATCH(NAME, ARGS) return NAME##_portable(ARGS);
#endif

// Finds the groups of a batch (see hfp_batch) and points it at `memory`, int32 [2 * num_seqs + 1], where they are kept.
HFP_EXPORT int hfp_find_groups(hfp_batch* batch, int32_t* memory) {
    batch->num_groups = 0;
    batch->group_members = batch->group_starts = batch->group_blocks = nullptr;
    const int32_t num_seqs = batch->num_seqs;
    Sorted* rows = static_cast<Sorted*>(malloc(static_cast<size_t>(num_seqs + 1) * (sizeof(Sorted) + sizeof(Group))));
    if (!rows) return HFP_NO_MEMORY;
    Group* groups = reinterpret_cast<Group*>(rows + num_seqs + 1);
    int32_t n = 0;
    for (int32_t i = 0; i < num_seqs; i++) {
        if (batch->cu_seqlens_q[i + 1] - batch->cu_seqlens_q[i] != 1) continue;
        const int32_t full = (batch->seq_lens[i] - 1) / kLeastBlock;
        const int32_t length = full < batch->table_width ? full : batch->table_width;
        if (length > 0) rows[n++] = {batch->block_tables + i * batch->table_stride, i, length, 0};
    }
    std::sort(rows, rows + n, precedes);
    int64_t num_groups = 0;
    for (int32_t first = 0, i = 1; i <= n; i++) {
        if (i < n) rows[i].common = common_blocks(rows[i - 1], rows[i]);
        if (i < n && rows[i].common > 0) continue;
        choose_groups(rows, first, i, groups, &num_groups);
        first = i;
    }
    int32_t *blocks = memory, *starts = blocks + num_groups, *members = starts + num_groups + 1;
    starts[0] = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        blocks[g] = groups[g].blocks;
        starts[g + 1] = starts[g];
        for (int32_t i = groups[g].first; i < groups[g].end; i++) members[starts[g + 1]++] = rows[i].seq;
    }
    batch->group_blocks = blocks;
    batch->group_starts = starts;
    batch->group_members = members;
    batch->num_groups = num_groups;
    free(rows);
    return HFP_OK;
}

// Layers of a decoder over the rows of x, in place; see decoder.inl.
HFP_EXPORT int hfp_decode(const hfp_decode_args* args) { HFP_DISPATCH(hfp_decode, args) }

// Norm and product of rows of x: the head of a model, or what a layer's own MLP reads.
HFP_EXPORT int hfp_project(const hfp_project_args* args) { HFP_DISPATCH(hfp_project, args) }

// key [T, Hkv, Dk], value [T, Hkv, Dv] with strides in elements; slots [T], -1 to skip.
HFP_EXPORT int hfp_write(hfp_layer* layer, const void* key, const void* value, const int64_t* slots, int64_t num_tokens,
                         int64_t k_stride_t, int64_t k_stride_h, int64_t v_stride_t, int64_t v_stride_h, int32_t num_threads) {
    const Shape s = shape_of(layer);
    const int64_t top = highest_slot(slots, num_tokens);
    if (top >= layer->num_blocks * layer->block_size) return HFP_BAD_SLOT;
    use_blocks(layer, (top + layer->block_size) / layer->block_size);
    parallel_for(num_tokens, threads_for_tokens(layer, num_tokens, num_threads), [&](int64_t t) {
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
    if (highest_slot(slots, num_tokens) >= layer->num_blocks * layer->block_size) return HFP_BAD_SLOT;
    parallel_for(num_tokens, threads_for_tokens(layer, num_tokens, num_threads), [&](int64_t t) {
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

// Copies block src[i] to dst[i], i ascending, in K and V of each layer.
HFP_EXPORT int hfp_copy_blocks(hfp_layer* const* layers, int64_t num_layers, const int64_t* src, const int64_t* dst,
                               int64_t num_pairs, int32_t num_threads) {
    int64_t bytes = 0, end = 0;
    for (int64_t i = 0; i < num_pairs; i++) end = dst[i] + 1 > end ? dst[i] + 1 : end;
    for (int64_t j = 0; j < num_layers; j++) {
        const int64_t limit = layers[j]->num_blocks;
        for (int64_t i = 0; i < num_pairs; i++) {
            if (src[i] < 0 || dst[i] < 0 || src[i] >= limit || dst[i] >= limit) return HFP_BAD_BLOCK;
        }
        const Shape s = shape_of(layers[j]);
        bytes += (block_bytes(layers[j], s, false) + block_bytes(layers[j], s, true)) * num_pairs;
    }
    for (int64_t j = 0; j < num_layers; j++) use_blocks(layers[j], end);
    parallel_for(2 * num_layers, bytes < kSerialElements ? 1 : num_threads, [&](int64_t j) {
        const hfp_layer* layer = layers[j / 2];
        const int64_t size = block_bytes(layer, shape_of(layer), j % 2);
        char* base = static_cast<char*>(j % 2 ? layer->v : layer->k);
        for (int64_t i = 0; i < num_pairs; i++) {
            if (src[i] != dst[i]) memcpy(base + dst[i] * size, base + src[i] * size, static_cast<size_t>(size));
        }
    });
    return HFP_OK;
}

// A 64-bit digest of the bytes of each of n buffers, at about the speed of memory. It depends on every bit and its
// place, not on num_threads. Against accidents (a changed, swapped or negated weight), not against adversaries.
// One parallel region for all: on a busy machine, entering one for each tensor of a model costs more than reading them.
HFP_EXPORT int hfp_checksums(const void* const* data, const int64_t* num_bytes, uint64_t* out, int64_t n,
                             int32_t num_threads) {
    constexpr int64_t piece = 1 << 18;
    int64_t* first = static_cast<int64_t*>(malloc(static_cast<size_t>(n + 1) * sizeof(int64_t)));
    if (!first) return HFP_NO_MEMORY;
    first[0] = 0;
    for (int64_t b = 0; b < n; b++) {
        first[b + 1] = first[b] + (num_bytes[b] + piece - 1) / piece;
        out[b] = 0;
    }
    const int64_t pieces = first[n];
    const int threads = pieces > 1 && num_threads > 1 ? num_threads : 1;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        int64_t b = 0;  // a thread's pieces come in ascending order
#ifdef _OPENMP
#pragma omp for schedule(monotonic : dynamic, 4)
#endif
        for (int64_t i = 0; i < pieces; i++) {
            while (i >= first[b + 1]) b++;
            const int64_t at = (i - first[b]) * piece, left = num_bytes[b] - at;
            const uint64_t digest = checksum_piece(static_cast<const unsigned char*>(data[b]) + at,
                                                   left < piece ? left : piece, static_cast<uint64_t>(i - first[b]));
            // Pieces carry their number in their seed, so their sum may be taken in any order.
#ifdef _OPENMP
#pragma omp atomic
#endif
            out[b] += digest;
        }
    }
    (void)threads;
    for (int64_t b = 0; b < n; b++) out[b] = finalize(out[b] + static_cast<uint64_t>(num_bytes[b]));
    free(first);
    return HFP_OK;
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
