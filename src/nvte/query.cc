// SPDX-License-Identifier: Apache-2.0
// nvte_get_fused_attn_backend of both generations: an imagined call, whose problem tessera_prepare
// takes or refuses.
#include <algorithm>

#include "nvte/call.h"
#include "nvte/device.h"
#include "nvte/params.h"

namespace tessera::nvte {
namespace {

constexpr int64_t kPage = 64;  // tokens of a page where the config does not say

// So that no product of extents overflows.
constexpr size_t kMostHeads = 1 << 15;  // and head dims
constexpr size_t kMost = size_t{1} << 40;

constexpr int64_t kMostElements = int64_t{1} << 48;  // products of extents are not checked again

// Extents of 0 count as 1: strides are products of the others.
void check_extents(const Tensor& tensor, const char* name) {
  int64_t most = kMostElements;
  for (int64_t axis = 0; axis < tensor.ndim(); ++axis) {
    most /= std::max<int64_t>(tensor.extent(axis), 1);
  }
  if (most > 0) return;
  fail("%s.shape=%s: has more elements than any memory", name, shape_text(tensor).c_str());
}

// A count that may be left at 0.
int64_t count_of(size_t value, int64_t otherwise, const char* name) {
  if (value > kMost) fail("%s=%zu: must be at most 2^40", name, value);
  return value ? static_cast<int64_t>(value) : otherwise;
}

// The tensors of a call without data, as a config describes them.
struct Imagined {
  Tensor q, k, v, o, d_o, dq, dk, dv, cu, table_k, table_v, bias, offset, empty, stats, max,
      rng{kNVTEInt64, {2}};

  Imagined(const Config& c, NVTEDType kv_dtype) {
    const Layout& layout = layout_of(c.qkv_layout, "qkv_layout");
    const int64_t b = count_of(c.batch_size, 1, "batch_size");
    const int64_t sq = count_of(c.max_seqlen_q, 0, "max_seqlen_q"),
                  sk = count_of(c.max_seqlen_kv, 0, "max_seqlen_kv");
    const int64_t h = count_of(c.num_attn_heads, 0, "num_attn_heads"),
                  hk = count_of(c.num_gqa_groups, 0, "num_gqa_groups");
    const int64_t dqk = count_of(c.head_dim_qk, 0, "head_dim_qk"),
                  dv_ = count_of(c.head_dim_v, 0, "head_dim_v");
    const int64_t tq = count_of(c.num_tokens_q, b * sq, "num_tokens_q"),
                  tk = count_of(c.num_tokens_kv, b * sk, "num_tokens_kv");
    const auto make = [&](NVTE_QKV_Format format, NVTEDType dtype, int64_t n, int64_t s, int64_t t,
                          int64_t heads, int64_t d) {
      Tensor made = format == NVTE_THD    ? Tensor(dtype, {t, heads, d})
                    : format == NVTE_BHSD ? Tensor(dtype, {n, heads, s, d})
                    : format == NVTE_SBHD ? Tensor(dtype, {s, n, heads, d})
                                          : Tensor(dtype, {n, s, heads, d});
      made.mode = c.scaling_mode;
      return made;
    };
    q = make(layout.q, c.qkv_dtype, b, sq, tq, h, dqk);
    dq = make(layout.q, c.dqkv_dtype, b, sq, tq, h, dqk);
    o = make(layout.q, c.o_dtype, b, sq, tq, h, dv_);
    d_o = make(layout.q, c.do_dtype, b, sq, tq, h, dv_);
    if (is_paged(layout)) {
      const auto pool = [&](size_t pages, size_t page_size, size_t max_pages, int64_t d, Tensor& t,
                            Tensor& table) {
        const int64_t size = count_of(page_size, kPage, "page_size");
        const int64_t each = count_of(max_pages, (sk + size - 1) / size, "max_pages_per_seq");
        check_extents(Tensor(kNVTEByte, {each, size}), "pages of a sequence");
        table = Tensor(kNVTEInt32, {b, each});
        t = make(layout.kv, kv_dtype, count_of(pages, b * each, "num_pages"), size, 0, hk, d);
      };
      pool(c.num_pages_k, c.page_size_k, c.max_pages_per_seq_k, dqk, k, table_k);
      pool(c.num_pages_v, c.page_size_v, c.max_pages_per_seq_v, dv_, v, table_v);
    } else {
      k = make(layout.kv, kv_dtype, b, sk, tk, hk, dqk);
      v = make(layout.kv, kv_dtype, b, sk, tk, hk, dv_);
    }
    const Layout& gradients = layout_of(
        c.dqkv_layout == NVTE_QKV_Layout_NOT_SET ? c.qkv_layout : c.dqkv_layout, "dqkv_layout");
    dk = make(gradients.kv, c.dqkv_dtype, b, sk, tk, hk, dqk);
    dv = make(gradients.kv, c.dqkv_dtype, b, sk, tk, hk, dv_);
    cu = Tensor(kNVTEInt32, {b + 1});
    bias = Tensor(c.qkv_dtype, {count_of(c.bias_batch_size, b, "bias_batch_size"),
                                count_of(c.bias_num_heads, h, "bias_num_heads"),
                                count_of(c.bias_seqlen_q, sq, "bias_seqlen_q"),
                                count_of(c.bias_seqlen_kv, sk, "bias_seqlen_kv")});
    offset = Tensor(kNVTEFloat32, {1, h, 1, 1});
    stats = layout.q == NVTE_THD ? Tensor(kNVTEFloat32, {h, tq, 1})
                                 : Tensor(kNVTEFloat32, {b, h, sq, 1});
    max = Tensor(kNVTEFloat32, {h});
    check_extents(q, "Q"), check_extents(o, "O"), check_extents(k, "K"), check_extents(v, "V");
    check_extents(bias, "Bias");
    check_extents(table_k, "page_table_k"), check_extents(table_v, "page_table_v");
  }

