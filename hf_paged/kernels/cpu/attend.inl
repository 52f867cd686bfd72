// Attention over paged K and V: one source, compiled once per instruction set (attend_*.cpp), one entry point each.
//
// The including file defines HFP_ATTEND, the name of the entry point, and HFP_USE_AMX where the compiler flags allow
// AMX. Which vector code is used follows from the compiler's own macros.
//
// Work is cut into items, and where it is cut depends on one sequence's lengths only: never on its batch mates and
// never on the number of threads. A sequence therefore gets the same bits in any company.
//
//     sequence --> row tiles of about kTileRows (query, head of the KV group) pairs, one KV head at a time
//              --> for few queries, splits of kSplit keys at multiples of kSplit, merged in order afterwards
//              --> chunks of keys: S = Q K^T, running softmax, O = alpha O + P V
//
// Sequences of a group (see hfp_batch) begin with the same blocks. These are read once for the rows of all of them, up
// to a multiple of the chunk. What a row goes through is what it goes through alone: its splits and chunks are its own,
// and the rows beside it in a strip or tile change nothing. Where the common part ends inside a split, each row's
// maximum, sums and O wait in memory until the sequence's own item goes on from there.
//
// Inside a tile rows go through in strips of up to kStrip rows, the accumulators of which live in registers.

#include "hfp_abi.h"
#include "scratch.h"
#include "simd.h"

#ifdef _OPENMP
extern "C" int omp_get_thread_num(void);
#endif

#if defined(__AVX512BF16__)
#define HFP_BF16_DOT 1
#else
#define HFP_BF16_DOT 0
#endif

namespace {

constexpr int kGroup = 16;    // tokens whose K values share a register
constexpr int kSplit = 512;   // keys in one split of a decode step
constexpr int kSplitMaxQueries = 63;
constexpr int kChunk = 128;   // keys scored at once
constexpr int kDecodeChunk = 64;  // and for a strip of rows, where what lies ahead should be asked for soon, not early
constexpr int kAmxChunk = 256;
constexpr int kMaxChunk = 256;
constexpr int kTileRows = 96;
constexpr int kAmxTileRows = 128;
constexpr int kAmxStrip = 32;
constexpr int64_t kMinSavedBytes = 64 << 10;  // a group is read once where that spares at least as much K and V
constexpr int64_t kSerialBytes = 48 << 10;  // below this much K and V a second thread costs more than it brings

constexpr float kLog2e = 1.4426950408889634f;
const float kMinusInf = -__builtin_inff();

constexpr int kStrip = HFP_W >= 8 ? 6 : 2;

// Groups of keys, and vectors of columns, that a strip of M rows takes at once: as many as there are registers for sums,
// since few sums wait for each other.
template <int M>
constexpr int kMaxGroups = HFP_W == 16 ? 4 : HFP_W == 8 && M <= 3 ? 2 : 1;
template <int M>
constexpr int kMaxCols = HFP_W == 16 ? 4 : HFP_W == 8 && M <= 3 ? 4 : 2;

HFP_INLINE int imin(int a, int b) { return a < b ? a : b; }
HFP_INLINE int imax(int a, int b) { return a > b ? a : b; }
HFP_INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
HFP_INLINE int chunk_keys(int rows) { return rows <= kStrip ? kDecodeChunk : kChunk; }

// ---------------------------------------------------------------------------------------------- element types

// How K and V of a dtype are read. kPaired: 32-bit lanes hold two dimensions (K) or two tokens (V).
struct F32 {
    typedef float Query;
    typedef float Weight;
    static constexpr bool kPaired = false, kDot = false, kTile = false;
    static constexpr int kSize = 4, kExpDegree = 5;
};

struct F16 {
    typedef float Query;
    typedef float Weight;
    static constexpr bool kPaired = false, kDot = false, kTile = false;
    static constexpr int kSize = 2, kExpDegree = 5;
};

// Stored as bfloat16, widened in registers: one shift and one mask serve all rows of a strip.
struct WideBF16 {
    typedef float Query;
    typedef float Weight;
    static constexpr bool kPaired = true, kDot = false, kTile = false;
    static constexpr int kSize = 2, kExpDegree = 5;
};

#if HFP_BF16_DOT
struct BF16 {
    typedef uint16_t Query;
    typedef uint16_t Weight;
    static constexpr bool kPaired = true, kDot = true, kTile = false;
    static constexpr int kSize = 2, kExpDegree = 3;
};
#else
typedef WideBF16 BF16;
#endif

#if HFP_USE_AMX
// Widened as well, and with the bits of a tile: whether a row goes through a tile or not depends on the rows beside it.
// A tile adds the products of even places and those of odd places to two sums that begin at zero, in order and each
// step rounded once, then both sums to each other and that to the result. Subnormal numbers count as zero: FlushToZero.
struct TileBF16 {
    typedef float Query;
    typedef float Weight;
    static constexpr bool kPaired = true, kDot = false, kTile = true;
    static constexpr int kSize = 2, kExpDegree = 3;
};

struct FlushToZero {
    unsigned before = _mm_getcsr();
    FlushToZero() { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }
};
#endif

template <class T>
HFP_INLINE VF load_plain(const char* p) {
    if (T::kSize == 4) return load(reinterpret_cast<const float*>(p));
    return load_f16(p);
}

template <class T>
HFP_INLINE void store_out(char* out, int64_t index, float x) {
    if (T::kSize == 4) {
        reinterpret_cast<float*>(out)[index] = x;
    } else if (T::kPaired) {
        reinterpret_cast<uint16_t*>(out)[index] = float_to_bf16(x);
    } else {
        reinterpret_cast<uint16_t*>(out)[index] = float_to_f16(x);
    }
}

// ---------------------------------------------------------------------------------------------- micro kernels

// Asks memory for groups of `bytes` each, one behind the other, from byte `at` of the first one on. What comes next is
// asked for in this order, whatever the order in which it is read: memory gives strided lines at two thirds of the rate.
class InOrder {
public:
    HFP_INLINE_MEMBER InOrder(const char* const* groups, int64_t bytes, int64_t at = 0) {
        const uint32_t whole = at ? static_cast<uint32_t>(at) / static_cast<uint32_t>(bytes) : 0;
        bytes_ = bytes;
        group_ = groups + whole;
        next_ = *group_ + (at - whole * bytes);
        left_ = bytes - (at - whole * bytes);
    }

    // The next N bytes, of which a group is a multiple.
    template <int N>
    HFP_INLINE_MEMBER void ask() {
        if (!left_) {
            next_ = *++group_;
            left_ = bytes_;
        }
        HFP_UNROLL for (int x = 0; x < N; x += 64) prefetch<false>(next_ + x);
        next_ += N;
        left_ -= N;
    }

private:
    const char* const* group_;
    const char* next_;
    int64_t bytes_, left_;
};

// S[m][16 g + lane] = sum_d Q[m][d] K[g][d][lane] for M rows and NG groups of 16 keys.
template <class T, int M, int NG>
void score_strip(const typename T::Query* q, int64_t ldq, const char* const* k, const char* const* ahead, int dk, float* s) {
    constexpr int NV = NG * kGroup / HFP_W, PER = kGroup / HFP_W;
    VF acc[M][NV];
    HFP_UNROLL for (int m = 0; m < M; m++) {
        HFP_UNROLL for (int n = 0; n < NV; n++) acc[m][n] = VF{};
    }
    const char* kp[NG];
    HFP_UNROLL for (int g = 0; g < NG; g++) kp[g] = k[g];
    constexpr int kStep = T::kPaired ? 2 : 1, kRowBytes = T::kPaired ? 64 : kGroup * T::kSize;
    InOrder next(ahead, static_cast<int64_t>(dk / kStep) * kRowBytes);
    for (int d = 0; d < dk; d += kStep) {
        const int64_t row = static_cast<int64_t>(d / kStep) * kRowBytes;
        next.ask<NG * kRowBytes>();
#if HFP_BF16_DOT
        if constexpr (T::kDot) {
            __m512bh b[NV];
            HFP_UNROLL for (int n = 0; n < NV; n++) b[n] = (__m512bh)load_int(kp[n] + row);
            HFP_UNROLL for (int m = 0; m < M; m++) {
                int32_t pair;
                memcpy(&pair, q + m * ldq + d, 4);
                const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
                HFP_UNROLL for (int n = 0; n < NV; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], a, b[n]);
            }
            continue;
        }
#endif
        if constexpr (T::kPaired && !T::kDot) {
            add_pairs<M, NV>(acc, q + d, ldq, [&](int n) HFP_INLINE_LAMBDA { return load_int(kp[n / PER] + row + (n % PER) * HFP_W * 4); });
        } else if constexpr (!T::kPaired) {
            add_outer<M, NV>(acc, [&](int m) HFP_INLINE_LAMBDA { return splat(q[m * ldq + d]); }, [&](int n) HFP_INLINE_LAMBDA {
                return load_plain<T>(kp[n / PER] + row + (n % PER) * HFP_W * T::kSize);
            });
        }
    }
    HFP_UNROLL for (int m = 0; m < M; m++) {
        HFP_UNROLL for (int n = 0; n < NV; n++) store(s + m * kMaxChunk + n * HFP_W, acc[m][n]);
    }
}

