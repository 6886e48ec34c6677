// SPDX-License-Identifier: Apache-2.0
// One small call of nvte_fused_attn_fwd and _bwd with every argument by name, to be spoilt.
#pragma once

#include <vector>

#include "tessera_nvte.h"

namespace nvte_test {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

struct SmallCall {
  static constexpr size_t kB = 2, kS = 6, kH = 2, kD = 8;
  static constexpr size_t kCount = kB * kS * kH * kD;

  std::vector<float> q_data = std::vector<float>(kCount, 0.5f), k_data = q_data, v_data = q_data;
  // Outputs hold 7 until a call succeeds.
  std::vector<float> o_data = std::vector<float>(kCount, 7), dq_data = o_data, dk_data = o_data,
                     dv_data = o_data;
  std::vector<float> stats_data = std::vector<float>(kB * kH * kS, 7);
  std::vector<int32_t> cu{0, 6, 10};
  std::vector<char> memory = std::vector<char>(1 << 20);
  int64_t rng[2] = {1, 2};

  std::vector<size_t> shape{kB, kS, kH, kD};
  TensorWrapper q{q_data.data(), shape, DType::kFloat32}, k{k_data.data(), shape, DType::kFloat32},
      v{v_data.data(), shape, DType::kFloat32}, o{o_data.data(), shape, DType::kFloat32},
      d_o{q_data.data(), shape, DType::kFloat32}, dq{dq_data.data(), shape, DType::kFloat32},
      dk{dk_data.data(), shape, DType::kFloat32}, dv{dv_data.data(), shape, DType::kFloat32};
  TensorWrapper bias, softmax_offset, s, dp, dbias, dsoftmax_offset, padded_q, padded_kv, table_k,
      table_v;
  TensorWrapper cu_q{cu.data(), std::vector<size_t>{3}, DType::kInt32},
      cu_kv{cu.data(), std::vector<size_t>{3}, DType::kInt32},
      rng_state{rng, std::vector<size_t>{2}, DType::kInt64},
      workspace{memory.data(), std::vector<size_t>{memory.size()}, DType::kByte};
  size_t max_q = kS, max_kv = kS;
  bool training = true, max_logit = false, bottom_right = false, deterministic = false;
  float scale = 0.5f, dropout = 0;
  NVTE_QKV_Layout layout = NVTE_BSHD_BSHD_BSHD, dqkv_layout = NVTE_BSHD_BSHD_BSHD;
  NVTE_QKV_Format o_format = NVTE_BSHD, do_format = NVTE_BSHD;
  NVTE_Bias_Type bias_type = NVTE_NO_BIAS;
  NVTE_Mask_Type mask = NVTE_PADDING_CAUSAL_MASK;
  NVTE_Softmax_Type softmax = NVTE_VANILLA_SOFTMAX;
  int64_t left = -1, right = -1;
  NVTETensorPack pack;

  SmallCall() {
    nvte_tensor_pack_create(&pack);
    pack.size = 2;
    aux(0, stats_data.data(), DType::kFloat32, {kB, kH, kS, 1});
    aux(1, rng, DType::kInt64, {2});
  }
  ~SmallCall() { nvte_tensor_pack_destroy(&pack); }
  SmallCall(const SmallCall&) = delete;

  static void set(TensorWrapper& tensor, void* data, DType dtype, std::vector<size_t> extents) {
    tensor = TensorWrapper(data, extents, dtype);
  }
  void aux(size_t i, void* data, DType dtype, std::vector<size_t> extents) {
    const NVTEBasicTensor value{data, static_cast<NVTEDType>(dtype),
                                nvte_make_shape(extents.data(), extents.size())};
    nvte_set_tensor_param(&pack.tensors[i], kNVTERowwiseData, &value);
  }
  void forward() {
    nvte_fused_attn_fwd(q.data(), k.data(), v.data(), bias.data(), softmax_offset.data(), s.data(),
                        o.data(), &pack, cu_q.data(), cu_kv.data(), padded_q.data(),
                        padded_kv.data(), table_k.data(), table_v.data(), rng_state.data(), max_q,
                        max_kv, training, max_logit, false, scale, dropout, layout, o_format,
                        NVTE_QKV_Format_NOT_SET, bias_type, mask, softmax, left, right,
                        bottom_right, workspace.data(), nullptr);
  }
  void backward() {
    nvte_fused_attn_bwd(
        q.data(), k.data(), v.data(), o.data(), d_o.data(), s.data(), dp.data(), &pack, dq.data(),
        dk.data(), dv.data(), dbias.data(), dsoftmax_offset.data(), cu_q.data(), cu_kv.data(),
        padded_q.data(), padded_kv.data(), max_q, max_kv, scale, dropout, layout, o_format,
        do_format, dqkv_layout, NVTE_QKV_Format_NOT_SET, NVTE_QKV_Format_NOT_SET, bias_type, mask,
        softmax, left, right, bottom_right, deterministic, false, workspace.data(), nullptr);
  }
  bool wrote() const {
    for (const auto* data : {&o_data, &dq_data, &dk_data, &dv_data, &stats_data}) {
      for (const float x : *data) {
        if (x != 7) return true;
      }
    }
    return false;
  }
};

}  // namespace nvte_test
