// A step of a gated delta net or of Kimi's delta attention. Include vector_avx512.h or vector_avx2.h first, and define BATON_DELTA_NET.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "delta_net.h"
#include "exponential.h"

namespace baton::delta_net {
namespace {

constexpr float kNormEps = 1e-6f;  // of the norms of queries and keys

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void apply_silu(float* x, int n) {
  for (int i = 0; i < n; i += 16) store(x + i, silu(load(x + i)));
}

// Scales x to length `to`.
void normalise(float* x, int n, float to) {
  Vec squares = splat(0);
  for (int i = 0; i < n; i += 16) squares = mul_add(load(x + i), load(x + i), squares);
  const Vec scale = splat(to / std::sqrt(sum_of(squares) + kNormEps));
  for (int i = 0; i < n; i += 16) store(x + i, mul(load(x + i), scale));
}

// One head's recurrence over columns [0, 16 N) of its state [key_dim, value_dim]:
//   S' = D S + k (beta (v - (D S)^T k))^T,  out = S'^T q,  where D has the decay of each of the keys' channels
template <int N>
void columns(const float* from, float* to, const float* q, const float* k, const float* v, const float* decay, float beta,
             int key_dim, int64_t stride, float* out) {
  Vec seen[N], sum[N];
  for (Vec& x : seen) x = splat(0);
  for (int i = 0; i < key_dim; ++i) {
    const Vec decayed = splat(decay[i] * k[i]);
    for (int n = 0; n < N; ++n) seen[n] = mul_add(load(from + i * stride + 16 * n), decayed, seen[n]);
  }
  for (int n = 0; n < N; ++n) {
    seen[n] = mul(sub(load(v + 16 * n), seen[n]), splat(beta));  // what is added along k
    sum[n] = splat(0);
  }
  for (int i = 0; i < key_dim; ++i)
    for (int n = 0; n < N; ++n) {
      const Vec next = mul_add(splat(k[i]), seen[n], mul(load(from + i * stride + 16 * n), splat(decay[i])));
      store(to + i * stride + 16 * n, next);
      sum[n] = mul_add(next, splat(q[i]), sum[n]);
    }
  for (int n = 0; n < N; ++n) store(out + 16 * n, sum[n]);
}

class Step {
 public:
  explicit Step(const Call& call) : call_(call) {}

  // One key head of one row, with its values.
  void run(int64_t row, int64_t head) const {
    const Call& c = call_;
    float q[kMaxDim], k[kMaxDim], v[kMaxDim], out[kMaxDim];
    const int64_t key_width = int64_t{c.key_heads} * c.key_dim;
    convolve(row, at(c.q, row, head), head * c.key_dim, c.key_dim, q);
    convolve(row, at(c.k, row, head), key_width + head * c.key_dim, c.key_dim, k);
    normalise(q, c.key_dim, 1.0f / std::sqrt(static_cast<float>(c.key_dim)));
    normalise(k, c.key_dim, 1.0f);
    for (int64_t i = 0; i < c.ratio; ++i) {
      const int64_t value_head = head * c.ratio + i;
      convolve(row, at(c.v, row, head) + i * c.value_dim, 2 * key_width + value_head * c.value_dim, c.value_dim, v);
      recur(row, head, i, q, k, v, out);
      finish(out, at(c.z, row, head) + i * c.value_dim,
             c.out + (row * c.key_heads * c.ratio + value_head) * c.value_dim);
    }
  }

 private:
  static const bf16* at(const Heads& heads, int64_t row, int64_t head) {
    return heads.data + row * heads.row + head * heads.head;
  }

  // Appends one input to the state of `count` channels, and computes their outputs.
  void convolve(int64_t row, const bf16* input, int64_t channel, int count, float* outputs) const {
    const Call& c = call_;
    const bf16* from = reinterpret_cast<const bf16*>(c.conv + c.reads[row] * c.conv_slot) + channel * c.taps;
    bf16* to = reinterpret_cast<bf16*>(c.conv + c.writes[row] * c.conv_slot) + channel * c.taps;
    const float* weight = c.conv_weight + channel * c.taps;
    for (int i = 0; i < count; ++i, from += c.taps, to += c.taps, weight += c.taps) {
      float sum = to_float(input[i]) * weight[c.taps - 1];
      for (int tap = 0; tap + 1 < c.taps; ++tap) {
        to[tap] = from[tap + 1];
        sum += to_float(to[tap]) * weight[tap];
      }
      to[c.taps - 1] = input[i];
      outputs[i] = sum;
    }
    apply_silu(outputs, count);
  }

  void recur(int64_t row, int64_t head, int64_t i, const float* q, const float* k, const float* v, float* out) const {
    const Call& c = call_;
    const int64_t value_head = head * c.ratio + i, size = int64_t{c.key_dim} * c.value_dim;
    const float* from = reinterpret_cast<const float*>(c.recurrent + c.reads[row] * c.recurrent_slot) + value_head * size;
    float* to = reinterpret_cast<float*>(c.recurrent + c.writes[row] * c.recurrent_slot) + value_head * size;
    const float beta = sigmoid(to_float(at(c.b, row, head)[i]));
    float decay[kMaxDim];
    decay_of(at(c.a, row, head) + i * c.decays, value_head, decay);
    int column = 0;
    for (; column + 128 <= c.value_dim; column += 128)
      columns<8>(from + column, to + column, q, k, v + column, decay, beta, c.key_dim, c.value_dim, out + column);
    for (; column < c.value_dim; column += 16)
      columns<1>(from + column, to + column, q, k, v + column, decay, beta, c.key_dim, c.value_dim, out + column);
  }

  // Of each channel of a head's keys.
  void decay_of(const bf16* inputs, int64_t value_head, float* decay) const {
    const Call& c = call_;
    const float* bias = c.dt_bias + value_head * c.decays;
    for (int i = 0; i < c.decays; ++i) decay[i] = std::exp(c.rate[value_head] * softplus(to_float(inputs[i]) + bias[i]));
    if (c.decays == 1) std::fill(decay + 1, decay + c.key_dim, decay[0]);
  }

  // The norm of one head's result, times the gate.
  void finish(float* x, const bf16* gate, bf16* to) const {
    const Call& c = call_;
    Vec squares = splat(0);
    for (int i = 0; i < c.value_dim; i += 16) squares = mul_add(load(x + i), load(x + i), squares);
    const Vec scale = splat(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(c.value_dim) + c.eps));
    float gates[16];
    for (int i = 0; i < c.value_dim; i += 16) {
      for (int j = 0; j < 16; ++j) gates[j] = to_float(gate[i + j]);
      if (!c.is_silu)
        for (float& gate : gates) gate = sigmoid(gate);
      const Vec factor = c.is_silu ? silu(load(gates)) : load(gates);
      store(to + i, mul(mul(mul(load(x + i), scale), load(c.norm + i)), factor));
    }
  }

  const Call& call_;
};

void run_delta_net(const Call& call) {
  const Step step(call);
  auto body = [&](Team& team) {
    int64_t first, last;
    team.split(call.rows * call.key_heads, first, last);
    for (int64_t i = first; i < last; ++i) step.run(i / call.key_heads, i % call.key_heads);
  };
  parallel(call.threads, body);
}

}  // namespace

const Run BATON_DELTA_NET = run_delta_net;

}  // namespace baton::delta_net
