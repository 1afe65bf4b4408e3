// A set of threads that all run the same function. The caller is thread 0.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace baton {

// One thread's view of the region that it runs in.
class Team {
 public:
  Team(int index, int size) : index(index), size(size) {}
  const int index;
  const int size;

  // Waits for every thread of the region. Spins for a few microseconds, then yields the core: another worker
  // process on the same cores must be able to run while this one waits for its own slowest thread.
  void barrier();

  // Hands out 0, 1, 2, ... over all threads of the region, in any order; `counter` starts at 0.
  static int64_t next(std::atomic<int64_t>& counter) { return counter.fetch_add(1, std::memory_order_relaxed); }

  // This thread's part of [0, n). The sizes of the parts differ by at most one.
  void split(int64_t n, int64_t& begin, int64_t& end) const {
    begin = n * index / size;
    end = n * (index + 1) / size;
  }

 private:
  friend class Shares;
  unsigned shares_ = 0;  // how many there were in this region
};

struct Taken;

// The tasks [0, n) of one step of a region. A thread takes those of its own part (Team::split), one after the other, and
// then those that another thread has not begun: that one may have lost its core to another process. Every thread of the
// team makes one, with the same n, and a barrier comes before the next.
class Shares {
 public:
  Shares(Team& team, int64_t n);
  bool take(int64_t& task);

 private:
  const Team& team_;
  const int64_t n_;
  Taken* taken_ = nullptr;  // by thread; null: there is one thread
  int64_t alone_ = 0;
  int from_ = 0;  // how many threads' parts are done
};

using Region = void (*)(Team& team, void* context);

// Runs `region` on `threads` threads and returns when all are done. One region at a time per process: a second
// caller waits for its turn. Threads start on first use, sleep between regions that are more than a millisecond apart, and
// end with the process.
void run_region(int threads, Region region, void* context);

// How many of `threads` are worth waking for `rows` that are `work` together, of which a thread takes `share` at least.
inline int threads_worth(int threads, int64_t rows, int64_t work, int64_t share) {
  return static_cast<int>(std::clamp<int64_t>(std::min(rows, work / share), 1, threads));
}

template <typename F>
void parallel(int threads, F& body) {
  run_region(threads, [](Team& team, void* context) { (*static_cast<F*>(context))(team); }, &body);
}

}  // namespace baton
