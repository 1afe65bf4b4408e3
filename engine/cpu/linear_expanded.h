// Products with weights that stay in 8 or 4 bits, as a checkpoint stores them: fp8 (e4m3), MXFP4, NVFP4 and int4.
//
// The pack of a [n, k] weight is [n / 16][k / 128] blocks of 128 inputs and 16 outputs; the last block of a group is filled
// up with zeros. Its codes expand to the lines of a pack of bfloat16 (linear.h), without rounding:
//   fp8    [32][64] codes; [16] float32: the factors of the outputs
//   MXFP4  [16][64] pairs of codes; [4][16] int8: the power of two of 32 inputs of an output
//   NVFP4  [16][64] pairs of codes; [8][16] e4m3: the scale of 16 inputs of an output; [16] float32: the factors of the outputs
//   int4   [16][64] pairs of codes; [128 / G][16] float32: the factors of G inputs of an output; [128 / G][16] uint8: their
//          zero points. G is 128 or 32
// A block is expanded into the first-level cache and multiplied there by the kernel for bfloat16, so that each instruction
// set multiplies as it always does. Products of fp8, NVFP4 and int4 are multiplied by the factors afterwards, in float32. A number of NVFP4 times
// its scale has six bits, which bfloat16 has, too. A code of
// int4 becomes 16 + code, which takes fewer instructions than the difference to a zero point: 16 + zero point times the sum
// of the inputs is subtracted from a product.
#pragma once
#include <cstdint>

#include "numeric.h"

namespace baton {

constexpr int kBlockInputs = 128;
constexpr int kBlockCodes = kBlockInputs * 16;
constexpr int kPowerInputs = 32;  // inputs of an output that share a power of two
constexpr int kNvfp4Inputs = 16;  // of NVFP4: that share a scale
constexpr int kExpandAhead = 2048;  // bytes to prefetch ahead of the codes that are expanded
constexpr int kInt4Offset = 16;  // of the numbers to which codes of int4 expand
constexpr int64_t kFp8BlockBytes = kBlockCodes + 16 * sizeof(float);
constexpr int64_t kMxfp4BlockBytes = kBlockCodes / 2 + kBlockInputs / kPowerInputs * 16;
constexpr int64_t kNvfp4BlockBytes =
    kBlockCodes / 2 + kBlockInputs / kNvfp4Inputs * 16 + 16 * static_cast<int64_t>(sizeof(float));
// Of int4, where `inputs` share a factor.
constexpr int64_t int4_block_bytes(int inputs) {
  return kBlockCodes / 2 + kBlockInputs / inputs * 16 * static_cast<int64_t>(sizeof(float) + 1);
}

inline int64_t blocks_of(int64_t k) { return (k + kBlockInputs - 1) / kBlockInputs; }

// The sum of `count` inputs, a multiple of 32.
float sum_of_inputs_avx2(const bf16* inputs, int64_t count);
float sum_of_inputs_avx512(const bf16* inputs, int64_t count);

// The place of a weight's code in a block. 16 bytes hold 8 numbers of one line, then 8 of the next, so that tables of lower
// and of upper bytes are joined by unpacking. Of 4 bits, lower halves of 64 bytes are two lines, and upper halves the next two.
struct Place {
  int byte;
  bool upper;  // of 4 bits: the code is in the upper half

  static Place of(int64_t input, int output, bool halves) {
    const int line = static_cast<int>(input / 2), number = output * 2 + static_cast<int>(input % 2);
    const int lines = halves ? 4 : 2;  // in 64 bytes
    return {line / lines * 64 + number / 8 * 16 + line % 2 * 8 + number % 8, line % lines >= 2};
  }
};

// The two bytes of the smallest numbers of e4m3 in bfloat16, multiples of 2^-9, which it stores without an exponent.
alignas(16) constexpr uint8_t kTinyLowBytes[16] = {0, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60};
alignas(16) constexpr uint8_t kTinyHighBytes[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};

// The two bytes of the numbers of e2m1 in bfloat16, by their codes.
alignas(16) constexpr uint8_t kE2m1LowBytes[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                                   0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
alignas(16) constexpr uint8_t kE2m1HighBytes[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                                     0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};

}  // namespace baton
