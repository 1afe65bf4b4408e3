// Tokens of a gated delta net (arXiv 2412.06464), or of Kimi's delta attention (arXiv 2510.26692): convolution, recurrence
// and gated norm, one token after the other. A plain C struct, mirrored by a ctypes.Structure in delta_net.py.
#pragma once
#include <cstdint>

#include "numeric.h"
#include "pool.h"

namespace baton::delta_net {

// Where the heads of one input lie. A key head has one query and one key; it has `ratio` values, gates, ...
struct Heads {
  const bf16* data;
  int64_t token;  // elements from one token to the next
  int64_t head;   // elements from one key head to the next
};

struct Call {
  Heads q, k, v, z, b, a;
  // Row r is a sequence with the tokens [r * length, (r + 1) * length). States: it reads slot reads[r], unless reads is null: all
  // begin here; and writes slot writes[r]. They may be the same. Strides count bytes.
  char* conv;       // bfloat16 [slots, channels, taps], the last inputs: queries, then keys, then values
  char* recurrent;  // float32 [slots, key_heads x ratio, key_dim, value_dim]
  int64_t conv_slot, recurrent_slot;
  const int64_t* reads;
  const int64_t* writes;
  const float* conv_weight;  // [taps, channels]
  const float* rate;         // [key_heads x ratio] -e^A_log
  const float* dt_bias;      // [key_heads x ratio x decays]
  const float* norm;         // [value_dim]
  bf16* out;                 // [rows x length, key_heads x ratio x value_dim]
  int64_t rows;
  int64_t length;     // tokens of a row
  int32_t key_heads;
  int32_t ratio;
  int32_t key_dim;    // a multiple of 16, at most kMaxDim
  int32_t value_dim;  // the same
  int32_t taps;       // inputs of the convolution, at most kMaxTaps (convolution.h)
  int32_t decays;     // of each head: 1, or key_dim where each of its channels has its own (Kimi)
  int32_t is_silu;    // the gate of the result; else a sigmoid
  float bound;        // 0, or the least logarithm of a channel's decay, where it is that times a sigmoid (Ling)
  float rates;        // what the sigmoid of b is multiplied by: 1, or 2 (OLMo Hybrid)
  float eps;          // of the norm
  int32_t threads;
};

constexpr int kMaxDim = 256;

using Run = void (*)(const Call& call);
#if defined(__x86_64__)
extern const Run delta_net_avx2;
extern const Run delta_net_avx512;
#endif

}  // namespace baton::delta_net
