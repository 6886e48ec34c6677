// SPDX-License-Identifier: Apache-2.0
// nvte_fused_attn_fwd, _bwd and the query, over tessera_prepare and tessera_run.
#include <algorithm>
#include <cinttypes>

#include "nvte/call.h"
#include "nvte/device.h"

namespace tessera::nvte {
namespace {

constexpr int64_t kAlignment = 256;  // what CUDA wants of a workspace; the CPU wants 64

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What tessera.h says of a call that failed, whole.
void check(int32_t code, const tessera_error& error) {
  if (code != TESSERA_OK) throw std::runtime_error(error.message);
}

// Both calls of the protocol. The workspace: lengths of q, of k, slopes, and then tessera's own.
void execute(Call& call, const tessera_device& device, Tensor& workspace, cudaStream_t stream) {
  tessera_error error{};
  error.struct_size = sizeof error;
  tessera_info info{};
  info.struct_size = sizeof info;
  check(tessera_prepare(&call.problem, &device, 0, &info, &error), error);
  const int64_t lengths = aligned(call.sizes.b * 4);
  const int64_t at_k = call.lengths_q ? lengths : 0;
  const int64_t at_slopes = at_k + (call.lengths_k ? lengths : 0);
  const int64_t at_rest = at_slopes + aligned(call.slopes * 4);
  const int64_t needed = at_rest + info.workspace_bytes;
  // A pointer of any alignment will do.
  const int64_t bytes = needed > 0 ? needed + kAlignment - 1 : 1;
  if (!workspace.data()) {
    workspace.params[kNVTERowwiseData] = Tensor(kNVTEByte, {bytes}).params[kNVTERowwiseData];
    return;
  }
  if (workspace.numel() * bytes_of(workspace.dtype()) < bytes) {
    fail("workspace.shape=%s: must have %" PRId64
         " bytes; the call without workspace data says how many",
         shape_text(workspace).c_str(), bytes);
  }
  const auto start = (reinterpret_cast<uintptr_t>(workspace.data()) + kAlignment - 1) / kAlignment;
  char* const base = reinterpret_cast<char*>(start * kAlignment);
  tessera_buffers& b = call.buffers;
  b.stream = stream;
  b.workspace = base + at_rest;
  b.workspace_bytes = info.workspace_bytes;
  if (call.lengths_q) b.data[TESSERA_SEQLENS_Q] = base;
  if (call.lengths_k) b.data[TESSERA_SEQLENS_K] = base + at_k;
  if (call.slopes) b.data[TESSERA_ALIBI_SLOPES] = base + at_slopes;
  // The host's jobs come first: values are checked there, and it is done before anything is queued.
  if (is_cuda(device)) check(tessera_validate(&call.problem, &device, &b, &error), error);
  const auto to_lengths = [&](const Tensor* cu, int index) {
    if (!cu) return;
    run(LengthsJob{{cu->data(), cu->dtype() == kNVTEInt64},
                   static_cast<int32_t*>(b.data[index]),
                   call.sizes.b},
        device, stream);
  };
  to_lengths(call.lengths_q, TESSERA_SEQLENS_Q);
  to_lengths(call.lengths_k, TESSERA_SEQLENS_K);
  if (call.slopes) {
    run(SlopesJob{static_cast<float*>(b.data[TESSERA_ALIBI_SLOPES]), call.slopes}, device, stream);
  }
  check(tessera_run(&call.problem, &device, &b, &error), error);
}

// ---- the pack ----

// A tensor of the forward pass's pack.
struct AuxTensor {
  const char* name;
  Tensor tensor;
  bool is_output;  // wants memory; else it is set to the data of an input
};

bool has_bias(NVTE_Bias_Type type) {
  return type == NVTE_PRE_SCALE_BIAS || type == NVTE_POST_SCALE_BIAS;
}

std::vector<AuxTensor> aux_of(const Arguments& a, const Sizes& s, bool max) {
  const bool thd = layout_of(a.layout, "qkv_layout").q == NVTE_THD;
  std::vector<AuxTensor> aux;
  aux.push_back(
      {"Stats",
       thd ? Tensor(kNVTEFloat32, {s.hq, s.sq, 1}) : Tensor(kNVTEFloat32, {s.b, s.hq, s.sq, 1}),
       true});
  if (max) {
    aux.push_back({"Max",
                   thd ? Tensor(kNVTEFloat32, {1, s.hq, 1}) : Tensor(kNVTEFloat32, {1, s.hq, 1, 1}),
                   true});
  }
  aux.push_back({"rng_state", Tensor(kNVTEInt64, {2}, a.rng_state->data()), false});
  if (has_bias(a.bias_type)) aux.push_back({"Bias", *a.bias, false});
  if (a.softmax != NVTE_VANILLA_SOFTMAX) {
    aux.push_back(
        {"SoftmaxOffset", Tensor(kNVTEFloat32, {1, s.hq, 1, 1}, a.softmax_offset->data()), false});
  }
  return aux;
}

std::string names_of(const std::vector<AuxTensor>& aux) {
  std::string names;
  for (const AuxTensor& each : aux) names += (names.empty() ? "" : ", ") + std::string(each.name);
  return names;
}

// Whether the caller's pack holds these tensors; an empty one is for a query to fill, or says that
// an inference wants none.
bool check_aux(const NVTETensorPack& pack, const std::vector<AuxTensor>& aux, bool is_query,
               bool may_be_empty) {
  if (pack.size == 0 && (is_query || may_be_empty)) return false;
  if (pack.size != aux.size()) {
    fail(
        "Aux_CTX_Tensors.size=%zu: must be %zu: %s; the call without workspace data fills an empty "
        "pack",
        pack.size, aux.size(), names_of(aux).c_str());
  }
  for (size_t i = 0; i < aux.size(); ++i) {
    const Tensor &tensor = tensor_of(pack.tensors[i], aux[i].name), &expected = aux[i].tensor;
    if (tensor.dtype() != expected.dtype() || tensor.numel() != expected.numel()) {
      fail("Aux_CTX_Tensors[%zu].shape=%s, dtype=%d: must be %s of shape %s, dtype %d", i,
           shape_text(tensor).c_str(), static_cast<int>(tensor.dtype()), aux[i].name,
           shape_text(expected).c_str(), static_cast<int>(expected.dtype()));
    }
    if (!is_query && aux[i].is_output && tensor.numel() > 0 && !tensor.data() &&
        (!may_be_empty || i > 0)) {
      fail("Aux_CTX_Tensors[%zu].data=null: %s needs memory of shape %s", i, aux[i].name,
           shape_text(expected).c_str());
    }
  }
  return true;
}

// After the call: shapes for a query, and the inputs' data.
void write_aux(NVTETensorPack& pack, const std::vector<AuxTensor>& aux, bool is_query) {
  for (size_t i = 0; i < aux.size(); ++i) {
    NVTEBasicTensor& value = tensor_of(pack.tensors[i], aux[i].name).params[kNVTERowwiseData];
    if (is_query) value = aux[i].tensor.params[kNVTERowwiseData];
    if (is_query || !aux[i].is_output) value.data_ptr = is_query ? nullptr : aux[i].tensor.data();
  }
  pack.size = aux.size();
}

// Points the arguments of the backward pass at the tensors of the pack: Stats, [Max], rng_state,
// [Bias], [SoftmaxOffset]. Empty tensors among them, and what follows, are passed over.
void read_aux(const NVTETensorPack* pack, Arguments& a) {
  std::vector<Tensor*> given;
  for (size_t i = 0; i < std::min<size_t>(pack->size, NVTETensorPack::MAX_SIZE); ++i) {
    Tensor& tensor = tensor_of(pack->tensors[i], "Aux_CTX_Tensors");
    if (i == 0 || tensor.numel() > 0) given.push_back(&tensor);
  }
  size_t next = 0;
  const auto take = [&](const char* name, NVTEDType dtype) -> Tensor* {
    if (next < given.size() && (dtype == kNVTENumTypes || given[next]->dtype() == dtype)) {
      return given[next++];
    }
    fail(
        "Aux_CTX_Tensors.size=%zu: must be the forward pass's, Stats, rng_state, and Bias and "
        "SoftmaxOffset where they are read; its %s is missing",
        pack->size, name);
  };
  a.stats = take("Stats", kNVTEFloat32);
  if (next < given.size() && given[next]->dtype() == kNVTEFloat32) ++next;  // Max
  a.rng_state = take("rng_state", kNVTEInt64);
  if (has_bias(a.bias_type)) a.bias = take("Bias", kNVTENumTypes);
  if (a.softmax == NVTE_LEARNABLE_SOFTMAX ||
      (a.softmax == NVTE_OFF_BY_ONE_SOFTMAX && is_given(*a.dsoftmax_offset, a.is_query))) {
    a.softmax_offset = take("SoftmaxOffset", kNVTEFloat32);
  }
}

// ---- the query ----

// A batch of one sequence without data, as the query describes it.
struct Imagined {
  static constexpr int64_t kPage = 64;  // of which size pages are, the query does not say

