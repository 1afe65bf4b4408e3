// Packs of fp8, MXFP4, NVFP4 and int4 with AVX-512, and with AVX512-BF16 where a file is compiled for it. Define
// BATON_GEMM_EXPANDED first.
#include <algorithm>

#include "isa.h"
#include "vector_avx512.h"

#include "linear.h"
#include "linear_expanded_block.h"
#include "linear_rows_avx512.h"

namespace baton {
namespace {

inline __m512i table(const uint8_t* bytes) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

template <typename Block>
class Lines;

// Gives the lines of a block of fp8, two at a time: lines_of(i, lines) for inputs i to i + 3.
template <>
class Lines<Fp8Block> {
 public:
  static constexpr int kLines = 2;

  explicit Lines(const uint8_t* block) : codes_(block) {}

  // Lower and upper bytes apart. Moved to the places of bfloat16's bits, an exponent lacks 120, the difference of the
  // biases; the numbers without an exponent are looked up.
  void lines_of(int i, __m512i* lines) const {
    __builtin_prefetch(codes_ + 16 * i + kExpandAhead);
    const __m512i code = _mm512_loadu_si512(codes_ + 16 * i), size = _mm512_and_si512(code, _mm512_set1_epi8(0x7f));
    const __mmask64 tiny = _mm512_cmplt_epu8_mask(size, _mm512_set1_epi8(8));
    __m512i low = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi8(static_cast<char>(0xf0)));
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi8(7));
    high = _mm512_add_epi8(high, _mm512_set1_epi8(120 / 2));
    low = _mm512_mask_shuffle_epi8(low, tiny, table(kTinyLowBytes), size);
    high = _mm512_mask_shuffle_epi8(high, tiny, table(kTinyHighBytes), size);
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(0x7f), 0xf4);  // high | (code & ~0x7f)
    lines[0] = _mm512_unpacklo_epi8(low, high);
    lines[1] = _mm512_unpackhi_epi8(low, high);
  }

 private:
  const uint8_t* codes_;
};

// Powers of two as factors: for few rows this takes fewer instructions than to put them into the numbers.
struct Mxfp4Parts {
  static constexpr int64_t kBytes = kMxfp4BlockBytes;
  static constexpr int kInputs = kPowerInputs;
  static constexpr bool kSubtracts = false;

  static Part part(const uint8_t* block, int n) {
    return {powers_of_two(reinterpret_cast<const int8_t*>(block + kBlockCodes / 2) + 16 * n), splat(0)};
  }
};

// The same of NVFP4: scales as factors.
struct Nvfp4Parts {
  static constexpr int64_t kBytes = kNvfp4BlockBytes;
  static constexpr int kInputs = kNvfp4Inputs;
  static constexpr bool kSubtracts = false;

  static Part part(const uint8_t* block, int n) {
    return {mul(Nvfp4Block::scales(block, n), Nvfp4Block::part(block, n).factors), splat(0)};
  }
};

// The numbers of e2m1 alone, four lines at a time, inputs i to i + 7. A number is found in two tables, of the lower and of the
// upper bytes of bfloat16.
class E2m1Lines {
 public:
  static constexpr int kLines = 4;

  explicit E2m1Lines(const uint8_t* block) : codes_(block) {}

  void lines_of(int i, __m512i* lines) const {
    __builtin_prefetch(codes_ + 8 * i + kExpandAhead);
    const __m512i low = table(kE2m1LowBytes), high = table(kE2m1HighBytes), half = _mm512_set1_epi8(15);
    const __m512i both = _mm512_loadu_si512(codes_ + 8 * i);
    const __m512i lower = _mm512_and_si512(both, half), upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    const __m512i a = _mm512_shuffle_epi8(low, lower), b = _mm512_shuffle_epi8(high, lower);
    const __m512i c = _mm512_shuffle_epi8(low, upper), d = _mm512_shuffle_epi8(high, upper);
    lines[0] = _mm512_unpacklo_epi8(a, b);
    lines[1] = _mm512_unpackhi_epi8(a, b);
    lines[2] = _mm512_unpacklo_epi8(c, d);
    lines[3] = _mm512_unpackhi_epi8(c, d);
  }

 private:
  const uint8_t* codes_;
};

template <>
class Lines<Mxfp4Parts> : public E2m1Lines {
  using E2m1Lines::E2m1Lines;
};
template <>
class Lines<Nvfp4Parts> : public E2m1Lines {
  using E2m1Lines::E2m1Lines;
};

// With powers of two: one is added to the exponent of a number, unless that is 0.
template <>
class Lines<Mxfp4Block> {
 public:
  static constexpr int kLines = 4;

  explicit Lines(const uint8_t* block) : numbers_(block), powers_(block + kBlockCodes / 2) {}

  void lines_of(int i, __m512i* lines) const {
    const __m128i powers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(powers_ + i / kPowerInputs * 16));
    const __m512i of_outputs = _mm512_cvtepi8_epi32(powers);
    const __m512i power = _mm512_or_si512(_mm512_slli_epi32(of_outputs, 23),  // of both numbers of an output in a line
                                          _mm512_and_si512(_mm512_slli_epi32(of_outputs, 7), _mm512_set1_epi32(0xffff)));
    numbers_.lines_of(i, lines);
    for (int line = 0; line < 4; ++line) {
      const __mmask32 numbers = _mm512_test_epi16_mask(lines[line], _mm512_set1_epi16(0x7fff));
      lines[line] = _mm512_mask_add_epi16(lines[line], numbers, lines[line], power);
    }
  }

 private:
  E2m1Lines numbers_;
  const uint8_t* powers_;
};

// With scales. The products have less bits than bfloat16: nothing is rounded.
template <>
class Lines<Nvfp4Block> {
 public:
  static constexpr int kLines = 4;

