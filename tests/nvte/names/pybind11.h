// SPDX-License-Identifier: Apache-2.0
// What tessera_nvte_jax.h asks of pybind11, without Python.
#pragma once

#include <tuple>
#include <utility>

#define PYBIND11_VERSION_MAJOR 2

namespace pybind11 {

struct tuple {
  std::pair<std::vector<size_t>, transformer_engine::DType> items;
};

template <typename... Items>
tuple make_tuple(Items&&... items) {
  return {{std::forward<Items>(items)...}};
}

}  // namespace pybind11
