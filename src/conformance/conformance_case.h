// SPDX-License-Identifier: Apache-2.0
// ConformanceCase: one case line with its tensors, its run through the C door and its judgement.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "conformance/error_rule.h"
#include "conformance/guarded_memory.h"
#include "conformance/reference/reference.h"
#include "core/case/case.h"

namespace tessera {

struct OutputReport {
  int index;  // enum tessera_index
  Comparison comparison;
};

struct CaseReport {
  bool refused = false;
  std::vector<OutputReport> outputs;
  std::vector<std::string> failures;  // "dk: max error 0.2 > 0.01 at element 7: ..."
  bool passed() const { return !refused && failures.empty(); }
};

// Every tensor ends at a guard page. Outputs are NaN before the run: an element that keeps the
// pattern was not written, and a byte between strided rows that loses it was touched. A case is not
// thread-safe; different cases are independent.
class ConformanceCase {
 public:
  static Result<std::unique_ptr<ConformanceCase>> create(std::string_view text);

  const Case& spec() const { return case_; }
  const CaseGeometry& geometry() const { return geometry_; }
  const Problem& problem() const { return geometry_.problem; }
  Buffers& buffers() { return buffers_; }

  // NaN in every byte of the outputs, or what they hold with accumulate.
  void poison_outputs();

  // backend "" lets the library choose. A failure to run is remembered for compare().
  Status run(std::string_view backend, const Device& device, int num_threads);

  // Judges what is in the output tensors now, whoever wrote it. Computes the references once.
  CaseReport compare();

 private:
  ConformanceCase() = default;
  void allocate();
  void fill_backward_inputs();
  void join_part(reference::ReferenceValues& forward) const;
  void compute_references();
  Status run_here(const Problem& problem, const Device& device, int num_threads);
  Status run_there(const Problem& problem, const Device& device);
  void compare_largest(int index, const Comparison& of, CaseReport& report);
  void check_bytes(CaseReport& report);
  int64_t bytes_of(int owner) const;
  bool is_output(int index) const;
  std::vector<double> read(int index) const;

  Case case_;
  CaseGeometry geometry_;
  Buffers buffers_{};
  GuardedMemory memory_[TESSERA_NUM_TENSORS];  // by owner
  Status run_status_;
  reference::ReferenceValues held_;  // by the outputs of accumulate, before the call
  std::optional<reference::ReferenceValues> exact_, low_, floor_;
  std::vector<double> given_o_, given_lse_;  // of the backward pass, before rounding to their dtype
};

}  // namespace tessera
