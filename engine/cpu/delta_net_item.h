// Tokens of a gated delta net or of Kimi's delta attention. Include vector_avx512.h or vector_avx2.h first, and define BATON_DELTA_NET.
#include <algorithm>
#include <cmath>

#include "convolution.h"
#include "delta_net.h"
#include "exponential.h"

namespace baton::delta_net {
namespace {

constexpr float kNormEps = 1e-6f;  // of the norms of queries and keys

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

class Recurrence {
 public:
  explicit Recurrence(const Call& call)
      : call_(call),
        convolution_{call.conv, call.conv_slot, call.conv_weight, nullptr,
                     int64_t{call.key_heads} * (2 * call.key_dim + call.ratio * call.value_dim), call.taps} {}

  // One key head of one row, with its values.
  void run(int64_t row, int64_t head) const {
    const Call& c = call_;
    const int64_t keys = int64_t{c.key_heads} * c.key_dim, write = c.writes[row];
    const int64_t read = c.reads == nullptr ? -1 : c.reads[row];
    Inputs<kMaxDim> queries(convolution_, head * c.key_dim, c.key_dim);
    Inputs<kMaxDim> own_keys(convolution_, keys + head * c.key_dim, c.key_dim);
    for (int64_t i = 0; i < c.ratio; ++i) {
      const int64_t value_head = head * c.ratio + i;
      Inputs<kMaxDim> values(convolution_, 2 * keys + value_head * c.value_dim, c.value_dim);
      for (Inputs<kMaxDim>* inputs : {&queries, &own_keys, &values}) inputs->begin(read);
      float *to = recurrent(write, value_head), *from = c.reads == nullptr ? to : recurrent(read, value_head);
      if (c.reads == nullptr) std::fill_n(to, c.key_dim * c.value_dim, 0.0f);
      for (int64_t token = row * c.length; token < (row + 1) * c.length; ++token, from = to) {
        float q[kMaxDim], k[kMaxDim], v[kMaxDim], decay[kMaxDim], out[kMaxDim];
        queries.append(at(c.q, token, head), q);
        own_keys.append(at(c.k, token, head), k);
        values.append(at(c.v, token, head) + i * c.value_dim, v);
        normalise(q, c.key_dim, 1.0f / std::sqrt(static_cast<float>(c.key_dim)));
        normalise(k, c.key_dim, 1.0f);
        decay_of(at(c.a, token, head) + i * c.decays, value_head, decay);
        recur(from, to, q, k, v, decay, c.rates * sigmoid(to_float(at(c.b, token, head)[i])), out);
        finish(out, at(c.z, token, head) + i * c.value_dim, c.out + (token * c.key_heads * c.ratio + value_head) * c.value_dim);
      }
      values.end(write);
    }
    queries.end(write);  // not before all values have begun: the slots may be the same
    own_keys.end(write);
  }

 private:
  static const bf16* at(const Heads& heads, int64_t token, int64_t head) {
    return heads.data + token * heads.token + head * heads.head;
  }
  float* recurrent(int64_t slot, int64_t value_head) const {
    const int64_t size = int64_t{call_.key_dim} * call_.value_dim;
    return reinterpret_cast<float*>(call_.recurrent + slot * call_.recurrent_slot) + value_head * size;
  }

  void recur(const float* from, float* to, const float* q, const float* k, const float* v, const float* decay, float beta,
             float* out) const {
    const Call& c = call_;
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
    const float rate = c.rate[value_head];
    if (c.decays == 1) {
      std::fill_n(decay, c.key_dim, std::exp(rate * softplus(to_float(inputs[0]) + bias[0])));
      return;
    }
    for (int i = 0; i < c.decays; ++i) decay[i] = to_float(inputs[i]) + bias[i];
    for (int i = 0; i < c.decays; i += 16) {
      const Vec x = load(decay + i);
      const Vec log = c.bound < 0 ? mul(sigmoid(mul(x, splat(-rate))), splat(c.bound)) : mul(softplus(x), splat(rate));
      store(decay + i, exp_vector(log));
    }
  }

  // The norm of one head's result, times the gate.
  void finish(float* x, const bf16* gate, bf16* to) const {
    const Call& c = call_;
    Vec squares = splat(0);
    for (int i = 0; i < c.value_dim; i += 16) squares = mul_add(load(x + i), load(x + i), squares);
    const Vec scale = splat(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(c.value_dim) + c.eps));
    for (int i = 0; i < c.value_dim; i += 16) {
      const Vec factor = c.is_silu ? silu(load(gate + i)) : sigmoid(load(gate + i));
      store(to + i, mul(mul(mul(load(x + i), scale), load(c.norm + i)), factor));
    }
  }

  const Call& call_;
  const Convolution convolution_;
};

void run_delta_net(const Call& call) {
  const Recurrence recurrence(call);
  auto body = [&](Team& team) {
    int64_t first, last;
    team.split(call.rows * call.key_heads, first, last);
    for (int64_t i = first; i < last; ++i) recurrence.run(i / call.key_heads, i % call.key_heads);
  };
  parallel(call.threads, body);
}

}  // namespace

const Run BATON_DELTA_NET = run_delta_net;

}  // namespace baton::delta_net
