// A causal convolution over each channel by itself, with SiLU, one token after the other, for the layers that keep its last
// inputs as a state. Include vector_avx512.h or vector_avx2.h first.
#pragma once
#include "exponential.h"
#include "numeric.h"

namespace baton {

constexpr int kMaxTaps = 8;

// Of one layer. A slot of its states is bfloat16 [channels, taps], the last inputs.
struct Convolution {
  char* states;
  int64_t slot_bytes;
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels], or null
  int64_t channels;
  int taps;  // at most kMaxTaps
};

namespace {

// The last inputs of `count` channels, at most `kMax`, and their outputs.
template <int kMax>
class Inputs {
 public:
  Inputs(const Convolution& convolution, int64_t channel, int count) : c_(convolution), channel_(channel), count_(count) {}

  // Those before the first token: of `slot`, or none if the sequence begins here (slot < 0).
  void begin(int64_t slot) {
    oldest_ = 0;
    const bf16* state = slot < 0 ? nullptr : in_slot(slot);
    for (int tap = 0; tap < c_.taps; ++tap)
      for (int i = 0; i < count_; ++i) rows_[tap][i] = state == nullptr ? 0.0f : to_float(state[i * c_.taps + tap]);
  }

  void append(const bf16* input, float* outputs) {
    for (int i = 0; i < count_; ++i) rows_[oldest_][i] = to_float(input[i]);
    oldest_ = (oldest_ + 1) % c_.taps;
    for (int i = 0; i < count_; i += 16) {
      Vec sum = c_.bias == nullptr ? splat(0) : load(c_.bias + channel_ + i);
      for (int tap = 0; tap < c_.taps; ++tap)
        sum = mul_add(load(row(tap) + i), load(c_.weight + tap * c_.channels + channel_ + i), sum);
      store(outputs + i, silu(sum));
    }
  }

  void end(int64_t slot) const {
    bf16* state = in_slot(slot);
    for (int tap = 0; tap < c_.taps; ++tap)
      for (int i = 0; i < count_; ++i) store_float(state[i * c_.taps + tap], row(tap)[i]);
  }

 private:
  const float* row(int tap) const { return rows_[(oldest_ + tap) % c_.taps]; }
  bf16* in_slot(int64_t slot) const { return reinterpret_cast<bf16*>(c_.states + slot * c_.slot_bytes) + channel_ * c_.taps; }

  const Convolution& c_;
  const int64_t channel_;
  const int count_;
  int oldest_ = 0;
  float rows_[kMaxTaps][kMax];
};

}  // namespace
}  // namespace baton
