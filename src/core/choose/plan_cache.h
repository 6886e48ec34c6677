// SPDX-License-Identifier: Apache-2.0
// The plan cache, two bounded levels: the exact bytes of a problem -> who runs it, and (backend,
// its canonical problem) -> plan. Refusals are remembered too. Thread-safe; plans are built outside
// the lock, so that two threads may build one twice and keep the first. A backend whose plan() refuses
// is passed by. A hit allocates nothing.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/choose/choose.h"

namespace tessera {

// What is known of one problem on one device. Immutable.
struct Planned {
  Problem problem;  // normalised, with the forced backend's name
  const Backend* backend = nullptr;
  std::shared_ptr<const Plan> plan;
  Status refusal;  // when there is no plan
};

// Keeps the most recently used values.
template <typename Key, typename Value>
class RecentlyUsed {
 public:
  explicit RecentlyUsed(size_t capacity) : capacity_(capacity) {}

  // same(key) tells the one that is looked for.
  template <typename Same>
  const Value* find(size_t hash, const Same& same) {
    const auto [first, last] = index_.equal_range(hash);
    for (auto at = first; at != last; ++at) {
      if (!same(at->second->key)) continue;
      entries_.splice(entries_.begin(), entries_, at->second);
      return &at->second->value;
    }
    return nullptr;
  }

  // The key is not in the cache.
  void insert(size_t hash, Key key, Value value) {
    entries_.push_front({hash, std::move(key), std::move(value)});
    index_.emplace(hash, entries_.begin());
    if (entries_.size() <= capacity_) return;
    const auto oldest = std::prev(entries_.end());
    const auto [first, last] = index_.equal_range(oldest->hash);
    for (auto at = first; at != last; ++at) {
      if (at->second != oldest) continue;
      index_.erase(at);
      break;
    }
    entries_.pop_back();
  }

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    size_t hash;
    Key key;
    Value value;
  };
  size_t capacity_;
  std::list<Entry> entries_;  // most recent first
  std::unordered_multimap<size_t, typename std::list<Entry>::iterator> index_;
};

class PlanCache {
 public:
  // A problem takes 5 KB here; a plan what its backend says.
  explicit PlanCache(BackendList backends, size_t problems = 512, size_t plans = 128)
      : backends_(backends), problems_(problems), plans_(plans) {}

  // The plan of a caller's problem, validated and normalised unless these bytes are known. A
  // refusal is a failed Status here; TESSERA_INVALID and failures of the device are not remembered.
  Result<std::shared_ptr<const Planned>> find(const Problem& problem, const Device& device);

  size_t problem_count() const;
  size_t plan_count() const;

 private:
  struct Key {
    const Backend* backend;  // of a canonical problem; null for a caller's
    Problem problem;
    Device device;
  };
  // Sets plan and backend to those of the first backend whose plan() does not refuse, or refusal.
  Status plan_first(Planned& planned, const Device& device);
  Result<std::shared_ptr<const Plan>> plan_of(const Backend& backend, const Problem& problem,
                                              const Device& device);

  const BackendList backends_;
  mutable std::mutex mutex_;
  RecentlyUsed<Key, std::shared_ptr<const Planned>> problems_;
  RecentlyUsed<Key, std::shared_ptr<const Plan>> plans_;
};

}  // namespace tessera
