/* SPDX-License-Identifier: Apache-2.0
 *
 * TransformerEngine's names for attention, over tessera.h: a C++ source written against
 * transformer_engine/fused_attn.h compiles against this header, and links libtessera_nvte.
 *
 * The library exports tessera_nvte_x; the macros below let a source say nvte_x. With
 * TESSERA_NVTE_NO_NAMES defined there are no macros, so that a program may hold this library and
 * TransformerEngine's own; a source that includes the headers of both includes this one last.
 *
 * Functions are void where TransformerEngine's are: what is wrong is a std::runtime_error, thrown
 * before anything is computed. What each argument means, and what differs, is in docs/nvte.md.
 *
 * Where a call runs: on the CUDA device that owns Q's memory (or the output's, of functions without
 * Q), and on the CPU where no device does, or the build has no CUDA. Functions without such memory
 * speak of the current CUDA device, else of the CPU, which ignores every stream.
 */
#ifndef TESSERA_NVTE_H_
#define TESSERA_NVTE_H_

#ifndef __cplusplus
#error "tessera_nvte.h is C++, as TransformerEngine's functions throw; C programs use tessera.h"
#endif

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#define TESSERA_NVTE_API __attribute__((visibility("default")))

typedef struct CUstream_st* cudaStream_t; /* as in cuda_runtime_api.h, which is not needed */

/* Every int is a value of each enum below, so that one without a name can be refused. */

/* ---- tensors: transformer_engine/transformer_engine.h ---- */

#ifndef TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_

enum NVTEDType : int {
  kNVTEByte = 0,
  kNVTEInt16 = 1,
  kNVTEInt32 = 2,
  kNVTEInt64 = 3,
  kNVTEFloat32 = 4,
  kNVTEFloat16 = 5,
  kNVTEBFloat16 = 6,
  kNVTEFloat8E4M3 = 7,
  kNVTEFloat8E5M2 = 8,
  kNVTEFloat8E8M0 = 9,
  kNVTEFloat4E2M1 = 10,
  kNVTENumTypes
};

struct NVTEShape {
  size_t data[15];
  size_t ndim;
};

struct NVTEBasicTensor {
  void* data_ptr;
  NVTEDType dtype;
  NVTEShape shape;
};

enum NVTETensorParam : int {
  kNVTERowwiseData = 0,
  kNVTEColumnwiseData = 1,
  kNVTEScale = 2,
  kNVTEAmax = 3,
  kNVTERowwiseScaleInv = 4,
  kNVTEColumnwiseScaleInv = 5,
  kNVTEColumnwiseAmax = 6,
  kNVTEWithGEMMSwizzledScales = 7,
  kNVTERowScaledNVFP4 = 8,
  kNVTENVFP4E4M3Max = 9,
  kNVTENumTensorParams
};

/* Attention takes NVTE_DELAYED_TENSOR_SCALING, which is also that of 16-bit and fp32 tensors. */
enum NVTEScalingMode : int {
  NVTE_DELAYED_TENSOR_SCALING = 0,
  NVTE_MXFP8_1D_SCALING = 1,
  NVTE_BLOCK_SCALING_1D = 2,
  NVTE_BLOCK_SCALING_2D = 3,
  NVTE_NVFP4_1D_SCALING = 4,
  NVTE_INVALID_SCALING = 100
};

/* Shape, dtype and pointers; it owns no data. A tensor as it is created is empty: not given. */
typedef void* NVTETensor;

struct NVTETensorPack {
  static const int MAX_SIZE = 10;
  NVTETensor tensors[MAX_SIZE];
  size_t size = 0;
};

#endif /* TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_ */

/* ---- enums of attention: transformer_engine/fused_attn.h ---- */

/* The guard of 2.20.2, and that of earlier versions. */
#if !defined(TRANSFORMER_ENGINE_FUSED_ATTN_FP8_H_) && !defined(TRANSFORMER_ENGINE_FUSED_ATTN_H_)

