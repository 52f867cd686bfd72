// Products of few to many rows with packed weights (hfp_decoder.h), for the instruction set this file is compiled for.
//
// Every output is summed over k in one order, whatever the number of rows and threads, so a sequence gets the same bits
// in any company. A tile of outputs lives in registers while its panel goes by once; the panel comes from memory for the
// first tile of rows and from L2 for the others.
#pragma once

#include "hfp_decoder.h"
#include "scratch.h"
#include "simd.h"

#ifdef _OPENMP
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#endif

namespace {

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / HFP_W;
// rows of a tile: what the accumulators leave room for
#if HFP_W == 16
constexpr int kTile = 12;
#elif HFP_W == 8
constexpr int kTile = 3;
#else
constexpr int kTile = 2;
#endif
constexpr int kAhead = 4096;  // bytes of a panel that are asked for before they are needed
constexpr int kRowsAhead = 2048;  // and of rows that are tiled

// Runs body(thread, threads), with one thread where there is little to do.
template <class Body>
HFP_INLINE void parallel(int num_threads, bool worth, const Body& body) {
#ifdef _OPENMP
    if (num_threads > 1 && worth) {
#pragma omp parallel num_threads(num_threads)
        body(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)num_threads;
    (void)worth;
    body(0, 1);
}

// The part of [0, n) that is thread t's.
HFP_INLINE void share(int64_t n, int t, int threads, int64_t* begin, int64_t* end) {
    *begin = n * t / threads;
    *end = n * (t + 1) / threads;
}

template <bool BF16>
HFP_INLINE int64_t panel_bytes(int k) {
    return BF16 ? round_up(k, 32) * kPanel * 2 : static_cast<int64_t>(k) * kPanel * 4;
}

// Rows of numbers that products read, `ld` numbers apart. Where they are tiled, they lie in tiles of 16 rows and 32
// numbers, 1 KiB in one piece each, and those of the same rows one behind the other: strided rows share few sets of the
// cache. Tiled rows are whole tiles wide, for nobody zeroes what pads them.
struct Rows {
    char* data;
    int64_t ld;
    bool tiled;
};

template <bool BF16>
HFP_INLINE Rows rows_to_read(void* data, int64_t width, int64_t rows) {
    return {static_cast<char*>(data), round_up(width, 32), HFP_USE_AMX && BF16 && rows > kPanel && width % 32 == 0};
}

template <bool BF16>
HFP_INLINE char* place(const Rows& rows, int64_t r, int64_t i) {
    if (HFP_USE_AMX && rows.tiled) return rows.data + (r / 16 * (rows.ld / 32) + i / 32) * 1024 + r % 16 * 64 + i % 32 * 2;
    return rows.data + (r * rows.ld + i) * (BF16 ? 2 : 4);
}

// tile[r][0..31] of ROWS rows of `a` (lda elements apart) with one panel.
template <bool BF16, int ROWS>
HFP_INLINE void multiply(const char* panel, int k, const char* a, int64_t lda, float* tile) {
    VF acc[ROWS][kVectors];
    HFP_UNROLL for (int r = 0; r < ROWS; r++) HFP_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] = VF{};
    if (BF16) {
        const uint16_t* rows = reinterpret_cast<const uint16_t*>(a);
        const int pairs = static_cast<int>(round_up(k, 32) / 2);
        for (int i = 0; i < pairs; i++) {
            const char* w = panel + static_cast<int64_t>(i / 16) * 2048 + i % 16 * 64;
            prefetch<false>(w + kAhead);
            prefetch<false>(w + kAhead + 1024);
#if defined(__AVX512BF16__)
            const __m512bh b0 = (__m512bh)_mm512_loadu_si512(w), b1 = (__m512bh)_mm512_loadu_si512(w + 1024);
            HFP_UNROLL for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                memcpy(&pair, rows + r * lda + 2 * i, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                acc[r][0] = (VF)_mm512_dpbf16_ps((__m512)acc[r][0], x, b0);
                acc[r][1] = (VF)_mm512_dpbf16_ps((__m512)acc[r][1], x, b1);
            }
#else
            HFP_UNROLL for (int v = 0; v < kVectors; v++) {
                const VI both = load_int(w + v * HFP_W / 16 * 1024 + v * HFP_W % 16 * 4);
                const VF even = as_float(both << 16), odd = as_float(both & splat_int(static_cast<int32_t>(0xffff0000u)));
                HFP_UNROLL for (int r = 0; r < ROWS; r++) {
                    acc[r][v] = fma(splat(bf16_to_float(rows[r * lda + 2 * i])), even, acc[r][v]);
                    acc[r][v] = fma(splat(bf16_to_float(rows[r * lda + 2 * i + 1])), odd, acc[r][v]);
                }
            }
#endif
        }
    } else {
        const float* rows = reinterpret_cast<const float*>(a);
        for (int i = 0; i < k; i++) {
            const float* w = reinterpret_cast<const float*>(panel) + static_cast<int64_t>(i) * kPanel;
            prefetch<false>(reinterpret_cast<const char*>(w) + kAhead);
            prefetch<false>(reinterpret_cast<const char*>(w) + kAhead + 64);
            VF b[kVectors];
            HFP_UNROLL for (int v = 0; v < kVectors; v++) b[v] = in_register(load(w + v * HFP_W));
            HFP_UNROLL for (int r = 0; r < ROWS; r++) {
                const VF x = splat(rows[r * lda + i]);
                HFP_UNROLL for (int v = 0; v < kVectors; v++) acc[r][v] = fma(x, b[v], acc[r][v]);
            }
        }
    }
    HFP_UNROLL for (int r = 0; r < ROWS; r++) HFP_UNROLL for (int v = 0; v < kVectors; v++) store(tile + r * kPanel + v * HFP_W, acc[r][v]);
}

// Out of line: products differ in what they do with a tile, and this is most of the code.
template <bool BF16>
__attribute__((noinline)) void multiply_rows(int rows, const char* panel, int k, const char* a, int64_t lda, float* tile);

template <bool BF16, int ROWS>
HFP_INLINE void multiply_up_to(int rows, const char* panel, int k, const char* a, int64_t lda, float* tile) {
    if (rows == ROWS) return multiply<BF16, ROWS>(panel, k, a, lda, tile);
    if constexpr (ROWS > 1) multiply_up_to<BF16, ROWS - 1>(rows, panel, k, a, lda, tile);
}

template <bool BF16>
void multiply_rows(int rows, const char* panel, int k, const char* a, int64_t lda, float* tile) {
    multiply_up_to<BF16, kTile>(rows, panel, k, a, lda, tile);
}

#if HFP_USE_AMX
struct __attribute__((aligned(64))) ProductTiles {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 32 rows, or the 16 that hold all there are, of which the last may be padding. Rows lie `stride` bytes apart, tiles of
// them `next` bytes from one to the next 32 columns and `below` bytes to the next 16 rows. With FIRST the panel comes from
// memory, else the rows do from the second cache, where they are tiled.
template <bool FIRST>
HFP_INLINE void multiply_tiles(bool both, const char* panel, int k, const char* a, int64_t stride, int64_t next, int64_t below, float* tile) {
    const char* low = a + below;
    const bool tiled = next == 1024;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < k; i += 32, panel += kPanel * 64, a += next, low += next) {
        if (FIRST) {
            for (int line = 0; line < 32; line++) prefetch<false>(panel + kAhead + 64 * line);
        }
        if (tiled) {
            for (int line = 0; line < 16; line++) prefetch<true>(a + kRowsAhead + 64 * line);
            for (int line = 0; both && line < 16; line++) prefetch<true>(low + kRowsAhead + 64 * line);
        }
        _tile_loadd(4, a, stride);
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, low, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, tile, kPanel * 4);
    _tile_stored(1, tile + 16, kPanel * 4);
    if (both) {
        _tile_stored(2, tile + 16 * kPanel, kPanel * 4);
        _tile_stored(3, tile + 16 * kPanel + 16, kPanel * 4);
    }
}

// Copies of rows that were not tiled when they were made.
HFP_INLINE Rows to_tiles(const Rows& from, int64_t rows, int64_t k, char* memory, int num_threads) {
    const int64_t across = round_up(k, 32) / 32;
    const Rows to = {memory, across * 32, true};
    parallel(num_threads, true, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = 0; i < across; i++) memcpy(place<true>(to, r, i * 32), place<true>(from, r, i * 32), 64);
        }
    });
    return to;
}

