// Attention of a chunk of new tokens as packed matrix products.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "linear.h"
#include "vector_avx512.h"

namespace baton {
namespace {

const bf16* context_row(const AttentionCall& call, const void* base, int seq, int kv_head, int token) {
  const int64_t page = call.page_table[seq * call.table_stride + token / call.page_size];
  return static_cast<const bf16*>(base) + page * call.page_stride + kv_head * call.tile_stride +
         token % call.page_size * int64_t{call.head_dim};
}

// 2^x of 16 numbers at most 0, relative error 3e-6: the result is rounded to bfloat16.
inline __m512 power_of_two(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, 0x08);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.33335581e-3f);
  for (float coefficient : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(p, n);
}

// Softmax step of one row: weights (bfloat16) of scores [first, seen) of `n` to `to`, 0 for the others. `scale`
// includes log2(e); `top` is of scaled scores. Returns the factor for what was summed before. Scores before `first`
// are overwritten.
float weigh(float* scores, int first, int seen, int n, float scale, float& top, float& sum, bf16* to) {
  for (int j = 0; j < first; ++j) scores[j] = kUnseen;
  const int whole = seen & ~15;
  const __mmask16 rest = static_cast<__mmask16>((1u << (seen - whole)) - 1);
  const float before = top;
  const __m512 factor = _mm512_set1_ps(scale);
  __m512 most = _mm512_set1_ps(-1e30f);
  for (int j = 0; j < whole; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + j));
  most = _mm512_mask_max_ps(most, rest, most, _mm512_maskz_loadu_ps(rest, scores + whole));
  if (seen > first) top = std::max(top, _mm512_reduce_max_ps(most) * scale);
  const __m512 bound = _mm512_set1_ps(top);
  __m512 total = _mm512_setzero_ps();
  for (int j = 0; j < whole; j += 16) {
    const __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j), factor, bound));
    total = _mm512_add_ps(total, weight);
    store_bf16(to + j, weight);
  }
  if (whole < n) {
    const __m512 scaled = _mm512_fmsub_ps(_mm512_maskz_loadu_ps(rest, scores + whole), factor, bound);
    const __m512 weight = _mm512_maskz_mov_ps(rest, power_of_two(_mm512_min_ps(scaled, _mm512_setzero_ps())));
    total = _mm512_add_ps(total, weight);
    store_bf16(to + whole, weight);
  }
  for (int j = whole + 16; j < n; j += 16) store_bf16(to + j, _mm512_setzero_ps());
  const float keep = std::exp2(before - top);
  sum = sum * keep + _mm512_reduce_add_ps(total);
  return keep;
}

// What a row's sums are multiplied with; `top` is of scores times log2(e). `sink`: a logit that joins the denominator,
// or null.
float share_of(float top, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  const float logit = *sink * 1.44269504f, most = std::max(top, logit), keep = std::exp2(top - most);
  return keep / (sum * keep + std::exp2(logit - most));
}

}  // namespace

void pack_context(const AttentionCall& call, int seq, int kv_head, int tile, bf16* k, bf16* v) {
  const int dim = call.head_dim, start = context_start(call, seq), length = call.seq_lens[seq] - start;
  const int from = tile * kContextTile;
  const int n = std::min(kContextTile, length - from);
  const int wide = static_cast<int>(padded(n));
  alignas(64) static const bf16 zeros[kMaxHeadDim] = {};
  const bf16* rows[kContextTile];
  for (int j = 0; j < wide; ++j) rows[j] = j < n ? context_row(call, call.k, seq, kv_head, start + from + j) : zeros;
  bf16* to = k + int64_t{from} * dim;
  for (int j = 0; j < wide; j += 16)
    for (int d = 0; d < dim; d += 2)
      for (int i = 0; i < 16; ++i, to += 2) std::memcpy(to, rows[j + i] + d, 2 * sizeof(bf16));
  for (int j = 0; j < wide; ++j) rows[j] = j < n ? context_row(call, call.v, seq, kv_head, start + from + j) : zeros;
  to = v + int64_t{from} * dim;
  for (int d = 0; d < dim; d += 16)
    for (int j = 0; j < wide; j += 2, to += 32) {
      const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[j] + d)));
      const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[j + 1] + d)));
      _mm512_storeu_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

