// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/rules/backend.h"

#include <set>

#include "core/count.h"
#include "core/json.h"

namespace tessera::cuda {

// Tables are searched by pass, dtypes and head dims; all else is asked of each problem.
Problem Rules::canonical(const Problem& problem) const {
  Problem p{};
  p.struct_size = problem.struct_size;
  p.pass = problem.pass;
  p.flags = problem.flags & (TESSERA_FP8_PRODUCTS | TESSERA_SMOOTH_MEAN);  // copies of their own
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
    p.tensor[index].dtype = problem.tensor[index].dtype;
    for (int axis = 0; axis < 3; ++axis) p.tensor[index].extent[axis] = 1;
    p.tensor[index].extent[3] = problem.tensor[index].extent[3];
  }
  return p;
}

void require_tiles(Support& support, const Problem& problem) {
  constexpr int64_t kLeastRows = 16, kMostTiles = int64_t{1} << 30;
  const Sizes s = sizes_of(problem);
  const struct {
    const char *name, *heads_name;
    int64_t extent, heads;
    bool packed;
  } sides[] = {{"sq", "num_heads_q", s.sq, s.hq, is_thd_q(problem)},
               // The forward pass walks keys, and tiles them for all heads at once.
               {"sk", "num_heads_k", s.sk, is_backward(problem) ? s.hk : 1, is_thd_k(problem)}};
  for (const auto& side : sides) {
    const Count rows = Count{side.extent}.pieces(kLeastRows);
    const Count tiles = (side.packed ? rows + s.batch + 1 : rows * s.batch) * side.heads;
    support.require(!(kMostTiles < tiles), ReasonId::kSize, Remedy::kNone, [&] {
      return "batch=" + std::to_string(s.batch) + ", " + side.name + "=" +
             std::to_string(side.extent) + ", " + side.heads_name + "=" +
             std::to_string(side.heads) +
             ": must be at most 2^30 tiles of 16 rows of all sequences and heads";
    });
  }
}

std::string Rules::description_json() const {
  JsonWriter json;
  json.begin_object().key("kernels").begin_array();
  std::set<std::string_view> told;
  for (const char* name : kernel_names()) {
    if (told.insert(name).second) json.string(name);
  }
  return std::move(json.end_array().end_object()).take();
}

}  // namespace tessera::cuda
