// SPDX-License-Identifier: Apache-2.0
#include "core/validate/overlap.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

__extension__ using uint128 = unsigned __int128;

// sum of coefficient[i] * x[i] == target with 0 <= x[i] <= bound[i], coefficient[i] > 0: a bounded
// linear Diophantine equation. Depth first over the largest coefficients, whose values the smaller
// ones leave little choice; the last two have a closed form.
class Equation {
 public:
  void add(uint64_t coefficient, uint64_t bound) {
    if (bound == 0 || coefficient == 0) return;
    for (int i = 0; i < count_; ++i) {
      if (coefficient_[i] == coefficient) {
        bound_[i] += bound;
        return;
      }
    }
    int i = count_++;
    for (; i > 0 && coefficient_[i - 1] < coefficient; --i) {
      coefficient_[i] = coefficient_[i - 1];
      bound_[i] = bound_[i - 1];
    }
    coefficient_[i] = coefficient;
    bound_[i] = bound;
  }

  bool solvable(uint64_t target) {
    reach_[count_] = 0;
    gcd_[count_] = 0;
    for (int i = count_ - 1; i >= 0; --i) {
      reach_[i] = reach_[i + 1] + coefficient_[i] * bound_[i];
      gcd_[i] = std::gcd(gcd_[i + 1], coefficient_[i]);
    }
    budget_ = kBudget;
    return search(0, target);
  }

 private:
  static constexpr int kTerms = 10;  // four axes of two tensors, and their elements' bytes
  static constexpr int kBudget = 200'000;

  bool search(int i, uint64_t target) {
    if (target == 0) return true;
    if (i == count_ || target > reach_[i] || target % gcd_[i] != 0) return false;
    if (count_ - i == 1) return true;  // divisible and within reach
    if (count_ - i == 2) return two_terms(i, target);
    const uint64_t rest = reach_[i + 1], c = coefficient_[i];
    const uint64_t least = target > rest ? (target - rest + c - 1) / c : 0;
    const uint64_t most = std::min(bound_[i], target / c);
    for (uint64_t x = most + 1; x-- > least;) {
      if (--budget_ < 0) return true;
      if (search(i + 1, target - x * c)) return true;
    }
    return false;
  }

  // a x + b y = target: x is fixed modulo b, so take the first one within both bounds.
  bool two_terms(int i, uint64_t target) const {
    const uint64_t g = gcd_[i];
    const uint64_t a = coefficient_[i] / g, b = coefficient_[i + 1] / g;
    target /= g;
    const uint64_t reach_y = b * bound_[i + 1];
    const uint64_t least = target > reach_y ? (target - reach_y + a - 1) / a : 0;
    const uint64_t most = std::min(bound_[i], target / a);
    if (least > most) return false;
    const uint64_t residue =
        static_cast<uint64_t>(uint128{target % b} * inverse(a % b, b) % b);  // of x modulo b
    const uint64_t step = (residue + b - least % b) % b;
    return step <= most - least;
  }

  // The inverse of a modulo m, which are coprime; 0 for m == 1.
  static uint64_t inverse(uint64_t a, uint64_t m) {
    __extension__ __int128 t = 0, next_t = 1;
    uint64_t r = m, next_r = a;
    while (next_r != 0) {
      const uint64_t quotient = r / next_r;
      t = std::exchange(next_t, t - static_cast<__int128>(quotient) * next_t);
      r = std::exchange(next_r, r - quotient * next_r);
    }
    return m == 1 ? 0 : static_cast<uint64_t>(t < 0 ? t + m : t);
  }

  int count_ = 0, budget_ = 0;
  uint64_t coefficient_[kTerms], bound_[kTerms];
  uint64_t reach_[kTerms + 1], gcd_[kTerms + 1];
};

}  // namespace

bool overlaps_itself(const Tensor& tensor, int rank) {
  struct Step {
    uint64_t stride, bound;
  };
  Step steps[4];  // smallest stride first
  int count = 0;
  for (int axis = 0; axis < rank; ++axis) {
    if (tensor.extent[axis] <= 1) continue;
    const Step step{static_cast<uint64_t>(tensor.stride[axis]),
                    static_cast<uint64_t>(tensor.extent[axis] - 1)};
    int i = count++;
    for (; i > 0 && steps[i - 1].stride > step.stride; --i) steps[i] = steps[i - 1];
    steps[i] = step;
  }
  uint64_t reach = 0;
  bool nested = true;  // every axis steps over all that is inside it
  for (int i = 0; i < count; ++i) {
    nested &= steps[i].stride > reach;
    reach += steps[i].stride * steps[i].bound;
  }
  if (nested) return false;

  // Two indices differ by d, not all 0, with sum stride * d = 0 and |d| <= bound. Let the first
  // nonzero d be positive, at axis i: stride_i (1 + x) + sum_{j > i} stride_j (z_j - bound_j) = 0.
  for (int i = 0; i < count; ++i) {
    Equation equation;
    uint64_t target = 0;
    for (int j = i + 1; j < count; ++j) {
      equation.add(steps[j].stride, 2 * steps[j].bound);
      target += steps[j].stride * steps[j].bound;
    }
    if (target < steps[i].stride) continue;
    equation.add(steps[i].stride, steps[i].bound - 1);
    if (equation.solvable(target - steps[i].stride)) return true;
  }
  return false;
}

uint64_t reach_in_bytes(const Tensor& tensor, int rank) {
  uint64_t last = 0;
  for (int axis = 0; axis < rank; ++axis) {
    if (tensor.extent[axis] == 0) return 0;
    if (tensor.extent[axis] == 1) continue;
    last +=
        static_cast<uint64_t>(tensor.extent[axis] - 1) * static_cast<uint64_t>(tensor.stride[axis]);
  }
  return (last + 1) * static_cast<uint64_t>(size_of(tensor.dtype));
}

Footprint footprint_of(const Tensor& tensor, int rank, const void* data) {
  Footprint f;
  f.begin = reinterpret_cast<uintptr_t>(data);
  f.end = f.begin + reach_in_bytes(tensor, rank);
  f.element = size_of(tensor.dtype);
  if (f.begin == f.end) return f;  // strides of what is empty may be anything
  for (int axis = 0; axis < rank; ++axis) {
    if (tensor.extent[axis] <= 1 || tensor.stride[axis] == 0) continue;
    f.extent[f.rank] = tensor.extent[axis];
    f.stride[f.rank] = tensor.stride[axis] * f.element;
    ++f.rank;
  }
  return f;
}

bool share_memory(const Footprint& a, const Footprint& b) {
  if (a.begin >= b.end || b.begin >= a.end || a.begin == a.end || b.begin == b.end) return false;
  // Some byte of a is some byte of b: a.begin + sum stride x + e = b.begin + sum stride y + f.
  // Count y and f down from their last value, and in units of the smaller element.
  const auto unit = static_cast<uint64_t>(std::min(a.element, b.element));
  Equation equation;
  for (const Footprint* f : {&a, &b}) {
    for (int i = 0; i < f->rank; ++i) {
      equation.add(static_cast<uint64_t>(f->stride[i]) / unit,
                   static_cast<uint64_t>(f->extent[i] - 1));
    }
    equation.add(1, static_cast<uint64_t>(f->element) / unit - 1);
  }
  return equation.solvable((b.end - a.begin) / unit - 1);
}

}  // namespace tessera
