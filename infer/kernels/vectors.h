// What all of the kernels share: numbers as vectors of 16 floats, and reading ahead.

#pragma once

#include <immintrin.h>

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

typedef uint16_t bf16;

constexpr int TILE = 32;         // outputs of one weight tile: two vectors of 16
constexpr long PREFETCH = 8192;  // bytes that a lone pass over a weight reads ahead

inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline __m256i narrowed(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }
inline __mmask16 first(int count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

// How numbers of a type are read and written as 16 floats; `round_as` gives what storing makes of them.
inline __m512 load(const bf16* p) { return widened(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const bf16* p, __mmask16 mask) { return widened(_mm256_maskz_loadu_epi16(mask, p)); }
inline __m512 load(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline void store(bf16* p, __m512 values, __mmask16 mask) { _mm256_mask_storeu_epi16(p, mask, narrowed(values)); }
inline void store(float* p, __m512 values, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, values); }
inline __m512 round_as(const bf16*, __m512 values) { return widened(narrowed(values)); }
inline __m512 round_as(const float*, __m512 values) { return values; }

// A cache line on its way. Not _mm_prefetch: gcc sees no effect in it, and leaves it out of an inlined function.
inline void fetch(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }

}  // namespace
