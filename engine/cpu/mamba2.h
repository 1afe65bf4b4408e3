// Tokens of a Mamba-2 layer (arXiv 2405.21060): convolution, recurrence and gated norm, one token after the other. A plain C
// struct, mirrored by a ctypes.Structure in mamba2.py.
#pragma once
#include <cstdint>

#include "numeric.h"
#include "pool.h"

namespace baton::mamba2 {

struct Call {
  // What the projection gives: per token `heads x head_dim` gates, then the channels of the convolution (x of all heads, then B,
  // then C of all groups), then a time step for each head.
  const bf16* projected;
  int64_t token;  // elements from one token to the next
  // Row r is a sequence with the tokens [r * length, (r + 1) * length). States: it reads slot reads[r], unless reads is null: all
  // begin here; and writes slot writes[r]. They may be the same. Strides count bytes.
  char* conv;       // bfloat16 [slots, channels, taps], the last inputs
  char* recurrent;  // float32 [slots, heads, head_dim, state_dim]
  int64_t conv_slot, recurrent_slot;
  const int64_t* reads;
  const int64_t* writes;
  const float* conv_weight;  // [taps, channels]
  const float* conv_bias;    // [channels], or null
  const float* rate;         // [heads] -e^A_log
  const float* dt_bias;      // [heads]
  const float* skip;         // [heads] D
  const float* norm;         // [heads x head_dim], or null: the result is gated and not normalised
  float* scratch;            // [kTokensAtOnce, channels + heads x head_dim]
  bf16* out;                 // [rows x length, heads x head_dim]
  int64_t rows;
  int64_t length;  // tokens of a row
  int32_t heads;
  int32_t head_dim;
  int32_t groups;     // heads of a group have the same B and C
  int32_t state_dim;  // a multiple of 16
  int32_t taps;       // inputs of the convolution, at most kMaxTaps (convolution.h)
  int32_t norm_group;  // channels that are normalised together, a multiple of 16
  int32_t gates_first;  // the norm is of what is gated; else it comes before
  float eps;            // of the norm
  int32_t threads;
};

constexpr int kTokensAtOnce = 64;

using Run = void (*)(const Call& call);
#if defined(__x86_64__)
extern const Run mamba2_avx2;
extern const Run mamba2_avx512;
#endif

}  // namespace baton::mamba2
