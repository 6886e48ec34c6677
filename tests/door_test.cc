// SPDX-License-Identifier: Apache-2.0
// The real list of backends through explain: what it promises must hold.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "backends.h"
#include "core/case/case.h"
#include "core/choose/explain.h"
#include "core/choose/plan_cache.h"
#include "core/dummy_backend.h"
#include "cpu/backend.h"

namespace tessera {
namespace {

constexpr Device kDevices[] = {{TESSERA_CPU, 0, 0, 0},
                               {TESSERA_CUDA, 0, 80, 0},
                               {TESSERA_CUDA, 0, 90, 0},
                               {TESSERA_CUDA, 0, 100, 0}};

constexpr const char* kCases[] = {
    "fwd fp32 b=2 s=64 h=4 d=64 causal",
    "fwd fp64 b=1 s=16 h=2 d=8",
    "bwd fp64 b=1 s=16 h=2 d=8 bias=post grads=dbias",
    "fwd bf16 b=2 sq=64 sk=96 hq=8 hk=2 dqk=72 dv=24 causal align=bottom_right",
    "bwd fp16 b=2 s=40 h=4 d=576 layout=thd lens=full",
    "fwd bf16 kv=e4m3 b=1 s=64 h=2 d=128",
    "fwd e4m3 b=1 s=64 h=2 d=128 layout=bhsd",
    "fwd e5m2 b=2 s=33 h=4 d=64 layout=sbhd softcap=20",
    "fwd fp16 b=3 sq=1 sk=256 hq=8 hk=1 d=128 page=16",
    "bwd bf16 b=2 s=48 h=4 d=64 alibi sink=learnable grads=dsink,dalibi_slopes dropout=0.1 dlse",
    "fwd bf16 b=2 s=64 h=4 d=64 keep=random:0.5/bhqk bias=pre/hqk max_logit strided",
    "fwd bf16 b=2 s=64 h=4 d=64 ranges=two:1 segments=3 window=8,8 align=top_left batch_invariant",
};

Problem problem_of(const char* line) {
  const auto parsed = parse_case(line);
  EXPECT_TRUE(parsed.ok()) << line << ": " << parsed.status().message();
  const Problem problem = geometry_of(parsed.value()).problem;
  EXPECT_TRUE(validate(problem).ok()) << line << ": " << validate(problem).message();
  return normalised(problem);
}

TEST(Backends, NamesAreDistinctAndFit) {
  std::set<std::string_view> names;
  for (const Backend* backend : all_backends()) {
    EXPECT_TRUE(names.insert(backend->name()).second) << backend->name();
    EXPECT_LT(backend->name().size(), sizeof(tessera_problem::backend));
  }
  EXPECT_LE(built_backends().size(), all_backends().size());
}

TEST(Explain, EverySuggestionHelps) {
  int suggestions = 0;
  for (const char* line : kCases) {
    for (const Device& device : kDevices) {
      const auto s = suggest(all_backends(), problem_of(line), device);
      if (!s) continue;
      ++suggestions;
      SCOPED_TRACE(std::string(line) + " on " + device_text(device) + ": " + s->text);
      EXPECT_TRUE(validate(s->problem).ok()) << validate(s->problem).message();
      EXPECT_TRUE(reasons_of(*s->backend, s->problem, s->device, is_imagined(s->device)).empty());
      // Also as the case line and the backend that it names.
      Problem again = problem_of(to_case(s->problem).c_str());
      s->backend->name().copy(again.backend, sizeof again.backend - 1);
      EXPECT_TRUE(reasons_of(*s->backend, again, s->device, is_imagined(s->device)).empty());
    }
  }
  EXPECT_GT(suggestions, 0);
}

TEST(Explain, CpuRefusesNothingLegalInItsDtypes) {
  for (const char* line : kCases) {
    const Problem p = problem_of(line);
    const int32_t q = p.tensor[TESSERA_Q].dtype;
    if (q == TESSERA_FP64 || is_fp8(q) || is_fp8(p.tensor[TESSERA_K].dtype)) continue;
    EXPECT_TRUE(reasons_of(cpu::backend(), p, Device{}).empty()) << line;
  }
}

TEST(Explain, EveryBackendThatDoesNotRunSaysWhy) {
  for (const char* line : kCases) {
    for (const Device& device : kDevices) {
      for (const Backend* backend : all_backends()) {
        for (const Reason& reason :
             reasons_of(*backend, problem_of(line), device, is_imagined(device))) {
          EXPECT_FALSE(reason.text.empty()) << backend->name();
          EXPECT_EQ(reason.text.find('\n'), std::string::npos) << reason.text;
        }
      }
    }
  }
}

// docs/recipes.md: a folder with a backend, and a line in the list.
TEST(Recipe, AddABackend) {
  const testing::DummyBackend fresh("fresh", testing::fp32_on_cpu);
  std::vector<const Backend*> list{&fresh};
  list.insert(list.end(), all_backends().begin(), all_backends().end());
  PlanCache cache(list);
  const Problem p = problem_of("fwd fp32 b=2 s=64 h=4 d=64 causal");
  const auto planned = cache.find(p, Device{});
  ASSERT_TRUE(planned.ok()) << planned.status().message();
  EXPECT_EQ(planned.value()->backend, &fresh);
  EXPECT_NE(explain_json(list, p, Device{}, to_case(p)).find("\"backend\": \"fresh\""),
            std::string::npos);
  // What it refuses goes on to the next in the list.
  const auto next = cache.find(problem_of("fwd bf16 b=2 s=64 h=4 d=64 causal"), Device{});
  ASSERT_TRUE(next.ok()) << next.status().message();
  EXPECT_EQ(next.value()->backend->name(), "cpu");
}

}  // namespace
}  // namespace tessera
