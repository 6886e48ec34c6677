// SPDX-License-Identifier: Apache-2.0
// Both symbol sets in one process: nvte_* of another library, and tessera_nvte_* of this one.
#include <gtest/gtest.h>

#define TESSERA_NVTE_NO_NAMES
#include "tessera_nvte.h"

extern "C" {
NVTE_QKV_Format nvte_get_qkv_format(NVTE_QKV_Layout qkv_layout);
NVTE_QKV_Layout_Group nvte_get_qkv_layout_group(NVTE_QKV_Layout qkv_layout);
NVTETensor nvte_create_tensor(NVTEScalingMode scaling_mode);
void* nvte_tensor_data(const NVTETensor tensor);
}

namespace {

TEST(TwoLibraries, EachAnswersUnderItsOwnName) {
  EXPECT_EQ(nvte_get_qkv_format(NVTE_T3HD), 1000);
  EXPECT_EQ(tessera_nvte_get_qkv_format(NVTE_T3HD), NVTE_THD);
  EXPECT_EQ(nvte_get_qkv_layout_group(NVTE_T3HD), 1001);
  EXPECT_EQ(tessera_nvte_get_qkv_layout_group(NVTE_T3HD), NVTE_3HD);
  const NVTETensor theirs = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  const NVTETensor ours = tessera_nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_NE(nvte_tensor_data(theirs), nullptr);
  EXPECT_EQ(tessera_nvte_tensor_data(ours), nullptr);
  tessera_nvte_destroy_tensor(ours);
}

}  // namespace
