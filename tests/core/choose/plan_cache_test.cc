// SPDX-License-Identifier: Apache-2.0
#include "core/choose/plan_cache.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "core/dummy_backend.h"
#include "core/problems.h"

namespace tessera {
namespace {

using testing::DummyBackend;
using testing::forward;

constexpr Device kCpu{};

// forward() with another length of the queries.
Problem with_length(int64_t sq) {
  Problem p = forward();
  p.tensor[TESSERA_Q] = testing::dense(TESSERA_FP32, {2, sq, 4, 8});
  p.tensor[TESSERA_O] = testing::dense(TESSERA_FP32, {2, sq, 4, 16});
  p.tensor[TESSERA_LSE] = testing::dense(TESSERA_FP32, {2, 4, sq});
  return p;
}

TEST(PlanCache, AKnownProblemIsNotAskedAgain) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  PlanCache cache(list);
  const auto first = cache.find(forward(), kCpu), second = cache.find(forward(), kCpu);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first.value(), second.value());
  EXPECT_EQ(first.value()->backend, &a);
  EXPECT_TRUE(same(first.value()->problem, normalised(forward())));
  EXPECT_EQ(a.asked, 1);
  EXPECT_EQ(a.built, 1);
}

TEST(PlanCache, OnePlanServesAllProblemsOfOneCanonicalForm) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  PlanCache cache(list);
  for (int64_t sq = 1; sq <= 20; ++sq) {
    const auto planned = cache.find(with_length(sq), kCpu);
    ASSERT_TRUE(planned.ok());
    EXPECT_EQ(planned.value()->plan->workspace_bytes(planned.value()->problem, 3), 64 * sq + 3);
  }
  EXPECT_EQ(a.built, 1);
  EXPECT_EQ(cache.plan_count(), 1u);
  EXPECT_EQ(cache.problem_count(), 20u);
}

TEST(PlanCache, DevicesAndBackendsDoNotMix) {
  const DummyBackend a("a", testing::fp32_on_cpu), b("b", testing::supports_all);
  const Backend* const list[] = {&a, &b};
  PlanCache cache(list);
  EXPECT_EQ(cache.find(forward(), kCpu).value()->backend, &a);
  EXPECT_EQ(cache.find(forward(), {TESSERA_CUDA, 0, 90, 0}).value()->backend, &b);
  EXPECT_EQ(cache.find(forward(), {TESSERA_CUDA, 1, 90, 0}).value()->backend, &b);
  EXPECT_EQ(a.built, 1);
  EXPECT_EQ(b.built, 2);
}

TEST(PlanCache, BothLevelsAreBounded) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  PlanCache cache(list, /*problems=*/4, /*plans=*/2);
  for (int64_t sq = 1; sq <= 9; ++sq) EXPECT_TRUE(cache.find(with_length(sq), kCpu).ok());
  EXPECT_EQ(cache.problem_count(), 4u);
  EXPECT_TRUE(cache.find(with_length(9), kCpu).ok());
  EXPECT_EQ(a.asked, 9);  // recent
  EXPECT_TRUE(cache.find(with_length(1), kCpu).ok());
  EXPECT_EQ(a.asked, 10);  // evicted
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(cache.find(forward(), {TESSERA_CUDA, i, 90, 0}).ok());
  }
  EXPECT_EQ(cache.plan_count(), 2u);
}

TEST(PlanCache, AHitKeepsAProblemFromEviction) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  PlanCache cache(list, /*problems=*/2, /*plans=*/2);
  for (const int64_t sq : {1, 2, 1, 3}) EXPECT_TRUE(cache.find(with_length(sq), kCpu).ok());
  EXPECT_EQ(a.asked, 3);
  EXPECT_TRUE(cache.find(with_length(1), kCpu).ok());
  EXPECT_EQ(a.asked, 3);
  EXPECT_TRUE(cache.find(with_length(2), kCpu).ok());
  EXPECT_EQ(a.asked, 4);
}

TEST(PlanCache, RefusalsAreRemembered) {
  const DummyBackend a("a", testing::fp32_on_cpu);
  const Backend* const list[] = {&a};
  PlanCache cache(list);
  const auto first = cache.find(forward(TESSERA_BF16), kCpu);
  ASSERT_FALSE(first.ok());
  EXPECT_EQ(first.status().code(), TESSERA_REFUSED);
  const int asked = a.asked;
  const auto second = cache.find(forward(TESSERA_BF16), kCpu);
  EXPECT_EQ(second.status().message(), first.status().message());
  EXPECT_EQ(a.asked, asked);
}

TEST(PlanCache, ABackendWithoutAPlanIsPassedBy) {
  DummyBackend a("a", testing::supports_all), b("b", testing::supports_all);
  const DummyBackend c("c", testing::supports_all);
  a.no_plan = "a has no kernel";
  b.no_plan = "b has none either";
  const Backend* const list[] = {&a, &b, &c};
  PlanCache cache(list);
  for (int i = 0; i < 2; ++i) {
    const auto planned = cache.find(forward(), kCpu);
    ASSERT_TRUE(planned.ok());
    EXPECT_EQ(planned.value()->backend, &c);
  }
  EXPECT_EQ(a.built, 1);
  EXPECT_EQ(b.built, 1);
}

TEST(PlanCache, ARefusalHasTheReasonsOfPlans) {
  DummyBackend a("a", testing::supports_all);
  const DummyBackend b("b", testing::supports_all);
  a.no_plan = "a has no kernel";
  const Backend* const list[] = {&a, &b};
  PlanCache cache(list);
  Problem p = forward();
  std::strcpy(p.backend, "a");
  for (int i = 0; i < 2; ++i) {
    const Status status = cache.find(p, kCpu).status();
    EXPECT_EQ(status.code(), TESSERA_REFUSED);
    EXPECT_NE(status.message().find("a: a has no kernel"), std::string::npos) << status.message();
  }
  EXPECT_EQ(a.built, 1);
  EXPECT_EQ(b.built, 0);
}

TEST(PlanCache, IllegalProblemsAreNotRemembered) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  PlanCache cache(list);
  Problem p = forward();
  p.tensor[TESSERA_V] = {};
  EXPECT_EQ(cache.find(p, kCpu).status().code(), TESSERA_INVALID);
  EXPECT_EQ(cache.problem_count(), 0u);
  EXPECT_EQ(a.asked, 0);
}

TEST(PlanCache, ManyThreads) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  PlanCache cache(list, /*problems=*/8, /*plans=*/2);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const int64_t sq = 1 + (i * (t + 1)) % 12;
        const auto planned = cache.find(with_length(sq), kCpu);
        wrong += !planned.ok() || planned.value()->problem.tensor[TESSERA_Q].extent[1] != sq;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(cache.problem_count(), 8u);
}

}  // namespace
}  // namespace tessera
