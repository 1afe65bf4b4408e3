// Llama-shaped decoders (norm, q/k/v, rope, paged attention, gated MLP) as one parallel region per step. At a layer whose
// MLP is computed outside, as a mixture of experts is, the region ends before it, and the next one goes on after it.
//
// The residual is float32; the inputs of products are rounded to bfloat16 once. All threads run the whole program and
// synchronise at five barriers per layer, and at two more if what attention and MLPs add is normed. If there are few rows,
// every thread computes the norms of all rows itself, which is cheaper than a barrier. Of a prefill chunk one hidden state
// is read, or none, but K and V of all tokens: the last layer computes the rest for the rows that are read alone.
// Compiled once per instruction set: BATON_DECODER names the table it fills.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "decoder.h"
#include "decoder_memory.h"
#include "decoder_residual.h"
#include "decoder_rows.h"
#include "exponential.h"
#include "linear.h"

namespace baton {
namespace {

using Heads = std::pair<int, int>;  // [first, last) of the heads of q, k and v, in the order of the pack

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
      : call_(call), shape_(call), few_(call.tokens <= kFewRows), plans_(plans), batch_(last_attention(call)),
        buffers_(take_buffers(call)), residual_(call, shape_, buffers_) {}
  Decoder(const Decoder&) = delete;  // its residual refers to it

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
    project(team, weights, normed, {0, batch_.heads + 2 * batch_.kv_heads}, clock);
    const AttentionCall attention = of_layer(weights);
    plans_.of(weights).write(team, attention);
    team.barrier();
    attend(team, weights, attention, clock);
  }

  // K and V of the last layer, and the results of rows that are not read. The caller's next barrier comes before
  // the rows that are read go on.
  void write_last(Team& team, Clock& clock) const {
    const LayerWeights& weights = last_layer(call_);
    const bf16* normed = residual_.norm(team, weights.input_norm, clock);
    project(team, weights, normed, {batch_.heads, batch_.heads + 2 * batch_.kv_heads}, clock);
    plans_.of(weights).write(team, of_layer(weights));
    residual_.each_row(team, [&](int64_t t) { check_row(t); });
  }

  // What comes between the K and V of the last layer and its MLP.
  void attend_last(Team& team, Clock& clock) const {
    const LayerWeights& weights = last_layer(call_);
    const bf16* normed = residual_.norm(team, weights.input_norm, clock);
    project(team, weights, normed, {0, batch_.heads}, clock);
    attend(team, weights, of_layer(weights), clock);
  }

