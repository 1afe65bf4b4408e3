// Llama-shaped decoders (norm, q/k/v, rope, paged attention, gated MLP) as one parallel region per step. At a layer whose
// MLP is computed outside, as a mixture of experts is, the region ends before it, and the next one goes on after it.
//
// The residual is float32; the inputs of products are rounded to bfloat16 once. All threads run the whole program and
// synchronise at five barriers per layer, and at two more if what attention and MLPs add is normed. If there are few rows,
// every thread computes the norms of all rows itself, which is cheaper than a barrier. Of a prefill chunk one hidden state
// is read, or none, but K and V of all tokens: the last layer, and those at the end that share keys and values, compute the
// rest for the rows that are read alone.
// Compiled once per instruction set: BATON_DECODER names the table it fills.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "decoder.h"
#include "decoder_memory.h"
#include "decoder_projection.h"
#include "decoder_residual.h"
#include "decoder_rows.h"
#include "exponential.h"
#include "linear.h"

namespace baton {
namespace {

// The attention plans of the groups, for one batch.
class Plans {
 public:
  explicit Plans(const DecoderCall& call) {
    for (int group = 0; group < kGroups; ++group)
      if (call.groups[group].attention != nullptr) plans_[group].emplace(*call.groups[group].attention);
  }
  AttentionPlan& of(const LayerWeights& layer) { return *plans_[layer.group]; }

 private:
  std::optional<AttentionPlan> plans_[kGroups];
};

class Decoder {
 public:
  Decoder(const DecoderCall& call, Plans& plans)
      : call_(call), shape_(call), plans_(plans), buffers_(take_buffers(call)), residual_(call, shape_, buffers_),
        projection_(call, buffers_, residual_) {}
  Decoder(const Decoder&) = delete;  // its parts refer to it

  // Computes layers [first, last).
  void run(Team& team, int first, int last, Clock& clock) const {
    for (int layer = first; layer < last; ++layer) {
      attention_block(team, layer, clock);
      mlp_block(team, layer, clock);
    }
  }

  // What comes before the MLP of a layer.
  void attention_block(Team& team, int layer, Clock& clock) const {
    const LayerWeights& weights = call_.layers[layer];
    const bf16* normed = residual_.norm(team, weights.input_norm, clock);
    projection_.run(team, weights, normed, {0, Heads(call_, weights).all()}, clock);
    const AttentionCall attention = of_layer(weights);
    if (!weights.shares) {
      plans_.of(weights).write(team, attention);
      team.barrier();
    }
    attend(team, weights, attention, clock);
  }

  // K and V of the first layer that rows which are read go through alone, and the results of the other rows. The caller's
  // next barrier comes before the rows that are read go on.
  void write_tail(Team& team, Clock& clock) const {
    const LayerWeights& weights = call_.layers[call_.tail];
    if (weights.shares) return residual_.each_row(team, [&](int64_t t) { set_unread(t, residual_.is_finite(t)); });
    const Heads heads(call_, weights);
    const bf16* normed = residual_.norm(team, weights.input_norm, clock);
    projection_.run(team, weights, normed, {heads.query, heads.all()}, clock);
    plans_.of(weights).write(team, of_layer(weights));
    residual_.each_row(team, [&](int64_t t) {
      const bf16* key = buffers_.qkv + t * heads.width() + heads.queries();
      set_unread(t, all_finite(key, heads.width() - heads.queries()));
    });
  }

  // What comes between the K and V of the first layer and its MLP.
  void attend_first(Team& team, Clock& clock) const {
    const LayerWeights& weights = call_.layers[0];
    const bf16* normed = residual_.norm(team, weights.input_norm, clock);
    projection_.run(team, weights, normed, {0, Heads(call_, weights).query}, clock);
    attend(team, weights, of_layer(weights), clock);
  }

