// SPDX-License-Identifier: Apache-2.0
// The only file that names concrete backends. To add one: its header, and its line in kBuilt.
#include "backends.h"

#include <vector>

#include "cpu/backend.h"
#if TESSERA_WITH_CUDA
#include "cuda/sm80/backend.h"
#include "cuda/sm90/backend.h"
#endif

namespace tessera {
namespace {

class NotBuilt final : public Backend {
 public:
  explicit NotBuilt(std::string_view name) : name_(name) {}

  std::string_view name() const override { return name_; }
  std::string unavailable() const override { return kWhy; }
  Support supports(const Problem&, const Device& device) const override {
    Support support;
    support.require(false, ReasonId::kNotBuilt,
                    device.kind == TESSERA_CUDA ? Remedy::kDeviceCpu : Remedy::kNone,
                    [] { return std::string(kWhy); });
    return support;
  }
  Problem canonical(const Problem& problem) const override { return problem; }
  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    return Status(TESSERA_REFUSED, kWhy);
  }

 private:
  static constexpr const char* kWhy =
      "this build has no CUDA backend; configure it with TESSERA_CUDA=ON";
  std::string_view name_;
};

}  // namespace

BackendList built_backends() {
  static const Backend* const kBuilt[] = {
#if TESSERA_WITH_CUDA
    &cuda::sm90::backend(),
    &cuda::sm80::backend(),
#endif
    &cpu::backend(),
    &cpu::reference_backend(),
  };
  return kBuilt;
}

BackendList all_backends() {
#if TESSERA_WITH_CUDA
  return built_backends();
#else
  static const NotBuilt sm90("cuda_sm90"), sm80("cuda_sm80");
  static const std::vector<const Backend*> all = [] {
    std::vector<const Backend*> list{&sm90, &sm80};
    list.insert(list.end(), built_backends().begin(), built_backends().end());
    return list;
  }();
  return all;
#endif
}

}  // namespace tessera
