// Attention of a chunk of new tokens as packed matrix products. Compiled once per instruction set: BATON_PRODUCTS names
// the function it defines.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_rows.h"
#include "exponential.h"
#include "linear.h"

namespace baton {
namespace {

// Softmax step of one row. Writes the weights (bfloat16) of scores [first, seen) of `n` to `to`, and 0 for the others,
// whose scores are overwritten. n: a multiple of 16. `scale` includes log2(e); `top` is the maximum of the scaled scores.
// Returns the factor for earlier sums.
float weigh(float* scores, int first, int seen, int n, float scale, float& top, float& sum, bf16* to) {
  std::fill(scores, scores + first, kUnseen);
  std::fill(scores + seen, scores + n, kUnseen);
  const float before = top;
  Vec most = splat(-1e30f);
  for (int j = 0; j < n; j += 16) most = max(most, load(scores + j));
  if (seen > first) top = std::max(top, largest(most) * scale);
  const Vec bound = splat(-top), factor = splat(scale);
  Vec total = splat(0);
  for (int j = 0; j < n; j += 16) {
    const Vec weight = power_of_two(mul_add(load(scores + j), factor, bound));
    total = add(total, weight);
    store(to + j, weight);
  }
  const float keep = std::exp2(before - top);
  sum = sum * keep + sum_of(total);
  return keep;
}

// The factor that normalises a row's sums. `top` is the maximum of the scores times log2(e). `sink`: a logit that joins
// the denominator, or null.
float share_of(float top, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  const float logit = *sink * 1.44269504f, most = std::max(top, logit), keep = std::exp2(top - most);
  return keep / (sum * keep + std::exp2(logit - most));
}

// The working memory of a thread, which is too large for a small stack.
struct Memory {
  alignas(64) bf16 q[kProductRows * kMaxHeadDim];
  alignas(64) float acc[kProductRows * kMaxHeadDim];
  alignas(64) float scores[kRowBlock * kContextTile];
  alignas(64) bf16 weights[kRowBlock * kContextTile];
  alignas(64) float product[kRowBlock * kMaxHeadDim];
  float top[kProductRows], sum[kProductRows];
};

// Up to kProductRows rows (token, head) of an item. Context tokens count from the first that is packed.
class Products {
 public:
  Products(const AttentionCall& call, const AttentionItem& item, Memory& memory)
      : call_(call),
        item_(item),
        memory_(memory),
        gemm_(gemm_for()),
        group_(call.heads / call.kv_heads),
        dim_(call.head_dim),
        start_(call.starts[item.seq]),
        origin_(context_start(call, item.seq)),
        length_(call.seq_lens[item.seq] - origin_),
        before_(length_ - static_cast<int>(call.starts[item.seq + 1] - start_)) {}

  int rows() const { return (item_.last - item_.first) * group_; }
  int first_tile() const { return unseen(0) / kContextTile * kContextTile; }
  int visible(int r) const { return before_ + token(r) + 1; }

  void begin(int done, int count) {
    done_ = done;
    count_ = count;
    for (int r = 0; r < count; ++r) {
      std::memcpy(memory_.q + r * dim_,
                  static_cast<const bf16*>(call_.q) + (start_ + token(r)) * call_.q_token + head(r) * call_.q_head,
                  dim_ * sizeof(bf16));
      memory_.top[r] = -1e30f;
      memory_.sum[r] = 0;
    }
    std::memset(memory_.acc, 0, sizeof(float) * count * dim_);
  }

  // Adds the context tile of `tokens` tokens that starts at token `tile`, packed at `k` and `v`.
  void add_tile(int tile, int tokens, const bf16* k, const bf16* v) {
    for (int r = 0; r < count_; r += kRowBlock) add_rows(r, std::min(kRowBlock, count_ - r), tile, tokens, k, v);
  }

  void finish() const {
    for (int r = 0; r < count_; ++r) {
      bf16* to = static_cast<bf16*>(call_.out) + (start_ + token(r)) * call_.out_token + head(r) * dim_;
      const float* sink = call_.sinks ? call_.sinks + head(r) : nullptr;
      const Vec share = splat(share_of(memory_.top[r], memory_.sum[r], sink));
      for (int d = 0; d < dim_; d += 16) store(to + d, mul(load(memory_.acc + r * dim_ + d), share));
    }
  }

 private:
  int token(int r) const { return item_.first + (done_ + r) / group_; }
  int head(int r) const { return item_.kv_head * group_ + (done_ + r) % group_; }
  int first(int r) const { return first_seen(call_, origin_ + before_ + token(r)) - origin_; }
  int unseen(int r) const { return first(r) / 32 * 32; }  // this row and later rows do not see tokens before this one