  void mlp_block(Team& team, int layer, Clock& clock) const {
    const LayerWeights& weights = call_.layers[layer];
    const bf16* normed = residual_.norm(team, weights.mlp_norm, clock);
    auto activate = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int) {
      for (int r = 0; r < rows; ++r) {
        const Vec gate = load(c + r * ldc), up = load(c + r * ldc + kGroup);
        store(buffers_.activated + residual_.place(first + r, group / 2 * kGroup, weights.intermediate),
              mul(activated(gate), up));
      }
    };
    matmul(team, residual_.input(team, normed, shape_.hidden), shape_.tokens, weights.gate_up, shape_.hidden,
           2 * weights.intermediate / kGroup, activate);
    team.barrier();
    clock.mark(kGateUp);
    const bool is_end = weights.input_gate.pack == nullptr;
    residual_.add_product(team, buffers_.activated, weights.intermediate,
                          {weights.down, nullptr, weights.down_norm, is_end ? weights.scale : 1.0f});
    clock.mark(kDown);
    if (!is_end) add_inputs(team, layer, clock);
  }

  // The inputs of an MLP that is computed outside, and what it adds.
  void fill_inputs(const Team& team, int layer, Clock& clock) const {
    residual_.norm_to(team, call_.layers[layer].mlp_norm, call_.mlp.inputs, nullptr, clock);
  }
  void add_outputs(Team& team, int layer, Clock& clock) const {
    const LayerWeights& weights = call_.layers[layer];
    const bool is_end = weights.input_gate.pack == nullptr;
    residual_.add_rows(team, call_.mlp.outputs, weights.down_norm, is_end ? weights.scale : 1.0f);
    clock.mark(kDown);
    if (!is_end) add_inputs(team, layer, clock);
  }

  // `rows`: where the result of each row goes; null: to its own place.
  void finish(const Team& team, const int64_t* rows, Clock& clock) const {
    residual_.norm_to(team, call_.final_norm, call_.result, rows, clock);
  }

 private:
  Vec activated(Vec gate) const { return call_.activation == kSilu ? silu(gate) : gelu_tanh(gate); }

  // Adds what the layer's inputs become: out(activated(gate(hidden states)) * inputs).
  void add_inputs(Team& team, int layer, Clock& clock) const {
    const LayerWeights& weights = call_.layers[layer];
    const int64_t width = call_.layer_input_width;
    const bf16* inputs = call_.layer_inputs + layer * width;
    auto activate = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int groups) {
      for (int r = 0; r < rows; ++r)
        for (int64_t i = group * kGroup; i < (group + groups) * kGroup; i += kGroup) {
          const Vec gate = load(c + r * ldc + i - group * kGroup);
          const bf16* input = inputs + (first + r) * call_.layer_count * width + i;
          store(buffers_.activated + residual_.place(first + r, i, width), mul(activated(gate), load(input)));
        }
    };
    const Input left = residual_.input(team, residual_.rounded(team), shape_.hidden);
    matmul(team, left, shape_.tokens, weights.input_gate, shape_.hidden, width / kGroup, activate);
    team.barrier();
    clock.mark(kGateUp);
    residual_.add_product(team, buffers_.activated, width,
                          {weights.input_out, nullptr, weights.input_out_norm, weights.scale});
    clock.mark(kDown);
  }

  AttentionCall of_layer(const LayerWeights& layer) const {
    const LayerGroup& group = call_.groups[layer.group];
    const Heads heads(call_, layer);
    AttentionCall attention = *group.attention;
    attention.q = buffers_.qkv;
    attention.k_new = buffers_.qkv + heads.queries();
    attention.v_new = buffers_.qkv + heads.queries() + heads.kv * heads.dim;
    attention.q_token = attention.k_token = attention.v_token = heads.width();
    attention.q_head = attention.k_head = attention.v_head = heads.dim;
    attention.out = buffers_.attended;
    attention.out_token = heads.queries();
    attention.sinks = layer.sinks;
    attention.k = group.tiles + layer.place * group.layer_bytes;
    attention.v = group.tiles + layer.place * group.layer_bytes + group.v_bytes;
    return attention;
  }

