// Decoder layers of a Llama-like transformer over paged K and V: one source, compiled once per instruction set.
//
// The including file defines HFP_DECODE and HFP_PROJECT, the names of the entry points, and HFP_USE_AMX where the
// compiler flags allow AMX. The residual stream stays in fp32; products read the model's dtype and sum in fp32. Storing
// keys and attending is the business of hfp_write and hfp_attend.

#include "hfp_decoder.h"
#include "product.inl"

namespace {

constexpr int64_t kSerialFloats = 16 << 10;  // below this much to go through a second thread costs more than it brings

HFP_INLINE float hsum(VF v) {
    float s = 0.0f;
    for (int i = 0; i < HFP_W; i++) s += v[i];
    return s;
}

// Into the dtype that products read.
template <Number T>
HFP_INLINE void put(void* out, float x) {
    if (T == BF16) {
        *static_cast<uint16_t*>(out) = float_to_bf16(x);
    } else {
        *static_cast<float*>(out) = x;
    }
}

template <Number T>
HFP_INLINE void put(void* out, VF v) {
    if (T == F32) {
        store(static_cast<float*>(out), v);
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(out);
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif HFP_W > 4
    const VI bits = as_int(v), odd = (bits >> 16) & splat_int(1);
    const VI rounded = (bits + splat_int(0x7fff) + odd) >> 16;
    const VI quiet = (bits >> 16) | splat_int(0x40);
    const VI chosen = v == v ? rounded : quiet;
#if HFP_W == 16
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)chosen));
#else
    const __m256i words = (__m256i)(chosen & splat_int(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
#endif
#else
    for (int i = 0; i < HFP_W; i++) to[i] = float_to_bf16(v[i]);
#endif
}

template <Number T>
HFP_INLINE VF get(const void* from) {
    return T == F32 ? load(static_cast<const float*>(from)) : as_float(load_u16(from) << 16);
}

// Rounds to the nearest, those between two to the even one, and to what a byte holds.
HFP_INLINE VI to_bytes(VF x) {
#if HFP_W == 16
    VI q = (VI)_mm512_cvtps_epi32(x);
#elif HFP_W == 8
    VI q = (VI)_mm256_cvtps_epi32(x);
#elif defined(__SSE2__)
    VI q = (VI)_mm_cvtps_epi32(x);
#else
    VI q;
    for (int i = 0; i < HFP_W; i++) q[i] = static_cast<int32_t>(__builtin_rintf(x[i]));
#endif
    q = q > splat_int(127) ? splat_int(127) : q;
    return q < splat_int(-128) ? splat_int(-128) : q;
}

HFP_INLINE void put_bytes(char* out, VI q) {
    if (kRowOffset) q += splat_int(kRowOffset);
#if HFP_W == 16
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)q));
#else
    for (int i = 0; i < HFP_W; i++) out[i] = static_cast<char>(q[i]);
#endif
}

// Numbers [0, n) of row r: vector(i) where a whole one fits, number(i) at the end. To 8 bits as torchao does it: the
// largest of the row is 127.5 steps. A row that holds a NaN or an infinity has a scale of NaN, and so will all that is
// computed from it.
template <Number T, class Vector, class One>
HFP_INLINE void put_row(const Rows& out, int64_t r, int64_t n, const Vector& vector, const One& number) {
    const int64_t whole = n / HFP_W * HFP_W;
    if constexpr (T != I8) {
        for (int64_t i = 0; i < whole; i += HFP_W) put<T>(place<T>(out, r, i), vector(i));
        for (int64_t i = whole; i < n; i++) put<T>(place<T>(out, r, i), number(i));
        return;
    }
    const VI unsigned_bits = splat_int(0x7fffffff);
    VF most = VF{}, wrong = VF{};
    const auto look = [&](VF x) HFP_INLINE_LAMBDA {
        most = vmax(most, as_float(as_int(x) & unsigned_bits));
        wrong += x - x;
    };
    VF rest = VF{};
    for (int64_t i = whole; i < n; i++) rest[i - whole] = number(i);
    for (int64_t i = 0; i < whole; i += HFP_W) look(vector(i));
    look(rest);
    const float broken = hsum(wrong), step = hmax(most) / 127.5f, scale = step > 1.1920929e-7f ? step : 1.1920929e-7f;
    out.scales[r] = scale + broken;
    const VF times = splat(broken == 0.0f ? 1.0f / scale : 0.0f);
    const auto bytes = [&](VF x) HFP_INLINE_LAMBDA { return broken == 0.0f ? to_bytes(x * times) : VI{}; };
    for (int64_t i = 0; i < whole; i += HFP_W) put_bytes(place<I8>(out, r, i), bytes(vector(i)));
    if (whole < n) put_bytes(place<I8>(out, r, whole), bytes(rest));  // a row has room for it
}