// O[m][c0 + lane] = alpha[m] O[m][..] + sum_t P[m][t] V[t][c0 + lane] for M rows and NV vectors of columns.
template <class T, int M, int NV>
void value_strip(const typename T::Weight* p, const char* const* v, const char* const* ahead, int num_groups, int dvp, int c0,
                 const float* alpha, float* o) {
    VF acc[M][NV];
    HFP_UNROLL for (int m = 0; m < M; m++) {
        const VF a = splat(alpha[m]);
        HFP_UNROLL for (int n = 0; n < NV; n++) acc[m][n] = a * load(o + m * dvp + n * HFP_W);
    }
    constexpr int lane_bytes = T::kPaired ? 4 : T::kSize, kRows = T::kPaired ? kGroup / 2 : kGroup, kWide = NV * HFP_W * lane_bytes;
    const int64_t row_bytes = static_cast<int64_t>(dvp) * lane_bytes;
    InOrder next(ahead, row_bytes * kRows, static_cast<int64_t>(c0) * lane_bytes * kRows * num_groups);
    for (int g = 0; g < num_groups; g++) {
        const char* row = v[g] + static_cast<int64_t>(c0) * lane_bytes;
        const typename T::Weight* weight = p + g * kGroup;
        for (int t = 0; t < kGroup; t += T::kPaired ? 2 : 1, row += row_bytes) {
            next.ask<kWide>();
#if HFP_BF16_DOT
            if constexpr (T::kDot) {
                __m512bh b[NV];
                HFP_UNROLL for (int n = 0; n < NV; n++) b[n] = (__m512bh)load_int(row + n * 64);
                HFP_UNROLL for (int m = 0; m < M; m++) {
                    int32_t pair;
                    memcpy(&pair, weight + m * kMaxChunk + t, 4);
                    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
                    HFP_UNROLL for (int n = 0; n < NV; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], a, b[n]);
                }
                continue;
            }
#endif
            if constexpr (T::kPaired && !T::kDot) {
                add_pairs<M, NV>(acc, weight + t, kMaxChunk, [&](int n) HFP_INLINE_LAMBDA { return load_int(row + n * HFP_W * 4); });
            } else if constexpr (!T::kPaired) {
                add_outer<M, NV>(acc, [&](int m) HFP_INLINE_LAMBDA { return splat(weight[m * kMaxChunk + t]); },
                                 [&](int n) HFP_INLINE_LAMBDA { return load_plain<T>(row + n * HFP_W * T::kSize); });
            }
        }
    }
    HFP_UNROLL for (int m = 0; m < M; m++) {
        HFP_UNROLL for (int n = 0; n < NV; n++) store(o + m * dvp + n * HFP_W, acc[m][n]);
    }
}

#if HFP_USE_AMX
constexpr int kTileDims = 32;  // of K that one tile operation takes
// On processors with AMX vdpbf16ps takes 2 cycles where the two multiply-adds it replaces take 1, and a tile of few rows
// takes as long as a full one: so few are better off widened.
constexpr int kMaxWideRows = 3;

template <int M, int NG>
void score_strip_as_tile(const float* q, int64_t ldq, const char* const* k, const char* const* ahead, int dk, float* s) {
    VF acc[M][NG];
    HFP_UNROLL for (int m = 0; m < M; m++) {
        HFP_UNROLL for (int n = 0; n < NG; n++) acc[m][n] = VF{};
    }
    const char* kp[NG];
    HFP_UNROLL for (int n = 0; n < NG; n++) kp[n] = k[n];
    InOrder next(ahead, static_cast<int64_t>(dk) * 32);
    for (int d0 = 0; d0 < dk; d0 += kTileDims) {
        VF even[M][NG], odd[M][NG];
        HFP_UNROLL for (int m = 0; m < M; m++) {
            HFP_UNROLL for (int n = 0; n < NG; n++) even[m][n] = odd[m][n] = VF{};
        }
        for (int d = d0; d < d0 + kTileDims; d += 2) {
            const int64_t row = static_cast<int64_t>(d) * 32;
            next.ask<NG * 64>();
            VF low[NG], high[NG];
            HFP_UNROLL for (int n = 0; n < NG; n++) {
                const VI pair = in_register(load_int(kp[n] + row));
                low[n] = as_float(pair << 16);
                high[n] = as_float(pair & splat_int(static_cast<int32_t>(0xffff0000u)));
            }
            HFP_UNROLL for (int m = 0; m < M; m++) {
                const VF a0 = in_register(splat(q[m * ldq + d])), a1 = in_register(splat(q[m * ldq + d + 1]));
                HFP_UNROLL for (int n = 0; n < NG; n++) even[m][n] = fma(a0, low[n], even[m][n]);
                HFP_UNROLL for (int n = 0; n < NG; n++) odd[m][n] = fma(a1, high[n], odd[m][n]);
            }
        }
        HFP_UNROLL for (int m = 0; m < M; m++) {
            HFP_UNROLL for (int n = 0; n < NG; n++) acc[m][n] += even[m][n] + odd[m][n];
        }
    }
    HFP_UNROLL for (int m = 0; m < M; m++) {
        HFP_UNROLL for (int n = 0; n < NG; n++) store(s + m * kMaxChunk + n * HFP_W, acc[m][n]);
    }
}

template <int M, int NV>
void value_strip_as_tile(const float* p, const char* const* v, const char* const* ahead, int num_groups, int dvp, int c0,
                         const float* alpha, float* o) {
    VF acc[M][NV];
    HFP_UNROLL for (int m = 0; m < M; m++) {
        const VF a = splat(alpha[m]);
        HFP_UNROLL for (int n = 0; n < NV; n++) acc[m][n] = a * load(o + m * dvp + n * HFP_W);
    }
    const int64_t row_bytes = static_cast<int64_t>(dvp) * 4;
    InOrder next(ahead, row_bytes * (kGroup / 2), static_cast<int64_t>(c0) * 4 * (kGroup / 2) * num_groups);
    for (int g = 0; g < num_groups; g++) {
        const char* row = v[g] + static_cast<int64_t>(c0) * 4;
        const float* weight = p + g * kGroup;
        VF even[M][NV], odd[M][NV];
        HFP_UNROLL for (int m = 0; m < M; m++) {
            HFP_UNROLL for (int n = 0; n < NV; n++) even[m][n] = odd[m][n] = VF{};
        }
        for (int t = 0; t < kGroup; t += 2, row += row_bytes) {
            next.ask<NV * 64>();
            VF low[NV], high[NV];
            HFP_UNROLL for (int n = 0; n < NV; n++) {
                const VI pair = in_register(load_int(row + n * 64));
                low[n] = as_float(pair << 16);
                high[n] = as_float(pair & splat_int(static_cast<int32_t>(0xffff0000u)));
            }
            HFP_UNROLL for (int m = 0; m < M; m++) {
                const VF a0 = in_register(splat(weight[m * kMaxChunk + t])), a1 = in_register(splat(weight[m * kMaxChunk + t + 1]));
                HFP_UNROLL for (int n = 0; n < NV; n++) even[m][n] = fma(a0, low[n], even[m][n]);
                HFP_UNROLL for (int n = 0; n < NV; n++) odd[m][n] = fma(a1, high[n], odd[m][n]);
            }
        }
        HFP_UNROLL for (int m = 0; m < M; m++) {
            HFP_UNROLL for (int n = 0; n < NV; n++) acc[m][n] += even[m][n] + odd[m][n];
        }
    }
    HFP_UNROLL for (int m = 0; m < M; m++) {
        HFP_UNROLL for (int n = 0; n < NV; n++) store(o + m * dvp + n * HFP_W, acc[m][n]);
    }
}
#endif

template <class T, int M>
void score_rows(const typename T::Query* q, int64_t ldq, const char* const* k, const char* const* ahead, int num_groups, int dk,
                float* s) {
    // The lists of addresses are padded, so the last step may score keys that nobody will look at.
#if HFP_USE_AMX
    if constexpr (T::kTile) {
        constexpr int NG = M <= 2 ? 4 : 2, ROWS = M <= kMaxWideRows ? M : 1;
        for (int g = 0; g < num_groups; g += NG) score_strip_as_tile<ROWS, NG>(q, ldq, k + g, ahead + g, dk, s + g * kGroup);
        return;
    }
#endif
    for (int g = 0; g < num_groups; g += kMaxGroups<M>) {
        score_strip<T, M, kMaxGroups<M>>(q, ldq, k + g, ahead + g, dk, s + g * kGroup);
    }
}

