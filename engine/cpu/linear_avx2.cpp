// Packed products with AVX2, for CPUs without bfloat16 arithmetic. The left side becomes float32, a panel of kDepth inputs
// at a time; the two halves of each 32-bit pair of a line become two vectors of floats.
#include "linear.h"

#include <immintrin.h>

#include <algorithm>

namespace baton {
namespace {

constexpr int kAhead = 2048;  // bytes to prefetch ahead: the hardware prefetcher restarts at each 4 KiB of the stream
constexpr int64_t kDepth = 1024;
constexpr int kRegisters = 4;  // rows whose sums (two vectors each) stay in registers beside a line; with 6 rows GCC stores sums

inline __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// c (+)= a * pack for M rows of one group. a: [M, kDepth], of which k inputs are used.
template <int M>
void block(const float* a, const bf16* pack, int64_t k, bool add, float* c, int64_t ldc) {
  constexpr int kParts = M >= 4 ? 1 : (M > 1 ? 2 : 4);  // independent sums, to cover the latency of a product
  __m256 acc[kParts][M][2];
  for (auto& part : acc)
    for (auto& row : part) row[0] = row[1] = _mm256_setzero_ps();
  for (int64_t i = 0; i < k; i += 2 * kParts) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const bf16* line = pack + (i + 2 * part) * kGroup;
      _mm_prefetch(reinterpret_cast<const char*>(line) + kAhead, _MM_HINT_T0);
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + kGroup));
      const float* at = a + i + 2 * part;
      const __m256 even_low = even(low), even_high = even(high);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const __m256 x = _mm256_broadcast_ss(at + m * kDepth);
        acc[part][m][0] = _mm256_fmadd_ps(x, even_low, acc[part][m][0]);
        acc[part][m][1] = _mm256_fmadd_ps(x, even_high, acc[part][m][1]);
      }
      const __m256 odd_low = odd(low), odd_high = odd(high);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const __m256 x = _mm256_broadcast_ss(at + m * kDepth + 1);
        acc[part][m][0] = _mm256_fmadd_ps(x, odd_low, acc[part][m][0]);
        acc[part][m][1] = _mm256_fmadd_ps(x, odd_high, acc[part][m][1]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      __m256 sum = acc[0][m][half];
      for (int part = 1; part < kParts; ++part) sum = _mm256_add_ps(sum, acc[part][m][half]);
      float* to = c + m * ldc + 8 * half;
      _mm256_storeu_ps(to, add ? _mm256_add_ps(sum, _mm256_loadu_ps(to)) : sum);
    }
  }
}

void rows_of(const float* a, int m, const bf16* pack, int64_t k, bool add, float* c, int64_t ldc) {
  for (; m >= kRegisters; a += kRegisters * kDepth, c += kRegisters * ldc, m -= kRegisters)
    block<kRegisters>(a, pack, k, add, c, ldc);
  switch (m) {
    case 5: return block<5>(a, pack, k, add, c, ldc);
    case 4: return block<4>(a, pack, k, add, c, ldc);
    case 3: return block<3>(a, pack, k, add, c, ldc);
    case 2: return block<2>(a, pack, k, add, c, ldc);
    case 1: return block<1>(a, pack, k, add, c, ldc);
  }
}

}  // namespace

void gemm_avx2(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
               int64_t ldc) {
  alignas(64) static thread_local float panel[kRowBlock * kDepth];
  for (int64_t first = 0; first < k; first += kDepth) {
    const int64_t count = std::min(kDepth, k - first);
    for (int r = 0; r < m; ++r)
      for (int64_t i = 0; i < count; i += 8) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + r * lda + first + i));
        _mm256_store_ps(panel + r * kDepth + i, even(_mm256_cvtepu16_epi32(eight)));
      }
    for (int g = 0; g < groups; ++g)
      rows_of(panel, m, pack + (g * depth + first) * kGroup, count, first > 0, c + g * kGroup, ldc);
  }
}

}  // namespace baton