  Tensor q, k, v, o, cu{kNVTEInt32, {2}}, table{kNVTEInt32, {0}}, bias, offset, empty, stats,
      rng{kNVTEInt64, {2}};

  static int64_t length(size_t max_seqlen, const char* name) {
    constexpr size_t kMost = size_t{1} << 40;
    if (max_seqlen > kMost) fail("%s=%zu: must be at most 2^40", name, max_seqlen);
    return static_cast<int64_t>(max_seqlen);
  }

  Imagined(const Arguments& a, NVTEDType q_dtype, NVTEDType kv_dtype, int64_t h, int64_t hg,
           int64_t dqk, int64_t dv)
      : offset(kNVTEFloat32, {1, h, 1, 1}) {
    const Layout& layout = layout_of(a.layout, "qkv_layout");
    const int64_t sq = length(a.max_seqlen_q, "max_seqlen_q"),
                  sk = length(a.max_seqlen_kv, "max_seqlen_kv");
    const auto make = [](NVTE_QKV_Format format, NVTEDType dtype, int64_t b, int64_t s,
                         int64_t heads, int64_t d) {
      if (format == NVTE_THD) return Tensor(dtype, {s, heads, d});
      if (format == NVTE_BHSD) return Tensor(dtype, {b, heads, s, d});
      if (format == NVTE_SBHD) return Tensor(dtype, {s, b, heads, d});
      return Tensor(dtype, {b, s, heads, d});
    };
    const int64_t pages = is_paged(layout) ? (sk + kPage - 1) / kPage : 1;
    const int64_t rows = is_paged(layout) ? kPage : sk;
    if (is_paged(layout)) table = Tensor(kNVTEInt32, {1, pages});
    q = make(layout.q, q_dtype, 1, sq, h, dqk);
    o = make(layout.q, q_dtype, 1, sq, h, dv);
    k = make(layout.kv, kv_dtype, pages, rows, hg, dqk);
    v = make(layout.kv, kv_dtype, pages, rows, hg, dv);
    bias = Tensor(q_dtype, {1, h, sq, sk});
    stats = layout.q == NVTE_THD ? Tensor(kNVTEFloat32, {h, sq, 1})
                                 : Tensor(kNVTEFloat32, {1, h, sq, 1});
  }