template <Number T>
HFP_INLINE void put_copy(const Rows& out, int64_t r, const float* x, int64_t n) {
    put_row<T>(out, r, n, [&](int64_t i) { return load(x + i); }, [&](int64_t i) { return x[i]; });
}

HFP_INLINE float scale_of(const float* x, int64_t n, float eps) {
    VF sum = VF{};
    int64_t i = 0;
    for (; i + HFP_W <= n; i += HFP_W) {
        const VF v = load(x + i);
        sum = fma(v, v, sum);
    }
    float total = hsum(sum);
    for (; i < n; i++) total += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
}

template <Number T>
HFP_INLINE void norm_rows(const hfp_norm* norm, const float* x, int64_t rows, int64_t n, const Rows& out, int num_threads) {
    parallel(num_threads, rows * n > kSerialFloats, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            const float* row = x + r * n;
            if (!norm->w) {
                put_copy<T>(out, r, row, n);
                continue;
            }
            const float scale = scale_of(row, n, norm->eps), *w = norm->w;
            put_row<T>(out, r, n, [&](int64_t i) { return load(row + i) * splat(scale) * load(w + i); },
                       [&](int64_t i) { return row[i] * scale * w[i]; });
        }
    });
}

// Rows of T in 8 bits.
template <Number T>
HFP_INLINE void quantize_rows(const Rows& from, int64_t rows, int64_t n, const Rows& out, int num_threads) {
    parallel(num_threads, rows * n > kSerialFloats, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            put_row<I8>(out, r, n, [&](int64_t i) { return get<T>(place<T>(from, r, i)); }, [&](int64_t i) {
                const char* at = place<T>(from, r, i);
                return T == F32 ? *reinterpret_cast<const float*>(at) : bf16_to_float(*reinterpret_cast<const uint16_t*>(at));
            });
        }
    });
}

// finish() of the product of normed rows of x, by way of work->a or, where its rows are to be in 8 bits, work->q8.
template <Number T, class Finish>
HFP_INLINE int normed_product(
    const hfp_norm* norm, const hfp_linear* linear, const float* x, int64_t rows, const hfp_workspace* work, int num_threads, const Finish& finish) {
    if (linear->offsets) {
        const Rows bytes = rows_to_read<I8>(work->q8, linear->k, rows, work->scales);
        norm_rows<I8>(norm, x, rows, linear->k, bytes, num_threads);
        return product<I8>(linear, bytes, rows, num_threads, finish);
    }
    const Rows a = rows_to_read<T>(work->a, linear->k, rows);
    norm_rows<T>(norm, x, rows, linear->k, a, num_threads);
    return product<T>(linear, a, rows, num_threads, finish);
}

// The same of rows as they are.
template <Number T, class Finish>
HFP_INLINE int plain_product(
    const hfp_linear* linear, const Rows& a, int64_t rows, const hfp_workspace* work, int num_threads, const Finish& finish) {
    if (!linear->offsets) return product<T>(linear, a, rows, num_threads, finish);
    const Rows bytes = rows_to_read<I8>(work->q8, linear->k, rows, work->scales);
    quantize_rows<T>(a, rows, linear->k, bytes, num_threads);
    return product<I8>(linear, bytes, rows, num_threads, finish);
}

// x += norm(y)
HFP_INLINE void add_normed(const hfp_norm* norm, const float* y, float* x, int64_t rows, int64_t n, int num_threads) {
    parallel(num_threads, rows * n > kSerialFloats, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            const float scale = scale_of(y + r * n, n, norm->eps);
            for (int64_t i = 0; i < n; i++) x[r * n + i] += y[r * n + i] * scale * norm->w[i];
        }
    });
}