enum NVTE_QKV_Layout : int {
  NVTE_SB3HD = 0,
  NVTE_SBH3D = 1,
  NVTE_SBHD_SB2HD = 2,
  NVTE_SBHD_SBH2D = 3,
  NVTE_SBHD_SBHD_SBHD = 4,
  NVTE_BS3HD = 5,
  NVTE_BSH3D = 6,
  NVTE_BSHD_BS2HD = 7,
  NVTE_BSHD_BSH2D = 8,
  NVTE_BSHD_BSHD_BSHD = 9,
  NVTE_T3HD = 10,
  NVTE_TH3D = 11,
  NVTE_THD_T2HD = 12,
  NVTE_THD_TH2D = 13,
  NVTE_THD_THD_THD = 14,
  NVTE_SBHD_BSHD_BSHD = 15,
  NVTE_BSHD_SBHD_SBHD = 16,
  NVTE_THD_BSHD_BSHD = 17,
  NVTE_THD_SBHD_SBHD = 18,
  NVTE_Paged_KV_BSHD_BSHD_BSHD = 19,
  NVTE_Paged_KV_BSHD_SBHD_SBHD = 20,
  NVTE_Paged_KV_SBHD_BSHD_BSHD = 21,
  NVTE_Paged_KV_SBHD_SBHD_SBHD = 22,
  NVTE_Paged_KV_THD_BSHD_BSHD = 23,
  NVTE_Paged_KV_THD_SBHD_SBHD = 24,
  NVTE_BHSD_BHSD_BHSD = 25,
  NVTE_QKV_Layout_NOT_SET
};

enum NVTE_QKV_Layout_Group : int {
  NVTE_3HD = 0,
  NVTE_H3D = 1,
  NVTE_HD_2HD = 2,
  NVTE_HD_H2D = 3,
  NVTE_HD_HD_HD = 4,
  NVTE_Paged_KV_HD_HD_HD = 5,
  NVTE_SD_SD_SD = 6
};

enum NVTE_QKV_Format : int {
  NVTE_SBHD = 0,
  NVTE_BSHD = 1,
  NVTE_THD = 2,
  NVTE_BSHD_2SBHD = 3,
  NVTE_SBHD_2BSHD = 4,
  NVTE_THD_2BSHD = 5,
  NVTE_THD_2SBHD = 6,
  NVTE_BHSD = 7,
  NVTE_QKV_Format_NOT_SET
};

enum NVTE_Bias_Type : int {
  NVTE_NO_BIAS = 0,
  NVTE_PRE_SCALE_BIAS = 1,
  NVTE_POST_SCALE_BIAS = 2,
  NVTE_ALIBI = 3
};

enum NVTE_Mask_Type : int {
  NVTE_NO_MASK = 0,
  NVTE_PADDING_MASK = 1,
  NVTE_CAUSAL_MASK = 2,
  NVTE_PADDING_CAUSAL_MASK = 3,
  NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4,
  NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5
};

enum NVTE_Softmax_Type : int {
  NVTE_VANILLA_SOFTMAX = 0,
  NVTE_OFF_BY_ONE_SOFTMAX = 1,
  NVTE_LEARNABLE_SOFTMAX = 2
};

enum NVTE_Fused_Attn_Backend : int {
  NVTE_No_Backend = -1,
  NVTE_F16_max512_seqlen = 0, /* of earlier versions; never an answer */
  NVTE_F16_arbitrary_seqlen = 1,
  NVTE_FP8 = 2
};

#endif /* no header of TransformerEngine's */

/* ---- names ---- */