template <class T, int M>
void value_rows(const typename T::Weight* p, const char* const* v, const char* const* ahead, int num_groups, int dvp,
                const float* alpha, float* o) {
    int c = 0;
#if HFP_USE_AMX
    if constexpr (T::kTile) {
        constexpr int NV = M == 1 ? 4 : 2, ROWS = M <= kMaxWideRows ? M : 1;
        for (; c + NV * HFP_W <= dvp; c += NV * HFP_W) {
            value_strip_as_tile<ROWS, NV>(p, v, ahead, num_groups, dvp, c, alpha, o + c);
        }
        if (c < dvp) value_strip_as_tile<ROWS, 2>(p, v, ahead, num_groups, dvp, c, alpha, o + c);
        return;
    }
#endif
    for (; c + kMaxCols<M> * HFP_W <= dvp; c += kMaxCols<M> * HFP_W) {
        value_strip<T, M, kMaxCols<M>>(p, v, ahead, num_groups, dvp, c, alpha, o + c);
    }
    if (kMaxCols<M> > 2 && dvp - c >= 2 * HFP_W) {
        value_strip<T, M, 2>(p, v, ahead, num_groups, dvp, c, alpha, o + c);
        c += 2 * HFP_W;
    }
    for (; c < dvp; c += HFP_W) value_strip<T, M, 1>(p, v, ahead, num_groups, dvp, c, alpha, o + c);
}

#define HFP_FOR_M(m, CALL)                      \
    switch (m) {                                \
        case 1: CALL(1); break;                 \
        case 2: CALL(2); break;                 \
        case 3: if (kStrip >= 3) CALL((kStrip >= 3 ? 3 : 1)); break; \
        case 4: if (kStrip >= 4) CALL((kStrip >= 4 ? 4 : 1)); break; \
        case 5: if (kStrip >= 5) CALL((kStrip >= 5 ? 5 : 1)); break; \
        default: if (kStrip >= 6) CALL((kStrip >= 6 ? 6 : 1)); break; \
    }

// ---------------------------------------------------------------------------------------------- softmax of one row

// The mathematics between q.k and the softmax, the same for a whole call.
struct Scoring {
    float scaling;
    float softcap;
    bool transform;    // scores must be rewritten before they can be compared
    float multiplier;  // of what is stored in S, to reach base-2 logits
};

HFP_INLINE Scoring make_scoring(const hfp_attend_args* a) {
    Scoring sc;
    sc.scaling = a->params->scaling;
    sc.softcap = a->params->softcap;
    sc.transform = sc.softcap > 0 || a->alibi != nullptr || !(sc.scaling > 0);
    sc.multiplier = sc.transform ? kLog2e : sc.scaling * kLog2e;
    return sc;
}

HFP_INLINE void transform_scores(float* s, int n, const Scoring& sc, float slope, int first_key, int position) {
    const VF scale = splat(sc.scaling);
    for (int i = 0; i < n; i += HFP_W) {
        VF x = load(s + i) * scale;
        if (sc.softcap > 0) x = splat(sc.softcap) * tanhv(x * splat(1.0f / sc.softcap));
        if (slope != 0) {
            const VI distance = iota() + splat_int(first_key + i - position);
            x = fma(splat(slope), __builtin_convertvector(distance, VF), x);
        }
        store(s + i, x);
    }
}

HFP_INLINE void prefetch_lines(const char* p, int bytes) {
    HFP_UNROLL for (int x = 0; x < bytes; x += 64) prefetch<false>(p + x);
}

HFP_INLINE void store_weight(float* p, VF x) { store(p, x); }
#if HFP_BF16_DOT
HFP_INLINE void store_weight(uint16_t* p, VF x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

// A weight as a tile would have read it.
HFP_INLINE VF round_weight(VF x) {
#if HFP_BF16_DOT
    return as_float((VI)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)) << 16);
#else
    return x;
#endif
}

// Turns n scores of keys first_key.. into weights relative to the new running maximum. `sum` is a vector of W partial
// sums. Keys outside [lo, hi) get weight exactly 0, whatever S holds there. Returns what older weights are worth now.
// With FETCH, 16 bytes a key from `fetch` on are prefetched: memory should not rest while the softmax runs.
template <class T, bool FETCH>
HFP_INLINE float softmax_row(float* s, typename T::Weight* p, int n, int first_key, int lo, int hi, float multiplier, float* running_max,
                  float* sum, const char* fetch) {
    VF m = splat(kMinusInf);
    if (lo <= first_key && hi >= first_key + n) {
        for (int i = 0; i < n; i += HFP_W) {
            if (FETCH) prefetch_lines(fetch + i * 8, HFP_W * 8);
            m = vmax(load(s + i), m);
        }
    } else {
        const VI from = splat_int(lo - first_key), to = splat_int(hi - first_key);
        for (int i = 0; i < n; i += HFP_W) {
            const VI key = iota() + splat_int(i);
            const VI seen = (key >= from) & (key < to);
            const VF x = seen ? load(s + i) : splat(kMinusInf);
            store(s + i, x);
            m = vmax(x, m);
        }
    }
    const float chunk_max = hmax(m) * multiplier;
    const float old_max = *running_max;
    const float new_max = chunk_max > old_max ? chunk_max : old_max;
    const float base = new_max == kMinusInf ? 0.0f : new_max;
    *running_max = new_max;
    const VF scale = splat(multiplier), shift = splat(-base);
    VF total = VF{};
    for (int i = 0; i < n; i += HFP_W) {
        if (FETCH) prefetch_lines(fetch + (n + i) * 8, HFP_W * 8);
        const VF w = exp2v<T::kExpDegree>(fma(load(s + i), scale, shift));
        total += w;
        store_weight(p + i, T::kTile ? round_weight(w) : w);
    }
    const float alpha = new_max == old_max ? 1.0f : exp2v<5>(splat(old_max - base))[0];
    store(sum, fma(splat(alpha), load(sum), total));
    return alpha;
}

// ---------------------------------------------------------------------------------------------- scratch memory

thread_local Scratch tls_work, tls_items, tls_members;

// ---------------------------------------------------------------------------------------------- work items

// Queries [j0, j1) of a sequence against its keys [k0, k1), for one KV head after the other.
struct Item {
    int seq, j0, j1, k0, k1;
    int64_t partial;  // index of the tile's first partial row for head 0; -1: the result goes straight to the output
    int split, num_splits;  // num_splits 0: long prompts are not split; the item of members has those of the first
    int num_members;  // not 0: the queries are those of members [member, member + num_members), j0 and j1 those of one
    int member;       // a sequence's own item: where it stands among the members, or -1
    bool carried;     // what the common keys of this split came to is left for, or taken from, each member's state
};

// A sequence of a group whose common keys are read together in this call.
struct Member {
    int seq;
    int shared;  // that many keys
    int num_splits;
    int64_t partial;  // as in its items
    int group_end;    // the member behind the last of its group
};

struct Job {
    const hfp_attend_args* args;
    Scoring scoring;
    int group;        // query heads per KV head
    int dvp;          // v_head_dim in storage
    int tile_queries;
    int row_floats;   // of one partial row: O, then the maximum, then the sum
    int64_t k_group_bytes, v_group_bytes;
    int groups_per_block;
    bool amx;
    const Item* items;
    int num_items;
    float* partials;
    int num_first;    // items that need not wait for another: all but those that go on from a state
    int64_t unit;     // how many of them a thread takes at a time
    int64_t next;     // shared counters of (item, head) pairs: the first ones, those after them, merges
    int64_t next_own;
    int64_t next_merge;
    Member* members;
    int num_members;
    int* member_of;   // of each sequence, -1 if it is none; null where nobody is
    float* states;    // of each member, KV head and head of the group: O, the maximum, the partial sums
    int state_floats;
    int tile_members;
    int failed;
};

HFP_INLINE int first_visible(const hfp_params* p, int position) {
    int lo = 0;
    if (p->window > 0) lo = imax(lo, position - p->window + 1);
    if (p->chunk > 0 && position >= 0) lo = imax(lo, position / p->chunk * p->chunk);
    return lo;
}

struct Work {
    char* q;
    float* s;
    char* p;
    float* o;
    float* m;
    float* sum;
    float* alpha;
    char* v_edge;  // two groups of V with what nobody may see zeroed
    char* v_flat;  // AMX: the V of a chunk in one piece
    int tiles;     // AMX: what the tiles are configured for
};

HFP_INLINE int tile_rows(const Job* job) { return static_cast<int>(round_up(job->tile_queries * job->group, kAmxStrip)); }

