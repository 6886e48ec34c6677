// SPDX-License-Identifier: Apache-2.0
#include "cpu/pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "core/environment.h"
#include "cpu/cores.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::cpu {
namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until done() or for about 30 us, longer than the gap between two phases of one call and
// short beside a wake-up. The clock is read every 64th time: a pause is 10 to 140 cycles.
template <typename Done>
bool spin_until(Done done) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::microseconds(30);
  for (int i = 0;; ++i) {
    if (done()) return true;
    pause();
    if (i % 64 == 63 && Clock::now() > end) return false;
  }
}

// One job at a time. Workers do not have to answer it: one that wakes after the caller has closed
// the job goes back to sleep, so that a short job never waits for a slow wake-up.
class Pool {
 public:
  constexpr Pool() = default;

  ~Pool() {  // so that the library can be unloaded
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    busy_.store(true, std::memory_order_relaxed);  // calls from now on are serial
    for (int i = 0; i < num_threads_; ++i) pthread_join(threads_[i], nullptr);
  }

  // False when the pool is busy: the caller does the work alone.
  bool run(int num_workers, void (*body)(void*, int64_t), void* arg) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    grow(num_workers - 1);
    job_ = {body, arg, num_workers};
    gate_.store(open_for(std::min(num_workers - 1, num_threads_)), std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    body(arg, 0);
    gate_.fetch_and(kActiveMask, std::memory_order_acq_rel);  // closed to those who come late
    if (!spin_until([&] { return gate_.load(std::memory_order_acquire) == 0; })) {
      for (uint32_t gate; (gate = gate_.load(std::memory_order_acquire)) != 0;) gate_.wait(gate);
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

  // Only this thread exists in a forked child, and no job is running.
  void forget_threads() {
    num_threads_ = 0;
    gate_.store(0, std::memory_order_relaxed);
    epoch_.store(0, std::memory_order_relaxed);
    busy_.store(false, std::memory_order_relaxed);
  }

 private:
  struct Job {
    void (*body)(void*, int64_t);
    void* arg;
    int num_workers;
  };

  // gate_: workers inside the job, and above them how many more may enter.
  static constexpr uint32_t kActiveMask = 0xFFFF;
  static constexpr uint32_t kOnePlace = 0x10000;
  static uint32_t open_for(int places) { return static_cast<uint32_t>(places) * kOnePlace; }

  // The caller holds the pool. Threads that the system refuses are done without.
  void grow(int num_threads) {
    while (num_threads_ < num_threads) {
      const auto main = [](void* pool) -> void* {
        static_cast<Pool*>(pool)->work();
        return nullptr;
      };
      if (pthread_create(&threads_[num_threads_], nullptr, main, this) != 0) return;
      ++num_threads_;
    }
  }

  void work() {
    for (uint32_t seen = 0;;) {
      if (!spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; })) {
        epoch_.wait(seen, std::memory_order_acquire);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      uint32_t gate = gate_.load(std::memory_order_relaxed);
      while (gate >= kOnePlace) {
        if (!gate_.compare_exchange_weak(gate, gate - kOnePlace + 1, std::memory_order_acquire)) {
          continue;
        }
        // Nobody writes job_ while this worker is counted as inside. The places left before it
        // entered number the workers from the last to the first.
        job_.body(job_.arg, static_cast<int64_t>(gate / kOnePlace));
        if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1) gate_.notify_one();
        break;
      }
    }
  }

  std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts jobs; what idle workers wait on
  alignas(64) std::atomic<uint32_t> gate_{0};
  Job job_{};
  int num_threads_ = 0;
  pthread_t threads_[kMaxThreads]{};
};

// Made before any thread can call: a child that is forked while another thread were inside a
// function's first use of a static object would wait for that thread for ever.
constinit Pool pool;
[[maybe_unused]] const int forked_children_have_their_own =
    pthread_atfork(nullptr, nullptr, [] { pool.forget_threads(); });

}  // namespace

int default_num_threads() {
  static const int count = [] {
    const int asked = environment().num_threads;
    return std::min(asked > 0 ? asked : usable_cores(), kMaxThreads);
  }();
  return count;
}

int num_threads_or_default(int num_threads) {
  return num_threads > 0 ? std::min(num_threads, kMaxThreads) : default_num_threads();
}

void run_workers(const Buffers& buffers, int num_workers, void (*body)(void* arg, int64_t worker),
                 void* arg) {
  if (num_workers <= 0) return;
  if (num_workers == 1) return body(arg, 0);
  if (buffers.parallel_for != nullptr) {
    return buffers.parallel_for(buffers.parallel_context, num_workers, body, arg);
  }
  if (!pool.run(num_workers, body, arg)) body(arg, 0);
}

}  // namespace tessera::cpu
