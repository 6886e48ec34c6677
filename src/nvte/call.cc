// SPDX-License-Identifier: Apache-2.0
#include "nvte/call.h"

#include <array>
#include <cinttypes>

namespace tessera::nvte {
namespace {

bool is_padding(NVTE_Mask_Type mask) {
  return mask == NVTE_PADDING_MASK || mask == NVTE_PADDING_CAUSAL_MASK ||
         mask == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
}
bool is_bottom_right(NVTE_Mask_Type mask) {
  return mask == NVTE_CAUSAL_BOTTOM_RIGHT_MASK || mask == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
}
bool is_causal(NVTE_Mask_Type mask) { return mask >= NVTE_CAUSAL_MASK; }
bool has_bias(const Arguments& a) {
  return a.bias_type == NVTE_PRE_SCALE_BIAS || a.bias_type == NVTE_POST_SCALE_BIAS;
}

tessera_dtype dtype_of(const Tensor& tensor, const char* name) {
  constexpr tessera_dtype kDtypes[] = {TESSERA_NONE, TESSERA_NONE, TESSERA_INT32, TESSERA_INT64,
                                       TESSERA_FP32, TESSERA_FP16, TESSERA_BF16,  TESSERA_E4M3,
                                       TESSERA_E5M2, TESSERA_NONE, TESSERA_NONE};
  static_assert(std::size(kDtypes) == kNVTENumTypes);
  if (kDtypes[tensor.dtype()] != TESSERA_NONE) return kDtypes[tensor.dtype()];
  fail(
      "%s.dtype=%d: attention has no tensor of this NVTEDType; use kNVTEBFloat16, kNVTEFloat16 or "
      "kNVTEFloat32",
      name, static_cast<int>(tensor.dtype()));
}

void check_numel(const Tensor& tensor, const char* name, int64_t expected, const char* of) {
  if (tensor.numel() == expected) return;
  fail("%s.shape=%s: has %" PRId64 " elements, must have the %" PRId64 " of %s", name,
       shape_text(tensor).c_str(), tensor.numel(), expected, of);
}

// Fills the problem part by part.
class Translation {
 public:
  explicit Translation(const Arguments& a)
      : a_(a), layout_(layout_of(a.layout, "qkv_layout")), call_{} {
    call_.sizes = sizes_of(a);
    call_.problem.struct_size = sizeof call_.problem;
    call_.buffers.struct_size = sizeof call_.buffers;
    call_.problem.pass = a.backward ? TESSERA_BACKWARD : TESSERA_FORWARD;
    call_.problem.format_q = format_of(layout_.q, "qkv_layout");
    call_.problem.format_kv = format_of(layout_.kv, "qkv_layout");
  }

  Call translate() {
    inputs();
    outputs();
    if (a_.backward) gradients();
    lengths();
    mask();
    scores();
    return call_;
  }

 private:
  void give(int index, const tessera_tensor& tensor, void* data) {
    call_.problem.tensor[index] = tensor;
    call_.buffers.data[index] = data;
  }
  // A contiguous tensor.
  void give(int index, const Tensor& tensor, const char* name,
            std::initializer_list<int64_t> extent) {
    tessera_tensor t{dtype_of(tensor, name), 0, {}, {}};
    std::copy(extent.begin(), extent.end(), t.extent);
    int64_t stride = 1;
    for (size_t axis = extent.size(); axis-- > 0; stride *= t.extent[axis]) t.stride[axis] = stride;
    give(index, t, tensor.data());
  }
  // A tensor in one of the layouts. scale, amax: the indices of what an fp8 one has beside it; -1:
  // none.
  void give(int index, const Tensor& tensor, const char* name, const Placed& place, int scale,
            int amax) {
    if (tensor.mode != NVTE_DELAYED_TENSOR_SCALING) {
      fail("%s.scaling_mode=%d: must be NVTE_DELAYED_TENSOR_SCALING (0), one scale for the tensor",
           name, static_cast<int>(tensor.mode));
    }
    check_numel(tensor, name, place.b * place.s * place.h * place.d, "its layout");
    const tessera_dtype dtype = dtype_of(tensor, name);
    give(index, describe(dtype, place), tensor.data());
    if (dtype != TESSERA_E4M3 && dtype != TESSERA_E5M2) return;
    if (scale >= 0) give_one(scale, tensor, kNVTERowwiseScaleInv, name, "scale_inv");
    if (amax >= 0) give_one(amax, tensor, kNVTEAmax, name, "amax");
  }
  // The one fp32 value of a parameter that has memory, or in a query might have.
  void give_one(int index, const Tensor& tensor, NVTETensorParam param, const char* name,
                const char* param_name) {
    const NVTEBasicTensor& value = tensor.params[param];
    if (!value.data_ptr && !a_.is_query) return;
    size_t elements = 1;
    for (size_t axis = 0; axis < value.shape.ndim; ++axis) elements *= value.shape.data[axis];
    if (value.data_ptr && (value.dtype != kNVTEFloat32 || elements < 1)) {
      fail("%s.%s.dtype=%d, %zu elements: must be kNVTEFloat32 (%d), one or more", name, param_name,
           static_cast<int>(value.dtype), elements, static_cast<int>(kNVTEFloat32));
    }
    give(index, tessera_tensor{TESSERA_FP32, 0, {1, 1, 1, 1}, {1, 1, 1, 1}}, value.data_ptr);
  }

