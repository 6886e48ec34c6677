// SPDX-License-Identifier: Apache-2.0
// The reference as a backend: fp64 arithmetic on any dtype, by name only. Unlike other backends its
// run() allocates, O(tokens), beside the workspace.
#include <new>

#include "cpu/backend.h"
#include "cpu/reference.h"

namespace tessera::cpu {
namespace {

class ReferencePlan final : public Plan {
 public:
  int64_t workspace_bytes(const Problem&, int) const override { return 0; }

  Status run(const Problem& p, const Buffers& buffers, const Device&) const override try {
    const int threads = buffers.num_threads > 0 ? buffers.num_threads : 1;
    ReferenceValues out;
    if (is_backward(p)) {
      out = reference_backward(p, buffers, Arithmetic::kExact, threads, load(p, buffers, TESSERA_O),
                               load(p, buffers, TESSERA_LSE));
    } else {
      out = reference_forward(p, buffers, Arithmetic::kExact, threads);
    }
    for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
      if (out.value[index].empty() || !given(p, index)) continue;
      store_dense(p.tensor[index], tensor_rule(index).rank, out.value[index], buffers.data[index]);
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status(TESSERA_OUT_OF_MEMORY, "reference: host memory ran out");
  }

 private:
  static std::vector<double> load(const Problem& p, const Buffers& buffers, int index) {
    return load_dense(p.tensor[index], tensor_rule(index).rank, buffers.data[index]);
  }
};

class ReferenceBackend final : public Backend {
 public:
  std::string_view name() const override { return "reference"; }

  Support supports(const Problem& p, const Device& device) const override {
    Support support;
    support.require(device.kind == TESSERA_CPU, ReasonId::kDevice, Remedy::kDeviceCpu,
                    [] { return std::string("device: must be the CPU"); });
    support.require(std::string_view(p.backend) == name(), ReasonId::kByNameOnly,
                    Remedy::kForceThisBackend,
                    [] { return std::string("runs by name only: backend=\"reference\""); });
    support.require(!is_backward(p) ||
                        !(is_fp8(p.tensor[TESSERA_Q].dtype) || is_fp8(p.tensor[TESSERA_K].dtype)),
                    ReasonId::kDtype, Remedy::kUseFp32,
                    [] { return std::string("k.dtype: must not be fp8 in the backward pass"); });
    return support;
  }

  Problem canonical(const Problem&) const override { return Problem{}; }  // one plan for all

  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    return std::unique_ptr<Plan>(std::make_unique<ReferencePlan>());
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace tessera::cpu
