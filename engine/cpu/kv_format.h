// How a quantised pool stores values, and the conversions. Every file that reads or writes a pool uses them.
//
// A tile holds the rows of K or of V of one page and head, or the latents of one page: `page_size` rows of `dim`
// values. In fp8 a value is one byte. In fp4 a tile is [data | scales]: dim / 2 bytes per row (the even value of a byte
// in its low half), then dim / 16 scales per row, each an e4m3 number by which its 16 values are multiplied.
//
// Every stored number is exact in bfloat16. Writing rounds to the nearest number, ties to even. A value that is too
// large becomes the largest number; a NaN stays a NaN. All functions have internal linkage, so that each file compiles
// them for its own instruction set.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

#include "numeric.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton {

enum Format : int32_t { kPlain = 0, kE4M3 = 1, kE5M2 = 2, kE2M1 = 3 };

constexpr int kScaleBlock = 16;  // values of fp4 that share a scale

// The bytes of `n` values, scales included.
inline int64_t stored_bytes(Format format, int64_t n) { return format == kE2M1 ? n / 2 + n / kScaleBlock : n; }

namespace format {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// An 8-bit float with `M` bits of mantissa and exponents from 1 - Bias on. `Most`: code of the largest number.
template <int M, int Bias, int Most>
struct Small {
  static uint8_t encode(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    // Adding 2^(24 - M - Bias), whose last bit is worth the smallest number, rounds subnormal numbers.
    const uint32_t magic = static_cast<uint32_t>(24 - M - Bias + 127) << 23;
    const uint32_t tiny = bits_of(from_bits(magnitude) + from_bits(magic)) - magic;
    const uint32_t odd = (magnitude >> (23 - M)) & 1u;
    const uint32_t normal =
        (magnitude - (static_cast<uint32_t>(127 - Bias) << 23) + ((1u << (22 - M)) - 1) + odd) >> (23 - M);
    uint32_t code = magnitude < (static_cast<uint32_t>(128 - Bias) << 23) ? tiny : normal;
    code = magnitude >= (kLimit << (23 - M)) ? uint32_t{Most} : code;
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
  }

