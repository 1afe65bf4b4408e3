// Packing, the choice of the kernel, and the entry point for a single product.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "isa.h"

#if defined(__x86_64__)

namespace baton {

Gemm gemm_for() {
  switch (current_isa()) {
    case kAmx: return gemm_amx;
    case kAvx512: return gemm_avx512;
    default: return gemm_avx2;
  }
}

const bf16* bfloat16_of(Weights weights, int64_t count) {
  if (weights.scales == nullptr) return static_cast<const bf16*>(weights.pack);
  struct Freed {
    void operator()(bf16* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<bf16, Freed> memory;
  static thread_local int64_t room = 0;
  if (room < count) {
    room = (count + 31) / 32 * 32;
    memory.reset(static_cast<bf16*>(std::aligned_alloc(64, room * sizeof(bf16))));
  }
  (current_isa() >= kAvx512 ? widen_avx512 : widen_avx2)(static_cast<const int8_t*>(weights.pack), count, memory.get());
  return memory.get();
}

void scale_columns(float* c, int64_t ldc, int rows, int64_t columns, const float* scales) {
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) c[r * ldc + i] *= scales[i];
}

}  // namespace baton

using baton::bf16;
using baton::kGroup;

extern "C" {

// Packs the outputs of a row-major [n, k] weight into group `group` of `pack` and every `step`-th group after it.
// Missing outputs of the last group are zero.
void baton_pack(const bf16* weight, int64_t n, int64_t k, bf16* pack, int64_t group, int64_t step, int threads) {
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split((n + kGroup - 1) / kGroup, first, last);
    for (int64_t g = first; g < last; ++g) {
      bf16* to = pack + (group + g * step) * kGroup * k;
      for (int64_t i = 0; i < k; i += 2)
        for (int o = 0; o < kGroup; ++o, to += 2) {
          const int64_t output = g * kGroup + o;
          if (output < n) std::memcpy(to, weight + output * k + i, 2 * sizeof(bf16));
          else std::memset(to, 0, 2 * sizeof(bf16));
        }
    }
  };
  baton::parallel(threads, body);
}

// The same, rounded to int8: each output of the weight is at most 127 times its factor in `scales`, [outputs].
void baton_pack_int8(const bf16* weight, int64_t n, int64_t k, int8_t* pack, float* scales, int64_t group, int64_t step,
                     int threads) {
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split((n + kGroup - 1) / kGroup, first, last);
    for (int64_t g = first; g < last; ++g) {
      const int64_t at = group + g * step;
      int8_t* to = pack + at * kGroup * k;
      for (int o = 0; o < kGroup; ++o) {
        const int64_t output = g * kGroup + o;
        float most = 0;
        for (int64_t i = 0; output < n && i < k; ++i)
          most = std::max(most, std::fabs(baton::to_float(weight[output * k + i])));
        float scale = most / 127.0f;
        if (!(scale > 0)) scale = 1.0f;  // all zero, or so small that the factor would be
        scales[at * kGroup + o] = scale;
        for (int64_t i = 0; i < k; ++i)
          to[i / 2 * 32 + o * 2 + i % 2] =
              output < n ? static_cast<int8_t>(std::lrint(baton::to_float(weight[output * k + i]) / scale)) : 0;
      }
    }
  };
  baton::parallel(threads, body);
}

// out[m, n] (float32) = a[m, k] * pack + bias. `scales`: of a pack of int8, or null; bias may be null.
void baton_linear(const bf16* a, int64_t lda, int64_t m, const void* pack, const float* scales, int64_t k, int64_t n,
                  const float* bias, float* out, int threads) {
  auto body = [&](baton::Team& team) {
    auto store = [&](const float* c, int64_t ldc, int64_t row, int rows, int64_t group, int groups) {
      const int64_t from = group * kGroup, count = std::min<int64_t>(groups * kGroup, n - from);
      for (int r = 0; r < rows; ++r) {
        float* to = out + (row + r) * n + from;
        std::memcpy(to, c + r * ldc, count * sizeof(float));
        if (bias != nullptr)
          for (int64_t i = 0; i < count; ++i) to[i] += bias[from + i];
      }
    };
    baton::matmul(team, {a, lda, false}, m, {pack, scales}, k, (n + kGroup - 1) / kGroup, store);
  };
  baton::parallel(threads, body);
}
}

#endif
