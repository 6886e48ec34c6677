// SPDX-License-Identifier: Apache-2.0
// The functions of TransformerEngine's JAX extension: their packs and sizes serve both passes.
#include <gtest/gtest.h>

#include "nvte/small_call.h"
#include "tessera_nvte_jax.h"

namespace nvte_test {
namespace {

using namespace transformer_engine::jax;

// GoogleTest has what its arguments are.
template <typename Pass>
void run_within(SmallCall& call, const WorkspaceSizes& sizes, Pass pass) {
  SmallCall::set(call.workspace, call.memory.data(), sizes.second, sizes.first);
  (call.*pass)();
}

TEST(NvteJax, BackendIsThatOfTheQuery) {
  EXPECT_EQ(GetFusedAttnBackend(true, DType::kBFloat16, DType::kBFloat16, NVTE_THD_THD_THD,
                                NVTE_NO_BIAS, NVTE_PADDING_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX, 0.1f,
                                8, 2, 128, 128, 64, 64, -1, -1, false),
            NVTE_F16_arbitrary_seqlen);
  EXPECT_EQ(GetFusedAttnBackend(true, DType::kInt32, DType::kInt32, NVTE_THD_THD_THD, NVTE_NO_BIAS,
                                NVTE_PADDING_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX, 0, 8, 2, 128, 128,
                                64, 64, -1, -1, false),
            NVTE_No_Backend);
}

// b = 2, s = 6, h = 2, d = 8, as SmallCall; a packed buffer is one of b s tokens with b
// max_segments sequences.
void both_passes(NVTE_QKV_Layout layout, NVTE_Bias_Type bias_type, NVTE_Softmax_Type softmax) {
  const bool packed = layout == NVTE_THD_THD_THD, biased = bias_type != NVTE_NO_BIAS;
  const size_t segments = packed ? 2 : 1;
  SmallCall c;
  c.layout = c.dqkv_layout = layout;
  c.o_format = c.do_format = NVTE_QKV_Format_NOT_SET;
  c.bias_type = bias_type, c.softmax = softmax;
  for (TensorWrapper* t : {&c.q, &c.k, &c.v, &c.o, &c.d_o, &c.dq, &c.dk, &c.dv}) {
    SmallCall::set(*t, t->dptr(), DType::kFloat32, {12, 2, 8});
  }
  if (packed) {
    c.cu = {0, 3, 6, 9, 12};
    SmallCall::set(c.cu_q, c.cu.data(), DType::kInt32, {5});
    SmallCall::set(c.cu_kv, c.cu.data(), DType::kInt32, {5});
  }
  std::vector<float> bias(72, 0.25f), offset(2, 0.5f), dbias(72, 7), doffset(2, 7);
  if (biased) SmallCall::set(c.bias, bias.data(), DType::kFloat32, {1, 2, 6, 6});
  if (softmax) SmallCall::set(c.softmax_offset, offset.data(), DType::kFloat32, {1, 2, 1, 1});
  const size_t one = biased ? 1 : 0;
  PrepareFusedAttnForwardAuxTensors(&c.pack, 2, one, 2, 2 * one, 6, 6, DType::kFloat32, bias_type,
                                    NVTE_F16_arbitrary_seqlen, c.stats_data.data(), nullptr,
                                    nullptr, softmax ? offset.data() : nullptr);
  EXPECT_EQ(c.pack.size, 2 + one + (softmax ? 1 : 0));
  run_within(c,
             GetFusedAttnForwardWorkspaceSizes(2, one, 6, 6, 2, 2, 2 * one, 8, 8, c.scale, 0,
                                               bias_type, c.mask, softmax, layout, DType::kFloat32,
                                               true, segments, -1, -1, false),
             &SmallCall::forward);
  EXPECT_NE(c.o_data[0], 7);
  EXPECT_NE(c.stats_data[0], 7);
  if (biased) SmallCall::set(c.dbias, dbias.data(), DType::kFloat32, {1, 2, 6, 6});
  if (softmax) SmallCall::set(c.dsoftmax_offset, doffset.data(), DType::kFloat32, {1, 2, 1, 1});
  PrepareFusedAttnBackwardAuxTensors(&c.pack, 2, one, 2, 2 * one, 6, 6, DType::kFloat32,
                                     NVTE_F16_arbitrary_seqlen, c.stats_data.data(), c.rng,
                                     bias.data(), softmax ? offset.data() : nullptr);
  EXPECT_EQ(c.pack.size, 2 + one + (softmax ? 1 : 0));
  run_within(c,
             GetFusedAttnBackwardWorkspaceSizes(2, one, 6, 6, 2, 2, 2 * one, 8, 8, c.scale, 0,
                                                bias_type, c.mask, softmax, layout, DType::kFloat32,
                                                true, false, segments, -1, -1, false),
             &SmallCall::backward);
  EXPECT_NE(c.dq_data[0], 7);
  EXPECT_EQ(dbias[0] != 7, biased);
  EXPECT_EQ(doffset[0] != 7, softmax != NVTE_VANILLA_SOFTMAX);
}

TEST(NvteJax, PacksAndSizesServeBothPasses) {
  for (const NVTE_QKV_Layout layout : {NVTE_BSHD_BSHD_BSHD, NVTE_THD_THD_THD}) {
    for (const NVTE_Bias_Type bias : {NVTE_NO_BIAS, NVTE_POST_SCALE_BIAS}) {
      for (const NVTE_Softmax_Type softmax :
           {NVTE_VANILLA_SOFTMAX, NVTE_OFF_BY_ONE_SOFTMAX, NVTE_LEARNABLE_SOFTMAX}) {
        SCOPED_TRACE(std::to_string(layout) + " " + std::to_string(bias) + " " +
                     std::to_string(softmax));
        both_passes(layout, bias, softmax);
      }
    }
  }
}

}  // namespace
}  // namespace nvte_test
