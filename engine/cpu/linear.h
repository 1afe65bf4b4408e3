// Matrix products with bfloat16 weights packed once at load.
//
// Pack of a [n, k] weight: [n / 16][k / 2][16][2]. A 64-byte line holds two neighbouring k of 16 outputs, the operand
// of one AVX512-BF16 dot product; 16 lines in a row are one AMX tile. A thread that computes some outputs reads ONE
// linear stream, so one copy of the weights serves decode (bandwidth) and prefill (arithmetic).
#pragma once
#include <cstdint>

#include "numeric.h"
#include "pool.h"

namespace baton {

constexpr int kGroup = 16;   // outputs of a line
constexpr int kUnit = 2;     // groups that a large product computes together
constexpr int kRowBlock = 32;  // rows of one kernel call in a large product
constexpr int kFewRows = 8;    // up to here a product is bound by reading the weights

// c[m, groups * 16] = a[m, k] * the first k inputs of a pack of `depth` inputs; m <= kRowBlock, k a multiple of 32.
using Gemm = void (*)(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);

void gemm_avx512(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
void gemm_amx(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
Gemm gemm_for(int64_t rows);  // what this CPU does best for so many rows

// This thread's part of a product with n = 16 * groups outputs. `done(c, ldc, row, rows, group, groups)` gets each
// finished block of float32 sums while it is in the cache. No barrier.
template <typename Done>
void matmul(const Team& team, const bf16* a, int64_t lda, int64_t m, const bf16* pack, int64_t k, int64_t groups,
            Done done) {
  alignas(64) float c[kRowBlock * kUnit * kGroup];
  const Gemm gemm = gemm_for(m);
  int64_t first, last;
  team.split((groups + kUnit - 1) / kUnit, first, last);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t group = unit * kUnit;
    const int count = static_cast<int>(groups - group < kUnit ? groups - group : kUnit);
    for (int64_t row = 0; row < m; row += kRowBlock) {
      const int rows = static_cast<int>(m - row < kRowBlock ? m - row : kRowBlock);
      gemm(a + row * lda, lda, rows, pack + group * kGroup * k, k, k, count, c, kUnit * kGroup);
      done(c, kUnit * kGroup, row, rows, group, count);
    }
  }
}

}  // namespace baton