  explicit Lines(const uint8_t* block) : block_(block), numbers_(block) {}

  void lines_of(int i, __m512i* lines) const {
    const Vec scales = Nvfp4Block::scales(block_, i / kNvfp4Inputs);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto scaled = [&](__m512i bits) { return _mm512_castps_si512(mul(_mm512_castsi512_ps(bits), scales)); };
    numbers_.lines_of(i, lines);
    for (int line = 0; line < 4; ++line) {  // the two numbers of an output are halves of 32 bits
      const __m512i even = scaled(_mm512_slli_epi32(lines[line], 16)), odd = scaled(_mm512_and_si512(lines[line], upper));
      lines[line] = _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
    }
  }

 private:
  const uint8_t* block_;
  E2m1Lines numbers_;
};

// The same of int4. 16 + code has the exponent of 16, and the code in the upper bits of the mantissa.
template <int Inputs>
class Lines<Int4Block<Inputs>> {
 public:
  static constexpr int kLines = 4;

  explicit Lines(const uint8_t* block) : codes_(block) {}

  void lines_of(int i, __m512i* lines) const {
    __builtin_prefetch(codes_ + 8 * i + kExpandAhead);
    const __m512i both = _mm512_loadu_si512(codes_ + 8 * i), upper_byte = _mm512_set1_epi8(0x41);
    const __m512i a = lower_bytes(_mm512_slli_epi16(both, 3)), b = lower_bytes(_mm512_srli_epi16(both, 1));
    lines[0] = _mm512_unpacklo_epi8(a, upper_byte);
    lines[1] = _mm512_unpackhi_epi8(a, upper_byte);
    lines[2] = _mm512_unpacklo_epi8(b, upper_byte);
    lines[3] = _mm512_unpackhi_epi8(b, upper_byte);
  }

 private:
  // (x & 0x78) | 0x80
  static __m512i lower_bytes(__m512i x) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi8(0x78), _mm512_set1_epi8(static_cast<char>(0x80)), 0xea);
  }

  const uint8_t* codes_;
};

template <typename Block>
void expand(Block, const uint8_t* block, bf16* to) {
  const Lines<Block> lines(block);
  constexpr int kLines = Lines<Block>::kLines;
  for (int i = 0; i < kBlockInputs; i += 2 * kLines) {
    __m512i some[kLines];
    lines.lines_of(i, some);
    for (int line = 0; line < kLines; ++line) _mm512_storeu_si512(to + 16 * i + 32 * line, some[line]);
  }
}

// One group times M rows: numbers are multiplied in the registers in which they are expanded.
template <typename Block, int M>
void multiply_few(const Input& a, const uint8_t* block, int64_t k, float* c, int64_t ldc) {
  constexpr int kLines = Lines<Block>::kLines;
  Vec total[M];
  for (auto& sum : total) sum = splat(0);
  for (int64_t first = 0; first < k; first += kBlockInputs, block += Block::kBytes) {
    const int inputs = static_cast<int>(std::min<int64_t>(kBlockInputs, k - first));
    const Lines<Block> lines(block);
    const BlockRows<M> rows(a.data + first, a.stride, inputs);
    for (int from = 0; from < inputs; from += Block::kInputs) {
      Vec sums[2][M];
      for (auto& part : sums)
        for (auto& sum : part) sum = splat(0);
      for (int i = from; i < std::min(inputs, from + Block::kInputs); i += 2 * kLines) {
        __m512i some[kLines];
        lines.lines_of(i, some);
#pragma GCC unroll 4
        for (int line = 0; line < kLines; ++line)
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) sums[line % 2][m] = rows.add(sums[line % 2][m], m, i + 2 * line, some[line]);
      }
      const Part part = Block::part(block, from / Block::kInputs);
      for (int m = 0; m < M; ++m) {
        const float of_inputs = Block::kSubtracts ? a.sums.at(m, (first + from) / Block::kInputs) : 0.0f;
        total[m] = add_part<Block>(total[m], baton::add(sums[0][m], sums[1][m]), part, of_inputs);
      }
    }
  }
  for (int m = 0; m < M; ++m) store(c + m * ldc, total[m]);
}

template <typename Block>
void multiply_few(int64_t m, const Input& a, const uint8_t* block, int64_t k, float* c, int64_t ldc) {
  switch (m) {
    case 8: return multiply_few<Block, 8>(a, block, k, c, ldc);
    case 7: return multiply_few<Block, 7>(a, block, k, c, ldc);
    case 6: return multiply_few<Block, 6>(a, block, k, c, ldc);
    case 5: return multiply_few<Block, 5>(a, block, k, c, ldc);
    case 4: return multiply_few<Block, 4>(a, block, k, c, ldc);
    case 3: return multiply_few<Block, 3>(a, block, k, c, ldc);
    case 2: return multiply_few<Block, 2>(a, block, k, c, ldc);
    case 1: return multiply_few<Block, 1>(a, block, k, c, ldc);
  }
}

}  // namespace
}  // namespace baton

#include "linear_expanded_item.h"

namespace baton {

// Few rows read one group after the other, as one stream. With AMX a row's sums must not depend on the number of rows.
void BATON_GEMM_EXPANDED(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c) {
  with_blocks(weights.format, [&](auto block) {
    using Block = decltype(block);
    if (m > kFewRows) return multiply<Block>(a, m, weights, k, groups, c);
    for (int g = 0; g < groups; ++g, c += kGroup) {
      const Weights group = weights.from_group(g, k);
      if (current_isa() >= kAmx) multiply<Block>(a, m, group, k, 1, c);
      else multiply_few<typename Block::OfFew>(m, a, static_cast<const uint8_t*>(group.pack), k, c, kLdc);
    }
  });
}

}  // namespace baton
