// A mixture of experts: the arguments of one call. A plain C struct, mirrored by a ctypes.Structure in experts.py.
#pragma once
#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace baton::experts {

constexpr int64_t kUnitsOfTask = 8;  // 32 outputs each, with gates. A task reads one stream of about a megabyte

// All experts of a layer, one after the other in each pack. In gate_up, groups of 16 gates and of 16 ups alternate, so
// that a unit of a product holds the ups of its gates. Experts without gates have ups alone.
struct Call {
  const bf16* x;            // [tokens, hidden]
  int64_t x_stride;         // elements from one token to the next
  const int64_t* chosen;    // [tokens, chosen_count] expert numbers, different in a row
  const float* factors;     // [tokens, chosen_count]
  bf16* out;                // [tokens, hidden]: the sum over the chosen experts, each times its factor
  bf16* rows;               // scratch [pairs, hidden]; a pair is a token and one of its experts
  bf16* activated;          // scratch [pairs, inner]
  float* sums;              // scratch [tokens, hidden]
  Weights gate_up;          // [experts x 2 x inner, hidden], without gates [experts x inner, hidden]
  Weights down;             // [experts x hidden, inner]
  const float* gate_up_bias;  // [experts, 2 x inner] in the order of the pack, or null
  const float* down_bias;     // [experts, hidden], or null
  int64_t tokens;
  int32_t chosen_count;
  int32_t experts;
  int32_t hidden;
  int32_t inner;
  int32_t has_gates;  // else an up u becomes max(u, 0)^2
  // A gate g and an up u become g / (1 + e^(-sharpness (g + cubic g^3))) (u + offset), both bounded first. With a cubic
  // part this is GELU by tanh, as 1 + tanh(x) = 2 / (1 + e^(-2x)).
  float sharpness;
  float cubic;
  float offset;
  float limit;  // g <= limit, |u| <= limit; infinity: no bound
  int32_t threads;
};

using Run = void (*)(const Call& call);
#if defined(__x86_64__)
extern const Run experts_avx2;
extern const Run experts_avx512;
#endif

}  // namespace baton::experts