  // The arguments of a pass.
  Arguments arguments(const Config& c, bool backward) const {
    Arguments a{};
    a.q = &q, a.k = &k, a.v = &v, a.o = &o;
    a.cu_seqlens_q = a.cu_seqlens_kv = &cu;
    a.cu_seqlens_q_padded = a.cu_seqlens_kv_padded = &empty;
    a.page_table_k = &table_k, a.page_table_v = &table_v;
    a.bias = &bias, a.softmax_offset = &offset, a.rng_state = &rng, a.stats = &stats;
    a.d_o = &d_o, a.dq = &dq, a.dk = &dk, a.dv = &dv, a.dbias = &bias, a.dsoftmax_offset = &offset;
    a.max = c.return_max_logit && !backward ? &max : nullptr;
    a.max_seqlen_q = c.max_seqlen_q, a.max_seqlen_kv = c.max_seqlen_kv;
    a.attn_scale = c.attn_scale, a.dropout = c.is_training ? c.dropout : 0;
    a.layout = c.qkv_layout, a.o_format = c.o_format, a.do_format = c.do_format;
    a.dqkv_layout = c.dqkv_layout == NVTE_QKV_Layout_NOT_SET ? c.qkv_layout : c.dqkv_layout;
    a.bias_type = c.bias_type, a.mask = c.attn_mask_type, a.softmax = c.softmax_type;
    a.window_left = c.window_size_left, a.window_right = c.window_size_right;
    a.bottom_right_diagonal = c.bottom_right_diagonal;
    a.deterministic = c.deterministic, a.is_query = true, a.backward = backward;
    return a;
  }
};

// Why no backend runs the call, or nothing; the reasons are logged by tessera_prepare too.
std::string refusal_of(const Arguments& arguments) {
  const Call call = call_of(arguments);
  const tessera_device device = device_of(nullptr);
  tessera_error error{};
  error.struct_size = sizeof error;
  const bool runs = tessera_prepare(&call.problem, &device, 0, nullptr, &error) == TESSERA_OK;
  return runs ? "" : error.message;
}

void check_values(const Config& c, NVTEDType kv_dtype) {
  check_enum(c.bias_type, NVTE_ALIBI, "bias_type");
  check_enum(c.attn_mask_type, NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, "attn_mask_type");
  check_enum(c.softmax_type, NVTE_LEARNABLE_SOFTMAX, "softmax_type");
  check_enum(c.qkv_dtype, kNVTENumTypes - 1, "qkv_dtype");
  check_enum(kv_dtype, kNVTENumTypes - 1, "kv_dtype");
  check_enum(c.o_dtype, kNVTENumTypes - 1, "o_dtype");
  check_enum(c.do_dtype, kNVTENumTypes - 1, "do_dtype");
  check_enum(c.dqkv_dtype, kNVTENumTypes - 1, "dqkv_dtype");
  layout_of(c.qkv_layout, "qkv_layout");
}

// The answer, and why it is No_Backend. Values that have no name are thrown as Wrong.
NVTE_Fused_Attn_Backend backend_of(const Config& c, NVTEDType kv_dtype, std::string& reasons) {
  check_values(c, kv_dtype);
  try {
    if (!(c.dropout >= 0 && c.dropout < 1)) {
      fail("dropout=%g: must be from 0 to below 1", static_cast<double>(c.dropout));
    }
    const size_t largest =
        std::max({c.num_attn_heads, c.num_gqa_groups, c.head_dim_qk, c.head_dim_v});
    if (largest > kMostHeads || c.batch_size > kMostHeads) {
      fail("%zu heads, head dims or sequences: must be at most 2^15",
           std::max(largest, c.batch_size));
    }
    const Imagined imagined(c, kv_dtype);
    reasons = refusal_of(imagined.arguments(c, false));
    if (reasons.empty() && c.is_training) reasons = refusal_of(imagined.arguments(c, true));
  } catch (const Wrong& wrong) {
    reasons = wrong.text;
  }
  if (!reasons.empty()) return NVTE_No_Backend;
  const bool fp8 = c.qkv_dtype == kNVTEFloat8E4M3 || c.qkv_dtype == kNVTEFloat8E5M2;
  return fp8 ? NVTE_FP8 : NVTE_F16_arbitrary_seqlen;
}

}  // namespace
}  // namespace tessera::nvte

