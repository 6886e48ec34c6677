// SPDX-License-Identifier: Apache-2.0
// Handles and attributes of the second generation of calls, and the query that gives reasons.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "nvte/small_call.h"

namespace nvte_test {
namespace {

static_assert(kNVTEFusedAttnConfigNumAttributes == 42);
static_assert(kNVTEFusedAttnFwdParamsNumAttributes == 33);
static_assert(kNVTEFusedAttnBwdParamsNumAttributes == 37);

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

#define EXPECT_SAYS(text, call) \
  EXPECT_NE(message_of([&] { call; }).find(text), std::string::npos) << message_of([&] { call; })

// Every attribute of a handle keeps its own bytes, whatever the others hold.
template <typename Attribute, typename Set, typename Get>
void expect_kept(void* handle, int attributes, Set set, Get get) {
  const auto value = [](int i) { return i % 2 == 0 ? uint8_t{1} : uint8_t{0}; };
  for (int i = 0; i < attributes; ++i) {
    size_t size = 0;
    get(handle, static_cast<Attribute>(i), nullptr, 0, &size);
    ASSERT_TRUE(size == 1 || size == 4 || size == 8) << i;
    uint8_t bytes[8] = {value(i), 0, 0, 0, 0, 0, 0, 0};
    if (size > 1) bytes[1] = static_cast<uint8_t>(i);
    set(handle, static_cast<Attribute>(i), bytes, size);
  }
  for (int i = 0; i < attributes; ++i) {
    size_t size = 0;
    uint8_t bytes[8] = {};
    get(handle, static_cast<Attribute>(i), bytes, sizeof bytes, &size);
    EXPECT_EQ(bytes[0], value(i)) << i;
    EXPECT_EQ(bytes[1], size > 1 ? i : 0);
    EXPECT_SAYS("size_in_bytes=", get(handle, static_cast<Attribute>(i), bytes, size - 1, nullptr));
    EXPECT_SAYS("size_in_bytes=", set(handle, static_cast<Attribute>(i), bytes, size - 1));
  }
  uint8_t bytes[8] = {};
  EXPECT_SAYS("attr=" + std::to_string(attributes),
              set(handle, static_cast<Attribute>(attributes), bytes, 8));
  EXPECT_SAYS("attr=-1", get(handle, static_cast<Attribute>(-1), bytes, 8, nullptr));
  EXPECT_SAYS("buf=null", set(handle, static_cast<Attribute>(0), nullptr, 8));
  EXPECT_SAYS("=null: must be a handle", set(nullptr, static_cast<Attribute>(0), bytes, 8));
  EXPECT_SAYS("=null: must be a handle",
              get(nullptr, static_cast<Attribute>(0), bytes, 8, nullptr));
}

TEST(NvteParams, EveryAttributeIsKept) {
  expect_kept<NVTEFusedAttnConfigAttribute>(
      FusedAttnConfigWrapper(), kNVTEFusedAttnConfigNumAttributes,
      nvte_set_fused_attn_config_attribute, nvte_get_fused_attn_config_attribute);
  expect_kept<NVTEFusedAttnFwdParamsAttribute>(
      FusedAttnFwdParamsWrapper(), kNVTEFusedAttnFwdParamsNumAttributes,
      nvte_set_fused_attn_fwd_params_attribute, nvte_get_fused_attn_fwd_params_attribute);
  expect_kept<NVTEFusedAttnBwdParamsAttribute>(
      FusedAttnBwdParamsWrapper(), kNVTEFusedAttnBwdParamsNumAttributes,
      nvte_set_fused_attn_bwd_params_attribute, nvte_get_fused_attn_bwd_params_attribute);
  nvte_destroy_fused_attn_config(nullptr);
}

template <typename Value>
Value get(const FusedAttnConfigWrapper& config, NVTEFusedAttnConfigAttribute attribute) {
  Value value{};
  nvte_get_fused_attn_config_attribute(config, attribute, &value, sizeof value, nullptr);
  return value;
}

TEST(NvteParams, DefaultsAndFlags) {
  FusedAttnConfigWrapper config;
  EXPECT_EQ(get<uint8_t>(config, kNVTEFusedAttnConfigIsTraining), 1);
  EXPECT_EQ(get<uint8_t>(config, kNVTEFusedAttnConfigBottomRightDiagonal), 1);
  EXPECT_EQ(get<int64_t>(config, kNVTEFusedAttnConfigWindowSizeLeft), -1);
  EXPECT_EQ(get<float>(config, kNVTEFusedAttnConfigAttnScale), 1.0f);
  EXPECT_EQ(get<NVTEDType>(config, kNVTEFusedAttnConfigQKVDtype), kNVTEBFloat16);
  EXPECT_EQ(get<NVTE_QKV_Layout>(config, kNVTEFusedAttnConfigDQKVLayout), NVTE_QKV_Layout_NOT_SET);
  const uint8_t odd = 7;  // any byte but 0 is true
  nvte_set_fused_attn_config_attribute(config, kNVTEFusedAttnConfigDeterministic, &odd, 1);
  EXPECT_EQ(get<uint8_t>(config, kNVTEFusedAttnConfigDeterministic), 1);
  FusedAttnConfigWrapper moved(std::move(config));
  EXPECT_EQ(config.get(), nullptr);
  config = std::move(moved);
  EXPECT_EQ(get<uint8_t>(config, kNVTEFusedAttnConfigDeterministic), 1);
}

TEST(NvteParams, ShapesInAnotherFormat) {
  const size_t sbhd[] = {5, 2, 3, 8}, thd[] = {10, 3, 8};
  size_t got[4] = {};
  AttentionShape(NVTE_SBHD, sbhd).to_format(NVTE_BHSD, got);
  EXPECT_EQ(std::vector<size_t>(got, got + 4), (std::vector<size_t>{2, 3, 5, 8}));
  EXPECT_EQ(AttentionShape(NVTE_THD, thd).t(), 10u);
  EXPECT_EQ(AttentionShape(NVTE_THD, thd).b(), 0u);
}

// ---- the query ----

// A config that runs, to be spoilt.
FusedAttnConfigWrapper good() {
  FusedAttnConfigWrapper config;
  config.set_qkv_layout(NVTE_BSHD_BSHD_BSHD).set_num_attn_heads(4).set_num_gqa_groups(2);
  config.set_head_dim_qk(64).set_head_dim_v(64).set_max_seqlen_q(96).set_max_seqlen_kv(96);
  config.set_batch_size(3).set_attn_mask_type(NVTE_CAUSAL_MASK);
  return config;
}

struct Answer {
  NVTE_Fused_Attn_Backend backend;
  std::string message;
};
Answer ask(const FusedAttnConfigWrapper& config) {
  const char* message = nullptr;
  const NVTE_Fused_Attn_Backend backend = nvte_get_fused_attn_backend_v2(config, &message);
  return {backend, message};
}

TEST(NvteQueryV2, NoMessageWhereABackendRunsIt) {
  for (int layout = 0; layout <= NVTE_BHSD_BHSD_BHSD; ++layout) {
    auto config = good();
    const auto value = static_cast<NVTE_QKV_Layout>(layout);
    config.set_qkv_layout(value).set_num_gqa_groups(4).set_attn_mask_type(NVTE_PADDING_MASK);
    config.set_is_training(nvte_get_qkv_layout_group(value) != NVTE_Paged_KV_HD_HD_HD);
    const Answer answer = ask(config);
    EXPECT_EQ(answer.backend, NVTE_F16_arbitrary_seqlen) << layout << ": " << answer.message;
    EXPECT_EQ(answer.message, "") << layout;
  }
  EXPECT_EQ(nvte_get_fused_attn_backend_v2(good(), nullptr), NVTE_F16_arbitrary_seqlen);
  auto config = good();
  config.set_qkv_layout(NVTE_Paged_KV_BSHD_BSHD_BSHD).set_is_training(false);
  config.set_num_pages_k(40).set_num_pages_v(44).set_page_size_k(16).set_page_size_v(16);
  config.set_max_pages_per_seq_k(6).set_max_pages_per_seq_v(6);
  EXPECT_EQ(ask(config).message, "");
  config.set_page_size_v(32);
  EXPECT_NE(ask(config).message.find("page size"), std::string::npos) << ask(config).message;
}

TEST(NvteQueryV2, SaysWhatIsWrong) {
  struct Case {
    const char* says;
    void (*spoil)(FusedAttnConfigWrapper&);
  };
  constexpr Case kCases[] = {
      {"must be a multiple of the heads", [](auto& c) { c.set_num_gqa_groups(3); }},
      {"dropout=1.5", [](auto& c) { c.set_dropout(1.5f); }},
      {"qkv_layout=26", [](auto& c) { c.set_qkv_layout(NVTE_QKV_Layout_NOT_SET); }},
      {"attn_mask_type=6", [](auto& c) { c.set_attn_mask_type(static_cast<NVTE_Mask_Type>(6)); }},
      {"o_dtype=11", [](auto& c) { c.set_o_dtype(kNVTENumTypes); }},
      {"scaling_mode=1", [](auto& c) { c.set_scaling_mode(NVTE_MXFP8_1D_SCALING); }},
      {"q.dtype=int32", [](auto& c) { c.set_qkv_dtype(kNVTEInt32); }},
      {"pages have no backward pass",
       [](auto& c) { c.set_qkv_layout(NVTE_Paged_KV_BSHD_BSHD_BSHD); }},
      {"bias", [](auto& c) { c.set_bias_type(NVTE_POST_SCALE_BIAS).set_bias_seqlen_kv(95); }},
      {"Bias.shape",
       [](auto& c) {
         c.set_bias_type(NVTE_POST_SCALE_BIAS);
         c.set_bias_seqlen_q(size_t{1} << 40).set_bias_seqlen_kv(size_t{1} << 40);
       }},
      {"Bias.shape",
       [](auto& c) {
         c.set_bias_type(NVTE_POST_SCALE_BIAS).set_num_attn_heads(0);
         c.set_bias_batch_size(size_t{1} << 40).set_bias_seqlen_kv(size_t{1} << 40);
       }},
      {"pages of a sequence.shape",
       [](auto& c) {
         c.set_qkv_layout(NVTE_Paged_KV_BSHD_BSHD_BSHD).set_page_size_k(size_t{1} << 40);
         c.set_num_pages_k(1).set_max_pages_per_seq_k(size_t{1} << 40).set_num_gqa_groups(0);
       }},
      {"max_seqlen_q", [](auto& c) { c.set_max_seqlen_q(~size_t{0}); }},
      {"at most 2^15", [](auto& c) { c.set_batch_size(~size_t{0}); }},
      {"o.dtype", [](auto& c) { c.set_qkv_dtype(kNVTEFloat32); }},
  };
  for (const Case& each : kCases) {
    auto config = good();
    each.spoil(config);
    const Answer answer = ask(config);
    EXPECT_EQ(answer.backend, NVTE_No_Backend) << each.says;
    EXPECT_NE(answer.message.find(each.says), std::string::npos) << each.says << "\n"
                                                                 << answer.message;
  }
  EXPECT_EQ(ask(good()).message, "");  // nothing stays of the last answer
  EXPECT_SAYS("config=null", nvte_get_fused_attn_backend_v2(nullptr, nullptr));
}

// ---- the calls ----

TEST(NvteParams, WhatIsNotSetIsNotGiven) {
  SmallCall call, all;
  FusedAttnFwdParamsWrapper params;
  params.set_Q(call.q.data()).set_K(call.k.data()).set_V(call.v.data()).set_O(call.o.data());
  params.set_cu_seqlens_q(call.cu_q.data()).set_cu_seqlens_kv(call.cu_kv.data());
  params.set_qkv_layout(call.layout).set_max_seqlen_q(6).set_max_seqlen_kv(6);
  params.set_attn_mask_type(call.mask)
      .set_attn_scale(call.scale)
      .set_rng_state(call.rng_state.data());
  EXPECT_SAYS("Aux_CTX_Tensors=null", params.set_workspace(call.workspace.data());
              nvte_fused_attn_fwd_v2(params));
  params.set_Aux_CTX_Tensors(&call.pack);
  nvte_fused_attn_fwd_v2(params);
  all.forward();
  EXPECT_EQ(call.o_data, all.o_data);
  EXPECT_TRUE(call.wrote());
  FusedAttnBwdParamsWrapper back;
  back.set_Q(call.q.data()).set_K(call.k.data()).set_V(call.v.data()).set_O(call.o.data());
  back.set_dO(call.d_o.data()).set_Aux_CTX_Tensors(&call.pack).set_workspace(call.workspace.data());
  back.set_cu_seqlens_q(call.cu_q.data()).set_cu_seqlens_kv(call.cu_kv.data());
  back.set_qkv_layout(call.layout).set_max_seqlen_q(6).set_max_seqlen_kv(6);
  back.set_attn_mask_type(call.mask).set_attn_scale(call.scale);
  EXPECT_SAYS("nvte_fused_attn_bwd_v2: dQ=null", nvte_fused_attn_bwd_v2(back));
  back.set_dQ(call.dq.data()).set_dK(call.dk.data()).set_dV(call.dv.data());
  nvte_fused_attn_bwd_v2(back);
  all.backward();
  EXPECT_EQ(call.dq_data, all.dq_data);
  EXPECT_EQ(call.dk_data, all.dk_data);
  EXPECT_SAYS("params=null", nvte_fused_attn_fwd_v2(nullptr));
  EXPECT_SAYS("workspace=null", nvte_fused_attn_fwd_v2(FusedAttnFwdParamsWrapper()));
}

}  // namespace
}  // namespace nvte_test