  void point(Arguments& a) {
    a.q = &q, a.k = &k, a.v = &v, a.o = &o;
    a.cu_seqlens_q = a.cu_seqlens_kv = &cu;
    a.cu_seqlens_q_padded = a.cu_seqlens_kv_padded = &empty;
    a.page_table_k = &table, a.page_table_v = &empty;
    a.bias = &bias, a.softmax_offset = &offset, a.rng_state = &rng, a.stats = &stats;
    a.d_o = &o, a.dq = &q, a.dk = &k, a.dv = &v, a.dbias = &bias, a.dsoftmax_offset = &offset;
  }
};

constexpr size_t kLargest =
    1 << 15;  // heads and head dims, so that no product of extents overflows

// True if a backend runs it; the reasons of those that do not are logged by tessera_prepare.
bool can(const Arguments& arguments) {
  try {
    const Call call = call_of(arguments);
    const tessera_device device = device_of(nullptr);
    return tessera_prepare(&call.problem, &device, 0, nullptr, nullptr) == TESSERA_OK;
  } catch (const Wrong&) {
    return false;
  }
}

// What both passes are given, and under the same names: their parameters as Arguments.
#define TESSERA_NVTE_ARGUMENTS()                                                            \
  Arguments {                                                                               \
    .q = &tensor_of(Q, "Q"), .k = &tensor_of(K, "K"), .v = &tensor_of(V, "V"),              \
    .o = &tensor_of(O, "O"), .cu_seqlens_q = &tensor_of(cu_seqlens_q, "cu_seqlens_q"),      \
    .cu_seqlens_kv = &tensor_of(cu_seqlens_kv, "cu_seqlens_kv"),                            \
    .cu_seqlens_q_padded = &tensor_of(cu_seqlens_q_padded, "cu_seqlens_q_padded"),          \
    .cu_seqlens_kv_padded = &tensor_of(cu_seqlens_kv_padded, "cu_seqlens_kv_padded"),       \
    .max_seqlen_q = max_seqlen_q, .max_seqlen_kv = max_seqlen_kv, .attn_scale = attn_scale, \
    .dropout = dropout, .layout = qkv_layout, .o_format = o_format, .bias_type = bias_type, \
    .mask = attn_mask_type, .softmax = softmax_type, .window_left = window_size_left,       \
    .window_right = window_size_right, .bottom_right_diagonal = bottom_right_diagonal,      \
    .is_query = !tensor_of(workspace, "workspace").data()                                   \
  }

}  // namespace
}  // namespace tessera::nvte

