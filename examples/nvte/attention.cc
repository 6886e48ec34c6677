// SPDX-License-Identifier: Apache-2.0
// example (tessera_nvte): a program against TransformerEngine's C header, both passes
// Attention over packed sequences, both passes, as a program against TransformerEngine's C header
// writes it, by both generations of its calls: no name of tessera's is in it. After `cmake --install`:
//   c++ -std=c++17 -I. attention.cc $(pkg-config --cflags tessera) -L... -ltessera_nvte -ltessera
// The memory is the host's, so the CPU computes; with memory of a CUDA device that device does.
#include <transformer_engine/fused_attn.h>
#include <transformer_engine/transformer_engine.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

namespace {

constexpr size_t kHeads = 4, kHeadDim = 64, kLongest = 40;

std::vector<float> random_numbers(size_t count) {
  std::vector<float> numbers(count);
  for (float& x : numbers)
    x = 2.0f * static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 1.0f;
  return numbers;
}

// Memory for the tensors of a pack that have a shape; it must outlive the pack's use.
std::vector<std::vector<char>> allocate(NVTETensorPack& pack) {
  std::vector<std::vector<char>> memory;
  for (size_t i = 0; i < pack.size; ++i) {
    NVTEBasicTensor tensor = nvte_get_tensor_param(pack.tensors[i], kNVTERowwiseData);
    memory.emplace_back(nvte_tensor_size_bytes(pack.tensors[i]));
    tensor.data_ptr = memory.back().data();
    nvte_set_tensor_param(&pack.tensors[i], kNVTERowwiseData, &tensor);
  }
  return memory;
}

// The second generation of calls: what is not set is not given.
template <typename Params>
void set_params(Params& params, NVTETensorPack& aux, const TensorWrapper& q, const TensorWrapper& k,
                const TensorWrapper& v, const TensorWrapper& o, const TensorWrapper& cu_seqlens,
                float scale, const TensorWrapper& workspace) {
  params.set_Q(q.data()).set_K(k.data()).set_V(v.data()).set_O(o.data());
  params.set_Aux_CTX_Tensors(&aux).set_workspace(workspace.data());
  params.set_cu_seqlens_q(cu_seqlens.data()).set_cu_seqlens_kv(cu_seqlens.data());
  params.set_max_seqlen_q(kLongest).set_max_seqlen_kv(kLongest).set_attn_scale(scale);
  params.set_qkv_layout(NVTE_T3HD).set_attn_mask_type(NVTE_PADDING_CAUSAL_MASK);
}

void check_backend() {
  FusedAttnConfigWrapper config;
  config.set_qkv_layout(NVTE_T3HD).set_attn_mask_type(NVTE_PADDING_CAUSAL_MASK).set_batch_size(3);
  config.set_num_attn_heads(kHeads).set_num_gqa_groups(kHeads).set_max_seqlen_q(kLongest);
  config.set_head_dim_qk(kHeadDim).set_head_dim_v(kHeadDim).set_max_seqlen_kv(kLongest);
  const char* message = nullptr;
  const auto backend = nvte_get_fused_attn_backend_v2(config, &message);
  std::printf("backend in bf16: %d\n", static_cast<int>(backend));
  if (backend == NVTE_No_Backend || *message) throw std::runtime_error(message);
}

void attention(bool second) {
  // Three sequences of 40, 7 and 25 tokens, one behind the other; q, k and v of a token together.
  std::vector<int32_t> offsets{0, 40, 47, 72};
  const size_t tokens = 72, row = kHeads * kHeadDim;
  std::vector<float> qkv = random_numbers(tokens * 3 * row), d_out = random_numbers(tokens * row);
  std::vector<float> out(tokens * row), d_qkv(tokens * 3 * row);
  const std::vector<size_t> shape{tokens, kHeads, kHeadDim};
  TensorWrapper q(&qkv[0], shape, DType::kFloat32), k(&qkv[row], shape, DType::kFloat32),
      v(&qkv[2 * row], shape, DType::kFloat32), o(out.data(), shape, DType::kFloat32),
      d_o(d_out.data(), shape, DType::kFloat32), dq(&d_qkv[0], shape, DType::kFloat32),
      dk(&d_qkv[row], shape, DType::kFloat32), dv(&d_qkv[2 * row], shape, DType::kFloat32);
  TensorWrapper cu_seqlens(offsets.data(), std::vector<size_t>{4}, DType::kInt32), none;
  const float scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));

  NVTETensorPack aux;
  nvte_tensor_pack_create(&aux);
  const auto forward = [&](TensorWrapper& workspace) {
    if (second) {
      FusedAttnFwdParamsWrapper params;
      set_params(params, aux, q, k, v, o, cu_seqlens, scale, workspace);
      return nvte_fused_attn_fwd_v2(params);
    }
    nvte_fused_attn_fwd(q.data(), k.data(), v.data(), none.data(), none.data(), none.data(),
                        o.data(), &aux, cu_seqlens.data(), cu_seqlens.data(), none.data(),
                        none.data(), none.data(), none.data(), none.data(), kLongest, kLongest,
                        true, false, false, scale, 0.0f, NVTE_T3HD, NVTE_THD,
                        NVTE_QKV_Format_NOT_SET, NVTE_NO_BIAS, NVTE_PADDING_CAUSAL_MASK,
                        NVTE_VANILLA_SOFTMAX, -1, -1, false, workspace.data(), nullptr);
  };
  const auto backward = [&](TensorWrapper& workspace) {
    if (second) {
      FusedAttnBwdParamsWrapper params;
      set_params(params, aux, q, k, v, o, cu_seqlens, scale, workspace);
      params.set_dO(d_o.data()).set_dQ(dq.data()).set_dK(dk.data()).set_dV(dv.data());
      return nvte_fused_attn_bwd_v2(params.set_deterministic(true));
    }
    nvte_fused_attn_bwd(q.data(), k.data(), v.data(), o.data(), d_o.data(), none.data(),
                        none.data(), &aux, dq.data(), dk.data(), dv.data(), none.data(),
                        none.data(), cu_seqlens.data(), cu_seqlens.data(), none.data(), none.data(),
                        kLongest, kLongest, scale, 0.0f, NVTE_T3HD, NVTE_THD, NVTE_THD, NVTE_T3HD,
                        NVTE_QKV_Format_NOT_SET, NVTE_QKV_Format_NOT_SET, NVTE_NO_BIAS,
                        NVTE_PADDING_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX, -1, -1, false, true, false,
                        workspace.data(), nullptr);
  };
  // The first call of each pass says what memory the second needs.
  TensorWrapper wanted;
  forward(wanted);
  const auto aux_memory = allocate(aux);
  std::vector<char> memory(wanted.bytes());
  TensorWrapper workspace(memory.data(), wanted.shape(), wanted.dtype());
  forward(workspace);

  TensorWrapper wanted_back;
  backward(wanted_back);
  std::vector<char> memory_back(wanted_back.bytes());
  TensorWrapper workspace_back(memory_back.data(), wanted_back.shape(), wanted_back.dtype());
  backward(workspace_back);
  nvte_tensor_pack_destroy(&aux);

  // The first query of each sequence sees the first key alone: its output is the first value.
  float worst = 0;
  for (const size_t first : {0, 40, 47}) {
    for (size_t i = 0; i < row; ++i) {
      worst =
          std::fmax(worst, std::fabs(out[first * row + i] - qkv[first * 3 * row + 2 * row + i]));
    }
  }
  // Every row of probabilities sums to 1, so the gradients of v sum to those of the output.
  double sum = 0;
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t i = 0; i < row; ++i) {
      sum += static_cast<double>(d_qkv[t * 3 * row + 2 * row + i]) -
             static_cast<double>(d_out[t * row + i]);
    }
  }
  std::printf("o = v of first tokens: off by %g; sum of dv less sum of do: %g\n",
              static_cast<double>(worst), sum);
  if (worst > 1e-6f || std::fabs(sum) > 1e-2) throw std::runtime_error("the numbers are wrong");
}

}  // namespace

int main() {
  try {
    check_backend();
    for (const bool second : {false, true}) attention(second);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
