// Int8 products with AVX2, and the rounding of rows. A weight's size times an input with the weight's sign: a pair of those
// products is at most 2 x 127 x 127, which fits 16 bits.
#include "linear.h"

#include <immintrin.h>

#include <cstring>

namespace baton {
namespace {

constexpr int kAhead = 2048;  // bytes to prefetch ahead: the hardware prefetcher restarts at each 4 KiB of the stream

inline __m256i four(const int8_t* p) {
  int32_t all;
  std::memcpy(&all, p, sizeof all);
  return _mm256_set1_epi32(all);
}

// Computes rows first .. first + M - 1 of one group.
template <int M>
void block(const Int8Block& a, int first, const uint8_t* pack, int64_t depth, float* c, int64_t ldc) {
  const __m256i ones = _mm256_set1_epi16(1), zero_point = _mm256_set1_epi8(static_cast<char>(0x80));
  __m256 total[M][2];
  for (auto& row : total) row[0] = row[1] = _mm256_setzero_ps();
  const float* scales = a.scales + first;
  const int8_t* values = a.values + first * kTileInputs;
  for (int64_t k = 0; k < depth; scales += a.rows) {
    __m256i sums[M][2];
    for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
    for (const int64_t end = std::min(depth, k + kScaleInputs); k < end;
         k += kTileInputs, values += a.rows * kTileInputs) {
#pragma GCC unroll 2
      for (int i = 0; i < kTileInputs; i += 4) {
        const uint8_t* line = pack + (k + i) * kGroup;
        _mm_prefetch(reinterpret_cast<const char*>(line) + kAhead, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32 * half));
          const __m256i w = _mm256_xor_si256(stored, zero_point), size = _mm256_abs_epi8(w);
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) {
            const __m256i x = _mm256_sign_epi8(four(values + m * kTileInputs + i), w);
            sums[m][half] = _mm256_add_epi32(sums[m][half], _mm256_madd_epi16(_mm256_maddubs_epi16(size, x), ones));
          }
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (int half = 0; half < 2; ++half)
        total[m][half] =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m][half]), _mm256_set1_ps(scales[m]), total[m][half]);
  }
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(c + m * ldc + 8 * half, total[m][half]);
}

void rows_of(const Int8Block& a, const uint8_t* pack, int64_t depth, float* c, int64_t ldc) {
  int r = 0;
  for (; r + 4 <= a.rows; r += 4) block<4>(a, r, pack, depth, c + r * ldc, ldc);
  c += r * ldc;
  switch (a.rows - r) {
    case 3: return block<3>(a, r, pack, depth, c, ldc);
    case 2: return block<2>(a, r, pack, depth, c, ldc);
    case 1: return block<1>(a, r, pack, depth, c, ldc);
  }
}

}  // namespace

float round_avx2(const bf16* from, int64_t count, int8_t* values, int64_t step, int32_t& sum) {
  const auto load = [&](int64_t i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)); };
  // As integers, the bits of sizes have the order of the sizes, and those of infinities and NaNs are the largest.
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(load(i), _mm256_set1_epi16(0x7fff)));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const int complement = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
  float inverse;
  const float scale = scale_of(static_cast<uint16_t>(~complement), inverse);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += 16) {
    const auto rounded = [&](__m128i bits) {
      const __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
      return _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse)));
    };
    const __m256i low = rounded(_mm256_castsi256_si128(load(i))), high = rounded(_mm256_extracti128_si256(load(i), 1));
    sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i / kTileInputs * step + i % kTileInputs), bytes);
  }
  const __m128i quad = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const __m128i pair = _mm_add_epi32(quad, _mm_shuffle_epi32(quad, 0x4e));
  sum = _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
  return scale;
}

void gemm_int8_avx2(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc) {
  for (int g = 0; g < groups; ++g) rows_of(a, pack + g * depth * kGroup, depth, c + g * kGroup, ldc);
}

}  // namespace baton
