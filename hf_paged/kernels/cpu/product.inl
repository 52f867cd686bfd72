// Products of few to many rows with packed weights (hfp_decoder.h), for the instruction set this file is compiled for.
//
// Every output is summed over k in one order, whatever the number of rows and threads, so a sequence gets the same bits
// in any company. A tile of outputs lives in registers while its columns of a panel go by once; those come from memory for
// the first tile of rows and from the caches for the others.
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
// Rows of a tile two vectors wide, by what room there is for sums in registers: so few loads feed many products. Up to
// kFew rows have one of four vectors, for sums enough to hide how long each takes; two vectors of 16 are a panel.
constexpr int kTile = HFP_W == 16 ? 12 : 6;
constexpr int kFew = HFP_W == 16 ? 0 : 3;
constexpr int kManyRows = 48;  // from so many on, a copy of a panel of BF16 in floats is worth it
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

// What products multiply. I8 are rows in 8 bits with weights in 8 bits; I16 the same where the processor multiplies no
// bytes, rows and panel having been widened.
enum Number { F32, BF16, I8, I16 };

// Bytes of a number of a row.
template <Number T>
constexpr int kBytes = T == F32 ? 4 : T == I8 ? 1 : 2;
// Numbers of a panel's depth that 64 bytes hold: panels and rows are whole multiples of it, but for F32.
template <Number T>
constexpr int kDepth = T == F32 ? 32 : 64 / kBytes<T>;
template <Number T>
constexpr bool kInTiles = HFP_USE_AMX && (T == BF16 || T == I8);

#if HFP_USE_AMX
constexpr Number kBytesAs = I8;
constexpr int kRowOffset = 0;
#elif defined(__AVX512VNNI__)
constexpr Number kBytesAs = I8;
constexpr int kRowOffset = 128;  // vpdpbusd multiplies unsigned bytes with signed ones
#else
constexpr Number kBytesAs = I16;
constexpr int kRowOffset = 0;
#endif

// What rows are multiplied as: where the processor multiplies no pairs of BF16, all of them are widened once, and not
// again for each panel. Rows for weights as they are stay BF16.
#if defined(__AVX512BF16__)
constexpr Number kPairsAs = BF16;
#else
constexpr Number kPairsAs = F32;
#endif
template <Number T>
constexpr Number kRowsAs = T == BF16 ? kPairsAs : T == I8 ? kBytesAs : T;
template <Number T>
constexpr bool kFloats = T == BF16 && kRowsAs<T> == F32;

template <Number T>
HFP_INLINE int64_t panel_bytes(int k) {
    return T == F32 ? static_cast<int64_t>(k) * kPanel * 4 : round_up(k, kDepth<T>) * kPanel * kBytes<T>;
}

// Rows of numbers that products read, `ld` numbers apart. Where they are tiled, they lie in tiles of 16 rows and 64
// bytes, 1 KiB in one piece each, and those of the same rows one behind the other: strided rows share few sets of the
// cache. Tiled rows of BF16 are whole tiles wide, for nobody zeroes what pads them; whatever pads bytes is multiplied by
// zeros.
struct Rows {
    char* data;
    int64_t ld;
    bool tiled;
    float* scales;  // of each row, where it is in 8 bits
};

template <Number T>
HFP_INLINE Rows rows_to_read(void* data, int64_t width, int64_t rows, float* scales = nullptr) {
    return {static_cast<char*>(data), round_up(width, kDepth<T>), kInTiles<T> && rows > kPanel && (T == I8 || width % kDepth<T> == 0), scales};
}

template <Number T>
HFP_INLINE char* place(const Rows& rows, int64_t r, int64_t i) {
    const int64_t byte = i * kBytes<T>;
    if (HFP_USE_AMX && rows.tiled) return rows.data + (r / 16 * (rows.ld / kDepth<T>) + byte / 64) * 1024 + r % 16 * 64 + byte % 64;
    return rows.data + r * rows.ld * kBytes<T> + byte;
}

#if HFP_W == 16
typedef __m512i Dwords;
#elif HFP_W == 8
typedef __m256i Dwords;
#else
typedef VI Dwords;
#endif

