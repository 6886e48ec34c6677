// SPDX-License-Identifier: Apache-2.0
// What the handles of nvte_fused_attn_fwd_v2, _bwd_v2 and the query point at. Calls of the first
// generation fill the same structs. A list has, in the order of the attributes' numbers:
// attribute, type, name, default.
#pragma once

#include "tessera_nvte.h"

// clang-format off
#define TESSERA_NVTE_CONFIG_FIELDS(X) \
  X(IsTraining, bool, is_training, true) \
  X(Deterministic, bool, deterministic, false) \
  X(CudaGraph, bool, cuda_graph, false) \
  X(ReturnMaxLogit, bool, return_max_logit, false) \
  X(AttnMaskType, NVTE_Mask_Type, attn_mask_type, NVTE_NO_MASK) \
  X(BiasType, NVTE_Bias_Type, bias_type, NVTE_NO_BIAS) \
  X(WindowSizeLeft, int64_t, window_size_left, -1) \
  X(WindowSizeRight, int64_t, window_size_right, -1) \
  X(BottomRightDiagonal, bool, bottom_right_diagonal, true) \
  X(SoftmaxType, NVTE_Softmax_Type, softmax_type, NVTE_VANILLA_SOFTMAX) \
  X(ScalingMode, NVTEScalingMode, scaling_mode, NVTE_DELAYED_TENSOR_SCALING) \
  X(Dropout, float, dropout, 0.0f) \
  X(AttnScale, float, attn_scale, 1.0f) \
  X(QKVDtype, NVTEDType, qkv_dtype, kNVTEBFloat16) \
  X(ODtype, NVTEDType, o_dtype, kNVTEBFloat16) \
  X(DODtype, NVTEDType, do_dtype, kNVTEBFloat16) \
  X(DQKVDtype, NVTEDType, dqkv_dtype, kNVTEBFloat16) \
  X(QKVLayout, NVTE_QKV_Layout, qkv_layout, NVTE_QKV_Layout_NOT_SET) \
  X(OFormat, NVTE_QKV_Format, o_format, NVTE_QKV_Format_NOT_SET) \
  X(DOFormat, NVTE_QKV_Format, do_format, NVTE_QKV_Format_NOT_SET) \
  X(DQKVLayout, NVTE_QKV_Layout, dqkv_layout, NVTE_QKV_Layout_NOT_SET) \
  X(QKVScaleInvFormat, NVTE_QKV_Format, qkv_scale_inv_format, NVTE_QKV_Format_NOT_SET) \
  X(DOScaleInvFormat, NVTE_QKV_Format, do_scale_inv_format, NVTE_QKV_Format_NOT_SET) \
  X(BatchSize, size_t, batch_size, 0) \
  X(NumAttnHeads, size_t, num_attn_heads, 0) \
  X(NumGQAGroups, size_t, num_gqa_groups, 0) \
  X(HeadDimQK, size_t, head_dim_qk, 0) \
  X(HeadDimV, size_t, head_dim_v, 0) \
  X(MaxSeqlenQ, size_t, max_seqlen_q, 0) \
  X(MaxSeqlenKV, size_t, max_seqlen_kv, 0) \
  X(NumTokensQ, size_t, num_tokens_q, 0) \
  X(NumTokensKV, size_t, num_tokens_kv, 0) \
  X(NumPagesK, size_t, num_pages_k, 0) \
  X(NumPagesV, size_t, num_pages_v, 0) \
  X(PageSizeK, size_t, page_size_k, 0) \
  X(PageSizeV, size_t, page_size_v, 0) \
  X(MaxPagesPerSeqK, size_t, max_pages_per_seq_k, 0) \
  X(MaxPagesPerSeqV, size_t, max_pages_per_seq_v, 0) \
  X(BiasBatchSize, size_t, bias_batch_size, 0) \
  X(BiasNumHeads, size_t, bias_num_heads, 0) \
  X(BiasSeqlenQ, size_t, bias_seqlen_q, 0) \
  X(BiasSeqlenKV, size_t, bias_seqlen_kv, 0)

#define TESSERA_NVTE_FWD_FIELDS(X) \
  X(Q, NVTETensor, Q, nullptr) \
  X(K, NVTETensor, K, nullptr) \
  X(V, NVTETensor, V, nullptr) \
  X(Bias, NVTETensor, Bias, nullptr) \
  X(SoftmaxOffset, NVTETensor, SoftmaxOffset, nullptr) \
  X(S, NVTETensor, S, nullptr) \
  X(O, NVTETensor, O, nullptr) \
  X(AuxCtxTensors, NVTETensorPack*, Aux_CTX_Tensors, nullptr) \
  X(CuSeqlensQ, NVTETensor, cu_seqlens_q, nullptr) \
  X(CuSeqlensKV, NVTETensor, cu_seqlens_kv, nullptr) \
  X(CuSeqlensQPadded, NVTETensor, cu_seqlens_q_padded, nullptr) \
  X(CuSeqlensKVPadded, NVTETensor, cu_seqlens_kv_padded, nullptr) \
  X(PageTableK, NVTETensor, page_table_k, nullptr) \
  X(PageTableV, NVTETensor, page_table_v, nullptr) \
  X(RngState, NVTETensor, rng_state, nullptr) \
  X(IsTraining, bool, is_training, true) \
  X(CudaGraph, bool, cuda_graph, false) \
  X(ReturnMaxLogit, bool, return_max_logit, false) \
  X(AttnMaskType, NVTE_Mask_Type, attn_mask_type, NVTE_NO_MASK) \
  X(BiasType, NVTE_Bias_Type, bias_type, NVTE_NO_BIAS) \
  X(WindowSizeLeft, int64_t, window_size_left, -1) \
  X(WindowSizeRight, int64_t, window_size_right, -1) \
  X(BottomRightDiagonal, bool, bottom_right_diagonal, true) \
  X(SoftmaxType, NVTE_Softmax_Type, softmax_type, NVTE_VANILLA_SOFTMAX) \
  X(Dropout, float, dropout, 0.0f) \
  X(AttnScale, float, attn_scale, 1.0f) \
  X(QKVLayout, NVTE_QKV_Layout, qkv_layout, NVTE_QKV_Layout_NOT_SET) \
  X(OFormat, NVTE_QKV_Format, o_format, NVTE_QKV_Format_NOT_SET) \
  X(QKVScaleInvFormat, NVTE_QKV_Format, qkv_scale_inv_format, NVTE_QKV_Format_NOT_SET) \
  X(MaxSeqlenQ, size_t, max_seqlen_q, 0) \
  X(MaxSeqlenKV, size_t, max_seqlen_kv, 0) \
  X(Workspace, NVTETensor, workspace, nullptr) \
  X(Stream, cudaStream_t, stream, nullptr)

