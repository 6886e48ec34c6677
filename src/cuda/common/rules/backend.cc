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
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
    p.tensor[index].dtype = problem.tensor[index].dtype;
    for (int axis = 0; axis < 3; ++axis) p.tensor[index].extent[axis] = 1;
    p.tensor[index].extent[3] = problem.tensor[index].extent[3];
  }
  return p;
}

void require_rows(Support& support, const Problem& problem) {
  constexpr int64_t kMostRows = int64_t{1} << 34;
  const Sizes s = sizes_of(problem);
  const struct {
    const char* name;
    int64_t extent;
    bool packed;
  } sides[] = {{"sq", s.sq, is_thd_q(problem)}, {"sk", s.sk, is_thd_k(problem)}};
  for (const auto& [name, extent, packed] : sides) {
    const Count rows = packed ? Count{s.batch} + extent : Count{s.batch} * extent;
    support.require(!(kMostRows < rows), ReasonId::kSize, Remedy::kNone, [&] {
      return "b=" + std::to_string(s.batch) + ", " + name + "=" + std::to_string(extent) +
             ": must be at most 2^34 rows of all sequences";
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
