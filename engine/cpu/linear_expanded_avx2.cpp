// Packs of fp8, MXFP4, NVFP4 and int4 with AVX2.
#include "vector_avx2.h"

#include "linear.h"
#include "linear_expanded_block.h"

namespace baton {
namespace {

inline __m256i table(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// As in linear_expanded_avx512.h, half a line at a time.
void expand(Fp8Block, const uint8_t* codes, bf16* lines) {
  const __m256i low_bytes = table(kTinyLowBytes), high_bytes = table(kTinyHighBytes), sizes = _mm256_set1_epi8(0x7f);
  for (int i = 0; i < kBlockCodes; i += 32) {
    __builtin_prefetch(codes + i + kExpandAhead);
    const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m256i size = _mm256_and_si256(code, sizes), tiny = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), size);
    __m256i low = _mm256_and_si256(_mm256_slli_epi16(code, 4), _mm256_set1_epi8(static_cast<char>(0xf0)));
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(code, 4), _mm256_set1_epi8(7));
    high = _mm256_add_epi8(high, _mm256_set1_epi8(120 / 2));
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(low_bytes, size), tiny);
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(high_bytes, size), tiny);
    high = _mm256_or_si256(high, _mm256_andnot_si256(sizes, code));
    bf16* to = lines + i / 64 * 64 + i % 64 / 2;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_unpackhi_epi8(low, high));
  }
}

// Eight outputs of a line of e2m1 numbers times what they share: scale(n, part) for inputs n * Inputs on is a function of such
// numbers, which part 0 and 1 of the outputs have.
template <int Inputs, typename ScaleOf>
void expand_e2m1(const uint8_t* codes, bf16* lines, ScaleOf scale_of) {
  const __m256i low_bytes = table(kE2m1LowBytes), high_bytes = table(kE2m1HighBytes), half = _mm256_set1_epi8(15);
  for (int n = 0; n < kBlockInputs / Inputs; ++n, codes += 8 * Inputs, lines += 16 * Inputs) {
    for (int part = 0; part < 2; ++part) {
      const auto scaled = scale_of(n, part);
      for (int k = 0; k < Inputs; k += 8) {
        __builtin_prefetch(codes + 8 * k + kExpandAhead);
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 8 * k + 32 * part));
        const __m256i halves[] = {_mm256_and_si256(both, half), _mm256_and_si256(_mm256_srli_epi16(both, 4), half)};
        bf16* to = lines + 16 * k + 16 * part;
        for (int upper = 0; upper < 2; ++upper, to += 64) {
          const __m256i low = _mm256_shuffle_epi8(low_bytes, halves[upper]);
          const __m256i high = _mm256_shuffle_epi8(high_bytes, halves[upper]);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), scaled(_mm256_unpacklo_epi8(low, high)));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), scaled(_mm256_unpackhi_epi8(low, high)));
        }
      }
    }
  }
}

void expand(Mxfp4Block, const uint8_t* block, bf16* lines) {
  expand_e2m1<kPowerInputs>(block, lines, [&](int n, int part) {
    const uint8_t* powers = block + kBlockCodes / 2 + 16 * n + 8 * part;
    const __m256i of_outputs = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(powers)));
    const __m256i power = _mm256_or_si256(_mm256_slli_epi32(of_outputs, 23),
                                          _mm256_and_si256(_mm256_slli_epi32(of_outputs, 7), _mm256_set1_epi32(0xffff)));
    return [power](__m256i numbers) {
      const __m256i zero = _mm256_cmpeq_epi16(_mm256_add_epi16(numbers, numbers), _mm256_setzero_si256());  // without the sign
      return _mm256_add_epi16(numbers, _mm256_andnot_si256(zero, power));
    };
  });
}

void expand(Nvfp4Block, const uint8_t* block, bf16* lines) {
  expand_e2m1<kNvfp4Inputs>(block, lines, [&](int n, int part) {
    const __m256 scale = widened_e4m3(block + kBlockCodes / 2 + 16 * n + 8 * part);
    const auto times = [scale](__m256i bits) { return _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(bits), scale)); };
    return [times](__m256i numbers) {
      const __m256i even = times(_mm256_slli_epi32(numbers, 16));
      const __m256i odd = times(_mm256_and_si256(numbers, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
      return _mm256_or_si256(_mm256_srli_epi32(even, 16), odd);
    };
  });
}

template <int Inputs>
void expand(Int4Block<Inputs>, const uint8_t* codes, bf16* lines) {
  const __m256i upper_byte = _mm256_set1_epi8(0x41), code = _mm256_set1_epi8(0x78), one = _mm256_set1_epi8(static_cast<char>(0x80));
  for (int i = 0; i < kBlockCodes / 2; i += 32) {  // 64 bytes are four lines
    __builtin_prefetch(codes + i + kExpandAhead);
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m256i halves[] = {_mm256_slli_epi16(both, 3), _mm256_srli_epi16(both, 1)};
    bf16* to = lines + i / 64 * 128 + i % 64 / 2;
    for (int upper = 0; upper < 2; ++upper, to += 64) {
      const __m256i lower_bytes = _mm256_or_si256(_mm256_and_si256(halves[upper], code), one);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi8(lower_bytes, upper_byte));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_unpackhi_epi8(lower_bytes, upper_byte));
    }
  }
}

}  // namespace
}  // namespace baton

#include "linear_expanded_item.h"

namespace baton {

float sum_of_inputs_avx2(const bf16* inputs, int64_t count) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  Vec sum = splat(0);
  for (int64_t i = 0; i < count; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(inputs + i));
    sum = add(sum, {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)), _mm256_castsi256_ps(_mm256_and_si256(bits, upper))});
  }
  return sum_of(sum);
}

// Few rows read one group after the other, as one stream.
void gemm_expanded_avx2(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c) {
  const int step = m > kFewRows ? groups : 1;
  with_blocks(weights.format, [&](auto block) {
    for (int g = 0; g < groups; g += step)
      multiply<decltype(block)>(a, m, weights.from_group(g, k), k, step, c + g * kGroup);
  });
}

}  // namespace baton
