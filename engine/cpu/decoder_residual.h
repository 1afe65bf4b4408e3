// The hidden states between a decoder's layers, and the norms and products that read them or add to them. Include
// vector_avx512.h or vector_avx2.h first; everything has internal linkage, because it is compiled once per instruction set.
#pragma once
#include <algorithm>
#include <chrono>

#include "decoder.h"
#include "decoder_memory.h"
#include "decoder_rows.h"
#include "isa.h"
#include "linear.h"

namespace baton {
namespace {

// Adds the time since the last mark to a part, on the first thread only.
class Clock {
 public:
  Clock(const Team& team, double* parts) : parts_(team.index == 0 ? parts : nullptr), last_(now()) {}
  void mark(Part part) {
    if (parts_ == nullptr) return;
    const double at = now();
    parts_[part] += at - last_;
    last_ = at;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  double* parts_;
  double last_;
};

bool all_bfloat16(const DecoderCall& call) {
  return std::all_of(call.layers, call.layers + call.layer_count, [](const LayerWeights& layer) {
    for (const Weights* weights :
         {&layer.qkv, &layer.out, &layer.gate_up, &layer.down, &layer.input_gate, &layer.input_out})
      if (weights->pack != nullptr && weights->format != kBFloat16Pack) return false;
    return true;
  });
}

// What a product adds to the residual.
struct Summand {
  Weights weights;
  const float* bias;  // [hidden], or null
  const float* norm;  // [hidden] of the sum of both, or null
  float after = 1.0f;  // by which the residual is multiplied then
};

// The residuals of a call's tokens, float32 [tokens, hidden].
class Residual {
 public:
  Residual(const DecoderCall& call, const Shape& shape, const Buffers& buffers)
      : call_(call), shape_(shape), buffers_(buffers), few_(shape.tokens <= kFewRows),
        int8_(call.layers->qkv.format == kInt8Pack), tiled_(current_isa() >= kAmx && all_bfloat16(call)) {}

  // Returns normed rows for the next product: this thread's own copy if there are few, else a shared one.
  const bf16* norm(Team& team, const float* weight, Clock& clock) const {
    const int64_t n = shape_.hidden;
    if (few_) {
      bf16* mine = buffers_.normed + team.index * shape_.tokens * n;
      for (int64_t t = 0; t < shape_.tokens; ++t) norm_row(t, weight, mine);
      return mine;
    }
    each_row(team, [&](int64_t t) { norm_row(t, weight, buffers_.normed); });
    team.barrier();
    clock.mark(kNorm);
    return buffers_.normed;
  }

  // The same of rows that are not normed.
  const bf16* rounded(Team& team) const {
    const int64_t n = shape_.hidden;
    bf16* rows = buffers_.normed + (few_ ? team.index * shape_.tokens * n : 0);
    const auto round = [&](int64_t t) {
      for (int64_t i = 0; i < n; i += 16) store(rows + place(t, i, n), load(row(t) + i));
    };
    if (few_) {
      for (int64_t t = 0; t < shape_.tokens; ++t) round(t);
      return rows;
    }
    each_row(team, round);
    team.barrier();
    return rows;
  }

  // The rows, normed unless `weight` is null, not in tiles, without a barrier. Row t becomes row rows[t] of the result, or
  // stays t if rows is null.
  void norm_to(const Team& team, const float* weight, bf16* result, const int64_t* rows, Clock& clock) const {
    each_row(team, [&](int64_t t) {
      bf16* to = result + (rows != nullptr ? rows[t] : t) * shape_.hidden;
      if (weight != nullptr) return baton::norm_row(row(t), weight, shape_.hidden, call_.eps, to);
      for (int64_t i = 0; i < shape_.hidden; i += 16) store(to + i, load(row(t) + i));
    });
    clock.mark(kNorm);
  }

  // A left side. Many rows are rounded for int8 weights together; every product ends at a barrier, so its rows are free then.
  Input input(Team& team, const bf16* rows, int64_t k) const {
    Input a{rows, k, tiled_};
    if (int8_ && !few_) a.rounded = rounded_together(team, a, shape_.tokens, k, buffers_.rounded);
    return a;
  }

