// Packed products with AVX-512, for CPUs without bfloat16 arithmetic. As in linear_avx2.cpp the left side becomes float32,
// a panel of kDepth inputs at a time, and the two halves of each 32-bit pair of a line become vectors of floats.
#include "linear.h"

#include <immintrin.h>

#include <algorithm>

namespace baton {
namespace {

constexpr int kAhead = 2048;  // bytes to prefetch ahead: the hardware prefetcher restarts at each 4 KiB of the stream
constexpr int64_t kDepth = 1024;

inline __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// c (+)= a * pack for M rows x G groups of outputs. a: [M, kDepth], of which k inputs are used.
template <int M, int G>
void block(const float* a, const bf16* pack, int64_t depth, int64_t k, bool add, float* c, int64_t ldc) {
  constexpr int kParts = M * G >= 8 ? 1 : (M * G >= 4 ? 2 : 4);  // independent sums, to cover the latency of a product
  __m512 acc[kParts][M][G];
  for (auto& part : acc)
    for (auto& row : part)
      for (auto& sum : row) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2 * kParts) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const float* at = a + i + 2 * part;
      __m512i lines[G];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        const bf16* line = pack + (g * depth + i + 2 * part) * kGroup;
        _mm_prefetch(reinterpret_cast<const char*>(line) + kAhead, _MM_HINT_T0);
        lines[g] = _mm512_loadu_si512(line);
      }
      __m512 weights[G];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) weights[g] = even(lines[g]);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const __m512 x = _mm512_set1_ps(at[m * kDepth]);
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) acc[part][m][g] = _mm512_fmadd_ps(x, weights[g], acc[part][m][g]);
      }
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) weights[g] = odd(lines[g]);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const __m512 x = _mm512_set1_ps(at[m * kDepth + 1]);
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) acc[part][m][g] = _mm512_fmadd_ps(x, weights[g], acc[part][m][g]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int g = 0; g < G; ++g) {
      __m512 sum = acc[0][m][g];
      for (int part = 1; part < kParts; ++part) sum = _mm512_add_ps(sum, acc[part][m][g]);
      float* to = c + m * ldc + g * kGroup;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(sum, _mm512_loadu_ps(to)) : sum);
    }
  }
}

template <int G>
void rows_of(const float* a, int m, const bf16* pack, int64_t depth, int64_t k, bool add, float* c, int64_t ldc) {
  constexpr int kRows = 8;
  for (; m >= kRows; a += kRows * kDepth, c += kRows * ldc, m -= kRows) block<kRows, G>(a, pack, depth, k, add, c, ldc);
  switch (m) {
    case 7: return block<7, G>(a, pack, depth, k, add, c, ldc);
    case 6: return block<6, G>(a, pack, depth, k, add, c, ldc);
    case 5: return block<5, G>(a, pack, depth, k, add, c, ldc);
    case 4: return block<4, G>(a, pack, depth, k, add, c, ldc);
    case 3: return block<3, G>(a, pack, depth, k, add, c, ldc);
    case 2: return block<2, G>(a, pack, depth, k, add, c, ldc);
    case 1: return block<1, G>(a, pack, depth, k, add, c, ldc);
  }
}

}  // namespace

void gemm_avx512(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc) {
  alignas(64) static thread_local float panel[kRowBlock * kDepth];
  for (int64_t first = 0; first < k; first += kDepth) {
    const int64_t count = std::min(kDepth, k - first);
    for (int r = 0; r < m; ++r)
      for (int64_t i = 0; i < count; i += 16) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + r * lda + first + i));
        _mm512_store_ps(panel + r * kDepth + i, even(_mm512_cvtepu16_epi32(bits)));
      }
    int g = 0;
    if (m > kFewRows)
      for (; g + 2 <= groups; g += 2)
        rows_of<2>(panel, m, pack + (g * depth + first) * kGroup, depth, count, first > 0, c + g * kGroup, ldc);
    for (; g < groups; ++g)
      rows_of<1>(panel, m, pack + (g * depth + first) * kGroup, depth, count, first > 0, c + g * kGroup, ldc);
  }
}

}  // namespace baton
