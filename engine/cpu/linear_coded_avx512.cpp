#define BATON_GEMM_CODED gemm_coded_avx512
#include "linear_coded_avx512.h"

namespace baton {

void decode_group_avx512(const uint8_t* group, int64_t k, bf16* lines) {
  for (int64_t i = 0; i < k; i += kBlockInputs, group += kCodedBlockBytes)
    decode(group, static_cast<int>(std::min<int64_t>(kBlockInputs, k - i)), lines + i * kGroup);
}

}  // namespace baton
