// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <dlfcn.h>
#include <unistd.h>

#include "core/choose/unbuilt.h"

// Null but in programs that link the conformance suite beside the library's folders.
extern "C" [[gnu::weak, gnu::visibility("hidden")]] tessera::Plan* tessera_reference_plan();

namespace tessera {
namespace {

using MakePlan = Plan* (*)();
constexpr const char* kFile = "libtessera_check.so";

// The path of libtessera_check.so, beside the file that this function is in.
const std::string& check_library() {
  static const std::string path = [] {
    Dl_info here{};
    if (dladdr(reinterpret_cast<const void*>(&check_library), &here) == 0 || !here.dli_fname) {
      return std::string(kFile);
    }
    const std::string library = here.dli_fname;
    return library.substr(0, library.rfind('/') + 1) + kFile;
  }();
  return path;
}

Result<MakePlan> load() {
  if (&tessera_reference_plan != nullptr) return &tessera_reference_plan;
  static void* const library = dlopen(check_library().c_str(), RTLD_NOW | RTLD_LOCAL);
  static void* const symbol = library ? dlsym(library, "tessera_reference_plan") : nullptr;
  if (!symbol) {
    return Status(TESSERA_REFUSED, "reference: " + check_library() +
                                       " does not load; install it "
                                       "beside libtessera, both of one build");
  }
  return reinterpret_cast<MakePlan>(symbol);
}

class ReferenceBackend final : public Backend {
 public:
  std::string_view name() const override { return "reference"; }

  std::string unavailable() const override {
    static const bool there =
        &tessera_reference_plan != nullptr || access(check_library().c_str(), R_OK) == 0;
    return there ? "" : check_library() + " is not there; install it beside libtessera";
  }

  Support supports(const Problem& p, const Device& device) const override {
    Support support;
    support.require(device.kind == TESSERA_CPU, ReasonId::kDevice, Remedy::kDeviceCpu,
                    [] { return std::string("device: must be the CPU"); });
    support.require(std::string_view(p.backend) == name(), ReasonId::kByNameOnly,
                    Remedy::kForceThisBackend,
                    [] { return std::string("runs by name only: backend=\"reference\""); });
    support.require(
        !is_backward(p) || is_fp8(p.tensor[TESSERA_Q].dtype) || !is_fp8(p.tensor[TESSERA_K].dtype),
        ReasonId::kDtype, Remedy::kUseFp32,
        [] { return std::string("k.dtype: must be q's dtype in the backward pass"); });
    require_built(support, p, Fp8Inputs::kRounded);
    return support;
  }

  Problem canonical(const Problem&) const override { return Problem{}; }  // one plan for all

  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    const Result<MakePlan> make = load();
    if (!make.ok()) return make.status();
    return std::unique_ptr<Plan>(make.value()());
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace tessera
