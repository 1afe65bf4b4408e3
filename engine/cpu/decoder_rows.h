// What the fused decoder does to a row or to a head of it. Include vector_avx512.h or vector_avx2.h first; everything has
// internal linkage, because it is compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cmath>

#include "exponential.h"
#include "numeric.h"

namespace baton {
namespace {

float mean_square(const float* x, int64_t n) {
  Vec sum = splat(0);
  for (int64_t i = 0; i < n; i += 16) sum = mul_add(load(x + i), load(x + i), sum);
  return sum_of(sum) / static_cast<float>(n);
}

// `step`: elements from 32 outputs to the next 32; 32, unless the outputs go into tiles.
void norm_row(const float* x, const float* weight, int64_t n, float eps, bf16* to, int64_t step = 32) {
  const Vec scale = splat(1.0f / std::sqrt(mean_square(x, n) + eps));
  for (int64_t i = 0; i < n; i += 16)
    store(to + i / 32 * step + i % 32, mul(mul(load(x + i), scale), load(weight + i)));
}

// to = (to + scale * norm(x)) * after
void add_normed(float* to, const float* x, const float* weight, int64_t n, float eps, float scale, float after) {
  const Vec by = splat(scale / std::sqrt(mean_square(x, n) + eps)), factor = splat(after);
  for (int64_t i = 0; i < n; i += 16)
    store(to + i, mul(mul_add(mul(load(x + i), by), load(weight + i), load(to + i)), factor));
}

// gelu by tanh: x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)).
Vec gelu_tanh(Vec x) {
  const Vec u = mul(mul(x, splat(2 * 0.7978845608f)), mul_add(mul(x, x), splat(0.044715f), splat(1.0f)));
  return divide(x, add(splat(1.0f), exp_vector(sub(splat(0), u))));
}

// Rotates values in pairs of neighbours.
void rotate_neighbours(const float* x, const float* cos, const float* sin, int half, bf16* to) {
  for (int d = 0; d < half; ++d) {
    const float low = x[2 * d], high = x[2 * d + 1];
    store_float(to[2 * d], low * cos[d] - high * sin[d]);
    store_float(to[2 * d + 1], high * cos[d] + low * sin[d]);
  }
}

// Rotates each value of the first half with its place in the second one.
void rotate_halves(const float* x, const float* cos, const float* sin, int half, bf16* to) {
  for (int d = 0; d + 16 <= half; d += 16) {
    const Vec low = load(x + d), high = load(x + half + d), c = load(cos + d), s = load(sin + d);
    store(to + d, sub(mul(low, c), mul(high, s)));
    store(to + half + d, mul_add(high, c, mul(low, s)));
  }
  for (int d = half / 16 * 16; d < half; ++d) {  // of a head of 16, 48, 80 ... values
    const float low = x[d], high = x[half + d];
    store_float(to[d], low * cos[d] - high * sin[d]);
    store_float(to[half + d], high * cos[d] + low * sin[d]);
  }
}

// Applies bias, norm and rotation (each may be null) to one head, of which `x` is lost, and rounds the result to `to`. The
// first `rotary` values are rotated.
void finish_head(float* x, const float* bias, const float* norm, const float* cos, const float* sin, int dim, int rotary,
                 bool interleaved, float eps, bf16* to) {
  if (bias != nullptr)
    for (int d = 0; d < dim; d += 16) store(x + d, add(load(x + d), load(bias + d)));
  if (norm != nullptr) {
    const Vec scale = splat(1.0f / std::sqrt(mean_square(x, dim) + eps));
    for (int d = 0; d < dim; d += 16) store(x + d, mul(load(x + d), mul(scale, load(norm + d))));
  }
  if (cos == nullptr) {
    for (int d = 0; d < dim; d += 16) store(to + d, load(x + d));
    return;
  }
  (interleaved ? rotate_neighbours : rotate_halves)(x, cos, sin, rotary / 2, to);
  for (int d = rotary; d < dim; ++d) store_float(to[d], x[d]);
}

bool all_finite(const bf16* x, int64_t n) {
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) finite &= (x[i].bits & 0x7f80) != 0x7f80;
  return finite;
}

bool all_finite(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float each) { return std::isfinite(each); });
}

}  // namespace
}  // namespace baton
