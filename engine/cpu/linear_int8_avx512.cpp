// Int8 products with AVX512-VNNI, and the rounding of rows.
#include "linear.h"

#include <immintrin.h>

#include <cstring>

#include "isa.h"

namespace baton {
namespace {

// As in linear_bf16.cpp, with distances of its own.
template <int M>
inline void prefetch(const uint8_t* line) {
  _mm_prefetch(reinterpret_cast<const char*>(line) + (M <= 2 ? 3072 : M <= 4 ? 6144 : 12288), _MM_HINT_T1);
}

inline __m512i four(const int8_t* p) {
  int32_t all;
  std::memcpy(&all, p, sizeof all);
  return _mm512_set1_epi32(all);
}

// Computes rows first .. first + M - 1 x G groups of outputs.
template <int M, int G>
void block(const Int8Block& a, int first, const uint8_t* pack, int64_t depth, float* c, int64_t ldc) {
  constexpr int kParts = M * G >= 8 ? 1 : 8 / (M * G);  // independent sums, to cover the latency of a dot product
  __m512 total[M][G];
  for (auto& row : total)
    for (auto& sum : row) sum = _mm512_setzero_ps();
  const float* scales = a.scales + first;
  const int32_t* starts = a.starts + first;
  const int8_t* values = a.values + first * kTileInputs;
  for (int64_t k = 0; k < depth; scales += a.rows, starts += a.rows) {
    __m512i sums[kParts][M][G];
    for (int m = 0; m < M; ++m)
      for (int g = 0; g < G; ++g) {
        sums[0][m][g] = _mm512_set1_epi32(starts[m]);
        for (int part = 1; part < kParts; ++part) sums[part][m][g] = _mm512_setzero_si512();
      }
    for (const int64_t end = std::min(depth, k + kScaleInputs); k < end;
         k += kTileInputs, values += a.rows * kTileInputs) {
      for (int i = 0; i < kTileInputs; i += 4 * kParts) {
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) {
          const int at = i + 4 * part;
          __m512i w[G];
#pragma GCC unroll 2
          for (int g = 0; g < G; ++g) {
            const uint8_t* line = pack + (g * depth + k + at) * kGroup;
            prefetch<M>(line);
            w[g] = _mm512_loadu_si512(line);
          }
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const __m512i x = four(values + m * kTileInputs + at);
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) sums[part][m][g] = _mm512_dpbusd_epi32(sums[part][m][g], w[g], x);
          }
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (int g = 0; g < G; ++g) {
        __m512i sum = sums[0][m][g];
        for (int part = 1; part < kParts; ++part) sum = _mm512_add_epi32(sum, sums[part][m][g]);
        total[m][g] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scales[m]), total[m][g]);
      }
  }
  for (int m = 0; m < M; ++m)
    for (int g = 0; g < G; ++g) _mm512_storeu_ps(c + m * ldc + g * kGroup, total[m][g]);
}

template <int G>
void rows_of(const Int8Block& a, const uint8_t* pack, int64_t depth, float* c, int64_t ldc) {
  int r = 0;
  for (; r + 8 <= a.rows; r += 8) block<8, G>(a, r, pack, depth, c + r * ldc, ldc);
  c += r * ldc;
  switch (a.rows - r) {
    case 7: return block<7, G>(a, r, pack, depth, c, ldc);
    case 6: return block<6, G>(a, r, pack, depth, c, ldc);
    case 5: return block<5, G>(a, r, pack, depth, c, ldc);
    case 4: return block<4, G>(a, r, pack, depth, c, ldc);
    case 3: return block<3, G>(a, r, pack, depth, c, ldc);
    case 2: return block<2, G>(a, r, pack, depth, c, ldc);
    case 1: return block<1, G>(a, r, pack, depth, c, ldc);
  }
}

}  // namespace

float round_avx512(const bf16* from, int64_t count, int8_t* values, int64_t step, int32_t& sum) {
  // As integers, the bits of sizes have the order of the sizes, and those of infinities and NaNs are the largest.
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 32)
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(from + i), _mm512_set1_epi16(0x7fff)));
  const __m512i halves = _mm512_max_epu32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
  float inverse;
  const float scale = scale_of(static_cast<uint16_t>(_mm512_reduce_max_epu32(halves)), inverse);
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
    sums = _mm512_add_epi32(sums, rounded);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i / kTileInputs * step + i % kTileInputs),
                     _mm512_cvtepi32_epi8(rounded));
  }
  sum = _mm512_reduce_add_epi32(sums);
  return scale;
}

void gemm_int8_avx512(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc) {
  int g = 0;
  // Few rows read one stream. So do many where the CPU multiplies bfloat16: Zen 4 takes 0.87 of the time, because not all sums of
  // two groups stay in registers. Without bfloat16 many rows were measured with two groups only.
  if (a.rows > kFewRows && current_isa() < kBf16)
    for (; g + 2 <= groups; g += 2) rows_of<2>(a, pack + g * depth * kGroup, depth, c + g * kGroup, ldc);
  for (; g < groups; ++g) rows_of<1>(a, pack + g * depth * kGroup, depth, c + g * kGroup, ldc);
}

}  // namespace baton
