// One attention work item, compiled once per instruction set (BATON_KERNELS names the table it fills).
// Loops are plain C++ that the compiler vectorises. With AVX2 and AVX-512 the two that read bfloat16 K and V are replaced.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_rows.h"
#include "numeric.h"
#if defined(__AVX512F__)
#include "vector_avx512.h"
#endif

namespace baton {
namespace {

constexpr int kRows = kQueryBlock * 4;  // query rows (token, head) handled together

template <typename T>
struct Rows {
  int count = 0;
  const T* q[kRows];
  int first[kRows];    // this row sees context tokens [first, visible)
  int visible[kRows];
  float top[kRows];    // running maximum of scores
  float sum[kRows];
  alignas(64) float scores[kRows][kTile];
  alignas(64) float acc[kRows][kMaxHeadDim];
};

// Dequantised tiles of a quantised pool: two of K (the current one and the next) and one of V.
template <typename T>
struct Dequantised {
  alignas(64) T k[2][kTile * kMaxHeadDim];
  alignas(64) T v[kTile * kMaxHeadDim];
};

template <typename T>
Dequantised<T>& dequantised() {
  static thread_local Dequantised<T> memory;
  return memory;
}

template <typename T>
void score_tile(Rows<T>& rows, const T* const* keys, const T* const*, int n, int dim, float scale) {
  for (int j = 0; j < n; ++j) {
    for (int r = 0; r < rows.count; ++r) {
      const T* q = rows.q[r];
      const T* k = keys[j];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int d = 0; d < dim; ++d) sum += to_float(q[d]) * to_float(k[d]);
      rows.scores[r][j] = sum * scale;
    }
  }
}

// acc[r] += sum_j scores[r][j] * values[j]. The last array of pointers (here and in score_tile) holds rows to prefetch,
// as many as are read.
template <typename T>
void add_values(Rows<T>& rows, const T* const* values, const T* const*, int n, int dim) {
  for (int r = 0; r < rows.count; ++r) {
    float* acc = rows.acc[r];
    for (int j = 0; j < n; ++j) {
      const float p = rows.scores[r][j];
      const T* v = values[j];
#pragma omp simd
      for (int d = 0; d < dim; ++d) acc[d] += p * to_float(v[d]);
    }
  }
}

// The hardware prefetcher does not follow scattered pages. Rows of the next tile go to the second-level cache, because
// three tiles fill the first one; a row that is read soon goes to the first one.
inline void prefetch_rows(const bf16* next, const bf16* near, int dim) {
  for (int d = 0; d < dim; d += 32) {
    __builtin_prefetch(next + d, 0, 2);
    __builtin_prefetch(near + d, 0, 3);
  }
}

#if defined(__AVX512F__)
#include "attention_avx512.h"
#elif defined(__AVX2__)
#include "attention_avx2.h"
#endif

// One online-softmax step: scores become weights, earlier sums are rescaled.
template <typename T>
void softmax_step(Rows<T>& rows, int from, int n, int dim) {
  for (int r = 0; r < rows.count; ++r) {
    float* s = rows.scores[r];
    const int seen = std::clamp(rows.visible[r] - from, 0, n);
    const int first = std::clamp(rows.first[r] - from, 0, seen);
    std::fill(s, s + first, kUnseen);
    float top = rows.top[r];
#pragma omp simd reduction(max : top)
    for (int j = 0; j < seen; ++j) top = s[j] > top ? s[j] : top;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < seen; ++j) {
      s[j] = fast_exp(s[j] - top);
      sum += s[j];
    }
    std::fill(s + seen, s + n, 0.0f);
    const float keep = fast_exp(rows.top[r] - top);
    if (keep != 1.0f) {
      float* acc = rows.acc[r];
#pragma omp simd
      for (int d = 0; d < dim; ++d) acc[d] *= keep;
    }
    rows.sum[r] = rows.sum[r] * keep + sum;
    rows.top[r] = top;
  }
}

// The factor that normalises a row's sums. `sink`: a logit that joins the denominator, or null.
inline float share(float top, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  const float most = std::max(top, *sink), keep = fast_exp(top - most);
  return keep / (sum * keep + fast_exp(*sink - most));
}

// The first keys of an item that is computed next, to prefetch them, at most n. Returns how many there are.
template <typename T>
int first_keys(const AttentionCall& call, const AttentionItem& item, int n, const T** rows) {
  const int tokens = static_cast<int>(call.starts[item.seq + 1] - call.starts[item.seq]);
  const int from = std::max(item.from, first_seen(call, call.seq_lens[item.seq] - tokens + item.first));
  n = std::min(n, item.to - from);
  context_rows<false>(call, call.k, item.seq, item.kv_head, from, n, static_cast<T*>(nullptr), rows);
  return n;
}

