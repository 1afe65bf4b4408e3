// Packs bfloat16 weights of which a checkpoint stored 8 or 4 bits.
#include "linear_expanded.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kv_format.h"
#include "linear.h"

#if defined(__x86_64__)

namespace baton {
namespace {

constexpr uint8_t kNaN = 0x7f;   // of e4m3; a pack has none
constexpr int kMaxPower = 100;  // of MXFP4, so that numbers stay normal in bfloat16

bool same(float x, bf16 weight) {
  bf16 rounded;
  store_float(rounded, x);
  return rounded.bits == weight.bits;
}

// The outputs that a team packs: groups of 16, and where they go.
struct Outputs {
  const bf16* weight;  // [n, k], row-major
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

// The codes of an output whose weights are a number of e4m3 times the scale of their block of inputs, rounded to bfloat16.
bool put_fp8(const bf16* weights, int64_t k, const float* scales, int o, uint8_t* group) {
  bool exact = true;
  for (int64_t i = 0; i < k; ++i) {
    const float scale = scales[i / kBlockInputs];
    uint8_t* block = group + i / kBlockInputs * kFp8BlockBytes;
    std::memcpy(block + kBlockCodes + o * sizeof(float), &scale, sizeof scale);
    const uint8_t code = format::E4M3::encode(scale == 0 ? to_float(weights[i]) : to_float(weights[i]) / scale);
    block[Place::of(i % kBlockInputs, o, false).byte] = code;
    exact = exact && (code & 0x7f) != kNaN && same(format::kFromE4M3[code] * scale, weights[i]);
  }
  return exact;
}

// The codes of an output whose weights are, 32 by 32, numbers of e2m1 times a power of two. The largest becomes 4 or 6: if a
// smaller power fits, this one does, too.
bool put_mxfp4(const bf16* weights, int64_t k, int o, uint8_t* group) {
  bool exact = true;
  for (int64_t first = 0; first < k; first += kPowerInputs) {
    float most = 0;
    for (int64_t i = first; i < first + kPowerInputs; ++i) most = std::max(most, std::fabs(to_float(weights[i])));
    const int power = most > 0 ? std::ilogb(most) - 2 : 0;
    if (power < -kMaxPower || power > kMaxPower) return false;
    uint8_t* block = group + first / kBlockInputs * kMxfp4BlockBytes;
    block[kBlockCodes / 2 + first % kBlockInputs / kPowerInputs * 16 + o] = static_cast<uint8_t>(power);
    for (int64_t i = first; i < first + kPowerInputs; ++i) {
      const uint32_t code = format::encode_e2m1(std::ldexp(to_float(weights[i]), -power), 1.0f);
      const Place place = Place::of(i % kBlockInputs, o, true);
      block[place.byte] |= static_cast<uint8_t>(place.upper ? code << 4 : code);
      exact = exact && same(std::ldexp(format::kFromE2M1[code], power), weights[i]);
    }
  }
  return exact;
}

}  // namespace
}  // namespace baton

extern "C" {

// Packs the outputs of a row-major [n, k] weight into group `group` of `pack` and every `step`-th group after it.
// Returns 1 if the weights are, bit for bit, numbers of e4m3 times the scales [n, blocks of k], rounded to bfloat16;
// else 0, and the pack must not be used.
int baton_pack_fp8(const baton::bf16* weight, int64_t n, int64_t k, uint8_t* pack, const float* scales, int64_t group,
                   int64_t step, int threads) {
  auto put = [&](int64_t output, int o, uint8_t* to) {
    return baton::put_fp8(weight + output * k, k, scales + output * baton::blocks_of(k), o, to);
  };
  return baton::pack_outputs({weight, n, k, pack, group, step}, baton::kFp8Pack, threads, put);
}

// The same if they are numbers of MXFP4. k is a multiple of 32.
int baton_pack_mxfp4(const baton::bf16* weight, int64_t n, int64_t k, uint8_t* pack, int64_t group, int64_t step,
                     int threads) {
  auto put = [&](int64_t output, int o, uint8_t* to) { return baton::put_mxfp4(weight + output * k, k, o, to); };
  return baton::pack_outputs({weight, n, k, pack, group, step}, baton::kMxfp4Pack, threads, put);
}
}

#endif
