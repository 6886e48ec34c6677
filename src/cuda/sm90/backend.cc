// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backend.h"

#include "core/problem/dtype.h"
#include "cuda/common/general.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/fp8/choice.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/rules.h"

namespace tessera::cuda::sm90 {
namespace {

class Sm90Backend final : public Sm90Rules {
 public:
  std::string unavailable() const override { return driver_unavailable(); }

  Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                     const Device& device) const override {
    if (is_rounded(canonical) && is_backward(canonical)) {
      return plan_fp8_backward(canonical, device);
    }
    auto fallback = general_backend().plan(canonical, device);
    if (!fallback.ok()) return fallback;
    if (is_rounded(canonical)) {
      return plan_fp8_forward(canonical, device, std::move(fallback).value());
    }
    const bool latent = has_mla_head_dims(canonical);
    const auto plan_few_rows = latent ? plan_mla : plan_decode;
    // A latent cache in fp8 beside a q in 16 bits has these kernels alone.
    if (latent && !is_backward(canonical) && is_fp8(canonical.tensor[TESSERA_K].dtype) &&
        !is_of_fp8(canonical)) {
      return plan_few_rows(canonical, device, std::move(fallback).value(), nullptr);
    }
    auto plan = is_backward(canonical)         ? plan_backward
                : is_of_fp8(canonical)         ? plan_fp8_forward
                : is_wide(sizes_of(canonical)) ? plan_wide_forward
                                               : plan_forward;
    auto planned = plan(canonical, device, std::move(fallback).value());
    if (planned.ok() && (plan == plan_backward || plan == plan_forward)) {
      planned = plan_padded_bias(std::move(planned).value());
    }
    if (!planned.ok() || is_backward(canonical) || !(latent || has_decode_kernel(canonical))) {
      return planned;
    }
    auto general = general_backend().plan(canonical, device);
    if (!general.ok()) return general;
    return plan_few_rows(canonical, device, std::move(general).value(), std::move(planned).value());
  }

 protected:
  DeviceTraits traits_of(const Device& device) const override { return traits_of_device(device); }
};

}  // namespace

const Backend& backend() {
  static const Sm90Backend instance;
  return instance;
}

}  // namespace tessera::cuda::sm90
