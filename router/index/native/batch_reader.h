// Reads an event batch (wire/events.py) from MessagePack: maps tagged by `type`, hashes as integers. A batch of any
// other form is refused as a whole, and Python reads it. The bytes come from peers: every read is bounded, nothing
// recurses, and memory for a length is allocated only after that many bytes have been seen.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "holder_sets.h"

namespace baton {

struct Event {
  enum Kind : uint8_t { kNone, kStored, kRemoved, kCleared };
  Kind kind = kNone;
  Tiers tiers = 1;  // GPU is the default medium
  size_t first = 0, count = 0;  // its pages in Batch::pages
  bool does_the_same(const Event& other) const { return kind == other.kind && tiers == other.tiers; }
};

struct Batch {
  bool understood = false;
  int64_t events_read = 0;
  std::vector<Event> events;  // neighbours that do the same to other pages are merged
  std::vector<uint64_t> pages;
};

struct Text {
  const char* data = nullptr;
  size_t size = 0;
  bool is(const char* other) const { return size == std::strlen(other) && !std::memcmp(data, other, size); }
  // Ignores case; `other` is in capitals.
  bool is_any_case(const char* other) const {
    if (size != std::strlen(other)) return false;
    for (size_t i = 0; i < size; ++i)
      if ((data[i] >= 'a' && data[i] <= 'z' ? data[i] - 32 : data[i]) != other[i]) return false;
    return true;
  }
};

// The size of an integer in bytes, by its first byte; 0 for a byte that begins no integer.
struct IntegerBytes {
  uint8_t after[256] = {};
  constexpr IntegerBytes() {
    for (int lead = 0; lead < 256; ++lead) {
      if (lead < 0x80 || lead >= 0xE0) after[lead] = 1;
      else if (lead >= 0xCC && lead <= 0xD3) after[lead] = 1 + (1 << (lead & 3));
    }
  }
};
inline constexpr IntegerBytes kIntegerBytes;

// A cursor over MessagePack. A function returns false if what follows is not what the function reads. The cursor
// must not be used afterwards.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool at_end() const { return at_ == end_; }
  size_t left() const { return end_ - at_; }

  bool array(uint64_t& count) { return sized(0x90, 0x0F, 0xDC, 0, count); }
  bool map(uint64_t& count) { return sized(0x80, 0x0F, 0xDE, 0, count); }

  bool text(Text& text) {
    uint64_t size;
    if (!sized(0xA0, 0x1F, 0xDA, 0xD9, size) || size > left()) return false;
    text = {reinterpret_cast<const char*>(at_), static_cast<size_t>(size)};
    at_ += size;
    return true;
  }

  bool nil() {
    if (at_end() || *at_ != 0xC0) return false;
    ++at_;
    return true;
  }

  // An integer as 64 bits; signed ones are sign-extended.
  bool integer(uint64_t& value) {
    if (at_end()) return false;
    const uint8_t lead = *at_++;
    if (lead < 0x80) return value = lead, true;
    if (lead >= 0xE0) return value = static_cast<uint64_t>(int64_t{static_cast<int8_t>(lead)}), true;
    if (lead < 0xCC || lead > 0xD3) return false;
    const int bytes = 1 << (lead & 3);
    if (!big_endian(bytes, value)) return false;
    const int unused = 64 - 8 * bytes;
    if (lead >= 0xD0) value = static_cast<uint64_t>(static_cast<int64_t>(value << unused) >> unused);
    return true;
  }

  bool real() {
    if (at_end() || (*at_ != 0xCA && *at_ != 0xCB)) return false;
    const size_t bytes = *at_ == 0xCA ? 5 : 9;
    if (bytes > left()) return false;
    at_ += bytes;
    return true;
  }

  bool pair_is_next() const { return !at_end() && *at_ == 0x92; }

