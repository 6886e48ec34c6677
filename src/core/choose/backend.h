// SPDX-License-Identifier: Apache-2.0
// Backend and Plan: how a way of computing attention presents itself. One folder under src/ each,
// one line in src/backends.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/choose/support.h"
#include "core/problem/problem.h"

namespace tessera {

// Built once for a canonical problem, used for every problem with the same canonical form.
// Immutable and safe to run from several threads at once.
class Plan {
 public:
  virtual ~Plan() = default;

  // Exact, O(tokens), of the real problem. num_threads = 0: the library's default.
  virtual int64_t workspace_bytes(const Problem& problem, int num_threads) const = 0;

  // problem and buffers are validated, workspace is large enough. Allocates nothing, reads no
  // environment, does not throw. CPU: returns when done. CUDA: queues on buffers.stream.
  virtual Status run(const Problem& problem, const Buffers& buffers,
                     const Device& device) const = 0;
};

// The arguments of tessera_merge, validated.
struct MergeArgs {
  int64_t num_parts;
  int32_t format;  // of o; decides how lse is laid out
  const Tensor* o_parts;
  const void* const* o_data;
  const Tensor* lse_parts;
  const void* const* lse_data;
  Tensor o;
  void* o_out;
  Tensor lse;
  void* lse_out;
};

// The arguments of tessera_sum_rows, validated.
struct RowSums {
  int64_t num_sums;
  const tessera_row_sum* sums;
  int64_t num_tensors;
  void* const* tensors;
};

// The arguments of tessera_dropout_mask, validated. keep is contiguous [b, hq, sq, sk].
struct DropoutMaskArgs {
  int64_t b, hq, sq, sk;
  uint32_t threshold;        // see core/mask/philox.h
  int32_t rng_words;         // 2 or 4
  const int64_t* rng_state;  // seed, offset[, first, stride]; on the device, like the next two
  const int64_t* q_start;    // [b] positions of first rows; null: 0
  const int64_t* k_start;    // [b] and of first keys
  uint8_t* keep;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;

  // "" when this machine can run it; otherwise why not ("libcuda.so.1 not found"). May start a
  // driver, which a child of fork() cannot share: asked only for tensors that the backend takes.
  virtual std::string unavailable() const { return {}; }

  // True if unavailable() opens a library that only this backend needs. It is then asked only for a
  // problem that the backend would run: a process that runs others does not open it.
  virtual bool opens_library() const { return false; }

  // False where only its rules and tables are in this build.
  virtual bool is_built() const { return true; }

  // TESSERA_INVALID where an environment variable that the backend reads says what it cannot mean.
  virtual Status check_environment() const { return {}; }

  // Cheap, pure, all reasons; says nothing of unavailable(), so that explain can answer for devices
  // that are not here. The problem is validated and normalised.
  virtual Support supports(const Problem& problem, const Device& device) const = 0;

  // Why another backend runs a problem faster that this one supports, as was measured; "" where
  // none does. To yield is no refusal: choose() passes by a backend that yields only where a later
  // one runs the problem, and a forced backend runs it.
  virtual std::string yields(const Problem&, const Device&) const { return {}; }

  // Names of the kernels that a supported problem runs in, in order, joined by ", "; "" of a
  // backend whose kernels have none. The device need not be here.
  virtual std::string kernels_for(const Problem&, const Device&) const { return {}; }

  // Blank what plans do not depend on, so that one plan serves many problems.
  virtual Problem canonical(const Problem& problem) const = 0;

  // TESSERA_REFUSED where a library that the backend asks has no kernel for the problem after all:
  // the next backend is asked then. Anything else that fails fails the call.
  virtual Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                             const Device& device) const = 0;

  // The door asks the first available backend of the device's kind that owns these.
  virtual bool owns_utilities(const Device&) const { return false; }
  virtual Status merge(const MergeArgs&, const Buffers& context, const Device&) const;
  virtual Status dropout_mask(const DropoutMaskArgs&, const Buffers& context, const Device&) const;
  virtual Status sum_rows(const RowSums&, const Buffers& context, const Device&) const;
  virtual Status rotate(const tessera_rotate_args&, const Buffers& context, const Device&) const;
  virtual Status append(const tessera_append_args&, const Buffers& context, const Device&) const;

  // A JSON object for tessera_describe: instruction set, threads, devices, ...
  virtual std::string description_json() const { return "{}"; }
};

}  // namespace tessera
