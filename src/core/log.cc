// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>

#include "core/environment.h"

namespace tessera {
namespace {

constexpr std::string_view kTopics[] = {
    "dispatch", "plan",     "checks", "memory",  // as enum Topic
    "cp",       "sharding", "hf",     "paddle", "all"};
constexpr size_t kOwnTopics = 4;  // the others are logged by front ends; "all" is everything

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

// Calls `with` with each of the names between commas.
template <typename With>
void for_each_name(std::string_view names, With with) {
  for (size_t at = 0; !names.empty() && at <= names.size();) {
    const std::string_view name = names.substr(at, names.find(',', at) - at);
    with(name);
    at += name.size() + 1;
  }
}

uint32_t topics_of(std::string_view names) {
  uint32_t topics = 0;
  for_each_name(names, [&](std::string_view name) {
    for (uint32_t i = 0; i < kOwnTopics; ++i) {
      if (name == kTopics[i] || name == "all") topics |= 1u << i;
    }
  });
  return topics;
}

bool has_unknown(std::string_view names) {
  bool unknown = false;
  for_each_name(names, [&](std::string_view name) {
    unknown |= std::find(std::begin(kTopics), std::end(kTopics), name) == std::end(kTopics);
  });
  return unknown;
}

}  // namespace

void set_log(tessera_log_callback callback, void* user) {
  const std::lock_guard lock(sink().mutex);
  sink().callback = callback;
  sink().user = user;
  enabled_topics.store(callback ? topics_of(environment().log) : 0, std::memory_order_relaxed);
}

Status check_log() {
  static const bool unknown = has_unknown(environment().log);
  if (!unknown) return {};
  std::string known;
  for (const std::string_view topic : kTopics) {
    known += (known.empty() ? "" : ", ") + std::string(topic);
  }
  return invalid("TESSERA_LOG=\"%s\": must be names of %s, with commas between them",
                 printable(environment().log).c_str(), known.c_str());
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
  if (callback) callback(user, kTopics[static_cast<size_t>(topic)].data(), message);
}

}  // namespace tessera