HFP_INLINE bool make_work(const Job* job, Work* w) {
    const hfp_layer* layer = job->args->layer;
    const int64_t rows = tile_rows(job);
    const int64_t dq = round_up(layer->dk, 32);
    const int64_t sizes[9] = {
        rows * dq * 4,
        static_cast<int64_t>(kAmxStrip) * kMaxChunk * 4,
        static_cast<int64_t>(kAmxStrip) * kMaxChunk * 4,
        rows * job->dvp * 4,
        rows * 4,
        rows * HFP_W * 4,
        rows * 4,
        2 * job->v_group_bytes,
        job->amx ? (kAmxChunk / kGroup) * job->v_group_bytes : 0,
    };
    int64_t total = 0;
    for (int i = 0; i < 9; i++) total += round_up(sizes[i], 64) + 64;
    char* at = reserve(&tls_work, total);
    if (!at) return false;
    char* parts[9];
    for (int i = 0; i < 9; i++) {
        parts[i] = at;
        at += round_up(sizes[i], 64) + 64;  // the extra line keeps rows of different buffers out of the same cache sets
    }
    w->q = parts[0];
    w->s = reinterpret_cast<float*>(parts[1]);
    w->p = parts[2];
    w->o = reinterpret_cast<float*>(parts[3]);
    w->m = reinterpret_cast<float*>(parts[4]);
    w->sum = reinterpret_cast<float*>(parts[5]);
    w->alpha = reinterpret_cast<float*>(parts[6]);
    w->v_edge = parts[7];
    w->v_flat = parts[8];
    w->tiles = 0;
    return true;
}

HFP_INLINE int item_rows(const Job* job, const Item& item) {
    return (item.num_members ? item.num_members : item.j1 - item.j0) * job->group;
}

// The first row of a member of a KV head.
HFP_INLINE float* state_of(const Job* job, int member, int head) {
    const int64_t first = (static_cast<int64_t>(member) * job->args->layer->num_kv_heads + head) * job->group;
    return job->states + first * job->state_floats;
}

HFP_INLINE float* partial_of(const Job* job, int64_t partial, int head, int num_splits, int split, int rows) {
    return job->partials + (partial + (static_cast<int64_t>(head) * num_splits + split) * rows) * job->row_floats;
}

// Where the groups of 16 tokens of keys [k0, k1) lie; k0 is rounded down to its group. Returns how many there are.
HFP_INLINE int locate(const Job* job, int seq, int head, int k0, int k1, const char** k, const char** v) {
    const hfp_layer* layer = job->args->layer;
    const int32_t* table = job->args->batch->block_tables + seq * job->args->batch->table_stride;
    const int per_block = job->groups_per_block;
    int n = 0;
    for (int g = k0 / kGroup; g * kGroup < k1; g++, n++) {
        const int block = per_block == 1 ? g : g / per_block;
        const int inside = per_block == 1 ? 0 : g % per_block;
        const int64_t index = (static_cast<int64_t>(table[block]) * layer->num_kv_heads + head) * per_block + inside;
        k[n] = static_cast<const char*>(layer->k) + index * job->k_group_bytes;
        v[n] = static_cast<const char*>(layer->v) + index * job->v_group_bytes;
    }
    return n;
}

// A copy of one group of V in which only tokens [from, to) are kept and the others are zero: unwritten slots may hold
// NaN, and 0 * NaN would reach the result. The others are not even read.
template <class T>
HFP_INLINE const char* masked_group(const char* v, int from, int to, int dvp, char* copy) {
    if (T::kPaired) {
        for (int pair = 0; pair < kGroup / 2; pair++) {
            const bool even = 2 * pair >= from && 2 * pair < to, odd = 2 * pair + 1 >= from && 2 * pair + 1 < to;
            const uint32_t mask = (even ? 0x0000ffffu : 0u) | (odd ? 0xffff0000u : 0u);
            uint32_t* target = reinterpret_cast<uint32_t*>(copy) + pair * dvp;
            if (!mask) {
                memset(target, 0, static_cast<size_t>(dvp) * 4);
                continue;
            }
            const uint32_t* source = reinterpret_cast<const uint32_t*>(v) + pair * dvp;
            for (int d = 0; d < dvp; d++) target[d] = source[d] & mask;
        }
    } else {
        const size_t row = static_cast<size_t>(dvp) * T::kSize;
        for (int t = 0; t < kGroup; t++) {
            if (t >= from && t < to) memcpy(copy + t * row, v + t * row, row);
            else memset(copy + t * row, 0, row);
        }
    }
    return copy;
}

template <class T>
HFP_INLINE float load_query(const char* q, int64_t index) {
    if (T::kSize == 4) return reinterpret_cast<const float*>(q)[index];
    const uint16_t h = reinterpret_cast<const uint16_t*>(q)[index];
    return T::kPaired ? bf16_to_float(h) : f16_to_float(h);
}

// Rows of a tile are (query, head of the group) pairs, heads innermost: neighbours see nearly the same keys.
template <class T>
HFP_INLINE void pack_queries(const Job* job, const Item& item, int head, int64_t ldq, typename T::Query* q) {
    const hfp_attend_args* a = job->args;
    const int dk = a->layer->dk;
    const int64_t first = a->batch->cu_seqlens_q[item.seq] + item.j0;
    const int num_queries = item.num_members ? item.num_members : item.j1 - item.j0;
    int row = 0;
    for (int j = 0; j < num_queries; j++) {
        const int64_t token = item.num_members ? a->batch->cu_seqlens_q[job->members[item.member + j].seq] : first + j;
        for (int g = 0; g < job->group; g++, row++) {
            const int64_t at = token * a->q_stride_t + static_cast<int64_t>(head * job->group + g) * a->q_stride_h;
            typename T::Query* target = q + row * ldq;
            if constexpr (T::kDot) {
                memcpy(target, a->q + at * 2, static_cast<size_t>(dk) * 2);
            } else if (T::kSize == 4) {
                memcpy(target, a->q + at * 4, static_cast<size_t>(dk) * 4);
            } else {
                for (int d = 0; d < dk; d++) target[d] = load_query<T>(a->q, at + d);
            }
        }
    }
}

// Divides by the sum (joined by the sink's share) and writes one row of the output.
template <class T>
HFP_INLINE void write_row(const Job* job, int64_t token, int head, const float* o, float m, float sum) {
    const hfp_attend_args* a = job->args;
    float scale = 1.0f;
    if (a->sinks) {
        const float sink = a->sinks[head] * kLog2e;
        const float top = sink > m ? sink : m;
        scale = m == kMinusInf ? 0.0f : exp2v<5>(splat(m - top))[0];
        sum = sum * scale + (sink == kMinusInf ? 0.0f : exp2v<5>(splat(sink - top))[0]);
    }
    // No key and no sink: zero, like any query that sees nothing.
    const float factor = sum == 0.0f ? 0.0f : scale / sum;
    const int dv = a->layer->dv;
    const int64_t at = (token * a->num_q_heads + head) * dv;
    const bool empty = m == kMinusInf;
    if (T::kPaired && HFP_BF16_DOT && !empty) {
#if HFP_BF16_DOT
        int d = 0;
        for (; d + 16 <= dv; d += 16) store_weight(reinterpret_cast<uint16_t*>(a->out) + at + d, load(o + d) * splat(factor));
        for (; d < dv; d++) store_out<T>(a->out, at + d, o[d] * factor);
        return;
#endif
    }
    for (int d = 0; d < dv; d++) store_out<T>(a->out, at + d, empty ? 0.0f : o[d] * factor);
}

HFP_INLINE float lane_sum(const float* sum) {
    float total = 0;
    for (int i = 0; i < HFP_W; i++) total += sum[i];
    return total;
}

HFP_INLINE void save_partials(const Job* job, float* target, int r, int rows, const Work& w) {
    for (int end = r + rows; r < end; r++, target += job->row_floats) {
        memcpy(target, w.o + static_cast<int64_t>(r) * job->dvp, static_cast<size_t>(job->dvp) * 4);
        target[job->dvp] = w.m[r];
        target[job->dvp + 1] = lane_sum(w.sum + r * HFP_W);
    }
}

HFP_INLINE void save_states(const Job* job, float* target, int r, int rows, const Work& w) {
    for (int end = r + rows; r < end; r++, target += job->state_floats) {
        memcpy(target, w.o + static_cast<int64_t>(r) * job->dvp, static_cast<size_t>(job->dvp) * 4);
        memcpy(target + job->dvp, w.sum + r * HFP_W, HFP_W * 4);
        target[job->dvp + HFP_W] = w.m[r];
    }
}

HFP_INLINE void start_rows(const Job* job, const Item& item, int head, const Work& w) {
    const int rows = item_rows(job, item);
    if (item.carried && !item.num_members) {
        const float* source = state_of(job, item.member, head);
        for (int r = 0; r < rows; r++, source += job->state_floats) {
            memcpy(w.o + static_cast<int64_t>(r) * job->dvp, source, static_cast<size_t>(job->dvp) * 4);
            memcpy(w.sum + r * HFP_W, source + job->dvp, HFP_W * 4);
            w.m[r] = source[job->dvp + HFP_W];
        }
        return;
    }
    for (int r = 0; r < rows; r++) {
        w.m[r] = kMinusInf;
        memset(w.sum + r * HFP_W, 0, HFP_W * 4);
    }
    memset(w.o, 0, static_cast<size_t>(rows) * job->dvp * 4);
}

