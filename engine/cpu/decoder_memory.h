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

// That of the last layer. All groups have its heads and its threads.
const AttentionCall& last_attention(const DecoderCall& call) { return *call.groups[last_layer(call).group].attention; }

struct Shape {
  int64_t tokens, hidden, intermediate, qkv, q, head_dim;

  explicit Shape(const DecoderCall& call) : Shape(call, last_attention(call)) {}

 private:
  Shape(const DecoderCall& call, const AttentionCall& attention)
      : tokens(call.tokens),
        hidden(call.hidden),
        intermediate(call.intermediate),
        qkv((attention.heads + 2 * attention.kv_heads) * int64_t{attention.head_dim}),
        q(int64_t{attention.heads} * attention.head_dim),
        head_dim(attention.head_dim) {}
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
  float* projected;  // [tokens, qkv]; if there are many tokens, [kRowsOfTask, head_dim] per thread
  bf16* qkv;        // [tokens, qkv]
  bf16* attended;   // [tokens, q]
  bf16* retiled;    // attended in tiles, when rows are in tiles
  bf16* activated;  // [tokens, intermediate]
  float* added;     // [tokens, hidden], if what layers add is normed
  char* rounded;    // for int8 weights: rows of the left side, shared by the threads
};

Buffers take_buffers(Arena& arena, const DecoderCall& call) {
  const Shape shape(call);
  const int threads = last_attention(call).threads;
  const bool few = shape.tokens <= kFewRows;
  const int64_t copies = few ? threads : 1;
  const int64_t projected = few ? shape.tokens * shape.qkv : threads * kRowsOfTask * shape.head_dim;
  return {arena.take<bf16>(copies * shape.tokens * shape.hidden), arena.take<float>(projected),
          arena.take<bf16>(shape.tokens * shape.qkv), arena.take<bf16>(shape.tokens * shape.q),
          arena.take<bf16>(shape.tokens * shape.q), arena.take<bf16>(shape.tokens * shape.intermediate),
          arena.take<float>(last_layer(call).out_norm != nullptr ? shape.tokens * shape.hidden : 0),
          arena.take<char>(Int8Rows::bytes(shape.tokens, std::max({shape.hidden, shape.q, shape.intermediate})))};
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

// The rows that are read, as a call of their own for the last layer, in memory behind that of all.
struct Reads {
  AttentionCall attention;
  DecoderCall call;
  float *cos, *sin;
  int64_t end;  // of the scratch memory, in bytes

  explicit Reads(const DecoderCall& all) : attention(last_attention(all)), call(all) {
    const int64_t begin = buffer_bytes(all);
    Arena arena(all.scratch + begin);
    attention.starts = all.read_starts;
    for (LayerGroup& group : call.groups) group.attention = nullptr;
    call.groups[last_layer(all).group].attention = &attention;
    call.tokens = all.read_count;
    call.residual = arena.take<float>(call.tokens * call.hidden);
    call.cos = cos = arena.take<float>(call.ropes * call.tokens * call.rotary / 2);
    call.sin = sin = arena.take<float>(call.ropes * call.tokens * call.rotary / 2);
    call.scratch = all.scratch + begin + arena.used();
    end = begin + arena.used() + buffer_bytes(call);
  }
  Reads(const Reads&) = delete;  // the call points to `attention`

  // Copies this thread's part of what there is of the rows.
  void take(const Team& team, const DecoderCall& all) const {
    const int64_t half = call.rotary / 2;
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
    }
  }
};

}  // namespace
}  // namespace baton
