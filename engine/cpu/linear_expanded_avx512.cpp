// Packs of fp8 and MXFP4 with AVX-512.
#include "vector_avx512.h"

#include "linear_expanded.h"

namespace baton {
namespace {

inline __m512i table(const uint8_t* bytes) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Lower and upper bytes apart, 64 codes at a time. Moved to the places of bfloat16's bits, an exponent lacks 120, the
// difference of the biases; the numbers without an exponent are looked up.
inline void expand_fp8(const uint8_t* codes, bf16* lines) {
  const __m512i low_bytes = table(kTinyLowBytes), high_bytes = table(kTinyHighBytes);
  for (int i = 0; i < kBlockCodes; i += 64) {
    __builtin_prefetch(codes + i + kExpandAhead);
    const __m512i code = _mm512_loadu_si512(codes + i), size = _mm512_and_si512(code, _mm512_set1_epi8(0x7f));
    const __mmask64 tiny = _mm512_cmplt_epu8_mask(size, _mm512_set1_epi8(8));
    __m512i low = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi8(static_cast<char>(0xf0)));
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi8(7));
    high = _mm512_add_epi8(high, _mm512_set1_epi8(120 / 2));
    low = _mm512_mask_shuffle_epi8(low, tiny, low_bytes, size);
    high = _mm512_mask_shuffle_epi8(high, tiny, high_bytes, size);
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(0x7f), 0xf4);  // high | (code & ~0x7f)
    _mm512_storeu_si512(lines + i, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(lines + i + 32, _mm512_unpackhi_epi8(low, high));
  }
}

// A number of MXFP4 is found in two tables, of the lower and of the upper bytes of bfloat16, by its code. Then the power of
// two is added to its exponent, unless it is 0.
inline void expand_mxfp4(const uint8_t* codes, const int8_t* powers, bf16* lines) {
  const __m512i low_bytes = table(kMxfp4LowBytes), high_bytes = table(kMxfp4HighBytes);
  const __m512i half = _mm512_set1_epi8(15), size = _mm512_set1_epi16(0x7fff);
  for (int i = 0; i < kBlockInputs; i += kPowerInputs, powers += 16) {
    const __m512i of_outputs = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(powers)));
    const __m512i power = _mm512_or_si512(_mm512_slli_epi32(of_outputs, 23),  // of both numbers of an output in a line
                                          _mm512_and_si512(_mm512_slli_epi32(of_outputs, 7), _mm512_set1_epi32(0xffff)));
    for (int k = 0; k < kPowerInputs; k += 8, codes += 64, lines += 4 * 32) {
      __builtin_prefetch(codes + kExpandAhead);
      const __m512i both = _mm512_loadu_si512(codes);
      const __m512i lower = _mm512_and_si512(both, half), upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
      const __m512i a = _mm512_shuffle_epi8(low_bytes, lower), b = _mm512_shuffle_epi8(high_bytes, lower);
      const __m512i c = _mm512_shuffle_epi8(low_bytes, upper), d = _mm512_shuffle_epi8(high_bytes, upper);
      const __m512i four[] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b), _mm512_unpacklo_epi8(c, d),
                              _mm512_unpackhi_epi8(c, d)};
      for (int line = 0; line < 4; ++line)
        _mm512_storeu_si512(lines + 32 * line,
                            _mm512_mask_add_epi16(four[line], _mm512_test_epi16_mask(four[line], size), four[line], power));
    }
  }
}

}  // namespace
}  // namespace baton

#define BATON_GEMM_EXPANDED gemm_expanded_avx512
#include "linear_expanded_item.h"
