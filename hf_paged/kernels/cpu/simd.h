// Vectors of W floats and the few operations attention needs, for the instruction set this file is compiled for.
//
// Included by attend.inl and product.inl, which are compiled once per instruction set. Everything has internal linkage:
// were one of these functions merged by the linker across instruction sets, an old CPU could end up in AVX-512 code. For
// the same reason no header of the C++ standard library is used here.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define HFP_W 16
#elif defined(__AVX2__)
#define HFP_W 8
#else
#define HFP_W 4
#endif

#define HFP_INLINE static inline __attribute__((always_inline))
#define HFP_INLINE_MEMBER inline __attribute__((always_inline))
#define HFP_INLINE_LAMBDA __attribute__((always_inline))
#define HFP_UNROLL _Pragma("GCC unroll 16")

namespace {

typedef float VF __attribute__((vector_size(4 * HFP_W)));
typedef int32_t VI __attribute__((vector_size(4 * HFP_W)));
typedef float VFu __attribute__((vector_size(4 * HFP_W), aligned(2), may_alias));
typedef int32_t VIu __attribute__((vector_size(4 * HFP_W), aligned(2), may_alias));

HFP_INLINE VF load(const float* p) { return *reinterpret_cast<const VFu*>(p); }
HFP_INLINE void store(float* p, VF v) { *reinterpret_cast<VFu*>(p) = v; }
HFP_INLINE VI load_int(const void* p) { return *reinterpret_cast<const VIu*>(p); }
HFP_INLINE VF splat(float x) { return x - VF{}; }
HFP_INLINE VF splat_at(const char* p) {
    float x;
    memcpy(&x, p, 4);
    return splat(x);
}
HFP_INLINE VI splat_int(int32_t x) { return x - VI{}; }
HFP_INLINE VF as_float(VI x) { return (VF)x; }
HFP_INLINE VI as_int(VF x) { return (VI)x; }

// The same value, but the compiler may no longer fold its load into every instruction that uses it: with 512 bits a
// cycle takes two loads at most, and lines that have yet to arrive should be waited for once.
template <class V>
HFP_INLINE V in_register(V v) {
#if HFP_W == 16
    __asm__("" : "+v"(v));
#endif
    return v;
}

HFP_INLINE VF fma(VF a, VF b, VF c) {
#if HFP_W == 16
    return _mm512_fmadd_ps(a, b, c);
#elif HFP_W == 8
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// sum = fma(a, b, sum) that stays in its register: where sums fill most of them, compilers let them wander, and put some
// into memory.
HFP_INLINE void fma_into(VF& sum, VF a, VF b) {
#if HFP_W == 8
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum = fma(a, b, sum);
#endif
}

// sums[m][n] += row(m) * column(n). The fewer of both are held in registers, of the others one at a time: with M * N sums
// there is room for no more.
template <int M, int N, class Row, class Column>
HFP_INLINE void add_outer(VF (&sums)[M][N], const Row& row, const Column& column) {
    if (M < N) {
        VF a[M];
        HFP_UNROLL for (int m = 0; m < M; m++) a[m] = row(m);
        HFP_UNROLL for (int n = 0; n < N; n++) {
            const VF b = column(n);
            HFP_UNROLL for (int m = 0; m < M; m++) fma_into(sums[m][n], a[m], b);
        }
    } else {
        VF b[N];
        HFP_UNROLL for (int n = 0; n < N; n++) b[n] = column(n);
        HFP_UNROLL for (int m = 0; m < M; m++) {
            const VF a = row(m);
            HFP_UNROLL for (int n = 0; n < N; n++) fma_into(sums[m][n], a, b[n]);
        }
    }
}

// sums[m][n] += rows[m][0] * the first numbers of pairs(n), pairs of bfloat16, + rows[m][1] * the second ones.
template <int M, int N, class Pairs>
HFP_INLINE void add_pairs(VF (&sums)[M][N], const float* rows, int64_t ld, const Pairs& pairs) {
    const VI high = splat_int(static_cast<int32_t>(0xffff0000u));
#if HFP_W == 16
    VF first[N], second[N];
    HFP_UNROLL for (int n = 0; n < N; n++) {
        const VI both = in_register(pairs(n));
        first[n] = as_float(both << 16);
        second[n] = as_float(both & high);
    }
    HFP_UNROLL for (int m = 0; m < M; m++) {
        const VF a0 = in_register(splat(rows[m * ld])), a1 = in_register(splat(rows[m * ld + 1]));
        HFP_UNROLL for (int n = 0; n < N; n++) sums[m][n] = fma(a0, first[n], sums[m][n]);
        HFP_UNROLL for (int n = 0; n < N; n++) sums[m][n] = fma(a1, second[n], sums[m][n]);
    }
#else
    // Sums take most registers: the first numbers of all, then the second ones, which are loaded again.
    HFP_UNROLL for (int which = 0; which < 2; which++) {
        if (which) __asm__ volatile("" ::: "memory");
        add_outer<M, N>(sums, [&](int m) HFP_INLINE_LAMBDA { return splat(rows[m * ld + which]); },
                         [&](int n) HFP_INLINE_LAMBDA { return as_float(which ? pairs(n) & high : pairs(n) << 16); });
    }
#endif
}

HFP_INLINE VF vmax(VF a, VF b) {
#if HFP_W == 16
    return _mm512_max_ps(a, b);
#elif HFP_W == 8
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

HFP_INLINE VI iota() {
    VI v;
    for (int i = 0; i < HFP_W; i++) v[i] = i;
    return v;
}

HFP_INLINE float hmax(VF v) {
#if HFP_W == 16
    return _mm512_reduce_max_ps(v);
#else
    float m = v[0];
    for (int i = 1; i < HFP_W; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// 2^t for t <= about 127; exactly 0 for t < -126 and for -inf; NaN stays NaN so that a broken model is not hidden.
template <int DEGREE>
HFP_INLINE VF exp2v(VF t) {
    static_assert(DEGREE == 3 || DEGREE == 5, "coefficients exist for these degrees");
#if HFP_W == 16
    const __mmask16 keep = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const VF n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const VF clamped = t < splat(-126.0f) ? splat(-126.0f) : t;
    const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
    const VF shifted = clamped + magic;
    const VF n = shifted - magic;
#endif
#if HFP_W == 16
    const VF r = t - n;
#else
    const VF r = clamped - n;
#endif
    VF p;
    if (DEGREE == 3) {  // relative error 7.5e-5: for weights about to be rounded to bfloat16
        p = splat(0.05517150653855042f);
        p = fma(p, r, splat(0.24261110976353345f));
        p = fma(p, r, splat(0.6932610154607131f));
        p = fma(p, r, splat(0.9999280750698809f));
    } else {  // relative error 7.5e-8
        p = splat(0.0013276453375817565f);
        p = fma(p, r, splat(0.00967554118617552f));
        p = fma(p, r, splat(0.05550713331088649f));
        p = fma(p, r, splat(0.24022119727531643f));
        p = fma(p, r, splat(0.6931469670294965f));
        p = fma(p, r, splat(1.0000000716535462f));
    }
#if HFP_W == 16
    return _mm512_maskz_scalef_ps(keep, p, n);
#else
    const VF scaled = as_float(as_int(p) + (as_int(shifted) << 23));
    // A NaN compares false here and reaches `scaled` through the polynomial.
    return t < splat(-126.0f) ? VF{} : scaled;
#endif
}

HFP_INLINE VF tanhv(VF x) {
    const VF magnitude = as_float(as_int(x) & splat_int(0x7fffffff));
    // Small arguments keep their relative precision with an odd polynomial; 1 - 2 / (e^2x + 1) would cancel there.
    const VF x2 = x * x;
    VF p = splat(-0.00886323552990f);
    p = fma(p, x2, splat(0.02186948853615f));
    p = fma(p, x2, splat(-0.05396825396825f));
    p = fma(p, x2, splat(0.13333333333333f));
    p = fma(p, x2, splat(-0.33333333333333f));
    const VF small = fma(x * x2, p, x);
    const VF capped = magnitude > splat(15.0f) ? splat(15.0f) : magnitude;
    const VF e = exp2v<5>(capped * splat(2.8853900817779268f));
    const VF large = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
    const VF signed_large = as_float(as_int(large) | (as_int(x) & splat_int(INT32_MIN)));
    return magnitude < splat(0.25f) ? small : signed_large;
}

HFP_INLINE VI load_u16(const void* p) {  // W unsigned 16-bit values, widened
#if HFP_W == 16
    return (VI)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif HFP_W == 8
    return (VI)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    uint16_t h[HFP_W];
    memcpy(h, p, sizeof h);
    VI v;
    for (int i = 0; i < HFP_W; i++) v[i] = h[i];
    return v;
#endif
}

HFP_INLINE VF load_f16(const void* p) {
#if HFP_W == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif HFP_W == 8
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    // Shift the exponent into place and let one multiplication rebias it; that also renormalises subnormals.
    const VI h = load_u16(p);
    VF magnitude = as_float((h & splat_int(0x7fff)) << 13) * splat(5.192296858534828e33f);  // 2^112
    const VI special = (h & splat_int(0x7c00)) == splat_int(0x7c00);
    magnitude = as_float(as_int(magnitude) | (special & splat_int(0x7f800000)));
    return as_float(as_int(magnitude) | ((h & splat_int(0x8000)) << 16));
#endif
}

HFP_INLINE float bf16_to_float(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

HFP_INLINE uint16_t float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

HFP_INLINE float f16_to_float(uint16_t h) {
    uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 5.192296858534828e33f;
    memcpy(&bits, &f, 4);
    if ((h & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
    bits |= static_cast<uint32_t>(h & 0x8000u) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

HFP_INLINE uint16_t float_to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (bits < 0x38800000u) {  // subnormal half: let float addition do the rounding
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &magnitude, 4);
        return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
    }
    bits += 0xc8000fffu + ((bits >> 13) & 1u);
    return static_cast<uint16_t>(sign | (bits >> 13));
}

#if HFP_W == 16
#define HFP_UNPACK(PART, BITS, A, B) (VI) _mm512_unpack##PART##_epi##BITS((__m512i)(A), (__m512i)(B))
#define HFP_QUARTERS(A, B, WHICH) (VI) _mm512_shuffle_i32x4((__m512i)(A), (__m512i)(B), WHICH)
#elif HFP_W == 8
#define HFP_UNPACK(PART, BITS, A, B) (VI) _mm256_unpack##PART##_epi##BITS((__m256i)(A), (__m256i)(B))
#define HFP_HALVES(A, B, WHICH) (VI) _mm256_permute2x128_si256((__m256i)(A), (__m256i)(B), WHICH)
#endif

// The sums of W vectors, in order. Each is added up in one order, wherever it stands.
HFP_INLINE VF hsums(const VF (&of)[HFP_W]) {
#if HFP_W == 4
    VF sums;
    for (int i = 0; i < HFP_W; i++) sums[i] = (of[i][0] + of[i][2]) + (of[i][1] + of[i][3]);
    return sums;
#else
    VF fours[HFP_W / 4];
    HFP_UNROLL for (int i = 0; i < HFP_W / 4; i++) {
        const VF *v = of + 4 * i;
        const VF a = as_float(HFP_UNPACK(lo, 32, v[0], v[1])) + as_float(HFP_UNPACK(hi, 32, v[0], v[1]));
        const VF b = as_float(HFP_UNPACK(lo, 32, v[2], v[3])) + as_float(HFP_UNPACK(hi, 32, v[2], v[3]));
        fours[i] = as_float(HFP_UNPACK(lo, 64, a, b)) + as_float(HFP_UNPACK(hi, 64, a, b));
    }
#if HFP_W == 16
    const VF a = as_float(HFP_QUARTERS(fours[0], fours[1], 0x88)) + as_float(HFP_QUARTERS(fours[0], fours[1], 0xdd));
    const VF b = as_float(HFP_QUARTERS(fours[2], fours[3], 0x88)) + as_float(HFP_QUARTERS(fours[2], fours[3], 0xdd));
    return as_float(HFP_QUARTERS(a, b, 0x88)) + as_float(HFP_QUARTERS(a, b, 0xdd));
#else
    return as_float(HFP_HALVES(fours[0], fours[1], 0x20)) + as_float(HFP_HALVES(fours[0], fours[1], 0x31));
#endif
#endif
}

#if HFP_W == 16
// 16 rows of 16 numbers, in place: blocks of four by four within 128 bits first, then those.
HFP_INLINE void transpose(VI (&rows)[HFP_W]) {
    HFP_UNROLL for (int i = 0; i < HFP_W; i += 4) {
        const VI low = HFP_UNPACK(lo, 32, rows[i], rows[i + 1]), low2 = HFP_UNPACK(lo, 32, rows[i + 2], rows[i + 3]);
        const VI high = HFP_UNPACK(hi, 32, rows[i], rows[i + 1]), high2 = HFP_UNPACK(hi, 32, rows[i + 2], rows[i + 3]);
        rows[i] = HFP_UNPACK(lo, 64, low, low2);
        rows[i + 1] = HFP_UNPACK(hi, 64, low, low2);
        rows[i + 2] = HFP_UNPACK(lo, 64, high, high2);
        rows[i + 3] = HFP_UNPACK(hi, 64, high, high2);
    }
    HFP_UNROLL for (int i = 0; i < 4; i++) {
        const VI first = HFP_QUARTERS(rows[i], rows[4 + i], 0x44), first2 = HFP_QUARTERS(rows[8 + i], rows[12 + i], 0x44);
        const VI last = HFP_QUARTERS(rows[i], rows[4 + i], 0xee), last2 = HFP_QUARTERS(rows[8 + i], rows[12 + i], 0xee);
        rows[i] = HFP_QUARTERS(first, first2, 0x88);
        rows[4 + i] = HFP_QUARTERS(first, first2, 0xdd);
        rows[8 + i] = HFP_QUARTERS(last, last2, 0x88);
        rows[12 + i] = HFP_QUARTERS(last, last2, 0xdd);
    }
}
#endif

template <bool LOW_LEVEL>
HFP_INLINE void prefetch(const void* p) {
    __builtin_prefetch(p, 0, LOW_LEVEL ? 3 : 2);
}

}  // namespace