  void mlp_block(Team& team, int layer, Clock& clock) const {
    const LayerWeights& weights = call_.layers[layer];
    const bf16* normed = residual_.norm(team, weights.mlp_norm, clock);
    auto activate = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int) {
      for (int r = 0; r < rows; ++r) {
        const Vec gate = load(c + r * ldc), up = load(c + r * ldc + kGroup);
        store(buffers_.activated + residual_.place(first + r, group / 2 * kGroup, shape_.intermediate),
              mul(call_.activation == kSilu ? silu(gate) : gelu_tanh(gate), up));
      }
    };
    matmul(team, residual_.input(team, normed, shape_.hidden), shape_.tokens, weights.gate_up, shape_.hidden,
           2 * shape_.intermediate / kGroup, activate);
    team.barrier();
    clock.mark(kGateUp);
    residual_.add_product(team, buffers_.activated, shape_.intermediate, weights.down, nullptr, weights.down_norm);
    clock.mark(kDown);
  }

  // The inputs of an MLP that is computed outside, and what it adds.
  void fill_inputs(const Team& team, int layer, Clock& clock) const {
    residual_.norm_to(team, call_.layers[layer].mlp_norm, call_.mlp.inputs, nullptr, clock);
  }
  void add_outputs(Team& team, int layer, Clock& clock) const {
    residual_.add_rows(team, call_.mlp.outputs, call_.layers[layer].down_norm);
    clock.mark(kDown);
  }

  // `rows`: where the result of each row goes; null: to its own place.
  void finish(const Team& team, const int64_t* rows, Clock& clock) const {
    residual_.norm_to(team, call_.final_norm, call_.result, rows, clock);
  }

 private:
  AttentionCall of_layer(const LayerWeights& layer) const {
    const LayerGroup& group = call_.groups[layer.group];
    AttentionCall attention = *group.attention;
    attention.q = buffers_.qkv;
    attention.k_new = buffers_.qkv + shape_.q;
    attention.v_new = buffers_.qkv + shape_.q + attention.kv_heads * shape_.head_dim;
    attention.q_token = attention.k_token = attention.v_token = shape_.qkv;
    attention.q_head = attention.k_head = attention.v_head = shape_.head_dim;
    attention.out = buffers_.attended;
    attention.out_token = shape_.q;
    attention.sinks = layer.sinks;
    attention.k = group.tiles + layer.place * group.layer_bytes;
    attention.v = group.tiles + layer.place * group.layer_bytes + group.v_bytes;
    return attention;
  }

  // The result of a row that is not read.
  void check_row(int64_t t) const {
    if (std::binary_search(call_.reads, call_.reads + call_.read_count, t)) return;
    bf16* result = call_.result + t * shape_.hidden;
    std::fill(result, result + shape_.hidden, bf16{});
    const bf16* key = buffers_.qkv + t * shape_.qkv + shape_.q;
    if (!all_finite(key, shape_.qkv - shape_.q)) store_float(result[0], NAN);
  }

  // Attention, whose keys and values have been written, up to the residual.
  void attend(Team& team, const LayerWeights& weights, const AttentionCall& attention, Clock& clock) const {
    plans_.of(weights).attend(team, attention);
    clock.mark(kAttention);
    const bf16* attended = residual_.retile(team);
    residual_.add_product(team, attended, shape_.q, weights.out, weights.out_bias, weights.out_norm);
    clock.mark(kOut);
  }

  // q, k and v of some heads, then a barrier.
  void project(Team& team, const LayerWeights& weights, const bf16* normed, Heads heads, Clock& clock) const {
    if (few_) {
      project_together(team, weights, normed, heads);
      clock.mark(kQkv);
      finish_heads(team, weights, heads);
    } else {
      project_heads(team, weights, residual_.input(team, normed, shape_.hidden), heads);
    }
    team.barrier();
    clock.mark(few_ ? kRope : kQkv);
  }

  void project_together(Team& team, const LayerWeights& weights, const bf16* normed, Heads heads) const {
    const int64_t from = heads.first * shape_.head_dim / kGroup;
    const int64_t count = (heads.second - heads.first) * shape_.head_dim / kGroup;
    auto store = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int groups) {
      for (int r = 0; r < rows; ++r)
        std::memcpy(buffers_.projected + (first + r) * shape_.qkv + (from + group) * kGroup, c + r * ldc,
                    groups * kGroup * sizeof(float));
    };
    matmul(team, residual_.input(team, normed, shape_.hidden), shape_.tokens, weights.qkv.from_group(from, shape_.hidden),
           shape_.hidden, count, store);
    team.barrier();
  }

  void finish_heads(const Team& team, const LayerWeights& weights, Heads heads) const {
    const int count = heads.second - heads.first;
    int64_t first, last;
    team.split(shape_.tokens * count, first, last);
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = i / count, head = heads.first + i % count;
      finish_one(weights, t, head, buffers_.projected + t * shape_.qkv + head * shape_.head_dim);
    }
  }

  // Many rows: `projected` would not stay in the cache, so each thread projects some rows of one head and finishes them.
  void project_heads(Team& team, const LayerWeights& weights, const Input& a, Heads heads) const {
    const int64_t dim = shape_.head_dim;
    const int64_t parts = (shape_.tokens + kRowsOfTask - 1) / kRowsOfTask;
    float* mine = buffers_.projected + team.index * kRowsOfTask * dim;
    Team alone(0, 1);
    Shares tasks(team, (heads.second - heads.first) * parts);
    for (int64_t task; tasks.take(task);) {
      const int64_t head = heads.first + task / parts, from = task % parts * kRowsOfTask;
      const int64_t count = std::min(kRowsOfTask, shape_.tokens - from);
      auto store = [&](const float* c, int64_t ldc, int64_t row, int rows, int64_t group, int groups) {
        for (int r = 0; r < rows; ++r)
          std::memcpy(mine + (row + r) * dim + group * kGroup, c + r * ldc, groups * kGroup * sizeof(float));
      };
      matmul(alone, a.from_row(from), count, weights.qkv.from_group(head * dim / kGroup, shape_.hidden), shape_.hidden,
             dim / kGroup, store);
      for (int64_t t = 0; t < count; ++t) {
        // Attention of the layer before has read these lines, maybe on another core.
        const bf16* later = buffers_.qkv + (from + t + 8) * shape_.qkv + head * dim;
        for (int64_t d = 0; d < dim; d += 32) __builtin_prefetch(later + d, 1);
        finish_one(weights, from + t, head, mine + t * dim);
      }
    }
  }

  // One projected head of one token, [head_dim], to the left side of attention.
  void finish_one(const LayerWeights& weights, int64_t t, int64_t head, float* projected) const {
    const int dim = batch_.head_dim;
    const bool is_value = head >= batch_.heads + batch_.kv_heads;
    const int64_t angles = (weights.rope * shape_.tokens + t) * (call_.rotary / 2);
    finish_head(projected, weights.qkv_bias ? weights.qkv_bias + head * dim : nullptr,
                head < batch_.heads ? weights.q_norm : (is_value ? nullptr : weights.k_norm),
                is_value || weights.rope < 0 ? nullptr : call_.cos + angles, call_.sin + angles, dim, call_.rotary,
                call_.interleaved != 0, call_.eps, buffers_.qkv + t * shape_.qkv + head * dim);
  }

  const DecoderCall& call_;
  const Shape shape_;
  const bool few_;
  Plans& plans_;
  const AttentionCall& batch_;  // its heads are those of all groups
  const Buffers buffers_;
  const Residual residual_;
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

