// Memory that a thread keeps between calls: a call must not pay for malloc.
#pragma once

#include "simd.h"

#include <stdint.h>
#include <stdlib.h>

namespace {

HFP_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Grows, and is freed only with its thread.
struct Scratch {
    char* base = nullptr;
    int64_t size = 0;
    ~Scratch() { free(base); }
};

// Null where there is no memory; what was in it is lost where it grows.
HFP_INLINE char* reserve(Scratch* s, int64_t bytes) {
    if (s->size < bytes) {
        free(s->base);
        s->size = round_up(bytes + bytes / 4, 4096);
        s->base = static_cast<char*>(aligned_alloc(4096, static_cast<size_t>(s->size)));
        if (!s->base) s->size = 0;
    }
    return s->base;
}

// For what is as large only now and then.
HFP_INLINE void release_above(Scratch* s, int64_t most) {
    if (s->size <= most) return;
    free(s->base);
    s->base = nullptr;
    s->size = 0;
}

}  // namespace
