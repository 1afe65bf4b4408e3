// Paged attention: divides a batch into work items, writes new K and V, merges split rows.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "numeric.h"

namespace baton {
namespace {

const AttentionKernels& kernels() {
#if defined(__x86_64__)
  if (current_isa() >= kBf16) return attention_bf16;
  if (current_isa() >= kAvx512) return attention_avx512;
  if (current_isa() >= kAvx2) return attention_avx2;
#endif
  return attention_base;
}

// Attention by products on this CPU, or null if there is none.
AttendItem products() {
#if defined(__x86_64__)
  if (current_isa() >= kBf16) return attend_by_products_bf16;
  if (current_isa() >= kAvx512) return attend_by_products_avx512;
  if (current_isa() >= kAvx2) return attend_by_products_avx2;
#endif
  return nullptr;
}

bool by_products(const AttentionCall& call, int tokens) {
  return products() != nullptr && call.storage == kBFloat16 && call.head_dim % 32 == 0 && tokens >= kProductTokens;
}

// New tokens in an item of a sequence with `tokens` of them. Items by products are made smaller than kProductRows rows if
// there are few, so that every thread gets some.
int item_tokens(const AttentionCall& call, int tokens) {
  if (!by_products(call, tokens)) return kQueryBlock;
  const int group = call.heads / call.kv_heads, rows = tokens * group;
  const int parts = std::max(1, kFairItems * call.threads / call.kv_heads);
  const int fair = std::clamp(rows / parts, kMinProductRows, kProductRows);
  return std::max(1, fair / group);
}

// out = sum_i sums_i * e^(top_i - top) / sum_i sum_i * e^(top_i - top), parts in context order. `sink`: a logit that
// joins the denominator, or null.
template <typename T>
void merge_row(const float* parts, int64_t count, int64_t stride, int dim, const float* sink, T* out) {
  float top = sink ? *sink : -1e30f;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, parts[i * stride + dim]);
  float acc[kMaxHeadDim] = {};
  float sum = sink ? std::exp(*sink - top) : 0;
  for (int64_t i = 0; i < count; ++i) {
    const float* part = parts + i * stride;
    const float weight = std::exp(part[dim] - top);
    sum += weight * part[dim + 1];
    for (int d = 0; d < dim; ++d) acc[d] += weight * part[d];
  }
  for (int d = 0; d < dim; ++d) store_float(out[d], acc[d] / sum);
}

template <typename T>
void quantise_tokens(const AttentionCall& call, int64_t first, int64_t last) {
  const Format stored = static_cast<Format>(call.format);
  for (int64_t t = first; t < last; ++t) {
    const int64_t page = call.slots[t] / call.page_size * call.page_stride;
    const int offset = static_cast<int>(call.slots[t] % call.page_size);
    for (int h = 0; h < call.kv_heads; ++h) {
      const int64_t tile = page + h * call.tile_stride;
      store_row(stored, static_cast<const T*>(call.k_new) + t * call.k_token + h * call.k_head,
                static_cast<char*>(call.k) + tile, call.page_size, offset, call.head_dim);
      store_row(stored, static_cast<const T*>(call.v_new) + t * call.v_token + h * call.v_head,
                static_cast<char*>(call.v) + tile, call.page_size, offset, call.head_dim);
    }
  }
}

template <typename T>
void write_tokens(const AttentionCall& call, int64_t first, int64_t last) {
  if (call.format != kPlain) return quantise_tokens<T>(call, first, last);
  const int64_t bytes = call.head_dim * sizeof(T);
  for (int64_t t = first; t < last; ++t) {
    const int64_t to = call.slots[t] / call.page_size * call.page_stride +
                       call.slots[t] % call.page_size * call.head_dim;
    for (int h = 0; h < call.kv_heads; ++h) {
      std::memcpy(static_cast<T*>(call.k) + to + h * call.tile_stride,
                  static_cast<const T*>(call.k_new) + t * call.k_token + h * call.k_head, bytes);
      std::memcpy(static_cast<T*>(call.v) + to + h * call.tile_stride,
                  static_cast<const T*>(call.v_new) + t * call.v_token + h * call.v_head, bytes);
    }
  }
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionCall& shape) {
  const int group = shape.heads / shape.kv_heads;
  const int64_t part = static_cast<int64_t>(group) * (shape.head_dim + 2);
  int64_t total_parts = 0;
  for (int s = 0; s < shape.seqs; ++s) {
    const int tokens = static_cast<int>(shape.starts[s + 1] - shape.starts[s]);
    const int start = context_start(shape, s), length = shape.seq_lens[s];
    const bool split = tokens == 1 && length - start > kSplit;
    const int block = item_tokens(shape, tokens);
    for (int h = 0; h < shape.kv_heads; ++h) {
      if (split) {
        const int64_t first = static_cast<int64_t>(items_.size());
        for (int from = start; from < length; from += kSplit)
          items_.push_back({s, h, 0, 1, from, std::min(from + kSplit, length), nullptr, false});
        const int64_t count = static_cast<int64_t>(items_.size()) - first;
        partials_.push_back({s, h, total_parts, count});
        total_parts += count;
        continue;
      }
      // The last tokens see the longest context: they come first, so that no thread ends with the longest item.
      for (int first = (tokens - 1) / block * block; first >= 0 && tokens > 0; first -= block)
        items_.push_back({s, h, first, std::min(first + block, tokens), start, length, nullptr, by_products(shape, tokens)});
    }
  }
  sums_.resize(total_parts * part);
  int64_t next = 0;
  for (auto& item : items_) {
    const bool one = shape.starts[item.seq + 1] - shape.starts[item.seq] == 1;
    if (one && context_length(shape, item.seq) > kSplit) item.partial = sums_.data() + part * next++;
  }
}

void AttentionPlan::write(Team& team, const AttentionCall& call) const {
  int64_t first, last;
  team.split(call.starts[call.seqs], first, last);
  if (call.storage == kFloat32) write_tokens<float>(call, first, last);
  else write_tokens<bf16>(call, first, last);
}

const AttentionItem* AttentionPlan::take() {
  const int64_t i = Team::next(next_);
  return i < static_cast<int64_t>(items_.size()) ? &items_[i] : nullptr;
}

void AttentionPlan::attend_item(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next) const {
  if (item.products) return products()(call, item);
  const AttentionKernels& table = kernels();
  if (call.format != kPlain)
    return (call.storage == kFloat32 ? table.quantised_float32 : table.quantised_bfloat16)(call, item, next);
  (call.storage == kFloat32 ? table.float32 : table.bfloat16)(call, item, next);
}

void AttentionPlan::merge(Team& team, const AttentionCall& call) const {
  const int group = call.heads / call.kv_heads;
  const int dim = call.head_dim;
  const int64_t row = dim + 2, part = row * group;
  int64_t first, last;
  team.split(static_cast<int64_t>(partials_.size()) * group, first, last);
  for (int64_t i = first; i < last; ++i) {
    const Partials& p = partials_[i / group];
    const int64_t head = p.kv_head * group + i % group;
    const float* parts = sums_.data() + p.first * part + i % group * row;
    const float* sink = call.sinks ? call.sinks + head : nullptr;
    const int64_t to = call.starts[p.seq] * call.out_token + head * dim;
    if (call.storage == kFloat32) merge_row(parts, p.count, part, dim, sink, static_cast<float*>(call.out) + to);
    else merge_row(parts, p.count, part, dim, sink, static_cast<bf16*>(call.out) + to);
  }
}

void AttentionPlan::run(Team& team, const AttentionCall& call) {
  write(team, call);
  team.barrier();
  attend(team, call);
}

void AttentionPlan::attend(Team& team, const AttentionCall& call) {
  // An item is taken one ahead, so that its first keys are on their way when it begins.
  for (const AttentionItem *item = take(), *next; item != nullptr; item = next) {
    next = take();
    attend_item(call, *item, next);
  }
  team.barrier();
  if (team.index == 0) next_.store(0, std::memory_order_relaxed);
  if (partials_.empty()) return;
  merge(team, call);
  team.barrier();
}

}  // namespace baton

extern "C" {

// Bytes that a call would allocate.
int64_t baton_attention_scratch_bytes(const baton::AttentionCall* call) {
  return baton::AttentionPlan(*call).scratch_bytes();
}

void baton_attention(const baton::AttentionCall* call) {
  baton::AttentionPlan plan(*call);
  auto body = [&](baton::Team& team) { plan.run(team, *call); };
  baton::parallel(call->threads, body);
}
}
