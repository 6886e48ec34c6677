// SPDX-License-Identifier: Apache-2.0
// The protocol of two calls, and callers who are wrong: one exception, which names the argument,
// and nothing is written.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "nvte/small_call.h"

namespace nvte_test {
namespace {

constexpr DType kF32 = DType::kFloat32;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

struct Wrong {
  const char* says;  // a part of the message
  std::function<void(SmallCall&)> spoil;
};

void expect_each(const std::vector<Wrong>& wrongs, void (SmallCall::*pass)(),
                 const char* function) {
  for (const Wrong& wrong : wrongs) {
    SmallCall call;
    wrong.spoil(call);
    const std::string message = message_of([&] { (call.*pass)(); });
    EXPECT_NE(message.find(wrong.says), std::string::npos) << wrong.says << "\n" << message;
    EXPECT_TRUE(message.rfind(function, 0) == 0 || message.rfind("tessera.attention", 0) == 0)
        << message;
    EXPECT_FALSE(call.wrote()) << wrong.says;
  }
}

TensorWrapper null() {
  TensorWrapper tensor, taker(std::move(tensor));
  return tensor;
}

template <typename Enum>
Enum unknown(int value) {
  return static_cast<Enum>(value);
}

const std::vector<Wrong> kOfBothPasses{
    {"Q=null", [](SmallCall& c) { c.q = null(); }},
    {"K=null", [](SmallCall& c) { c.k = null(); }},
    {"V=null", [](SmallCall& c) { c.v = null(); }},
    {"O=null", [](SmallCall& c) { c.o = null(); }},
    {"S=null", [](SmallCall& c) { c.s = null(); }},
    {"cu_seqlens_q=null", [](SmallCall& c) { c.cu_q = null(); }},
    {"cu_seqlens_kv=null", [](SmallCall& c) { c.cu_kv = null(); }},
    {"cu_seqlens_q_padded=null", [](SmallCall& c) { c.padded_q = null(); }},
    {"workspace=null", [](SmallCall& c) { c.workspace = null(); }},
    {"qkv_layout=26", [](SmallCall& c) { c.layout = unknown<NVTE_QKV_Layout>(26); }},
    {"qkv_layout=-1", [](SmallCall& c) { c.layout = unknown<NVTE_QKV_Layout>(-1); }},
    {"o_format=3", [](SmallCall& c) { c.o_format = unknown<NVTE_QKV_Format>(3); }},
    {"o_format=2", [](SmallCall& c) { c.o_format = NVTE_THD; }},
    {"bias_type=4", [](SmallCall& c) { c.bias_type = unknown<NVTE_Bias_Type>(4); }},
    {"attn_mask_type=6", [](SmallCall& c) { c.mask = unknown<NVTE_Mask_Type>(6); }},
    {"softmax_type=3", [](SmallCall& c) { c.softmax = unknown<NVTE_Softmax_Type>(3); }},
    {"Q.shape=[2, 6, 16]",
     [](SmallCall& c) {
       c.set(c.q, c.q_data.data(), kF32, {2, 6, 16});
     }},
    {"Q.shape=[192]", [](SmallCall& c) { c.set(c.q, c.q_data.data(), kF32, {192}); }},
    {"max_seqlen_q=7", [](SmallCall& c) { c.max_q = 7; }},
    {"max_seqlen_kv=5", [](SmallCall& c) { c.max_kv = 5; }},
    {"below 2^31", [](SmallCall& c) { c.max_kv = size_t{1} << 62; }},
    {"V.shape=[2, 6, 1, 8]",
     [](SmallCall& c) {
       c.set(c.v, c.v_data.data(), kF32, {2, 6, 1, 8});
     }},
    {"O.shape=[2, 6, 2, 4]",
     [](SmallCall& c) {
       c.set(c.o, c.o_data.data(), kF32, {2, 6, 2, 4});
     }},
    {"Q.dtype=0", [](SmallCall& c) { c.set(c.q, c.q_data.data(), DType::kByte, c.shape); }},
    {"k.dtype=", [](SmallCall& c) { c.set(c.k, c.k_data.data(), DType::kBFloat16, c.shape); }},
    {"Q.scaling_mode=1",
     [](SmallCall& c) {
       const NVTEBasicTensor value = nvte_get_tensor_param(c.q.data(), kNVTERowwiseData);
       c.q = TensorWrapper(NVTE_MXFP8_1D_SCALING);
       nvte_set_tensor_param_v2(c.q.data(), kNVTERowwiseData, &value, sizeof value);
     }},
    {"q.data=NULL", [](SmallCall& c) { c.set(c.q, nullptr, kF32, c.shape); }},
    {"cu_seqlens_q.data=null", [](SmallCall& c) { c.set(c.cu_q, nullptr, DType::kInt32, {3}); }},
    {"cu_seqlens_kv.shape=[2]",
     [](SmallCall& c) { c.set(c.cu_kv, c.cu.data(), DType::kInt32, {2}); }},
    {"cu_seqlens_kv.shape=[3], dtype=4",
     [](SmallCall& c) { c.set(c.cu_kv, c.cu.data(), kF32, {3}); }},
    {"seqlens_q[1]=",
     [](SmallCall& c) {
       c.cu = {0, 6, 13};
     }},
    {"seqlens_q[1]=-2",
     [](SmallCall& c) {
       c.cu = {0, 6, 4};
     }},
    {"window=", [](SmallCall& c) { c.left = -5; }},
    {"softmax_scale=", [](SmallCall& c) { c.scale = -1; }},
    {"dropout_p=", [](SmallCall& c) { c.dropout = 1.5f; }},
    {"qkv_layout=5: Q and K share a buffer",
     [](SmallCall& c) {
       c.layout = NVTE_BS3HD;
       c.set(c.v, c.v_data.data(), kF32, {2, 6, 2, 4});
     }},
    {"page_table_k.shape", [](SmallCall& c) { c.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD; }},
    {"workspace.shape=[0]",
     [](SmallCall& c) { c.set(c.workspace, c.memory.data(), DType::kByte, {0}); }},
    {"SoftmaxOffset", [](SmallCall& c) { c.softmax = NVTE_LEARNABLE_SOFTMAX; }},
    {"Bias", [](SmallCall& c) { c.bias_type = NVTE_POST_SCALE_BIAS; }},
};

TEST(NvteErrors, OfTheForwardPass) {
  std::vector<Wrong> wrongs = kOfBothPasses;
  wrongs.insert(wrongs.end(),
                {
                    {"Bias=null", [](SmallCall& c) { c.bias = null(); }},
                    {"rng_state=null", [](SmallCall& c) { c.rng_state = null(); }},
                    {"page_table_v=null", [](SmallCall& c) { c.table_v = null(); }},
                    {"rng_state.shape=[0]",
                     [](SmallCall& c) {
                       c.rng_state = TensorWrapper();
                       c.dropout = 0.5f;
                     }},
                    {"Aux_CTX_Tensors.size=0: must be 2: Stats, rng_state",
                     [](SmallCall& c) { c.pack.size = 0; }},
                    {"Aux_CTX_Tensors.size=3: must be 2", [](SmallCall& c) { c.pack.size = 3; }},
                    {"Aux_CTX_Tensors.size=2: must be 3: Stats, Max, rng_state",
                     [](SmallCall& c) { c.max_logit = true; }},
                    {"Aux_CTX_Tensors[0].shape=[2, 2, 5, 1]",
                     [](SmallCall& c) {
                       c.aux(0, c.stats_data.data(), kF32, {2, 2, 5, 1});
                     }},
                    {"Aux_CTX_Tensors[0].shape=[2, 2, 6, 1], dtype=6",
                     [](SmallCall& c) {
                       c.aux(0, c.stats_data.data(), DType::kBFloat16, {2, 2, 6, 1});
                     }},
                    {"Aux_CTX_Tensors[0].data=null",
                     [](SmallCall& c) {
                       c.aux(0, nullptr, kF32, {2, 2, 6, 1});
                     }},
                    {"Aux_CTX_Tensors[1].shape=[2], dtype=2",
                     [](SmallCall& c) { c.aux(1, c.rng, DType::kInt32, {2}); }},
                });
  expect_each(wrongs, &SmallCall::forward, "nvte_fused_attn_fwd: ");
}

TEST(NvteErrors, OfTheBackwardPass) {
  std::vector<Wrong> wrongs = kOfBothPasses;
  wrongs.insert(
      wrongs.end(),
      {
          {"dO=null", [](SmallCall& c) { c.d_o = null(); }},
          {"dP=null", [](SmallCall& c) { c.dp = null(); }},
          {"dQ=null", [](SmallCall& c) { c.dq = null(); }},
          {"dSoftmaxOffset=null", [](SmallCall& c) { c.dsoftmax_offset = null(); }},
          {"dK.shape=[2, 6, 2, 4]",
           [](SmallCall& c) {
             c.set(c.dk, c.dk_data.data(), kF32, {2, 6, 2, 4});
           }},
          {"dq", [](SmallCall& c) { c.set(c.dq, nullptr, kF32, c.shape); }},
          {"dqkv_layout=14", [](SmallCall& c) { c.dqkv_layout = NVTE_THD_THD_THD; }},
          {"dqkv_layout=99", [](SmallCall& c) { c.dqkv_layout = unknown<NVTE_QKV_Layout>(99); }},
          {"do_format=17", [](SmallCall& c) { c.do_format = unknown<NVTE_QKV_Format>(17); }},
          {"its rng_state is missing", [](SmallCall& c) { c.pack.size = 1; }},
          {"its Stats is missing", [](SmallCall& c) { c.pack.size = 0; }},
          {"its rng_state is missing", [](SmallCall& c) { c.aux(1, c.rng, DType::kInt32, {2}); }},
          {"Stats.shape=[2, 2, 5, 1]",
           [](SmallCall& c) {
             c.aux(0, c.stats_data.data(), kF32, {2, 2, 5, 1});
           }},
          {"its SoftmaxOffset is missing",
           [](SmallCall& c) { c.softmax = NVTE_LEARNABLE_SOFTMAX; }},
          {"its Bias is missing", [](SmallCall& c) { c.bias_type = NVTE_POST_SCALE_BIAS; }},
          {"dqkv_layout=7: dV must begin 64 bytes behind dK",
           [](SmallCall& c) { c.dqkv_layout = NVTE_BSHD_BS2HD; }},
      });
  expect_each(wrongs, &SmallCall::backward, "nvte_fused_attn_bwd: ");
}

TEST(NvteErrors, APackNobodyMade) {
  SmallCall c;
  const NVTETensor first = c.pack.tensors[0];
  c.pack.tensors[0] = nullptr;
  EXPECT_NE(message_of([&] { c.forward(); }).find("Stats=null"), std::string::npos);
  EXPECT_NE(message_of([&] { c.backward(); }).find("Aux_CTX_Tensors=null"), std::string::npos);
  c.pack.tensors[0] = first;
  EXPECT_FALSE(c.wrote());
}

TEST(NvteErrors, OfMaps) {
  for (const int value : {-1, 26, 1000}) {
    const auto layout = static_cast<NVTE_QKV_Layout>(value);
    EXPECT_THROW(nvte_get_qkv_layout_group(layout), std::runtime_error);
    EXPECT_THROW(nvte_get_qkv_format(layout), std::runtime_error);
    EXPECT_THROW(nvte_get_q_format(layout), std::runtime_error);
    EXPECT_THROW(nvte_get_kv_format(layout), std::runtime_error);
  }
  EXPECT_EQ(message_of([] { nvte_get_q_format(NVTE_QKV_Layout_NOT_SET); }),
            "nvte_get_q_format: qkv_layout=26: must be an NVTE_QKV_Layout, 0 to 25");
}

// ---- two calls ----

TEST(NvteProtocol, AQueryComputesNothing) {
  SmallCall c;
  c.pack.size = 0, c.max_logit = true;
  c.softmax = NVTE_OFF_BY_ONE_SOFTMAX, c.bias_type = NVTE_PRE_SCALE_BIAS;
  c.set(c.bias, c.q_data.data(), kF32, {1, 2, 6, 6});
  c.workspace = TensorWrapper();
  c.forward();
  EXPECT_FALSE(c.wrote());
  EXPECT_EQ(c.workspace.dtype(), DType::kByte);
  ASSERT_EQ(c.pack.size, 5u);
  const std::vector<std::vector<size_t>> shapes{
      {2, 2, 6, 1}, {1, 2, 1, 1}, {2}, {1, 2, 6, 6}, {1, 2, 1, 1}};
  const NVTEDType dtypes[] = {kNVTEFloat32, kNVTEFloat32, kNVTEInt64, kNVTEFloat32, kNVTEFloat32};
  for (size_t i = 0; i < 5; ++i) {
    const NVTEShape shape = nvte_tensor_shape(c.pack.tensors[i]);
    EXPECT_EQ(std::vector<size_t>(shape.data, shape.data + shape.ndim), shapes[i]) << i;
    EXPECT_EQ(nvte_tensor_type(c.pack.tensors[i]), dtypes[i]) << i;
    EXPECT_EQ(nvte_tensor_data(c.pack.tensors[i]), nullptr) << i;
  }
}

// As a front end asks that has shapes before it has memory.
TEST(NvteProtocol, AQueryNeedsNoMemory) {
  SmallCall with, without;
  with.workspace = TensorWrapper(), without.workspace = TensorWrapper();
  for (TensorWrapper* t : {&without.q, &without.k, &without.v, &without.o, &without.d_o,
                           &without.dq, &without.dk, &without.dv}) {
    SmallCall::set(*t, nullptr, kF32, without.shape);
  }
  SmallCall::set(without.cu_q, nullptr, DType::kInt32, {3});
  SmallCall::set(without.cu_kv, nullptr, DType::kInt32, {3});
  without.aux(0, nullptr, kF32, {2, 2, 6, 1}), without.aux(1, nullptr, DType::kInt64, {2});
  with.forward(), without.forward();
  EXPECT_GE(without.workspace.numel(), 1u);
  EXPECT_EQ(with.pack.size, 2u);
  with.workspace = TensorWrapper(), without.workspace = TensorWrapper();
  with.backward(), without.backward();
  EXPECT_EQ(without.workspace.numel(), with.workspace.numel());
  EXPECT_FALSE(with.wrote());
  // One tensor may stand for several.
  SmallCall one;
  one.workspace = TensorWrapper();
  SmallCall::set(one.q, nullptr, kF32, one.shape);
  nvte_fused_attn_bwd(one.q.data(), one.q.data(), one.q.data(), one.q.data(), one.q.data(),
                      one.s.data(), one.s.data(), &one.pack, one.q.data(), one.q.data(),
                      one.q.data(), one.s.data(), one.s.data(), one.cu_q.data(), one.cu_q.data(),
                      one.s.data(), one.s.data(), 6, 6, one.scale, 0, one.layout, one.o_format,
                      one.do_format, one.layout, NVTE_QKV_Format_NOT_SET, NVTE_QKV_Format_NOT_SET,
                      one.bias_type, one.mask, one.softmax, -1, -1, false, false, false,
                      one.workspace.data(), nullptr);
  EXPECT_EQ(one.workspace.numel(), with.workspace.numel());
}

TEST(NvteProtocol, AShortWorkspaceIsRefusedByOneByte) {
  for (const auto pass : {&SmallCall::forward, &SmallCall::backward}) {
    SmallCall c;
    c.workspace = TensorWrapper();
    (c.*pass)();
    const size_t bytes = c.workspace.numel();
    c.set(c.workspace, c.memory.data(), DType::kByte, {bytes - 1});
    EXPECT_NE(
        message_of([&] { (c.*pass)(); }).find("must have " + std::to_string(bytes) + " bytes"),
        std::string::npos);
    EXPECT_FALSE(c.wrote());
    c.set(c.workspace, c.memory.data(), DType::kByte, {bytes});
    (c.*pass)();
    EXPECT_TRUE(c.wrote());
  }
}

TEST(NvteProtocol, ThePackGetsTheInputsOfTheCall) {
  SmallCall c;
  c.softmax = NVTE_LEARNABLE_SOFTMAX;
  std::vector<float> offset(2, 0.5f), dsoftmax(2, 7);
  c.set(c.softmax_offset, offset.data(), kF32, {1, 2, 1, 1});
  c.pack.size = 3;
  c.aux(1, nullptr, DType::kInt64, {2}), c.aux(2, nullptr, kF32, {1, 2, 1, 1});
  c.forward();
  EXPECT_EQ(nvte_tensor_data(c.pack.tensors[1]), c.rng);
  EXPECT_EQ(nvte_tensor_data(c.pack.tensors[2]), offset.data());
  // A pack with Max serves the backward pass too, and so does one with an empty place.
  c.set(c.dsoftmax_offset, dsoftmax.data(), kF32, {1, 2, 1, 1});
  c.backward();
  const std::vector<float> once = dsoftmax;
  EXPECT_NE(once[0], 7);
  float max[2];
  c.pack.size = 5;
  c.aux(1, max, kF32, {1, 2, 1, 1}), c.aux(2, c.rng, DType::kInt64, {2});
  c.aux(3, nullptr, kF32, {0, 0, 6, 6}), c.aux(4, offset.data(), kF32, {1, 2, 1, 1});
  c.backward();
  EXPECT_EQ(dsoftmax, once);
}

TEST(NvteProtocol, TheGradientOfOffByOneIsThatOfAZeroOffset) {
  std::vector<float> zero(2, 0), as_zero(2), as_one(2);
  for (const NVTE_Softmax_Type type : {NVTE_LEARNABLE_SOFTMAX, NVTE_OFF_BY_ONE_SOFTMAX}) {
    SmallCall c;
    c.softmax = type;
    c.set(c.softmax_offset, zero.data(), kF32, {1, 2, 1, 1});
    c.pack.size = 3;
    c.aux(2, nullptr, kF32, {1, 2, 1, 1});
    c.forward();
    std::vector<float>& out = type == NVTE_LEARNABLE_SOFTMAX ? as_zero : as_one;
    c.set(c.dsoftmax_offset, out.data(), kF32, {1, 2, 1, 1});
    c.backward();
  }
  EXPECT_NE(as_zero[0], 0);
  EXPECT_EQ(as_zero, as_one);
}

TEST(NvteErrors, ArraysThatAreNullAreNamed) {
  EXPECT_NE(message_of([] { nvte_tensor_pack_create(nullptr); }).find("pack=null"),
            std::string::npos);
  EXPECT_NE(message_of([] { nvte_tensor_pack_destroy(nullptr); }).find("pack=null"),
            std::string::npos);
  EXPECT_NE(message_of([] { nvte_make_shape(nullptr, 2); }).find("data=null"), std::string::npos);
  EXPECT_NE(message_of([] {
              nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, nullptr, 2);
            }).find("tensors=null"),
            std::string::npos);
  EXPECT_NE(message_of([] { nvte_destroy_tensors(nullptr, 1); }).find("tensors=null"),
            std::string::npos);
  nvte_destroy_tensors(nullptr, 0);
  EXPECT_EQ(nvte_make_shape(nullptr, 0).ndim, 0u);
}

TEST(NvteErrors, WhatIsDeclaredBesideFp8IsFp32) {
  for (const NVTETensorParam param : {kNVTERowwiseScaleInv, kNVTEAmax}) {
    SmallCall c;
    void* const data = nvte_tensor_data(c.o.data());
    c.set(c.o, data, DType::kFloat8E4M3, c.shape);
    uint8_t byte[1] = {0};
    const size_t one = 1;
    const NVTEBasicTensor value{byte, kNVTEByte, nvte_make_shape(&one, 1)};
    NVTETensor handle = c.o.data();
    nvte_set_tensor_param(&handle, param, &value);
    const std::string message = message_of([&] { c.forward(); });
    EXPECT_NE(message.find(param == kNVTEAmax ? "O.amax.dtype=0" : "O.scale_inv.dtype=0"),
              std::string::npos)
        << message;
    EXPECT_EQ(byte[0], 0);
  }
}

TEST(NvteErrors, Int64LengthsBeyondInt32AreRefused) {
  SmallCall c;
  int64_t beyond[] = {0, 6, 6 + (int64_t{1} << 32) + 4};
  c.set(c.cu_q, beyond, DType::kInt64, {3}), c.set(c.cu_kv, beyond, DType::kInt64, {3});
  const std::string message = message_of([&] { c.forward(); });
  EXPECT_NE(message.find("seqlens"), std::string::npos) << message;
  EXPECT_FALSE(c.wrote());
}

}  // namespace
}  // namespace nvte_test
