// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/backend.h"

#include <algorithm>
#include <string>

#include "cuda/common/general.h"
#include "cuda/common/merge.h"
#include "cuda/sm80/plan.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kLeastArch = 80;
constexpr int64_t kMostHeadDim = 576;
constexpr int64_t kMostRows = int64_t{1}
                              << 29;  // positions and their sums are 32-bit in the kernels
constexpr int64_t kMostGridY = 65535;

class Sm80Backend final : public Backend {
 public:
  std::string_view name() const override { return "cuda_sm80"; }
  std::string unavailable() const override { return driver_unavailable(); }

  Support supports(const Problem& p, const Device& device) const override {
    Support support;
    const Sizes s = sizes_of(p);
    const int32_t q = p.tensor[TESSERA_Q].dtype, k = p.tensor[TESSERA_K].dtype;
    support.require(device.kind == TESSERA_CUDA, ReasonId::kDevice, Remedy::kNone,
                    [] { return std::string("device=cpu: must be a CUDA device"); });
    if (device.kind == TESSERA_CUDA) {
      const int arch = arch_of(device);
      support.require(arch == 0 || arch >= kLeastArch, ReasonId::kDevice, Remedy::kDeviceCpu,
                      [&] { return "arch=" + std::to_string(arch) + ": must be 80 or later"; });
    }
    support.require(q == TESSERA_FP32 || is_16bit(q), ReasonId::kDtype, Remedy::kUseBf16, [&] {
      return "q.dtype=" + std::string(dtype_name(q)) + ": must be fp32, bf16 or fp16";
    });
    support.require(!is_backward(p) || !is_fp8(k), ReasonId::kDtype, Remedy::kUseBf16, [&] {
      return "k.dtype=" + std::string(dtype_name(k)) + ": has no gradient; must be that of q";
    });
    require_most(support, ReasonId::kHeadDim, "head_dim_qk", s.dqk, kMostHeadDim);
    require_most(support, ReasonId::kHeadDim, "head_dim_v", s.dv, kMostHeadDim);
    if (support) {
      // Only the backward pass in fp32 of the widest heads meets a device that is too small for it.
      support.require(
          has_kernels(p, std::max(s.dqk, s.dv), arch_of(device)), ReasonId::kHeadDim,
          Remedy::kUseBf16, [&] {
            return "head_dim=" + std::to_string(std::max(s.dqk, s.dv)) + ": in " +
                   std::string(dtype_name(q)) +
                   " needs more shared memory than this device has; must be at most 256";
          });
    }
    require_most(support, ReasonId::kSize, "sq", s.sq, kMostRows);
    require_most(support, ReasonId::kSize, "sk", s.sk, kMostRows);
    require_most(support, ReasonId::kSize, "batch", s.batch, kMostRows);
    require_most(support, ReasonId::kSize, "num_heads_q", s.hq, kMostGridY);
    return support;
  }

  Problem canonical(const Problem& problem) const override {
    Problem p{};
    p.struct_size = problem.struct_size;
    p.pass = problem.pass;
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      p.tensor[index].dtype = problem.tensor[index].dtype;
      for (int axis = 0; axis < 3; ++axis) p.tensor[index].extent[axis] = 1;
      p.tensor[index].extent[3] = problem.tensor[index].extent[3];
    }
    return p;
  }

  Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                     const Device& device) const override {
    return is_backward(canonical) ? plan_backward(canonical, device)
                                  : plan_forward(canonical, device);
  }

  bool owns_utilities(const Device& device) const override { return device.kind == TESSERA_CUDA; }
  Status merge(const MergeArgs& args, const Buffers& context, const Device& device) const override {
    return cuda::merge(args, context, device);
  }
  Status dropout_mask(const DropoutMaskArgs& args, const Buffers& context,
                      const Device& device) const override {
    return cuda::dropout_mask(args, context, device);
  }

  std::string description_json() const override {
    return "{\"kernels\": " + std::to_string(kernels().size()) + "}";
  }

 private:
  static bool has_kernels(const Problem& p, int64_t head_dim, int arch) {
    const int dtype = p.tensor[TESSERA_Q].dtype, shared_bytes = shared_bytes_of(arch);
    if (!is_backward(p))
      return find_kernel(Pass::forward, kEveryFeature, dtype, head_dim, shared_bytes);
    for (const Pass pass : {Pass::backward_dq, Pass::backward_dkdv, Pass::backward_dbias}) {
      if (!find_kernel(pass, kEveryFeature, dtype, head_dim, shared_bytes)) return false;
    }
    return true;
  }

  // What a CTA may have, by compute capability (CUDA C++ Programming Guide, technical
  // specifications).
  static int shared_bytes_of(int arch) {
    switch (arch) {
      case 80:
      case 87:
        return 163 * 1024;
      case 86:
      case 89:
      case 120:
      case 121:
        return 99 * 1024;
    }
    return 227 * 1024;
  }

  static void require_most(Support& support, ReasonId id, const char* name, int64_t value,
                           int64_t most) {
    support.require(value <= most, id, Remedy::kNone, [&] {
      return std::string(name) + "=" + std::to_string(value) + ": must be at most " +
             std::to_string(most);
    });
  }
};

}  // namespace

