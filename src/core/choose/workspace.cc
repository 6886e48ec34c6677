// SPDX-License-Identifier: Apache-2.0
#include "core/choose/workspace.h"

#include <algorithm>
#include <cinttypes>

#include "core/count.h"

namespace tessera {
namespace {

struct Extent {
  const char* name;
  int64_t value;
};

Extent largest_extent(const Problem& p) {
  const Sizes s = sizes_of(p);
  const Extent extents[] = {
      {"b", s.batch},
      {"sq", s.sq},
      {"sk", s.sk},
      {"hq", s.hq},
      {"hk", s.hk},
      {"head_dim_qk", s.dqk},
      {"head_dim_v", s.dv},
      {"pages",
       is_paged(p) ? std::max(p.tensor[TESSERA_K].extent[0], p.tensor[TESSERA_V].extent[0]) : 0}};
  return *std::max_element(std::begin(extents), std::end(extents),
                           [](const Extent& a, const Extent& b) { return a.value < b.value; });
}

}  // namespace

bool writes_anything(const Problem& p) {
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (given(p, i) && is_output(p, i) && element_count(p.tensor[i], tensor_rule(i).rank) > 0) {
      return true;
    }
  }
  return false;
}

Result<int64_t> workspace_bytes_of(const Plan& plan, const Problem& problem, int num_threads) {
  if (!writes_anything(problem)) return int64_t{0};
  const Count bytes = plan.workspace_bytes(problem, num_threads);
  if (bytes.fits()) return bytes.value();
  const Extent extent = largest_extent(problem);
  return invalid("%s=%" PRId64
                 ": the bytes of the workspace that follow from the extents must fit in 63 bits; "
                 "make it smaller",
                 extent.name, extent.value);
}

}  // namespace tessera
