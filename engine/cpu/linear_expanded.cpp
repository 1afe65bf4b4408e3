// Packs weights of 8 and 4 bits, as a checkpoint stores them, and adds up inputs.
#include "linear_expanded.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "isa.h"
#include "linear.h"

#if defined(__x86_64__)

namespace baton {
namespace {

constexpr uint8_t kNaN = 0x7f;   // of e4m3; a pack has none
constexpr int kPowerBias = 127;  // of E8M0
constexpr int kMaxPower = 100;  // of MXFP4, so that numbers stay normal in bfloat16

// The outputs that a team packs: groups of 16, and where they go.
struct Outputs {
  int64_t n, k;
  uint8_t* pack;
  int64_t group, step;  // of the pack: the first group, and how far the next one is
};

// Calls put(output, its place in the group, its group in the pack) for each output. Returns whether each call did.
template <typename Put>
bool pack_outputs(const Outputs& outputs, PackFormat format, int threads, Put put) {
  std::atomic<bool> all{true};
  const int64_t bytes = group_bytes(format, outputs.k);
  auto body = [&](Team& team) {
    int64_t first, last;
    team.split((outputs.n + kGroup - 1) / kGroup, first, last);
    for (int64_t g = first; g < last; ++g) {
      uint8_t* to = outputs.pack + (outputs.group + g * outputs.step) * bytes;
      std::memset(to, 0, bytes);
      for (int64_t o = 0; o < std::min<int64_t>(kGroup, outputs.n - g * kGroup); ++o)
        if (!put(g * kGroup + o, static_cast<int>(o), to)) all.store(false, std::memory_order_relaxed);
    }
  };
  parallel(threads, body);
  return all.load();
}

// The codes [k] of an output, and the scales of its blocks.
bool put_fp8(const uint8_t* codes, int64_t k, const float* scales, int o, uint8_t* group) {
  bool known = true;
  for (int64_t i = 0; i < k; ++i) {
    uint8_t* block = group + i / kBlockInputs * kFp8BlockBytes;
    block[Place::of(i % kBlockInputs, o, false).byte] = codes[i];
    known = known && (codes[i] & 0x7f) != kNaN;
  }
  for (int64_t b = 0; b < blocks_of(k); ++b)
    std::memcpy(group + b * kFp8BlockBytes + kBlockCodes + o * sizeof(float), scales + b, sizeof(float));
  return known;
}

// The code of 4 bits of input i of an output. Neighbours share a byte, the first in the lower half.
uint8_t code_of(const uint8_t* codes, int64_t i) { return (i % 2 ? codes[i / 2] >> 4 : codes[i / 2]) & 15; }

// Puts it into a block, whose halves are zero.
void put_code(uint8_t code, int64_t i, int o, uint8_t* block) {
  const Place place = Place::of(i % kBlockInputs, o, true);
  block[place.byte] |= static_cast<uint8_t>(place.upper ? code << 4 : code);
}

// The codes [k / 2] of an output, and the powers of two [k / 32].
bool put_mxfp4(const uint8_t* codes, int64_t k, const uint8_t* powers, int o, uint8_t* group) {
  bool known = true;
  for (int64_t first = 0; first < k; first += kPowerInputs, ++powers) {
    uint8_t* block = group + first / kBlockInputs * kMxfp4BlockBytes;
    uint8_t some = 0;
    for (int64_t i = first; i < first + kPowerInputs; ++i) {
      const uint8_t code = code_of(codes, i);
      put_code(code, i, o, block);
      some |= code & 7;
    }
    const int power = some ? *powers - kPowerBias : 0;  // of zeros the power may be any
    known = known && power >= -kMaxPower && power <= kMaxPower;
    block[kBlockCodes / 2 + first % kBlockInputs / kPowerInputs * 16 + o] = static_cast<uint8_t>(power);
  }
  return known;
}

// The codes [k / 2] of an output, the scales [k / 16], and a factor.
bool put_nvfp4(const uint8_t* codes, int64_t k, const uint8_t* scales, float factor, int o, uint8_t* group) {
  bool known = true;
  for (int64_t i = 0; i < k; ++i) put_code(code_of(codes, i), i, o, group + i / kBlockInputs * kNvfp4BlockBytes);
  for (int64_t i = 0; i < k; i += kNvfp4Inputs) {
    uint8_t* after_codes = group + i / kBlockInputs * kNvfp4BlockBytes + kBlockCodes / 2;
    const uint8_t scale = scales[i / kNvfp4Inputs];
    after_codes[i % kBlockInputs / kNvfp4Inputs * 16 + o] = scale;
    std::memcpy(after_codes + kBlockInputs + o * sizeof(float), &factor, sizeof(float));
    known = known && (scale & 0x7f) != kNaN;
  }
  return known;
}

// The codes [k / 2] of an output; the factors and zero points of each `inputs` of them.
bool put_int4(const uint8_t* codes, int64_t k, const float* factors, const uint8_t* zeros, int64_t inputs, int o,
              uint8_t* group) {
  const int64_t bytes = int4_block_bytes(static_cast<int>(inputs)), parts = kBlockInputs / inputs;
  for (int64_t i = 0; i < k; ++i) put_code(code_of(codes, i), i, o, group + i / kBlockInputs * bytes);
  for (int64_t i = 0; i * inputs < k; ++i) {
    uint8_t* after_codes = group + i / parts * bytes + kBlockCodes / 2;
    std::memcpy(after_codes + (i % parts * 16 + o) * sizeof(float), factors + i, sizeof(float));
    after_codes[parts * 16 * sizeof(float) + i % parts * 16 + o] = zeros[i];
  }
  return true;
}

}  // namespace

InputSums input_sums(const Input& a, int64_t m, int64_t k, PackFormat format) {
  if (format != kInt4By128Pack && format != kInt4By32Pack) return {};
  const int64_t inputs = format == kInt4By128Pack ? 128 : 32, count = (k + inputs - 1) / inputs;
  const auto sum_of = current_isa() >= kAvx512 ? sum_of_inputs_avx512 : sum_of_inputs_avx2;
  float* sums = reinterpret_cast<float*>(working_memory(m * count * sizeof(float)));
  for (int64_t row = 0; row < m; ++row)
    for (int64_t i = 0; i < k; i += inputs)
      sums[row * count + i / inputs] = sum_of(a.data + row * a.stride + i, std::min(inputs, k - i));
  return {sums, count};
}

}  // namespace baton