  void add_rows(int row, int count, int tile, int tokens, const bf16* k, const bf16* v) {
    const int from = std::max(tile, unseen(row)), end = std::min(tile + kContextTile, visible(row + count - 1));
    if (from >= end) return;
    const int n = static_cast<int>(padded(end - from));
    const int stored = static_cast<int>(padded(tokens));
    float* acc = memory_.acc + row * dim_;
    gemm_(memory_.q + row * dim_, dim_, count, k + (from - tile) * dim_, dim_, dim_, n / kGroup, memory_.scores,
          kContextTile);
    for (int r = 0; r < count; ++r) {
      const int seen = std::clamp(visible(row + r) - from, 0, n), hidden = std::clamp(first(row + r) - from, 0, seen);
      float* scores = memory_.scores + r * kContextTile;
      const bool capped = call_.softcap > 0;
      if (capped) cap_scores(scores, seen, call_.scale, call_.softcap);
      const float keep = weigh(scores, hidden, seen, n, (capped ? 1.0f : call_.scale) * 1.44269504f,
                               memory_.top[row + r], memory_.sum[row + r], memory_.weights + r * kContextTile);
      if (keep != 1.0f)
        for (int d = 0; d < dim_; ++d) acc[r * dim_ + d] *= keep;
    }
    gemm_(memory_.weights, kContextTile, count, v + (from - tile) * kGroup, stored, n, dim_ / kGroup, memory_.product,
          dim_);
    for (int i = 0; i < count * dim_; ++i) acc[i] += memory_.product[i];
  }

  const AttentionCall& call_;
  const AttentionItem& item_;
  Memory& memory_;
  const Gemm gemm_;
  const int group_, dim_;
  const int64_t start_;
  const int origin_, length_, before_;
  int done_ = 0, count_ = 0;
};

// Writes row j + i's pair d of 8 rows to to[d / 2 * 32 + 2 * i], for 16 inputs d: an 8 x 8 transpose of 32-bit pairs.
void transpose_pairs(const bf16* const* rows, int d, bf16* to) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + d));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m256i low = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    const __m256i high = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * 32), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (i + 4) * 32), high);
  }
}

// Writes 16 values of each of two rows to `to` in turns: those of the first row to even places.
void alternate(const bf16* first, const bf16* second, bf16* to) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16), _mm256_permute2x128_si256(low, high, 0x31));
}

// Packs the K and V of `n` context tokens from `tile` on.
void pack_tile(const AttentionCall& call, int seq, int kv_head, int tile, int n, bf16* k, bf16* v) {
  const int dim = call.head_dim, from = context_start(call, seq) + tile, wide = static_cast<int>(padded(n));
  alignas(64) static const bf16 zeros[kMaxHeadDim] = {};
  alignas(64) static thread_local bf16 values[kContextTile * kMaxHeadDim];  // of a quantised pool
  const bf16* rows[kContextTile];
  std::fill(rows + n, rows + wide, zeros);
  const auto fetch = call.format == kPlain ? context_rows<false, bf16> : context_rows<true, bf16>;
  fetch(call, call.k, seq, kv_head, from, n, values, rows);
  for (int j = 0; j < wide; j += 16, k += 16 * dim)
    for (int d = 0; d < dim; d += 16) {
      transpose_pairs(rows + j, d, k + d * 16);
      transpose_pairs(rows + j + 8, d, k + d * 16 + 16);
    }
  fetch(call, call.v, seq, kv_head, from, n, values, rows);
  for (int d = 0; d < dim; d += 16)
    for (int j = 0; j < wide; j += 2, v += 32) alternate(rows[j] + d, rows[j + 1] + d, v);
}

}  // namespace

void BATON_PRODUCTS(const AttentionCall& call, const AttentionItem& item) {
  struct Packed {
    alignas(64) bf16 k[kContextTile * kMaxHeadDim];
    alignas(64) bf16 v[kContextTile * kMaxHeadDim];
  };
  static thread_local Memory memory;
  static thread_local Packed packed;
  Products products(call, item, memory);
  const int total = products.rows();
  for (int done = 0; done < total; done += kProductRows) {
    const int count = std::min(kProductRows, total - done);
    products.begin(done, count);
    for (int tile = products.first_tile(); tile < products.visible(count - 1); tile += kContextTile) {
      const int tokens = std::min(kContextTile, products.visible(count - 1) - tile);  // the last row sees most
      pack_tile(call, item.seq, item.kv_head, tile, tokens, packed.k, packed.v);
      products.add_tile(tile, tokens, packed.k, packed.v);
    }
    products.finish();
  }
  release_tiles();
}

}  // namespace baton
