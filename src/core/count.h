// SPDX-License-Identifier: Apache-2.0
// Count: a size that follows from extents, which may be any 63 bits. Sums and products of counts
// stop at kTooMany instead of wrapping, and stay there; what asks for that much is refused at the
// front door (choose/workspace.h). The CPU's kernels include this header, so that it needs no other
// and all of it is inlined.
#pragma once

#include <cstdint>

namespace tessera {

#define TESSERA_COUNT [[nodiscard, gnu::always_inline]] constexpr

class Count {
 public:
  static constexpr int64_t kTooMany = INT64_MAX;

  // Not negative. Implicit, so that extents are counts.
  [[gnu::always_inline]] constexpr Count(int64_t n = 0) : n_(n) {}

  TESSERA_COUNT int64_t value() const { return n_; }
  TESSERA_COUNT bool fits() const { return n_ != kTooMany; }

  TESSERA_COUNT friend Count operator+(Count a, Count b) {
    int64_t sum = 0;
    return __builtin_add_overflow(a.n_, b.n_, &sum) ? kTooMany : sum;
  }
  TESSERA_COUNT friend Count operator*(Count a, Count b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a.n_, b.n_, &product) ? kTooMany : product;
  }
  [[gnu::always_inline]] constexpr Count& operator+=(Count b) { return *this = *this + b; }
  [[gnu::always_inline]] constexpr Count& operator*=(Count b) { return *this = *this * b; }

  // Pieces of `size` that hold all, and what they hold. Without signs, a division by a constant is a
  // shift and no sum wraps.
  TESSERA_COUNT Count pieces(int64_t size) const {
    const auto n = static_cast<uint64_t>(n_), unit = static_cast<uint64_t>(size);
    return fits() ? static_cast<int64_t>((n + (unit - 1)) / unit) : kTooMany;
  }
  TESSERA_COUNT Count up_to(int64_t unit) const { return pieces(unit) * unit; }

  TESSERA_COUNT friend bool operator<(Count a, Count b) { return a.n_ < b.n_; }
  TESSERA_COUNT friend bool operator==(Count a, Count b) { return a.n_ == b.n_; }

 private:
  int64_t n_;
};

#undef TESSERA_COUNT

}  // namespace tessera