// sum + the products of what two dwords hold: pairs of BF16, pairs of 16 bits, four bytes (the first ones unsigned).
template <Number T>
HFP_INLINE VF add_products(VF sum, Dwords x, Dwords w) {
#if defined(__AVX512BF16__)
    if (T == BF16) return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#endif
    if (T == BF16) {
        const VI a = (VI)x, b = (VI)w, high = splat_int(static_cast<int32_t>(0xffff0000u));
        return fma(as_float(a & high), as_float(b & high), fma(as_float(a << 16), as_float(b << 16), sum));
    }
#if defined(__AVX512VNNI__)
    if (T == I8) return (VF)_mm512_dpbusd_epi32((__m512i)sum, x, w);
#endif
#if HFP_W == 16
    return (VF)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(x, w));
#elif HFP_W == 8
    return (VF)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(x, w));
#else
    return as_float(as_int(sum) + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16));
#endif
}

// Columns [column, column + VECTORS * W) of tile[r] of ROWS rows of `a` (`stride` bytes apart, of kRowsAs<T>) with one
// panel; int32 for I8 and I16. Where the panel BEGINS it comes from memory: these columns, or of F32 all.
template <Number T, int ROWS, int VECTORS, bool BEGINS>
HFP_INLINE void multiply(const char* panel, int column, int k, const char* a, int64_t stride, float* tile) {
    constexpr int kLines = (VECTORS * HFP_W + 15) / 16;
    VF acc[ROWS][VECTORS];
    HFP_UNROLL for (int r = 0; r < ROWS; r++) HFP_UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = VF{};
    if (T == F32) {
        for (int i = 0; i < k; i++) {
            const float* w = reinterpret_cast<const float*>(panel) + static_cast<int64_t>(i) * kPanel + column;
            if (BEGINS) {
                prefetch<false>(reinterpret_cast<const char*>(w) + kAhead);
                prefetch<false>(reinterpret_cast<const char*>(w) + kAhead + 64);
            }
            add_outer<ROWS, VECTORS>(acc, [&](int r) HFP_INLINE_LAMBDA { return splat_at(a + r * stride + i * 4); },
                                     [&](int v) HFP_INLINE_LAMBDA { return in_register(load(w + v * HFP_W)); });
        }
    } else {
        constexpr int kDwords = kFloats<T> ? 2 : 1;  // of a row that one of a panel is multiplied with
        const char* w = panel + column / 16 * 1024 + column % 16 * 4;
        const char* const end = w + round_up(k, kDepth<T>) * kBytes<T> * kPanel;
        for (; w < end; w += 1024) {
            for (int i = 0; i < 16; i++, w += 64, a += 4 * kDwords) {
                if (BEGINS) {
                    for (int line = 0; line < kLines; line++) prefetch<false>(w + kAhead + 1024 * line);
                }
                const auto dwords = [&](int v) HFP_INLINE_LAMBDA { return load_int(w + v * HFP_W / 16 * 1024 + v * HFP_W % 16 * 4); };
                if (kFloats<T>) {
                    add_pairs(acc, reinterpret_cast<const float*>(a), stride / 4, [&](int v) HFP_INLINE_LAMBDA { return (VI)dwords(v); });
                    continue;
                }
                Dwords b[VECTORS];
                HFP_UNROLL for (int v = 0; v < VECTORS; v++) b[v] = (Dwords)dwords(v);
                HFP_UNROLL for (int r = 0; r < ROWS; r++) {
                    int32_t dword;
                    memcpy(&dword, a + r * stride, 4);
                    const Dwords x = (Dwords)splat_int(dword);
                    HFP_UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = add_products<T>(acc[r][v], x, b[v]);
                }
            }
        }
    }
    HFP_UNROLL for (int r = 0; r < ROWS; r++) {
        HFP_UNROLL for (int v = 0; v < VECTORS; v++) store(tile + r * kPanel + column + v * HFP_W, acc[r][v]);
    }
}

template <Number T, int LEAST, int ROWS, int VECTORS, bool BEGINS>
HFP_INLINE void multiply_up_to(int rows, const char* panel, int column, int k, const char* a, int64_t stride, float* tile) {
    if (rows == ROWS) return multiply<T, ROWS, VECTORS, BEGINS>(panel, column, k, a, stride, tile);
    if constexpr (ROWS > LEAST) multiply_up_to<T, LEAST, ROWS - 1, VECTORS, BEGINS>(rows, panel, column, k, a, stride, tile);
}

