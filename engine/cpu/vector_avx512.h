// Sixteen floats with AVX-512, and with AVX512-BF16 where a file is compiled for it. vector_avx2.h has the same functions:
// a file that includes one of them is compiled once per instruction set. Everything has internal linkage, because those
// files define the same names.
#pragma once
#include <immintrin.h>

#include "numeric.h"

namespace baton {
namespace {

using Vec = __m512;

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const bf16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
// 16 numbers of e4m3, but NaN: moved to the places of a float32's bits, whose exponent lacks 120 then.
inline Vec load_e4m3(const uint8_t* from) {
  const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512i bits = _mm512_and_si512(_mm512_slli_epi32(codes, 20), _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}
inline Vec powers_of_two(const int8_t* from) {  // from -126 to 127
  const __m512i powers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(powers, _mm512_set1_epi32(127)), 23));
}
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
#if defined(__AVX512BF16__)
inline __m256i rounded(Vec x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
// Round to nearest even; a NaN stays a NaN.
inline __m256i rounded(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}
#endif
inline void store(bf16* to, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded(x)); }
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
