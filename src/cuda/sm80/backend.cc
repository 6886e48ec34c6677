// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/backend.h"

#include "cuda/common/cache/cache.h"
#include "cuda/common/general.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/row_sums/row_sums.h"
#include "cuda/sm80/convert/problem.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/products/problem.h"
#include "cuda/sm80/rules.h"

namespace tessera::cuda::sm80 {
namespace {

class Sm80Backend final : public Sm80Rules {
 public:
  std::string unavailable() const override { return driver_unavailable(); }

  Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                     const Device& device) const override {
    if (is_rounded(canonical)) return plan_products(canonical, device);
    if (is_converted(canonical)) return plan_converted(canonical, device);
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
  Status sum_rows(const RowSums& sums, const Buffers& context,
                  const Device& device) const override {
    return cuda::sum_rows(sums, context, device);
  }
  Status rotate(const RotateArgs& args, const Buffers& context,
                const Device& device) const override {
    return cuda::rotate(args, context, device);
  }
  Status append(const AppendArgs& args, const Buffers& context,
                const Device& device) const override {
    return cuda::append(args, context, device);
  }

 protected:
  DeviceTraits traits_of(const Device& device) const override { return traits_of_device(device); }
};

}  // namespace

const Backend& backend() {
  static const Sm80Backend instance;
  return instance;
}

Status prepare(const Kernel* kernel) {
  if (!kernel) {
    return Status(TESSERA_REFUSED,
                  "head_dim: no kernel fits in this device's shared memory; use "
                  "bf16 or fp16");
  }
  for (const void* function :
       {kernel->code->function, kernel->code->in_turn, kernel->code->of_low}) {
    if (!function) continue;
    TESSERA_RETURN_IF_ERROR(
        cuda_status(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kernel->tile.shared_bytes),
                    "cudaFuncSetAttribute"));
  }
  return {};
}

Status prepare_all(const KernelSet& kernels) {
  for (const Kernel* kernel : kernels) {
    if (kernel) TESSERA_RETURN_IF_ERROR(prepare(kernel));
  }
  return {};
}

Status launch(const Kernel& kernel, dim3 grid, const void* args, cudaStream_t stream) {
  return launch_kernel(kernel.name, kernel.code->function, grid, kernel.tile.threads(),
                       kernel.tile.shared_bytes, args, stream);
}

}  // namespace tessera::cuda::sm80

const tessera::Backend& tessera::cuda::general_backend() { return sm80::backend(); }