// tile[r][0..31] of up to 32 rows, in tiles of about the same number of them. Out of line: products differ in what they
// do with a tile, and this is most of the code.
template <Number T, bool BEGINS>
__attribute__((noinline)) void multiply_rows(int rows, const char* panel, int k, const char* a, int64_t stride, float* tile) {
    if constexpr (kFew > 0) {
        if (rows <= kFew) {
            for (int column = 0; column < kPanel; column += 4 * HFP_W) {
                multiply_up_to<T, 1, kFew, 4, BEGINS>(rows, panel, column, k, a, stride, tile);
            }
            return;
        }
    }
    constexpr int kLeast = kFew ? kFew : 1;
    const int tiles = (rows + kTile - 1) / kTile;
    for (int column = 0; column < kPanel; column += 2 * HFP_W) {
        for (int i = 0; i < tiles; i++) {
            const int first = rows * i / tiles, here = rows * (i + 1) / tiles - first;
            const char* from = a + first * stride;
            float* to = tile + first * kPanel;
            if constexpr (BEGINS) {
                if (i == 0 && (T != F32 || column == 0)) {
                    multiply_up_to<T, kLeast, kTile, 2, true>(here, panel, column, k, from, stride, to);
                    continue;
                }
            }
            multiply_up_to<T, kLeast, kTile, 2, false>(here, panel, column, k, from, stride, to);
        }
    }
}

// A panel of bytes as one of T.
template <Number T>
__attribute__((noinline)) void widen(const char* panel, int k, char* out) {
    const int quads = static_cast<int>(round_up(k, 64) / 4);
    const VI high = splat_int(static_cast<int32_t>(0xffff0000u));
    for (int i = 0; i < quads; i++) {
        const char* from = panel + static_cast<int64_t>(i / 16) * 2048 + i % 16 * 64;
        prefetch<false>(from + kAhead);
        prefetch<false>(from + kAhead + 1024);
        // two dwords of pairs for one of bytes
        char* pairs = out + static_cast<int64_t>(i / 8) * 2048 + i % 8 * 128;
        char* numbers = out + static_cast<int64_t>(i) * 4 * kPanel * 4;
        for (int v = 0; v < kVectors; v++) {
            const int half = v * HFP_W / 16, at = v * HFP_W % 16 * 4;
            const VI four = load_int(from + half * 1024 + at);
            const VI x[4] = {four << 24 >> 24, four << 16 >> 24, four << 8 >> 24, four >> 24};
            VF f[4];
            for (int j = 0; j < 4; j++) f[j] = __builtin_convertvector(x[j], VF);
            if (T == F32) {
                for (int j = 0; j < 4; j++) store(reinterpret_cast<float*>(numbers + j * kPanel * 4 + half * 64 + at), f[j]);
                continue;
            }
            for (int j = 0; j < 2; j++) {
                const VI low = T == BF16 ? as_int(f[2 * j]) >> 16 : x[2 * j];
                const VI up = T == BF16 ? as_int(f[2 * j + 1]) : x[2 * j + 1] << 16;
                store(reinterpret_cast<float*>(pairs + half * 1024 + j * 64 + at), as_float((low & ~high) | (up & high)));
            }
        }
    }
}

// `numbers` of a panel of BF16, an even number, as floats.
__attribute__((noinline)) void widen_pairs(const char* panel, int64_t numbers, char* out) {
    const VI high = splat_int(static_cast<int32_t>(0xffff0000u));
    for (int64_t i = 0; i < numbers / 2; i++) {
        const char* from = panel + i / 16 * 2048 + i % 16 * 64;
        prefetch<false>(from + kAhead);
        prefetch<false>(from + kAhead + 1024);
        float* first = reinterpret_cast<float*>(out) + 2 * i * kPanel;
        HFP_UNROLL for (int column = 0; column < kPanel; column += HFP_W) {
            const VI pairs = load_int(from + column / 16 * 1024 + column % 16 * 4);
            store(first + column, as_float(pairs << 16));
            store(first + kPanel + column, as_float(pairs & high));
        }
    }
}

