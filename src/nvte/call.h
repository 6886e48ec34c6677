// SPDX-License-Identifier: Apache-2.0
// One call of nvte_fused_attn_fwd or _bwd as a problem of tessera.h.
#pragma once

#include "nvte/layouts.h"
#include "nvte/tensor.h"

namespace tessera::nvte {

// The arguments of both passes under TransformerEngine's names. Tensors that a pass does not have
// are empty ones.
struct Arguments {
  const Tensor *q, *k, *v, *o;
  const Tensor *cu_seqlens_q, *cu_seqlens_kv, *cu_seqlens_q_padded, *cu_seqlens_kv_padded;
  size_t max_seqlen_q, max_seqlen_kv;
  float attn_scale, dropout;
  NVTE_QKV_Layout layout;
  NVTE_QKV_Format o_format;
  NVTE_Bias_Type bias_type;
  NVTE_Mask_Type mask;
  NVTE_Softmax_Type softmax;
  int64_t window_left, window_right;
  bool bottom_right_diagonal;
  bool is_query;  // no workspace yet: tensors may have shapes without data

  const Tensor *page_table_k = nullptr, *page_table_v = nullptr;
  // In the backward pass these are the pack's.
  const Tensor *bias = nullptr, *softmax_offset = nullptr, *rng_state = nullptr;
  const Tensor *stats = nullptr, *max = nullptr;  // of the pack; null: not asked for
  const Tensor *d_o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  const Tensor *dbias = nullptr, *dsoftmax_offset = nullptr;
  NVTE_QKV_Layout dqkv_layout{};
  NVTE_QKV_Format do_format = NVTE_QKV_Format_NOT_SET;
  bool backward = false, deterministic = false;
};

struct Sizes {
  int64_t b, sq, sk, hq, hk, dqk, dv;  // sq, sk: the tokens of a packed side
  int64_t pages_k, pages_v, page_size, max_pages;
};

struct Call {
  tessera_problem problem;
  tessera_buffers buffers;              // without the workspace, and what is computed into it:
  const Tensor *lengths_q, *lengths_k;  // cu_seqlens whose differences are lengths; null: none
  int64_t slopes;                       // of ALiBi, for so many heads; 0: none
  Sizes sizes;
};

void check_enum(int value, int last, const char* name);
// The enums of arguments are values that have names; layouts are checked where they are read.
void check_enums(const Arguments& arguments);

Sizes sizes_of(const Arguments& arguments);

// Throws Wrong for what tessera.h has no words for; the rest is tessera_validate's.
Call call_of(const Arguments& arguments);

// True where the tensor is given: with data, or in a query with a shape alone.
bool is_given(const Tensor& tensor, bool is_query);

}  // namespace tessera::nvte