  Placed place_of(const Layout& layout, int tensor) const {
    const Sizes& s = call_.sizes;
    if (tensor == TESSERA_Q) return placed(layout, tensor, s.b, s.sq, s.hq, s.dqk);
    const int64_t d = tensor == TESSERA_K ? s.dqk : s.dv;
    if (!is_paged(layout)) return placed(layout, tensor, s.b, s.sk, s.hk, d);
    return placed(layout, tensor, tensor == TESSERA_K ? s.pages_k : s.pages_v, s.page_size, s.hk,
                  d);
  }

  // o or do.
  Placed place_of_output(NVTE_QKV_Format format, const char* name) const {
    const Sizes& s = call_.sizes;
    const bool set = format != NVTE_QKV_Format_NOT_SET;
    const tessera_format order = format_of(set ? format : layout_.q, name);
    if ((order == TESSERA_THD) != (layout_.q == NVTE_THD)) {
      fail("%s=%d: Q is %s; use its format, or NVTE_QKV_Format_NOT_SET, which is the same", name,
           static_cast<int>(format), layout_.q == NVTE_THD ? "packed (thd)" : "not packed (thd)");
    }
    return {order, order == TESSERA_THD ? 1 : s.b, s.sq, s.hq, s.dv};
  }

  void inputs() {
    give_qkv(layout_, false, {a_.q, a_.k, a_.v}, {"Q", "K", "V"});
    if (!is_paged(layout_)) return;
    const Sizes& s = call_.sizes;
    check_numel(*a_.page_table_k, "page_table_k", s.b * s.max_pages, "[b, max_pages]");
    give(TESSERA_PAGE_TABLE_K, *a_.page_table_k, "page_table_k", {s.b, s.max_pages});
    if (!is_given(*a_.page_table_v, a_.is_query)) return;
    check_numel(*a_.page_table_v, "page_table_v", s.b * s.max_pages, "[b, max_pages]");
    give(TESSERA_PAGE_TABLE_V, *a_.page_table_v, "page_table_v", {s.b, s.max_pages});
  }

  // q, k and v, or their gradients.
  void give_qkv(const Layout& layout, bool gradients, const std::array<const Tensor*, 3>& tensors,
                const std::array<const char*, 3>& names) {
    constexpr int kScale[] = {TESSERA_Q_SCALE, TESSERA_K_SCALE, TESSERA_V_SCALE};
    const char* const argument = gradients ? "dqkv_layout" : "qkv_layout";
    const int value = static_cast<int>(gradients ? a_.dqkv_layout : a_.layout);
    const Sizes& s = call_.sizes;
    for (int t = TESSERA_Q; t <= TESSERA_V; ++t) {
      const Placed place = place_of(layout, t);
      give(gradients ? TESSERA_DQ + t : t, *tensors[t], names[t], place,
           gradients ? TESSERA_DQ_SCALE + t : kScale[t], gradients ? TESSERA_AMAX_DQ + t : -1);
      if (t + place.sharing <= 3) continue;  // the first tensor of its buffer
      if (s.dqk != s.dv || (place.sharing == 3 && (s.hq != s.hk || s.sq != s.sk))) {
        fail(
            "%s=%d: %s and %s share a buffer, so must have the same tokens, heads and head dim; "
            "use "
            "a layout of separate tensors",
            argument, value, names[t - 1], names[t]);
      }
      // Strides reach over the other tensors of the buffer, which must be there.
      const int64_t apart =
          (place.heads_apart ? 1 : place.h) * place.d * bytes_of(tensors[t]->dtype());
      const auto begin = reinterpret_cast<uintptr_t>(tensors[t]->data());
      const auto before = reinterpret_cast<uintptr_t>(tensors[t - 1]->data());
      if (begin != 0 && begin - before != static_cast<uintptr_t>(apart) &&
          tensors[t]->numel() > 0) {
        fail("%s=%d: %s must begin %" PRId64
             " bytes behind %s, in one buffer with it; use a layout "
             "of separate tensors",
             argument, value, names[t], apart, names[t - 1]);
      }
    }
  }

