// Small C entry points. The larger ones are in the files of the functions that they call.
#include "attention.h"
#include "isa.h"
#include "pool.h"

extern "C" {

int baton_detected_isa() { return baton::detected_isa(); }
int baton_current_isa() { return baton::current_isa(); }
void baton_set_isa(int isa) { baton::set_isa(static_cast<baton::Isa>(isa)); }

// The caller's mirror of the struct must have this size.
int baton_attention_call_bytes() { return sizeof(baton::AttentionCall); }

// Reads every byte once, as fast as `threads` threads can, and returns the sum of the 8-byte words. bench.floor uses it
// to measure the machine's read bandwidth.
uint64_t baton_read(const uint64_t* words, int64_t bytes, int threads) {
  std::atomic<uint64_t> total{0};
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split(bytes / 64, first, last);
    uint64_t sums[8] = {};
    for (int64_t line = first; line < last; ++line) {
      __builtin_prefetch(words + line * 8 + 256);
      for (int i = 0; i < 8; ++i) sums[i] += words[line * 8 + i];
    }
    uint64_t sum = 0;
    for (uint64_t part : sums) sum += part;
    total += sum;
  };
  baton::parallel(threads, body);
  return total;
}
}