template <class T>
HFP_INLINE void finish(const Job* job, const Item& item, int head, const Work& w) {
    if (item.num_members) {
        for (int i = 0; i < item.num_members; i++) {
            const Member& member = job->members[item.member + i];
            if (item.carried) {
                save_states(job, state_of(job, item.member + i, head), i * job->group, job->group, w);
            } else {
                float* target = partial_of(job, member.partial, head, member.num_splits, item.split, job->group);
                save_partials(job, target, i * job->group, job->group, w);
            }
        }
        return;
    }
    const int rows = item_rows(job, item);
    if (item.partial >= 0) {
        save_partials(job, partial_of(job, item.partial, head, item.num_splits, item.split, rows), 0, rows, w);
        return;
    }
    const int64_t token = job->args->batch->cu_seqlens_q[item.seq] + item.j0;
    for (int r = 0; r < rows; r++) {
        write_row<T>(job, token + r / job->group, head * job->group + r % job->group, w.o + r * job->dvp, w.m[r],
                     lane_sum(w.sum + r * HFP_W));
    }
}

// The keys that rows [r0, r0 + n) of a tile can see, as a range.
struct Span {
    int lo, hi;
};

HFP_INLINE Span strip_span(const Job* job, const Item& item, int position0, int r0, int n) {
    Span s;
    if (item.num_members) {
        s.lo = item.k0;
        s.hi = item.k1;
        return s;
    }
    s.lo = first_visible(job->args->params, position0 + r0 / job->group);
    s.hi = position0 + (r0 + n - 1) / job->group + 1;
    s.lo = imax(s.lo, item.k0);
    s.hi = imin(s.hi, item.k1);
    return s;
}

struct Groups {
    const char* k[kMaxChunk / kGroup];
    const char* v[kMaxChunk / kGroup];
    int n;
};

HFP_INLINE void pad_groups(Groups* list) {
    for (int g = list->n; g < kMaxChunk / kGroup; g++) {
        list->k[g] = list->k[list->n - 1];
        list->v[g] = list->v[list->n - 1];
    }
}

// `fetch`: null, or n addresses for softmax_row.
template <class T>
HFP_INLINE void weigh_strip(const Job* job, const Item& item, const Work& w, int head, int position0, int r0, int n, int c0,
                            int num_keys, const char* const* fetch) {
    for (int i = 0; i < n; i++) {
        const int r = r0 + i;
        int position = position0 + r / job->group;
        int lo = item.k0, hi = item.k1;  // all that members have in common lies before each one's query
        if (item.num_members) {
            position = job->args->batch->seq_lens[job->members[item.member + r / job->group].seq] - 1;
        } else {
            lo = imax(first_visible(job->args->params, position), item.k0);
            hi = imin(position + 1, item.k1);
        }
        float* s = w.s + i * kMaxChunk;
        if (job->scoring.transform) {
            const float slope = job->args->alibi ? job->args->alibi[head * job->group + r % job->group] : 0.0f;
            transform_scores(s, num_keys, job->scoring, slope, c0, position);
        }
        typename T::Weight* p = reinterpret_cast<typename T::Weight*>(w.p) + i * kMaxChunk;
        const float multiplier = job->scoring.multiplier;
        float* sum = w.sum + r * HFP_W;
        w.alpha[r] = fetch ? softmax_row<T, true>(s, p, num_keys, c0, lo, hi, multiplier, w.m + r, sum, fetch[i])
                           : softmax_row<T, false>(s, p, num_keys, c0, lo, hi, multiplier, w.m + r, sum, nullptr);
    }
}

// ---------------------------------------------------------------------------------------------- AMX

#if HFP_USE_AMX
struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

HFP_INLINE void shape_tile(TileConfig* c, int tile, int rows, int bytes) {
    c->rows[tile] = static_cast<uint8_t>(rows);
    c->bytes[tile] = static_cast<uint16_t>(bytes);
}

// For kAmxStrip rows: tiles 0-3 results, 4-5 rows of Q or P, 6-7 K or V, all of full size.
constexpr int kWideTiles = kAmxStrip;
// For a few rows: 0-3 results, 4 Q, 5 P of one group, 6 K of one group, 7 V of one group, which is half a tile.
constexpr int kMaxNarrowRows = 16;

HFP_INLINE void configure_tiles(int rows, int* configured) {
    if (*configured == rows) return;
    *configured = rows;
    alignas(64) TileConfig c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    const bool wide = rows == kWideTiles;
    for (int i = 0; i < 5; i++) shape_tile(&c, i, wide ? 16 : rows, 64);
    shape_tile(&c, 5, wide ? 16 : rows, wide ? 64 : 32);
    shape_tile(&c, 6, 16, 64);
    shape_tile(&c, 7, wide ? 16 : 8, 64);
    _tile_loadconfig(&c);
}

// score_rows and value_rows for at most kMaxNarrowRows rows. A decode step is bound by memory, but only as long as
// the arithmetic stays well below it, also where two hyper-threads share the vector units.
HFP_INLINE void amx_score_rows(const uint16_t* q, int64_t ldq, const char* const* k, const char* const* ahead, int num_groups, int dk,
                               float* s) {
#define HFP_SCORE_TILE(tile)                                                                     \
    _tile_loadd(6, k[g + tile] + d * 32, 64);                                                    \
    for (int x = 0; x < 1024; x += 64) prefetch<false>(ahead[g + tile] + d * 32 + x);            \
    _tile_dpbf16ps(tile, 4, 6)
    for (int g = 0; g < num_groups; g += 4) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < dk; d += 32) {
            _tile_loadd(4, q + d, ldq * 2);
            HFP_SCORE_TILE(0);
            HFP_SCORE_TILE(1);
            HFP_SCORE_TILE(2);
            HFP_SCORE_TILE(3);
        }
        float* target = s + g * kGroup;
        _tile_stored(0, target, kMaxChunk * 4);
        _tile_stored(1, target + 16, kMaxChunk * 4);
        _tile_stored(2, target + 32, kMaxChunk * 4);
        _tile_stored(3, target + 48, kMaxChunk * 4);
    }
#undef HFP_SCORE_TILE
}

template <int TILES>
HFP_INLINE void amx_value_columns(const uint16_t* p, const char* const* v, const char* const* ahead, int num_groups, int dvp, int c0,
                                  float* o) {
    const int64_t stride = static_cast<int64_t>(dvp) * 4;
    _tile_loadd(0, o + c0, stride);
    _tile_loadd(1, o + c0 + 16, stride);
    if (TILES == 4) {
        _tile_loadd(2, o + c0 + 32, stride);
        _tile_loadd(3, o + c0 + 48, stride);
    }
    InOrder next(ahead, stride * 8, static_cast<int64_t>(c0) * 4 * 8 * num_groups);
    for (int g = 0; g < num_groups; g++) {
        const char* b = v[g] + c0 * 4;
        _tile_loadd(5, p + g * kGroup, kMaxChunk * 2);
        _tile_loadd(7, b, stride);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, b + 64, stride);
        _tile_dpbf16ps(1, 5, 7);
        if (TILES == 4) {
            _tile_loadd(7, b + 128, stride);
            _tile_dpbf16ps(2, 5, 7);
            _tile_loadd(7, b + 192, stride);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int pair = 0; pair < 8; pair++) next.ask<TILES * 64>();
    }
    _tile_stored(0, o + c0, stride);
    _tile_stored(1, o + c0 + 16, stride);
    if (TILES == 4) {
        _tile_stored(2, o + c0 + 32, stride);
        _tile_stored(3, o + c0 + 48, stride);
    }
}

HFP_INLINE void scale_rows(float* o, int rows, int dvp, const float* alpha) {
    for (int i = 0; i < rows; i++) {
        if (alpha[i] == 1.0f) continue;
        const VF a = splat(alpha[i]);
        for (int d = 0; d < dvp; d += HFP_W) store(o + static_cast<int64_t>(i) * dvp + d, load(o + static_cast<int64_t>(i) * dvp + d) * a);
    }
}

HFP_INLINE void amx_value_rows(const uint16_t* p, const char* const* v, const char* const* ahead, int num_groups, int rows, int dvp,
                               const float* alpha, float* o) {
    scale_rows(o, rows, dvp, alpha);
    int c = 0;
    for (; c + 64 <= dvp; c += 64) amx_value_columns<4>(p, v, ahead, num_groups, dvp, c, o);
    if (c < dvp) amx_value_columns<2>(p, v, ahead, num_groups, dvp, c, o);
}
#endif

