// Products with packs of fp8, MXFP4, NVFP4 and int4 by the kernel for bfloat16. Include linear_expanded_block.h first, and define
// expand(Block, block, lines) for each type of blocks: it expands a block to lines.
#pragma once
#include <algorithm>

#include "linear.h"

namespace baton {
namespace {

constexpr int64_t kLdc = kUnit * kGroup;

// The sums of `groups` groups, which are expanded together.
template <typename Block>
void multiply(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c) {
  alignas(64) bf16 lines[kUnit * kBlockCodes];
  alignas(64) float products[kRowBlock * kLdc];
  const Gemm gemm = gemm_for();
  const int64_t bytes = group_bytes(weights.format, k);
  const uint8_t* block = static_cast<const uint8_t*>(weights.pack);
  for (int64_t row = 0; row < m; ++row) std::fill_n(c + row * kLdc, groups * kGroup, 0.0f);
  for (int64_t first = 0; first < k; first += kBlockInputs, block += Block::kBytes) {
    for (int g = 0; g < groups; ++g) expand(Block{}, block + g * bytes, lines + g * kBlockCodes);
    const int64_t inputs = std::min<int64_t>(kBlockInputs, k - first);
    for (int64_t i = 0; i < inputs; i += Block::kInputs) {
      Part parts[kUnit];
      for (int g = 0; g < groups; ++g) parts[g] = Block::part(block + g * bytes, static_cast<int>(i / Block::kInputs));
      for (int64_t row = 0; row < m; row += kRowBlock) {
        const int rows = static_cast<int>(std::min<int64_t>(kRowBlock, m - row));
        gemm(a.data + row * a.stride + first + i, a.stride, rows, lines + i * kGroup, kBlockInputs,
             std::min<int64_t>(Block::kInputs, inputs - i), groups, products, kLdc);
        for (int r = 0; r < rows; ++r)
          for (int g = 0; g < groups; ++g) {
            float* to = c + (row + r) * kLdc + g * kGroup;
            const float of_inputs = Block::kSubtracts ? a.sums.at(row + r, (first + i) / Block::kInputs) : 0.0f;
            store(to, add_part<Block>(load(to), load(products + r * kLdc + g * kGroup), parts[g], of_inputs));
          }
      }
    }
  }
}

}  // namespace
}  // namespace baton