  void outputs() {
    const Sizes& s = call_.sizes;
    give(TESSERA_O, *a_.o, "O", place_of_output(a_.o_format, "o_format"), TESSERA_O_SCALE,
         a_.backward ? -1 : TESSERA_AMAX_O);
    if (a_.stats) {
      const int64_t b = layout_.q == NVTE_THD ? 1 : s.b;
      check_numel(*a_.stats, "Stats", b * s.hq * s.sq, "[b, h, sq, 1], or [h, tq, 1] of thd");
      give(TESSERA_LSE, *a_.stats, "Stats", {b, s.hq, s.sq});
    }
    if (a_.max) give(TESSERA_MAX_LOGIT, *a_.max, "Max", {s.hq});
  }

  void gradients() {
    const Layout& layout = layout_of(a_.dqkv_layout, "dqkv_layout");
    if (is_paged(layout_) || is_paged(layout)) {
      fail(
          "qkv_layout=%d, dqkv_layout=%d: pages have no backward pass here; use "
          "tessera_run with TESSERA_PAGE_TABLE_K",
          static_cast<int>(a_.layout), static_cast<int>(a_.dqkv_layout));
    }
    if ((layout.q == NVTE_THD) != (layout_.q == NVTE_THD) ||
        (layout.kv == NVTE_THD) != (layout_.kv == NVTE_THD)) {
      fail(
          "dqkv_layout=%d: packed (thd) gradients belong to packed inputs, and qkv_layout=%d; use "
          "that",
          static_cast<int>(a_.dqkv_layout), static_cast<int>(a_.layout));
    }
    give(TESSERA_DO, *a_.d_o, "dO", place_of_output(a_.do_format, "do_format"), TESSERA_DO_SCALE,
         -1);
    give_qkv(layout, true, {a_.dq, a_.dk, a_.dv}, {"dQ", "dK", "dV"});
    if (a_.deterministic) call_.problem.flags |= TESSERA_DETERMINISTIC;
  }

  // One side's lengths: as they come, and where they go.
  struct Side {
    const char* name;
    const Tensor &cu, &padded;
    NVTE_QKV_Format format;
    size_t longest;
    int seqlens, cu_seqlens, cu_seqlens_padded;
    uint32_t max_flag;
    int64_t tessera_problem::*max_seqlen;
  };

  void lengths() {
    call_.lengths_q = lengths_of({"cu_seqlens_q", *a_.cu_seqlens_q, *a_.cu_seqlens_q_padded,
                                  layout_.q, a_.max_seqlen_q, TESSERA_SEQLENS_Q,
                                  TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_Q_PADDED,
                                  TESSERA_MAX_SEQLEN_Q, &tessera_problem::max_seqlen_q});
    call_.lengths_k = lengths_of({"cu_seqlens_kv", *a_.cu_seqlens_kv, *a_.cu_seqlens_kv_padded,
                                  layout_.kv, a_.max_seqlen_kv, TESSERA_SEQLENS_K,
                                  TESSERA_CU_SEQLENS_K, TESSERA_CU_SEQLENS_K_PADDED,
                                  TESSERA_MAX_SEQLEN_K, &tessera_problem::max_seqlen_k});
  }

  // Packed sides give cu_seqlens as they are. A padded side counts their differences, so they are
  // answered: under a padding mask, and under any where the other side is packed or in pages.
  const Tensor* lengths_of(const Side& side) {
    const bool thd = side.format == NVTE_THD;
    if (!thd && layout_.q != NVTE_THD && !is_paged(layout_) && !is_padding(a_.mask)) return nullptr;
    const int64_t b = call_.sizes.b;
    const tessera_dtype dtype = dtype_of(side.cu, side.name);
    if (side.cu.numel() != b + 1 || (dtype != TESSERA_INT32 && dtype != TESSERA_INT64)) {
      fail("%s.shape=%s, dtype=%d: must be kNVTEInt32 or kNVTEInt64 of [b + 1], b=%" PRId64,
           side.name, shape_text(side.cu).c_str(), static_cast<int>(side.cu.dtype()), b);
    }
    if (!side.cu.data() && !a_.is_query) {
      fail("%s.data=null: must be given, it holds the lengths", side.name);
    }
    if (!thd) {
      give(side.seqlens, {TESSERA_INT32, 0, {b}, {1}}, nullptr);  // in the workspace
      return &side.cu;
    }
    give(side.cu_seqlens, side.cu, side.name, {b + 1});
    if (is_given(side.padded, a_.is_query)) {
      check_numel(side.padded, "cu_seqlens_padded", b + 1, "[b + 1]");
      give(side.cu_seqlens_padded, side.padded, "cu_seqlens_padded", {b + 1});
    }
    if (side.longest > 0) {
      call_.problem.flags |= side.max_flag;
      call_.problem.*side.max_seqlen = static_cast<int64_t>(side.longest);
    }
    return nullptr;
  }

