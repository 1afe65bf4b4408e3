// Exponentials of sixteen floats, and what activations are made of them. Include vector_avx512.h or vector_avx2.h first.
#pragma once
#include <cmath>
#include <initializer_list>

namespace baton {
namespace {

// e^x, relative error about 1e-7; bounded to [-87, 88].
inline Vec exp_vector(Vec x) {
  const Vec bounded = min(max(x, splat(-87.0f)), splat(88.0f));
  const Vec n = nearest(mul(bounded, splat(1.44269504f)));
  Vec r = mul_add(n, splat(-0.693359375f), bounded);
  r = mul_add(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = mul_add(p, r, splat(coefficient));
  p = add(mul_add(mul(p, r), r, r), splat(1.0f));
  return scale_by_power(p, n);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline Vec sigmoid(Vec x) { return divide(splat(1.0f), add(splat(1.0f), exp_vector(sub(splat(0), x)))); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(t / (2 + t)), relative error about 1e-6.
inline Vec softplus(Vec x) {
  const Vec t = exp_vector(min(x, sub(splat(0), x)));
  const Vec s = divide(t, add(splat(2.0f), t)), squared = mul(s, s);
  Vec p = splat(2.0f / 11);
  for (float coefficient : {2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}) p = mul_add(p, squared, splat(coefficient));
  return mul_add(p, s, max(x, splat(0)));
}

inline Vec silu(Vec x) { return divide(x, add(splat(1.0f), exp_vector(sub(splat(0), x)))); }

// 2^x for x <= 0, relative error 3e-6: the result is rounded to bfloat16.
inline Vec power_of_two(Vec x) {
  const Vec n = nearest(x);
  const Vec f = sub(x, n);
  Vec p = splat(1.33335581e-3f);
  for (float coefficient : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    p = mul_add(p, f, splat(coefficient));
  return scale_by_power(p, n);
}

}  // namespace
}  // namespace baton