// The last layer computes the rows that are read.
void run_reads(const DecoderCall& call, int computed, int next) {
  const Reads reads(call);
  Plans plans(call), read_plans(reads.call);
  const Decoder decoder(call, plans), read(reads.call, read_plans);
  const int last = call.layer_count - 1;
  auto body = [&](Team& team) {
    Clock clock(team, call.part_seconds);
    if (computed == last) {
      read.add_outputs(team, last, clock);
      return read.finish(team, call.reads, clock);
    }
    if (computed >= 0) decoder.add_outputs(team, computed, clock);
    decoder.run(team, computed + 1, std::min(next, last), clock);
    if (next < last) {
      decoder.attention_block(team, next, clock);
      return decoder.fill_inputs(team, next, clock);
    }
    decoder.write_last(team, clock);
    reads.take(team, call);
    team.barrier();
    if (call.read_count == 0) return;
    read.attend_last(team, clock);
    if (next == last) return read.fill_inputs(team, last, clock);
    read.mlp_block(team, last, clock);
    read.finish(team, call.reads, clock);
  };
  parallel(last_attention(call).threads, body);
}

int run_decoder(DecoderCall& call, int computed) {
  const bool some = reads_some(call);
  int next = next_outside(call, computed + 1);
  call.mlp.rows = some && next == call.layer_count - 1 ? call.read_count : call.tokens;
  if (call.mlp.rows == 0) next = call.layer_count;
  (some ? run_reads : run_all)(call, computed, next);
  return next;
}

}  // namespace

const DecoderKernels BATON_DECODER = {scratch_bytes, run_decoder};

}  // namespace baton
