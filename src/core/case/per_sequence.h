// SPDX-License-Identifier: Apache-2.0
// PerSequence: one number for each sequence of a case. A batch may have 2^40 sequences, so that
// numbers which all follow from the first two are not listed.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/count.h"

namespace tessera {

class PerSequence {
 public:
  PerSequence() = default;
  PerSequence(std::vector<int64_t> list)
      : size_(static_cast<int64_t>(list.size())), list_(std::move(list)) {}

  // first, first + step, ...: neither of them negative.
  static PerSequence steps(int64_t size, int64_t first, int64_t step) {
    PerSequence p;
    p.size_ = size;
    if (size > 0) p.first_ = first;
    if (size > 1) p.step_ = step;
    return p;
  }
  static PerSequence same(int64_t size, int64_t value) { return steps(size, value, 0); }

  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool listed() const { return !list_.empty(); }
  int64_t operator[](int64_t n) const {
    return listed() ? list_[static_cast<size_t>(n)] : (first_ + Count{n} * step_).value();
  }

  // Whether they are equal for all that is known without looking at each.
  bool operator==(const PerSequence&) const = default;

 private:
  int64_t size_ = 0, first_ = 0, step_ = 0;  // where nothing is listed
  std::vector<int64_t> list_;
};

}  // namespace tessera
