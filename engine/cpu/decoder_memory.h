// The memory of a fused decoder's step. Everything has internal linkage, because it is compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "linear.h"

namespace baton {
namespace {

constexpr int64_t kRowsOfTask = 128;  // rows of one head that a thread projects and finishes in its cache

const LayerWeights& last_layer(const DecoderCall& call) { return call.layers[call.layer_count - 1]; }

// That of the last layer. All groups have its threads.
const AttentionCall& last_attention(const DecoderCall& call) { return *call.groups[last_layer(call).group].attention; }

// The heads of a layer.
struct Heads {
  int query, kv;  // kv: of its own keys, and of as many values
  int64_t dim;

  Heads(const DecoderCall& call, const LayerWeights& layer) : Heads(*call.groups[layer.group].attention, layer.shares) {}
  int all() const { return query + 2 * kv; }
  int64_t queries() const { return query * dim; }  // values of all of them
  int64_t width() const { return all() * dim; }

 private:
  Heads(const AttentionCall& attention, bool shares)
      : query(attention.heads), kv(shares ? 0 : attention.kv_heads), dim(attention.head_dim) {}
};

// The sizes of a call, the largest of all its layers.
struct Shape {
  int64_t tokens, hidden, queries = 0, heads = 0, head_dim = 0, activated = 0;

  explicit Shape(const DecoderCall& call) : tokens(call.tokens), hidden(call.hidden) {
    for (int i = 0; i < call.layer_count; ++i) {
      const LayerWeights& layer = call.layers[i];
      activated = std::max<int64_t>({activated, layer.intermediate, call.layer_input_width});
      if (call.groups[layer.group].attention == nullptr) continue;
      const Heads of_layer(call, layer);
      queries = std::max(queries, of_layer.queries());
      heads = std::max(heads, of_layer.width());
      head_dim = std::max(head_dim, of_layer.dim);
    }
  }
};

// Hands out scratch memory. If the base is null, it only counts the bytes.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return at;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

struct Buffers {
  bf16* normed;     // [tokens, hidden], one per thread if there are few tokens
  float* projected;  // [tokens, heads of a layer]; if there are many tokens, [kRowsOfTask, head_dim] per thread
  bf16* qkv;        // [tokens, heads of a layer]
  bf16* attended;   // [tokens, queries]
  bf16* retiled;    // attended in tiles, when rows are in tiles
  bf16* activated;  // [tokens, intermediate], or [tokens, layer_input_width]
  float* added;     // [tokens, hidden], if what layers add is normed
  char* rounded;    // for int8 weights: rows of the left side, shared by the threads
};

Buffers take_buffers(Arena& arena, const DecoderCall& call) {
  const Shape shape(call);
  const int threads = last_attention(call).threads;
  const bool few = shape.tokens <= kFewRows;
  const int64_t copies = few ? threads : 1;
  const int64_t projected = few ? shape.tokens * shape.heads : threads * kRowsOfTask * shape.head_dim;
  return {arena.take<bf16>(copies * shape.tokens * shape.hidden), arena.take<float>(projected),
          arena.take<bf16>(shape.tokens * shape.heads), arena.take<bf16>(shape.tokens * shape.queries),
          arena.take<bf16>(shape.tokens * shape.queries), arena.take<bf16>(shape.tokens * shape.activated),
          arena.take<float>(last_layer(call).out_norm != nullptr ? shape.tokens * shape.hidden : 0),
          arena.take<char>(Int8Rows::bytes(shape.tokens, std::max({shape.hidden, shape.queries, shape.activated})))};
}

// Few rows read the weights for the same time, however many they are.
bool reads_some(const DecoderCall& call) { return call.tokens > kFewRows && call.read_count < call.tokens; }

int64_t buffer_bytes(const DecoderCall& call) {
  Arena arena(nullptr);
  take_buffers(arena, call);
  return arena.used();
}

Buffers take_buffers(const DecoderCall& call) {
  Arena arena(call.scratch);
  return take_buffers(arena, call);
}

// The rows that are read, as a call of their own for the layers from `tail` on, in memory behind that of all.
struct Reads {
  AttentionCall attention[kGroups];
  DecoderCall call;
  float *cos, *sin;
  bf16* layer_inputs;
  int64_t end;  // of the scratch memory, in bytes

  explicit Reads(const DecoderCall& all) : call(all) {
    const int64_t begin = buffer_bytes(all);
    Arena arena(all.scratch + begin);
    call.layers += all.tail;
    call.layer_count -= all.tail;
    for (LayerGroup& group : call.groups) group.attention = nullptr;
    for (int i = 0; i < call.layer_count; ++i) {
      const int group = call.layers[i].group;
      attention[group] = *all.groups[group].attention;
      attention[group].starts = all.read_starts;
      call.groups[group].attention = &attention[group];
    }
    call.tokens = all.read_count;
    call.residual = arena.take<float>(call.tokens * call.hidden);
    call.cos = cos = arena.take<float>(call.ropes * call.tokens * call.rotary / 2);
    call.sin = sin = arena.take<float>(call.ropes * call.tokens * call.rotary / 2);
    call.layer_inputs = layer_inputs = arena.take<bf16>(call.tokens * call.layer_count * call.layer_input_width);
    call.scratch = all.scratch + begin + arena.used();
    end = begin + arena.used() + buffer_bytes(call);
  }
  Reads(const Reads&) = delete;  // the call points to `attention`

  // Copies this thread's part of what there is of the rows.
  void take(const Team& team, const DecoderCall& all) const {
    const int64_t half = call.rotary / 2, width = int64_t{call.layer_input_width};
    int64_t first, last;
    team.split(call.tokens, first, last);
    for (int64_t t = first; t < last; ++t) {
      const int64_t from = all.reads[t];
      std::memcpy(call.residual + t * call.hidden, all.residual + from * call.hidden, call.hidden * sizeof(float));
      for (int64_t rope = 0; rope < call.ropes; ++rope) {
        const int64_t to = (rope * call.tokens + t) * half, at = (rope * all.tokens + from) * half;
        std::memcpy(cos + to, all.cos + at, half * sizeof(float));
        std::memcpy(sin + to, all.sin + at, half * sizeof(float));
      }
      if (width > 0)
        std::memcpy(layer_inputs + t * call.layer_count * width,
                    all.layer_inputs + (from * all.layer_count + all.tail) * width,
                    call.layer_count * width * sizeof(bf16));
    }
  }
};

}  // namespace
}  // namespace baton
