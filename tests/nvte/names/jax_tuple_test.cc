// SPDX-License-Identifier: Apache-2.0
// tessera_nvte_jax.h after pybind11: workspace sizes are its tuples.
#include <gtest/gtest.h>

#include "tessera_nvte.h"
// pybind11 comes before the header under test.
#include "nvte/names/pybind11.h"
#include "tessera_nvte_jax.h"

namespace {

using namespace transformer_engine;

TEST(NvteJax, SizesAreTuplesBesidePybind11) {
  const pybind11::tuple sizes = jax::GetFusedAttnForwardWorkspaceSizes(
      2, 0, 64, 64, 4, 4, 0, 32, 32, 0.2f, 0, NVTE_NO_BIAS, NVTE_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX,
      NVTE_BSHD_BSHD_BSHD, DType::kBFloat16, true, 1, -1, -1, false);
  ASSERT_EQ(sizes.items.first.size(), 1u);
  EXPECT_GE(sizes.items.first[0], 1u);
  EXPECT_EQ(sizes.items.second, DType::kByte);
}

}  // namespace
