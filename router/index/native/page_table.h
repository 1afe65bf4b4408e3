// PageTable: page hash -> set of holders, as router/index/page_table.py describes it. Does not use Python.
#pragma once
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "batch_reader.h"
#include "holder_sets.h"

namespace baton {

// `key` is the page's hash, mixed with the table's seed. Its highest bits choose the shard, its lowest the place.

// A shard of the table: open addressing with linear probing. Each shard grows separately, so no caller waits for a
// copy of the whole table. It grows by a fifth, not by a factor of two, so that few entries are empty.
class Shard {
 public:
  struct Entry {  // 12 bytes: a 64-bit hash would be padded to 16
    uint32_t low, high;
    SetId set;
    int64_t page() const { return static_cast<int64_t>(uint64_t{high} << 32 | low); }
  };
  static constexpr SetId kUnused = ~0u;

  void prefetch(uint64_t key) const {
    if (capacity_) __builtin_prefetch(&entries_[start(key)]);
  }

  Entry* find(uint64_t page, uint64_t key) const {
    if (!capacity_) return nullptr;
    Entry* entry = probe(page, key);
    return entry->set == kUnused ? nullptr : entry;
  }

  bool full() const { return (used_ + 1) * 16ull > capacity_ * 13ull; }

  // The page's entry. A new one has the empty set. The shard must not be full.
  Entry* find_or_add(uint64_t page, uint64_t key) {
    Entry* entry = probe(page, key);
    if (entry->set == kUnused) {
      *entry = {static_cast<uint32_t>(page), static_cast<uint32_t>(page >> 32), HolderSets::kEmptySet};
      ++used_;
    }
    return entry;
  }

  // Drops the pages that no worker holds, and makes room for half as many as are left.
  void rebuild(HolderSets& sets, uint64_t seed) {
    uint32_t live = 0;
    for (uint32_t i = 0; i < capacity_; ++i) live += is_live(entries_[i], sets);
    const uint32_t capacity = live + live / 2 + kSpare;
    std::unique_ptr<Entry[]> old(new Entry[capacity]);
    for (uint32_t i = 0; i < capacity; ++i) old[i].set = kUnused;
    old.swap(entries_);
    const uint32_t old_capacity = capacity_;
    capacity_ = capacity;
    used_ = live;
    for (uint32_t i = 0; i < old_capacity; ++i) {
      const Entry& entry = old[i];
      if (is_live(entry, sets)) *probe(entry.page(), mixed(entry.page() ^ seed)) = entry;
      else if (entry.set != kUnused) sets.drop_pages(entry.set, 1);
    }
  }

  uint32_t used() const { return used_; }
  uint32_t capacity() const { return capacity_; }
  const Entry* begin() const { return entries_.get(); }
  const Entry* end() const { return entries_.get() + capacity_; }

 private:
  static constexpr uint32_t kSpare = 8;

  static bool is_live(const Entry& entry, const HolderSets& sets) {
    return entry.set != kUnused && !sets.members(entry.set).empty();
  }

  uint32_t start(uint64_t key) const { return (key & 0xFFFFFFFF) * capacity_ >> 32; }

  Entry* probe(uint64_t page, uint64_t key) const {
    const uint32_t low = page, high = page >> 32;
    uint32_t at = start(key);
    while (entries_[at].set != kUnused && (entries_[at].low != low || entries_[at].high != high))
      if (++at == capacity_) at = 0;
    return &entries_[at];
  }

  std::unique_ptr<Entry[]> entries_;
  uint32_t capacity_ = 0;
  uint32_t used_ = 0;  // entries, those of pages that no worker holds included
};

// Safe to call from several threads. It never calls Python, so its mutex is held for microseconds.
class PageTable {
 public:
  explicit PageTable(uint64_t seed) : seed_(seed), sets_(seed) {}

  void store(Slot slot, Tiers tiers, const uint64_t* pages, size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change_pages({slot, 0, tiers}, pages, count, [this](uint64_t page, uint64_t key) { return added(page, key); });
    sweep();
  }

  void remove(Slot slot, Tiers tiers, const uint64_t* pages, size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change_pages({slot, tiers, 0}, pages, count,
                 [this](uint64_t page, uint64_t key) { return shard_of(key).find(page, key); });
    sweep();
  }

  // These take time in proportion to the number of sets, not of pages.
  void clear(Slot slot, Tiers tiers) {
    forget(slot, tiers, [](Holder) { return true; });
  }
  void clear_told(Slot slot, bool is_private) {
    forget(slot, kHeldTiers, [is_private](Holder holder) { return !(holder.marked() & kPrivate) != is_private; });
  }

  // What pages lose that leave these tiers: those that were on the device had come, and are not expected any more.
  static Tiers left(Tiers tiers) { return tiers & kDevice ? tiers | kExpected : tiers; }

  // Applies a batch. Returns the number of events, or -1 if nothing has changed. `find` may run between two events.
  int64_t apply(Slot slot, const uint8_t* payload, size_t size, bool is_private) {
    const Batch batch = read_batch(payload, size);
    if (!batch.understood) return -1;
    for (const Event& event : batch.events) {
      const uint64_t* pages = batch.pages.data() + event.first;
      if (event.kind == Event::kStored) store(slot, event.tiers | (is_private ? kPrivate : 0), pages, event.count);
      else if (event.kind == Event::kRemoved) remove(slot, left(event.tiers), pages, event.count);
      else clear_told(slot, is_private);
    }
    return batch.events_read;
  }