// Has the addresses of rows translated, one in each 4 KiB, a step before their lines are prefetched: prefetches that wait for a
// translation hold up others. `to_values`: the bytes from a row of K to that of V.
template <typename T>
void translate(const T* const* rows, int n, int dim, int64_t to_values) {
  const int step = std::max<int>(1, 4096 / (dim * sizeof(T)));
  for (int j = 0; j < n; j += step) __builtin_prefetch(reinterpret_cast<const char*>(rows[j]) + to_values, 0, 2);
}

template <typename T, bool Quantised>
void attend(const AttentionCall& call, const AttentionItem& item, const AttentionItem* following) {
  const int group = call.heads / call.kv_heads;
  const int dim = call.head_dim;
  const int64_t start = call.starts[item.seq];
  const int before = call.seq_lens[item.seq] - static_cast<int>(call.starts[item.seq + 1] - start);
  const int total = (item.last - item.first) * group;
  Rows<T> rows;
  T *k_memory[2] = {}, *v_memory = nullptr;
  if constexpr (Quantised) {
    Dequantised<T>& memory = dequantised<T>();
    k_memory[0] = memory.k[0], k_memory[1] = memory.k[1], v_memory = memory.v;
  }
  for (int done = 0; done < total; done += rows.count) {
    rows.count = std::min(kRows, total - done);
    int first_visible = item.to, last_visible = 0;
    for (int r = 0; r < rows.count; ++r) {
      const int token = item.first + (done + r) / group;
      const int head = item.kv_head * group + (done + r) % group;
      rows.q[r] = static_cast<const T*>(call.q) + (start + token) * call.q_token + head * call.q_head;
      rows.visible[r] = std::min(item.to, before + token + 1);
      rows.first[r] = std::max(item.from, first_seen(call, before + token));
      first_visible = std::min(first_visible, rows.first[r]);
      last_visible = std::max(last_visible, rows.visible[r]);
      rows.top[r] = -1e30f;
      rows.sum[r] = 0;
      std::memset(rows.acc[r], 0, sizeof(float) * dim);
    }
    const auto fetch = [&](const void* base, int from, int n, T* memory, const T** to) {
      context_rows<Quantised>(call, base, item.seq, item.kv_head, from, n, memory, to);
    };
    const T* keys[2][kTile];  // of this tile and of the next, which is fetched while this one is computed
    const T* values[kTile];
    fetch(call.k, first_visible, std::min(kTile, last_visible - first_visible), k_memory[0], keys[0]);
    for (int from = first_visible, tile = 0; from < last_visible; from += kTile, tile ^= 1) {
      const int n = std::min(kTile, last_visible - from);
      int after = std::min(kTile, last_visible - from - n);
      const T** next = keys[tile ^ 1];
      fetch(call.v, from, n, v_memory, values);
      fetch(call.k, from + n, after, k_memory[tile ^ 1], next);
      if (!Quantised && after == 0 && following != nullptr) after = first_keys(call, *following, n, next);
      std::fill(next + after, next + kTile, keys[tile][0]);
      if constexpr (!Quantised) translate(next, after, dim, 0);
      score_tile(rows, keys[tile], values, n, dim, call.scale);
      if (call.softcap > 0)
        for (int r = 0; r < rows.count; ++r) cap_scores(rows.scores[r], n, 1.0f, call.softcap);
      softmax_step(rows, from, n, dim);
      if constexpr (!Quantised) translate(next, after, dim, static_cast<const char*>(call.v) - static_cast<const char*>(call.k));
      add_values(rows, values, next, n, dim);
    }
    for (int r = 0; r < rows.count; ++r) {
      if (item.partial != nullptr) {
        float* partial = item.partial + (done + r) * (dim + 2);
        std::memcpy(partial, rows.acc[r], sizeof(float) * dim);
        partial[dim] = rows.top[r];
        partial[dim + 1] = rows.sum[r];
        continue;
      }
      const int token = item.first + (done + r) / group;
      const int head = item.kv_head * group + (done + r) % group;
      T* out = static_cast<T*>(call.out) + (start + token) * call.out_token + head * dim;
      const float scale = share(rows.top[r], rows.sum[r], call.sinks ? call.sinks + head : nullptr);
      for (int d = 0; d < dim; ++d) store_float(out[d], rows.acc[r][d] * scale);
    }
  }
}

}  // namespace

const AttentionKernels BATON_KERNELS = {attend<float, false>, attend<bf16, false>, attend<float, true>,
                                        attend<bf16, true>};

}  // namespace baton
