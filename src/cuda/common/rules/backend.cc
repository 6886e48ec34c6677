// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/rules/backend.h"

#include <set>

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