  // The result of a row, if it is not read.
  void set_unread(int64_t t, bool is_finite) const {
    if (std::binary_search(call_.reads, call_.reads + call_.read_count, t)) return;
    bf16* result = call_.result + t * shape_.hidden;
    std::fill(result, result + shape_.hidden, bf16{});
    if (!is_finite) store_float(result[0], NAN);
  }

  // Attention, whose keys and values have been written, up to the residual.
  void attend(Team& team, const LayerWeights& weights, const AttentionCall& attention, Clock& clock) const {
    plans_.of(weights).attend(team, attention);
    clock.mark(kAttention);
    const int64_t width = attention.out_token;
    residual_.add_product(team, residual_.retile(team, width), width, {weights.out, weights.out_bias, weights.out_norm});
    clock.mark(kOut);
  }

  const DecoderCall& call_;
  const Shape shape_;
  Plans& plans_;
  const Buffers buffers_;
  const Residual residual_;
  const Projection projection_;
};

int64_t scratch_bytes(const DecoderCall& call) { return reads_some(call) ? Reads(call).end : buffer_bytes(call); }

// The first layer from `layer` on whose MLP is computed outside, or layer_count.
int next_outside(const DecoderCall& call, int layer) {
  while (layer < call.layer_count && call.layers[layer].gate_up.pack != nullptr) ++layer;
  return layer;
}

// All tokens go through all layers, from the MLP after layer `computed` to that of layer `next`.
void run_all(const DecoderCall& call, int computed, int next) {
  Plans plans(call);
  const Decoder decoder(call, plans);
  auto body = [&](Team& team) {
    Clock clock(team, call.part_seconds);
    if (computed >= 0) decoder.add_outputs(team, computed, clock);
    decoder.run(team, computed + 1, next, clock);
    if (next == call.layer_count) return decoder.finish(team, nullptr, clock);
    decoder.attention_block(team, next, clock);
    decoder.fill_inputs(team, next, clock);
  };
  parallel(last_attention(call).threads, body);
}

// The layers from `tail` on compute the rows that are read.
void run_reads(const DecoderCall& call, int computed, int next) {
  const Reads reads(call);
  Plans plans(call), read_plans(reads.call);
  const Decoder decoder(call, plans), read(reads.call, read_plans);
  const int tail = call.tail;
  auto body = [&](Team& team) {
    Clock clock(team, call.part_seconds);
    if (computed == tail) {
      read.add_outputs(team, 0, clock);
      return read.finish(team, call.reads, clock);
    }
    if (computed >= 0) decoder.add_outputs(team, computed, clock);
    decoder.run(team, computed + 1, std::min(next, tail), clock);
    if (next < tail) {
      decoder.attention_block(team, next, clock);
      return decoder.fill_inputs(team, next, clock);
    }
    decoder.write_tail(team, clock);
    reads.take(team, call);
    team.barrier();
    if (call.read_count == 0) return;
    read.attend_first(team, clock);
    if (next == tail) return read.fill_inputs(team, 0, clock);
    read.mlp_block(team, 0, clock);
    read.run(team, 1, reads.call.layer_count, clock);
    read.finish(team, call.reads, clock);
  };
  parallel(last_attention(call).threads, body);
}

int run_decoder(DecoderCall& call, int computed) {
  const bool some = reads_some(call);
  int next = next_outside(call, computed + 1);
  call.mlp.rows = some && next == call.tail ? call.read_count : call.tokens;
  if (call.mlp.rows == 0) next = call.layer_count;
  (some ? run_reads : run_all)(call, computed, next);
  return next;
}

}  // namespace

const DecoderKernels BATON_DECODER = {scratch_bytes, run_decoder};

}  // namespace baton
