/* SPDX-License-Identifier: Apache-2.0
 *
 * The second generation of TransformerEngine's attention calls (2.20.2), part of tessera_nvte.h,
 * which includes it: arguments lie behind an opaque handle and are set one by one, as attributes
 * with numbers. Numbers are TransformerEngine's and never change; a later version appends.
 *
 * A handle belongs to one thread at a time. It owns no tensor: those that it names must live until
 * the call. What is not set has TransformerEngine's default: a tensor is not given, a layout or
 * format is NOT_SET, a number is 0, windows are -1, bottom_right_diagonal and is_training are
 * true, attn_scale is 1, dtypes are kNVTEBFloat16.
 */
#ifndef TESSERA_NVTE_PARAMS_H_
#define TESSERA_NVTE_PARAMS_H_

#ifndef TESSERA_NVTE_H_
#error "include tessera_nvte.h, of which this is a part"
#endif

#ifndef TRANSFORMER_ENGINE_FUSED_ATTN_H_

typedef void* NVTEFusedAttnConfig;
typedef void* NVTEFusedAttnFwdParams;
typedef void* NVTEFusedAttnBwdParams;

/* Values of attributes: bool as uint8_t, lengths and counts as size_t, windows as int64_t, dropout
 * and attn_scale as float, enums as themselves, tensors, packs and streams as handles. */

enum NVTEFusedAttnConfigAttribute : int {
  kNVTEFusedAttnConfigIsTraining = 0,
  kNVTEFusedAttnConfigDeterministic = 1,
  kNVTEFusedAttnConfigCudaGraph = 2,
  kNVTEFusedAttnConfigReturnMaxLogit = 3,
  kNVTEFusedAttnConfigAttnMaskType = 4,
  kNVTEFusedAttnConfigBiasType = 5,
  kNVTEFusedAttnConfigWindowSizeLeft = 6,
  kNVTEFusedAttnConfigWindowSizeRight = 7,
  kNVTEFusedAttnConfigBottomRightDiagonal = 8,
  kNVTEFusedAttnConfigSoftmaxType = 9,
  kNVTEFusedAttnConfigScalingMode = 10,
  kNVTEFusedAttnConfigDropout = 11,
  kNVTEFusedAttnConfigAttnScale = 12,
  kNVTEFusedAttnConfigQKVDtype = 13,
  kNVTEFusedAttnConfigODtype = 14,
  kNVTEFusedAttnConfigDODtype = 15,
  kNVTEFusedAttnConfigDQKVDtype = 16,
  kNVTEFusedAttnConfigQKVLayout = 17,
  kNVTEFusedAttnConfigOFormat = 18,
  kNVTEFusedAttnConfigDOFormat = 19,
  kNVTEFusedAttnConfigDQKVLayout = 20,
  kNVTEFusedAttnConfigQKVScaleInvFormat = 21,
  kNVTEFusedAttnConfigDOScaleInvFormat = 22,
  kNVTEFusedAttnConfigBatchSize = 23,
  kNVTEFusedAttnConfigNumAttnHeads = 24,
  kNVTEFusedAttnConfigNumGQAGroups = 25,
  kNVTEFusedAttnConfigHeadDimQK = 26,
  kNVTEFusedAttnConfigHeadDimV = 27,
  kNVTEFusedAttnConfigMaxSeqlenQ = 28,
  kNVTEFusedAttnConfigMaxSeqlenKV = 29,
  kNVTEFusedAttnConfigNumTokensQ = 30,
  kNVTEFusedAttnConfigNumTokensKV = 31,
  kNVTEFusedAttnConfigNumPagesK = 32,
  kNVTEFusedAttnConfigNumPagesV = 33,
  kNVTEFusedAttnConfigPageSizeK = 34,
  kNVTEFusedAttnConfigPageSizeV = 35,
  kNVTEFusedAttnConfigMaxPagesPerSeqK = 36,
  kNVTEFusedAttnConfigMaxPagesPerSeqV = 37,
  kNVTEFusedAttnConfigBiasBatchSize = 38,
  kNVTEFusedAttnConfigBiasNumHeads = 39,
  kNVTEFusedAttnConfigBiasSeqlenQ = 40,
  kNVTEFusedAttnConfigBiasSeqlenKV = 41,
  kNVTEFusedAttnConfigNumAttributes
};

