// SPDX-License-Identifier: Apache-2.0
#include "conformance/reference/reference.h"
#include "core/problem/scales.h"

namespace tessera::reference {
namespace {

// Calls visit(offset) for every element in C order.
template <typename Visit>
void each_element(const Tensor& t, int rank, Visit&& visit) {
  int64_t extent[4], i[4];
  for (int axis = 0; axis < 4; ++axis) extent[axis] = axis < rank ? t.extent[axis] : 1;
  for (i[0] = 0; i[0] < extent[0]; ++i[0])
    for (i[1] = 0; i[1] < extent[1]; ++i[1])
      for (i[2] = 0; i[2] < extent[2]; ++i[2])
        for (i[3] = 0; i[3] < extent[3]; ++i[3]) visit(offset_of(t, i[0], i[1], i[2], i[3]));
}

}  // namespace

std::vector<double> load_dense(const Tensor& t, int rank, const void* data, double scale) {
  std::vector<double> values;
  values.reserve(element_count(t, rank));
  each_element(t, rank,
               [&](int64_t at) { values.push_back(scale * load_element(data, at, t.dtype)); });
  return values;
}

void store_dense(const Tensor& t, int rank, const std::vector<double>& values, void* data,
                 double scale) {
  size_t next = 0;
  each_element(t, rank,
               [&](int64_t at) { store_scaled(data, at, t.dtype, values[next++], scale); });
}

}  // namespace tessera::reference
