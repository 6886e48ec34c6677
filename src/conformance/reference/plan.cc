// SPDX-License-Identifier: Apache-2.0
// The reference as a plan: fp64 arithmetic on any dtype, with precision="fp8" on what it rounds.
// Unlike other plans its run() allocates, O(tokens), beside the workspace.
#include "conformance/reference/plan.h"

#include <memory>
#include <new>

#include "conformance/reference/reference.h"
#include "core/problem/scales.h"

namespace tessera::reference {
namespace {

class ReferencePlan final : public Plan {
 public:
  int64_t workspace_bytes(const Problem&, int) const override { return 0; }

  Status run(const Problem& p, const Buffers& buffers, const Device&) const override try {
    const int threads = buffers.num_threads > 0 ? buffers.num_threads : 1;
    const ReferenceValues held = held_outputs(p, buffers);
    ReferenceValues out;
    if (is_backward(p)) {
      out = reference_backward(p, buffers, Arithmetic::kStored, threads,
                               load(p, buffers, TESSERA_O), load(p, buffers, TESSERA_LSE), &held);
    } else {
      out = reference_forward(p, buffers, Arithmetic::kStored, threads, &held);
    }
    for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
      if (!given(p, index) || !is_output(p, index) || index >= TESSERA_AMAX_O) continue;
      store(p, buffers, index, out.value[index]);
    }
    return check_interrupt(buffers);
  } catch (const std::bad_alloc&) {
    return Status(TESSERA_OUT_OF_MEMORY, "reference: host memory ran out");
  }

 private:
  static std::vector<double> load(const Problem& p, const Buffers& buffers, int index) {
    return load_dense(p.tensor[index], tensor_rule(index).rank, buffers.data[index],
                      scale_at(p, buffers, scale_of(index), 0, 0, 0));
  }

  static void store(const Problem& p, const Buffers& buffers, int index,
                    const std::vector<double>& values) {
    store_dense(p.tensor[index], tensor_rule(index).rank, values, buffers.data[index],
                scale_at(p, buffers, scale_of(index), 0, 0, 0));
    const int amax = amax_of(index);
    if (amax == TESSERA_NUM_TENSORS || !given(p, amax)) return;
    store_element(buffers.data[amax], 0, TESSERA_FP32, largest_of(values));
  }
};

}  // namespace
}  // namespace tessera::reference

tessera::Plan* tessera_reference_plan() { return new tessera::reference::ReferencePlan; }