// ROWS rows of BF16 with W / ROWS outputs from `first` on, of `here` that there are, whose weights are as they are, `bytes`
// each: a vector of sums for each, which is added up at the end. `next` is what will be read next, or null.
template <int ROWS>
HFP_INLINE void multiply_dots(
    const char* weights, int first, int here, int64_t bytes, const char* a, int64_t stride, const char* next, float* tile) {
    constexpr int kOutputs = HFP_W / ROWS;
    const char* w[kOutputs];
    for (int o = 0; o < kOutputs; o++) w[o] = weights + (first + o < here ? first + o : here - 1) * bytes;
    VF acc[HFP_W];
    HFP_UNROLL for (int i = 0; i < HFP_W; i++) acc[i] = VF{};
    for (int64_t at = 0; at < bytes; at += HFP_W * 4) {
        for (int line = 0; next && line < kOutputs * HFP_W * 4; line += 64) prefetch<false>(next + at * kOutputs + line);
        Dwords x[ROWS];
        HFP_UNROLL for (int r = 0; r < ROWS; r++) x[r] = (Dwords)load_int(a + r * stride + at);
        HFP_UNROLL for (int o = 0; o < kOutputs; o++) {
            const Dwords y = (Dwords)load_int(w[o] + at);
            HFP_UNROLL for (int r = 0; r < ROWS; r++) acc[r * kOutputs + o] = add_products<BF16>(acc[r * kOutputs + o], x[r], y);
        }
    }
    float sums[HFP_W];
    store(sums, hsums(acc));
    for (int r = 0; r < ROWS; r++) memcpy(tile + r * kPanel + first, sums + r * kOutputs, kOutputs * 4);
}

// tile[r][0..31] of up to 32 rows. The panel comes from memory where it `begins`.
__attribute__((noinline)) void multiply_as_they_are(
    const char* weights, int here, int64_t bytes, int rows, const char* a, int64_t stride, bool begins, float* tile) {
    const int fours = rows % 4 == 3 ? rows + 1 : rows / 4 * 4;  // rows and tiles have room up to 32
    for (int first = 0; first < kPanel; first += HFP_W) {
        const char* next = weights + (kPanel + first) * bytes;  // in the order in which it lies
        for (int o = 0; o < HFP_W; o += HFP_W / 4) {
            for (int r = 0; r < fours; r += 4) {
                const char* ahead = begins && r == 0 ? next + o * bytes : nullptr;
                multiply_dots<4>(weights, first + o, here, bytes, a + r * stride, stride, ahead, tile + r * kPanel);
            }
        }
        const char* rest = a + fours * stride;
        if (rows - fours == 1) {
            multiply_dots<1>(weights, first, here, bytes, rest, stride, begins && !fours ? next : nullptr, tile + fours * kPanel);
        }
        for (int o = 0; rows - fours == 2 && o < HFP_W; o += HFP_W / 2) {
            const char* ahead = begins && !fours ? next + o * bytes : nullptr;
            multiply_dots<2>(weights, first + o, here, bytes, rest, stride, ahead, tile + fours * kPanel);
        }
    }
}

// A tile as numbers: of plain weights the sums, of weights in 8 bits the sums times a scale for each output, and for each
// row where those are in 8 bits too. at(r, c) is W of them, or one.
struct Sums {
    const float* tile;

    HFP_INLINE_MEMBER VF at(int r, int c) const { return load(tile + r * kPanel + c); }
    HFP_INLINE_MEMBER float one(int r, int c) const { return tile[r * kPanel + c]; }
};

struct ScaledSums {
    const float *tile, *outputs;

    HFP_INLINE_MEMBER VF at(int r, int c) const { return load(tile + r * kPanel + c) * load(outputs + c); }
    HFP_INLINE_MEMBER float one(int r, int c) const { return tile[r * kPanel + c] * outputs[c]; }
};

struct ScaledInts {
    const float *tile, *outputs, *rows;
    const int32_t* offsets;

