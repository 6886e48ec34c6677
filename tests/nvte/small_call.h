// SPDX-License-Identifier: Apache-2.0
// nvte_fused_attn_fwd and _bwd with every argument by name.
#pragma once

#include <vector>

#include "tessera_nvte.h"

namespace nvte_test {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

// Tensors are empty until they are set.
struct NvteCall {
  TensorWrapper q, k, v, o, d_o, dq, dk, dv, bias, softmax_offset, s, dp, dbias, dsoftmax_offset;
  TensorWrapper cu_q, cu_kv, padded_q, padded_kv, table_k, table_v, rng_state, workspace;
  size_t max_q = 0, max_kv = 0;
  bool training = true, max_logit = false, bottom_right = false, deterministic = false;
  float scale = 0.5f, dropout = 0;
  NVTE_QKV_Layout layout = NVTE_BSHD_BSHD_BSHD, dqkv_layout = NVTE_BSHD_BSHD_BSHD;
  NVTE_QKV_Format o_format = NVTE_QKV_Format_NOT_SET, do_format = NVTE_QKV_Format_NOT_SET;
  NVTE_Bias_Type bias_type = NVTE_NO_BIAS;
  NVTE_Mask_Type mask = NVTE_NO_MASK;
  NVTE_Softmax_Type softmax = NVTE_VANILLA_SOFTMAX;
  int64_t left = -1, right = -1;
  bool second = false;  // the second generation of calls
  NVTETensorPack pack;

  NvteCall() { nvte_tensor_pack_create(&pack); }
  ~NvteCall() { nvte_tensor_pack_destroy(&pack); }
  NvteCall(const NvteCall&) = delete;
  NvteCall& operator=(const NvteCall&) = delete;

  static void set(TensorWrapper& tensor, void* data, DType dtype,
                  const std::vector<size_t>& extents) {
    tensor = TensorWrapper(data, extents, dtype);
  }
  void aux(size_t i, void* data, DType dtype, const std::vector<size_t>& extents) {
    const NVTEBasicTensor value{data, static_cast<NVTEDType>(dtype),
                                nvte_make_shape(extents.data(), extents.size())};
    nvte_set_tensor_param(&pack.tensors[i], kNVTERowwiseData, &value);
  }
  void forward() {
    if (second) return forward_v2();
    nvte_fused_attn_fwd(q.data(), k.data(), v.data(), bias.data(), softmax_offset.data(), s.data(),
                        o.data(), &pack, cu_q.data(), cu_kv.data(), padded_q.data(),
                        padded_kv.data(), table_k.data(), table_v.data(), rng_state.data(), max_q,
                        max_kv, training, max_logit, false, scale, dropout, layout, o_format,
                        NVTE_QKV_Format_NOT_SET, bias_type, mask, softmax, left, right,
                        bottom_right, workspace.data(), nullptr);
  }
  void backward() {
    if (second) return backward_v2();
    nvte_fused_attn_bwd(
        q.data(), k.data(), v.data(), o.data(), d_o.data(), s.data(), dp.data(), &pack, dq.data(),
        dk.data(), dv.data(), dbias.data(), dsoftmax_offset.data(), cu_q.data(), cu_kv.data(),
        padded_q.data(), padded_kv.data(), max_q, max_kv, scale, dropout, layout, o_format,
        do_format, dqkv_layout, NVTE_QKV_Format_NOT_SET, NVTE_QKV_Format_NOT_SET, bias_type, mask,
        softmax, left, right, bottom_right, deterministic, false, workspace.data(), nullptr);
  }

 private:
  // What both passes have.
  template <typename Params>
  void set_params(Params& params) {
    params.set_Q(q.data()).set_K(k.data()).set_V(v.data()).set_O(o.data()).set_S(s.data());
    params.set_Aux_CTX_Tensors(&pack).set_cu_seqlens_q(cu_q.data()).set_cu_seqlens_kv(cu_kv.data());
    params.set_cu_seqlens_q_padded(padded_q.data()).set_cu_seqlens_kv_padded(padded_kv.data());
    params.set_max_seqlen_q(max_q).set_max_seqlen_kv(max_kv).set_cuda_graph(false);
    params.set_attn_scale(scale).set_dropout(dropout).set_qkv_layout(layout).set_o_format(o_format);
    params.set_qkv_scale_inv_format(NVTE_QKV_Format_NOT_SET);
    params.set_bias_type(bias_type).set_attn_mask_type(mask).set_softmax_type(softmax);
    params.set_window_size_left(left).set_window_size_right(right);
    params.set_bottom_right_diagonal(bottom_right);
    params.set_workspace(workspace.data()).set_stream(nullptr);
  }
  void forward_v2() {
    FusedAttnFwdParamsWrapper params;
    set_params(params);
    params.set_Bias(bias.data()).set_SoftmaxOffset(softmax_offset.data());
    params.set_page_table_k(table_k.data()).set_page_table_v(table_v.data());
    params.set_rng_state(rng_state.data()).set_is_training(training);
    params.set_return_max_logit(max_logit);
    nvte_fused_attn_fwd_v2(params);
  }
  void backward_v2() {
    FusedAttnBwdParamsWrapper params;
    set_params(params);
    params.set_dO(d_o.data()).set_dP(dp.data());
    params.set_dQ(dq.data()).set_dK(dk.data()).set_dV(dv.data());
    params.set_dBias(dbias.data()).set_dSoftmaxOffset(dsoftmax_offset.data());
    params.set_do_format(do_format).set_dqkv_layout(dqkv_layout);
    params.set_do_scale_inv_format(NVTE_QKV_Format_NOT_SET).set_deterministic(deterministic);
    nvte_fused_attn_bwd_v2(params);
  }
};

// A small legal call, to be spoilt.
struct SmallCall : NvteCall {
  static constexpr size_t kB = 2, kS = 6, kH = 2, kD = 8;
  static constexpr size_t kCount = kB * kS * kH * kD;

  std::vector<float> q_data = std::vector<float>(kCount, 0.5f), k_data = q_data, v_data = q_data;
  // Outputs hold 7 until a call succeeds.
  std::vector<float> o_data = std::vector<float>(kCount, 7), dq_data = o_data, dk_data = o_data,
                     dv_data = o_data, stats_data = std::vector<float>(kB * kH * kS, 7);
  std::vector<int32_t> cu{0, 6, 10};
  std::vector<char> memory = std::vector<char>(8 << 20);  // a GPU asks for half of it
  int64_t rng[2] = {1, 2};
  std::vector<size_t> shape{kB, kS, kH, kD};

  SmallCall() {
    set(q, q_data.data(), DType::kFloat32, shape), set(k, k_data.data(), DType::kFloat32, shape);
    set(v, v_data.data(), DType::kFloat32, shape), set(o, o_data.data(), DType::kFloat32, shape);
    set(d_o, q_data.data(), DType::kFloat32, shape),
        set(dq, dq_data.data(), DType::kFloat32, shape);
    set(dk, dk_data.data(), DType::kFloat32, shape),
        set(dv, dv_data.data(), DType::kFloat32, shape);
    set(cu_q, cu.data(), DType::kInt32, {3}), set(cu_kv, cu.data(), DType::kInt32, {3});
    set(rng_state, rng, DType::kInt64, {2});
    set(workspace, memory.data(), DType::kByte, {memory.size()});
    max_q = max_kv = kS;
    mask = NVTE_PADDING_CAUSAL_MASK;
    o_format = do_format = NVTE_BSHD;
    pack.size = 2;
    aux(0, stats_data.data(), DType::kFloat32, {kB, kH, kS, 1});
    aux(1, rng, DType::kInt64, {2});
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