enum NVTEFusedAttnFwdParamsAttribute : int {
  kNVTEFusedAttnFwdParamsQ = 0,
  kNVTEFusedAttnFwdParamsK = 1,
  kNVTEFusedAttnFwdParamsV = 2,
  kNVTEFusedAttnFwdParamsBias = 3,
  kNVTEFusedAttnFwdParamsSoftmaxOffset = 4,
  kNVTEFusedAttnFwdParamsS = 5,
  kNVTEFusedAttnFwdParamsO = 6,
  kNVTEFusedAttnFwdParamsAuxCtxTensors = 7,
  kNVTEFusedAttnFwdParamsCuSeqlensQ = 8,
  kNVTEFusedAttnFwdParamsCuSeqlensKV = 9,
  kNVTEFusedAttnFwdParamsCuSeqlensQPadded = 10,
  kNVTEFusedAttnFwdParamsCuSeqlensKVPadded = 11,
  kNVTEFusedAttnFwdParamsPageTableK = 12,
  kNVTEFusedAttnFwdParamsPageTableV = 13,
  kNVTEFusedAttnFwdParamsRngState = 14,
  kNVTEFusedAttnFwdParamsIsTraining = 15,
  kNVTEFusedAttnFwdParamsCudaGraph = 16,
  kNVTEFusedAttnFwdParamsReturnMaxLogit = 17,
  kNVTEFusedAttnFwdParamsAttnMaskType = 18,
  kNVTEFusedAttnFwdParamsBiasType = 19,
  kNVTEFusedAttnFwdParamsWindowSizeLeft = 20,
  kNVTEFusedAttnFwdParamsWindowSizeRight = 21,
  kNVTEFusedAttnFwdParamsBottomRightDiagonal = 22,
  kNVTEFusedAttnFwdParamsSoftmaxType = 23,
  kNVTEFusedAttnFwdParamsDropout = 24,
  kNVTEFusedAttnFwdParamsAttnScale = 25,
  kNVTEFusedAttnFwdParamsQKVLayout = 26,
  kNVTEFusedAttnFwdParamsOFormat = 27,
  kNVTEFusedAttnFwdParamsQKVScaleInvFormat = 28,
  kNVTEFusedAttnFwdParamsMaxSeqlenQ = 29,
  kNVTEFusedAttnFwdParamsMaxSeqlenKV = 30,
  kNVTEFusedAttnFwdParamsWorkspace = 31,
  kNVTEFusedAttnFwdParamsStream = 32,
  kNVTEFusedAttnFwdParamsNumAttributes
};

enum NVTEFusedAttnBwdParamsAttribute : int {
  kNVTEFusedAttnBwdParamsQ = 0,
  kNVTEFusedAttnBwdParamsK = 1,
  kNVTEFusedAttnBwdParamsV = 2,
  kNVTEFusedAttnBwdParamsO = 3,
  kNVTEFusedAttnBwdParamsDO = 4,
  kNVTEFusedAttnBwdParamsS = 5,
  kNVTEFusedAttnBwdParamsDP = 6,
  kNVTEFusedAttnBwdParamsAuxCtxTensors = 7,
  kNVTEFusedAttnBwdParamsDQ = 8,
  kNVTEFusedAttnBwdParamsDK = 9,
  kNVTEFusedAttnBwdParamsDV = 10,
  kNVTEFusedAttnBwdParamsDBias = 11,
  kNVTEFusedAttnBwdParamsDSoftmaxOffset = 12,
  kNVTEFusedAttnBwdParamsCuSeqlensQ = 13,
  kNVTEFusedAttnBwdParamsCuSeqlensKV = 14,
  kNVTEFusedAttnBwdParamsCuSeqlensQPadded = 15,
  kNVTEFusedAttnBwdParamsCuSeqlensKVPadded = 16,
  kNVTEFusedAttnBwdParamsDeterministic = 17,
  kNVTEFusedAttnBwdParamsCudaGraph = 18,
  kNVTEFusedAttnBwdParamsAttnMaskType = 19,
  kNVTEFusedAttnBwdParamsBiasType = 20,
  kNVTEFusedAttnBwdParamsWindowSizeLeft = 21,
  kNVTEFusedAttnBwdParamsWindowSizeRight = 22,
  kNVTEFusedAttnBwdParamsBottomRightDiagonal = 23,
  kNVTEFusedAttnBwdParamsSoftmaxType = 24,
  kNVTEFusedAttnBwdParamsDropout = 25,
  kNVTEFusedAttnBwdParamsAttnScale = 26,
  kNVTEFusedAttnBwdParamsQKVLayout = 27,
  kNVTEFusedAttnBwdParamsOFormat = 28,
  kNVTEFusedAttnBwdParamsDOFormat = 29,
  kNVTEFusedAttnBwdParamsDQKVLayout = 30,
  kNVTEFusedAttnBwdParamsQKVScaleInvFormat = 31,
  kNVTEFusedAttnBwdParamsDOScaleInvFormat = 32,
  kNVTEFusedAttnBwdParamsMaxSeqlenQ = 33,
  kNVTEFusedAttnBwdParamsMaxSeqlenKV = 34,
  kNVTEFusedAttnBwdParamsWorkspace = 35,
  kNVTEFusedAttnBwdParamsStream = 36,
  kNVTEFusedAttnBwdParamsNumAttributes
};

