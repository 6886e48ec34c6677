// SPDX-License-Identifier: Apache-2.0
// Ctrl-C during a long call on the CPU: SIGINT is watched while the call runs. The handler that was
// there (Python's) runs as ever; besides, tessera_buffers.interrupt learns of it, the call ends,
// and Python raises KeyboardInterrupt as soon as it is back.
#pragma once

#include <signal.h>

#include <cstdint>
#include <mutex>

namespace tessera_torch {

class InterruptScope {
 public:
  // Watches if the process handles SIGINT at all. Scopes of several threads share one watch.
  InterruptScope() {
    const std::lock_guard lock(mutex());
    if (users()++ > 0) return;
    flag() = 0;
    struct sigaction watch {};
    sigaction(SIGINT, nullptr, &previous());
    watched() = (previous().sa_flags & SA_SIGINFO) != 0 ||
                (previous().sa_handler != SIG_DFL && previous().sa_handler != SIG_IGN);
    if (!watched()) return;
    watch = previous();
    watch.sa_flags |= SA_SIGINFO;
    watch.sa_sigaction = on_signal;
    sigaction(SIGINT, &watch, nullptr);
  }

  ~InterruptScope() {
    const std::lock_guard lock(mutex());
    if (--users() > 0 || !watched()) return;
    struct sigaction current {};
    sigaction(SIGINT, nullptr, &current);
    const bool ours = (current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_signal;
    if (ours) sigaction(SIGINT, &previous(), nullptr);  // else someone has set another since
  }

  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  const volatile int32_t* interrupt() const { return &flag(); }

 private:
  static void on_signal(int number, siginfo_t* info, void* context) {
    flag() = 1;
    if ((previous().sa_flags & SA_SIGINFO) != 0) {
      previous().sa_sigaction(number, info, context);
    } else {
      previous().sa_handler(number);
    }
  }

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static int& users() {
    static int count = 0;
    return count;
  }
  static bool& watched() {
    static bool is = false;
    return is;
  }
  static volatile int32_t& flag() {
    static volatile int32_t value = 0;
    return value;
  }
  static struct sigaction& previous() {
    static struct sigaction action {};
    return action;
  }
};

}  // namespace tessera_torch
