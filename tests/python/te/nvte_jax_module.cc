// SPDX-License-Identifier: Apache-2.0
// A Python module over tessera_nvte_jax.h, bound as TransformerEngine's JAX extension binds its own
// functions, and a forward pass in the memory that they ask for. test_nvte_jax_header.py compiles it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

// pybind11 comes before the header under test.
#include <tessera_nvte_jax.h>

namespace {

namespace te = transformer_engine;

void* memory(uintptr_t address) { return reinterpret_cast<void*>(address); }

// Causal attention of fp32 [b, s, h, d] at these addresses; stats is [b, h, s, 1].
void forward(size_t b, size_t s, size_t h, size_t d, float scale, uintptr_t q, uintptr_t k,
             uintptr_t v, uintptr_t o, uintptr_t stats, uintptr_t cu_seqlens, uintptr_t rng_state,
             uintptr_t workspace, const std::vector<size_t>& workspace_shape,
             te::DType workspace_dtype) {
  const auto tokens = [&](uintptr_t address) {
    return te::TensorWrapper(memory(address), std::vector<size_t>{b, s, h, d}, te::DType::kFloat32);
  };
  const te::TensorWrapper tq = tokens(q), tk = tokens(k), tv = tokens(v), to = tokens(o), none;
  const te::TensorWrapper cu(memory(cu_seqlens), std::vector<size_t>{b + 1}, te::DType::kInt32);
  const te::TensorWrapper rng(memory(rng_state), std::vector<size_t>{2}, te::DType::kInt64);
  const te::TensorWrapper work(memory(workspace), workspace_shape, workspace_dtype);
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  te::jax::PrepareFusedAttnForwardAuxTensors(&pack, b, 0, h, 0, s, s, te::DType::kFloat32,
                                             NVTE_NO_BIAS, NVTE_F16_arbitrary_seqlen, memory(stats),
                                             memory(rng_state));
  nvte_fused_attn_fwd(tq.data(), tk.data(), tv.data(), none.data(), none.data(), none.data(),
                      to.data(), &pack, cu.data(), cu.data(), none.data(), none.data(), none.data(),
                      none.data(), rng.data(), s, s, true, false, false, scale, 0,
                      NVTE_BSHD_BSHD_BSHD, NVTE_QKV_Format_NOT_SET, NVTE_QKV_Format_NOT_SET,
                      NVTE_NO_BIAS, NVTE_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX, -1, 0, false,
                      work.data(), nullptr);
  nvte_tensor_pack_destroy(&pack);
}

}  // namespace

PYBIND11_MODULE(nvte_jax_module, m) {
  pybind11::enum_<te::DType>(m, "DType")
      .value("kByte", te::DType::kByte)
      .value("kInt32", te::DType::kInt32)
      .value("kFloat32", te::DType::kFloat32)
      .value("kBFloat16", te::DType::kBFloat16);
  pybind11::enum_<NVTE_Bias_Type>(m, "Bias").value("NONE", NVTE_NO_BIAS);
  pybind11::enum_<NVTE_Mask_Type>(m, "Mask").value("CAUSAL", NVTE_CAUSAL_MASK);
  pybind11::enum_<NVTE_Softmax_Type>(m, "Softmax").value("VANILLA", NVTE_VANILLA_SOFTMAX);
  pybind11::enum_<NVTE_QKV_Layout>(m, "Layout")
      .value("BSHD_BSHD_BSHD", NVTE_BSHD_BSHD_BSHD)
      .value("T3HD", NVTE_T3HD);
  pybind11::enum_<NVTE_Fused_Attn_Backend>(m, "Backend")
      .value("NONE", NVTE_No_Backend)
      .value("ARBITRARY", NVTE_F16_arbitrary_seqlen);
  m.def("get_fused_attn_backend", &te::jax::GetFusedAttnBackend);
  m.def("get_fused_attn_fwd_workspace_sizes", &te::jax::GetFusedAttnForwardWorkspaceSizes);
  m.def("get_fused_attn_bwd_workspace_sizes", &te::jax::GetFusedAttnBackwardWorkspaceSizes);
  m.def("forward", &forward);
}