  // Skips integers. Most of a batch is tokens, whose sizes are unpredictable, so there is no branch on the size.
  bool skip_integers(uint64_t count) {
    for (; count > 0; --count) {
      const size_t bytes = at_end() ? 0 : kIntegerBytes.after[*at_];
      if (bytes == 0 || bytes > left()) return false;
      at_ += bytes;
    }
    return true;
  }

  // Skips `count` values of any kind and depth: a container adds its members to the values that remain.
  bool skip(uint64_t count) {
    for (; count > 0; --count) {
      if (count > left()) return false;  // a value takes a byte at least
      uint64_t inner = 0;
      if (!skip_head(inner)) return false;
      count += inner;
    }
    return true;
  }

 private:
  bool big_endian(int bytes, uint64_t& value) {
    if (static_cast<size_t>(bytes) > left()) return false;
    value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | *at_++;
    return true;
  }

  // The length of a container or text. It is in the lead byte's lowest bits, or in the next 1 (`lead8`, if the
  // kind has it), 2 (`lead16`) or 4 bytes.
  bool sized(uint8_t fix, uint8_t mask, uint8_t lead16, uint8_t lead8, uint64_t& size) {
    if (at_end()) return false;
    const uint8_t lead = *at_++;
    if ((lead & ~mask) == fix) return size = lead & mask, true;
    if (lead == lead16) return big_endian(2, size);
    if (lead == lead16 + 1) return big_endian(4, size);
    return lead8 && lead == lead8 && big_endian(1, size);
  }

