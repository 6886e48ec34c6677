// SPDX-License-Identifier: Apache-2.0
// Values and signatures of TransformerEngine's header, tensors and packs, layout maps, the query.
#include <gtest/gtest.h>

#include <set>
#include <type_traits>

#include "nvte/problems.h"

namespace nvte_test {
namespace {

// ---- what a source written against TransformerEngine relies on ----

static_assert(kNVTEByte == 0 && kNVTEInt16 == 1 && kNVTEInt32 == 2 && kNVTEInt64 == 3);
static_assert(kNVTEFloat32 == 4 && kNVTEFloat16 == 5 && kNVTEBFloat16 == 6);
static_assert(kNVTEFloat8E4M3 == 7 && kNVTEFloat8E5M2 == 8 && kNVTENumTypes == 11);
static_assert(NVTE_SBHD == 0 && NVTE_BSHD == 1 && NVTE_THD == 2 && NVTE_BSHD_2SBHD == 3);
static_assert(NVTE_SBHD_2BSHD == 4 && NVTE_THD_2BSHD == 5 && NVTE_THD_2SBHD == 6);
static_assert(NVTE_BHSD == 7 && NVTE_QKV_Format_NOT_SET == 8);
static_assert(NVTE_3HD == 0 && NVTE_H3D == 1 && NVTE_HD_2HD == 2 && NVTE_HD_H2D == 3);
static_assert(NVTE_HD_HD_HD == 4 && NVTE_Paged_KV_HD_HD_HD == 5 && NVTE_SD_SD_SD == 6);
static_assert(NVTE_NO_BIAS == 0 && NVTE_PRE_SCALE_BIAS == 1);
static_assert(NVTE_POST_SCALE_BIAS == 2 && NVTE_ALIBI == 3);
static_assert(NVTE_NO_MASK == 0 && NVTE_PADDING_MASK == 1 && NVTE_CAUSAL_MASK == 2);
static_assert(NVTE_PADDING_CAUSAL_MASK == 3 && NVTE_CAUSAL_BOTTOM_RIGHT_MASK == 4);
static_assert(NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK == 5);
static_assert(NVTE_VANILLA_SOFTMAX == 0 && NVTE_OFF_BY_ONE_SOFTMAX == 1);
static_assert(NVTE_LEARNABLE_SOFTMAX == 2);
static_assert(NVTE_No_Backend == -1 && NVTE_F16_max512_seqlen == 0);
static_assert(NVTE_F16_arbitrary_seqlen == 1 && NVTE_FP8 == 2);
static_assert(NVTE_SB3HD == 0 && NVTE_THD_THD_THD == 14 && NVTE_THD_SBHD_SBHD == 18);
static_assert(NVTE_Paged_KV_THD_SBHD_SBHD == 24 && NVTE_BHSD_BHSD_BHSD == 25);
static_assert(NVTETensorPack::MAX_SIZE == 10);
static_assert(std::is_same_v<NVTETensor, void*>);

using T = NVTETensor;
using Int = int64_t;
static_assert(std::is_same_v<decltype(&nvte_get_fused_attn_backend),
                             NVTE_Fused_Attn_Backend (*)(
                                 bool, NVTEDType, NVTEDType, NVTE_QKV_Layout, NVTE_Bias_Type,
                                 NVTE_Mask_Type, NVTE_Softmax_Type, float, size_t, size_t, size_t,
                                 size_t, size_t, size_t, Int, Int, bool, bool, bool)>);
static_assert(
    std::is_same_v<decltype(&nvte_fused_attn_fwd),
                   void (*)(T, T, T, T, T, T, T, NVTETensorPack*, T, T, T, T, T, T, T, size_t,
                            size_t, bool, bool, bool, float, float, NVTE_QKV_Layout,
                            NVTE_QKV_Format, NVTE_QKV_Format, NVTE_Bias_Type, NVTE_Mask_Type,
                            NVTE_Softmax_Type, Int, Int, bool, T, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&nvte_fused_attn_bwd),
                   void (*)(T, T, T, T, T, T, T, const NVTETensorPack*, T, T, T, T, T, T, T, T, T,
                            size_t, size_t, float, float, NVTE_QKV_Layout, NVTE_QKV_Format,
                            NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_QKV_Format, NVTE_QKV_Format,
                            NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type, Int, Int, bool, bool,
                            bool, T, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&nvte_populate_rng_state_async),
                   void (*)(T, T, size_t, size_t, NVTE_Fused_Attn_Backend, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&nvte_get_runtime_num_segments),
                             uint32_t (*)(T, T, size_t, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&nvte_extract_seed_and_offset),
                   void (*)(Int*, int, Int*, uint64_t, Int*, uint64_t, uint32_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&nvte_copy_to_kv_cache),
                             void (*)(T, T, T, T, T, T, T, NVTE_QKV_Format, int, int, int, int, int,
                                      cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&nvte_convert_thd_to_bshd), void (*)(T, T, T, int, int, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&nvte_convert_bshd_to_thd), void (*)(T, T, T, int, cudaStream_t)>);

// ---- layouts ----

TEST(NvteNames, MapsOfLayouts) {
  const std::map<std::string, NVTE_QKV_Format> formats{{"sbhd", NVTE_SBHD},
                                                       {"bshd", NVTE_BSHD},
                                                       {"thd", NVTE_THD},
                                                       {"bhsd", NVTE_BHSD},
                                                       {"bshd_2sbhd", NVTE_BSHD_2SBHD},
                                                       {"sbhd_2bshd", NVTE_SBHD_2BSHD},
                                                       {"thd_2bshd", NVTE_THD_2BSHD},
                                                       {"thd_2sbhd", NVTE_THD_2SBHD}};
  for (int layout = 0; layout <= NVTE_BHSD_BHSD_BHSD; ++layout) {
    std::string name = kLayoutNames[layout], q, kv;
    SCOPED_TRACE(name);
    const bool paged = name.rfind("paged_kv_", 0) == 0;
    if (paged) name.erase(0, 9);
    // Without the digits of shared buffers a part of a name is its format.
    for (const char c : name.substr(0, name.find('_')))
      q += c == '2' || c == '3' ? "" : std::string(1, c);
    for (const char c : name.substr(name.rfind('_') + 1))
      kv += c == '2' || c == '3' ? "" : std::string(1, c);
    const auto value = static_cast<NVTE_QKV_Layout>(layout);
    EXPECT_EQ(nvte_get_q_format(value), formats.at(q));
    EXPECT_EQ(nvte_get_kv_format(value), formats.at(kv));
    EXPECT_EQ(nvte_get_qkv_format(value), formats.at(q == kv ? q : q + "_2" + kv));
    const auto has = [&](const char* text) { return name.find(text) != std::string::npos; };
    const NVTE_QKV_Layout_Group group = paged         ? NVTE_Paged_KV_HD_HD_HD
                                        : has("bhsd") ? NVTE_SD_SD_SD
                                        : has("3hd")  ? NVTE_3HD
                                        : has("h3d")  ? NVTE_H3D
                                        : has("2hd")  ? NVTE_HD_2HD
                                        : has("h2d")  ? NVTE_HD_H2D
                                                      : NVTE_HD_HD_HD;
    EXPECT_EQ(nvte_get_qkv_layout_group(value), group);
  }
}

// ---- tensors ----

TEST(NvteTensors, HoldWhatTheyAreGiven) {
  float data[6], amax = 1, scale = 2, scale_inv = 0.5f;
  TensorWrapper tensor(data, std::vector<size_t>{2, 3}, DType::kFloat32, &amax, &scale, &scale_inv);
  EXPECT_EQ(tensor.dptr(), data);
  EXPECT_EQ(tensor.amax(), &amax);
  EXPECT_EQ(tensor.scale(), &scale);
  EXPECT_EQ(tensor.scale_inv(), &scale_inv);
  EXPECT_EQ(tensor.ndim(), 2u);
  EXPECT_EQ(tensor.size(1), 3u);
  EXPECT_EQ(tensor.numel(), 6u);
  EXPECT_EQ(tensor.bytes(), 24u);
  EXPECT_EQ(tensor.scaling_mode(), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_THROW(tensor.size(2), std::runtime_error);
  TensorWrapper moved(std::move(tensor));
  EXPECT_EQ(tensor.data(), nullptr);
  tensor = std::move(moved);
  EXPECT_EQ(tensor.dptr(), data);
}

TEST(NvteTensors, AreEmptyAtFirstAndWhenNull) {
  for (const NVTETensor tensor : {NVTETensor{}, nvte_create_tensor(NVTE_MXFP8_1D_SCALING)}) {
    EXPECT_EQ(nvte_tensor_data(tensor), nullptr);
    EXPECT_EQ(nvte_tensor_numel(tensor), 0u);
    EXPECT_EQ(nvte_tensor_type(tensor), kNVTEFloat32);
    EXPECT_EQ(nvte_tensor_scaling_mode(tensor),
              tensor ? NVTE_MXFP8_1D_SCALING : NVTE_DELAYED_TENSOR_SCALING);
    nvte_destroy_tensor(tensor);
  }
}

TEST(NvteTensors, ParamsThroughBytes) {
  NVTETensor tensors[2];
  nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, tensors, 2);
  const size_t extents[] = {4, 5};
  const NVTEBasicTensor given{tensors, kNVTEInt64, nvte_make_shape(extents, 2)};
  nvte_set_tensor_param_v2(tensors[1], kNVTEColumnwiseData, &given, sizeof given);
  NVTEBasicTensor got{};
  size_t size = 0;
  nvte_get_tensor_param_v2(tensors[1], kNVTEColumnwiseData, &got, sizeof got, &size);
  EXPECT_EQ(size, sizeof got);
  EXPECT_EQ(got.data_ptr, tensors);
  EXPECT_EQ(got.shape.data[1], 5u);
  EXPECT_EQ(nvte_get_tensor_param(tensors[0], kNVTEColumnwiseData).data_ptr, nullptr);
  const uint8_t on = 1;
  uint8_t flag = 0;
  nvte_set_tensor_param_v2(tensors[0], kNVTEWithGEMMSwizzledScales, &on, 1);
  nvte_get_tensor_param_v2(tensors[0], kNVTEWithGEMMSwizzledScales, &flag, 1, nullptr);
  EXPECT_EQ(flag, 1);
  nvte_get_tensor_param_v2(tensors[0], kNVTERowScaledNVFP4, &flag, 1, nullptr);
  EXPECT_EQ(flag, 0);
  const int most = 256;
  int largest = 0;
  nvte_set_tensor_param_v2(tensors[0], kNVTENVFP4E4M3Max, &most, sizeof most);
  nvte_get_tensor_param_v2(tensors[0], kNVTENVFP4E4M3Max, &largest, sizeof largest, &size);
  EXPECT_EQ(largest, 256);
  EXPECT_EQ(size, sizeof(int));
  EXPECT_THROW(nvte_get_tensor_param(tensors[0], kNVTENVFP4E4M3Max), std::runtime_error);
  EXPECT_THROW(nvte_set_tensor_param_v2(tensors[0], kNVTERowwiseData, &given, 3),
               std::runtime_error);
  EXPECT_THROW(nvte_set_tensor_param_v2(nullptr, kNVTERowwiseData, &given, sizeof given),
               std::runtime_error);
  EXPECT_THROW(nvte_get_tensor_param(tensors[0], kNVTENumTensorParams), std::runtime_error);
  EXPECT_THROW(nvte_make_shape(extents, 16), std::runtime_error);
  NVTEBasicTensor wrong = given;
  wrong.dtype = kNVTENumTypes;
  EXPECT_THROW(nvte_set_tensor_param(&tensors[0], kNVTERowwiseData, &wrong), std::runtime_error);
  wrong = given, wrong.shape.data[0] = ~size_t{0} / 2;
  EXPECT_THROW(nvte_set_tensor_param(&tensors[0], kNVTERowwiseData, &wrong), std::runtime_error);
  nvte_destroy_tensors(tensors, 2);
  EXPECT_EQ(tensors[1], nullptr);
}

TEST(NvteTensors, APackHasTenOfThem) {
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  EXPECT_EQ(std::set<NVTETensor>(pack.tensors, pack.tensors + 10).size(), 10u);
  EXPECT_EQ(pack.size, 0u);
  nvte_tensor_pack_destroy(&pack);
}

// ---- the query ----

NVTE_Fused_Attn_Backend query(NVTEDType dtype, NVTE_QKV_Layout layout = NVTE_BSHD_BSHD_BSHD,
                              NVTE_Mask_Type mask = NVTE_CAUSAL_MASK, bool training = true,
                              size_t hk = 2, size_t d = 64, float dropout = 0) {
  return nvte_get_fused_attn_backend(training, dtype, dtype, layout, NVTE_NO_BIAS, mask,
                                     NVTE_LEARNABLE_SOFTMAX, dropout, 4, hk, 96, 96, d, d, -1, -1,
                                     !training, false, false);
}

TEST(NvteQuery, AnswersWhatRuns) {
  for (int layout = 0; layout <= NVTE_BHSD_BHSD_BHSD; ++layout) {
    const std::string name = kLayoutNames[layout];
    // Pages have no backward pass here; tensors of one buffer have as many heads each.
    const bool pages = name[0] == 'p';
    const size_t hk = name.find('3') == std::string::npos ? 2 : 4;
    const auto value = static_cast<NVTE_QKV_Layout>(layout);
    EXPECT_EQ(query(kNVTEBFloat16, value, NVTE_PADDING_CAUSAL_MASK, false, hk),
              NVTE_F16_arbitrary_seqlen)
        << name;
    EXPECT_EQ(query(kNVTEFloat16, value, NVTE_PADDING_MASK, true, hk),
              pages ? NVTE_No_Backend : NVTE_F16_arbitrary_seqlen)
        << name;
  }
  EXPECT_EQ(query(kNVTEInt32), NVTE_No_Backend);
  EXPECT_EQ(query(kNVTEBFloat16, NVTE_BSHD_BSHD_BSHD, NVTE_NO_MASK, true, 3), NVTE_No_Backend);
  EXPECT_EQ(query(kNVTEBFloat16, NVTE_BSHD_BSHD_BSHD, NVTE_NO_MASK, true, 2, 64, 1.5f),
            NVTE_No_Backend);
}

TEST(NvteQuery, UnknownEnumsThrowAndAbsurdSizesDoNotRun) {
  EXPECT_THROW(query(kNVTENumTypes), std::runtime_error);
  EXPECT_THROW(query(static_cast<NVTEDType>(-1)), std::runtime_error);
  EXPECT_THROW(query(kNVTEBFloat16, static_cast<NVTE_QKV_Layout>(99)), std::runtime_error);
  EXPECT_THROW(query(kNVTEBFloat16, NVTE_T3HD, static_cast<NVTE_Mask_Type>(6)), std::runtime_error);
  EXPECT_EQ(query(kNVTEBFloat16, NVTE_THD_THD_THD, NVTE_NO_MASK, true, ~size_t{0}),
            NVTE_No_Backend);
  EXPECT_EQ(query(kNVTEBFloat16, NVTE_THD_THD_THD, NVTE_NO_MASK, true, 2, ~size_t{0}),
            NVTE_No_Backend);
}

// Two where a backend has fp8, which the CPU's have not.
TEST(NvteQuery, Fp8) {
  const NVTE_Fused_Attn_Backend answer = query(kNVTEFloat8E4M3);
  EXPECT_TRUE(answer == NVTE_FP8 || answer == NVTE_No_Backend) << answer;
}

}  // namespace
}  // namespace nvte_test