HFP_INLINE VF sigmoid(VF x) { return splat(1.0f) / (splat(1.0f) + exp2v<5>(x * splat(-1.4426950408889634f))); }

HFP_INLINE VF activate(int act, VF x) {
    if (act == HFP_SILU) return x * sigmoid(x);
    if (act == HFP_RELU) return vmax(x, VF{});
    if (act == HFP_GELU) {
        VF y = x;
        for (int i = 0; i < HFP_W; i++) y[i] = 0.5f * x[i] * (1.0f + __builtin_erff(x[i] * 0.70710678118654752f));
        return y;
    }
    const VF inner = splat(0.7978845608028654f) * (x + splat(0.044715f) * x * x * x);
    return splat(0.5f) * x * (splat(1.0f) + tanhv(inner));
}

// What becomes of a product's tiles. out[r][c] = product + bias, or += that:
template <bool ADD>
struct Plain {
    const hfp_linear* linear;
    float* out;

    template <class Tile>
    HFP_INLINE_MEMBER void operator()(int64_t row, int rows, int64_t panel, const Tile& tile) const {
        const int64_t n = linear->n, from = panel * kPanel;
        const int width = static_cast<int>(n - from < kPanel ? n - from : kPanel);
        for (int r = 0; r < rows; r++) {
            float* to = out + (row + r) * n + from;
            int c = 0;
            for (; c + HFP_W <= width; c += HFP_W) {
                VF y = tile.at(r, c);
                if (linear->bias) y += load(linear->bias + from + c);
                store(to + c, ADD ? load(to + c) + y : y);
            }
            for (; c < width; c++) {
                const float y = linear->bias ? tile.one(r, c) + linear->bias[from + c] : tile.one(r, c);
                to[c] = ADD ? to[c] + y : y;
            }
        }
    }
};

// out[r][c] = act(gate) * up, of whole panels: rows have room for their padding.
template <Number T>
struct Gated {
    const hfp_linear* linear;
    int act;
    Rows out;

    template <class Tile>
    HFP_INLINE_MEMBER void operator()(int64_t row, int rows, int64_t panel, const Tile& tile) const {
        const int64_t from = panel * (kPanel / 2);
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < kPanel / 2; c += HFP_W) {
                VF gate = tile.at(r, c), up = tile.at(r, kPanel / 2 + c);
                if (linear->bias) {
                    gate += load(linear->bias + panel * kPanel + c);
                    up += load(linear->bias + panel * kPanel + kPanel / 2 + c);
                }
                put<T>(place<T>(out, row + r, from + c), activate(act, gate) * up);
            }
            // what pads rows to whole tiles: a layer of another width may have left a NaN there
            if (T == BF16 && from % 32 == 0 && (panel + 1) * kPanel >= linear->n) {
                for (int c = kPanel / 2; c < kPanel; c += HFP_W) put<T>(place<T>(out, row + r, from + c), VF{});
            }
        }
    }
};

// Rotates the first `rotary` dimensions of a head, in halves.
HFP_INLINE void rotate_head(float* head, const float* cos, const float* sin, int rotary) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

HFP_INLINE void norm_in_place(const hfp_norm* norm, float* x, int64_t n) {
    const float scale = scale_of(x, n, norm->eps);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale * norm->w[i];
}