#endif /* TRANSFORMER_ENGINE_FUSED_ATTN_H_ */

#ifndef TESSERA_NVTE_NO_NAMES
#define nvte_create_fused_attn_config tessera_nvte_create_fused_attn_config
#define nvte_destroy_fused_attn_config tessera_nvte_destroy_fused_attn_config
#define nvte_get_fused_attn_config_attribute tessera_nvte_get_fused_attn_config_attribute
#define nvte_set_fused_attn_config_attribute tessera_nvte_set_fused_attn_config_attribute
#define nvte_create_fused_attn_fwd_params tessera_nvte_create_fused_attn_fwd_params
#define nvte_destroy_fused_attn_fwd_params tessera_nvte_destroy_fused_attn_fwd_params
#define nvte_get_fused_attn_fwd_params_attribute tessera_nvte_get_fused_attn_fwd_params_attribute
#define nvte_set_fused_attn_fwd_params_attribute tessera_nvte_set_fused_attn_fwd_params_attribute
#define nvte_create_fused_attn_bwd_params tessera_nvte_create_fused_attn_bwd_params
#define nvte_destroy_fused_attn_bwd_params tessera_nvte_destroy_fused_attn_bwd_params
#define nvte_get_fused_attn_bwd_params_attribute tessera_nvte_get_fused_attn_bwd_params_attribute
#define nvte_set_fused_attn_bwd_params_attribute tessera_nvte_set_fused_attn_bwd_params_attribute
#define nvte_get_fused_attn_backend_v2 tessera_nvte_get_fused_attn_backend_v2
#define nvte_fused_attn_fwd_v2 tessera_nvte_fused_attn_fwd_v2
#define nvte_fused_attn_bwd_v2 tessera_nvte_fused_attn_bwd_v2
#endif /* TESSERA_NVTE_NO_NAMES */

