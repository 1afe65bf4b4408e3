// Paged latent attention (absorbed MLA): the arguments of one call. A plain C struct, mirrored by a ctypes.Structure in
// mla.py. All heads attend to one row per token, [latent | rope]; the latent is also the value.
#pragma once
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "pool.h"

namespace baton::mla {

// Strides count elements, except in the pool. kv_format.h describes the rows of a quantised pool.
struct Call {
  const void* q_latent;    // [T, heads, rank]
  const void* q_rope;      // [T, heads, rope_dim]
  const void* latent_new;  // [T, rank]
  const void* rope_new;    // [T, rope_dim]
  void* out;               // [T, heads, rank]: weighted sums of latents
  void* rows;              // this layer's row of page 0, offset 0
  const float* sinks;      // [heads] logits that join each softmax and carry no value; null: there are none
  const int32_t* page_table;  // [seqs, table_stride]
  const int64_t* starts;      // [seqs + 1] sequence s's new tokens are packed at [starts[s], starts[s + 1])
  const int32_t* seq_lens;    // [seqs] context length, new tokens included
  const int64_t* slots;       // [T] where each new token's row goes
  int64_t table_stride;
  int64_t page_bytes;  // from one page to the next
  int64_t row_bytes;   // from one token to the next, if the pool is not quantised
  int64_t q_latent_token, q_latent_head;
  int64_t q_rope_token, q_rope_head;
  int64_t latent_token, rope_token;
  int64_t out_token;
  int32_t seqs;
  int32_t heads;
  int32_t rank;
  int32_t rope_dim;
  int32_t page_size;
  int32_t storage;      // of a pool that is not quantised: baton::Storage
  int32_t format;       // of the pool: baton::Format
  int32_t activations;  // of everything else: kFloat32 or kBFloat16
  float scale;
  int32_t threads;
};

constexpr int kRows = 32;   // queries (token, head) of a work item; they share each context row that is read
constexpr int kTile = 32;   // context tokens per softmax step
constexpr int kSplit = 256;  // context tokens per work item of a decode token. Fixed, so that the order of a query's
                             // sums does not depend on the batch or the number of threads
constexpr int kMaxRank = 512;
constexpr int kMaxRow = 640;  // latent and rope

// One work item: `heads` heads from `head` on, for new tokens [first, last) of a sequence, over context [from, to).
// If `partial` is set, un-normalised sums and (max, sum) of each head are written there for the merge; else the result
// is written to `out`.
struct Item {
  int32_t seq, head, heads;
  int32_t first, last;
  int32_t from, to;
  float* partial;
};

// The sink of a head; where there are none, the logit that no softmax notices.
inline float sink_of(const Call& call, int head) {
  return call.sinks == nullptr ? -std::numeric_limits<float>::infinity() : call.sinks[head];
}

using Attend = void (*)(const Call& call, const Item& item);
extern const Attend mla_base;  // any CPU the compiler targets by default
#if defined(__x86_64__)
extern const Attend mla_avx2;
extern const Attend mla_avx512;
#endif

// A decode token whose context is split: `count` parts of [heads][rank + 2] from `sums` on.
struct Partials {
  int32_t seq;
  int64_t count;
  int64_t sums;
};

// The work items of one batch.
class Plan {
 public:
  explicit Plan(const Call& call);

  // Writes the new rows, then attends. Every thread of the team calls it.
  void run(Team& team, const Call& call);

 private:
  void write(Team& team, const Call& call) const;
  void merge(Team& team, const Call& call) const;

  std::vector<Item> items_;
  std::vector<Partials> partials_;
  std::vector<float> sums_;
  std::atomic<int64_t> next_{0};
};

}  // namespace baton::mla
