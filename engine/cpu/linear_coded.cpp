// Packs and unpacks bfloat16 weights whose upper bytes are coded (linear_coded.h), and chooses the functions that read them.
#include "linear_coded.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "isa.h"
#include "linear.h"

#if defined(__x86_64__)

namespace baton {
namespace {

constexpr uint8_t kNoCode = 16;
constexpr int kLineNumbers = 2 * kGroup;

// The 16 upper bytes that a block has most often, and the code of each. Of equally frequent ones, the smaller.
struct Codes {
  uint8_t bytes[16] = {}, code_of[256];

  explicit Codes(const uint16_t* lines) {
    uint16_t counts[256] = {}, others[256] = {}, found[256];  // two, because equal neighbours would wait for each other
    for (int i = 0; i < kBlockCodes; i += 2) ++counts[lines[i] >> 8], ++others[lines[i + 1] >> 8];
    int kinds = 0;
    for (int byte = 0; byte < 256; ++byte)
      if (counts[byte] += others[byte]) found[kinds++] = static_cast<uint16_t>(byte);
    const int kept = std::min(kinds, 16);
    std::partial_sort(found, found + kept, found + kinds, [&](int a, int b) {
      return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
    });
    std::fill_n(code_of, 256, kNoCode);
    for (int code = 0; code < kept; ++code) {
      bytes[code] = static_cast<uint8_t>(found[code]);
      code_of[found[code]] = static_cast<uint8_t>(code);
    }
  }
};

// The place of a number of a line among the 64 codes, or lower bytes, of its two lines.
inline int place_of(int line, int number) { return number / 8 * 16 + line % 2 * 8 + number % 8; }

// Packs the lines of a block. Returns whether there are patches enough.
bool put_block(const uint16_t* lines, uint8_t* block) {
  const Codes codes(lines);
  Patches patches;
  std::memcpy(block, codes.bytes, sizeof codes.bytes);
  std::memset(block + kCodedHeader, 0, kCodedBlockBytes - kCodedHeader);
  for (int line = 0; line < kBlockInputs / 2; ++line) {
    uint8_t* step = block + kCodedHeader + line / 4 * kCodedStep;
    uint8_t* low = step + 64 + line % 4 / 2 * 64;
    for (int number = 0; number < kLineNumbers; ++number) {
      const int at = line * kLineNumbers + number, place = place_of(line, number);
      const uint8_t code = codes.code_of[lines[at] >> 8];
      if (code == kNoCode) {  // stays patched_number()
        if (!patches.add(static_cast<uint16_t>(at), lines[at])) return false;
        continue;
      }
      low[place] = static_cast<uint8_t>(lines[at]);
      step[place] |= static_cast<uint8_t>(code << (line % 4 / 2 * 4));
    }
  }
  std::memcpy(block + sizeof codes.bytes, &patches, sizeof patches);
  return true;
}

// Packs a group of a row-major weight, of `outputs` <= 16.
bool put_group(const uint16_t* weight, int64_t outputs, int64_t k, uint8_t* block) {
  for (int64_t first = 0; first < k; first += kBlockInputs, block += kCodedBlockBytes) {
    uint16_t lines[kBlockCodes] = {};
    for (int64_t o = 0; o < outputs; ++o)
      for (int64_t i = 0; i < std::min<int64_t>(kBlockInputs, k - first); i += 2)
        std::memcpy(lines + i * kGroup + 2 * o, weight + o * k + first + i, 2 * sizeof *lines);
    if (!put_block(lines, block)) return false;
  }
  return true;
}

}  // namespace

void unpack_coded(const uint8_t* group, int64_t k, int64_t o, bf16* to) {
  for (int64_t first = 0; first < k; first += kBlockInputs, group += kCodedBlockBytes) {
    const int inputs = static_cast<int>(std::min<int64_t>(kBlockInputs, k - first));
    for (int i = 0; i < inputs; ++i) {
      const int line = i / 2, place = place_of(line, static_cast<int>(2 * o + i % 2));
      const uint8_t* step = group + kCodedHeader + line / 4 * kCodedStep;
      const uint8_t code = step[place] >> (line % 4 / 2 * 4) & 15;
      to[first + i].bits = static_cast<uint16_t>(group[code] << 8 | step[64 + line % 4 / 2 * 64 + place]);
    }
    for (const auto* patch = Patches::of(group).patches; patch->place != Patches::kNone; ++patch)
      if (patch->output() == o) to[first + patch->input()].bits = patch->bits;
  }
}

GemmCoded gemm_coded_for() {
  switch (current_isa()) {
    case kBf16: return gemm_coded_bf16;
    case kAvx512: return gemm_coded_avx512;
    default: return nullptr;
  }
}

bf16* line_memory(int64_t count) {
  static thread_local std::vector<bf16> memory;
  memory.resize(std::max<size_t>(memory.size(), count + 32));
  return reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

const bf16* decoded(const Weights& weights, int64_t k, int groups) {
  bf16* lines = line_memory(groups * kGroup * k);
  const DecodeGroup decode_group = current_isa() >= kAvx512 ? decode_group_avx512 : decode_group_avx2;
  for (int g = 0; g < groups; ++g)
    decode_group(static_cast<const uint8_t*>(weights.from_group(g, k).pack), k, lines + g * kGroup * k);
  return lines;
}

}  // namespace baton

extern "C" {

// Packs the outputs of a row-major [n, k] weight into group `group` of `pack` and every `step`-th group after it. Returns 0 if
// a block needs more patches than there is room for: then the pack must not be used.
int baton_pack_coded(const uint16_t* weight, int64_t n, int64_t k, uint8_t* pack, int64_t group, int64_t step, int threads) {
  std::atomic<bool> all{true};
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split((n + baton::kGroup - 1) / baton::kGroup, first, last);
    for (int64_t g = first; g < last && all.load(std::memory_order_relaxed); ++g) {
      const int64_t output = g * baton::kGroup;
      uint8_t* to = pack + (group + g * step) * baton::group_bytes(baton::kCodedPack, k);
      if (!baton::put_group(weight + output * k, std::min<int64_t>(baton::kGroup, n - output), k, to))
        all.store(false, std::memory_order_relaxed);
    }
  };
  baton::parallel(threads, body);
  return all.load();
}
}

#endif
