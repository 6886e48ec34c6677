// SPDX-License-Identifier: Apache-2.0
// The only file that names concrete backends. A new one takes its header and a line in kBackends.
#include "backends.h"

#include <vector>

#include "cpu/backend.h"
#if TESSERA_WITH_CUDNN
#include "cuda/cudnn/backend.h"
#else
#include "cuda/cudnn/rules.h"
#endif
#if TESSERA_WITH_CUDA
#include "cuda/sm80/backend.h"
#include "cuda/sm90/backend.h"
#else
#include "cuda/sm80/rules.h"
#include "cuda/sm90/rules.h"
#endif
#include "reference.h"

namespace tessera {
namespace {

// What a backend that was left out of this build would answer, and that it was left out.
class NotBuilt final : public Backend {
 public:
  explicit NotBuilt(const Backend& rules) : rules_(rules) {}

  std::string_view name() const override { return rules_.name(); }
  std::string unavailable() const override { return rules_.unavailable(); }
  bool is_built() const override { return false; }
  Support supports(const Problem& problem, const Device& device) const override {
    Support support = rules_.supports(problem, device);
    support.require(false, ReasonId::kNotBuilt,
                    device.kind == TESSERA_CUDA ? Remedy::kDeviceCpu : Remedy::kNone,
                    [&] { return rules_.unavailable(); });
    return support;
  }
  std::string yields(const Problem& problem, const Device& device) const override {
    return rules_.yields(problem, device);
  }
  std::string kernels_for(const Problem& problem, const Device& device) const override {
    return rules_.kernels_for(problem, device);
  }
  Problem canonical(const Problem& problem) const override { return rules_.canonical(problem); }
  Result<std::unique_ptr<Plan>> plan(const Problem& problem, const Device& device) const override {
    return rules_.plan(problem, device);
  }
  std::string description_json() const override { return rules_.description_json(); }

 private:
  const Backend& rules_;
};

}  // namespace

// In the order in which they are asked. One that this build leaves out stands there by its rules.
BackendList all_backends() {
#if TESSERA_WITH_CUDA
  const Backend &sm90 = cuda::sm90::backend(), &sm80 = cuda::sm80::backend();
#else
  static const cuda::sm90::Sm90Rules sm90_rules;
  static const cuda::sm80::Sm80Rules sm80_rules;
  static const NotBuilt sm90(sm90_rules), sm80(sm80_rules);
#endif
#if TESSERA_WITH_CUDNN
  const Backend& cudnn = cuda::cudnn::backend();
#else
  static const cuda::cudnn::CudnnRules cudnn_rules;
  static const NotBuilt cudnn(cudnn_rules);
#endif
  static const Backend* const kBackends[] = {
      &sm90, &cudnn, &sm80, &cpu::backend(), &reference_backend(),
  };
  return kBackends;
}

BackendList built_backends() {
  static const auto& built = *new const std::vector<const Backend*>([] {
    std::vector<const Backend*> list;
    for (const Backend* backend : all_backends()) {
      if (backend->is_built()) list.push_back(backend);
    }
    return list;
  }());
  return built;
}

}  // namespace tessera
