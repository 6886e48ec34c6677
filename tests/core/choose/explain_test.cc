// SPDX-License-Identifier: Apache-2.0
#include "core/choose/explain.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/case/case.h"
#include "core/dummy_backend.h"
#include "core/problems.h"

namespace tessera {
namespace {

using testing::DummyBackend;
using testing::forward;

constexpr Device kCpu{};
constexpr Device kHopper{TESSERA_CUDA, 0, 90, 0};

void by_name_only(Support& support, const Problem& p, const Device&) {
  support.require(forced_backend(p) == "oracle", ReasonId::kByNameOnly, Remedy::kForceThisBackend,
                  [] { return std::string("runs only by name"); });
}
void quadratic(Support& support, const Problem& p, const Device&) {
  support.require(has(p, TESSERA_ALLOW_QUADRATIC), ReasonId::kQuadratic, Remedy::kAllowQuadratic,
                  [] { return std::string("would need 280 bytes of scores"); });
}

const DummyBackend kNarrow("narrow", testing::fp32_on_cpu);
const DummyBackend kOracle("oracle", by_name_only);
const DummyBackend kUnfused("unfused", quadratic);
const DummyBackend kNever("never", [](Support& s, const Problem&, const Device&) {
  s.require(false, ReasonId::kFeature, Remedy::kNone, [] { return std::string("no"); });
});

// What every suggestion promises: asked again, it runs.
void expect_helps(BackendList list, const Suggestion& s) {
  EXPECT_TRUE(validate(s.problem).ok()) << s.text;
  EXPECT_TRUE(reasons_of(*s.backend, s.problem, s.device).empty()) << s.text;
  const auto chosen = choose(list, s.problem, s.device);
  ASSERT_TRUE(chosen.ok()) << s.text;
  EXPECT_EQ(chosen.value(), s.backend) << s.text;
}

TEST(Suggest, NothingWhileSomethingRuns) {
  const Backend* const list[] = {&kNever, &kNarrow};
  EXPECT_FALSE(suggest(list, normalised(forward()), kCpu).has_value());
}

TEST(Suggest, NothingWhereNothingHelps) {
  const Backend* const list[] = {&kNever};
  EXPECT_FALSE(suggest(list, normalised(forward()), kCpu).has_value());
}

TEST(Suggest, AnotherDtype) {
  const Backend* const list[] = {&kNarrow, &kOracle};
  Problem p = testing::backward(TESSERA_BF16);
  p.tensor[TESSERA_BIAS] = p.tensor[TESSERA_DBIAS] = testing::dense(TESSERA_BF16, {1, 4, 5, 7});
  const auto s = suggest(list, normalised(p), kCpu);
  ASSERT_TRUE(s.has_value());
  EXPECT_EQ(s->text, "convert q, k and v to fp32");
  EXPECT_EQ(s->problem.tensor[TESSERA_DBIAS].dtype, TESSERA_FP32);
  expect_helps(list, *s);
}

TEST(Suggest, OneChangeIsNearerThanTwo) {
  const Backend* const list[] = {&kNarrow, &kUnfused};
  const auto s = suggest(list, normalised(forward(TESSERA_BF16)), kHopper);
  ASSERT_TRUE(s.has_value());
  EXPECT_EQ(s->text, "pass allow_quadratic=True");
  expect_helps(list, *s);
}

TEST(Suggest, AllChangesOfABackendTogether) {
  const Backend* const list[] = {&kNever, &kNarrow};
  const auto s = suggest(list, normalised(forward(TESSERA_BF16)), kHopper);
  ASSERT_TRUE(s.has_value());
  EXPECT_EQ(s->text, "move the tensors to the CPU, and convert q, k and v to fp32");
  EXPECT_EQ(s->device.kind, TESSERA_CPU);
  expect_helps(list, *s);
}

TEST(Suggest, ANameOrNoName) {
  const Backend* const by_name[] = {&kOracle};
  const auto forced = suggest(by_name, normalised(forward()), kCpu);
  ASSERT_TRUE(forced.has_value());
  EXPECT_EQ(forced->text, "pass backend=\"oracle\"");
  expect_helps(by_name, *forced);

  const Backend* const list[] = {&kNever, &kNarrow};
  Problem p = normalised(forward());
  std::strcpy(p.backend, "never");
  const auto free = suggest(list, p, kCpu);
  ASSERT_TRUE(free.has_value());
  EXPECT_EQ(free->text, "leave backend unset");
  EXPECT_EQ(free->backend, &kNarrow);
  expect_helps(list, *free);
}

TEST(Explain, SaysWhatRunsAndWhyOthersDoNot) {
  const Backend* const list[] = {&kNever, &kNarrow, &kOracle};
  EXPECT_EQ(explain_json(list, normalised(forward()), kCpu, "the case"),
            R"({"case": "the case", "device": "cpu", )"
            R"("backend": "narrow", "kernel": null, "workspace_bytes": 320, )"
            R"("reasons": {"never": ["no"], "narrow": [], "oracle": ["runs only by name"]}, )"
            R"("backends": [)"
            R"({"name": "never", "available": true, "built": true, "supported": false, )"
            R"("yields": null, "kernel": null, )"
            R"("reasons": [{"id": "feature", "text": "no"}]}, )"
            R"({"name": "narrow", "available": true, "built": true, "supported": true, )"
            R"("yields": null, "kernel": null, "reasons": []}, )"
            R"({"name": "oracle", "available": true, "built": true, "supported": false, )"
            R"("yields": null, "kernel": null, )"
            R"("reasons": [{"id": "by_name_only", "text": "runs only by name"}]}], )"
            R"("suggestion": null})");
}

TEST(Explain, NamesKernelsAndWhoIsFaster) {
  DummyBackend tiled("tiled", testing::supports_all), split("split", testing::supports_all);
  tiled.kernels = "tiled/d128_lean";
  tiled.slower = "sq=1: split is faster";
  split.kernels = "split/decode, split/merge";
  const Backend* const list[] = {&tiled, &split};
  const std::string json = explain_json(list, normalised(forward()), kCpu, "the case");
  EXPECT_NE(json.find(R"("backend": "split", "kernel": "split/decode, split/merge", )"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find(R"({"name": "tiled", "available": true, "built": true, "supported": true, )"
                      R"("yields": "sq=1: split is faster", "kernel": "tiled/d128_lean", )"
                      R"("reasons": []})"),
            std::string::npos)
      << json;
}

// What a backend that is not in this build would do; on a device that is only imagined it runs, as the
// machine need not be here either; where tensors are, it does not.
TEST(Explain, RulesOfABackendThatIsNotBuilt) {
  DummyBackend tiled("tiled", [](Support& support, const Problem& p, const Device&) {
    support.require(p.tensor[TESSERA_Q].dtype == TESSERA_BF16, ReasonId::kDtype, Remedy::kUseBf16,
                    [] { return std::string("dtype"); });
    support.require(false, ReasonId::kNotBuilt, Remedy::kNone,
                    [] { return std::string("not built"); });
  });
  tiled.kernels = "tiled/d128_lean";
  tiled.missing = "not built";
  const Backend* const list[] = {&tiled};
  EXPECT_NE(explain_json(list, normalised(forward(TESSERA_BF16)), kHopper, "the case")
                .find(R"("kernel": "tiled/d128_lean", )"
                      R"("reasons": []})"),
            std::string::npos);
  EXPECT_NE(explain_json(list, normalised(forward()), kHopper, "the case")
                .find(R"("kernel": null, "reasons": [{"id": "dtype", "text": "dtype"}]})"),
            std::string::npos);
  EXPECT_NE(explain_json(list, normalised(forward(TESSERA_BF16)), {TESSERA_CUDA, 0, 0, 0}, "here")
                .find(R"("backend": null, )"),
            std::string::npos);
}

TEST(Explain, SaysWhyAPlanIsRefusedWhereTheDeviceIs) {
  DummyBackend a("a", testing::supports_all);
  const DummyBackend b("b", testing::supports_all);
  a.no_plan = "a has no kernel";
  const Backend* const list[] = {&a, &b};
  const std::string here = explain_json(list, normalised(forward()), kCpu, "the case");
  EXPECT_NE(here.find(R"("backend": "b")"), std::string::npos) << here;
  EXPECT_NE(here.find(R"({"id": "plan", "text": "a has no kernel"})"), std::string::npos) << here;
  const std::string imagined = explain_json(list, normalised(forward()), kHopper, "the case");
  EXPECT_NE(imagined.find(R"("backend": "a")"), std::string::npos) << imagined;
}

TEST(Explain, CarriesTheSuggestion) {
  const Backend* const list[] = {&kNarrow};
  const std::string json = explain_json(list, normalised(forward(TESSERA_FP16)), kCpu, "the case");
  EXPECT_NE(json.find(R"("backend": null, "kernel": null, "workspace_bytes": null)"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find(R"("suggestion": {"text": "convert q, k and v to fp32", )"
                      R"("case": "fwd fp32 b=2 sq=5 sk=7 hq=4 hk=2 dqk=8 dv=16", )"
                      R"("device": "cpu", "backend": "narrow"}})"),
            std::string::npos)
      << json;
}

TEST(Explain, HardwareNeedNotBeHere) {
  DummyBackend hopper("hopper", testing::supports_all);
  hopper.missing = "libcuda.so.1 was not found";
  const Backend* const list[] = {&hopper};
  EXPECT_NE(explain_json(list, normalised(forward()), kHopper, "the case")
                .find(R"("backend": "hopper", "kernel": null, "workspace_bytes": 320)"),
            std::string::npos);
  const std::string here =
      explain_json(list, normalised(forward()), {TESSERA_CUDA, 0, 0, 0}, "the case");
  EXPECT_NE(here.find(R"("backend": null)"), std::string::npos);
  EXPECT_NE(here.find(R"("id": "not_loaded", "text": "libcuda.so.1 was not found")"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
