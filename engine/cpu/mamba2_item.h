// Tokens of a Mamba-2 layer. Include vector_avx512.h or vector_avx2.h first, and define BATON_MAMBA2.
#include <algorithm>
#include <cmath>

#include "convolution.h"
#include "exponential.h"
#include "mamba2.h"

namespace baton::mamba2 {
namespace {

constexpr int kChannels = 64;  // that a thread convolves at once

// One head's recurrence over 16 N of its state's columns [head_dim, state_dim]: S' = decay S + x b^T, out += S' c.
template <int N>
void columns(const float* from, float* to, const float* x, const float* b, const float* c, float dt, float decay, int head_dim,
             int64_t stride, float* out) {
  Vec steps[N];
  for (int n = 0; n < N; ++n) steps[n] = mul(load(b + 16 * n), splat(dt));
  for (int i = 0; i < head_dim; ++i) {
    Vec sum = splat(0);
    for (int n = 0; n < N; ++n) {
      const Vec next = mul_add(splat(x[i]), steps[n], mul(load(from + i * stride + 16 * n), splat(decay)));
      store(to + i * stride + 16 * n, next);
      sum = mul_add(next, load(c + 16 * n), sum);
    }
    out[i] += sum_of(sum);
  }
}

// Tokens that are computed at once: `length` of each of `rows`, together at most kTokensAtOnce.
struct Block {
  int64_t row, rows, token, length;
};

class Layer {
 public:
  explicit Layer(const Call& call)
      : call_(call),
        width_(int64_t{call.heads} * call.head_dim),
        of_group_(int64_t{call.groups} * call.state_dim),
        convolution_{call.conv, call.conv_slot, call.conv_weight, call.conv_bias, width_ + 2 * of_group_, call.taps} {}

  void run(Team& team) const {
    const int64_t rows = call_.length == 1 ? kTokensAtOnce : 1;
    for (int64_t row = 0; row < call_.rows; row += rows)
      for (int64_t token = 0; token < call_.length; token += kTokensAtOnce)
        run(team, {row, std::min(rows, call_.rows - row), token, std::min<int64_t>(kTokensAtOnce, call_.length - token)});
  }

 private:
  // No barrier at the end: the next block's convolution writes what only its recurrence reads.
  void run(Team& team, const Block& block) const {
    int64_t first, last;
    const int64_t parts = (convolution_.channels + kChannels - 1) / kChannels;
    team.split(block.rows * parts, first, last);
    for (int64_t i = first; i < last; ++i) convolve(block, i / parts, i % parts * kChannels);
    team.barrier();
    team.split(block.rows * call_.heads, first, last);
    for (int64_t i = first; i < last; ++i) recur(block, i / call_.heads, i % call_.heads);
    team.barrier();
    team.split(block.rows * block.length, first, last);
    for (int64_t i = first; i < last; ++i) finish(block, i);
  }

  void convolve(const Block& block, int64_t row, int64_t channel) const {
    const int count = static_cast<int>(std::min<int64_t>(kChannels, convolution_.channels - channel));
    Inputs<kChannels> inputs(convolution_, channel, count);
    inputs.begin(before(block, row));
    for (int64_t i = 0; i < block.length; ++i)
      inputs.append(projected(token_of(block, row, i)) + width_ + channel, convolved(row * block.length + i) + channel);
    inputs.end(call_.writes[block.row + row]);
  }

  void recur(const Block& block, int64_t row, int64_t head) const {
    const Call& c = call_;
    const int64_t slot = before(block, row), group = head / (c.heads / c.groups);
    float* to = state(c.writes[block.row + row], head);
    const float* from = slot < 0 ? to : state(slot, head);
    if (slot < 0) std::fill_n(to, int64_t{c.head_dim} * c.state_dim, 0.0f);
    for (int64_t i = 0; i < block.length; ++i, from = to) {
      const int64_t local = row * block.length + i;
      const float *x = convolved(local) + head * c.head_dim, *b = convolved(local) + width_ + group * c.state_dim;
      const float raw = to_float(projected(token_of(block, row, i))[width_ + convolution_.channels + head]);
      const float dt = softplus(raw + c.dt_bias[head]), decay = std::exp(dt * c.rate[head]);
      float* out = results(local) + head * c.head_dim;
      for (int j = 0; j < c.head_dim; ++j) out[j] = c.skip[head] * x[j];
      recur(from, to, x, b, b + of_group_, dt, decay, out);
    }
  }

  void recur(const float* from, float* to, const float* x, const float* b, const float* c, float dt, float decay, float* out) const {
    const int wide = call_.state_dim, dim = call_.head_dim;
    int column = 0;
    for (; column + 128 <= wide; column += 128)
      columns<8>(from + column, to + column, x, b + column, c + column, dt, decay, dim, wide, out);
    for (; column < wide; column += 16)
      columns<1>(from + column, to + column, x, b + column, c + column, dt, decay, dim, wide, out);
  }

  // Gates and norms of one token.
  void finish(const Block& block, int64_t local) const {
    const Call& c = call_;
    const int64_t token = token_of(block, local / block.length, local % block.length);
    float* x = results(local);
    if (c.norm == nullptr || c.gates_first) gate(projected(token), x);
    for (int64_t first = 0; c.norm != nullptr && first < width_; first += c.norm_group) normalise(x + first, c.norm + first);
    if (c.norm != nullptr && !c.gates_first) gate(projected(token), x);
    for (int64_t i = 0; i < width_; i += 16) store(c.out + token * width_ + i, load(x + i));
  }

  void gate(const bf16* gates, float* x) const {
    for (int64_t i = 0; i < width_; i += 16) store(x + i, mul(load(x + i), silu(load(gates + i))));
  }

  void normalise(float* x, const float* weight) const {
    const int n = call_.norm_group;
    Vec squares = splat(0);
    for (int i = 0; i < n; i += 16) squares = mul_add(load(x + i), load(x + i), squares);
    const Vec scale = splat(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(n) + call_.eps));
    for (int i = 0; i < n; i += 16) store(x + i, mul(mul(load(x + i), scale), load(weight + i)));
  }

  // The slot of a row's states before the block; negative: it begins there.
  int64_t before(const Block& block, int64_t row) const {
    if (block.token > 0) return call_.writes[block.row + row];
    return call_.reads == nullptr ? -1 : call_.reads[block.row + row];
  }
  int64_t token_of(const Block& block, int64_t row, int64_t i) const { return (block.row + row) * call_.length + block.token + i; }
  const bf16* projected(int64_t token) const { return call_.projected + token * call_.token; }
  float* state(int64_t slot, int64_t head) const {
    const int64_t size = int64_t{call_.head_dim} * call_.state_dim;
    return reinterpret_cast<float*>(call_.recurrent + slot * call_.recurrent_slot) + head * size;
  }
  float* convolved(int64_t local) const { return call_.scratch + local * (convolution_.channels + width_); }
  float* results(int64_t local) const { return convolved(local) + convolution_.channels; }

  const Call& call_;
  const int64_t width_, of_group_;
  const Convolution convolution_;
};

void run_mamba2(const Call& call) {
  const Layer layer(call);
  auto body = [&](Team& team) { layer.run(team); };
  parallel(call.threads, body);
}

}  // namespace

const Run BATON_MAMBA2 = run_mamba2;

}  // namespace baton::mamba2
