// Packs of int8, rounded rows, and the choice of the kernel.
#include "linear_int8.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "isa.h"
#include "linear.h"

#if defined(__x86_64__)

namespace baton {

GemmInt8 gemm_int8_for(int64_t rows) {
  switch (current_isa()) {
    case kAmx: return rows > kFewRows ? gemm_int8_amx : gemm_int8_avx512;
    case kBf16:
    case kAvx512: return gemm_int8_avx512;
    default: return gemm_int8_avx2;
  }
}

void Int8Rows::put(int64_t row, const bf16* from) const {
  const int64_t first = row / kRowBlock * kRowBlock;
  const Int8Block whole = block(first);
  const int64_t r = row - first, step = whole.rows * kTileInputs, padded = padded_inputs(k_);
  int8_t* values = const_cast<int8_t*>(whole.values) + r * kTileInputs;
  float* scales = const_cast<float*>(whole.scales) + r;
  int32_t* starts = const_cast<int32_t*>(whole.starts) + r;
  const Round round = current_isa() >= kAvx512 ? round_avx512 : round_avx2;
  if (padded > k_) std::memset(values + (padded / kTileInputs - 1) * step, 0, kTileInputs);
  for (int64_t i = 0; i < k_; i += kScaleInputs, scales += whole.rows, starts += whole.rows) {
    int32_t sum;
    *scales = round(from + i, std::min<int64_t>(kScaleInputs, k_ - i), values + i / kTileInputs * step, step, sum);
    *starts = -128 * sum;
  }
}

char* working_memory(int64_t bytes) {
  struct Freed {
    void operator()(char* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<char, Freed> memory;
  static thread_local int64_t room = 0;
  if (room < bytes) {
    room = (bytes + 63) / 64 * 64;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, room)));
  }
  return memory.get();
}

Int8Rows rounded_here(Input a, int64_t m, int64_t k) {
  const Int8Rows rows(working_memory(Int8Rows::bytes(m, k)), m, k);
  for (int64_t r = 0; r < m; ++r) rows.put(r, a.data + r * a.stride);
  return rows;
}

Int8Rows rounded_together(Team& team, Input a, int64_t m, int64_t k, char* memory) {
  const Int8Rows rows(memory, m, k);
  int64_t first, last;
  team.split(m, first, last);
  for (int64_t r = first; r < last; ++r) rows.put(r, a.data + r * a.stride);
  team.barrier();
  return rows;
}

void scale_columns(float* c, int64_t ldc, int rows, int64_t columns, const float* scales) {
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) c[r * ldc + i] *= scales[i];
}

void unpack_int8(const uint8_t* group, int64_t k, int64_t o, float scale, bf16* to) {
  for (int64_t i = 0; i < k; ++i) store_float(to[i], (group[i / 4 * 64 + o * 4 + i % 4] - 128) * scale);
}

namespace {

// Packs an output [k] as column `o` of a group, and returns its scale; the output is at most 127 times that. If it is not
// finite, neither is the scale.
float pack_output(const bf16* output, int64_t k, int o, uint8_t* group) {
  float most = 0, zero = 0;
  for (int64_t i = 0; i < k; ++i) {
    const float size = std::fabs(to_float(output[i]));
    most = std::max(most, size);
    zero += size * 0.0f;
  }
  if (zero != 0) return zero;
  float scale = most / 127.0f;
  if (!(scale > 0)) scale = 1.0f;  // all zero, or so small that the scale would be
  for (int64_t i = 0; i < k; ++i)
    group[i / 4 * 64 + o * 4 + i % 4] =
        static_cast<uint8_t>(std::lrint(to_float(output[i]) / scale) + 128);
  return scale;
}

}  // namespace
}  // namespace baton

extern "C" {

// Packs the outputs of a row-major [n, k] weight, rounded to int8, into group `group` of `pack` and every `step`-th group
// after it, and their scales into `scales`, [outputs].
void baton_pack_int8(const baton::bf16* weight, int64_t n, int64_t k, uint8_t* pack, float* scales, int64_t group,
                     int64_t step, int threads) {
  const int64_t depth = baton::padded_inputs(k);
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split((n + baton::kGroup - 1) / baton::kGroup, first, last);
    for (int64_t g = first; g < last; ++g) {
      const int64_t at = group + g * step;
      uint8_t* to = pack + at * baton::kGroup * depth;
      std::memset(to, 128, baton::kGroup * depth);
      for (int o = 0; o < baton::kGroup; ++o) {
        const int64_t output = g * baton::kGroup + o;
        scales[at * baton::kGroup + o] =
            output < n ? baton::pack_output(weight + output * k, k, o, to) : 1.0f;
      }
    }
  };
  baton::parallel(threads, body);
}
}

#endif
