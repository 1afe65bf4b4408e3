// Packed products with AVX512-BF16.
#include "linear.h"

#include <immintrin.h>

#include <cstring>

namespace baton {
namespace {

// Prefetches a line of the pack for M rows. The hardware prefetcher alone runs too little ahead, and restarts at each 4 KiB.
// The more rows, the longer a line is computed with, and the farther ahead (docs/decisions/0046).
template <int M>
inline void prefetch(const bf16* line) {
  const char* at = reinterpret_cast<const char*>(line);
  if (M <= 2) _mm_prefetch(at + 3072, _MM_HINT_T1);
  else if (M <= 4) _mm_prefetch(at + 4096, _MM_HINT_T0);
  else _mm_prefetch(at + 12288, _MM_HINT_T1);
}

inline __m512bh pair(const bf16* p) {
  int32_t both;
  std::memcpy(&both, p, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// Computes M rows x G groups of outputs. The sums stay in registers over the whole of k.
template <int M, int G>
void block(const bf16* a, int64_t lda, const bf16* pack, int64_t depth, int64_t k, float* c, int64_t ldc) {
  constexpr int kParts = M * G >= 8 ? 1 : 8 / (M * G);  // independent sums, to cover the latency of a dot product
  __m512 acc[kParts][M][G];
  for (auto& part : acc)
    for (auto& row : part)
      for (auto& sum : row) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2 * kParts) {
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        const bf16* line = pack + (g * depth + i + 2 * part) * kGroup;
        prefetch<M>(line);
        const __m512bh w = (__m512bh)_mm512_loadu_si512(line);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
          acc[part][m][g] = _mm512_dpbf16_ps(acc[part][m][g], pair(a + m * lda + i + 2 * part), w);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int g = 0; g < G; ++g) {
      __m512 sum = acc[0][m][g];
      for (int part = 1; part < kParts; ++part) sum = _mm512_add_ps(sum, acc[part][m][g]);
      _mm512_storeu_ps(c + m * ldc + g * kGroup, sum);
    }
  }
}

template <int G>
void rows_of(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, float* c, int64_t ldc) {
  while (m >= 8) {
    block<8, G>(a, lda, pack, depth, k, c, ldc);
    a += 8 * lda, c += 8 * ldc, m -= 8;
  }
  switch (m) {
    case 7: return block<7, G>(a, lda, pack, depth, k, c, ldc);
    case 6: return block<6, G>(a, lda, pack, depth, k, c, ldc);
    case 5: return block<5, G>(a, lda, pack, depth, k, c, ldc);
    case 4: return block<4, G>(a, lda, pack, depth, k, c, ldc);
    case 3: return block<3, G>(a, lda, pack, depth, k, c, ldc);
    case 2: return block<2, G>(a, lda, pack, depth, k, c, ldc);
    case 1: return block<1, G>(a, lda, pack, depth, k, c, ldc);
  }
}

}  // namespace

void gemm_bf16(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc) {
  int g = 0;
  if (m > 2 * kFewRows)  // fewer rows read one stream: 16 take 0.9 of the time
    for (; g + 2 <= groups; g += 2) rows_of<2>(a, lda, m, pack + g * depth * kGroup, depth, k, c + g * kGroup, ldc);
  for (; g < groups; ++g) rows_of<1>(a, lda, m, pack + g * depth * kGroup, depth, k, c + g * kGroup, ldc);
}

}  // namespace baton
