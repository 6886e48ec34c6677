// SPDX-License-Identifier: Apache-2.0
// Backends that say what a test wants and count what is asked of them.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "core/choose/backend.h"

namespace tessera::testing {

struct DummyPlan final : Plan {
  int64_t workspace_bytes(const Problem& p, int num_threads) const override {
    return 64 * p.tensor[TESSERA_Q].extent[1] + num_threads;
  }
  Status run(const Problem&, const Buffers&, const Device&) const override { return {}; }
};

class DummyBackend : public Backend {
 public:
  using Rules = std::function<void(Support&, const Problem&, const Device&)>;
  DummyBackend(std::string name, Rules rules) : name_(std::move(name)), rules_(std::move(rules)) {}

  std::string_view name() const override { return name_; }
  std::string unavailable() const override {
    ++looked_for;
    return missing;
  }
  Support supports(const Problem& p, const Device& device) const override {
    ++asked;
    Support support;
    rules_(support, p, device);
    return support;
  }
  std::string yields(const Problem&, const Device&) const override { return slower; }
  std::string kernels_for(const Problem&, const Device&) const override { return kernels; }
  Problem canonical(const Problem& p) const override {
    Problem c = p;  // as a kernel whose code does not depend on lengths
    for (Tensor& t : c.tensor) {
      t.extent[0] = t.extent[1] = t.extent[2] = 0;
      for (int64_t& stride : t.stride) stride = 0;
    }
    return c;
  }
  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    ++built;
    if (!no_plan.empty()) return Status(TESSERA_REFUSED, no_plan);
    return std::unique_ptr<Plan>(std::make_unique<DummyPlan>());
  }

  bool opens_library() const override { return is_opened; }

  std::string missing;          // what unavailable() answers
  bool is_opened = false;       // what opens_library() answers
  std::string no_plan;          // why plan() refuses; "" where it does not
  std::string slower, kernels;  // what yields() and kernels_for() answer
  mutable std::atomic<int> asked{0}, built{0};
  mutable std::atomic<int> looked_for{0};  // times that unavailable() was asked

 private:
  std::string name_;
  Rules rules_;
};

inline void supports_all(Support&, const Problem&, const Device&) {}

// fp32 on the CPU only.
inline void fp32_on_cpu(Support& support, const Problem& p, const Device& device) {
  support.require(device.kind == TESSERA_CPU, ReasonId::kDevice, Remedy::kDeviceCpu,
                  [] { return std::string("tensors are on a GPU"); });
  support.require(p.tensor[TESSERA_Q].dtype == TESSERA_FP32, ReasonId::kDtype, Remedy::kUseFp32,
                  [&] { return "dtype=" + std::string(dtype_name(p.tensor[TESSERA_Q].dtype)); });
}

}  // namespace tessera::testing