#ifndef TESSERA_NVTE_NO_NAMES
#define nvte_create_tensor tessera_nvte_create_tensor
#define nvte_create_tensors tessera_nvte_create_tensors
#define nvte_destroy_tensor tessera_nvte_destroy_tensor
#define nvte_destroy_tensors tessera_nvte_destroy_tensors
#define nvte_set_tensor_param tessera_nvte_set_tensor_param
#define nvte_get_tensor_param tessera_nvte_get_tensor_param
#define nvte_set_tensor_param_v2 tessera_nvte_set_tensor_param_v2
#define nvte_get_tensor_param_v2 tessera_nvte_get_tensor_param_v2
#define nvte_tensor_type tessera_nvte_tensor_type
#define nvte_tensor_shape tessera_nvte_tensor_shape
#define nvte_tensor_ndims tessera_nvte_tensor_ndims
#define nvte_tensor_size tessera_nvte_tensor_size
#define nvte_tensor_numel tessera_nvte_tensor_numel
#define nvte_tensor_element_size tessera_nvte_tensor_element_size
#define nvte_tensor_size_bytes tessera_nvte_tensor_size_bytes
#define nvte_tensor_data tessera_nvte_tensor_data
#define nvte_tensor_amax tessera_nvte_tensor_amax
#define nvte_tensor_scale tessera_nvte_tensor_scale
#define nvte_tensor_scale_inv tessera_nvte_tensor_scale_inv
#define nvte_tensor_scaling_mode tessera_nvte_tensor_scaling_mode
#define nvte_make_shape tessera_nvte_make_shape
#define nvte_tensor_pack_create tessera_nvte_tensor_pack_create
#define nvte_tensor_pack_destroy tessera_nvte_tensor_pack_destroy
#define nvte_get_qkv_layout_group tessera_nvte_get_qkv_layout_group
#define nvte_get_qkv_format tessera_nvte_get_qkv_format
#define nvte_get_q_format tessera_nvte_get_q_format
#define nvte_get_kv_format tessera_nvte_get_kv_format
#define nvte_get_fused_attn_backend tessera_nvte_get_fused_attn_backend
#define nvte_fused_attn_fwd tessera_nvte_fused_attn_fwd
#define nvte_fused_attn_bwd tessera_nvte_fused_attn_bwd
#define nvte_populate_rng_state_async tessera_nvte_populate_rng_state_async
#define nvte_get_runtime_num_segments tessera_nvte_get_runtime_num_segments
#define nvte_extract_seed_and_offset tessera_nvte_extract_seed_and_offset
#define nvte_copy_to_kv_cache tessera_nvte_copy_to_kv_cache
#define nvte_convert_thd_to_bshd tessera_nvte_convert_thd_to_bshd
#define nvte_convert_bshd_to_thd tessera_nvte_convert_bshd_to_thd
#endif /* TESSERA_NVTE_NO_NAMES */

extern "C" {

/* ---- tensors. Getters of a null tensor answer as of an empty one ---- */

TESSERA_NVTE_API NVTETensor tessera_nvte_create_tensor(NVTEScalingMode scaling_mode);
TESSERA_NVTE_API void tessera_nvte_create_tensors(NVTEScalingMode scaling_mode, NVTETensor* tensors,
                                                  size_t num_tensors);
/* A null tensor is nothing to destroy. */
TESSERA_NVTE_API void tessera_nvte_destroy_tensor(NVTETensor tensor);
TESSERA_NVTE_API void tessera_nvte_destroy_tensors(NVTETensor* tensors, size_t num_tensors);

TESSERA_NVTE_API void tessera_nvte_set_tensor_param(NVTETensor* tensor, NVTETensorParam param_name,
                                                    const NVTEBasicTensor* param);
TESSERA_NVTE_API NVTEBasicTensor tessera_nvte_get_tensor_param(const NVTETensor tensor,
                                                               NVTETensorParam param_name);
/* The same through bytes: an NVTEBasicTensor, of kNVTEWithGEMMSwizzledScales and
 * kNVTERowScaledNVFP4 a uint8_t, of kNVTENVFP4E4M3Max an int. Attention reads none of them. */
TESSERA_NVTE_API void tessera_nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam param,
                                                       const void* buf, size_t size_in_bytes);
/* buf may be null: then the size alone is told. size_written may be null. */
TESSERA_NVTE_API void tessera_nvte_get_tensor_param_v2(const NVTETensor tensor,
                                                       NVTETensorParam param, void* buf,
                                                       size_t size_in_bytes, size_t* size_written);