  // The index of column `column` of row `t` in the left side [tokens, k] of a product.
  int64_t place(int64_t t, int64_t column, int64_t k) const {
    return tiled_ ? Tiling{shape_.tokens, k}.place(t, column) : t * k + column;
  }

  // Returns attention's result in the format that the next product reads.
  const bf16* retile(Team& team, int64_t k) const {
    if (!tiled_ || shape_.tokens == 1) return buffers_.attended;
    tiled_together(team, {buffers_.attended, k, false}, shape_.tokens, k, buffers_.retiled);
    return buffers_.retiled;
  }

  // residual = (residual + scale * norm(a * weights + bias)) * after, then a barrier.
  void add_product(Team& team, const bf16* a, int64_t k, const Summand& summand) const {
    const float scale = call_.residual_scale, after = summand.after;
    const float* bias = summand.bias;
    auto add = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int groups) {
      for (int r = 0; r < rows; ++r) {
        float* to = row(first + r) + group * kGroup;
        for (int i = 0; i < groups * kGroup; ++i) to[i] += scale * c[r * ldc + i];
        if (bias != nullptr)
          for (int i = 0; i < groups * kGroup; ++i) to[i] += scale * bias[group * kGroup + i];
        if (after != 1.0f)
          for (int i = 0; i < groups * kGroup; ++i) to[i] *= after;
      }
    };
    auto keep = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int groups) {
      for (int r = 0; r < rows; ++r) {
        float* to = buffers_.added + (first + r) * shape_.hidden + group * kGroup;
        for (int i = 0; i < groups * kGroup; ++i)
          to[i] = c[r * ldc + i] + (bias != nullptr ? bias[group * kGroup + i] : 0.0f);
      }
    };
    const Input left = input(team, a, k);
    if (summand.norm == nullptr) {
      matmul(team, left, shape_.tokens, summand.weights, k, shape_.hidden / kGroup, add);
    } else {
      matmul(team, left, shape_.tokens, summand.weights, k, shape_.hidden / kGroup, keep);
      team.barrier();
      each_row(team, [&](int64_t t) {
        add_normed(row(t), buffers_.added + t * shape_.hidden, summand.norm, shape_.hidden, call_.eps, scale, after);
      });
    }
    team.barrier();
  }

  // residual = (residual + scale * norm(rows)) * after, of rows that were computed outside, then a barrier. `weight`: of the
  // norm; null: there is none.
  void add_rows(Team& team, const bf16* rows, const float* weight, float after) const {
    const int64_t n = shape_.hidden;
    each_row(team, [&](int64_t t) {
      float* to = row(t);
      const bf16* from = rows + t * n;
      if (weight == nullptr) {
        for (int64_t i = 0; i < n; ++i) to[i] = (to[i] + call_.residual_scale * to_float(from[i])) * after;
        return;
      }
      float* added = buffers_.added + t * n;
      for (int64_t i = 0; i < n; ++i) added[i] = to_float(from[i]);
      add_normed(to, added, weight, n, call_.eps, call_.residual_scale, after);
    });
    team.barrier();
  }

  bool is_finite(int64_t t) const { return all_finite(row(t), shape_.hidden); }

  template <typename F>
  void each_row(const Team& team, F f) const {
    int64_t first, last;
    team.split(shape_.tokens, first, last);
    for (int64_t t = first; t < last; ++t) f(t);
  }

 private:
  float* row(int64_t t) const { return call_.residual + t * shape_.hidden; }

  void norm_row(int64_t t, const float* weight, bf16* left_side) const {
    const int64_t n = shape_.hidden;
    baton::norm_row(row(t), weight, n, call_.eps, left_side + place(t, 0, n),
                    tiled_ ? Tiling{shape_.tokens, n}.tile(t) : 32);
  }

  const DecoderCall& call_;
  const Shape& shape_;
  const Buffers& buffers_;
  const bool few_;
  const bool int8_;   // all packs are, or none
  const bool tiled_;  // the rows of products are in AMX tiles
};

}  // namespace
}  // namespace baton
