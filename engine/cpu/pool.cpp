#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton {

struct alignas(64) Taken {
  std::atomic<int64_t> count{0};
};

namespace {

constexpr int kSpins = 300;     // of `pause`, about 5-15 us: longer than a balanced barrier takes
constexpr std::chrono::milliseconds kAwake{1};  // that a helper yields for, then it sleeps until the next region

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

template <typename Done>
void spin_then_yield(Done done) {
  for (int i = 0; !done(); ++i) {
    if (i < kSpins) relax();
    else sched_yield();
  }
}

constexpr unsigned kShares = 4;  // more than the steps that threads can be in at a time

struct Pool {
  std::mutex turn;  // held by the caller for the length of a region

  std::mutex wake_mutex;
  std::condition_variable wake;
  alignas(64) std::atomic<uint64_t> generation{0};  // one per region
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<int> running{0};
  int size = 1;
  bool told = false;  // that a thread could not start
  Region region = nullptr;
  void* context = nullptr;
  std::vector<std::thread> helpers;
  std::vector<Taken> taken;  // [kShares, size], at least

  void barrier() {
    const uint32_t before = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(before + 1, std::memory_order_release);
      return;
    }
    spin_then_yield([&] { return phase.load(std::memory_order_acquire) != before; });
  }

  // Returns when there is a region after the first `seen`. A thread that sleeps is woken late, and on a core that may be
  // taken, so it stays awake between the regions of one step. It sleeps between steps: there other processes send what
  // the step has made.
  void wait_for_region(uint64_t seen) {
    const auto is_there = [&] { return generation.load(std::memory_order_acquire) != seen; };
    for (int i = 0; i < kSpins; ++i) {
      if (is_there()) return;
      relax();
    }
    const auto end = std::chrono::steady_clock::now() + kAwake;
    while (std::chrono::steady_clock::now() < end) {
      if (is_there()) return;
      sched_yield();
    }
    std::unique_lock<std::mutex> lock(wake_mutex);
    wake.wait(lock, is_there);
  }

  void help(int index, uint64_t seen) {
    for (;;) {
      wait_for_region(seen++);
      if (index < size) {
        Team team(index, size);
        region(team, context);
      }
      running.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void run(int threads, Region work, void* argument) {
    std::lock_guard<std::mutex> lock(turn);
    while (static_cast<int>(helpers.size()) + 1 < threads) {
      const int index = static_cast<int>(helpers.size()) + 1;
      try {
        helpers.emplace_back([this, index, seen = generation.load()] { help(index, seen); });
      } catch (const std::system_error& error) {  // a bound on threads or memory: the region goes on with fewer
        if (!told) std::fprintf(stderr, "baton: thread %d of %d cannot start: %s\n", index, threads, error.what());
        told = true;
        threads = index;
      }
    }
    size = threads;
    if (taken.size() < kShares * size) taken = std::vector<Taken>(kShares * size);
    for (Taken& one : taken) one.count.store(0, std::memory_order_relaxed);
    region = work;
    context = argument;
    running.store(static_cast<int>(helpers.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> wake_lock(wake_mutex);
      generation.fetch_add(1, std::memory_order_acq_rel);
    }
    wake.notify_all();
    Team team(0, threads);
    work(team, argument);
    spin_then_yield([&] { return running.load(std::memory_order_acquire) == 0; });
  }
};

// The pool is never destroyed, because its threads run until the process ends. A forked child gets a new pool, because
// threads do not survive a fork.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool();
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool(); });
  });
  return *pool;
}

}  // namespace

void Team::barrier() {
  if (size > 1) pool->barrier();
}

Shares::Shares(Team& team, int64_t n) : team_(team), n_(n) {
  if (team.size == 1) return;
  const unsigned mine = team.shares_++;
  taken_ = &pool->taken[mine % kShares * team.size];
  pool->taken[(mine + 2) % kShares * team.size + team.index].count.store(0, std::memory_order_relaxed);
}

bool Shares::take(int64_t& task) {
  if (taken_ == nullptr) return (task = alone_++) < n_;
  for (; from_ < team_.size; ++from_) {
    const int of = (team_.index + from_) % team_.size;
    int64_t first, end;
    Team(of, team_.size).split(n_, first, end);
    task = first + taken_[of].count.fetch_add(1, std::memory_order_relaxed);
    if (task < end) return true;
  }
  return false;
}

void run_region(int threads, Region region, void* context) {
  if (threads <= 1) {
    Team team(0, 1);
    region(team, context);
    return;
  }
  the_pool().run(threads, region, context);
}

}  // namespace baton