  void mask() {
    tessera_problem& p = call_.problem;
    if (is_causal(a_.mask)) p.flags |= TESSERA_CAUSAL;
    if (a_.window_left != -1 || a_.window_right != -1) {
      p.flags |= TESSERA_WINDOW;
      p.window_left = a_.window_left;
      p.window_right = a_.window_right;
    }
    // A causal mask says itself where its diagonal ends.
    const bool bottom_right =
        is_causal(a_.mask) ? is_bottom_right(a_.mask) : a_.bottom_right_diagonal;
    p.align = bottom_right ? TESSERA_ALIGN_BOTTOM_RIGHT : TESSERA_ALIGN_TOP_LEFT;
  }

  void scores() {
    tessera_problem& p = call_.problem;
    const Sizes& s = call_.sizes;
    p.flags |= TESSERA_SOFTMAX_SCALE;
    call_.buffers.softmax_scale = static_cast<double>(a_.attn_scale);
    if (a_.dropout != 0) {
      p.flags |= TESSERA_DROPOUT;
      call_.buffers.dropout_p = static_cast<double>(a_.dropout);
      check_numel(*a_.rng_state, "rng_state", 2, "seed and offset, which dropout needs");
      give(TESSERA_RNG_STATE, *a_.rng_state, "rng_state", {2});
    }
    if (has_bias(a_)) {
      give_bias(TESSERA_BIAS, *a_.bias, "Bias");
      if (a_.bias_type == NVTE_PRE_SCALE_BIAS) p.flags |= TESSERA_BIAS_PRE_SCALE;
      if (a_.backward && is_given(*a_.dbias, a_.is_query)) {
        give_bias(TESSERA_DBIAS, *a_.dbias, "dBias");
      }
    } else if (a_.bias_type == NVTE_ALIBI) {
      call_.slopes = s.hq;
      give(TESSERA_ALIBI_SLOPES, {TESSERA_FP32, 0, {1, s.hq}, {s.hq, 1}}, nullptr);
    }
    const bool dsink = a_.backward && is_given(*a_.dsoftmax_offset, a_.is_query);
    if (a_.softmax == NVTE_LEARNABLE_SOFTMAX || (a_.softmax == NVTE_OFF_BY_ONE_SOFTMAX && dsink)) {
      // The gradient of off-by-one's zeros is that of an offset that happens to be zero.
      check_numel(*a_.softmax_offset, "SoftmaxOffset", s.hq, "[1, h, 1, 1]");
      give(TESSERA_SINK, *a_.softmax_offset, "SoftmaxOffset", {s.hq});
      if (!dsink) return;
      check_numel(*a_.dsoftmax_offset, "dSoftmaxOffset", s.hq, "[1, h, 1, 1]");
      give(TESSERA_DSINK, *a_.dsoftmax_offset, "dSoftmaxOffset", {s.hq});
    } else if (a_.softmax == NVTE_OFF_BY_ONE_SOFTMAX) {
      p.flags |= TESSERA_SINK_OFF_BY_ONE;
    }
  }

  void give_bias(int index, const Tensor& tensor, const char* name) {
    if (tensor.ndim() != 4) {
      fail("%s.shape=%s: must be [b|1, h|1, sq|1, skv|1], as bias_type=%d needs", name,
           shape_text(tensor).c_str(), static_cast<int>(a_.bias_type));
    }
    give(index, tensor, name,
         {tensor.extent(0), tensor.extent(1), tensor.extent(2), tensor.extent(3)});
  }

  const Arguments& a_;
  const Layout& layout_;
  Call call_;
};

}  // namespace

void check_enum(int value, int last, const char* name) {
  if (value < 0 || value > last) fail("%s=%d: must be 0 to %d", name, value, last);
}

void check_enums(const Arguments& a) {
  check_enum(a.bias_type, NVTE_ALIBI, "bias_type");
  check_enum(a.mask, NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, "attn_mask_type");
  check_enum(a.softmax, NVTE_LEARNABLE_SOFTMAX, "softmax_type");
}

bool is_given(const Tensor& tensor, bool is_query) {
  return tensor.numel() > 0 && (tensor.data() || is_query);
}

Call call_of(const Arguments& arguments) { return Translation(arguments).translate(); }

}  // namespace tessera::nvte
