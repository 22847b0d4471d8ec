// A few threads that run one function together, in phases.
//
// The calling thread is worker 0. Waiting spins first (a phase lasts microseconds), then yields its core to whoever
// else wants it; between two calls the workers go to sleep after a fraction of a millisecond, so an idle engine costs
// nothing.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>

#include "common.h"

namespace sglite {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int id = 1; id < size; ++id) threads_.emplace_back([this, id] { serve(id); });
  }
  ~Team() {
    closing_ = true;
    announce();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs work(id) on every worker and returns when all are done.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    next_ = 0;
    if (size_ > 1) announce();
    work(0);
    barrier();
  }

  // All workers reach this line before any passes it. Hands out tickets anew.
  void barrier() {
    if (size_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) relax(spins);
  }

  // Cuts [0, count) into that many pieces of nearly equal size; work(begin, end) does one, first come first served.
  // Ends with a barrier.
  template <class F>
  void share(int count, int pieces, const F& work) {
    hand_out(count, pieces, [&work](int begin, int end, int) { work(begin, end); });
    barrier();
  }

  // The same without a barrier; work(begin, end, next) knows where the worker's next piece begins, `count` if nowhere.
  template <class F>
  void hand_out(int count, int pieces, const F& work) {
    const int64_t items = count;
    const auto edge = [items, pieces](int64_t piece) { return static_cast<int>(std::min<int64_t>(piece, pieces) * items / pieces); };
    int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    while (piece < pieces) {
      const int64_t next = next_.fetch_add(1, std::memory_order_relaxed);
      work(edge(piece), edge(piece + 1), edge(next));
      piece = next;
    }
  }

 private:
  static constexpr int kSpins = 2000;         // about 0.1 ms of pause instructions
  static constexpr int kPatience = 2000 + 400;  // then some hundred yields before a worker sleeps

  static void relax(int spins) {
    if (spins < kSpins) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }

  void announce() {
    call_.fetch_add(1, std::memory_order_acq_rel);
    if (sleepers_.load(std::memory_order_acquire) > 0) futex(FUTEX_WAKE_PRIVATE, size_);
  }

  void serve(int id) {
    uint32_t seen = 0;
    for (;;) {
      await_call(seen);
      ++seen;
      if (closing_) return;
      (*work_)(id);
      barrier();
    }
  }

  void await_call(uint32_t seen) {
    for (int spins = 0; call_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins < kPatience) {
        relax(spins);
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_acq_rel);
      futex(FUTEX_WAIT_PRIVATE, static_cast<int>(seen));  // returns at once if a call came meanwhile
      sleepers_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void futex(int operation, int value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&call_), operation, value, nullptr, nullptr, 0);
  }

  const int size_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> closing_{false};
  alignas(64) std::atomic<uint32_t> call_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace sglite