    HFP_INLINE_MEMBER VF at(int r, int c) const {
        VI sum = load_int(tile + r * kPanel + c);
        if (kRowOffset) sum -= load_int(offsets + c);
        return __builtin_convertvector(sum, VF) * splat(rows[r]) * load(outputs + c);
    }
    HFP_INLINE_MEMBER float one(int r, int c) const {
        int32_t sum;
        memcpy(&sum, tile + r * kPanel + c, 4);
        return static_cast<float>(kRowOffset ? sum - offsets[c] : sum) * rows[r] * outputs[c];
    }
};

thread_local Scratch tls_made;

#if HFP_USE_AMX
struct __attribute__((aligned(64))) ProductTiles {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 32 rows, or the 16 that hold all there are, of which the last may be padding. Rows lie `stride` bytes apart, tiles of
// them `next` bytes from one to the next columns and `below` bytes to the next 16 rows. With FIRST the panel comes from
// memory, else the rows do from the second cache, where they are tiled.
template <Number T, bool FIRST>
HFP_INLINE void multiply_tiles(bool both, const char* panel, int k, const char* a, int64_t stride, int64_t next, int64_t below, float* tile) {
    const char* low = a + below;
    const bool tiled = next == 1024;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < k; i += kDepth<T>, panel += kPanel * 64, a += next, low += next) {
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
        if (T == BF16) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        }
        if (both) {
            _tile_loadd(5, low, stride);
            if (T == BF16) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            } else {
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
        }
    }
    _tile_stored(0, tile, kPanel * 4);
    _tile_stored(1, tile + 16, kPanel * 4);
    if (both) {
        _tile_stored(2, tile + 16 * kPanel, kPanel * 4);
        _tile_stored(3, tile + 16 * kPanel + 16, kPanel * 4);
    }
}

// The same of BF16 and 32 outputs whose weights are as they are, `bytes` each, and of rows that are turned: then the
// weights are the first operand, and rows the second one.
HFP_INLINE void multiply_turned(bool both, const char* weights, int64_t bytes, const char* a, int64_t below, float* tile) {
    const char *high = weights + 16 * bytes, *next = weights + kPanel * bytes;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t column = 0; column < bytes; column += 64, a += 1024, next += kPanel * 64) {
        for (int line = 0; line < kPanel; line++) prefetch<false>(next + 64 * line);
        _tile_loadd(6, weights + column, bytes);
        _tile_loadd(7, high + column, bytes);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 7, 4);
        if (both) {
            _tile_loadd(5, a + below, 64);
            _tile_dpbf16ps(2, 6, 5);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    float sums[4][16 * 16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (both) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    for (int part = 0; part < (both ? 4 : 2); part++) {
        VI block[HFP_W];
        HFP_UNROLL for (int i = 0; i < HFP_W; i++) block[i] = load_int(sums[part] + i * 16);
        transpose(block);
        float* to = tile + part / 2 * 16 * kPanel + part % 2 * 16;
        HFP_UNROLL for (int i = 0; i < HFP_W; i++) store(to + i * kPanel, as_float(block[i]));
    }
}

// Copies of rows in which each tile of 16 rows and 16 pairs has become one of 16 pairs and 16 rows.
HFP_INLINE Rows turned(const Rows& from, int64_t rows, char* memory) {
    const Rows to = {memory, from.ld, true, nullptr};
    for (int64_t r = 0; r < rows; r += 16) {
        for (int64_t i = 0; i < from.ld; i += 32) {
            VI block[HFP_W];
            HFP_UNROLL for (int row = 0; row < HFP_W; row++) block[row] = load_int(place<BF16>(from, r + row, i));
            transpose(block);
            HFP_UNROLL for (int pair = 0; pair < HFP_W; pair++) {
                store(reinterpret_cast<float*>(place<BF16>(to, r + pair, i)), as_float(block[pair]));
            }
        }
    }
    return to;
}

// Copies of rows that were not tiled when they were made.
HFP_INLINE Rows to_tiles(const Rows& from, int64_t rows, int64_t k, char* memory, int num_threads) {
    const int64_t across = round_up(k, 32) / 32;
    const Rows to = {memory, across * 32, true, nullptr};
    parallel(num_threads, true, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            for (int64_t i = 0; i < across; i++) memcpy(place<BF16>(to, r, i * 32), place<BF16>(from, r, i * 32), 64);
        }
    });
    return to;
}
#endif