using namespace tessera::nvte;

NVTE_Fused_Attn_Backend tessera_nvte_get_fused_attn_backend(
    bool is_training, NVTEDType q_dtype, NVTEDType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    float dropout, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, int64_t window_size_left,
    int64_t window_size_right, bool return_max_logit, bool /*cuda_graph*/, bool deterministic) {
  return named("nvte_get_fused_attn_backend", [&] {
    Arguments a{};
    a.layout = a.dqkv_layout = qkv_layout;
    a.o_format = a.do_format = NVTE_QKV_Format_NOT_SET;
    a.bias_type = bias_type, a.mask = attn_mask_type, a.softmax = softmax_type;
    check_enums(a);
    check_enum(q_dtype, kNVTENumTypes - 1, "q_dtype");
    check_enum(kv_dtype, kNVTENumTypes - 1, "kv_dtype");
    const size_t largest = std::max({num_attn_heads, num_gqa_groups, head_dim_qk, head_dim_v});
    if (!(dropout >= 0 && dropout < 1) || largest > kLargest) return NVTE_No_Backend;
    a.max_seqlen_q = max_seqlen_q, a.max_seqlen_kv = max_seqlen_kv;
    a.attn_scale = 1, a.dropout = is_training ? dropout : 0;
    a.window_left = window_size_left, a.window_right = window_size_right;
    a.bottom_right_diagonal = true, a.deterministic = deterministic, a.is_query = true;
    Imagined imagined(a, q_dtype, kv_dtype, static_cast<int64_t>(num_attn_heads),
                      static_cast<int64_t>(num_gqa_groups), static_cast<int64_t>(head_dim_qk),
                      static_cast<int64_t>(head_dim_v));
    imagined.point(a);
    Tensor max(kNVTEFloat32, {static_cast<int64_t>(num_attn_heads)});
    a.max = return_max_logit ? &max : nullptr;
    if (!can(a)) return NVTE_No_Backend;
    a.backward = is_training, a.max = nullptr;
    if (is_training && !can(a)) return NVTE_No_Backend;
    const bool fp8 = q_dtype == kNVTEFloat8E4M3 || q_dtype == kNVTEFloat8E5M2;
    return fp8 ? NVTE_FP8 : NVTE_F16_arbitrary_seqlen;
  });
}

