// The holders of pages: interned sets of (slot, mask of tiers and a mark). So a page needs one number for any number
// of workers, and pages that were inserted together share a set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <unordered_set>
#include <vector>

namespace baton {

using SetId = uint32_t;
using Slot = uint32_t;
using Tiers = uint32_t;  // a mask of 1 << tier

constexpr int kTiers = 4;
constexpr Tiers kAllTiers = (1u << kTiers) - 1;
constexpr Tiers kHeldTiers = 0b0111;  // all but EXPECTED
constexpr Tiers kDevice = 0b0001;
constexpr Tiers kExpected = 0b1000;
constexpr Tiers kPrivate = 0b10000;  // a mark beside the tiers: the page was told among the worker's private ones
constexpr int kHolderBits = kTiers + 1;
constexpr Slot kMaxSlot = (1u << (32 - kHolderBits)) - 1;

inline uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCDull;
  value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return value ^ (value >> 33);
}

// One member of a set. Sets are sorted by member, and so by slot.
struct Holder {
  uint32_t code;
  Holder(Slot slot, Tiers marked) : code(slot << kHolderBits | marked) {}
  Slot slot() const { return code >> kHolderBits; }
  Tiers tiers() const { return code & kAllTiers; }
  Tiers marked() const { return code & (kAllTiers | kPrivate); }
  bool operator==(Holder other) const { return code == other.code; }
};

// A change to one slot's tiers and mark in a set. The mark goes with the last tier.
struct Change {
  Slot slot;
  Tiers taken;
  Tiers given;
  Tiers of(Tiers marked) const {
    const Tiers left = (marked & ~taken) | given;
    return left & kAllTiers ? left : 0;
  }
  bool operator==(const Change& other) const {
    return slot == other.slot && taken == other.taken && given == other.given;
  }
};

class HolderSets {
 public:
  using Members = std::vector<Holder>;

  // The set without members. Other sets may become empty by `forget`.
  static constexpr SetId kEmptySet = 0;

  explicit HolderSets(uint64_t seed) : seed_(seed), sets_(1), interned_(8, Hash{this}, Equal{this}) {
    interned_.insert(kEmptySet);
  }
  HolderSets(const HolderSets&) = delete;  // the functors have a pointer to it

  const Members& members(SetId id) const { return sets_[id].members; }

  // The set that `id` becomes, or kEmptySet when no member is left. A set lives until its last page is dropped, so
  // the caller must give it pages before it asks for the next set.
  SetId changed(SetId id, const Change& change) {
    Step& step = steps_[mixed(uint64_t{id} << 32 | change.slot << 10 | change.taken << 5 | change.given) % kSteps];
    if (step.from == id && step.from_life == sets_[id].life && step.change == change &&
        step.to_life == sets_[step.to].life)
      return step.to;
    const SetId to = computed(id, change);
    step = {id, sets_[id].life, to, sets_[to].life, change};
    return to;
  }

  void add_pages(SetId id, uint64_t pages) { sets_[id].pages += pages; }

  void drop_pages(SetId id, uint64_t pages) {
    Set& set = sets_[id];
    set.pages -= pages;
    if (set.pages == 0 && id != kEmptySet) release(id);
  }

  // Removes a slot from every set, in these tiers, where `chosen(holder)` is true. Sets change in place, so that pages
  // need not be visited. Two sets may then have the same members, and `computed` finds only one of them. Returns the
  // number of pages that no worker holds any more.
  template <typename Chosen>
  uint64_t forget(Slot slot, Tiers tiers, Chosen chosen) {
    const Change change{slot, tiers, 0};
    uint64_t dead = 0;
    for (SetId id = 1; id < sets_.size(); ++id) {
      const auto place = lower(sets_[id].members, slot);
      if (place == sets_[id].members.end() || place->slot() != slot || !(place->tiers() & tiers)) continue;
      if (!chosen(*place)) continue;
      retire(id);
      apply(sets_[id].members, change);
      if (sets_[id].members.empty()) dead += sets_[id].pages;
      else if (interned_.insert(id).second) sets_[id].interned = true;
    }
    return dead;
  }

