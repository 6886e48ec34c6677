// SPDX-License-Identifier: Apache-2.0
// The cpu backend. One plan serves all problems: the kernels' level is the machine's, and
// everything else is cheap enough to be decided at each call.
#include "cpu/backend.h"

#include "core/choose/unbuilt.h"
#include "core/environment.h"
#include "core/json.h"
#include "cpu/backward/run.h"
#include "cpu/cache/cache.h"
#include "cpu/forward/run.h"
#include "cpu/fp8/products.h"
#include "cpu/fp8/run.h"
#include "cpu/pool.h"
#include "cpu/simd/kernels.h"
#include "cpu/utilities/dropout_mask.h"
#include "cpu/utilities/merge.h"
#include "cpu/utilities/row_sums.h"

namespace tessera::cpu {
namespace {

class CpuPlan final : public Plan {
 public:
  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    if (is_fp8(problem.tensor[TESSERA_Q].dtype)) return fp8_workspace_bytes(problem, num_threads);
    if (has(problem, TESSERA_FP8_PRODUCTS)) return products_workspace_bytes(problem, num_threads);
    return is_backward(problem) ? backward_workspace_bytes(problem, num_threads)
                                : forward_workspace_bytes(problem, num_threads);
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device&) const override {
    if (is_fp8(problem.tensor[TESSERA_Q].dtype)) {
      TESSERA_RETURN_IF_ERROR(run_fp8(problem, buffers));
    } else if (has(problem, TESSERA_FP8_PRODUCTS)) {
      TESSERA_RETURN_IF_ERROR(run_products(problem, buffers));
    } else if (is_backward(problem)) {
      run_backward(problem, buffers);
    } else {
      TESSERA_RETURN_IF_ERROR(run_forward(problem, buffers));
    }
    return check_interrupt(buffers);
  }
};

class CpuBackend final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }

  Status check_environment() const override {
    const Environment& read = environment();
    if (!read.num_threads_text.empty() && read.num_threads == 0) {
      return invalid(
          "TESSERA_NUM_THREADS=\"%s\": must be a number from 1 to 65536; leave it unset for the "
          "cores of the process",
          printable(read.num_threads_text).c_str());
    }
    if (read.cpu_isa.empty()) return {};
    std::string names;
    for (int i = 0; const Kernels* level = kernels_at(i); ++i) {
      if (read.cpu_isa == level->name) return {};
      names += (i ? ", " : "") + std::string(level->name);
    }
    return invalid("TESSERA_CPU_ISA=\"%s\": must be one of %s; leave it unset for the best",
                   printable(read.cpu_isa).c_str(), names.c_str());
  }

  Support supports(const Problem& problem, const Device& device) const override {
    const int32_t q = problem.tensor[TESSERA_Q].dtype, k = problem.tensor[TESSERA_K].dtype;
    Support support;
    support.require(device.kind == TESSERA_CPU, ReasonId::kDevice, Remedy::kDeviceCpu, [&] {
      return "device=cuda:" + std::to_string(device.ordinal) + ": must be the CPU";
    });
    support.require(q != TESSERA_FP64, ReasonId::kDtype, Remedy::kUseFp32, [] {
      return std::string("q.dtype=fp64: must be fp32, bf16, fp16, e4m3 or e5m2");
    });
    support.require(!is_fp8(q) || !is_paged(problem), ReasonId::kFeature, Remedy::kUseBf16, [&] {
      return "page_table.shape=" + shape_text(problem, TESSERA_PAGE_TABLE_K) +
             ": pages of fp8 need q in bf16 or fp16";
    });
    support.require(!is_backward(problem) || !is_fp8(k) || is_fp8(q), ReasonId::kDtype,
                    Remedy::kUseBf16, [&] {
                      return "k.dtype=" + std::string(dtype_name(k)) +
                             ": must be q's dtype in the backward pass";
                    });
    require_built(support, problem, Fp8Inputs::kRounded);
    return support;
  }

  Problem canonical(const Problem&) const override { return Problem{}; }

  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    return std::unique_ptr<Plan>(std::make_unique<CpuPlan>());
  }

  bool owns_utilities(const Device& device) const override { return device.kind == TESSERA_CPU; }
  Status merge(const MergeArgs& args, const Buffers& context, const Device&) const override {
    cpu::merge(args, context);
    return check_interrupt(context);
  }
  Status dropout_mask(const DropoutMaskArgs& args, const Buffers& context,
                      const Device&) const override {
    cpu::dropout_mask(args, context);
    return check_interrupt(context);
  }
  Status sum_rows(const RowSums& sums, const Buffers& context, const Device&) const override {
    cpu::sum_rows(sums, context);
    return check_interrupt(context);
  }
  Status rotate(const RotateArgs& args, const Buffers& context, const Device&) const override {
    cpu::rotate(args, context);
    return check_interrupt(context);
  }
  Status append(const AppendArgs& args, const Buffers& context, const Device&) const override {
    cpu::append(args, context);
    return check_interrupt(context);
  }

  std::string description_json() const override {
    JsonWriter json;
    json.begin_object();
    json.key("level").string(kernels().name);
    json.key("levels").begin_array();
    for (int i = 0; const Kernels* level = kernels_at(i); ++i) {
      if (kernels_of(level->name)) json.string(level->name);
    }
    json.end_array();
    json.key("threads").number(default_num_threads());
    json.end_object();
    return std::move(json).take();
  }
};

}  // namespace

const Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace tessera::cpu
