// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string_view>

#include "core/environment.h"

namespace tessera {
namespace {

constexpr const char* kTopics[] = {"dispatch", "plan", "checks", "memory"};

struct Sink {
  std::mutex mutex;
  tessera_log_callback callback = nullptr;
  void* user = nullptr;
};

Sink& sink() {
  static Sink instance;
  return instance;
}

std::atomic<uint32_t> enabled_topics{0};  // a bit per topic; 0 while nothing listens

uint32_t topics_of(std::string_view names) {
  uint32_t topics = 0;
  while (!names.empty()) {
    const size_t comma = names.find(',');
    const std::string_view name = names.substr(0, comma);
    for (uint32_t i = 0; i < std::size(kTopics); ++i) {
      if (name == kTopics[i] || name == "all") topics |= 1u << i;
    }
    names.remove_prefix(comma == names.npos ? names.size() : comma + 1);
  }
  return topics;
}

}  // namespace

void set_log(tessera_log_callback callback, void* user) {
  const std::lock_guard lock(sink().mutex);
  sink().callback = callback;
  sink().user = user;
  enabled_topics.store(callback ? topics_of(environment().log) : 0, std::memory_order_relaxed);
}

bool log_enabled(Topic topic) {
  return (enabled_topics.load(std::memory_order_relaxed) >> static_cast<int>(topic) & 1) != 0;
}

void log(Topic topic, const char* format, ...) {
  if (!log_enabled(topic)) return;
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  tessera_log_callback callback;
  void* user;
  {
    const std::lock_guard lock(sink().mutex);
    callback = sink().callback;
    user = sink().user;
  }
  // Outside the lock, so that a callback may itself call set_log.
  if (callback) callback(user, kTopics[static_cast<int>(topic)], message);
}

}  // namespace tessera