using namespace tessera::nvte;

NVTE_Fused_Attn_Backend tessera_nvte_get_fused_attn_backend_v2(NVTEFusedAttnConfig cfg,
                                                               const char** message) {
  return named("nvte_get_fused_attn_backend_v2", [&] {
    thread_local std::string reasons;
    reasons.clear();
    const Config& config = config_of(cfg);
    NVTE_Fused_Attn_Backend answer = NVTE_No_Backend;
    try {
      answer = backend_of(config, config.qkv_dtype, reasons);
    } catch (const Wrong& wrong) {
      reasons = wrong.text;
    }
    if (message) *message = reasons.c_str();
    return answer;
  });
}

NVTE_Fused_Attn_Backend tessera_nvte_get_fused_attn_backend(
    bool is_training, NVTEDType q_dtype, NVTEDType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    float dropout, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, int64_t window_size_left,
    int64_t window_size_right, bool return_max_logit, bool cuda_graph, bool deterministic) {
  return named("nvte_get_fused_attn_backend", [&] {
    Config c;
    c.is_training = is_training, c.deterministic = deterministic, c.cuda_graph = cuda_graph;
    c.return_max_logit = return_max_logit;
    c.attn_mask_type = attn_mask_type, c.bias_type = bias_type, c.softmax_type = softmax_type;
    c.window_size_left = window_size_left, c.window_size_right = window_size_right;
    c.dropout = dropout;
    c.qkv_dtype = c.o_dtype = c.do_dtype = q_dtype, c.dqkv_dtype = q_dtype;
    c.qkv_layout = qkv_layout;
    c.num_attn_heads = num_attn_heads, c.num_gqa_groups = num_gqa_groups;
    c.head_dim_qk = head_dim_qk, c.head_dim_v = head_dim_v;
    c.max_seqlen_q = max_seqlen_q, c.max_seqlen_kv = max_seqlen_kv;
    std::string reasons;
    return backend_of(c, kv_dtype, reasons);
  });
}
