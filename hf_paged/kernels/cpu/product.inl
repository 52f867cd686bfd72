// Products of few to many rows with packed weights (hfp_decoder.h), for the instruction set this file is compiled for.
//
// Every output is summed over k in one order, whatever the number of rows and threads, so a sequence gets the same bits
// in any company. A tile of outputs lives in registers while its panel goes by once; the panel comes from memory for the
// first tile of rows and from L2 for the others.
#pragma once

#include "hfp_decoder.h"
#include "simd.h"

#include <stdlib.h>

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

HFP_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <bool BF16>
HFP_INLINE int64_t panel_bytes(int k) {
    return BF16 ? round_up(k, 32) * kPanel * 2 : static_cast<int64_t>(k) * kPanel * 4;
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
            const char* w = panel + static_cast<int64_t>(i) * kPanel * 4;
            prefetch<false>(w + kAhead);
            prefetch<false>(w + kAhead + 64);
#if defined(__AVX512BF16__)
            const __m512bh b0 = (__m512bh)_mm512_loadu_si512(w), b1 = (__m512bh)_mm512_loadu_si512(w + 64);
            HFP_UNROLL for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                memcpy(&pair, rows + r * lda + 2 * i, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                acc[r][0] = (VF)_mm512_dpbf16_ps((__m512)acc[r][0], x, b0);
                acc[r][1] = (VF)_mm512_dpbf16_ps((__m512)acc[r][1], x, b1);
            }
#else
            HFP_UNROLL for (int v = 0; v < kVectors; v++) {
                const VI both = load_int(w + v * HFP_W * 4);
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
// them `next` bytes from one to the next 32 columns and `below` bytes to the next 16 rows.
template <bool FIRST>
HFP_INLINE void multiply_tiles(bool both, const char* panel, int k, const char* a, int64_t stride, int64_t next, int64_t below, float* tile) {
    const char* low = a + below;
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
        _tile_loadd(4, a, stride);
        _tile_loadd(6, panel, 128);
        _tile_loadd(7, panel + 64, 128);
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

// Copies rows of `a` so that every tile is 1 KiB in one piece. Strided rows share few sets of the cache.
HFP_INLINE void to_tiles(const char* a, int64_t lda, int64_t rows, int64_t k, char* out, int num_threads) {
    const int64_t across = round_up(k, 32) / 32;
    parallel(num_threads, true, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            const char* from = a + r * lda * 2;
            char* to = out + r / 16 * across * 1024 + r % 16 * 64;
            for (int64_t i = 0; i < across; i++) memcpy(to + i * 1024, from + i * 64, 64);
        }
    });
}
#endif

// Calls finish(row, rows, panel, tile) for every tile of the product. Rows of `a` may be read up to a multiple of 32.
template <bool BF16, class Finish>
HFP_INLINE void product(const hfp_linear* linear, const char* a, int64_t lda, int64_t rows, int num_threads, const Finish& finish) {
    const int k = linear->k;
    const int64_t panels = round_up(linear->n, kPanel) / kPanel, size = panel_bytes<BF16>(k);
#if HFP_USE_AMX
    // Worth it where rows are read again for many panels; without the memory rows are read where they are.
    const int64_t across = round_up(k, 32) / 32;
    char* tiled = nullptr;
    if (BF16 && rows > kPanel) tiled = static_cast<char*>(aligned_alloc(64, static_cast<size_t>(round_up(rows, kPanel) / 16 * across * 1024)));
    if (tiled) to_tiles(a, lda, rows, k, tiled, num_threads);
#endif
    // With many rows and few panels, threads share panels.
    int by_rows = 1;
    while (num_threads / by_rows * 4 > panels && rows / (by_rows * 2) >= 2 * kPanel) by_rows *= 2;
    parallel(num_threads, panels * k * kPanel > (8 << 10), [&](int t, int threads) {
        const int groups = by_rows < threads ? by_rows : threads, each = threads / groups;
        if (t >= each * groups) return;  // an odd one out
        int64_t first, last, top, bottom;
        share(panels, t % each, each, &first, &last);
        share(round_up(rows, kPanel) / kPanel, t / each, groups, &top, &bottom);
        top *= kPanel;
        bottom = bottom * kPanel < rows ? bottom * kPanel : rows;
        float tile[kPanel * kPanel] __attribute__((aligned(64)));
#if HFP_USE_AMX
        if (BF16) {
            static const ProductTiles tiles;
            _tile_loadconfig(&tiles);
        }
#endif
        for (int64_t p = first; p < last; p++) {
            const char* panel = static_cast<const char*>(linear->w) + p * size;
            int64_t at = top;
#if HFP_USE_AMX
            for (; BF16 && at < bottom; at += kPanel) {
                const int here = static_cast<int>(bottom - at < kPanel ? bottom - at : kPanel);
                const char* from = tiled ? tiled + at / 16 * across * 1024 : a + at * lda * 2;
                const int64_t stride = tiled ? 64 : lda * 2, next = tiled ? 1024 : 64, below = tiled ? across * 1024 : 32 * lda;
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
                multiply_rows<BF16>(here, panel, k, a + at * lda * (BF16 ? 2 : 4), lda, tile);
                finish(at, here, p, tile);
                at += here;
            }
        }
#if HFP_USE_AMX
        if (BF16) _tile_release();
#endif
    });
#if HFP_USE_AMX
    free(tiled);
#endif
}

}  // namespace
