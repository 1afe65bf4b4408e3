// The memory of a fused decoder's step. Everything has internal linkage, because it is compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "linear.h"

namespace baton {
namespace {

constexpr int64_t kRowsOfTask = 128;  // rows of one head that a thread projects and finishes in its cache

struct Shape {
  int64_t tokens, hidden, intermediate, qkv, q, head_dim;

  explicit Shape(const DecoderCall& call)
      : tokens(call.tokens),
        hidden(call.hidden),
        intermediate(call.intermediate),
        qkv((call.attention->heads + 2 * call.attention->kv_heads) * int64_t{call.attention->head_dim}),
        q(int64_t{call.attention->heads} * call.attention->head_dim),
        head_dim(call.attention->head_dim) {}
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
  char* rounded;    // for int8 weights: rows of the left side, shared by the threads
};

Buffers take_buffers(Arena& arena, const Shape& shape, int threads) {
  const bool few = shape.tokens <= kFewRows;
  const int64_t copies = few ? threads : 1;
  const int64_t projected = few ? shape.tokens * shape.qkv : threads * kRowsOfTask * shape.head_dim;
  return {arena.take<bf16>(copies * shape.tokens * shape.hidden), arena.take<float>(projected),
          arena.take<bf16>(shape.tokens * shape.qkv), arena.take<bf16>(shape.tokens * shape.q),
          arena.take<bf16>(shape.tokens * shape.q), arena.take<bf16>(shape.tokens * shape.intermediate),
          arena.take<char>(Int8Rows::bytes(shape.tokens, std::max({shape.hidden, shape.q, shape.intermediate})))};
}

// Few rows read the weights for the same time, however many they are.
bool reads_some(const DecoderCall& call) { return call.tokens > kFewRows && call.read_count < call.tokens; }

int64_t buffer_bytes(const DecoderCall& call) {
  Arena arena(nullptr);
  take_buffers(arena, Shape(call), call.attention->threads);
  return arena.used();
}

// The rows that are read, as a call of their own, in memory behind that of all.
struct Reads {
  AttentionCall attention;
  DecoderCall call;
  float *cos, *sin;
  int64_t end;  // of the scratch memory, in bytes

  explicit Reads(const DecoderCall& all) : attention(*all.attention), call(all) {
    const int64_t begin = buffer_bytes(all);
    Arena arena(all.scratch + begin);
    attention.starts = all.read_starts;
    call.attention = &attention;
    call.tokens = all.read_count;
    call.residual = arena.take<float>(call.tokens * call.hidden);
    call.cos = cos = arena.take<float>(call.tokens * attention.head_dim / 2);
    call.sin = sin = arena.take<float>(call.tokens * attention.head_dim / 2);
    call.scratch = all.scratch + begin + arena.used();
    end = begin + arena.used() + buffer_bytes(call);
  }
  Reads(const Reads&) = delete;  // the call points to `attention`

  // Copies this thread's part of what there is of the rows.
  void take(const Team& team, const DecoderCall& all) const {
    const int64_t half = attention.head_dim / 2;
    int64_t first, last;
    team.split(call.tokens, first, last);
    for (int64_t t = first; t < last; ++t) {
      const int64_t from = all.reads[t];
      std::memcpy(call.residual + t * call.hidden, all.residual + from * call.hidden, call.hidden * sizeof(float));
      std::memcpy(cos + t * half, all.cos + from * half, half * sizeof(float));
      std::memcpy(sin + t * half, all.sin + from * half, half * sizeof(float));
    }
  }
};

}  // namespace
}  // namespace baton
