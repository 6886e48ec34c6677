// SPDX-License-Identifier: Apache-2.0
// The thread pool: every task once, whoever calls, however many at a time, and after a fork.
#include "cpu/pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "conformance/conformance_case.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::cpu {
namespace {

constexpr Device kHere = {TESSERA_CPU, 0, 0, 0};

Buffers with_threads(int count) {
  Buffers buffers{};
  buffers.num_threads = count;
  return buffers;
}

// True if each of n tasks ran once, on a worker of which there is one.
bool runs_each_task_once(int num_threads, int n) {
  std::vector<std::atomic<int>> ran(static_cast<size_t>(n));
  std::vector<std::atomic<int>> inside(static_cast<size_t>(num_threads));
  std::atomic<bool> right = true;
  parallel_for(with_threads(num_threads), n, [&](int64_t task, int worker) {
    if (worker < 0 || worker >= num_threads || inside[static_cast<size_t>(worker)]++ != 0) {
      right = false;
      return;
    }
    ++ran[static_cast<size_t>(task)];
    --inside[static_cast<size_t>(worker)];
  });
  for (const auto& count : ran) right = right && count == 1;
  return right;
}

TEST(Pool, RunsEachTaskOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const int tasks : {0, 1, 2, 7, 1000}) {
      EXPECT_TRUE(runs_each_task_once(threads, tasks)) << threads << " threads, " << tasks;
    }
  }
}

TEST(Pool, ServesManyCallersAtOnce) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int i = 0; i < 300; ++i) wrong += !runs_each_task_once(1 + (caller + i) % 4, i % 23);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Pool, ATaskMayCall) {
  std::atomic<int> inner = 0;
  parallel_for(with_threads(3), 20, [&](int64_t, int) {
    parallel_for(with_threads(3), 10, [&](int64_t, int) { ++inner; });
  });
  EXPECT_EQ(inner, 200);
}

// A fork may meet the pool in any state: idle, woken, inside a job of another thread.
TEST(Pool, AForkedChildHasAPoolOfItsOwn) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  // Their own locks, of the allocator and the threads, may be held by another thread at the fork.
  GTEST_SKIP() << "a child of a sanitized process with threads may wait for the sanitizer's locks";
#endif
  std::atomic<bool> stop = false;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&stop] {
      while (!stop) {
        runs_each_task_once(3, 50);
        std::this_thread::yield();
      }
    });
  }
  for (int i = 0; i < 100; ++i) {
    runs_each_task_once(2, i % 5);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // a child that waits for threads of its parent dies of it
      bool right = true;
      for (int round = 0; round < 5; ++round) right = right && runs_each_task_once(3, 40);
      _exit(right ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "child " << i << ": " << status;
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

#if defined(__x86_64__)
TEST(Pool, KeepsTheCallersFloatingPointMode) {
  const unsigned before = _mm_getcsr();
  const unsigned upward = (before & ~0x8040u) | 0x4000u;  // round up, keep subnormals
  _mm_setcsr(upward);
  std::atomic<int> wrong = 0;
  parallel_for(with_threads(3), 50,
               [&](int64_t, int) { wrong += (_mm_getcsr() & ~0x3Fu) != 0x9FC0; });
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(after, upward);
}
#endif

// Runs a case with the host's threads, and counts how often they are asked for.
int calls_of_host(const char* line) {
  auto made = ConformanceCase::create(line);
  EXPECT_TRUE(made.ok()) << line;
  ConformanceCase& c = *made.value();
  Buffers& buffers = c.buffers();
  int calls = 0;
  buffers.num_threads = 2;
  buffers.parallel_context = &calls;
  buffers.parallel_for = [](void* context, int64_t n, void (*body)(void*, int64_t), void* arg) {
    ++*static_cast<int*>(context);
    for (int64_t i = 0; i < n; ++i) body(arg, i);
  };
  EXPECT_TRUE(c.run("cpu", kHere, 2).ok()) << line;
  EXPECT_TRUE(c.compare().passed()) << line;
  return calls;
}

TEST(Pool, IsNotAskedForTinyProblems) {
  EXPECT_EQ(calls_of_host("fwd fp32 b=1 s=16 h=2 d=32"), 0);
  EXPECT_EQ(calls_of_host("bwd fp32 b=1 s=16 h=2 d=32"), 0);
  EXPECT_GT(calls_of_host("fwd fp32 b=1 s=128 h=4 d=64"), 0);
  EXPECT_GT(calls_of_host("bwd fp32 b=1 s=128 h=4 d=64"), 0);
}

TEST(Pool, LeavesOutWhatIsInterrupted) {
  volatile int32_t stop = 0;
  Buffers buffers = with_threads(3);
  buffers.interrupt = &stop;
  std::atomic<int> ran{0};
  parallel_for(buffers, 10000, [&](int64_t, int) {
    if (ran.fetch_add(1) == 20) stop = 1;
  });
  EXPECT_GE(ran.load(), 21);
  EXPECT_LE(ran.load(), 24);  // each worker may have begun one
}

}  // namespace
}  // namespace tessera::cpu
