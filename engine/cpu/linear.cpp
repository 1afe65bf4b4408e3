// Packing, the choice of the kernel, and the entry point for a single product.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__)

namespace baton {

Gemm gemm_for() {
  switch (current_isa()) {
    case kAmx: return gemm_amx;
    case kBf16: return gemm_bf16;
    case kAvx512: return gemm_avx512;
    default: return gemm_avx2;
  }
}

GemmExpanded gemm_expanded_for() {
  switch (current_isa()) {
    case kAmx:
    case kBf16: return gemm_expanded_bf16;
    case kAvx512: return gemm_expanded_avx512;
    default: return gemm_expanded_avx2;
  }
}

Input tiled_together(Team& team, Input a, int64_t m, int64_t k, bf16* memory) {
  const Tiling tiling{m, k};
  int64_t first, last;
  team.split(m, first, last);
  for (int64_t r = first; r < last; ++r)
    for (int64_t input = 0; input < k; input += 32)
      std::memcpy(memory + tiling.place(r, input), a.data + r * a.stride + input, 32 * sizeof(bf16));
  team.barrier();
  return {memory, k, true};
}

namespace {

// A single product, outside a fused decoder.
struct Product {
  const bf16* a;
  int64_t lda, m;
  Weights weights;
  int64_t k, n;
  const float* bias;
  int threads;

  template <typename T>
  void into(T* out) const {
    const bool many = m > kFewRows, round = many && weights.format == kInt8Pack;
    const bool tile = many && weights.format == kBFloat16Pack && current_isa() >= kAmx;
    char* memory = round ? working_memory(Int8Rows::bytes(m, k)) : tile ? working_memory(m * k * sizeof(bf16)) : nullptr;
    auto body = [&](Team& team) {
      auto store = [&](const float* c, int64_t ldc, int64_t row, int rows, int64_t group, int groups) {
        const int64_t from = group * kGroup, count = std::min<int64_t>(groups * kGroup, n - from);
        for (int r = 0; r < rows; ++r) store_row(c + r * ldc, from, count, out + (row + r) * n + from);
      };
      Input input{a, lda, false};
      if (round) input.rounded = rounded_together(team, input, m, k, memory);
      if (tile) input = tiled_together(team, input, m, k, reinterpret_cast<bf16*>(memory));
      matmul(team, input, m, weights, k, (n + kGroup - 1) / kGroup, store);
    };
    parallel(threads, body);
  }

 private:
  template <typename T>
  void store_row(const float* c, int64_t from, int64_t count, T* to) const {
    if (bias == nullptr)
      for (int64_t i = 0; i < count; ++i) store_float(to[i], c[i]);
    else
      for (int64_t i = 0; i < count; ++i) store_float(to[i], c[i] + bias[from + i]);
  }
};

}  // namespace
}  // namespace baton

using baton::bf16;
using baton::kGroup;

namespace {
constexpr int64_t kUnpackedAlone = 32 << 10;  // weights that one thread copies sooner than another is woken
}  // namespace

extern "C" {

int64_t baton_group_bytes(int format, int64_t k) { return baton::group_bytes(static_cast<baton::PackFormat>(format), k); }

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

// Copies outputs of a pack, [count, k]; weights of int8 are rounded to bfloat16. Not for packs in a checkpoint's format.
void baton_unpack(const baton::Weights* weights, int64_t k, const int64_t* outputs, int64_t count, bf16* out, int threads) {
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split(count, first, last);
    for (int64_t i = first; i < last; ++i) {
      const int64_t o = outputs[i] % kGroup;
      const baton::Weights group = weights->from_group(outputs[i] / kGroup, k);
      const uint8_t* bytes = static_cast<const uint8_t*>(group.pack);
      if (group.format == baton::kInt8Pack) {
        baton::unpack_int8(bytes, k, o, group.scales[o], out + i * k);
      } else if (group.format == baton::kCodedPack) {
        baton::unpack_coded(bytes, k, o, out + i * k);
      } else {
        const bf16* pairs = static_cast<const bf16*>(group.pack) + 2 * o;
        for (int64_t d = 0; d < k; d += 2) std::memcpy(out + i * k + d, pairs + d * kGroup, 2 * sizeof(bf16));
      }
    }
  };
  baton::parallel(baton::threads_worth(threads, count, count * k, kUnpackedAlone), body);
}

// out[m, n] = a[m, k] * weights + bias, in float32 or, if `rounded`, in bfloat16. `bias` may be null.
void baton_linear(const bf16* a, int64_t lda, int64_t m, const baton::Weights* weights, int64_t k, int64_t n,
                  const float* bias, void* out, int rounded, int threads) {
  const baton::Product product{a, lda, m, *weights, k, n, bias, threads};
  if (rounded) product.into(static_cast<bf16*>(out));
  else product.into(static_cast<float*>(out));
}
}

#endif