#define TESSERA_NVTE_BWD_FIELDS(X) \
  X(Q, NVTETensor, Q, nullptr) \
  X(K, NVTETensor, K, nullptr) \
  X(V, NVTETensor, V, nullptr) \
  X(O, NVTETensor, O, nullptr) \
  X(DO, NVTETensor, dO, nullptr) \
  X(S, NVTETensor, S, nullptr) \
  X(DP, NVTETensor, dP, nullptr) \
  X(AuxCtxTensors, const NVTETensorPack*, Aux_CTX_Tensors, nullptr) \
  X(DQ, NVTETensor, dQ, nullptr) \
  X(DK, NVTETensor, dK, nullptr) \
  X(DV, NVTETensor, dV, nullptr) \
  X(DBias, NVTETensor, dBias, nullptr) \
  X(DSoftmaxOffset, NVTETensor, dSoftmaxOffset, nullptr) \
  X(CuSeqlensQ, NVTETensor, cu_seqlens_q, nullptr) \
  X(CuSeqlensKV, NVTETensor, cu_seqlens_kv, nullptr) \
  X(CuSeqlensQPadded, NVTETensor, cu_seqlens_q_padded, nullptr) \
  X(CuSeqlensKVPadded, NVTETensor, cu_seqlens_kv_padded, nullptr) \
  X(Deterministic, bool, deterministic, false) \
  X(CudaGraph, bool, cuda_graph, false) \
  X(AttnMaskType, NVTE_Mask_Type, attn_mask_type, NVTE_NO_MASK) \
  X(BiasType, NVTE_Bias_Type, bias_type, NVTE_NO_BIAS) \
  X(WindowSizeLeft, int64_t, window_size_left, -1) \
  X(WindowSizeRight, int64_t, window_size_right, -1) \
  X(BottomRightDiagonal, bool, bottom_right_diagonal, true) \
  X(SoftmaxType, NVTE_Softmax_Type, softmax_type, NVTE_VANILLA_SOFTMAX) \
  X(Dropout, float, dropout, 0.0f) \
  X(AttnScale, float, attn_scale, 1.0f) \
  X(QKVLayout, NVTE_QKV_Layout, qkv_layout, NVTE_QKV_Layout_NOT_SET) \
  X(OFormat, NVTE_QKV_Format, o_format, NVTE_QKV_Format_NOT_SET) \
  X(DOFormat, NVTE_QKV_Format, do_format, NVTE_QKV_Format_NOT_SET) \
  X(DQKVLayout, NVTE_QKV_Layout, dqkv_layout, NVTE_QKV_Layout_NOT_SET) \
  X(QKVScaleInvFormat, NVTE_QKV_Format, qkv_scale_inv_format, NVTE_QKV_Format_NOT_SET) \
  X(DOScaleInvFormat, NVTE_QKV_Format, do_scale_inv_format, NVTE_QKV_Format_NOT_SET) \
  X(MaxSeqlenQ, size_t, max_seqlen_q, 0) \
  X(MaxSeqlenKV, size_t, max_seqlen_kv, 0) \
  X(Workspace, NVTETensor, workspace, nullptr) \
  X(Stream, cudaStream_t, stream, nullptr)
// clang-format on

namespace tessera::nvte {

#define TESSERA_NVTE_FIELD(attribute, type, name, value) type name = value;
struct Config {
  TESSERA_NVTE_CONFIG_FIELDS(TESSERA_NVTE_FIELD)
};
struct FwdParams {
  TESSERA_NVTE_FWD_FIELDS(TESSERA_NVTE_FIELD)
};
struct BwdParams {
  TESSERA_NVTE_BWD_FIELDS(TESSERA_NVTE_FIELD)
};
#undef TESSERA_NVTE_FIELD

// The struct of a handle; a null one is wrong.
const Config& config_of(NVTEFusedAttnConfig handle);
const FwdParams& fwd_params_of(NVTEFusedAttnFwdParams handle);
const BwdParams& bwd_params_of(NVTEFusedAttnBwdParams handle);

// Calls of the first generation give every tensor, if only an empty one; a null one is wrong.
void check_tensors(const FwdParams& params);
void check_tensors(const BwdParams& params);

}  // namespace tessera::nvte
