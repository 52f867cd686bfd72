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
template <bool BF16>
HFP_INLINE void put(void* out, float x) {
    if (BF16) {
        *static_cast<uint16_t*>(out) = float_to_bf16(x);
    } else {
        *static_cast<float*>(out) = x;
    }
}

template <bool BF16>
HFP_INLINE void put(void* out, VF v) {
    if (!BF16) {
        store(static_cast<float*>(out), v);
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(out);
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif HFP_W == 16
    const VI bits = as_int(v), odd = (bits >> 16) & splat_int(1);
    const VI rounded = (bits + splat_int(0x7fff) + odd) >> 16;
    const VI quiet = (bits >> 16) | splat_int(0x40);
    const VI chosen = v == v ? rounded : quiet;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)chosen));
#else
    for (int i = 0; i < HFP_W; i++) to[i] = float_to_bf16(v[i]);
#endif
}

// Numbers [0, n) of row r: vector(i) where a whole one fits, number(i) at the end.
template <bool BF16, class Vector, class Number>
HFP_INLINE void put_row(const Rows& out, int64_t r, int64_t n, const Vector& vector, const Number& number) {
    int64_t i = 0;
    for (; i + HFP_W <= n; i += HFP_W) put<BF16>(place<BF16>(out, r, i), vector(i));
    for (; i < n; i++) put<BF16>(place<BF16>(out, r, i), number(i));
}

template <bool BF16>
HFP_INLINE void put_copy(const Rows& out, int64_t r, const float* x, int64_t n) {
    put_row<BF16>(out, r, n, [&](int64_t i) { return load(x + i); }, [&](int64_t i) { return x[i]; });
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

template <bool BF16>
HFP_INLINE void norm_rows(const hfp_norm* norm, const float* x, int64_t rows, int64_t n, const Rows& out, int num_threads) {
    parallel(num_threads, rows * n > kSerialFloats, [&](int t, int threads) {
        int64_t first, last;
        share(rows, t, threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            const float* row = x + r * n;
            if (!norm->w) {
                put_copy<BF16>(out, r, row, n);
                continue;
            }
            const float scale = scale_of(row, n, norm->eps), *w = norm->w;
            put_row<BF16>(out, r, n, [&](int64_t i) { return load(row + i) * splat(scale) * load(w + i); },
                          [&](int64_t i) { return row[i] * scale * w[i]; });
        }
    });
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

    HFP_INLINE_MEMBER void operator()(int64_t row, int rows, int64_t panel, const float* tile) const {
        const int64_t n = linear->n, from = panel * kPanel;
        const int width = static_cast<int>(n - from < kPanel ? n - from : kPanel);
        for (int r = 0; r < rows; r++) {
            float* to = out + (row + r) * n + from;
            const float* sums = tile + r * kPanel;
            int c = 0;
            for (; c + HFP_W <= width; c += HFP_W) {
                VF y = load(sums + c);
                if (linear->bias) y += load(linear->bias + from + c);
                store(to + c, ADD ? load(to + c) + y : y);
            }
            for (; c < width; c++) {
                const float y = linear->bias ? sums[c] + linear->bias[from + c] : sums[c];
                to[c] = ADD ? to[c] + y : y;
            }
        }
    }
};

// out[r][c] = act(gate) * up, of whole panels: rows have room for their padding.
template <bool BF16>
struct Gated {
    const hfp_linear* linear;
    int act;
    Rows out;

    HFP_INLINE_MEMBER void operator()(int64_t row, int rows, int64_t panel, const float* tile) const {
        const int64_t from = panel * (kPanel / 2);
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < kPanel / 2; c += HFP_W) {
                VF gate = load(tile + r * kPanel + c), up = load(tile + r * kPanel + kPanel / 2 + c);
                if (linear->bias) {
                    gate += load(linear->bias + panel * kPanel + c);
                    up += load(linear->bias + panel * kPanel + kPanel / 2 + c);
                }
                put<BF16>(place<BF16>(out, row + r, from + c), activate(act, gate) * up);
            }
            // what pads rows to whole tiles: a layer of another width may have left a NaN there
            if (BF16 && from % 32 == 0 && (panel + 1) * kPanel >= linear->n) {
                for (int c = kPanel / 2; c < kPanel; c += HFP_W) put<BF16>(place<BF16>(out, row + r, from + c), VF{});
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
template <bool BF16>
HFP_INLINE void split_heads(const hfp_decode_args* args, const hfp_decoder_layer* layer) {
    const hfp_decoder* d = args->decoder;
    const hfp_workspace* work = args->work;
    const int64_t dim = d->head_dim, nq = d->heads * dim, nk = d->kv_heads * dim, all = nq + 2 * nk;
    const Rows q = {static_cast<char*>(work->q), nq, false}, k = {static_cast<char*>(work->k), nk, false};
    const Rows v = {static_cast<char*>(work->v), nk, false};
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
            put_copy<BF16>(q, r, row, nq);
            put_copy<BF16>(k, r, row + nq, nk);
            put_copy<BF16>(v, r, row + nq + nk, nk);
        }
    });
}

