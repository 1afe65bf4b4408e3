#define BATON_GEMM_EXPANDED gemm_expanded_avx512
#include "linear_expanded_avx512.h"

namespace baton {

float sum_of_inputs_avx512(const bf16* inputs, int64_t count) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  Vec even = splat(0), odd = splat(0);
  for (int64_t i = 0; i < count; i += 32) {
    const __m512i bits = _mm512_loadu_si512(inputs + i);
    even = add(even, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
    odd = add(odd, _mm512_castsi512_ps(_mm512_and_si512(bits, upper)));
  }
  return sum_of(add(even, odd));
}

}  // namespace baton