template <class T>
void run_item(const Job* job, const Item& item, int head, const Item* next_item, int next_head, Work& w) {
    const hfp_layer* layer = job->args->layer;
    const int rows = item_rows(job, item);
    const int chunk = chunk_keys((item.j1 - item.j0) * job->group);  // a member's own rows, not the tile's
    const int64_t ldq = round_up(layer->dk, 2);
    typename T::Query* q = reinterpret_cast<typename T::Query*>(w.q);
    const int position0 = job->args->batch->seq_lens[item.seq] -
                          (job->args->batch->cu_seqlens_q[item.seq + 1] - job->args->batch->cu_seqlens_q[item.seq]) + item.j0;
    pack_queries<T>(job, item, head, ldq, q);
    start_rows(job, item, head, w);

    Groups groups[2];
    const int start = item.k0 / kGroup * kGroup;
    int side = 0;
    groups[0].n = locate(job, item.seq, head, start, imin(start + chunk, item.k1), groups[0].k, groups[0].v);
#if HFP_USE_AMX
    const bool narrow_tiles = T::kDot && job->amx;
    const int strips = ceil_div(rows, narrow_tiles ? kMaxNarrowRows : T::kTile ? kMaxWideRows : kStrip);
#else
    const int strips = ceil_div(rows, kStrip);
#endif
    for (int c0 = start; c0 < item.k1; c0 += chunk, side ^= 1) {
        Groups& here = groups[side];
        Groups& ahead = groups[side ^ 1];
        const int c1 = imin(c0 + chunk, item.k1);
        ahead.n = 0;
        if (c1 < item.k1) {
            ahead.n = locate(job, item.seq, head, c1, imin(c1 + chunk, item.k1), ahead.k, ahead.v);
        } else if (next_item) {
            const int next_start = next_item->k0 / kGroup * kGroup;
            const int next_end = imin(next_start + chunk, next_item->k1);
            ahead.n = locate(job, next_item->seq, next_head, next_start, next_end, ahead.k, ahead.v);
        }
        const bool fetch = ahead.n > 0;
        pad_groups(&here);
        if (fetch) pad_groups(&ahead);
        // `here` may be reused for the next chunk's addresses, so the zeroed copies go into a list of their own.
        const char* v[kMaxChunk / kGroup];
        for (int g = 0; g < here.n; g++) v[g] = here.v[g];
        if (item.k0 > c0) v[0] = masked_group<T>(here.v[0], item.k0 - c0, imin(kGroup, item.k1 - c0), job->dvp, w.v_edge);
        if (c1 % kGroup && !(here.n == 1 && item.k0 > c0)) {
            const int g = here.n - 1;
            v[g] = masked_group<T>(here.v[g], 0, c1 % kGroup, job->dvp, w.v_edge + job->v_group_bytes);
        }
        for (int strip = 0; strip < strips; strip++) {
            const int r0 = rows * strip / strips, n = rows * (strip + 1) / strips - r0;
            const Span span = strip_span(job, item, position0, r0, n);
            if (span.hi <= c0 || span.lo >= c1) continue;
            const int g0 = span.lo > c0 ? (span.lo - c0) / kGroup : 0;
            const int g1 = ceil_div(imin(span.hi, c1) - c0, kGroup);
            const int num_groups = g1 - g0, first_key = c0 + g0 * kGroup;
            const bool pf = fetch && strip == 0;
            const char* const* fetch_v = pf ? ahead.v : nullptr;
            const typename T::Query* qs = q + r0 * ldq;
            float* o = w.o + r0 * job->dvp;
            const typename T::Weight* p = reinterpret_cast<const typename T::Weight*>(w.p);
#if HFP_USE_AMX
            if constexpr (T::kDot) {
                if (narrow_tiles) {
                    configure_tiles(n, &w.tiles);
                    amx_score_rows(qs, ldq, here.k + g0, (pf ? ahead.k : here.k) + g0, num_groups, layer->dk, w.s);
                    weigh_strip<T>(job, item, w, head, position0, r0, n, first_key, num_groups * kGroup, fetch_v);
                    amx_value_rows(p, v + g0, (pf ? ahead.v : here.v) + g0, num_groups, n, job->dvp, w.alpha + r0, o);
                    continue;
                }
            }
#endif
#define HFP_SCORE(M) score_rows<T, M>(qs, ldq, here.k + g0, (pf ? ahead.k : here.k) + g0, num_groups, layer->dk, w.s)
            HFP_FOR_M(n, HFP_SCORE)
            weigh_strip<T>(job, item, w, head, position0, r0, n, first_key, num_groups * kGroup, fetch_v);
#define HFP_VALUE(M) \
    value_rows<T, M>(p, v + g0, (pf ? ahead.v : here.v) + g0, num_groups, job->dvp, w.alpha + r0, o)
            HFP_FOR_M(n, HFP_VALUE)
        }
    }
    finish<T>(job, item, head, w);
}

#if HFP_USE_AMX
// Long bf16 prompts: strips of 32 rows as 2 x 2 tiles. K is read in place, V is put in one piece once a chunk because
// a tile needs the token pairs of two groups at one stride.
void run_item_amx(const Job* job, const Item& item, int head, Work& w) {
    const hfp_layer* layer = job->args->layer;
    const int dk = layer->dk, dvp = job->dvp;
    const int rows = (item.j1 - item.j0) * job->group;
    uint16_t* q = reinterpret_cast<uint16_t*>(w.q);
    uint16_t* p = reinterpret_cast<uint16_t*>(w.p);
    const int position0 = job->args->batch->seq_lens[item.seq] -
                          (job->args->batch->cu_seqlens_q[item.seq + 1] - job->args->batch->cu_seqlens_q[item.seq]) + item.j0;
    const int padded = static_cast<int>(round_up(rows, kAmxStrip));
    configure_tiles(kWideTiles, &w.tiles);
    pack_queries<BF16>(job, item, head, dk, q);
    memset(q + static_cast<int64_t>(rows) * dk, 0, static_cast<size_t>(padded - rows) * dk * 2);
    start_rows(job, item, head, w);
    memset(w.o + static_cast<int64_t>(rows) * dvp, 0, static_cast<size_t>(padded - rows) * dvp * 4);
    // Weights of the padding rows stay zero for the whole item.
    memset(p, 0, static_cast<size_t>(kAmxStrip) * kMaxChunk * 2);

    const int start = item.k0 / kGroup * kGroup;
    for (int c0 = start; c0 < item.k1; c0 += kAmxChunk) {
        const int c1 = imin(c0 + kAmxChunk, item.k1);
        Groups here;
        here.n = locate(job, item.seq, head, c0, c1, here.k, here.v);
        for (int g = 0; g < here.n; g++) {
            char* target = w.v_flat + g * job->v_group_bytes;
            const int from = imax(item.k0 - (c0 + g * kGroup), 0), to = imin(c1 - (c0 + g * kGroup), kGroup);
            if (from > 0 || to < kGroup) masked_group<BF16>(here.v[g], from, to, dvp, target);
            else memcpy(target, here.v[g], static_cast<size_t>(job->v_group_bytes));
        }
        if (here.n % 2) {
            memset(w.v_flat + here.n * job->v_group_bytes, 0, static_cast<size_t>(job->v_group_bytes));
            here.k[here.n] = here.k[here.n - 1];  // scored and then masked: no such key is visible
        }
        for (int r0 = 0; r0 < rows; r0 += kAmxStrip) {
            const int n = imin(kAmxStrip, rows - r0);
            const Span span = strip_span(job, item, position0, r0, n);
            if (span.hi <= c0 || span.lo >= c1) continue;
            const int g0 = span.lo > c0 ? (span.lo - c0) / (2 * kGroup) * 2 : 0;
            const int g1 = static_cast<int>(round_up(ceil_div(imin(span.hi, c1) - c0, kGroup), 2));
            const uint16_t* a0 = q + static_cast<int64_t>(r0) * dk;
            const uint16_t* a1 = a0 + static_cast<int64_t>(16) * dk;
            for (int g = g0; g < g1; g += 2) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int d = 0; d < dk; d += 32) {
                    _tile_loadd(4, a0 + d, dk * 2);
                    _tile_loadd(6, here.k[g] + d * 32, 64);
                    _tile_loadd(7, here.k[g + 1] + d * 32, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(5, a1 + d, dk * 2);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                float* s = w.s + (g - g0) * kGroup;
                _tile_stored(0, s, kMaxChunk * 4);
                _tile_stored(1, s + kGroup, kMaxChunk * 4);
                _tile_stored(2, s + 16 * kMaxChunk, kMaxChunk * 4);
                _tile_stored(3, s + 16 * kMaxChunk + kGroup, kMaxChunk * 4);
            }
            weigh_strip<BF16>(job, item, w, head, position0, r0, n, c0 + g0 * kGroup, (g1 - g0) * kGroup, nullptr);
            if (n < kAmxStrip) {  // an earlier, full strip left its weights here
                memset(p + n * kMaxChunk, 0, static_cast<size_t>(kAmxStrip - n) * kMaxChunk * 2);
            }
            float* o = w.o + static_cast<int64_t>(r0) * dvp;
            scale_rows(o, n, dvp, w.alpha + r0);
            const char* flat = w.v_flat + g0 * job->v_group_bytes;
            for (int c = 0; c < dvp; c += 32) {
                float* oc = o + c;
                _tile_loadd(0, oc, dvp * 4);
                _tile_loadd(1, oc + 16, dvp * 4);
                _tile_loadd(2, oc + 16 * dvp, dvp * 4);
                _tile_loadd(3, oc + 16 * dvp + 16, dvp * 4);
                for (int g = 0; g < g1 - g0; g += 2) {
                    const char* b = flat + g * job->v_group_bytes + c * 4;
                    _tile_loadd(4, p + g * kGroup, kMaxChunk * 2);
                    _tile_loadd(6, b, dvp * 4);
                    _tile_loadd(7, b + 64, dvp * 4);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(5, p + 16 * kMaxChunk + g * kGroup, kMaxChunk * 2);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                _tile_stored(0, oc, dvp * 4);
                _tile_stored(1, oc + 16, dvp * 4);
                _tile_stored(2, oc + 16 * dvp, dvp * 4);
                _tile_stored(3, oc + 16 * dvp + 16, dvp * 4);
            }
        }
    }
    finish<BF16>(job, item, head, w);
}
#endif

// ---------------------------------------------------------------------------------------------- one call

template <class T>
void merge_item(const Job* job, const Item& item, int head) {
    const int rows = item_rows(job, item);
    const int64_t token = job->args->batch->cu_seqlens_q[item.seq] + item.j0;
    for (int r = 0; r < rows; r++) {
        float* total = partial_of(job, item.partial, head, item.num_splits, 0, rows) + r * job->row_floats;
        float m = total[job->dvp], sum = total[job->dvp + 1];
        for (int s = 1; s < item.num_splits; s++) {
            const float* part = total + static_cast<int64_t>(s) * rows * job->row_floats;
            const float pm = part[job->dvp];
            if (pm == kMinusInf) continue;
            const float top = pm > m ? pm : m;
            const float a = exp2v<5>(splat(m - top))[0], b = exp2v<5>(splat(pm - top))[0];
            for (int d = 0; d < job->dvp; d += HFP_W) store(total + d, fma(load(part + d), splat(b), load(total + d) * splat(a)));
            sum = sum * a + part[job->dvp + 1] * b;
            m = top;
        }
        write_row<T>(job, token + r / job->group, head * job->group + r % job->group, total, m, sum);
    }
}

// Takes (item, head) pairs from `next` on, up to `total`.
template <class T>
void run_thread(Job* job, int64_t* next, int64_t total) {
    Work w;
    if (!make_work(job, &w)) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
#if HFP_USE_AMX
    FlushToZero like_tiles;
#endif
    const int heads = job->args->layer->num_kv_heads;
    // Work is taken in units, the KV heads of one item where there is plenty: their pieces of a block are neighbours in
    // memory. Each thread knows its next unit before it starts one, so that the last chunk can prefetch for it.
    const int64_t unit = job->unit;
    int64_t mine = __atomic_fetch_add(next, unit, __ATOMIC_RELAXED), left = unit;
    while (mine < total) {
        const int64_t then = --left ? mine + 1 : __atomic_fetch_add(next, unit, __ATOMIC_RELAXED);
        if (!left) left = unit;
        const Item& item = job->items[mine / heads];
        const int head = static_cast<int>(mine % heads);
        const Item* next_item = then < total ? job->items + then / heads : nullptr;
#if HFP_USE_AMX
        // A single query may be read together with others' another time, and must come to the same bits.
        if (job->amx && item.j1 - item.j0 > 1 && item_rows(job, item) > kMaxNarrowRows) {
            run_item_amx(job, item, head, w);
            mine = then;
            continue;
        }
#endif
        const int next_head = static_cast<int>(then % heads);
        mine = then;
#if HFP_USE_AMX
        // Shapes that do not fit tiles are widened, and so is a sequence's last split. In those before it many sequences
        // may meet, and they are worth the bits of a tile.
        const bool few = (item.j1 - item.j0) * job->group <= kStrip;
        if (!job->amx || (few && item.split >= item.num_splits - 1)) {
            run_item<WideBF16>(job, item, head, next_item, next_head, w);
            continue;
        }
        if (item_rows(job, item) <= kMaxWideRows) {
            run_item<TileBF16>(job, item, head, next_item, next_head, w);
            continue;
        }
#endif
        run_item<T>(job, item, head, next_item, next_head, w);
    }
#if HFP_USE_AMX
    if (w.tiles) _tile_release();
#endif
}

template <class T>
void run_merges(Job* job) {
    const int heads = job->args->layer->num_kv_heads;
    const int64_t total = static_cast<int64_t>(job->num_items) * heads;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&job->next_merge, 1, __ATOMIC_RELAXED);
        if (i >= total) return;
        const Item& item = job->items[i / heads];
        // The last split is a sequence's own even where the others are a group's.
        if (item.partial >= 0 && item.split == item.num_splits - 1) merge_item<T>(job, item, static_cast<int>(i % heads));
    }
}