// From the rows of qkv in work->y to q, k and v.
template <Number T>
HFP_INLINE void split_heads(const hfp_decode_args* args, const hfp_decoder_layer* layer) {
    const hfp_decoder* d = args->decoder;
    const hfp_workspace* work = args->work;
    const int64_t dim = d->head_dim, nq = d->heads * dim, nk = d->kv_heads * dim, all = nq + 2 * nk;
    const Rows q = {static_cast<char*>(work->q), nq, false, nullptr}, k = {static_cast<char*>(work->k), nk, false, nullptr};
    const Rows v = {static_cast<char*>(work->v), nk, false, nullptr};
    parallel(d->num_threads, args->tokens * all > kSerialFloats, [&](int t, int threads) {
        int64_t first, last;
        share(args->tokens, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            float* row = work->y + r * all;
            if (layer->whole_qk_norm) {
                norm_in_place(&layer->q_norm, row, nq);
                norm_in_place(&layer->k_norm, row + nq, nk);
            }
            for (int h = 0; h < d->heads + d->kv_heads; h++) {
                const hfp_norm* norm = h < d->heads ? &layer->q_norm : &layer->k_norm;
                if (norm->w && !layer->whole_qk_norm) norm_in_place(norm, row + h * dim, dim);
                rotate_head(row + h * dim, args->cos + r * d->rotary_dim, args->sin + r * d->rotary_dim, d->rotary_dim);
            }
            put_copy<T>(q, r, row, nq);
            put_copy<T>(k, r, row + nq, nk);
            put_copy<T>(v, r, row + nq + nk, nk);
        }
    });
}

// x += norm(linear(a)), or without the norm straight into x
template <Number T>
HFP_INLINE int add_product(const hfp_decode_args* args, const hfp_linear* linear, const hfp_norm* norm, const Rows& a) {
    const hfp_decoder* d = args->decoder;
    const hfp_workspace* work = args->work;
    if (!norm->w) return plain_product<T>(linear, a, args->tokens, work, d->num_threads, Plain<true>{linear, args->x});
    const int status = plain_product<T>(linear, a, args->tokens, work, d->num_threads, Plain<false>{linear, work->y});
    if (status) return status;
    add_normed(norm, work->y, args->x, args->tokens, d->hidden, d->num_threads);
    return HFP_OK;
}

template <Number T>
int decode_layer(const hfp_decode_args* args, const hfp_decoder_layer* layer) {
    const hfp_decoder* d = args->decoder;
    const hfp_workspace* work = args->work;
    const int64_t tokens = args->tokens, dim = d->head_dim, nq = d->heads * dim, nk = d->kv_heads * dim;
    int status = normed_product<T>(&layer->before_attn, &layer->qkv, args->x, tokens, work, d->num_threads, Plain<false>{&layer->qkv, work->y});
    if (status) return status;
    split_heads<T>(args, layer);
    status = hfp_write(layer->kv, work->k, work->v, args->slots, tokens, nk, dim, nk, dim, d->num_threads);
    if (status) return status;
    status = hfp_attend(layer->kv, args->batch, layer->params, work->o, work->q, tokens, nq, dim, d->heads, d->num_threads, layer->sinks, nullptr);
    if (status) return status;
    status = add_product<T>(args, &layer->o, &layer->after_attn, {static_cast<char*>(work->o), nq, false, nullptr});
    if (status || !layer->gate_up.w) return status;
    const Rows h = rows_to_read<T>(work->h, layer->down.k, tokens);
    status = normed_product<T>(&layer->before_mlp, &layer->gate_up, args->x, tokens, work, d->num_threads, Gated<T>{&layer->gate_up, layer->act, h});
    if (status) return status;
    return add_product<T>(args, &layer->down, &layer->after_mlp, h);
}

template <Number T>
int decode(const hfp_decode_args* args) {
    for (int i = args->first; i < args->last; i++) {
        const int status = decode_layer<T>(args, args->decoder->layers + i);
        if (status) return status;
    }
    return HFP_OK;
}

template <Number T>
int project(const hfp_project_args* args) {
    const hfp_decoder* d = args->decoder;
    if (!args->linear) {
        const Rows out = {static_cast<char*>(args->out), d->hidden, false, nullptr};
        norm_rows<T>(args->norm, args->x, args->rows, d->hidden, out, d->num_threads);
        return HFP_OK;
    }
    return normed_product<T>(
        args->norm, args->linear, args->x, args->rows, args->work, d->num_threads, Plain<false>{args->linear, static_cast<float*>(args->out)});
}

}  // namespace

int HFP_DECODE(const hfp_decode_args* args) {
    return args->decoder->dtype == HFP_BF16 ? decode<BF16>(args) : decode<F32>(args);
}

int HFP_PROJECT(const hfp_project_args* args) {
    return args->decoder->dtype == HFP_BF16 ? project<BF16>(args) : project<F32>(args);
}