TESSERA_NVTE_API NVTEDType tessera_nvte_tensor_type(const NVTETensor tensor);
TESSERA_NVTE_API NVTEShape tessera_nvte_tensor_shape(const NVTETensor tensor);
TESSERA_NVTE_API size_t tessera_nvte_tensor_ndims(const NVTETensor tensor);
TESSERA_NVTE_API size_t tessera_nvte_tensor_size(const NVTETensor tensor, const size_t dim);
TESSERA_NVTE_API size_t tessera_nvte_tensor_numel(const NVTETensor tensor);
TESSERA_NVTE_API size_t tessera_nvte_tensor_element_size(const NVTETensor tensor); /* bytes */
TESSERA_NVTE_API size_t tessera_nvte_tensor_size_bytes(const NVTETensor tensor);
TESSERA_NVTE_API void* tessera_nvte_tensor_data(const NVTETensor tensor);
TESSERA_NVTE_API float* tessera_nvte_tensor_amax(const NVTETensor tensor);
TESSERA_NVTE_API float* tessera_nvte_tensor_scale(const NVTETensor tensor);
TESSERA_NVTE_API float* tessera_nvte_tensor_scale_inv(const NVTETensor tensor);
TESSERA_NVTE_API NVTEScalingMode tessera_nvte_tensor_scaling_mode(const NVTETensor tensor);
TESSERA_NVTE_API NVTEShape tessera_nvte_make_shape(const size_t* data, size_t ndim);

/* MAX_SIZE empty tensors. */
TESSERA_NVTE_API void tessera_nvte_tensor_pack_create(NVTETensorPack* pack);
TESSERA_NVTE_API void tessera_nvte_tensor_pack_destroy(NVTETensorPack* pack);

/* ---- layouts: maps without a device ---- */

TESSERA_NVTE_API NVTE_QKV_Layout_Group
tessera_nvte_get_qkv_layout_group(NVTE_QKV_Layout qkv_layout);
TESSERA_NVTE_API NVTE_QKV_Format tessera_nvte_get_qkv_format(NVTE_QKV_Layout qkv_layout);
TESSERA_NVTE_API NVTE_QKV_Format tessera_nvte_get_q_format(NVTE_QKV_Layout qkv_layout);
TESSERA_NVTE_API NVTE_QKV_Format tessera_nvte_get_kv_format(NVTE_QKV_Layout qkv_layout);

/* ---- attention: the first generation, which TransformerEngine 2.20 calls deprecated. The second
 * is in tessera_nvte_params.h ---- */

/* NVTE_FP8 for fp8 q, else NVTE_F16_arbitrary_seqlen (fp32 too), where a backend of tessera's runs
 * a batch of one sequence, with is_training its backward pass too; else NVTE_No_Backend, and the
 * reasons go to tessera_set_log under "dispatch". */
TESSERA_NVTE_API NVTE_Fused_Attn_Backend tessera_nvte_get_fused_attn_backend(
    bool is_training, NVTEDType q_dtype, NVTEDType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    float dropout, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, int64_t window_size_left,
    int64_t window_size_right, bool return_max_logit, bool cuda_graph, bool deterministic);

/* Two calls. Where workspace has no data the call computes nothing: it gives workspace a shape in
 * bytes and, if Aux_CTX_Tensors->size is 0, the pack its tensors: Stats fp32 [b, h, sq, 1] (thd
 * [h, tq, 1]), with return_max_logit Max fp32 [1, h, 1, 1] (thd [1, h, 1]), rng_state int64 [2],
 * Bias and SoftmaxOffset where their types read them. The second call needs memory for workspace,
 * Stats and Max; the other tensors of the pack are set to the call's own inputs. Without
 * is_training dropout is off, and Stats may stay without memory, or the pack empty. */
TESSERA_NVTE_API void tessera_nvte_fused_attn_fwd(
    const NVTETensor Q, const NVTETensor K, const NVTETensor V, const NVTETensor Bias,
    const NVTETensor SoftmaxOffset, NVTETensor S, NVTETensor O, NVTETensorPack* Aux_CTX_Tensors,
    const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
    const NVTETensor cu_seqlens_q_padded, const NVTETensor cu_seqlens_kv_padded,
    const NVTETensor page_table_k, const NVTETensor page_table_v, const NVTETensor rng_state,
    size_t max_seqlen_q, size_t max_seqlen_kv, bool is_training, bool return_max_logit,
    bool cuda_graph, float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout,
    NVTE_QKV_Format o_format, NVTE_QKV_Format qkv_scale_inv_format, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, NVTETensor workspace,
    cudaStream_t stream);