template <class T>
void run_job(Job* job, int num_threads, bool merge) {
    const int64_t heads = job->args->layer->num_kv_heads;
    const int64_t first = job->num_first * heads, total = job->num_items * heads;
    job->next_own = first;
#ifdef _OPENMP
    if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
        {
            run_thread<T>(job, &job->next, first);
            if (first < total) {
#pragma omp barrier
                run_thread<T>(job, &job->next_own, total);
            }
            if (merge) {
#pragma omp barrier
                run_merges<T>(job);
            }
        }
        return;
    }
#endif
    run_thread<T>(job, &job->next, first);
    if (first < total) run_thread<T>(job, &job->next_own, total);
    if (merge) run_merges<T>(job);
}

// Chooses the groups worth it in this layer and fills members and member_of. False: out of memory.
HFP_INLINE bool plan_members(Job* job) {
    const hfp_attend_args* a = job->args;
    const hfp_batch* b = a->batch;
    if (b->num_groups <= 0) return true;
    const int64_t listed = b->group_starts[b->num_groups];
    const int64_t member_bytes = round_up(listed * static_cast<int64_t>(sizeof(Member)), 64);
    char* memory = reserve(&tls_members, member_bytes + b->num_seqs * static_cast<int64_t>(sizeof(int)));
    if (!memory) return false;
    job->members = reinterpret_cast<Member*>(memory);
    int* member_of = reinterpret_cast<int*>(memory + member_bytes);
    for (int i = 0; i < b->num_seqs; i++) member_of[i] = -1;
    const int chunk = chunk_keys(job->group);
    int64_t rows_of_splits = 0;
    const int size = a->layer->dtype == HFP_F32 ? 4 : 2;
    const int64_t key_bytes = static_cast<int64_t>(a->layer->num_kv_heads) * (a->layer->dk + job->dvp) * size;
    for (int64_t g = 0; g < b->num_groups; g++) {
        const int32_t* seqs = b->group_members + b->group_starts[g];
        const int n = b->group_starts[g + 1] - b->group_starts[g];
        int64_t shared = static_cast<int64_t>(b->group_blocks[g]) * a->layer->block_size;
        bool from_first = true;
        for (int i = 0; i < n; i++) {
            const int position = b->seq_lens[seqs[i]] - 1;
            from_first &= first_visible(a->params, position) == 0;
            if (shared > position) shared = position;
        }
        shared = shared / chunk * chunk;
        if (!from_first || (n - 1) * shared * key_bytes < kMinSavedBytes) continue;
        const int end = job->num_members + n;
        rows_of_splits += static_cast<int64_t>(n) * ceil_div(static_cast<int>(shared), kSplit);
        const int in_last = static_cast<int>(shared) / kSplit + 1;
        for (int longer = 1; longer >= 0; longer--) {
            for (int i = 0; i < n; i++) {
                Member member;
                member.seq = seqs[i];
                member.shared = static_cast<int>(shared);
                member.num_splits = ceil_div(b->seq_lens[seqs[i]], kSplit);
                member.partial = -1;
                member.group_end = end;
                if ((member.num_splits > in_last) != longer) continue;
                member_of[seqs[i]] = job->num_members;
                job->members[job->num_members++] = member;
            }
        }
    }
    if (!job->num_members) return true;
    job->member_of = member_of;
    // As full as leaves every thread its share. Which members share a tile is nothing to their results.
    const int64_t fair = rows_of_splits * a->layer->num_kv_heads / (4 * imax(a->num_threads, 1));
    const int least = imin(ceil_div(2 * kStrip, job->group), job->tile_queries);
    job->tile_members = fair < least ? least : fair < job->tile_queries ? static_cast<int>(fair) : job->tile_queries;
    return true;
}

struct Plan {
    Item* items;  // null: only count
    int count;
    int64_t partial_rows;  // of all heads
    int64_t keys;          // that queries look at, a group's as often as it has members
};

HFP_INLINE void add_item(Plan* plan, const Item& item) {
    if (plan->items) plan->items[plan->count] = item;
    plan->count++;
}

// Members [first, end) of one group in split s, which is the last one of all of them or of none.
HFP_INLINE void plan_shared_split(const Job* job, int first, int end, int s, Plan* plan) {
    const int n = end - first, tiles = ceil_div(n, job->tile_members);
    for (int tile = 0; tile < tiles; tile++) {
        Item item;
        item.member = first + n * tile / tiles;
        item.num_members = first + n * (tile + 1) / tiles - item.member;
        item.seq = job->members[first].seq;
        item.j0 = 0;
        item.j1 = 1;
        item.k0 = s * kSplit;
        item.k1 = imin(job->members[first].shared, (s + 1) * kSplit);
        item.partial = -1;
        item.split = s;
        item.num_splits = job->members[first].num_splits;
        item.carried = item.k1 < (s + 1) * kSplit;
        add_item(plan, item);
    }
}

