// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "conformance/data.h"
#include "core/case/draw.h"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Calls value(i, e, a normal number) for each element of an output, i its index on every axis and e
// the element in C order, and stores the answer; NaN: leaves it as it is.
template <typename Value>
void fill(const Case& c, const Problem& p, const Buffers& buffers, int index, const Value& value) {
  if (!given(p, index)) return;
  const Tensor& t = p.tensor[index];
  int64_t extent[4], i[4], e = 0;
  for (int axis = 0; axis < 4; ++axis) {
    extent[axis] = axis < tensor_rule(index).rank ? t.extent[axis] : 1;
  }
  for (i[0] = 0; i[0] < extent[0]; ++i[0])
    for (i[1] = 0; i[1] < extent[1]; ++i[1])
      for (i[2] = 0; i[2] < extent[2]; ++i[2])
        for (i[3] = 0; i[3] < extent[3]; ++i[3], ++e) {
          const uint64_t counter = (static_cast<uint64_t>(index) << 40) + e / 2;
          const NormalPair pair = draw_normals(c.seed, kDrawHeld, counter);
          const double x = value(i, e, e % 2 ? pair.odd : pair.even);
          const int64_t at = offset_of(t, i[0], i[1], i[2], i[3]);
          if (!std::isnan(x)) store_element(buffers.data[index], at, t.dtype, x);
        }
}

}  // namespace

void fill_held(const Case& c, const CaseGeometry& geometry, const Buffers& buffers) {
  const Problem& p = geometry.problem;
  for (int index = TESSERA_DQ; index <= TESSERA_DALIBI_SLOPES; ++index) {
    fill(c, p, buffers, index, [](const int64_t*, int64_t, double value) { return value; });
  }
  if (is_backward(p)) return;
  fill(c, p, buffers, TESSERA_LSE, [&](const int64_t*, int64_t e, double value) {
    if (e % 8 == 7) return -kInfinity;
    return value + std::log(1.0 + static_cast<double>(c.sk)) + (e % 8 == 3 ? 1000 : 0);
  });
  const int64_t* rows = p.tensor[TESSERA_LSE].extent;
  fill(c, p, buffers, TESSERA_O, [&](const int64_t* i, int64_t, double value) {
    const int64_t of_lse = (i[0] * rows[1] + i[2]) * rows[2] + i[1];
    return of_lse % 8 == 7 ? std::numeric_limits<double>::quiet_NaN() : value;
  });
}

void join_other_part(const Case& c, int64_t dv, std::vector<double>& o, std::vector<double>& lse,
                     const std::vector<int64_t>& statistic_of_row) {
  NormalPair pair{};
  for (size_t row = 0; row < statistic_of_row.size(); ++row) {
    if (statistic_of_row[row] < 0) continue;
    double& own = lse[statistic_of_row[row]];
    const auto at = static_cast<uint64_t>(statistic_of_row[row]);
    pair = draw_normals(c.seed, kDrawPartLse, at / 2);
    const bool empty = own == -kInfinity;
    // The other part of some rows has all but e^-1000 of the weight: here P is 0.
    const double far = at % 8 == 7 ? 1000 : 0;
    const double other = (at % 2 ? pair.odd : pair.even) + far + (empty ? 0 : own);
    const double least = std::min(own, other), most = std::max(own, other);
    const double both = most + std::log1p(std::exp(least - most));
    const double weight = std::exp(own - both);
    for (int64_t d = 0; d < dv; ++d) {
      const uint64_t e = row * static_cast<uint64_t>(dv) + static_cast<uint64_t>(d);
      pair = draw_normals(c.seed, kDrawPartO, e / 2);
      o[e] = weight * o[e] + (1 - weight) * (e % 2 ? pair.odd : pair.even);
    }
    own = both;
  }
}

}  // namespace tessera
