// Decodes packs of coded bfloat16 with AVX2.
#include <immintrin.h>

#include <algorithm>

#include "linear.h"

namespace baton {

void decode_group_avx2(const uint8_t* group, int64_t k, bf16* lines) {
  const __m256i half = _mm256_set1_epi8(15);
  for (; k > 0; k -= kBlockInputs, group += kCodedBlockBytes, lines += kBlockCodes) {
    const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(group)));
    const uint8_t* step = group + kCodedHeader;
    bf16* to = lines;
    for (int64_t i = 0; i < std::min<int64_t>(k, kBlockInputs); i += kStepInputs, step += kCodedStep)
      for (int part = 0; part < 64; part += 32, to += 16) {
        const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(step + part));
        const __m256i codes[] = {_mm256_and_si256(both, half), _mm256_and_si256(_mm256_srli_epi16(both, 4), half)};
        bf16* to = lines + i * kGroup + part / 2;
        for (int upper = 0; upper < 2; ++upper, to += 64) {
          const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(step + 64 + 64 * upper + part));
          const __m256i high = _mm256_shuffle_epi8(high_bytes, codes[upper]);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi8(low, high));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_unpackhi_epi8(low, high));
        }
      }
    Patches::of(group).apply(lines);
  }
}

}  // namespace baton
