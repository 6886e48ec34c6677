/* SPDX-License-Identifier: Apache-2.0
 *
 * Work beside attention of TransformerEngine's fused_attn.h: what context parallelism does with
 * packed sequences, and copies between layouts. Part of tessera_nvte.h, which includes it.
 *
 * A rank holds two chunks of equal length of every sequence. cu_seqlens [b + 1], int32 or int64,
 * are of the tokens that the call has before it, padding included: of the rank's own, or of the
 * whole where world_size is given. lse is fp32, [h, t] where lse_packed, else [b, h, s]. On the CPU
 * boundaries are checked; on CUDA, where they are on the device, a token without a place is
 * dropped.
 */
#ifndef TESSERA_NVTE_TOKENS_H_
#define TESSERA_NVTE_TOKENS_H_

#ifndef TESSERA_NVTE_H_
#error "include tessera_nvte.h, of which this is a part"
#endif

#ifndef TESSERA_NVTE_NO_NAMES
#define nvte_cp_thd_read_half_tensor tessera_nvte_cp_thd_read_half_tensor
#define nvte_cp_thd_second_half_lse_correction tessera_nvte_cp_thd_second_half_lse_correction
#define nvte_cp_thd_read_second_half_lse tessera_nvte_cp_thd_read_second_half_lse
#define nvte_cp_thd_out_correction tessera_nvte_cp_thd_out_correction
#define nvte_cp_thd_grad_correction tessera_nvte_cp_thd_grad_correction
#define nvte_cp_thd_get_partitioned_indices tessera_nvte_cp_thd_get_partitioned_indices
#define nvte_thd_sequence_order_to_cp_rank_order tessera_nvte_thd_sequence_order_to_cp_rank_order
#define nvte_thd_cp_rank_order_to_sequence_order tessera_nvte_thd_cp_rank_order_to_sequence_order
#define nvte_thd_copy_valid_tokens_from_per_split_to_rank_local \
  tessera_nvte_thd_copy_valid_tokens_from_per_split_to_rank_local
#define nvte_prepare_flash_attn_fwd tessera_nvte_prepare_flash_attn_fwd
#define nvte_prepare_flash_attn_bwd tessera_nvte_prepare_flash_attn_bwd
#define nvte_multi_tensor_transpose_to_bhsd tessera_nvte_multi_tensor_transpose_to_bhsd
#define nvte_multi_tensor_pad_last_dim tessera_nvte_multi_tensor_pad_last_dim
#endif /* TESSERA_NVTE_NO_NAMES */

extern "C" {

/* tensor [t, h, d] or [2, t, h, d] -> half, the first (half_idx 0) or second chunks of all
 * sequences. */
TESSERA_NVTE_API void tessera_nvte_cp_thd_read_half_tensor(const NVTETensor& tensor,
                                                           const NVTETensor& cu_seqlens,
                                                           NVTETensor half, int half_idx,
                                                           cudaStream_t stream);

/* lse of the second chunks becomes that of the union with lse_per_step. */
TESSERA_NVTE_API void tessera_nvte_cp_thd_second_half_lse_correction(NVTETensor lse,
                                                                     const NVTETensor& lse_per_step,
                                                                     const NVTETensor& cu_seqlens,
                                                                     int lse_packed,
                                                                     cudaStream_t stream);

/* half_lse = lse of the second chunks; what lies behind them stays. second_half_lse_seqlen is
 * half_lse's last extent. */
TESSERA_NVTE_API void tessera_nvte_cp_thd_read_second_half_lse(const NVTETensor& lse,
                                                               const NVTETensor& cu_seqlens,
                                                               NVTETensor half_lse, int lse_packed,
                                                               int second_half_lse_seqlen,
                                                               cudaStream_t stream);

/* out [t, h, d] = out exp(old_lse - lse) + out_per_step exp(lse_per_step - lse); with
 * only_second_half out_per_step and lse_per_step have the second chunks, and the first stay. fp32,
 * fp16, bf16. */
TESSERA_NVTE_API void tessera_nvte_cp_thd_out_correction(
    NVTETensor out, const NVTETensor& out_per_step, const NVTETensor& old_lse,
    const NVTETensor& lse, const NVTETensor& lse_per_step, const NVTETensor& cu_seqlens,
    int only_second_half, int lse_packed, cudaStream_t stream);

/* "add", "copy", "none" or "zero" of each sequence's halves of grad [t, h, d] or [2, t, h, d].
 * grad_per_step has the tokens that are added or copied: of whole sequences, or of one half. Any
 * dtype, to be added fp32, fp16 or bf16. */
TESSERA_NVTE_API void tessera_nvte_cp_thd_grad_correction(
    NVTETensor grad, const NVTETensor& grad_per_step, const NVTETensor& cu_seqlens,
    const char* first_half, const char* second_half, cudaStream_t stream);

/* output int32 [total_tokens / world_size]: where the rank's tokens lie in the whole. */
TESSERA_NVTE_API void tessera_nvte_cp_thd_get_partitioned_indices(const NVTETensor& cu_seqlens,
                                                                  NVTETensor output,
                                                                  int total_tokens, int world_size,
                                                                  int rank, cudaStream_t stream);

/* inp [total_tokens, ..], whole sequences -> out, the chunks of rank 0, of rank 1, ..; and back. */
TESSERA_NVTE_API void tessera_nvte_thd_sequence_order_to_cp_rank_order(
    const NVTETensor& inp, const NVTETensor& cu_seqlens, NVTETensor out, int world_size,
    int total_tokens, cudaStream_t stream);

TESSERA_NVTE_API void tessera_nvte_thd_cp_rank_order_to_sequence_order(
    const NVTETensor& inp, const NVTETensor& cu_seqlens, NVTETensor out, int world_size,
    int total_tokens, cudaStream_t stream);

/* The tokens of sequences, as cu_seqlens counts and cu_seqlens_padded places them, from inp to the
 * same places of out; what lies between them stays. */
TESSERA_NVTE_API void tessera_nvte_thd_copy_valid_tokens_from_per_split_to_rank_local(
    const NVTETensor& inp, const NVTETensor& cu_seqlens_padded, const NVTETensor& cu_seqlens,
    NVTETensor out, int total_tokens, cudaStream_t stream);

/* qkvi: q [s, b, h, d] of a buffer [s, b, h, 3 d] that holds k and v too; qkv [3, b, s, h, d]. */
TESSERA_NVTE_API void tessera_nvte_prepare_flash_attn_fwd(NVTETensor qkvi, NVTETensor qkv,
                                                          cudaStream_t stream);

/* q, k, v [b, s, h, d] -> qkv [s, b, h, 3 d]. */
TESSERA_NVTE_API void tessera_nvte_prepare_flash_attn_bwd(NVTETensor q, NVTETensor k, NVTETensor v,
                                                          NVTETensor qkv, cudaStream_t stream);

/* [b, s, h, d] or [s, b, h, d] -> [b, h, s, d or more]; zeros behind d. */
TESSERA_NVTE_API void tessera_nvte_multi_tensor_transpose_to_bhsd(NVTETensor* inputs,
                                                                  NVTETensor* outputs,
                                                                  size_t num_tensors,
                                                                  NVTE_QKV_Format original_format,
                                                                  cudaStream_t stream);

/* [rows, n] -> [rows, n or more]; zeros behind n. */
TESSERA_NVTE_API void tessera_nvte_multi_tensor_pad_last_dim(NVTETensor* inputs,
                                                             NVTETensor* outputs,
                                                             size_t num_tensors,
                                                             cudaStream_t stream);

} /* extern "C" */

#endif /* TESSERA_NVTE_TOKENS_H_ */
