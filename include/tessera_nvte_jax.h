/* SPDX-License-Identifier: Apache-2.0
 *
 * The C++ functions of attention in TransformerEngine's JAX extension, over tessera_nvte.h alone:
 * which backend, what a pack of auxiliary tensors holds, and how much workspace each pass wants.
 * Arguments are TransformerEngine's; b = input_batch, h = attn_heads, s = q_max_seqlen.
 *
 * Workspace sizes are (shape, dtype): a pybind11::tuple where pybind11 was included before, as
 * TransformerEngine's functions answer, else a std::pair.
 */
#ifndef TESSERA_NVTE_JAX_H_
#define TESSERA_NVTE_JAX_H_

#include "tessera_nvte.h"

#ifdef TESSERA_NVTE_NO_NAMES
#error "tessera_nvte_jax.h is TransformerEngine's names; compile it without TESSERA_NVTE_NO_NAMES"
#endif

namespace transformer_engine {
inline namespace tessera_names {
namespace jax {

#ifdef PYBIND11_VERSION_MAJOR
using WorkspaceSizes = pybind11::tuple;
#else
using WorkspaceSizes = std::pair<std::vector<size_t>, DType>;
#endif

inline NVTE_Fused_Attn_Backend GetFusedAttnBackend(
    bool is_training, DType q_dtype, DType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type,
    float dropout_probability, size_t q_attn_heads, size_t kv_attn_heads, size_t q_max_seqlen,
    size_t kv_max_seqlen, size_t qk_head_dim, size_t v_head_dim, int64_t window_size_left,
    int64_t window_size_right, bool deterministic) {
  return nvte_get_fused_attn_backend(
      is_training, static_cast<NVTEDType>(q_dtype), static_cast<NVTEDType>(kv_dtype), qkv_layout,
      bias_type, mask_type, softmax_type, dropout_probability, q_attn_heads, kv_attn_heads,
      q_max_seqlen, kv_max_seqlen, qk_head_dim, v_head_dim, window_size_left, window_size_right,
      /*return_max_logit=*/false, /*cuda_graph=*/false, deterministic);
}

/* The pack of nvte_fused_attn_fwd: Stats fp32 [b, h, s, 1] (of packed tokens too, whose order is
 * [h, b s]), rng_state, Bias where bias_type reads one, and SoftmaxOffset where there is memory for
 * it. */
inline void PrepareFusedAttnForwardAuxTensors(
    NVTETensorPack* tensor_pack, const size_t input_batch, const size_t bias_batch,
    const size_t attn_heads, const size_t bias_heads, const size_t q_max_seqlen,
    const size_t kv_max_seqlen, DType dtype, NVTE_Bias_Type bias_type,
    NVTE_Fused_Attn_Backend /*backend*/, void* softmax_buf, void* rng_state_buf = nullptr,
    void* bias_buf = nullptr, void* softmax_offset_buf = nullptr) {
  tensor_pack->size = 0;
  const auto add = [tensor_pack](void* data, DType type, const std::vector<size_t>& shape) {
    const NVTEBasicTensor value{data, static_cast<NVTEDType>(type),
                                nvte_make_shape(shape.data(), shape.size())};
    nvte_set_tensor_param(&tensor_pack->tensors[tensor_pack->size++], kNVTERowwiseData, &value);
  };
  add(softmax_buf, DType::kFloat32, {input_batch, attn_heads, q_max_seqlen, 1});
  add(rng_state_buf, DType::kInt64, {2});
  if (bias_type == NVTE_PRE_SCALE_BIAS || bias_type == NVTE_POST_SCALE_BIAS) {
    add(bias_buf, dtype, {bias_batch, bias_heads, q_max_seqlen, kv_max_seqlen});
  }
  if (softmax_offset_buf) add(softmax_offset_buf, DType::kFloat32, {1, attn_heads, 1, 1});
}

/* The pack of nvte_fused_attn_bwd: likewise, with a Bias where bias_batch and bias_heads are not 0.
 */
inline void PrepareFusedAttnBackwardAuxTensors(
    NVTETensorPack* tensor_pack, const size_t input_batch, const size_t bias_batch,
    const size_t attn_heads, const size_t bias_heads, const size_t q_max_seqlen,
    const size_t kv_max_seqlen, DType dtype, NVTE_Fused_Attn_Backend backend, void* softmax_buf,
    void* rng_state_buf, void* bias_buf, void* softmax_offset_buf = nullptr) {
  PrepareFusedAttnForwardAuxTensors(
      tensor_pack, input_batch, bias_batch, attn_heads, bias_heads, q_max_seqlen, kv_max_seqlen,
      dtype, bias_batch && bias_heads ? NVTE_POST_SCALE_BIAS : NVTE_NO_BIAS, backend, softmax_buf,
      rng_state_buf, bias_buf, softmax_offset_buf);
}

/* Tensors as JAX lays them out, without data. */
struct WorkspaceQuery {
  TensorWrapper q, k, v, o, bias, softmax_offset, cu_seqlens, rng_state, empty, workspace;
  NVTETensorPack pack;

  WorkspaceQuery(size_t b, size_t bias_batch, size_t q_max_seqlen, size_t kv_max_seqlen, size_t h,
                 size_t num_gqa_groups, size_t bias_heads, size_t qk_head_dim, size_t v_head_dim,
                 NVTE_QKV_Layout layout, DType dtype, size_t max_segments_per_seq)
      : q(nullptr, shape({b * q_max_seqlen, h, qk_head_dim}), dtype),
        k(nullptr, shape({b * kv_max_seqlen, num_gqa_groups, qk_head_dim}), dtype),
        v(nullptr, shape({b * kv_max_seqlen, num_gqa_groups, v_head_dim}), dtype),
        o(nullptr, shape({b * q_max_seqlen, h, v_head_dim}), dtype),
        bias(nullptr, shape({bias_batch, bias_heads, q_max_seqlen, kv_max_seqlen}), dtype),
        softmax_offset(nullptr, shape({1, h, 1, 1}), DType::kFloat32),
        cu_seqlens(
            nullptr,
            shape({(nvte_get_q_format(layout) == NVTE_THD ? b * max_segments_per_seq : b) + 1}),
            DType::kInt32),
        rng_state(nullptr, shape({2}), DType::kInt64) {
    nvte_tensor_pack_create(&pack);
  }
  ~WorkspaceQuery() { nvte_tensor_pack_destroy(&pack); }
  WorkspaceQuery(const WorkspaceQuery&) = delete;
  WorkspaceQuery& operator=(const WorkspaceQuery&) = delete;

  WorkspaceSizes sizes() const {
    const NVTEShape asked = workspace.shape();
    std::vector<size_t> bytes(asked.data, asked.data + asked.ndim);
#ifdef PYBIND11_VERSION_MAJOR
    return pybind11::make_tuple(std::move(bytes), workspace.dtype());
#else
    return {std::move(bytes), workspace.dtype()};
#endif
  }

 private:
  static std::vector<size_t> shape(std::vector<size_t> extents) { return extents; }
};

inline WorkspaceSizes GetFusedAttnForwardWorkspaceSizes(
    size_t input_batch, size_t bias_batch, size_t q_max_seqlen, size_t kv_max_seqlen,
    size_t attn_heads, size_t num_gqa_groups, size_t bias_heads, size_t qk_head_dim,
    size_t v_head_dim, float scaling_factor, float dropout_probability, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type, NVTE_QKV_Layout qkv_layout,
    DType dtype, bool is_training, size_t max_segments_per_seq, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal) {
  WorkspaceQuery t(input_batch, bias_batch, q_max_seqlen, kv_max_seqlen, attn_heads, num_gqa_groups,
                   bias_heads, qk_head_dim, v_head_dim, qkv_layout, dtype, max_segments_per_seq);
  nvte_fused_attn_fwd(t.q.data(), t.k.data(), t.v.data(), t.bias.data(), t.softmax_offset.data(),
                      t.empty.data(), t.o.data(), &t.pack, t.cu_seqlens.data(), t.cu_seqlens.data(),
                      t.cu_seqlens.data(), t.cu_seqlens.data(), t.empty.data(), t.empty.data(),
                      t.rng_state.data(), q_max_seqlen, kv_max_seqlen, is_training,
                      /*return_max_logit=*/false, /*cuda_graph=*/false, scaling_factor,
                      dropout_probability, qkv_layout, NVTE_QKV_Format_NOT_SET,
                      NVTE_QKV_Format_NOT_SET, bias_type, mask_type, softmax_type, window_size_left,
                      window_size_right, bottom_right_diagonal, t.workspace.data(), nullptr);
  return t.sizes();
}

inline WorkspaceSizes GetFusedAttnBackwardWorkspaceSizes(
    size_t input_batch, size_t bias_batch, size_t q_max_seqlen, size_t kv_max_seqlen,
    size_t attn_heads, size_t num_gqa_groups, size_t bias_heads, size_t qk_head_dim,
    size_t v_head_dim, float scaling_factor, float dropout_probability, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type, NVTE_QKV_Layout qkv_layout,
    DType dtype, bool /*is_training*/, bool deterministic, size_t max_segments_per_seq,
    int64_t window_size_left, int64_t window_size_right, bool bottom_right_diagonal) {
  WorkspaceQuery t(input_batch, bias_batch, q_max_seqlen, kv_max_seqlen, attn_heads, num_gqa_groups,
                   bias_heads, qk_head_dim, v_head_dim, qkv_layout, dtype, max_segments_per_seq);
  float nothing = 0; /* stands for the offset's memory, so that the pack has a place for it */
  PrepareFusedAttnBackwardAuxTensors(&t.pack, input_batch, bias_batch, attn_heads, bias_heads,
                                     q_max_seqlen, kv_max_seqlen, dtype, NVTE_F16_arbitrary_seqlen,
                                     nullptr, nullptr, nullptr,
                                     softmax_type == NVTE_VANILLA_SOFTMAX ? nullptr : &nothing);
  nvte_fused_attn_bwd(t.q.data(), t.k.data(), t.v.data(), t.o.data(), t.o.data(), t.empty.data(),
                      t.empty.data(), &t.pack, t.q.data(), t.k.data(), t.v.data(), t.bias.data(),
                      t.softmax_offset.data(), t.cu_seqlens.data(), t.cu_seqlens.data(),
                      t.cu_seqlens.data(), t.cu_seqlens.data(), q_max_seqlen, kv_max_seqlen,
                      scaling_factor, dropout_probability, qkv_layout, NVTE_QKV_Format_NOT_SET,
                      NVTE_QKV_Format_NOT_SET, qkv_layout, NVTE_QKV_Format_NOT_SET,
                      NVTE_QKV_Format_NOT_SET, bias_type, mask_type, softmax_type, window_size_left,
                      window_size_right, bottom_right_diagonal, deterministic, /*cuda_graph=*/false,
                      t.workspace.data(), nullptr);
  return t.sizes();
}

}  // namespace jax
}  // namespace tessera_names
}  // namespace transformer_engine

#endif /* TESSERA_NVTE_JAX_H_ */