 private:
  // The float32 bits of the largest number, without the bits that are rounded away. From here on the code is Most.
  static constexpr uint32_t kLimit = Most + (static_cast<uint32_t>(127 - Bias) << M);
};
using E4M3 = Small<3, 7, 0x7e>;
using E5M2 = Small<2, 15, 0x7b>;

constexpr float power(int exponent) {
  float x = 1;
  for (; exponent > 0; --exponent) x *= 2;
  for (; exponent < 0; ++exponent) x /= 2;
  return x;
}

// The number of a code: the magnitude is in the low 7 bits, the sign is the 8th.
template <int M, int Bias>
constexpr float decode(int code) {
  const int exponent = (code & 0x7f) >> M, mantissa = code & ((1 << M) - 1);
  const float x = exponent ? (1 + mantissa * power(-M)) * power(exponent - Bias) : mantissa * power(1 - Bias - M);
  return code & 0x80 ? -x : x;
}
constexpr std::array<float, 256> table_of(bool e4m3) {
  std::array<float, 256> table{};
  for (int code = 0; code < 256; ++code) {
    const float sign = code & 0x80 ? -1.0f : 1.0f;
    table[code] = e4m3 ? decode<3, 7>(code) : decode<2, 15>(code);
    if (e4m3 && (code & 0x7f) == 0x7f) table[code] = sign * __builtin_nanf("");
    if (!e4m3 && (code & 0x7f) == 0x7c) table[code] = sign * __builtin_inff();
    if (!e4m3 && (code & 0x7f) > 0x7c) table[code] = sign * __builtin_nanf("");
  }
  return table;
}
constexpr std::array<float, 256> kFromE4M3 = table_of(true), kFromE5M2 = table_of(false);
alignas(64) constexpr float kFromE2M1[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The nearest of kFromE2M1 to x / divisor; a NaN becomes 0 (its block's scale is a NaN).
inline uint32_t encode_e2m1(float x, float divisor) {
  const float a = from_bits(bits_of(x) & 0x7fffffffu) / divisor;
  const uint32_t code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return code | (bits_of(x) >> 28 & 8u);
}

// Stores 16 values and their scale. The scale maps the largest magnitude to 6, the largest e2m1 number; it is never 0.
template <typename T>
void store_block(const T* from, uint8_t* data, uint8_t* scale) {
  float x[kScaleBlock];
  uint32_t most = 0;  // the largest magnitude, by its bits: a NaN is above all numbers
  for (int i = 0; i < kScaleBlock; ++i) {
    x[i] = to_float(from[i]);
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const uint8_t code = E4M3::encode(from_bits(most) * (1.0f / 6));
  *scale = code ? code : 1;
  const float divisor = kFromE4M3[*scale];
  for (int i = 0; i < kScaleBlock; i += 2)
    data[i / 2] = static_cast<uint8_t>(encode_e2m1(x[i], divisor) | encode_e2m1(x[i + 1], divisor) << 4);
}

inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) { to->bits = static_cast<uint16_t>(bits_of(x) >> 16); }  // exact

#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline void put(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void put(bf16* to, __m512 x) {
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(high));
}

// Converts 32 codes of 8 bits to bfloat16 with integer operations: exponents are moved to bfloat16's bias, and
// subnormal numbers are looked up.
template <int M, int Bias>
__m512i widen(__m256i codes) {
  alignas(64) static constexpr uint16_t kTiny[2][32] = {{0, 0x3780, 0x3800, 0x3840},  // e5m2: multiples of 2^-16
                                                        {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60}};
  const __m512i code = _mm512_cvtepu8_epi16(codes), magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  __m512i x = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 7 - M), _mm512_set1_epi16((127 - Bias) << 7));
  const __mmask32 tiny = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(1 << M));
  x = _mm512_mask_permutexvar_epi16(x, tiny, magnitude, _mm512_load_si512(kTiny[M == 3]));
  // Infinities and NaNs: in e4m3 the code 0x7f only, in e5m2 the codes with the highest exponent.
  const __mmask32 special = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(M == 3 ? 0x7f : 0x7c));
  x = _mm512_mask_add_epi16(x, special, x, _mm512_set1_epi16(M == 3 ? 0x7fc0 - 0x43f0 : 0x7f80 - 0x4780));
  return _mm512_or_si512(x, _mm512_slli_epi16(_mm512_xor_si512(code, magnitude), 8));
}
inline void put32(bf16* to, __m512i x) { _mm512_storeu_si512(to, x); }
inline void put32(float* to, __m512i x) {
  const __m256i low = _mm512_castsi512_si256(x), high = _mm512_extracti64x4_epi64(x, 1);
  _mm512_storeu_si512(to, _mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
  _mm512_storeu_si512(to + 16, _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
#elif defined(__AVX2__)
// Converts 16 codes, as above. A subnormal number is looked up by the places of its two bytes.
template <int M, int Bias>
__m256i widen(__m128i codes) {
  alignas(16) static constexpr uint16_t kTiny[2][8] = {{0, 0x3780, 0x3800, 0x3840},
                                                       {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60}};
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTiny[M == 3])));
  const __m256i code = _mm256_cvtepu8_epi16(codes), magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
  __m256i x = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 7 - M), _mm256_set1_epi16((127 - Bias) << 7));
  const __m256i places =
      _mm256_add_epi16(_mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
  const __m256i tiny = _mm256_cmpgt_epi16(_mm256_set1_epi16(1 << M), magnitude);
  x = _mm256_blendv_epi8(x, _mm256_shuffle_epi8(table, places), tiny);
  const __m256i special = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(M == 3 ? 0x7e : 0x7b));
  x = _mm256_add_epi16(x, _mm256_and_si256(special, _mm256_set1_epi16(M == 3 ? 0x7fc0 - 0x43f0 : 0x7f80 - 0x4780)));
  return _mm256_or_si256(x, _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8));
}
inline void put16(bf16* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
inline void put16(float* to, __m256i x) {
  const __m128i halves[] = {_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)};
  for (int i = 0; i < 2; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves[i]), 16));
}
#endif