extern "C" {

/* Getters: buf may be null, then the size alone is told; size_written may be null. A buffer that is
 * too small for the attribute is an error, of getters and setters. A null handle is nothing to
 * destroy, and otherwise an error. */

TESSERA_NVTE_API NVTEFusedAttnConfig tessera_nvte_create_fused_attn_config(void);
TESSERA_NVTE_API void tessera_nvte_destroy_fused_attn_config(NVTEFusedAttnConfig config);
TESSERA_NVTE_API void tessera_nvte_get_fused_attn_config_attribute(
    NVTEFusedAttnConfig config, NVTEFusedAttnConfigAttribute attr, void* buf, size_t size_in_bytes,
    size_t* size_written);
TESSERA_NVTE_API void tessera_nvte_set_fused_attn_config_attribute(
    NVTEFusedAttnConfig config, NVTEFusedAttnConfigAttribute attr, const void* buf,
    size_t size_in_bytes);

TESSERA_NVTE_API NVTEFusedAttnFwdParams tessera_nvte_create_fused_attn_fwd_params(void);
TESSERA_NVTE_API void tessera_nvte_destroy_fused_attn_fwd_params(NVTEFusedAttnFwdParams params);
TESSERA_NVTE_API void tessera_nvte_get_fused_attn_fwd_params_attribute(
    NVTEFusedAttnFwdParams params, NVTEFusedAttnFwdParamsAttribute attr, void* buf,
    size_t size_in_bytes, size_t* size_written);
TESSERA_NVTE_API void tessera_nvte_set_fused_attn_fwd_params_attribute(
    NVTEFusedAttnFwdParams params, NVTEFusedAttnFwdParamsAttribute attr, const void* buf,
    size_t size_in_bytes);

TESSERA_NVTE_API NVTEFusedAttnBwdParams tessera_nvte_create_fused_attn_bwd_params(void);
TESSERA_NVTE_API void tessera_nvte_destroy_fused_attn_bwd_params(NVTEFusedAttnBwdParams params);
TESSERA_NVTE_API void tessera_nvte_get_fused_attn_bwd_params_attribute(
    NVTEFusedAttnBwdParams params, NVTEFusedAttnBwdParamsAttribute attr, void* buf,
    size_t size_in_bytes, size_t* size_written);
TESSERA_NVTE_API void tessera_nvte_set_fused_attn_bwd_params_attribute(
    NVTEFusedAttnBwdParams params, NVTEFusedAttnBwdParamsAttribute attr, const void* buf,
    size_t size_in_bytes);

/* As nvte_get_fused_attn_backend, of the batch, the dtypes, the pages and the bias that the config
 * tells; what is 0 there is one sequence, max_seqlen tokens of each, pages of 64 tokens, a bias of
 * the scores' shape. *message: empty, or every backend's reasons, or what is wrong with the config;
 * it lives until this thread's next call. message may be null. Only a null config throws. */
TESSERA_NVTE_API NVTE_Fused_Attn_Backend
tessera_nvte_get_fused_attn_backend_v2(NVTEFusedAttnConfig cfg, const char** message);

/* nvte_fused_attn_fwd and _bwd of the same arguments, to the last bit, by the same two calls. A
 * tensor that is not set is an empty one. A dqkv_layout that is not set is qkv_layout. */
TESSERA_NVTE_API void tessera_nvte_fused_attn_fwd_v2(NVTEFusedAttnFwdParams params);
TESSERA_NVTE_API void tessera_nvte_fused_attn_bwd_v2(NVTEFusedAttnBwdParams params);

} /* extern "C" */

/* ---- the C++ of fused_attn.h, in the global namespace as there ---- */

#if !defined(TESSERA_NVTE_NO_NAMES) && !defined(TRANSFORMER_ENGINE_FUSED_ATTN_H_)

/* Inline functions of one name and two bodies must not meet in a program: these have names of their
 * own to the linker. */
