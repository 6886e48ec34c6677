// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "conformance/reference/reference.h"

namespace tessera::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Row by row: o and lse of two disjoint sets of keys become those of their union.
void merge(const Problem& p, const ReferenceValues& held, ReferenceValues& out) {
  const Tensor& t = p.tensor[TESSERA_O];
  const int64_t sq = t.extent[1], hq = t.extent[2], dv = t.extent[3];
  for (int64_t row = 0; row < t.extent[0] * sq * hq; ++row) {
    const int64_t n = row / (sq * hq), i = row / hq % sq, h = row % hq;
    double& lse = out.value[TESSERA_LSE][(n * hq + h) * sq + i];
    const double before = held.value[TESSERA_LSE][(n * hq + h) * sq + i];
    if (before == -kInfinity) continue;  // o of this row is not read
    const double most = lse > before ? lse : before;
    const double both = most + std::log(std::exp(before - most) + std::exp(lse - most));
    const double keeps = std::exp(before - both), adds = std::exp(lse - both);
    for (int64_t e = row * dv; e < (row + 1) * dv; ++e) {
      double& o = out.value[TESSERA_O][e];
      o = keeps * held.value[TESSERA_O][e] + (lse == -kInfinity ? 0 : adds * o);
    }
    lse = both;
  }
}

}  // namespace

ReferenceValues held_outputs(const Problem& p, const Buffers& buffers) {
  ReferenceValues held;
  if (!has(p, TESSERA_ACCUMULATE)) return held;
  const Role role = is_backward(p) ? Role::kBackwardOutput : Role::kForwardOutput;
  for (int index = TESSERA_O; index <= TESSERA_DALIBI_SLOPES; ++index) {
    if (!given(p, index) || tensor_rule(index).role != role) continue;
    held.value[index] = load_dense(p.tensor[index], tensor_rule(index).rank, buffers.data[index]);
  }
  return held;
}

void add_held(const Problem& p, const ReferenceValues& held, ReferenceValues& out) {
  if (!has(p, TESSERA_ACCUMULATE)) return;
  if (!is_backward(p)) return merge(p, held, out);
  for (int index = TESSERA_DQ; index <= TESSERA_DALIBI_SLOPES; ++index) {
    for (size_t e = 0; e < out.value[index].size(); ++e)
      out.value[index][e] += held.value[index][e];
  }
}

}  // namespace tessera::reference
