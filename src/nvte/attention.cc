// SPDX-License-Identifier: Apache-2.0
// nvte_fused_attn_fwd and _bwd of both generations, over tessera_prepare and tessera_run.
#include <algorithm>
#include <cinttypes>

#include "nvte/call.h"
#include "nvte/device.h"
#include "nvte/params.h"

namespace tessera::nvte {
namespace {

constexpr int64_t kAlignment = 256;  // what CUDA wants of a workspace; the CPU wants 64

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What tessera.h says of a call that failed, whole.
void check(int32_t code, const tessera_error& error) {
  if (code != TESSERA_OK) throw std::runtime_error(error.message);
}

// Both calls of the protocol, each of which looks the plan up once. The workspace: lengths of q,
// of k, slopes, and then tessera's own.
void execute(Call& call, const tessera_device& device, Tensor& workspace, cudaStream_t stream) {
  tessera_error error{};
  error.struct_size = sizeof error;
  const int64_t lengths = aligned(call.sizes.b * 4);
  const int64_t at_k = call.lengths_q ? lengths : 0;
  const int64_t at_slopes = at_k + (call.lengths_k ? lengths : 0);
  const int64_t at_rest = at_slopes + aligned(call.slopes * 4);
  // A pointer of any alignment will do.
  const auto needed = [&] {
    tessera_info info{};
    info.struct_size = sizeof info;
    check(tessera_prepare(&call.problem, &device, 0, &info, &error), error);
    const int64_t bytes = at_rest + info.workspace_bytes;
    return bytes > 0 ? bytes + kAlignment - 1 : 1;
  };
  if (!workspace.data()) {
    workspace.params[kNVTERowwiseData] = Tensor(kNVTEByte, {needed()}).params[kNVTERowwiseData];
    return;
  }
  const int64_t given = workspace.numel() * bytes_of(workspace.dtype());
  const auto check_given = [&] {
    const int64_t bytes = needed();
    if (given >= bytes) return;
    fail("workspace.shape=%s: must have %" PRId64
         " bytes; the call without workspace data says how many",
         shape_text(workspace).c_str(), bytes);
  };
  const int64_t rest = given - (kAlignment - 1) - at_rest;
  if (given < 1 || (rest < 0 && at_rest > 0)) check_given();
  const auto start = (reinterpret_cast<uintptr_t>(workspace.data()) + kAlignment - 1) / kAlignment;
  char* const base = reinterpret_cast<char*>(start * kAlignment);
  tessera_buffers& b = call.buffers;
  b.stream = stream;
  b.workspace = base + at_rest;
  b.workspace_bytes = std::max<int64_t>(rest, 0);
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
  const int32_t code = tessera_run(&call.problem, &device, &b, &error);
  if (code == TESSERA_OK) return;
  const std::string text = error.message;
  check_given();  // the workspace, in the caller's words
  throw std::runtime_error(text);
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

// ---- the passes ----

// What both passes have, under the same names.
template <typename Params>
Arguments arguments_of(const Params& p) {
  Arguments a{};
  a.q = &tensor_of(p.Q, "Q"), a.k = &tensor_of(p.K, "K"), a.v = &tensor_of(p.V, "V");
  a.o = &tensor_of(p.O, "O");
  a.cu_seqlens_q = &tensor_or_empty(p.cu_seqlens_q);
  a.cu_seqlens_kv = &tensor_or_empty(p.cu_seqlens_kv);
  a.cu_seqlens_q_padded = &tensor_or_empty(p.cu_seqlens_q_padded);
  a.cu_seqlens_kv_padded = &tensor_or_empty(p.cu_seqlens_kv_padded);
  a.max_seqlen_q = p.max_seqlen_q, a.max_seqlen_kv = p.max_seqlen_kv;
  a.attn_scale = p.attn_scale, a.dropout = p.dropout;
  a.layout = p.qkv_layout, a.o_format = p.o_format;
  a.bias_type = p.bias_type, a.mask = p.attn_mask_type, a.softmax = p.softmax_type;
  a.window_left = p.window_size_left, a.window_right = p.window_size_right;
  a.bottom_right_diagonal = p.bottom_right_diagonal;
  a.is_query = !tensor_of(p.workspace, "workspace").data();
  check_enums(a);
  return a;
}

void forward(const FwdParams& p) {
  Tensor& work = tensor_of(p.workspace, "workspace");
  if (!p.Aux_CTX_Tensors)
    fail("Aux_CTX_Tensors=null: must be a pack; nvte_tensor_pack_create makes one");
  Arguments a = arguments_of(p);
  a.bias = &tensor_or_empty(p.Bias);
  a.softmax_offset = &tensor_or_empty(p.SoftmaxOffset);
  a.rng_state = &tensor_or_empty(p.rng_state);
  a.page_table_k = &tensor_or_empty(p.page_table_k);
  a.page_table_v = &tensor_or_empty(p.page_table_v);
  if (!p.is_training) a.dropout = 0;
  std::vector<AuxTensor> aux = aux_of(a, sizes_of(a), p.return_max_logit);
  NVTETensorPack& pack = *p.Aux_CTX_Tensors;
  const bool is_there = check_aux(pack, aux, a.is_query, !p.is_training && !p.return_max_logit);
  if (is_there || a.is_query) {
    const auto output = [&](size_t i) {
      return is_there ? &tensor_of(pack.tensors[i], aux[i].name) : &aux[i].tensor;
    };
    if (is_given(*output(0), a.is_query)) a.stats = output(0);
    if (p.return_max_logit) a.max = output(1);
  }
  Call call = call_of(a);
  execute(call, device_of(a.q->data()), work, p.stream);
  if (!is_there ? a.is_query : !a.is_query) write_aux(pack, aux, a.is_query);
}

void backward(const BwdParams& p) {
  const Tensor empty;
  Tensor& work = tensor_of(p.workspace, "workspace");
  if (!p.Aux_CTX_Tensors) fail("Aux_CTX_Tensors=null: must be the pack of the forward pass");
  Arguments a = arguments_of(p);
  a.d_o = &tensor_of(p.dO, "dO");
  a.dq = &tensor_of(p.dQ, "dQ"), a.dk = &tensor_of(p.dK, "dK"), a.dv = &tensor_of(p.dV, "dV");
  a.dbias = &tensor_or_empty(p.dBias);
  a.dsoftmax_offset = &tensor_or_empty(p.dSoftmaxOffset);
  a.page_table_k = a.page_table_v = a.bias = a.softmax_offset = &empty;
  const bool set = p.dqkv_layout != NVTE_QKV_Layout_NOT_SET;
  a.do_format = p.do_format, a.dqkv_layout = set ? p.dqkv_layout : p.qkv_layout;
  a.deterministic = p.deterministic, a.backward = true;
  read_aux(p.Aux_CTX_Tensors, a);
  Call call = call_of(a);
  execute(call, device_of(a.q->data()), work, p.stream);
}

}  // namespace
}  // namespace tessera::nvte

using namespace tessera::nvte;

void tessera_nvte_fused_attn_fwd_v2(NVTEFusedAttnFwdParams params) {
  named("nvte_fused_attn_fwd_v2", [&] { forward(fwd_params_of(params)); });
}

void tessera_nvte_fused_attn_bwd_v2(NVTEFusedAttnBwdParams params) {
  named("nvte_fused_attn_bwd_v2", [&] { backward(bwd_params_of(params)); });
}

// Parameters have the names of the fields.
#define TESSERA_NVTE_NAME(attribute, type, name, value) name,

void tessera_nvte_fused_attn_fwd(
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
    cudaStream_t stream) {
  named("nvte_fused_attn_fwd", [&] {
    const FwdParams params{TESSERA_NVTE_FWD_FIELDS(TESSERA_NVTE_NAME)};
    check_tensors(params);
    forward(params);
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
    NVTE_QKV_Layout dqkv_layout, NVTE_QKV_Format qkv_scale_inv_format,
    NVTE_QKV_Format do_scale_inv_format, NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type,
    NVTE_Softmax_Type softmax_type, int64_t window_size_left, int64_t window_size_right,
    bool bottom_right_diagonal, bool deterministic, bool cuda_graph, NVTETensor workspace,
    cudaStream_t stream) {
  named("nvte_fused_attn_bwd", [&] {
    const BwdParams params{TESSERA_NVTE_BWD_FIELDS(TESSERA_NVTE_NAME)};
    check_tensors(params);
    backward(params);
  });
}