inline namespace tessera_nvte_names {

/* The extents of a tensor in one format, to be read in another. */
class AttentionShape {
 public:
  AttentionShape(NVTE_QKV_Format fmt, const size_t* shape) {
    const char* const axes = axes_of(fmt);
    for (size_t i = 0; axes[i]; ++i) extents_[index_of(axes[i])] = shape[i];
  }
  size_t b() const { return extents_[0]; }
  size_t h() const { return extents_[1]; }
  size_t s() const { return extents_[2]; }
  size_t d() const { return extents_[3]; }
  size_t t() const { return extents_[4]; }
  void to_format(NVTE_QKV_Format dst_fmt, size_t* dst_shape) const {
    const char* const axes = axes_of(dst_fmt);
    for (size_t i = 0; axes[i]; ++i) dst_shape[i] = extents_[index_of(axes[i])];
  }

 private:
  /* A format of two tensors has no axes. */
  static const char* axes_of(NVTE_QKV_Format format) {
    return format == NVTE_BSHD   ? "bshd"
           : format == NVTE_SBHD ? "sbhd"
           : format == NVTE_BHSD ? "bhsd"
           : format == NVTE_THD  ? "thd"
                                 : "";
  }
  static size_t index_of(char axis) {
    return axis == 'b' ? 0 : axis == 'h' ? 1 : axis == 's' ? 2 : axis == 'd' ? 3 : 4;
  }
  size_t extents_[5] = {}; /* b, h, s, d, t */
};

/* A handle that destroys itself. */
template <typename Wrapper, typename Attribute, void* (*kCreate)(), void (*kDestroy)(void*),
          void (*kSet)(void*, Attribute, const void*, size_t)>
class FusedAttnHandle {
 public:
  FusedAttnHandle() : handle_(kCreate()) {}
  ~FusedAttnHandle() { kDestroy(handle_); }
  FusedAttnHandle(const FusedAttnHandle&) = delete;
  FusedAttnHandle& operator=(const FusedAttnHandle&) = delete;
  FusedAttnHandle(FusedAttnHandle&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)) {}
  FusedAttnHandle& operator=(FusedAttnHandle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  operator void*() const noexcept { return handle_; }
  void* get() const noexcept { return handle_; }

 protected:
  template <typename Value>
  Wrapper& set(Attribute attribute, Value value) {
    static_assert(sizeof(bool) == 1, "flags are a byte");
    kSet(handle_, attribute, &value, sizeof value);
    return static_cast<Wrapper&>(*this);
  }

 private:
  void* handle_;
};

/* set_x(value) of an attribute; each answers the wrapper, so that calls can be chained. */
#define TESSERA_NVTE_SETTER(handle, type, name, attribute) \
  FusedAttn##handle##Wrapper& set_##name(type val) {       \
    return set(kNVTEFusedAttn##handle##attribute, val);    \
  }

class FusedAttnConfigWrapper
    : public FusedAttnHandle<FusedAttnConfigWrapper, NVTEFusedAttnConfigAttribute,
                             tessera_nvte_create_fused_attn_config,
                             tessera_nvte_destroy_fused_attn_config,
                             tessera_nvte_set_fused_attn_config_attribute> {
 public:
  TESSERA_NVTE_SETTER(Config, bool, is_training, IsTraining)
  TESSERA_NVTE_SETTER(Config, bool, deterministic, Deterministic)
  TESSERA_NVTE_SETTER(Config, bool, cuda_graph, CudaGraph)
  TESSERA_NVTE_SETTER(Config, bool, return_max_logit, ReturnMaxLogit)
  TESSERA_NVTE_SETTER(Config, NVTE_Mask_Type, attn_mask_type, AttnMaskType)
  TESSERA_NVTE_SETTER(Config, NVTE_Bias_Type, bias_type, BiasType)
  TESSERA_NVTE_SETTER(Config, int64_t, window_size_left, WindowSizeLeft)
  TESSERA_NVTE_SETTER(Config, int64_t, window_size_right, WindowSizeRight)
  TESSERA_NVTE_SETTER(Config, bool, bottom_right_diagonal, BottomRightDiagonal)
  TESSERA_NVTE_SETTER(Config, NVTE_Softmax_Type, softmax_type, SoftmaxType)
  TESSERA_NVTE_SETTER(Config, NVTEScalingMode, scaling_mode, ScalingMode)
  TESSERA_NVTE_SETTER(Config, float, dropout, Dropout)
  TESSERA_NVTE_SETTER(Config, float, attn_scale, AttnScale)
  TESSERA_NVTE_SETTER(Config, NVTEDType, qkv_dtype, QKVDtype)
  TESSERA_NVTE_SETTER(Config, NVTEDType, o_dtype, ODtype)
  TESSERA_NVTE_SETTER(Config, NVTEDType, do_dtype, DODtype)
  TESSERA_NVTE_SETTER(Config, NVTEDType, dqkv_dtype, DQKVDtype)
  TESSERA_NVTE_SETTER(Config, NVTE_QKV_Layout, qkv_layout, QKVLayout)
  TESSERA_NVTE_SETTER(Config, NVTE_QKV_Format, o_format, OFormat)
  TESSERA_NVTE_SETTER(Config, NVTE_QKV_Format, do_format, DOFormat)
  TESSERA_NVTE_SETTER(Config, NVTE_QKV_Layout, dqkv_layout, DQKVLayout)
  TESSERA_NVTE_SETTER(Config, NVTE_QKV_Format, qkv_scale_inv_format, QKVScaleInvFormat)
  TESSERA_NVTE_SETTER(Config, NVTE_QKV_Format, do_scale_inv_format, DOScaleInvFormat)
  TESSERA_NVTE_SETTER(Config, size_t, batch_size, BatchSize)
  TESSERA_NVTE_SETTER(Config, size_t, num_attn_heads, NumAttnHeads)
  TESSERA_NVTE_SETTER(Config, size_t, num_gqa_groups, NumGQAGroups)
  TESSERA_NVTE_SETTER(Config, size_t, head_dim_qk, HeadDimQK)
  TESSERA_NVTE_SETTER(Config, size_t, head_dim_v, HeadDimV)
  TESSERA_NVTE_SETTER(Config, size_t, max_seqlen_q, MaxSeqlenQ)
  TESSERA_NVTE_SETTER(Config, size_t, max_seqlen_kv, MaxSeqlenKV)
  TESSERA_NVTE_SETTER(Config, size_t, num_tokens_q, NumTokensQ)
  TESSERA_NVTE_SETTER(Config, size_t, num_tokens_kv, NumTokensKV)
  TESSERA_NVTE_SETTER(Config, size_t, num_pages_k, NumPagesK)
  TESSERA_NVTE_SETTER(Config, size_t, num_pages_v, NumPagesV)
  TESSERA_NVTE_SETTER(Config, size_t, page_size_k, PageSizeK)
  TESSERA_NVTE_SETTER(Config, size_t, page_size_v, PageSizeV)
  TESSERA_NVTE_SETTER(Config, size_t, max_pages_per_seq_k, MaxPagesPerSeqK)
  TESSERA_NVTE_SETTER(Config, size_t, max_pages_per_seq_v, MaxPagesPerSeqV)
  TESSERA_NVTE_SETTER(Config, size_t, bias_batch_size, BiasBatchSize)
  TESSERA_NVTE_SETTER(Config, size_t, bias_num_heads, BiasNumHeads)
  TESSERA_NVTE_SETTER(Config, size_t, bias_seqlen_q, BiasSeqlenQ)
  TESSERA_NVTE_SETTER(Config, size_t, bias_seqlen_kv, BiasSeqlenKV)
};

class FusedAttnFwdParamsWrapper
    : public FusedAttnHandle<FusedAttnFwdParamsWrapper, NVTEFusedAttnFwdParamsAttribute,
                             tessera_nvte_create_fused_attn_fwd_params,
                             tessera_nvte_destroy_fused_attn_fwd_params,
                             tessera_nvte_set_fused_attn_fwd_params_attribute> {
 public:
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, Q, Q)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, K, K)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, V, V)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, Bias, Bias)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, SoftmaxOffset, SoftmaxOffset)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, S, S)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, O, O)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensorPack*, Aux_CTX_Tensors, AuxCtxTensors)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, cu_seqlens_q, CuSeqlensQ)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, cu_seqlens_kv, CuSeqlensKV)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, cu_seqlens_q_padded, CuSeqlensQPadded)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, cu_seqlens_kv_padded, CuSeqlensKVPadded)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, page_table_k, PageTableK)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, page_table_v, PageTableV)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, rng_state, RngState)
  TESSERA_NVTE_SETTER(FwdParams, bool, is_training, IsTraining)
  TESSERA_NVTE_SETTER(FwdParams, bool, cuda_graph, CudaGraph)
  TESSERA_NVTE_SETTER(FwdParams, bool, return_max_logit, ReturnMaxLogit)
  TESSERA_NVTE_SETTER(FwdParams, NVTE_Mask_Type, attn_mask_type, AttnMaskType)
  TESSERA_NVTE_SETTER(FwdParams, NVTE_Bias_Type, bias_type, BiasType)
  TESSERA_NVTE_SETTER(FwdParams, int64_t, window_size_left, WindowSizeLeft)
  TESSERA_NVTE_SETTER(FwdParams, int64_t, window_size_right, WindowSizeRight)
  TESSERA_NVTE_SETTER(FwdParams, bool, bottom_right_diagonal, BottomRightDiagonal)
  TESSERA_NVTE_SETTER(FwdParams, NVTE_Softmax_Type, softmax_type, SoftmaxType)
  TESSERA_NVTE_SETTER(FwdParams, float, dropout, Dropout)
  TESSERA_NVTE_SETTER(FwdParams, float, attn_scale, AttnScale)
  TESSERA_NVTE_SETTER(FwdParams, NVTE_QKV_Layout, qkv_layout, QKVLayout)
  TESSERA_NVTE_SETTER(FwdParams, NVTE_QKV_Format, o_format, OFormat)
  TESSERA_NVTE_SETTER(FwdParams, NVTE_QKV_Format, qkv_scale_inv_format, QKVScaleInvFormat)
  TESSERA_NVTE_SETTER(FwdParams, size_t, max_seqlen_q, MaxSeqlenQ)
  TESSERA_NVTE_SETTER(FwdParams, size_t, max_seqlen_kv, MaxSeqlenKV)
  TESSERA_NVTE_SETTER(FwdParams, NVTETensor, workspace, Workspace)
  TESSERA_NVTE_SETTER(FwdParams, cudaStream_t, stream, Stream)
};

