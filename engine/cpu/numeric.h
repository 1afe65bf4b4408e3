// bfloat16 as a storage type, and an exponential that compilers vectorise.
#pragma once
#include <cstdint>
#include <cstring>

namespace baton {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store_float(float& to, float x) { to = x; }
// Round to nearest even; a NaN stays a NaN.
inline void store_float(bf16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40u);
}

// e^x for x <= 0, relative error about 1e-7; 0 below -87. Range reduction x = n ln2 + r by adding 1.5 * 2^23, which
// leaves round(x / ln2) in the low bits: valid because these files are compiled without value-changing options.
inline float fast_exp(float x) {
  const float bounded = x < -87.0f ? -87.0f : x;
  const float shifted = bounded * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// tanh x, relative error about 3e-7. Near 0, where 1 - e^-2x loses digits, a polynomial (Cephes, tanhf).
inline float fast_tanh(float x) {
  const float size = x < 0 ? -x : x;
  const float decay = fast_exp(-2.0f * size);
  const float far = (1.0f - decay) / (1.0f + decay);
  const float square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  p = p * square * x + x;
  return size < 0.625f ? p : (x < 0 ? -far : far);
}

// Scores s become cap tanh(s scale / cap). Static, because it is compiled once per instruction set.
static inline void cap_scores(float* scores, int n, float scale, float cap) {
  const float inner = scale / cap;
#pragma omp simd
  for (int j = 0; j < n; ++j) scores[j] = cap * fast_tanh(scores[j] * inner);
}

}  // namespace baton
