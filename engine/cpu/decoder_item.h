// Llama-shaped dense decoders (norm, q/k/v, rope, paged attention, gated MLP) as one parallel region per step.
//
// The residual is float32; the inputs of products are rounded to bfloat16 once. All threads run the whole program and
// synchronise at five barriers per layer, and at two more if what attention and MLPs add is normed. If there are few rows, every thread computes the norms of all rows itself,
// which is cheaper than a barrier. Of a prefill chunk one hidden state is read, or none, but K and V of all tokens: the last
// layer computes the rest for the rows that are read alone.
// Compiled once per instruction set: BATON_DECODER names the table it fills.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "decoder.h"
#include "decoder_memory.h"
#include "decoder_rows.h"
#include "exponential.h"
#include "isa.h"
#include "linear.h"

namespace baton {
namespace {

using Heads = std::pair<int, int>;  // [first, last) of the heads of q, k and v, in the order of the pack

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
    for (const Weights* weights : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      if (weights->format != kBFloat16Pack) return false;
    return true;
  });
}

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
      : call_(call), shape_(call), few_(call.tokens <= kFewRows), int8_(call.layers->qkv.format == kInt8Pack),
        tiled_(current_isa() >= kAmx && all_bfloat16(call)), plans_(plans), batch_(last_attention(call)) {
    Arena arena(call.scratch);
    buffers_ = take_buffers(arena, call);
  }

  // Computes the first `layers` layers.
  void run(Team& team, int layers, Clock& clock) const {
    for (int layer = 0; layer < layers; ++layer) {
      const LayerWeights& weights = call_.layers[layer];
      const bf16* normed = norm(team, weights.input_norm, clock);
      project(team, weights, normed, all_heads(), clock);
      const AttentionCall attention = of_layer(weights);
      plans_.of(weights).write(team, attention);
      team.barrier();
      rest_of_layer(team, weights, attention, clock);
    }
  }

  // K and V of the last layer, and the results of rows that are not read. The caller's next barrier comes before
  // the rows that are read go on.
  void write_last(Team& team, Clock& clock) const {
    const LayerWeights& weights = last_layer(call_);
    const bf16* normed = norm(team, weights.input_norm, clock);
    project(team, weights, normed, {batch_.heads, batch_.heads + 2 * batch_.kv_heads}, clock);
    plans_.of(weights).write(team, of_layer(weights));
    each_row(team, [&](int64_t t) { check_row(t); });
  }

  // The rest of the last layer, after its K and V.
  void run_last(Team& team, Clock& clock) const {
    const LayerWeights& weights = last_layer(call_);
    const bf16* normed = norm(team, weights.input_norm, clock);
    project(team, weights, normed, {0, batch_.heads}, clock);
    rest_of_layer(team, weights, of_layer(weights), clock);
  }

  // `rows`: where the result of each row goes; null: to its own place.
  void finish(Team& team, const int64_t* rows, Clock& clock) const {
    each_row(team, [&](int64_t t) {
      bf16* to = call_.result + (rows != nullptr ? rows[t] : t) * shape_.hidden;
      baton::norm_row(row(t), call_.final_norm, shape_.hidden, call_.eps, to);
    });
    clock.mark(kNorm);
  }

 private:
  float* row(int64_t t) const { return call_.residual + t * shape_.hidden; }
  Heads all_heads() const { return {0, batch_.heads + 2 * batch_.kv_heads}; }

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

  template <typename F>
  void each_row(const Team& team, F f) const {
    int64_t first, last;
    team.split(shape_.tokens, first, last);
    for (int64_t t = first; t < last; ++t) f(t);
  }

  // The index of column `column` of row `t` in the left side [tokens, k] of a product.
  int64_t place(int64_t t, int64_t column, int64_t k) const {
    return tiled_ ? Tiling{shape_.tokens, k}.place(t, column) : t * k + column;
  }

  // A left side. Many rows are rounded for int8 weights together; every product ends at a barrier, so its rows are free then.
  Input input(Team& team, const bf16* rows, int64_t k) const {
    Input a{rows, k, tiled_};
    if (int8_ && !few_) a.rounded = rounded_together(team, a, shape_.tokens, k, buffers_.rounded);
    return a;
  }

  // Returns attention's result in the format that the next product reads.
  const bf16* retile(Team& team) const {
    if (!tiled_ || shape_.tokens == 1) return buffers_.attended;
    tiled_together(team, {buffers_.attended, shape_.q, false}, shape_.tokens, shape_.q, buffers_.retiled);
    return buffers_.retiled;
  }

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

  void norm_row(int64_t t, const float* weight, bf16* left_side) const {
    const int64_t n = shape_.hidden;
    baton::norm_row(row(t), weight, n, call_.eps, left_side + place(t, 0, n),
                    tiled_ ? Tiling{shape_.tokens, n}.tile(t) : 32);
  }

  // From attention on, whose keys and values have been written.
  void rest_of_layer(Team& team, const LayerWeights& weights, const AttentionCall& attention, Clock& clock) const {
    plans_.of(weights).attend(team, attention);
    clock.mark(kAttention);
    add_product(team, retile(team), shape_.q, weights.out, weights.out_bias, weights.out_norm);
    clock.mark(kOut);
    mlp_block(team, weights, clock);
  }

  // q, k and v of some heads, then a barrier.
  void project(Team& team, const LayerWeights& weights, const bf16* normed, Heads heads, Clock& clock) const {
    if (few_) {
      project_together(team, weights, normed, heads);
      clock.mark(kQkv);
      finish_heads(team, weights, heads);
    } else {
      project_heads(team, weights, input(team, normed, shape_.hidden), heads);
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
    matmul(team, input(team, normed, shape_.hidden), shape_.tokens, weights.qkv.from_group(from, shape_.hidden),
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
                call_.eps, buffers_.qkv + t * shape_.qkv + head * dim);
  }

  void mlp_block(Team& team, const LayerWeights& weights, Clock& clock) const {
    const bf16* normed = norm(team, weights.mlp_norm, clock);
    auto activate = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int) {
      for (int r = 0; r < rows; ++r) {
        const Vec gate = load(c + r * ldc), up = load(c + r * ldc + kGroup);
        store(buffers_.activated + place(first + r, group / 2 * kGroup, shape_.intermediate),
              mul(call_.activation == kSilu ? silu(gate) : gelu_tanh(gate), up));
      }
    };
    matmul(team, input(team, normed, shape_.hidden), shape_.tokens, weights.gate_up, shape_.hidden,
           2 * shape_.intermediate / kGroup, activate);
    team.barrier();
    clock.mark(kGateUp);
    add_product(team, buffers_.activated, shape_.intermediate, weights.down, nullptr, weights.down_norm);
    clock.mark(kDown);
  }

  // residual += scale * norm(a * pack + bias), then a barrier. `weight`: of the norm; null: there is none.
  void add_product(Team& team, const bf16* a, int64_t k, Weights pack, const float* bias, const float* weight) const {
    const float scale = call_.residual_scale;
    auto add = [&](const float* c, int64_t ldc, int64_t first, int rows, int64_t group, int groups) {
      for (int r = 0; r < rows; ++r) {
        float* to = row(first + r) + group * kGroup;
        for (int i = 0; i < groups * kGroup; ++i) to[i] += scale * c[r * ldc + i];
        if (bias != nullptr)
          for (int i = 0; i < groups * kGroup; ++i) to[i] += scale * bias[group * kGroup + i];
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
    if (weight == nullptr) {
      matmul(team, left, shape_.tokens, pack, k, shape_.hidden / kGroup, add);
    } else {
      matmul(team, left, shape_.tokens, pack, k, shape_.hidden / kGroup, keep);
      team.barrier();
      each_row(team, [&](int64_t t) {
        add_normed(row(t), buffers_.added + t * shape_.hidden, weight, shape_.hidden, call_.eps, scale);
      });
    }
    team.barrier();
  }

  const DecoderCall& call_;
  const Shape shape_;
  const bool few_;
  const bool int8_;   // all packs are, or none
  const bool tiled_;  // the rows of products are in AMX tiles
  Plans& plans_;
  const AttentionCall& batch_;  // its heads are those of all groups
  Buffers buffers_;
};

int64_t scratch_bytes(const DecoderCall& call) { return reads_some(call) ? Reads(call).end : buffer_bytes(call); }

void run_decoder(const DecoderCall& call) {
  Plans plans(call);
  const Decoder decoder(call, plans);
  const int threads = last_attention(call).threads;
  if (!reads_some(call)) {
    auto body = [&](Team& team) {
      Clock clock(team, call.part_seconds);
      decoder.run(team, call.layer_count, clock);
      decoder.finish(team, nullptr, clock);
    };
    return parallel(threads, body);
  }
  const Reads reads(call);
  Plans read_plans(reads.call);
  const Decoder read(reads.call, read_plans);
  auto body = [&](Team& team) {
    Clock clock(team, call.part_seconds);
    decoder.run(team, call.layer_count - 1, clock);
    decoder.write_last(team, clock);
    reads.take(team, call);
    team.barrier();
    if (call.read_count == 0) return;
    read.run_last(team, clock);
    read.finish(team, call.reads, clock);
  };
  parallel(threads, body);
}

}  // namespace

const DecoderKernels BATON_DECODER = {scratch_bytes, run_decoder};

}  // namespace baton