  // The tiers that each set has for a slot, by the set's id.
  std::vector<uint8_t> tiers_of(Slot slot) const {
    std::vector<uint8_t> tiers(sets_.size());
    for (SetId id = 0; id < sets_.size(); ++id) {
      const auto place = lower(sets_[id].members, slot);
      if (place != sets_[id].members.end() && place->slot() == slot) tiers[id] = place->tiers();
    }
    return tiers;
  }

  size_t nbytes() const {
    constexpr size_t kNode = 32;  // of the hash set: a link, the id, its hash, the allocator's header
    return sizeof(*this) + sets_.capacity() * sizeof(Set) + member_bytes_() + interned_.size() * kNode +
           interned_.bucket_count() * sizeof(void*);
  }

 private:
  struct Set {
    Members members;
    uint64_t pages = 0;  // table entries that name this set
    uint32_t life = 0;   // grows when the members change or the id is used again
    bool interned = false;
  };
  // One cached result of `changed`. It is void when the `life` of either set has changed.
  struct Step {
    SetId from = 0;
    uint32_t from_life = ~0u;
    SetId to = 0;
    uint32_t to_life = ~0u;
    Change change{0, 0, 0};
  };
  static constexpr size_t kSteps = 1024;

  struct Hash {
    const HolderSets* all;
    size_t operator()(SetId id) const {
      uint64_t hash = all->seed_;
      for (Holder holder : all->sets_[id].members) hash = mixed(hash ^ holder.code);
      return hash;
    }
  };
  struct Equal {
    const HolderSets* all;
    bool operator()(SetId a, SetId b) const { return all->sets_[a].members == all->sets_[b].members; }
  };

  static Members::const_iterator lower(const Members& members, Slot slot) {
    return std::lower_bound(members.begin(), members.end(), slot,
                            [](Holder holder, Slot wanted) { return holder.slot() < wanted; });
  }

  static void apply(Members& members, const Change& change) {
    const auto place = lower(members, change.slot);
    const bool there = place != members.end() && place->slot() == change.slot;
    const Tiers marked = change.of(there ? place->marked() : 0);
    const auto at = members.begin() + (place - members.begin());
    if (there && marked) *at = Holder(change.slot, marked);
    else if (there) members.erase(at);
    else if (marked) members.insert(at, Holder(change.slot, marked));
  }

  SetId computed(SetId id, const Change& change) {
    const auto place = lower(sets_[id].members, change.slot);
    const bool there = place != sets_[id].members.end() && place->slot() == change.slot;
    const Tiers before = there ? place->marked() : 0;
    if (change.of(before) == before) return id;
    const SetId made = fresh_id();
    Members& members = sets_[made].members;
    members.reserve(sets_[id].members.size() + 1);
    members = sets_[id].members;
    apply(members, change);
    const auto [same, is_new] = interned_.insert(made);
    if (!is_new) {
      const SetId known = *same;
      release(made);
      return known;
    }
    sets_[made].interned = true;
    return made;
  }

  SetId fresh_id() {
    if (free_.empty()) {
      sets_.emplace_back();
      free_.reserve(sets_.size());  // so that `release` cannot run out of memory
      return static_cast<SetId>(sets_.size() - 1);
    }
    const SetId id = free_.back();
    free_.pop_back();
    return id;
  }

  void release(SetId id) {
    retire(id);
    Members().swap(sets_[id].members);
    free_.push_back(id);
  }

  // Call it before a set's members change: the set can no longer be found by them.
  void retire(SetId id) {
    if (sets_[id].interned) interned_.erase(id);
    sets_[id].interned = false;
    ++sets_[id].life;
  }

  size_t member_bytes_() const {
    size_t bytes = free_.capacity() * sizeof(SetId);
    for (const Set& set : sets_) bytes += set.members.capacity() * sizeof(Holder);
    return bytes;
  }

  const uint64_t seed_;
  std::vector<Set> sets_;
  std::vector<SetId> free_;
  std::unordered_set<SetId, Hash, Equal> interned_;
  Step steps_[kSteps];
};

}  // namespace baton