class FusedAttnBwdParamsWrapper
    : public FusedAttnHandle<FusedAttnBwdParamsWrapper, NVTEFusedAttnBwdParamsAttribute,
                             tessera_nvte_create_fused_attn_bwd_params,
                             tessera_nvte_destroy_fused_attn_bwd_params,
                             tessera_nvte_set_fused_attn_bwd_params_attribute> {
 public:
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, Q, Q)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, K, K)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, V, V)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, O, O)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dO, DO)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, S, S)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dP, DP)
  TESSERA_NVTE_SETTER(BwdParams, const NVTETensorPack*, Aux_CTX_Tensors, AuxCtxTensors)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dQ, DQ)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dK, DK)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dV, DV)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dBias, DBias)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, dSoftmaxOffset, DSoftmaxOffset)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, cu_seqlens_q, CuSeqlensQ)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, cu_seqlens_kv, CuSeqlensKV)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, cu_seqlens_q_padded, CuSeqlensQPadded)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, cu_seqlens_kv_padded, CuSeqlensKVPadded)
  TESSERA_NVTE_SETTER(BwdParams, bool, deterministic, Deterministic)
  TESSERA_NVTE_SETTER(BwdParams, bool, cuda_graph, CudaGraph)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_Mask_Type, attn_mask_type, AttnMaskType)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_Bias_Type, bias_type, BiasType)
  TESSERA_NVTE_SETTER(BwdParams, int64_t, window_size_left, WindowSizeLeft)
  TESSERA_NVTE_SETTER(BwdParams, int64_t, window_size_right, WindowSizeRight)
  TESSERA_NVTE_SETTER(BwdParams, bool, bottom_right_diagonal, BottomRightDiagonal)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_Softmax_Type, softmax_type, SoftmaxType)
  TESSERA_NVTE_SETTER(BwdParams, float, dropout, Dropout)
  TESSERA_NVTE_SETTER(BwdParams, float, attn_scale, AttnScale)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_QKV_Layout, qkv_layout, QKVLayout)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_QKV_Format, o_format, OFormat)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_QKV_Format, do_format, DOFormat)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_QKV_Layout, dqkv_layout, DQKVLayout)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_QKV_Format, qkv_scale_inv_format, QKVScaleInvFormat)
  TESSERA_NVTE_SETTER(BwdParams, NVTE_QKV_Format, do_scale_inv_format, DOScaleInvFormat)
  TESSERA_NVTE_SETTER(BwdParams, size_t, max_seqlen_q, MaxSeqlenQ)
  TESSERA_NVTE_SETTER(BwdParams, size_t, max_seqlen_kv, MaxSeqlenKV)
  TESSERA_NVTE_SETTER(BwdParams, NVTETensor, workspace, Workspace)
  TESSERA_NVTE_SETTER(BwdParams, cudaStream_t, stream, Stream)
};

#undef TESSERA_NVTE_SETTER

}  // namespace tessera_nvte_names

#endif /* names and no header of TransformerEngine's */

#endif /* TESSERA_NVTE_PARAMS_H_ */