void tessera_nvte_fused_attn_fwd(
    const NVTETensor Q, const NVTETensor K, const NVTETensor V, const NVTETensor Bias,
    const NVTETensor SoftmaxOffset, NVTETensor S, NVTETensor O, NVTETensorPack* Aux_CTX_Tensors,
    const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
    const NVTETensor cu_seqlens_q_padded, const NVTETensor cu_seqlens_kv_padded,
    const NVTETensor page_table_k, const NVTETensor page_table_v, const NVTETensor rng_state,
    size_t max_seqlen_q, size_t max_seqlen_kv, bool is_training, bool return_max_logit,
    bool /*cuda_graph*/, float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout,
    NVTE_QKV_Format o_format, NVTE_QKV_Format /*qkv_scale_inv_format*/, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, NVTETensor workspace,
    cudaStream_t stream) {
  named("nvte_fused_attn_fwd", [&] {
    Tensor& work = tensor_of(workspace, "workspace");
    tensor_of(S, "S");  // of fp8; no backend asks for it
    if (!Aux_CTX_Tensors)
      fail("Aux_CTX_Tensors=null: must be a pack; nvte_tensor_pack_create makes one");
    Arguments a = TESSERA_NVTE_ARGUMENTS();
    check_enums(a);
    a.bias = &tensor_of(Bias, "Bias");
    a.softmax_offset = &tensor_of(SoftmaxOffset, "SoftmaxOffset");
    a.rng_state = &tensor_of(rng_state, "rng_state");
    a.page_table_k = &tensor_of(page_table_k, "page_table_k");
    a.page_table_v = &tensor_of(page_table_v, "page_table_v");
    if (!is_training) a.dropout = 0;
    std::vector<AuxTensor> aux = aux_of(a, sizes_of(a), return_max_logit);
    NVTETensorPack& pack = *Aux_CTX_Tensors;
    const bool is_there = check_aux(pack, aux, a.is_query, !is_training && !return_max_logit);
    if (is_there || a.is_query) {
      const auto output = [&](size_t i) {
        return is_there ? &tensor_of(pack.tensors[i], aux[i].name) : &aux[i].tensor;
      };
      if (is_given(*output(0), a.is_query)) a.stats = output(0);
      if (return_max_logit) a.max = output(1);
    }
    Call call = call_of(a);
    execute(call, device_of(a.q->data()), work, stream);
    if (!is_there ? a.is_query : !a.is_query) write_aux(pack, aux, a.is_query);
  });
}

void tessera_nvte_fused_attn_bwd(
    const NVTETensor Q, const NVTETensor K, const NVTETensor V, const NVTETensor O,
    const NVTETensor dO, const NVTETensor S, NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors,
    NVTETensor dQ, NVTETensor dK, NVTETensor dV, NVTETensor dBias, NVTETensor dSoftmaxOffset,
    const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
    const NVTETensor cu_seqlens_q_padded, const NVTETensor cu_seqlens_kv_padded,
    size_t max_seqlen_q, size_t max_seqlen_kv, float attn_scale, float dropout,
    NVTE_QKV_Layout qkv_layout, NVTE_QKV_Format o_format, NVTE_QKV_Format do_format,
    NVTE_QKV_Layout dqkv_layout, NVTE_QKV_Format /*qkv_scale_inv_format*/,
    NVTE_QKV_Format /*do_scale_inv_format*/, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, bool deterministic, bool /*cuda_graph*/,
    NVTETensor workspace, cudaStream_t stream) {
  named("nvte_fused_attn_bwd", [&] {
    const Tensor empty;
    Tensor& work = tensor_of(workspace, "workspace");
    tensor_of(S, "S"), tensor_of(dP, "dP");  // of fp8; no backend asks for them
    if (!Aux_CTX_Tensors) fail("Aux_CTX_Tensors=null: must be the pack of the forward pass");
    Arguments a = TESSERA_NVTE_ARGUMENTS();
    check_enums(a);
    a.d_o = &tensor_of(dO, "dO");
    a.dq = &tensor_of(dQ, "dQ"), a.dk = &tensor_of(dK, "dK"), a.dv = &tensor_of(dV, "dV");
    a.dbias = &tensor_of(dBias, "dBias");
    a.dsoftmax_offset = &tensor_of(dSoftmaxOffset, "dSoftmaxOffset");
    a.page_table_k = a.page_table_v = a.bias = a.softmax_offset = &empty;
    a.do_format = do_format, a.dqkv_layout = dqkv_layout;
    a.deterministic = deterministic, a.backward = true;
    read_aux(Aux_CTX_Tensors, a);
    Call call = call_of(a);
    execute(call, device_of(a.q->data()), work, stream);
  });
}
