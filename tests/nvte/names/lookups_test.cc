// SPDX-License-Identifier: Apache-2.0
// Each call looks its plan up once: tessera_prepare and tessera_run, which do so, are counted on
// their way from libtessera_nvte to libtessera.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "nvte/small_call.h"
#include "tessera.h"

namespace {

int lookups;

template <typename Function>
Function* next(Function*, const char* name) {
  ++lookups;
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" TESSERA_NVTE_API int32_t tessera_prepare(const tessera_problem* problem,
                                                    const tessera_device* device,
                                                    int32_t num_threads, tessera_info* info,
                                                    tessera_error* error) {
  return next(&tessera_prepare, "tessera_prepare")(problem, device, num_threads, info, error);
}
extern "C" TESSERA_NVTE_API int32_t tessera_run(const tessera_problem* problem,
                                                const tessera_device* device,
                                                const tessera_buffers* buffers,
                                                tessera_error* error) {
  return next(&tessera_run, "tessera_run")(problem, device, buffers, error);
}

namespace nvte_test {
namespace {

TEST(NvteLookups, OneOfEachCall) {
  for (const bool second : {false, true}) {
    SmallCall c;
    c.second = second;
    for (const auto pass : {&SmallCall::forward, &SmallCall::backward}) {
      c.workspace = TensorWrapper();
      lookups = 0;
      (c.*pass)();
      EXPECT_EQ(lookups, 1) << "without a workspace";
      c.set(c.workspace, c.memory.data(), DType::kByte, {c.memory.size()});
      lookups = 0;
      (c.*pass)();
      EXPECT_EQ(lookups, 1) << "with one";
    }
  }
}

}  // namespace
}  // namespace nvte_test