  // Skips one value without its members; `inner` becomes their number.
  bool skip_head(uint64_t& inner) {
    const uint8_t lead = *at_++;
    uint64_t bytes = 0;
    if (lead < 0x80 || lead >= 0xE0 || lead == 0xC0 || lead == 0xC2 || lead == 0xC3) return true;
    if (lead < 0x90) return inner = 2 * (lead & 0x0Fu), true;
    if (lead < 0xA0) return inner = lead & 0x0Fu, true;
    if (lead < 0xC0) bytes = lead & 0x1Fu;
    else if (lead == 0xC1) return false;  // never used
    else if (lead <= 0xC6) { if (!big_endian(1 << (lead - 0xC4), bytes)) return false; }  // bin
    else if (lead <= 0xC9) { if (!big_endian(1 << (lead - 0xC7), bytes)) return false; ++bytes; }  // ext, its type
    else if (lead <= 0xCB) bytes = lead == 0xCA ? 4 : 8;
    else if (lead <= 0xD3) bytes = 1 << (lead & 3);
    else if (lead <= 0xD8) bytes = 1 + (1 << (lead - 0xD4));  // fixext
    else if (lead <= 0xDB) { if (!big_endian(1 << (lead - 0xD9), bytes)) return false; }  // str
    else if (lead <= 0xDD) return big_endian(2 << (lead - 0xDC), inner);  // array
    else { if (!big_endian(2 << (lead - 0xDE), inner)) return false; inner *= 2; return true; }  // map
    if (bytes > left()) return false;
    at_ += bytes;
    return true;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

// The map of one event. Fields come in any order, so they are judged together at the end.
class EventReader {
 public:
  EventReader(Reader& reader, std::vector<uint64_t>& pages) : reader_(reader), pages_(pages) {}

  bool read(Event& event) {
    event.first = pages_.size();
    uint64_t fields;
    if (!reader_.map(fields)) return false;
    for (; fields > 0; --fields) {
      Text name;
      if (!reader_.text(name) || !field(name, event)) return false;
    }
    event.count = pages_.size() - event.first;
    const bool whole = tokens_ == 0 || tokens_ == event.count * size_;  // private pages are told without tokens
    if (event.kind == Event::kStored) return has(kHashes | kTokens | kSize) && whole;
    return event.kind == Event::kCleared || (event.kind == Event::kRemoved && has(kHashes));
  }

 private:
  enum Seen : uint32_t { kType = 1, kHashes = 2, kTokens = 4, kSize = 8, kMedium = 16 };

  bool has(uint32_t wanted) const { return (seen_ & wanted) == wanted; }
  // Returns false for a field that comes twice.
  bool first_time(Seen field) {
    const bool first = !(seen_ & field);
    seen_ |= field;
    return first;
  }

  bool field(Text name, Event& event) {
    if (name.is("type")) return first_time(kType) && type(event);
    if (name.is("block_hashes")) return first_time(kHashes) && hashes();
    if (name.is("token_ids")) return first_time(kTokens) && tokens();
    if (name.is("block_size")) return first_time(kSize) && reader_.integer(size_) && size_ - 1 < kMaxSize;
    if (name.is("medium")) return first_time(kMedium) && (reader_.nil() || medium(event));
    uint64_t ignored;
    Text text;
    if (name.is("parent_block_hash") || name.is("lora_id")) return reader_.nil() || reader_.integer(ignored);
    if (name.is("lora_name") || name.is("cache_salt")) return reader_.nil() || reader_.text(text);
    if (name.is("group_idx") || name.is("kv_cache_spec_kind")) return reader_.nil();  // Python knows which counts
    if (name.is("extra_keys")) return reader_.nil() || (reader_.array(ignored) && reader_.skip(ignored));
    return reader_.skip(1);
  }

  bool type(Event& event) {
    Text text;
    if (!reader_.text(text)) return false;
    if (text.is("BlockStored")) event.kind = Event::kStored;
    else if (text.is("BlockRemoved")) event.kind = Event::kRemoved;
    else if (text.is("AllBlocksCleared")) event.kind = Event::kCleared;
    return event.kind != Event::kNone;
  }

  // The names of wire.events.MEDIA.
  bool medium(Event& event) {
    Text text;
    if (!reader_.text(text)) return false;
    if (text.is_any_case("GPU")) event.tiers = 1;
    else if (text.is_any_case("CPU") || text.is_any_case("CPU_PINNED")) event.tiers = 2;
    else if (text.is_any_case("STORAGE") || text.is_any_case("DISK") || text.is_any_case("EXTERNAL"))
      event.tiers = 4;
    else return false;
    return true;
  }

  bool hashes() {
    uint64_t count;
    if (!reader_.array(count) || count > reader_.left()) return false;
    for (uint64_t page; count > 0; --count) {
      if (!reader_.integer(page)) return false;
      pages_.push_back(page);
    }
    return true;
  }

  // Integers, or pairs of them from a bigram cache.
  bool tokens() {
    if (!reader_.array(tokens_) || tokens_ > reader_.left()) return false;
    if (!reader_.pair_is_next()) return reader_.skip_integers(tokens_);
    uint64_t two;
    for (uint64_t i = 0; i < tokens_; ++i)
      if (!reader_.pair_is_next() || !reader_.array(two) || !reader_.skip_integers(two)) return false;
    return true;
  }

  static constexpr uint64_t kMaxSize = 1u << 30;

  Reader& reader_;
  std::vector<uint64_t>& pages_;
  uint32_t seen_ = 0;
  uint64_t tokens_ = 0;
  uint64_t size_ = 0;
};

inline Batch read_batch(const uint8_t* data, size_t size) {
  Batch batch;
  Reader reader(data, size);
  uint64_t elements, events, rank;
  if (!reader.array(elements) || elements != 3 || !reader.real() || !reader.array(events)) return batch;
  for (; events > 0; --events, ++batch.events_read) {
    Event event;
    if (!EventReader(reader, batch.pages).read(event)) return batch;
    if (!batch.events.empty() && batch.events.back().does_the_same(event)) batch.events.back().count += event.count;
    else batch.events.push_back(event);
  }
  batch.understood = (reader.nil() || reader.integer(rank)) && reader.at_end();
  return batch;
}

}  // namespace baton