thread_local Scratch tls_tiles;
constexpr int64_t kMostKept = 16 << 20;
#endif

// Calls finish(row, rows, panel, tile) for every tile of panel p and rows [top, bottom) of `a`, which may be read up to
// a multiple of 32.
template <bool BF16, class Finish>
HFP_INLINE void multiply_panel(const hfp_linear* linear, const Rows& a, int64_t p, int64_t top, int64_t bottom, const Finish& finish) {
    const int k = linear->k;
    const char* panel = static_cast<const char*>(linear->w) + p * panel_bytes<BF16>(k);
    float tile[kPanel * kPanel] __attribute__((aligned(64)));
    int64_t at = top;
#if HFP_USE_AMX
    const int64_t stride = a.tiled ? 64 : a.ld * 2, next = a.tiled ? 1024 : 64, below = a.ld * 32;
    for (; BF16 && at < bottom; at += kPanel) {
        const int here = static_cast<int>(bottom - at < kPanel ? bottom - at : kPanel);
        const char* from = place<BF16>(a, at, 0);
        if (at == top) {  // later rows find the panel in the cache
            multiply_tiles<true>(here > 16, panel, k, from, stride, next, below, tile);
        } else {
            multiply_tiles<false>(here > 16, panel, k, from, stride, next, below, tile);
        }
        finish(at, here, p, tile);
    }
#endif
    while (at < bottom) {
        const int here = static_cast<int>(bottom - at < kTile ? bottom - at : kTile);
        multiply_rows<BF16>(here, panel, k, place<BF16>(a, at, 0), a.ld, tile);
        finish(at, here, p, tile);
        at += here;
    }
}