template <int M, int Bias, typename T>
void load_codes(const uint8_t* codes, int64_t n, T* to) {
  const auto& table = M == 3 ? kFromE4M3 : kFromE5M2;
  int64_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  for (; i + 32 <= n; i += 32)
    put32(to + i, widen<M, Bias>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i))));
#elif defined(__AVX2__)
  for (; i + 16 <= n; i += 16)
    put16(to + i, widen<M, Bias>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i))));
#endif
  for (; i < n; ++i) put(to + i, table[codes[i]]);
}

template <typename T>
void load_block(const uint8_t* data, uint8_t scale, T* to) {
  const float factor = kFromE4M3[scale];
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  int64_t codes;
  std::memcpy(&codes, data, sizeof codes);
  // Every 64-bit lane has all 16 codes and rotates its own two to bits 0 and 32. The look-up ignores the other bits.
  const __m512i all = _mm512_set1_epi64(codes);
  const __m512i even = _mm512_rorv_epi64(all, _mm512_setr_epi64(0, 8, 16, 24, 32, 40, 48, 56));
  const __m512i odd = _mm512_rorv_epi64(all, _mm512_setr_epi64(36, 44, 52, 60, 4, 12, 20, 28));
  const __m512 x = _mm512_permutexvar_ps(_mm512_mask_blend_epi32(0xaaaa, even, odd), _mm512_load_ps(kFromE2M1));
  put(to, _mm512_mul_ps(x, _mm512_set1_ps(factor)));
#else
  for (int i = 0; i < kScaleBlock / 2; ++i) {
    put(to + 2 * i, kFromE2M1[data[i] & 0xf] * factor);
    put(to + 2 * i + 1, kFromE2M1[data[i] >> 4] * factor);
  }
#endif
}

}  // namespace
}  // namespace format

namespace {

// Reads `rows` rows of a tile from row `offset` on into `to`, as float or bf16. Not for kPlain.
template <typename T>
void load_rows(Format stored, const void* tile, int page_size, int offset, int rows, int dim, T* to) {
  const uint8_t* bytes = static_cast<const uint8_t*>(tile);
  const int64_t first = int64_t{offset} * dim, n = int64_t{rows} * dim;
  if (stored == kE4M3) return format::load_codes<3, 7>(bytes + first, n, to);
  if (stored == kE5M2) return format::load_codes<2, 15>(bytes + first, n, to);
  const uint8_t* scales = bytes + int64_t{page_size} * dim / 2;
  for (int64_t i = first; i < first + n; i += kScaleBlock)
    format::load_block(bytes + i / 2, scales[i / kScaleBlock], to + i - first);
}

// Writes one row of float or bf16 to row `offset` of a tile. Not for kPlain.
template <typename T>
void store_row(Format stored, const T* from, void* tile, int page_size, int offset, int dim) {
  uint8_t* bytes = static_cast<uint8_t*>(tile);
  const int64_t first = int64_t{offset} * dim;
  if (stored == kE4M3) {
    for (int d = 0; d < dim; ++d) bytes[first + d] = format::E4M3::encode(to_float(from[d]));
  } else if (stored == kE5M2) {
    for (int d = 0; d < dim; ++d) bytes[first + d] = format::E5M2::encode(to_float(from[d]));
  } else {
    uint8_t* scales = bytes + int64_t{page_size} * dim / 2;
    for (int64_t i = first; i < first + dim; i += kScaleBlock)
      format::store_block(from + i - first, bytes + i / 2, scales + i / kScaleBlock);
  }
}

}  // namespace
}  // namespace baton