/* Two calls likewise. Aux_CTX_Tensors is the pack of the forward pass, with or without Max. An
 * empty dBias or dSoftmaxOffset is not computed. */
TESSERA_NVTE_API void tessera_nvte_fused_attn_bwd(
    const NVTETensor Q, const NVTETensor K, const NVTETensor V, const NVTETensor O,
    const NVTETensor dO, const NVTETensor S, NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors,
    NVTETensor dQ, NVTETensor dK, NVTETensor dV, NVTETensor dBias, NVTETensor dSoftmaxOffset,
    const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
    const NVTETensor cu_seqlens_q_padded, const NVTETensor cu_seqlens_kv_padded,
    size_t max_seqlen_q, size_t max_seqlen_kv, float attn_scale, float dropout,
    NVTE_QKV_Layout qkv_layout, NVTE_QKV_Format o_format, NVTE_QKV_Format do_format,
    NVTE_QKV_Layout dqkv_layout, NVTE_QKV_Format qkv_scale_inv_format,
    NVTE_QKV_Format do_scale_inv_format, NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type,
    NVTE_Softmax_Type softmax_type, int64_t window_size_left, int64_t window_size_right,
    bool bottom_right_diagonal, bool deterministic, bool cuda_graph, NVTETensor workspace,
    cudaStream_t stream);

/* ---- random state ---- */

/* rng_state_dst, int64 [2]: the first eight bytes of seed, and an offset that no other call of this
 * process gets. */
TESSERA_NVTE_API void tessera_nvte_populate_rng_state_async(
    NVTETensor rng_state_dst, const NVTETensor seed, size_t q_max_seqlen, size_t kv_max_seqlen,
    NVTE_Fused_Attn_Backend backend, cudaStream_t stream);

/* rng_state_ptr[0..1]: *seed_ptr and *offset_ptr + offset_intragraph where `captured`, else
 * seed_val and offset_val. */
TESSERA_NVTE_API void tessera_nvte_extract_seed_and_offset(int64_t* rng_state_ptr, int captured,
                                                           int64_t* seed_ptr, uint64_t seed_val,
                                                           int64_t* offset_ptr, uint64_t offset_val,
                                                           uint32_t offset_intragraph,
                                                           cudaStream_t stream);

/* How many of the first len entries of cu_seqlen, int32, are positive. It waits for the stream;
 * workspace is not used. */
TESSERA_NVTE_API uint32_t tessera_nvte_get_runtime_num_segments(NVTETensor cu_seqlen,
                                                                NVTETensor workspace, size_t len,
                                                                cudaStream_t stream);

/* ---- caches ---- */

/* The new tokens of each sequence go behind those that the caches hold. new_k, new_v: qkv_format
 * (bshd, sbhd: max_ctx_len tokens, thd). Caches: [b, max_seq_len, h, d], or pages
 * [pages, max_seq_len / max_pages_per_seq, h, d] under page_table int32 [b, max_pages_per_seq].
 * cu_new_lens, cu_cached_lens: int32 [b + 1], the latter with the new tokens. Without pages
 * page_table [b, 1] says in which row a sequence was: it is moved to row i first. A token without a
 * place is an error on the CPU, and dropped on CUDA. */
TESSERA_NVTE_API void tessera_nvte_copy_to_kv_cache(
    NVTETensor new_k, NVTETensor new_v, NVTETensor k_cache, NVTETensor v_cache,
    NVTETensor page_table, NVTETensor cu_new_lens, NVTETensor cu_cached_lens,
    NVTE_QKV_Format qkv_format, int b, int max_ctx_len, int max_seq_len, int max_pages_per_seq,
    int is_non_paged, cudaStream_t stream);

/* tensor [t, h, d] <-> new_tensor [b, max_seq_len, h, d]; what lies behind a sequence stays. */
TESSERA_NVTE_API void tessera_nvte_convert_thd_to_bshd(NVTETensor tensor, NVTETensor cu_seqlens,
                                                       NVTETensor new_tensor, int b,
                                                       int max_seq_len, cudaStream_t stream);
