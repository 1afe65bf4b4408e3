// Sixteen floats with AVX-512 and AVX512-BF16. vector_avx2.h has the same functions: a file that includes one of them is
// compiled once per instruction set. Everything has internal linkage, because those files define the same names.
#pragma once
#include <immintrin.h>

#include "numeric.h"

namespace baton {
namespace {

using Vec = __m512;

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
inline void store(bf16* to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec mul_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, 0x08); }
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x * 2^n for whole n; 0 if n is below -126
inline float sum_of(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }

}  // namespace
}  // namespace baton
