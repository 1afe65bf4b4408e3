// Products with packs of fp8 and MXFP4 by the kernel for bfloat16. Include vector_avx512.h or vector_avx2.h first, and define
// expand_fp8 and expand_mxfp4, which expand a block to lines.
#pragma once
#include <algorithm>

#include "linear.h"

namespace baton {
namespace {

constexpr int64_t kLdc = kUnit * kGroup;

// c (+)= sums times the factors of their outputs.
void add_sums(const float* sums, Vec factors, int64_t rows, bool first, float* c) {
  for (int64_t r = 0; r < rows; ++r, sums += kLdc, c += kLdc)
    store(c, first ? mul(load(sums), factors) : mul_add(load(sums), factors, load(c)));
}

// The sums of `groups` groups, which are expanded together.
void multiply(const bf16* a, int64_t lda, int64_t m, const Weights& weights, int64_t k, int groups, float* c) {
  alignas(64) bf16 lines[kUnit * kBlockCodes];
  alignas(64) float sums[kRowBlock * kLdc];
  const Gemm gemm = gemm_for();
  const bool fp8 = weights.format == kFp8Pack;
  const uint8_t* block = static_cast<const uint8_t*>(weights.pack);
  for (int64_t i = 0; i < k; i += kBlockInputs, block += fp8 ? kFp8BlockBytes : kMxfp4BlockBytes) {
    const int64_t inputs = std::min<int64_t>(kBlockInputs, k - i);
    Vec factors[kUnit];
    for (int g = 0; g < groups; ++g) {
      const uint8_t* of_group = block + g * group_bytes(weights.format, k);
      factors[g] = fp8 ? load(reinterpret_cast<const float*>(of_group + kBlockCodes)) : splat(1.0f);
      (fp8 ? expand_fp8 : expand_mxfp4)(of_group, lines + g * kBlockCodes);
    }
    for (int64_t row = 0; row < m; row += kRowBlock) {
      const int64_t rows = std::min<int64_t>(kRowBlock, m - row);
      gemm(a + row * lda + i, lda, static_cast<int>(rows), lines, kBlockInputs, inputs, groups, sums, kLdc);
      for (int g = 0; g < groups; ++g)
        add_sums(sums + g * kGroup, factors[g], rows, i == 0, c + row * kLdc + g * kGroup);
    }
  }
}

}  // namespace
}  // namespace baton
