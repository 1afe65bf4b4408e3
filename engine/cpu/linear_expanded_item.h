// Products with packs of fp8 and MXFP4. Include vector_avx512.h or vector_avx2.h first, and define expand_fp8, expand_mxfp4
// and BATON_GEMM_EXPANDED.
#include <algorithm>

#include "linear.h"

namespace baton {
namespace {

constexpr int64_t kLdc = kUnit * kGroup;

void expand(PackFormat format, const uint8_t* block, bf16* lines) {
  if (format == kFp8Pack) expand_fp8(block, lines);
  else expand_mxfp4(block, reinterpret_cast<const int8_t*>(block + kBlockCodes / 2), lines);
}

// c (+)= sums times the factors of their outputs, or times 1 if there are none.
void add_sums(const float* sums, const float* factors, int64_t rows, bool first, float* c) {
  const Vec factor = factors == nullptr ? splat(1.0f) : load(factors);
  for (int64_t r = 0; r < rows; ++r, sums += kLdc, c += kLdc)
    store(c, first ? mul(load(sums), factor) : mul_add(load(sums), factor, load(c)));
}

// The sums of `groups` groups, which are expanded together.
void multiply(const bf16* a, int64_t lda, int64_t m, const Weights& weights, int64_t k, int groups, float* c) {
  alignas(64) bf16 lines[kUnit * kBlockCodes];
  alignas(64) float sums[kRowBlock * kLdc];
  const Gemm gemm = gemm_for();
  const bool fp8 = weights.format == kFp8Pack;
  const int64_t bytes = fp8 ? kFp8BlockBytes : kMxfp4BlockBytes;
  const uint8_t* block = static_cast<const uint8_t*>(weights.pack);
  for (int64_t i = 0; i < k; i += kBlockInputs, block += bytes) {
    const int64_t inputs = std::min<int64_t>(kBlockInputs, k - i);
    const auto of_group = [&](int g) { return block + g * group_bytes(weights.format, k); };
    for (int g = 0; g < groups; ++g) expand(weights.format, of_group(g), lines + g * kBlockCodes);
    for (int64_t row = 0; row < m; row += kRowBlock) {
      const int64_t rows = std::min<int64_t>(kRowBlock, m - row);
      gemm(a + row * lda + i, lda, static_cast<int>(rows), lines, kBlockInputs, inputs, groups, sums, kLdc);
      for (int g = 0; g < groups; ++g) {
        const float* factors = fp8 ? reinterpret_cast<const float*>(of_group(g) + kBlockCodes) : nullptr;
        add_sums(sums + g * kGroup, factors, rows, i == 0, c + row * kLdc + g * kGroup);
      }
    }
  }
}

}  // namespace

// Few rows read one group after the other, as one stream.
void BATON_GEMM_EXPANDED(const bf16* a, int64_t lda, int64_t m, const Weights& weights, int64_t k, int groups, float* c) {
  const int step = m > kFewRows ? groups : 1;
  for (int g = 0; g < groups; g += step) multiply(a, lda, m, weights.from_group(g, k), k, step, c + g * kGroup);
}

}  // namespace baton
