// Gives access to the K and V rows of a context: in the pages, or dequantised into the caller's memory. Included by
// files that are compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention.h"
#include "kv_format.h"

namespace baton {
namespace {

// Prefetches a quantised tile that is read next. The hardware prefetcher does not follow scattered pages.
inline void prefetch_tile(const uint8_t* tile, const AttentionCall& call) {
  const int64_t bytes = stored_bytes(static_cast<Format>(call.format), int64_t{call.page_size} * call.head_dim);
  for (int64_t at = 0; at < std::min<int64_t>(bytes, 2048); at += 64) __builtin_prefetch(tile + at);
}

// Sets `rows` to the K (or V) rows of context tokens [from, from + n) of a sequence and KV head. Rows of a quantised
// pool are dequantised into `values`, which has room for n rows.
template <bool Quantised, typename T>
void context_rows(const AttentionCall& call, const void* base, int seq, int kv_head, int from, int n, T* values,
                  const T** rows) {
  using Stored = std::conditional_t<Quantised, uint8_t, T>;
  const int32_t* table = call.page_table + seq * call.table_stride;
  const Stored* head = static_cast<const Stored*>(base) + kv_head * call.tile_stride;
  for (int j = 0; j < n;) {
    const int offset = (from + j) % call.page_size;
    const int run = std::min(n - j, call.page_size - offset);
    const Stored* tile = head + table[(from + j) / call.page_size] * call.page_stride;
    const T* first;
    if constexpr (Quantised) {
      const int next = from + j + run;
      if (next < call.seq_lens[seq]) prefetch_tile(head + table[next / call.page_size] * call.page_stride, call);
      load_rows(static_cast<Format>(call.format), tile, call.page_size, offset, run, call.head_dim,
                values + j * call.head_dim);
      first = values + j * call.head_dim;
    } else {
      first = tile + offset * call.head_dim;
    }
    for (int i = 0; i < run; ++i) rows[j + i] = first + i * call.head_dim;
    j += run;
  }
}

}  // namespace
}  // namespace baton