TESSERA_NVTE_API void tessera_nvte_convert_bshd_to_thd(NVTETensor tensor, NVTETensor cu_seqlens,
                                                       NVTETensor new_tensor, int t,
                                                       cudaStream_t stream);

} /* extern "C" */

#include "tessera_nvte_params.h"
#include "tessera_nvte_tokens.h"

/* ---- the C++ of transformer_engine.h ---- */

#if !defined(TESSERA_NVTE_NO_NAMES) && !defined(TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_)

namespace transformer_engine {
/* Inline functions of one name and two bodies must not meet in a program: these have names of their
 * own to the linker. */
inline namespace tessera_names {

enum class DType {
  kByte = 0,
  kInt16 = 1,
  kInt32 = 2,
  kInt64 = 3,
  kFloat32 = 4,
  kFloat16 = 5,
  kBFloat16 = 6,
  kFloat8E4M3 = 7,
  kFloat8E5M2 = 8,
  kFloat8E8M0 = 9,
  kFloat4E2M1 = 10,
  kNumTypes
};

/* A tensor that destroys itself; the data is the caller's. */
class TensorWrapper {
 public:
  explicit TensorWrapper(NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : tensor_(tessera_nvte_create_tensor(scaling_mode)) {}
  TensorWrapper(void* dptr, const NVTEShape& shape, DType dtype, float* amax = nullptr,
                float* scale = nullptr, float* scale_inv = nullptr)
      : TensorWrapper() {
    const NVTEShape one{{1}, 1};
    set(kNVTERowwiseData, {dptr, static_cast<NVTEDType>(dtype), shape});
    if (amax) set(kNVTEAmax, {amax, kNVTEFloat32, one});
    if (scale) set(kNVTEScale, {scale, kNVTEFloat32, one});
    if (scale_inv) set(kNVTERowwiseScaleInv, {scale_inv, kNVTEFloat32, one});
  }
  TensorWrapper(void* dptr, const std::vector<size_t>& shape, DType dtype, float* amax = nullptr,
                float* scale = nullptr, float* scale_inv = nullptr)
      : TensorWrapper(dptr, tessera_nvte_make_shape(shape.data(), shape.size()), dtype, amax, scale,
                      scale_inv) {}
  ~TensorWrapper() { tessera_nvte_destroy_tensor(tensor_); }
  TensorWrapper(const TensorWrapper&) = delete;
  TensorWrapper& operator=(const TensorWrapper&) = delete;
  TensorWrapper(TensorWrapper&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  TensorWrapper& operator=(TensorWrapper&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }

  NVTETensor data() const noexcept { return tensor_; }
  NVTEShape shape() const noexcept { return tessera_nvte_tensor_shape(tensor_); }
  size_t ndim() const noexcept { return tessera_nvte_tensor_ndims(tensor_); }
  size_t size(size_t dim) const { return tessera_nvte_tensor_size(tensor_, dim); }
  size_t numel() const noexcept { return tessera_nvte_tensor_numel(tensor_); }
  size_t element_size() const noexcept { return tessera_nvte_tensor_element_size(tensor_); }
  size_t bytes() const noexcept { return tessera_nvte_tensor_size_bytes(tensor_); }
  DType dtype() const noexcept { return static_cast<DType>(tessera_nvte_tensor_type(tensor_)); }
  void* dptr() const noexcept { return tessera_nvte_tensor_data(tensor_); }
  float* amax() const noexcept { return tessera_nvte_tensor_amax(tensor_); }
  float* scale() const noexcept { return tessera_nvte_tensor_scale(tensor_); }
  float* scale_inv() const noexcept { return tessera_nvte_tensor_scale_inv(tensor_); }
  NVTEScalingMode scaling_mode() const noexcept {
    return tessera_nvte_tensor_scaling_mode(tensor_);
  }

 private:
  void set(NVTETensorParam param, const NVTEBasicTensor& value) {
    tessera_nvte_set_tensor_param(&tensor_, param, &value);
  }
  NVTETensor tensor_;
};

}  // namespace tessera_names
}  // namespace transformer_engine

#endif /* names and no header of TransformerEngine's */

#endif /* TESSERA_NVTE_H_ */