void attend_by_products(const AttentionCall& call, const AttentionItem& item, const bf16* k, const bf16* v) {
  struct Block {  // what a thread works on; too large for a small stack
    alignas(64) bf16 q[kRowBlock * kMaxHeadDim];
    alignas(64) float scores[kRowBlock * kContextTile];
    alignas(64) bf16 weights[kRowBlock * kContextTile];
    alignas(64) float product[kRowBlock * kMaxHeadDim];
    alignas(64) float acc[kRowBlock * kMaxHeadDim];
  };
  static thread_local Block block;
  const Gemm gemm = gemm_for();
  const float scale = call.scale * 1.44269504f;
  const int group = call.heads / call.kv_heads, dim = call.head_dim;
  const int64_t start = call.starts[item.seq];
  // Context tokens count from the first that is packed.
  const int origin = context_start(call, item.seq), length = call.seq_lens[item.seq] - origin;
  const int before = length - static_cast<int>(call.starts[item.seq + 1] - start);
  const int total = (item.last - item.first) * group;
  for (int done = 0; done < total; done += kRowBlock) {
    const int count = std::min(kRowBlock, total - done);
    float top[kRowBlock], sum[kRowBlock];
    const auto token = [&](int r) { return item.first + (done + r) / group; };
    const auto head = [&](int r) { return item.kv_head * group + (done + r) % group; };
    const auto first = [&](int r) { return first_seen(call, origin + before + token(r)) - origin; };
    for (int r = 0; r < count; ++r) {
      std::memcpy(block.q + r * dim,
                  static_cast<const bf16*>(call.q) + (start + token(r)) * call.q_token + head(r) * call.q_head,
                  dim * sizeof(bf16));
      top[r] = -1e30f;
      sum[r] = 0;
    }
    std::memset(block.acc, 0, sizeof(float) * count * dim);
    const int visible = before + token(count - 1) + 1;
    const int unseen = std::max(0, first(0)) / 32 * 32;  // no row of this block sees what is before
    for (int tile = unseen / kContextTile * kContextTile; tile < visible; tile += kContextTile) {
      const int from = std::max(tile, unseen);
      const int n = static_cast<int>(padded(std::min(tile + kContextTile, visible) - from));
      const int stored = static_cast<int>(padded(std::min(kContextTile, length - tile)));
      gemm(block.q, dim, count, k + int64_t{from} * dim, dim, dim, n / kGroup, block.scores, kContextTile);
      for (int r = 0; r < count; ++r) {
        const int seen = std::clamp(before + token(r) + 1 - from, 0, n);
        const float keep = weigh(block.scores + r * kContextTile, std::clamp(first(r) - from, 0, seen), seen, n, scale, top[r], sum[r],
                                 block.weights + r * kContextTile);
        if (keep != 1.0f)
          for (int d = 0; d < dim; ++d) block.acc[r * dim + d] *= keep;
      }
      gemm(block.weights, kContextTile, count, v + int64_t{tile} * dim + (from - tile) * kGroup, stored, n, dim / kGroup, block.product, dim);
      for (int i = 0; i < count * dim; ++i) block.acc[i] += block.product[i];
    }
    for (int r = 0; r < count; ++r) {
      bf16* to = static_cast<bf16*>(call.out) + (start + token(r)) * call.out_token + head(r) * dim;
      const __m512 share = _mm512_set1_ps(share_of(top[r], sum[r], call.sinks ? call.sinks + head(r) : nullptr));
      for (int d = 0; d < dim; d += 16) store_bf16(to + d, _mm512_mul_ps(_mm512_load_ps(block.acc + r * dim + d), share));
    }
  }
}

}  // namespace baton