  // Writes all of `found`, int32 [kTiers, slots]; see PageTable.find in page_table.py.
  void find(const uint64_t* pages, size_t count, int32_t* found, size_t slots) {
    std::memset(found, 0, kTiers * slots * sizeof(int32_t));
    const std::lock_guard<std::mutex> lock(mutex_);
    KeysAhead keys(*this, pages, count);
    SetId set = Shard::kUnused;
    size_t first = 0;  // the first page of the run that has `set`
    for (size_t i = 0; i < count; ++i) {
      const uint64_t key = keys.take(i);
      const Shard::Entry* entry = shard_of(key).find(pages[i], key);
      const SetId next = entry ? entry->set : HolderSets::kEmptySet;
      if (next == set) continue;
      if (i > 0 && !extend(set, first, i, found, slots)) return;
      if (sets_.members(next).empty()) return;
      set = next;
      first = i;
    }
    if (count > 0) extend(set, first, count, found, slots);
  }

  std::vector<int64_t> held(Slot slot, Tiers tiers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<uint8_t> by_set = sets_.tiers_of(slot);
    std::vector<int64_t> pages;
    for (const Shard& shard : shards_)
      for (const Shard::Entry& entry : shard)
        if (entry.set != Shard::kUnused && by_set[entry.set] & tiers) pages.push_back(entry.page());
    return pages;
  }

  uint64_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return live_;
  }

  size_t nbytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t bytes = sizeof(*this) + sets_.nbytes();
    for (const Shard& shard : shards_) bytes += shard.capacity() * sizeof(Shard::Entry);
    return bytes;
  }

 private:
  static constexpr size_t kShards = 256;

  // Prefetches the entries of pages a few pages ahead of their use.
  class KeysAhead {
   public:
    KeysAhead(const PageTable& table, const uint64_t* pages, size_t count)
        : table_(table), pages_(pages), count_(count) {
      for (size_t i = 0; i < kAhead && i < count; ++i) look_at(i);
    }
    uint64_t take(size_t i) {
      const uint64_t key = keys_[i % kAhead];
      if (i + kAhead < count_) look_at(i + kAhead);
      return key;
    }

   private:
    static constexpr size_t kAhead = 16;
    void look_at(size_t i) {
      const uint64_t key = mixed(pages_[i] ^ table_.seed_);
      keys_[i % kAhead] = key;
      table_.shard_of(key).prefetch(key);
    }
    const PageTable& table_;
    const uint64_t* pages_;
    size_t count_;
    uint64_t keys_[kAhead];
  };

  // Consecutive pages that move from one set to another are counted together. The count is applied even if memory
  // runs out in the middle of a batch.
  struct Run {
    PageTable& table;
    SetId from = 0, to = 0;
    uint64_t pages = 0;
    ~Run() { settle(); }
    void settle() {
      HolderSets& sets = table.sets_;
      const uint64_t moved = from == to ? 0 : pages;
      pages = 0;
      if (!moved) return;
      sets.add_pages(to, moved);
      table.live_ += moved * !sets.members(to).empty();
      table.live_ -= moved * !sets.members(from).empty();
      sets.drop_pages(from, moved);
    }
  };

  template <typename Chosen>
  void forget(Slot slot, Tiers tiers, Chosen chosen) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_ -= sets_.forget(slot, tiers, chosen);
    sweep();
  }

  template <typename EntryOf>
  void change_pages(const Change& change, const uint64_t* pages, size_t count, EntryOf entry_of) {
    KeysAhead keys(*this, pages, count);
    Run run{*this};
    for (size_t i = 0; i < count; ++i) {
      Shard::Entry* entry = entry_of(pages[i], keys.take(i));
      if (!entry) continue;
      if (run.pages == 0 || entry->set != run.from) {
        run.settle();
        const SetId from = entry->set;
        run.to = sets_.changed(from, change);
        run.from = from;
      }
      entry->set = run.to;
      ++run.pages;
    }
  }

  // Workers of the run's set that hold every page before `first` also hold those before `end`. Returns whether there
  // is such a worker.
  bool extend(SetId set, size_t first, size_t end, int32_t* found, size_t slots) const {
    bool any = false;
    const int32_t run = static_cast<int32_t>(end - first);
    for (const Holder holder : sets_.members(set)) {
      const size_t slot = holder.slot();
      if (slot >= slots || found[slot] != static_cast<int32_t>(first)) continue;
      found[slot] += run;
      const int best = __builtin_ctz(holder.tiers());
      if (best) found[best * slots + slot] += run;
      any = true;
    }
    return any;
  }

  Shard::Entry* added(uint64_t page, uint64_t key) {
    Shard& shard = shard_of(key);
    if (shard.full()) rebuild(shard);
    const uint32_t before = shard.used();
    Shard::Entry* entry = shard.find_or_add(page, key);
    entries_ += shard.used() - before;
    sets_.add_pages(HolderSets::kEmptySet, shard.used() - before);
    return entry;
  }

  void rebuild(Shard& shard) {
    const uint32_t before = shard.used();
    shard.rebuild(sets_, seed_);
    entries_ += shard.used();
    entries_ -= before;
  }

  // Gives memory back when no worker holds most entries' pages, one shard per call.
  void sweep() {
    if (entries_ - live_ > live_ + 4 * kShards) rebuild(shards_[swept_++ % kShards]);
  }

  Shard& shard_of(uint64_t key) { return shards_[key >> 56]; }
  const Shard& shard_of(uint64_t key) const { return shards_[key >> 56]; }

  const uint64_t seed_;  // peers choose the hashes, and must not be able to choose places
  std::mutex mutex_;
  HolderSets sets_;
  Shard shards_[kShards];
  uint64_t entries_ = 0;
  uint64_t live_ = 0;  // entries of pages that some worker holds
  size_t swept_ = 0;
};

}  // namespace baton