// Copies of rows in the numbers that they are multiplied as.
template <Number T>
HFP_INLINE Rows widened(const Rows& from, int64_t rows, int64_t k, char* memory, int num_threads) {
    const Rows to = {memory, round_up(k, kDepth<T>), false, from.scales};
    parallel(num_threads, rows * k > (64 << 10), [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            const char* in = place<T>(from, r, 0);
            char* out = place<kRowsAs<T>>(to, r, 0);
            if (T == BF16) {
                for (int64_t i = 0; i < to.ld; i += HFP_W) store(reinterpret_cast<float*>(out) + i, as_float(load_u16(in + 2 * i) << 16));
            } else {
                for (int64_t i = 0; i < to.ld; i++) reinterpret_cast<int16_t*>(out)[i] = reinterpret_cast<const int8_t*>(in)[i];
            }
        }
    });
    return to;
}

thread_local Scratch tls_rows;
constexpr int64_t kMostKept = 32 << 20;

// Calls finish(row, rows, p, tile) for every tile of panel p and rows [top, bottom) of `a`, which may be read up to a
// multiple of their depth. `made` is memory for a copy of the panel where one is multiplied instead. `as_tile` makes of
// sums what finish is given.
template <Number T, class Finish, class AsTile>
HFP_INLINE void multiply_panel(
    const hfp_linear* linear, const Rows& a, int64_t p, int64_t top, int64_t bottom, char* made, const Finish& finish, const AsTile& as_tile) {
    constexpr Number kKind = T == I8 ? kBytesAs : T;
    const int k = linear->k;
    const char* panel = static_cast<const char*>(linear->w) + p * (linear->scale ? panel_bytes<I8>(k) : panel_bytes<T>(k));
    float tile[kPanel * kPanel] __attribute__((aligned(64)));
    if (T == BF16 && linear->as_they_are) {
        const int64_t left = linear->n - p * kPanel, bytes = static_cast<int64_t>(k) * 2;
        const int here = left < kPanel ? static_cast<int>(left) : kPanel;
#if HFP_USE_AMX
        if (here < kPanel) {  // nobody may read behind the last one
            memcpy(made, panel, here * bytes);
            panel = made;
        }
#endif
        for (int64_t at = top; at < bottom; at += kPanel) {
            const int rows = static_cast<int>(bottom - at < kPanel ? bottom - at : kPanel);
            const char* from = place<BF16>(a, at, 0);
#if HFP_USE_AMX
            multiply_turned(rows > 16, panel, bytes, from, bytes * 16, tile);
#else
            multiply_as_they_are(panel, here, bytes, rows, from, a.ld * 2, at == top, tile);
#endif
            finish(at, rows, p, as_tile(at, tile));
        }
        return;
    }
    if (made) {
        if (linear->scale) {
            widen<kFloats<T> ? F32 : kKind>(panel, k, made);
        } else if (kFloats<T>) {
            widen_pairs(panel, a.ld, made);
        }
        panel = made;
    }
    int64_t at = top;
#if HFP_USE_AMX
    const int64_t width = a.ld * kBytes<T>, stride = a.tiled ? 64 : width, next = a.tiled ? 1024 : 64, below = width * 16;
    for (; kInTiles<T> && at < bottom; at += kPanel) {
        const int here = static_cast<int>(bottom - at < kPanel ? bottom - at : kPanel);
        const char* from = place<T>(a, at, 0);
        if (at == top && !made) {  // later rows find the panel in the cache
            multiply_tiles<T, true>(here > 16, panel, k, from, stride, next, below, tile);
        } else {
            multiply_tiles<T, false>(here > 16, panel, k, from, stride, next, below, tile);
        }
        finish(at, here, p, as_tile(at, tile));
    }
#endif
    for (; !kInTiles<T> && at < bottom; at += kPanel) {
        const int here = static_cast<int>(bottom - at < kPanel ? bottom - at : kPanel);
        const char* from = place<kRowsAs<T>>(a, at, 0);
        const int64_t stride = a.ld * kBytes<kRowsAs<T>>;
        if (kFloats<T> && made) {
            multiply_rows<F32, false>(here, panel, static_cast<int>(a.ld), from, stride, tile);
        } else if (at == top && !made) {  // later rows find the panel in the cache
            multiply_rows<kKind, true>(here, panel, k, from, stride, tile);
        } else {
            multiply_rows<kKind, false>(here, panel, k, from, stride, tile);
        }
        finish(at, here, p, as_tile(at, tile));
    }
}