// x += norm(linear(a)), or without the norm straight into x
template <bool BF16>
HFP_INLINE void add_product(const hfp_decode_args* args, const hfp_linear* linear, const hfp_norm* norm, const Rows& a) {
    const hfp_decoder* d = args->decoder;
    if (!norm->w) {
        product<BF16>(linear, a, args->tokens, d->num_threads, Plain<true>{linear, args->x});
        return;
    }
    product<BF16>(linear, a, args->tokens, d->num_threads, Plain<false>{linear, args->work->y});
    add_normed(norm, args->work->y, args->x, args->tokens, d->hidden, d->num_threads);
}

template <bool BF16>
int decode(const hfp_decode_args* args) {
    const hfp_decoder* d = args->decoder;
    const hfp_workspace* work = args->work;
    const int64_t tokens = args->tokens, dim = d->head_dim, nq = d->heads * dim, nk = d->kv_heads * dim;
    const Rows a = rows_to_read<BF16>(work->a, d->hidden, tokens);
    const Rows o = {static_cast<char*>(work->o), nq, false};
    for (int i = args->first; i < args->last; i++) {
        const hfp_decoder_layer* layer = d->layers + i;
        norm_rows<BF16>(&layer->before_attn, args->x, tokens, d->hidden, a, d->num_threads);
        product<BF16>(&layer->qkv, a, tokens, d->num_threads, Plain<false>{&layer->qkv, work->y});
        split_heads<BF16>(args, layer);
        int status = hfp_write(layer->kv, work->k, work->v, args->slots, tokens, nk, dim, nk, dim, d->num_threads);
        if (status) return status;
        status = hfp_attend(layer->kv, args->batch, layer->params, work->o, work->q, tokens, nq, dim, d->heads, d->num_threads, layer->sinks, nullptr);
        if (status) return status;
        add_product<BF16>(args, &layer->o, &layer->after_attn, o);
        if (!layer->gate_up.w) continue;
        norm_rows<BF16>(&layer->before_mlp, args->x, tokens, d->hidden, a, d->num_threads);
        const Rows h = rows_to_read<BF16>(work->h, layer->down.k, tokens);
        product<BF16>(&layer->gate_up, a, tokens, d->num_threads, Gated<BF16>{&layer->gate_up, layer->act, h});
        add_product<BF16>(args, &layer->down, &layer->after_mlp, h);
    }
    return HFP_OK;
}

template <bool BF16>
int project(const hfp_project_args* args) {
    const hfp_decoder* d = args->decoder;
    if (!args->linear) {
        const Rows out = {static_cast<char*>(args->out), d->hidden, false};
        norm_rows<BF16>(args->norm, args->x, args->rows, d->hidden, out, d->num_threads);
        return HFP_OK;
    }
    const Rows a = rows_to_read<BF16>(args->a, d->hidden, args->rows);
    norm_rows<BF16>(args->norm, args->x, args->rows, d->hidden, a, d->num_threads);
    product<BF16>(args->linear, a, args->rows, d->num_threads, Plain<false>{args->linear, static_cast<float*>(args->out)});
    return HFP_OK;
}

}  // namespace

int HFP_DECODE(const hfp_decode_args* args) {
    return args->decoder->dtype == HFP_BF16 ? decode<true>(args) : decode<false>(args);
}

int HFP_PROJECT(const hfp_project_args* args) {
    return args->decoder->dtype == HFP_BF16 ? project<true>(args) : project<false>(args);
}
