// SPDX-License-Identifier: Apache-2.0
// The thread pool of this folder: one for the process, created at the first parallel call.
//
// The caller takes part, so one thread means no pool at all. Idle workers spin for a few tens of
// microseconds, so that the phases of one call find them awake, and then sleep on a futex. A call
// made while the pool serves another one, from a worker or from a second caller, runs serially on
// its own thread: nothing waits for anything but its own tasks, so nothing can deadlock. A forked
// child starts with an empty pool of its own. Buffers.parallel_for replaces the pool altogether.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/problem/problem.h"

namespace tessera::cpu {

// The library's default: TESSERA_NUM_THREADS, or the cores that this process may use (affinity mask
// and cgroup quota; hyperthreads of one core count once, as they share its FMA units). Found once.
int default_num_threads();

// How many workers a call uses, and so how many slices of workspace it needs. 1..kMaxThreads.
int num_threads_or_default(int num_threads);
inline constexpr int kMaxThreads = 256;

// Calls fn(task, worker) once for each task in [0, n), in any order; worker <
// num_threads_or_default and no two calls with one worker index run at the same time. Returns when
// all are done, and what they wrote is visible. fn must not throw. Allocates nothing once the pool
// has its threads. Every task runs with one floating-point mode (round to nearest, subnormals
// flushed), whatever the caller's is: results do not depend on it, and the caller's is back on
// return. Tasks that have not begun are left out when buffers.interrupt says so.
template <typename F>
void parallel_for(const Buffers& buffers, int64_t n, F&& fn);

// ---- below: how ----

// Rounding to nearest and no subnormals (their assists cost some CPUs 150 cycles each) while alive.
class FloatMode {
 public:
  FloatMode() {
#if defined(__x86_64__)
    __asm__ volatile("stmxcsr %0" : "=m"(saved_) : : "memory");
    load(kNearestFlushed);
#endif
  }
  ~FloatMode() {
#if defined(__x86_64__)
    load(saved_);
#endif
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static void load(uint32_t mxcsr) { __asm__ volatile("ldmxcsr %0" : : "m"(mxcsr) : "memory"); }
  static constexpr uint32_t kNearestFlushed = 0x9FC0;  // FTZ, DAZ, all exceptions masked
  uint32_t saved_;
#endif
};

// body(arg, worker) on workers 0 .. num_workers-1 at most, 0 being the caller; each body drains one
// shared counter, so it does not matter how many of them ever start.
void run_workers(const Buffers& buffers, int num_workers, void (*body)(void* arg, int64_t worker),
                 void* arg);

template <typename F>
void parallel_for(const Buffers& buffers, int64_t n, F&& fn) {
  struct Work {
    std::atomic<int64_t> next{0};
    int64_t n;
    const volatile int32_t* interrupt;
    F& fn;
  } work{{}, n, buffers.interrupt, fn};
  const auto drain = [](void* arg, int64_t worker) {
    Work& work = *static_cast<Work*>(arg);
    const FloatMode mode;
    for (;;) {
      const int64_t task = work.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= work.n || (work.interrupt && *work.interrupt != 0)) return;
      work.fn(task, static_cast<int>(worker));
    }
  };
  const int64_t workers = num_threads_or_default(buffers.num_threads);
  run_workers(buffers, static_cast<int>(workers < n ? workers : n), drain, &work);
}

}  // namespace tessera::cpu
