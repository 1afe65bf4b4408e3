// The blocks of packs that are expanded (linear_expanded.h). Include vector_avx512.h or vector_avx2.h first.
//
// kInputs inputs share a factor of an output: they are a part of the block. kSubtracts: a part's products lack what
// part(block, n).starts times the sum of the inputs is. OfFew: the type for few rows, which has the same layout.
#pragma once
#include "linear_expanded.h"

namespace baton {
namespace {

// Of 16 outputs.
struct Part {
  Vec factors, starts;
};

struct Fp8Block {
  using OfFew = Fp8Block;
  static constexpr int64_t kBytes = kFp8BlockBytes;
  static constexpr int kInputs = kBlockInputs;
  static constexpr bool kSubtracts = false;

  static Part part(const uint8_t* block, int) {
    return {load(reinterpret_cast<const float*>(block + kBlockCodes)), splat(0)};
  }
};

struct Mxfp4Parts;  // linear_expanded_avx512.h

// Powers of two in the expanded numbers: many rows multiply all of a block at once.
struct Mxfp4Block {
  using OfFew = Mxfp4Parts;
  static constexpr int64_t kBytes = kMxfp4BlockBytes;
  static constexpr int kInputs = kBlockInputs;
  static constexpr bool kSubtracts = false;

  static Part part(const uint8_t*, int) { return {splat(1.0f), splat(0)}; }
};

struct Nvfp4Parts;  // linear_expanded_avx512.h

// Scales in the expanded numbers, as the powers of two of MXFP4.
struct Nvfp4Block {
  using OfFew = Nvfp4Parts;
  static constexpr int64_t kBytes = kNvfp4BlockBytes;
  static constexpr int kInputs = kBlockInputs;
  static constexpr bool kSubtracts = false;

  static Vec scales(const uint8_t* block, int n) { return load_e4m3(block + kBlockCodes / 2 + 16 * n); }
  static Part part(const uint8_t* block, int) {
    return {load(reinterpret_cast<const float*>(block + kBlockCodes / 2 + kBlockInputs)), splat(0)};
  }
};

template <int Inputs>
struct Int4Block {
  using OfFew = Int4Block;
  static constexpr int64_t kBytes = int4_block_bytes(Inputs);
  static constexpr int kInputs = Inputs;
  static constexpr bool kSubtracts = true;

  static Part part(const uint8_t* block, int n) {
    const float* factors = reinterpret_cast<const float*>(block + kBlockCodes / 2);
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(factors + kBlockInputs / Inputs * 16);
    return {load(factors + 16 * n), add(load(zeros + 16 * n), splat(kInt4Offset))};
  }
};

// total + what the products of a part and one row stand for. `inputs`: the sum of the row's inputs.
template <typename Block>
Vec add_part(Vec total, Vec products, const Part& part, float inputs) {
  if constexpr (Block::kSubtracts) products = mul_add(splat(-inputs), part.starts, products);
  return mul_add(products, part.factors, total);
}

// Calls `of` with the type of a pack's blocks.
template <typename Of>
void with_blocks(PackFormat format, Of of) {
  switch (format) {
    case kFp8Pack: return of(Fp8Block{});
    case kMxfp4Pack: return of(Mxfp4Block{});
    case kNvfp4Pack: return of(Nvfp4Block{});
    case kInt4By128Pack: return of(Int4Block<128>{});
    default: return of(Int4Block<32>{});
  }
}

}  // namespace
}  // namespace baton
