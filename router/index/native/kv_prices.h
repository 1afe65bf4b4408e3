// Policy `kv`: the cheapest (P, D), or D alone. router/placement/kv_policy.py has the formula, and a reference in numpy that chooses
// the same: every price is made by the same operations in the same order (and build.py forbids the compiler to fuse
// them), so that what costs the same there costs the same here, and takes turns by the same chance.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace baton {

// Of options.PolicyWeights. `credits` are what a page in each slower tier saves, less what one on the device does.
struct Weights {
  double prefill_queue, queue_objective, prefill_left, transfer, same_host;
  double decode_load, decode_context, decode_full, decode_prefill, session;
  double credits[3];
  double alone_tokens;
};

// One role's workers, by row.
struct Side {
  size_t workers;
  const double *queued, *requests, *context, *capacity;
  const int64_t *slots, *hosts;
  int64_t last;  // the row of the session's last request; -1: none
};

// The request, and PageTable's `found` of its prompt: [4, slots], where every worker has a slot.
struct Wanted {
  double prompt_tokens, output_tokens, page_tokens;
  const int32_t* found;
  size_t slots;
};

// Rows. kNobody as `prefill`: D does it alone.
struct Chosen {
  static constexpr size_t kNobody = ~size_t{0};
  size_t decode, prefill;
};

// Belongs to one thread.
class KVPrices {
 public:
  explicit KVPrices(const Weights& weights) : w_(weights) {}

  // There is at least one D. `draw(n)` is a number below n, called when n cost the same.
  template <typename Draw>
  Chosen pick(const Wanted& wanted, const Side& prefill, const Side& decode, Draw draw) {
    price_load(wanted, decode);
    const bool must = prefill.workers == 0;
    size_t alone = Chosen::kNobody;
    double alone_cost = kInfinite;
    if (price_alone(wanted, decode, must)) {
      alone = cheapest(prices_, draw);
      alone_cost = prices_[alone];
    }
    if (must) return {alone, Chosen::kNobody};
    price_prefill(wanted, prefill);
    price_decode(wanted, decode);
    const Chosen pair = best_pair(prefill, decode, draw);
    const double pair_cost = prefill_[pair.prefill] + decode_[pair.decode];
    return alone_cost <= pair_cost ? Chosen{alone, Chosen::kNobody} : pair;
  }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();

  double left(const Wanted& wanted, int64_t slot) const {
    const int32_t* found = wanted.found + slot;
    double saved = found[0] * wanted.page_tokens;
    for (size_t tier = 1; tier < 4; ++tier)
      saved += found[tier * wanted.slots] * (w_.credits[tier - 1] * wanted.page_tokens);
    return std::max(1.0, wanted.prompt_tokens - saved);
  }

  // load_D
  void price_load(const Wanted& wanted, const Side& decode) {
    const double need = wanted.prompt_tokens + wanted.output_tokens;
    load_.resize(decode.workers);
    for (size_t d = 0; d < decode.workers; ++d) {
      const double lacking = std::max(need - (decode.capacity[d] - decode.context[d]), 0.0);
      load_[d] = decode.requests[d] * w_.decode_load + decode.context[d] * w_.decode_context;
      load_[d] += lacking * w_.decode_full;
    }
    if (decode.last >= 0) load_[decode.last] -= w_.session;
  }

  // alone, in `prices_`: infinite for those that may not. Whether one may.
  bool price_alone(const Wanted& wanted, const Side& decode, bool must) {
    bool any = false;
    prices_.assign(decode.workers, kInfinite);
    for (size_t d = 0; d < decode.workers; ++d) {
      const double tokens = left(wanted, decode.slots[d]);
      if (!must && tokens > w_.alone_tokens) continue;
      prices_[d] = load_[d] + w_.prefill_queue * decode.queued[d] + w_.decode_prefill * tokens;
      any = true;
    }
    return any;
  }

  // cost_P
  void price_prefill(const Wanted& wanted, const Side& prefill) {
    const double shortest = *std::min_element(prefill.queued, prefill.queued + prefill.workers);
    prefill_.resize(prefill.workers);
    for (size_t p = 0; p < prefill.workers; ++p) {
      const double more = prefill.queued[p] - shortest;
      prefill_[p] = (more * (more / w_.queue_objective) + prefill.queued[p]) * w_.prefill_queue;
      prefill_[p] += left(wanted, prefill.slots[p]) * w_.prefill_left;
    }
    if (prefill.last >= 0) prefill_[prefill.last] -= w_.session;
  }

  // load_D + move, to a P on another host
  void price_decode(const Wanted& wanted, const Side& decode) {
    move_.resize(decode.workers);
    decode_.resize(decode.workers);
    for (size_t d = 0; d < decode.workers; ++d) {
      move_[d] = (wanted.prompt_tokens - wanted.found[decode.slots[d]] * wanted.page_tokens) * w_.transfer;
      decode_[d] = load_[d] + move_[d];
    }
  }

  // First D, as it costs with the P that suits it best; then P for that D, whose cost with it is left in `prefill_`.
  template <typename Draw>
  Chosen best_pair(const Side& prefill, const Side& decode, Draw draw) {
    price_hosts(prefill);
    const auto shares = [this](int64_t host) { return nearest(host) < kInfinite; };
    if (std::none_of(decode.hosts, decode.hosts + decode.workers, shares)) {
      const size_t p = cheapest(prefill_, draw);
      return {cheapest(decode_, draw), p};
    }
    const double best = *std::min_element(prefill_.begin(), prefill_.end());
    const double spared = 1.0 - w_.same_host;
    prices_.resize(decode.workers);
    for (size_t d = 0; d < decode.workers; ++d)
      prices_[d] = std::min(nearest(decode.hosts[d]) - move_[d] * spared, best) + decode_[d];
    const size_t d = cheapest(prices_, draw);
    for (size_t p = 0; p < prefill.workers; ++p)
      if (prefill.hosts[p] == decode.hosts[d]) prefill_[p] -= move_[d] * spared;
    return {d, cheapest(prefill_, draw)};
  }

  // The cheapest P of each host.
  void price_hosts(const Side& prefill) {
    const int64_t last = *std::max_element(prefill.hosts, prefill.hosts + prefill.workers);
    hosts_.assign(static_cast<size_t>(last) + 1, kInfinite);
    for (size_t p = 0; p < prefill.workers; ++p) {
      double& cost = hosts_[prefill.hosts[p]];
      cost = std::min(cost, prefill_[p]);
    }
  }

  double nearest(int64_t host) const {
    return static_cast<size_t>(host) < hosts_.size() ? hosts_[host] : kInfinite;
  }

  template <typename Draw>
  static size_t cheapest(const std::vector<double>& costs, Draw& draw) {
    const auto best = std::min_element(costs.begin(), costs.end());
    const size_t equals = std::count(best, costs.end(), *best);
    auto chosen = best;
    if (equals > 1)
      for (size_t turn = draw(equals); turn > 0; --turn) chosen = std::find(chosen + 1, costs.end(), *best);
    return chosen - costs.begin();
  }

  const Weights w_;
  std::vector<double> load_, move_, prefill_, decode_, hosts_, prices_;  // by row, `hosts_` by host
};

}  // namespace baton
