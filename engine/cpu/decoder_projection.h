// The heads of q, k and v from a decoder's hidden states: products, then bias, norm and rotation of each head. Include
// vector_avx512.h or vector_avx2.h first; everything has internal linkage, because it is compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>

#include "decoder.h"
#include "decoder_memory.h"
#include "decoder_residual.h"
#include "decoder_rows.h"
#include "linear.h"

namespace baton {
namespace {

using HeadRange = std::pair<int, int>;  // [first, last) of the heads of q, k and v, in the order of the pack

class Projection {
 public:
  Projection(const DecoderCall& call, const Buffers& buffers, const Residual& residual)
      : call_(call), buffers_(buffers), residual_(residual), few_(call.tokens <= kFewRows) {}

  // Some heads of all tokens to the left side of attention, [tokens, heads.all(), dim]; then a barrier.
  void run(Team& team, const LayerWeights& weights, const bf16* normed, HeadRange range, Clock& clock) const {
    const Heads heads(call_, weights);
    const Input input = residual_.input(team, normed, call_.hidden);
    if (few_) {
      project_together(team, weights, heads, input, range);
      clock.mark(kQkv);
      finish_heads(team, weights, heads, range);
    } else {
      project_heads(team, weights, heads, input, range);
    }
    team.barrier();
    clock.mark(few_ ? kRope : kQkv);
  }

 private:
  void project_together(Team& team, const LayerWeights& weights, const Heads& heads, const Input& a,
                        HeadRange range) const {
    const int64_t from = range.first * heads.dim / kGroup;
    const int64_t count = (range.second - range.first) * heads.dim / kGroup;
    auto store = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int groups) {
      for (int r = 0; r < rows; ++r)
        std::memcpy(buffers_.projected + (first + r) * heads.width() + (from + group) * kGroup, c + r * ldc,
                    groups * kGroup * sizeof(float));
    };
    matmul(team, a, call_.tokens, weights.qkv.from_group(from, call_.hidden), call_.hidden, count, store);
    team.barrier();
  }

  void finish_heads(const Team& team, const LayerWeights& weights, const Heads& heads, HeadRange range) const {
    const int count = range.second - range.first;
    int64_t first, last;
    team.split(call_.tokens * count, first, last);
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = i / count, head = range.first + i % count;
      finish_one(weights, heads, t, head, buffers_.projected + t * heads.width() + head * heads.dim);
    }
  }

  // Many rows: `projected` would not stay in the cache, so each thread projects some rows of one head and finishes them.
  void project_heads(Team& team, const LayerWeights& weights, const Heads& heads, const Input& a,
                     HeadRange range) const {
    const int64_t dim = heads.dim;
    const int64_t parts = (call_.tokens + kRowsOfTask - 1) / kRowsOfTask;
    float* mine = buffers_.projected + team.index * kRowsOfTask * dim;
    Team alone(0, 1);
    Shares tasks(team, (range.second - range.first) * parts);
    for (int64_t task; tasks.take(task);) {
      const int64_t head = range.first + task / parts, from = task % parts * kRowsOfTask;
      const int64_t count = std::min(kRowsOfTask, call_.tokens - from);
      auto store = [&](const float* c, int64_t ldc, int64_t row, int rows, int64_t group, int groups) {
        for (int r = 0; r < rows; ++r)
          std::memcpy(mine + (row + r) * dim + group * kGroup, c + r * ldc, groups * kGroup * sizeof(float));
      };
      matmul(alone, a.from_row(from), count, weights.qkv.from_group(head * dim / kGroup, call_.hidden), call_.hidden,
             dim / kGroup, store);
      for (int64_t t = 0; t < count; ++t) {
        // Attention of the layer before has read these lines, maybe on another core.
        const bf16* later = buffers_.qkv + (from + t + 8) * heads.width() + head * dim;
        for (int64_t d = 0; d < dim; d += 32) __builtin_prefetch(later + d, 1);
        finish_one(weights, heads, from + t, head, mine + t * dim);
      }
    }
  }

  // One projected head of one token, [dim], to the left side of attention.
  void finish_one(const LayerWeights& weights, const Heads& heads, int64_t t, int64_t head, float* projected) const {
    const int dim = static_cast<int>(heads.dim);
    const bool is_query = head < heads.query, is_value = head >= heads.query + heads.kv;
    const int64_t angles = (weights.rope * call_.tokens + t) * (call_.rotary / 2);
    finish_head(projected, weights.qkv_bias ? weights.qkv_bias + head * dim : nullptr,
                is_query ? weights.q_norm : (is_value ? weights.v_norm : weights.k_norm),
                is_value || weights.rope < 0 ? nullptr : call_.cos + angles, call_.sin + angles, dim,
                std::min(call_.rotary, dim), call_.interleaved != 0, call_.eps,
                buffers_.qkv + t * heads.width() + head * dim);
  }

  const DecoderCall& call_;
  const Buffers& buffers_;
  const Residual& residual_;
  const bool few_;
};

}  // namespace
}  // namespace baton