template <Number T, class Finish>
HFP_INLINE void multiply_any(const hfp_linear* linear, const Rows& a, int64_t p, int64_t top, int64_t bottom, char* made, const Finish& finish) {
    const int64_t from = p * kPanel;
    if constexpr (T == I8) {
        multiply_panel<T>(linear, a, p, top, bottom, made, finish, [&](int64_t row, const float* tile) HFP_INLINE_LAMBDA {
            return ScaledInts{tile, linear->scale + from, a.scales + row, linear->offsets + from};
        });
    } else if (linear->scale) {
        multiply_panel<T>(linear, a, p, top, bottom, made, finish, [&](int64_t, const float* tile) HFP_INLINE_LAMBDA {
            return ScaledSums{tile, linear->scale + from};
        });
    } else {
        multiply_panel<T>(linear, a, p, top, bottom, made, finish, [](int64_t, const float* tile) HFP_INLINE_LAMBDA { return Sums{tile}; });
    }
}

// Panels [next, last) with rows [top, bottom), one after the other for whoever comes.
struct alignas(64) Range {
    int64_t next, last, top, bottom;
};
constexpr int kMaxRanges = 64;

// Calls finish as multiply_panel does, for the whole product; returns a status. Each thread has a range of its own, whose
// panels follow each other in memory, and helps with the others' when that is done: threads are seldom equally fast.
template <Number T, class Finish>
HFP_INLINE int product(const hfp_linear* linear, Rows a, int64_t rows, int num_threads, const Finish& finish) {
    const int k = linear->k;
    const int64_t panels = round_up(linear->n, kPanel) / kPanel;
    if (!rows) return HFP_OK;
    if (kRowsAs<T> != T && !linear->as_they_are) {
        char* memory = reserve(&tls_rows, rows * round_up(k, kDepth<T>) * kBytes<kRowsAs<T>>);
        if (!memory) return HFP_NO_MEMORY;
        a = widened<T>(a, rows, k, memory, num_threads);
    }
#if HFP_USE_AMX
    if (T == BF16 && linear->as_they_are) {
        char* memory = reserve(&tls_rows, round_up(rows, 16) * k * 2);
        if (!memory) return HFP_NO_MEMORY;
        a = turned(a, rows, memory);
    } else if (T == BF16 && rows > kPanel && !a.tiled) {
        // worth it where rows are read again for many panels; without the memory rows are read where they are
        char* memory = reserve(&tls_rows, round_up(rows, kPanel) * round_up(k, 32) * 2);
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
    const bool makes = (HFP_USE_AMX && linear->as_they_are) || (linear->scale && (T != I8 || kBytesAs != I8)) ||
                       (kFloats<T> && !linear->as_they_are && rows >= kManyRows * groups);
    int status = HFP_OK;
    parallel(num_threads, panels * k * kPanel > (8 << 10), [&](int t, int) {
        char* made = nullptr;
        if (makes) {
            made = reserve(&tls_made, round_up(k, 64) * kPanel * (T == F32 || kFloats<T> ? 4 : 2));
            if (!made) {
                __atomic_store_n(&status, HFP_NO_MEMORY, __ATOMIC_RELAXED);
                return;
            }
        }
#if HFP_USE_AMX
        if (kInTiles<T>) {
            static const ProductTiles tiles;
            _tile_loadconfig(&tiles);
        }
#endif
        for (int i = 0; i < count; i++) {
            Range& range = ranges[(t + i) % count];
            for (;;) {
                const int64_t p = __atomic_fetch_add(&range.next, 1, __ATOMIC_RELAXED);
                if (p >= range.last) break;
                multiply_any<T>(linear, a, p, range.top, range.bottom, made, finish);
            }
        }
#if HFP_USE_AMX
        if (kInTiles<T>) _tile_release();
#endif
    });
    release_above(&tls_rows, kMostKept);
    return status;
}

}  // namespace