// Panels [next, last) with rows [top, bottom), one after the other for whoever comes.
struct alignas(64) Range {
    int64_t next, last, top, bottom;
};
constexpr int kMaxRanges = 64;

// Calls finish as multiply_panel does, for the whole product. Each thread has a range of its own, whose panels follow each
// other in memory, and helps with the others' when that is done: threads are seldom equally fast.
template <bool BF16, class Finish>
HFP_INLINE void product(const hfp_linear* linear, Rows a, int64_t rows, int num_threads, const Finish& finish) {
    const int k = linear->k;
    const int64_t panels = round_up(linear->n, kPanel) / kPanel;
#if HFP_USE_AMX
    // Worth it where rows are read again for many panels; without the memory rows are read where they are.
    if (BF16 && rows > kPanel && !a.tiled) {
        char* memory = reserve(&tls_tiles, round_up(rows, kPanel) * round_up(k, 32) * 2);
        if (memory) a = to_tiles(a, rows, k, memory, num_threads);
    }
#endif
    // With many rows and few panels, ranges share panels.
    int groups = 1;
    while (num_threads / groups * 4 > panels && rows / (groups * 2) >= 2 * kPanel && groups * 2 <= kMaxRanges) groups *= 2;
    const int most = num_threads < kMaxRanges ? num_threads : kMaxRanges;
    if (groups > most) groups = most;
    const int each = most / groups, count = each * groups;
    Range ranges[kMaxRanges];
    for (int i = 0; i < count; i++) {
        Range& range = ranges[i];
        share(panels, i % each, each, &range.next, &range.last);
        share(round_up(rows, kPanel) / kPanel, i / each, groups, &range.top, &range.bottom);
        range.top *= kPanel;
        range.bottom = range.bottom * kPanel < rows ? range.bottom * kPanel : rows;
    }
    parallel(num_threads, panels * k * kPanel > (8 << 10), [&](int t, int) {
#if HFP_USE_AMX
        if (BF16) {
            static const ProductTiles tiles;
            _tile_loadconfig(&tiles);
        }
#endif
        for (int i = 0; i < count; i++) {
            Range& range = ranges[(t + i) % count];
            for (;;) {
                const int64_t p = __atomic_fetch_add(&range.next, 1, __ATOMIC_RELAXED);
                if (p >= range.last) break;
                multiply_panel<BF16>(linear, a, p, range.top, range.bottom, finish);
            }
        }
#if HFP_USE_AMX
        if (BF16) _tile_release();
#endif
    });
#if HFP_USE_AMX
    release_above(&tls_tiles, kMostKept);
#endif
}

}  // namespace
