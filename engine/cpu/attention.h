// Paged attention: the arguments of one call. A plain C struct, mirrored by a ctypes.Structure in op.py.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "kv_format.h"
#include "numeric.h"
#include "pool.h"

namespace baton {

enum Storage : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// Strides count elements; those of a quantised pool are bytes.
struct AttentionCall {
  const void* q;      // [T, heads, head_dim]
  const void* k_new;  // [T, kv_heads, head_dim]
  const void* v_new;
  void* out;  // [T, heads, head_dim]
  void* k;    // this layer's K tile of page 0, head 0: [page_size, head_dim]
  void* v;
  const int32_t* page_table;  // [seqs, table_stride]
  const int64_t* starts;      // [seqs + 1] sequence s's new tokens are packed at [starts[s], starts[s + 1])
  const int32_t* seq_lens;    // [seqs] context length, new tokens included
  const int64_t* slots;       // [T] where each new token's K and V go
  const float* sinks;         // [heads] logits that join each softmax and carry no value, or null
  int64_t table_stride;
  int64_t page_stride;  // from one page to the next
  int64_t tile_stride;  // from one head's tile to the next
  int64_t q_token, q_head;
  int64_t k_token, k_head;
  int64_t v_token, v_head;
  int64_t out_token;
  int32_t seqs;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t page_size;
  int32_t storage;  // of q, k_new, v_new and out, and of a pool that is not quantised
  int32_t format;   // of the pool: baton::Format
  int32_t window;  // keys that a query sees, itself included; 0: all before it
  float scale;
  float softcap;  // c > 0: a scaled score s becomes c tanh(s / c); 0: it stays
  int32_t threads;
};

// The first context token that the query at `position` sees.
inline int first_seen(const AttentionCall& call, int position) {
  return call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
}

// The first context token that any new token of a sequence sees. Page-table entries before it are not read.
inline int context_start(const AttentionCall& call, int seq) {
  return first_seen(call, call.seq_lens[seq] - static_cast<int>(call.starts[seq + 1] - call.starts[seq]));
}
inline int context_length(const AttentionCall& call, int seq) {
  return call.seq_lens[seq] - context_start(call, seq);
}

constexpr int kTile = 64;         // context tokens per softmax step
constexpr int kSplit = 256;       // context tokens per work item of a decode row. Fixed, so that the order of a row's
                                  // sums does not depend on the batch or the number of threads
constexpr int kQueryBlock = 16;   // new tokens per work item of a prefill chunk
constexpr int kContextTile = 512;  // context tokens per softmax step of attention by products
constexpr int kProductRows = 512;  // (token, head) rows that share one packed context tile
constexpr int kMinProductRows = 64;  // an item has at least so many, if its sequence has them
constexpr int kFairItems = 8;        // a long chunk has at least so many items for each thread
constexpr int kProductTokens = 8;  // new tokens of a sequence from which attention goes by products
constexpr int kMaxHeadDim = 512;
constexpr float kUnseen = -1e36f;  // the score of a token that a row does not see. Its weight is 0, even if the row's
                                   // maximum is still -1e30

// One work item: the query heads of one KV head, for new tokens [first, last) of a sequence, over context
// [from, to). If `partial` is set, un-normalised sums and (max, sum) are written there for the merge; else the result
// is written to `out`.
struct AttentionItem {
  int32_t seq, kv_head;
  int32_t first, last;
  int32_t from, to;
  float* partial;
  bool products;  // compute by matrix products
};

using AttendItem = void (*)(const AttentionCall& call, const AttentionItem& item);
// `next` is the item that the thread computes after this one, or null. Its first keys are prefetched.
using AttendRows = void (*)(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next);
struct AttentionKernels {
  AttendRows float32;
  AttendRows bfloat16;
  AttendRows quantised_float32;  // the pool is quantised; everything else is float32
  AttendRows quantised_bfloat16;
};
extern const AttentionKernels attention_base;  // any CPU the compiler targets by default
#if defined(__x86_64__)
extern const AttentionKernels attention_avx2;
extern const AttentionKernels attention_avx512;
extern const AttentionKernels attention_bf16;
#endif

// Attention of many new tokens of a sequence as matrix products, for bfloat16. An item converts the context to the format
// of packed weights, K as [tokens, head_dim] and V as [head_dim, tokens], padded with zeros to a multiple of 32 tokens,
// one tile of kContextTile tokens at a time. The tile is in memory of fixed size and is shared by kProductRows rows. The
// whole context is not converted once for all items, because that memory would grow with the context.
#if defined(__x86_64__)
void attend_by_products_avx2(const AttentionCall& call, const AttentionItem& item);
void attend_by_products_avx512(const AttentionCall& call, const AttentionItem& item);
void attend_by_products_bf16(const AttentionCall& call, const AttentionItem& item);  // with AMX if there is one
#endif

inline int64_t padded(int64_t tokens) { return (tokens + 31) / 32 * 32; }

// A decode row whose context is split: `count` partial results from `first` on.
struct Partials {
  int32_t seq, kv_head;
  int64_t first, count;
};

// The work items of one batch: the same for all its layers.
class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionCall& shape);

  // Writes K and V, then attends. Every thread of the team calls it. It ends with a barrier. The caller's next
  // barrier (or the end of the region) must come before the plan is run again.
  void run(Team& team, const AttentionCall& call);
  void write(Team& team, const AttentionCall& call) const;  // without a barrier
  void attend(Team& team, const AttentionCall& call);       // what was written before the last barrier

  int64_t scratch_bytes() const {
    return static_cast<int64_t>(items_.size() * sizeof(AttentionItem) + sums_.size() * sizeof(float));
  }

 private:
  const AttentionItem* take();  // the next item that no thread has, or null
  void attend_item(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next) const;
  void merge(Team& team, const AttentionCall& call) const;

  std::vector<AttentionItem> items_;
  std::vector<Partials> partials_;
  std::vector<float> sums_;
  std::atomic<int64_t> next_{0};
};

}  // namespace baton