const Backend& backend() {
  static const Sm80Backend instance;
  return instance;
}

// A kernel of one feature takes it for granted.
static bool serves(const Kernel& kernel, unsigned features) {
  const bool several = (kernel.features & (kernel.features - 1)) != 0;
  return kernel.features == features || (several && (features & ~kernel.features) == 0);
}

const Kernel* find_kernel(Pass pass, unsigned features, int dtype, int64_t head_dim,
                          int shared_bytes, bool plain) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.pass == pass && kernel.dtype == dtype && kernel.plain == plain &&
        serves(kernel, features) && kernel.bucket >= head_dim &&
        kernel.shared_bytes <= shared_bytes &&
        (!kernel.large || shared_bytes >= kLargeSharedBytes)) {
      return &kernel;
    }
  }
  return nullptr;
}

unsigned features_of(const Problem& problem) {
  constexpr int64_t kMostMasks = 65535;  // a grid's z; see map_blocks
  const int dtype = problem.tensor[TESSERA_Q].dtype;
  unsigned features = 0;
  if (given(problem, TESSERA_BIAS)) {
    const Tensor& bias = problem.tensor[TESSERA_BIAS];
    const bool plain = !has(problem, TESSERA_BIAS_PRE_SCALE) && bias.dtype == dtype &&
                       is_16bit(dtype) && bias.extent[3] > 1 && bias.stride[3] == 1;
    features |= plain ? kBias : kOther;
  }
  if (has(problem, TESSERA_SOFTCAP)) features |= kSoftcap;
  if (given(problem, TESSERA_ALIBI_SLOPES)) features |= kAlibi;
  if (given(problem, TESSERA_MASK)) {
    const Tensor& mask = problem.tensor[TESSERA_MASK];
    const bool plain = mask.extent[2] > 1 && mask.extent[0] * mask.extent[1] <= kMostMasks;
    features |= plain ? kMasks : kOther;
  }
  if (given(problem, TESSERA_KEY_RANGES) || given(problem, TESSERA_SEGMENT_IDS_Q)) {
    features |= kMasks;
  }
  if (has(problem, TESSERA_DROPOUT)) features |= kDropout;
  if (is_paged(problem) || given(problem, TESSERA_K_SCALE) || given(problem, TESSERA_V_SCALE) ||
      is_fp8(problem.tensor[TESSERA_K].dtype)) {
    features |= kOther;
  }
  return features;
}

unsigned features_of(const Problem& problem, const Params& p) {
  const View& bias = p.tensor[TESSERA_BIAS];
  const bool aligned = has_aligned_keys(p) && (!bias.data || bias.vector_bytes == 16);
  return features_of(problem) | (aligned ? 0u : unsigned{kOther});
}

static const char* name_of(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return "forward";
    case Pass::decode:
      return "decode";
    case Pass::backward_dq:
      return "backward_dq";
    case Pass::backward_dkdv:
      return "backward_dkdv";
    case Pass::backward_fused:
      return "backward_fused";
    case Pass::backward_dbias:
      return "backward_dbias";
  }
  return "";
}

Status prepare(const Kernel* kernel) {
  if (!kernel) {
    return Status(TESSERA_REFUSED,
                  "head_dim: no kernel fits in this device's shared memory; use "
                  "bf16 or fp16");
  }
  for (const void* function : {kernel->function, kernel->in_turn}) {
    if (!function) continue;
    TESSERA_RETURN_IF_ERROR(
        cuda_status(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kernel->shared_bytes),
                    "cudaFuncSetAttribute"));
  }
  return {};
}

Status launch(const Kernel& kernel, dim3 grid, const void* args, cudaStream_t stream) {
  return launch_kernel(name_of(kernel.pass), kernel.function, grid, kernel.tile.threads(),
                       kernel.shared_bytes, args, stream);
}

}  // namespace tessera::cuda::sm80

const tessera::Backend& tessera::cuda::general_backend() { return sm80::backend(); }
