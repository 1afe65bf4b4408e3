// The left side of products whose lines are made in registers, with AVX-512, and with AVX512-BF16 where a file is compiled
// for it. Include vector_avx512.h first.
#pragma once
#include <cstring>

#include "linear_expanded.h"

namespace baton {
namespace {

// The inputs of a block of M rows, each of which meets two numbers of a line.
#if defined(__AVX512BF16__)
template <int M>
class BlockRows {
 public:
  BlockRows(const bf16* a, int64_t lda, int64_t) : a_(a), lda_(lda) {}

  // sum + row m's inputs i and i + 1 times a line.
  Vec add(Vec sum, int m, int i, __m512i line) const {
    int32_t both;
    std::memcpy(&both, a_ + m * lda_ + i, sizeof both);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)line);
  }

 private:
  const bf16* a_;
  int64_t lda_;
};
#else
template <int M>
class BlockRows {
 public:
  BlockRows(const bf16* a, int64_t lda, int64_t inputs) {
    for (int m = 0; m < M; ++m)
      for (int64_t i = 0; i < inputs; i += 16) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + m * lda + i));
        _mm512_store_si512(rows_[m] + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      }
  }

  Vec add(Vec sum, int m, int i, __m512i line) const {
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    sum = _mm512_fmadd_ps(even, _mm512_set1_ps(rows_[m][i]), sum);
    return _mm512_fmadd_ps(odd, _mm512_set1_ps(rows_[m][i + 1]), sum);
  }

 private:
  alignas(64) float rows_[M][kBlockInputs];
};
#endif

}  // namespace
}  // namespace baton
