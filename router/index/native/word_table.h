// WordTable: token ids of ASCII text, word by word. See router/text/word_cache.py; the steps are router/text/split_pattern.py's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace baton {

// From `least` to `most` characters of a class, as many as can be; `most` 0: none of it comes next.
struct Step {
  uint64_t members[2];
  uint32_t least, most;

  bool has(char c) const { return members[(c >> 6) & 1] >> (c & 63) & 1; }
};
using Steps = std::vector<Step>;

// Steps in a row; then, if one of them fits, an ending.
struct Alternative {
  Steps steps;
  std::vector<Steps> endings;
};

// Cuts text as a regular expression's engine does: at each place the first alternative that fits, which gives back
// characters where its later steps want them.
class Splitter {
 public:
  explicit Splitter(std::vector<Alternative> alternatives) : alternatives_(std::move(alternatives)) {
    for (int c = 0; c < 128; ++c)
      for (const Alternative& one : alternatives_)
        if (may_begin(one.steps, static_cast<char>(c))) by_first_[c].push_back(&one);
  }
  Splitter(const Splitter&) = delete;

  // Where the word ends that begins at `at`, which is before `end`; nullptr when no alternative fits.
  const char* word(const char* at, const char* end) const {
    for (const Alternative* one : by_first_[*at & 127]) {
      const char* after = match(one->steps.data(), one->steps.data() + one->steps.size(), at, end);
      if (!after) continue;
      for (const Steps& ending : one->endings)
        if (const char* further = match(ending.data(), ending.data() + ending.size(), after, end)) return further;
      return after;
    }
    return nullptr;
  }

 private:
  static bool may_begin(const Steps& steps, char c) {
    for (const Step& step : steps) {
      if (step.most > 0 && step.has(c)) return true;
      if (step.least > 0) return false;
    }
    return true;
  }

  // At most as deep as there are steps.
  static const char* match(const Step* step, const Step* last, const char* at, const char* end) {
    if (step == last) return at;
    if (step->most == 0) return at < end && step->has(*at) ? nullptr : match(step + 1, last, at, end);
    const char* const furthest = static_cast<size_t>(end - at) > step->most ? at + step->most : end;
    const char* to = at;
    while (to < furthest && step->has(*to)) ++to;
    for (; to - at >= static_cast<ptrdiff_t>(step->least); --to) {
      if (const char* after = match(step + 1, last, to, end)) return after;
      if (to == at) break;
    }
    return nullptr;
  }

  const std::vector<Alternative> alternatives_;
  std::vector<const Alternative*> by_first_[128];
};

class WordTable {
 public:
  using Ids = std::vector<uint32_t>;

  WordTable(std::vector<Alternative> alternatives, size_t most_words, size_t longest_word)
      : splitter_(std::move(alternatives)), most_words_(most_words), longest_word_(longest_word) {}

  // Appends the ids of an ASCII text; asks `learn(word) -> Ids` for words that are not there. False: the pattern
  // leaves something between two words.
  template <typename Learn>
  bool encode(std::string_view text, Ids& ids, Learn learn) {
    const char *at = text.data(), *const end = at + text.size();
    while (at < end) {
      const char* const after = splitter_.word(at, end);
      if (!after) return false;
      word_.assign(at, after);
      const auto found = ids_.find(word_);
      const Ids& its = found != ids_.end() ? found->second : learned(learn(word_));
      ids.insert(ids.end(), its.begin(), its.end());
      at = after;
    }
    return true;
  }

 private:
  const Ids& learned(Ids ids) {
    last_ = std::move(ids);
    if (word_.size() > longest_word_) return last_;  // seldom seen again
    // Simpler than an order of use, and as good for words of a language.
    if (ids_.size() >= most_words_) ids_.clear();
    return ids_[word_] = last_;
  }

  const Splitter splitter_;
  const size_t most_words_, longest_word_;
  std::unordered_map<std::string, Ids> ids_;
  std::string word_;
  Ids last_;
};

}  // namespace baton