HFP_INLINE void plan_groups(const Job* job, Plan* plan) {
    for (int first = 0; first < job->num_members; first = job->members[first].group_end) {
        const int end = job->members[first].group_end, shared = job->members[first].shared;
        for (int s = 0; s * kSplit < shared; s++) {
            int longer = first;  // members that go on behind this split come first
            while (longer < end && job->members[longer].num_splits > s + 1) longer++;
            plan_shared_split(job, first, longer, s, plan);
            plan_shared_split(job, longer, end, s, plan);
        }
    }
}

// What sequences do not share, but for the splits in which the common part ends.
HFP_INLINE void plan_sequences(const Job* job, Plan* plan) {
    const hfp_attend_args* a = job->args;
    const hfp_batch* b = a->batch;
    for (int i = 0; i < b->num_seqs; i++) {
        const int num_queries = b->cu_seqlens_q[i + 1] - b->cu_seqlens_q[i], seq_len = b->seq_lens[i];
        if (seq_len <= 0 || num_queries <= 0) continue;
        const int tiles = ceil_div(num_queries, job->tile_queries);
        const bool split = num_queries <= kSplitMaxQueries;
        Member* member = job->member_of && job->member_of[i] >= 0 ? job->members + job->member_of[i] : nullptr;
        // Last tiles first: they see the most keys, and long items should not be the last to start.
        for (int tile = tiles - 1; tile >= 0; tile--) {
            Item item;
            item.seq = i;
            item.j0 = tile * job->tile_queries;
            item.j1 = imin(item.j0 + job->tile_queries, num_queries);
            item.num_members = 0;
            item.member = -1;
            item.carried = false;
            const int position0 = seq_len - num_queries + item.j0;
            const int lo = first_visible(a->params, position0), hi = imax(position0 + item.j1 - item.j0, 0);
            const int rows = (item.j1 - item.j0) * job->group;
            const int s0 = lo / kSplit, s1 = imax(ceil_div(hi, kSplit), s0 + 1);
            item.partial = -1;
            item.split = 0;
            item.num_splits = split ? s1 - s0 : 0;
            if (!split || s1 - s0 == 1) {
                item.k0 = imin(lo, hi);
                item.k1 = hi;
                if (!member) add_item(plan, item);
            } else {
                item.partial = plan->partial_rows;
                if (member) member->partial = item.partial;
                for (int s = s0; s < s1; s++) {
                    item.split = s - s0;
                    item.k0 = imax(lo, s * kSplit);
                    item.k1 = imin(hi, (s + 1) * kSplit);
                    if (!member || item.k0 >= member->shared) add_item(plan, item);
                }
                plan->partial_rows += static_cast<int64_t>(rows) * (s1 - s0) * a->layer->num_kv_heads;
            }
            plan->keys += hi - imin(lo, hi);
        }
    }
}

// The rest of the splits in which a common part ends.
HFP_INLINE void plan_carried(const Job* job, Plan* plan) {
    for (int i = 0; i < job->num_members; i++) {
        const Member& member = job->members[i];
        if (member.shared % kSplit == 0) continue;
        Item item;
        item.seq = member.seq;
        item.j0 = 0;
        item.j1 = 1;
        item.split = member.shared / kSplit;
        item.k0 = member.shared;
        item.k1 = imin(job->args->batch->seq_lens[member.seq], (item.split + 1) * kSplit);
        item.partial = member.partial;
        item.num_splits = member.num_splits;
        item.num_members = 0;
        item.member = i;
        item.carried = true;
        add_item(plan, item);
    }
}

HFP_INLINE Plan make_plan(Job* job, Item* items) {
    Plan plan = {items, 0, 0, 0};
    plan_groups(job, &plan);
    plan_sequences(job, &plan);
    job->num_first = plan.count;
    plan_carried(job, &plan);
    job->num_items = plan.count;
    return plan;
}

HFP_INLINE int check_tables(const hfp_attend_args* a) {
    const hfp_batch* b = a->batch;
    if (b->cu_seqlens_q[0] != 0 || b->cu_seqlens_q[b->num_seqs] > a->num_tokens) return HFP_BAD_TABLE;
    for (int i = 0; i < b->num_seqs; i++) {
        if (b->cu_seqlens_q[i + 1] < b->cu_seqlens_q[i]) return HFP_BAD_TABLE;
        const int seq_len = b->seq_lens[i], num_queries = b->cu_seqlens_q[i + 1] - b->cu_seqlens_q[i];
        if (seq_len <= 0 || num_queries <= 0) continue;
        const int first = first_visible(a->params, imax(seq_len - num_queries, 0)) / a->layer->block_size;
        const int last = ceil_div(seq_len, a->layer->block_size);
        if (last > b->table_width) return HFP_BAD_TABLE;
        const int32_t* table = b->block_tables + i * b->table_stride;
        bool bad = false;
        for (int n = first; n < last; n++) bad |= static_cast<uint32_t>(table[n]) >= static_cast<uint32_t>(a->layer->num_blocks);
        if (bad) return HFP_BAD_BLOCK;
    }
    return HFP_OK;
}

void zero_padding_rows(const hfp_attend_args* a) {
    const hfp_batch* b = a->batch;
    const int64_t row = static_cast<int64_t>(a->num_q_heads) * a->layer->dv * (a->layer->dtype == HFP_F32 ? 4 : 2);
    for (int i = 0; i < b->num_seqs; i++) {
        const int64_t from = b->cu_seqlens_q[i], to = b->cu_seqlens_q[i + 1];
        if (b->seq_lens[i] <= 0 && to > from) memset(a->out + from * row, 0, static_cast<size_t>((to - from) * row));
    }
    const int64_t end = b->cu_seqlens_q[b->num_seqs];
    if (end < a->num_tokens) memset(a->out + end * row, 0, static_cast<size_t>((a->num_tokens - end) * row));
}

}  // namespace

int HFP_ATTEND(const hfp_attend_args* args) {
    const hfp_layer* layer = args->layer;
    const int status = check_tables(args);
    if (status != HFP_OK) return status;
    zero_padding_rows(args);

    Job job;
    memset(static_cast<void*>(&job), 0, sizeof job);
    job.args = args;
    job.scoring = make_scoring(args);
    job.group = args->num_q_heads / layer->num_kv_heads;
    job.dvp = static_cast<int>(round_up(layer->dv, kGroup));
    job.row_floats = static_cast<int>(round_up(job.dvp + 2, 16));
    const int size = layer->dtype == HFP_F32 ? 4 : 2;
    job.k_group_bytes = static_cast<int64_t>(kGroup) * layer->dk * size;
    job.v_group_bytes = static_cast<int64_t>(kGroup) * job.dvp * size;
    job.groups_per_block = layer->block_size / kGroup;
#if HFP_USE_AMX
    job.amx = layer->dtype == HFP_BF16 && layer->dk % 32 == 0 && job.dvp % 32 == 0;
#endif
    job.tile_queries = imax(1, (job.amx ? kAmxTileRows : kTileRows) / job.group);

    if (!plan_members(&job)) return HFP_NO_MEMORY;
    job.state_floats = static_cast<int>(round_up(job.dvp + HFP_W + 1, 16));
    const Plan plan = make_plan(&job, nullptr);
    if (job.num_items == 0) return HFP_OK;
    const int64_t item_bytes = round_up(static_cast<int64_t>(job.num_items) * static_cast<int64_t>(sizeof(Item)), 64);
    const int64_t partial_bytes = plan.partial_rows * job.row_floats * 4;
    const int64_t state_bytes = static_cast<int64_t>(job.num_members) * args->num_q_heads * job.state_floats * 4;
    char* memory = reserve(&tls_items, item_bytes + partial_bytes + state_bytes);
    if (!memory) return HFP_NO_MEMORY;
    job.partials = reinterpret_cast<float*>(memory + item_bytes);
    job.states = reinterpret_cast<float*>(memory + item_bytes + partial_bytes);
    make_plan(&job, reinterpret_cast<Item*>(memory));
    job.items = reinterpret_cast<const Item*>(memory);

    const int64_t bytes = plan.keys * layer->num_kv_heads * (layer->dk + job.dvp) * size;
    const int num_threads = bytes < kSerialBytes ? 1 : args->num_threads;
    const bool merge = plan.partial_rows > 0;
    job.unit = job.num_items >= 8 * num_threads ? layer->num_kv_heads : 1;
#if HFP_BF16_DOT
    run_job<BF16>(&job, num_threads, merge);  // other dtypes gain nothing from this level: see hfp_attend
#else
    switch (layer->dtype) {
        case HFP_F32: run_job<F32>(&job, num_threads, merge); break;
        case HFP_BF16: run_job<BF16>(&job, num_threads, merge); break;
        default: run_job<F16>(&job, num_threads, merge); break;
    }
#endif
    return job.failed ? HFP_NO_MEMORY : HFP_OK;
}
