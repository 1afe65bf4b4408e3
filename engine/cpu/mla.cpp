// Paged latent attention: divides a batch into work items, writes new rows, merges split contexts.
#include "mla.h"

#include <algorithm>
#include <cmath>

#include "isa.h"
#include "mla_rows.h"

namespace baton::mla {
namespace {

Attend kernel() {
#if defined(__x86_64__)
  if (current_isa() >= kAvx512) return mla_avx512;
  if (current_isa() >= kAvx2) return mla_avx2;
#endif
  return mla_base;
}

// out = sum_i sums_i * e^(top_i - top) / (sum_i sum_i * e^(top_i - top) + e^(sink - top)), parts in context order.
void merge_parts(const float* parts, int64_t count, int64_t stride, int rank, float sink, float* out) {
  float top = -1e30f, sum = 0;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, parts[i * stride + rank]);
  std::fill(out, out + rank, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const float* part = parts + i * stride;
    const float weight = std::exp(part[rank] - top);
    sum += weight * part[rank + 1];
    for (int d = 0; d < rank; ++d) out[d] += weight * part[d];
  }
  sum += std::exp(sink - top);
  for (int d = 0; d < rank; ++d) out[d] /= sum;
}

}  // namespace

Plan::Plan(const Call& call) {
  const int heads = std::min<int>(call.heads, kRows);  // of an item
  const int64_t part = int64_t{call.heads} * (call.rank + 2);
  std::vector<int64_t> partial_of;  // of each item: where its sums go; -1: to `out`
  int64_t parts = 0;
  for (int s = 0; s < call.seqs; ++s) {
    const int tokens = static_cast<int>(call.starts[s + 1] - call.starts[s]);
    const int length = call.seq_lens[s];
    const bool split = tokens == 1 && length > kSplit;
    const int step = split ? kSplit : length;
    const int together = std::max(1, kRows / heads);  // tokens of an item
    // The last tokens see the longest context: they come first, so that no thread ends with the longest item.
    for (int first = (tokens - 1) / together * together; first >= 0 && tokens > 0; first -= together) {
      for (int from = 0; from < length; from += step) {
        for (int head = 0; head < call.heads; head += heads) {
          const int64_t to = (parts + from / kSplit) * part + int64_t{head} * (call.rank + 2);
          items_.push_back({s, head, std::min(heads, call.heads - head), first, std::min(first + together, tokens),
                            from, std::min(from + step, length), nullptr});
          partial_of.push_back(split ? to : -1);
        }
      }
    }
    if (!split) continue;
    const int64_t count = (length + kSplit - 1) / kSplit;
    partials_.push_back({s, count, parts * part});
    parts += count;
  }
  sums_.resize(parts * part);
  for (size_t i = 0; i < items_.size(); ++i)
    if (partial_of[i] >= 0) items_[i].partial = sums_.data() + partial_of[i];
}

void Plan::write(Team& team, const Call& call) const {
  const int64_t bytes = activation_bytes(call);
  int64_t first, last;
  team.split(call.starts[call.seqs], first, last);
  for (int64_t t = first; t < last; ++t) {
    write_row(call, static_cast<const char*>(call.latent_new) + t * call.latent_token * bytes,
              static_cast<const char*>(call.rope_new) + t * call.rope_token * bytes, call.slots[t]);
  }
}

void Plan::merge(Team& team, const Call& call) const {
  const int64_t row = call.rank + 2, part = row * call.heads;
  int64_t first, last;
  team.split(static_cast<int64_t>(partials_.size()) * call.heads, first, last);
  float result[kMaxRank];
  for (int64_t i = first; i < last; ++i) {
    const Partials& p = partials_[i / call.heads];
    const int head = static_cast<int>(i % call.heads);
    merge_parts(sums_.data() + p.sums + head * row, p.count, part, call.rank, sink_of(call, head), result);
    write_out(call, call.starts[p.seq], head, result);
  }
}

void Plan::run(Team& team, const Call& call) {
  write(team, call);
  team.barrier();
  const Attend attend = kernel();
  for (int64_t i; (i = Team::next(next_)) < static_cast<int64_t>(items_.size());) attend(call, items_[i]);
  if (partials_.empty()) return;
  team.barrier();
  merge(team, call);
}

}  // namespace baton::mla

extern "C" {

int baton_mla_call_bytes() { return sizeof(baton::mla::Call); }

void baton_mla(const baton::mla::Call* call) {
  baton::mla::Plan plan(*call);
  auto body = [&](baton::Team& team) { plan.run(team, *call); };
  baton::parallel(call->threads, body);
}
}