extern "C" {

// Packs n outputs of k codes of e4m3 each, `stride` bytes apart, with their scales [n, blocks of k], into group `group` of
// `pack` and every `step`-th group after it. Returns 0 if there is a NaN: then the pack must not be used.
int baton_pack_fp8(const uint8_t* codes, int64_t stride, const float* scales, int64_t n, int64_t k, uint8_t* pack,
                   int64_t group, int64_t step, int threads) {
  auto put = [&](int64_t output, int o, uint8_t* to) {
    return baton::put_fp8(codes + output * stride, k, scales + output * baton::blocks_of(k), o, to);
  };
  return baton::pack_outputs({n, k, pack, group, step}, baton::kFp8Pack, threads, put);
}

// The same of pairs of e2m1, the first in the lower half, and of the E8M0 powers of 32 inputs. k is a multiple of 32. Returns 0
// if a power is NaN or too large.
int baton_pack_mxfp4(const uint8_t* codes, int64_t stride, const uint8_t* powers, int64_t powers_stride, int64_t n,
                     int64_t k, uint8_t* pack, int64_t group, int64_t step, int threads) {
  auto put = [&](int64_t output, int o, uint8_t* to) {
    return baton::put_mxfp4(codes + output * stride, k, powers + output * powers_stride, o, to);
  };
  return baton::pack_outputs({n, k, pack, group, step}, baton::kMxfp4Pack, threads, put);
}

// The same of pairs of e2m1, with the e4m3 scales of 16 inputs, and a factor. k is a multiple of 16. Returns 0 if a scale is
// NaN.
int baton_pack_nvfp4(const uint8_t* codes, int64_t stride, const uint8_t* scales, int64_t scales_stride, float factor,
                     int64_t n, int64_t k, uint8_t* pack, int64_t group, int64_t step, int threads) {
  auto put = [&](int64_t output, int o, uint8_t* to) {
    return baton::put_nvfp4(codes + output * stride, k, scales + output * scales_stride, factor, o, to);
  };
  return baton::pack_outputs({n, k, pack, group, step}, baton::kNvfp4Pack, threads, put);
}

// The same of pairs of int4, with factors and zero points [n, k / inputs, rounded up]; `inputs` is 128 or 32.
int baton_pack_int4(const uint8_t* codes, int64_t stride, const float* factors, const uint8_t* zeros, int64_t inputs, int64_t n,
                    int64_t k, uint8_t* pack, int64_t group, int64_t step, int threads) {
  const int64_t count = (k + inputs - 1) / inputs;
  auto put = [&](int64_t output, int o, uint8_t* to) {
    return baton::put_int4(codes + output * stride, k, factors + output * count, zeros + output * count, inputs, o, to);
  };
  const baton::PackFormat format = inputs == 128 ? baton::kInt4By128Pack : baton::kInt4By32Pack;
  return baton::pack_outputs({n, k, pack, group, step}, format, threads, put);
}
}

#endif
