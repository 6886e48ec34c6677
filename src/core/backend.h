// SPDX-License-Identifier: Apache-2.0
// Backend and Plan: how a way of computing attention presents itself. One folder under src/ each,
// one line in src/backends.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/problem.h"
#include "core/support.h"

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

// The arguments of tessera_dropout_mask, validated. keep is contiguous [b, hq, sq, sk].
struct DropoutMaskArgs {
  int64_t b, hq, sq, sk;
  uint32_t threshold;        // see core/philox.h
  const int64_t* rng_state;  // seed, offset; on the device
  uint8_t* keep;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;

  // "" when this machine can run it; otherwise why not ("libcuda.so.1 not found").
  virtual std::string unavailable() const { return {}; }

  // Cheap, pure, all reasons; says nothing of unavailable(), so that explain can answer for devices
  // that are not here. The problem is validated and normalised.
  virtual Support supports(const Problem& problem, const Device& device) const = 0;

  // Blank what plans do not depend on, so that one plan serves many problems.
  virtual Problem canonical(const Problem& problem) const = 0;

  virtual Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                             const Device& device) const = 0;

  // The door asks the first available backend of the device's kind that owns these.
  virtual bool owns_utilities(const Device&) const { return false; }
  virtual Status merge(const MergeArgs&, const Buffers& context, const Device&) const;
  virtual Status dropout_mask(const DropoutMaskArgs&, const Buffers& context, const Device&) const;

  // A JSON object for tessera_describe: instruction set, threads, devices, ...
  virtual std::string description_json() const { return "{}"; }
};

}  // namespace tessera
