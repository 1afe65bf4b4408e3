// Reads and writes stored vectors; no other code of latent attention depends on their format. All sums are taken in
// float32, on rows that are converted to float32 one tile at a time. kRows queries share each converted row, so the
// conversion takes a few hundredths of the attention's time.
#pragma once
#include <cstring>

#include "kv_format.h"
#include "mla.h"
#include "numeric.h"

namespace baton::mla {
namespace {  // each file compiles this for its own instruction set

template <typename T>
void widen(const void* from, int n, float* to) {
  const T* values = static_cast<const T*>(from);
#pragma omp simd
  for (int i = 0; i < n; ++i) to[i] = to_float(values[i]);
}

template <typename T>
void narrow(const float* from, int n, void* to) {
  T* values = static_cast<T*>(to);
#pragma omp simd
  for (int i = 0; i < n; ++i) store_float(values[i], from[i]);
}

// Reads the row of context token `token` of a sequence, [rank + rope_dim] values, as float32.
inline void read_row(const Call& call, int seq, int token, float* to) {
  const int64_t page = call.page_table[seq * call.table_stride + token / call.page_size];
  const char* tile = static_cast<const char*>(call.rows) + page * call.page_bytes;
  const int offset = token % call.page_size, n = call.rank + call.rope_dim;
  if (call.format != kPlain)
    return load_rows(static_cast<Format>(call.format), tile, call.page_size, offset, 1, n, to);
  const char* row = tile + offset * call.row_bytes;
  if (call.storage == kFloat32) widen<float>(row, n, to);
  else widen<bf16>(row, n, to);
}

// Writes a new token's latent and rope part, which have the type of the activations, to its row of the pool.
inline void write_row(const Call& call, const char* latent, const char* rope, int64_t slot) {
  char* tile = static_cast<char*>(call.rows) + slot / call.page_size * call.page_bytes;
  const int offset = static_cast<int>(slot % call.page_size);
  if (call.format != kPlain) {
    float values[kMaxRow];
    const auto read = call.activations == kFloat32 ? widen<float> : widen<bf16>;
    read(latent, call.rank, values);
    read(rope, call.rope_dim, values + call.rank);
    return store_row(static_cast<Format>(call.format), values, tile, call.page_size, offset, call.rank + call.rope_dim);
  }
  char* row = tile + offset * call.row_bytes;
  const int64_t bytes = call.storage == kFloat32 ? sizeof(float) : sizeof(bf16);
  std::memcpy(row, latent, call.rank * bytes);
  std::memcpy(row + call.rank * bytes, rope, call.rope_dim * bytes);
}

inline int64_t activation_bytes(const Call& call) {
  return call.activations == kFloat32 ? sizeof(float) : sizeof(bf16);
}

// Reads `n` activations from element `at` of `base` as float32.
inline void read_activations(const Call& call, const void* base, int64_t at, int n, float* to) {
  const char* from = static_cast<const char*>(base) + at * activation_bytes(call);
  if (call.activations == kFloat32) widen<float>(from, n, to);
  else widen<bf16>(from, n, to);
}

// Writes the result of one query to `out`.
inline void write_out(const Call& call, int64_t token, int head, const float* values) {
  const int64_t at = token * call.out_token + int64_t{head} * call.rank;
  char* to = static_cast<char*>(call.out) + at * activation_bytes(call);
  if (call.activations == kFloat32) narrow<float>(values, call.rank, to);
  else narrow<bf16>(values, call.rank, to);
}

}  // namespace
}  // namespace baton::mla
