// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/choose/plan_cache.h"
#include "core/dummy_backend.h"
#include "core/environment.h"
#include "core/problems.h"

namespace tessera {
namespace {

// The environment is read once, so it is set before main().
const bool kEnvironmentIsSet = setenv("TESSERA_LOG", "dispatch,checks,plan", 1) == 0 &&
                               setenv("TESSERA_NUM_THREADS", "many", 1) == 0;

using Lines = std::vector<std::string>;
void remember(void* user, const char* topic, const char* message) {
  static_cast<Lines*>(user)->push_back(std::string(topic) + ": " + message);
}

TEST(Log, OnlyNamedTopicsReachTheCallback) {
  ASSERT_TRUE(kEnvironmentIsSet);
  Lines lines;
  log(Topic::kDispatch, "%s", "before anybody listens");
  set_log(remember, &lines);
  EXPECT_TRUE(log_enabled(Topic::kDispatch));
  EXPECT_FALSE(log_enabled(Topic::kMemory));
  log(Topic::kDispatch, "%d of %d", 1, 2);
  log(Topic::kMemory, "%s", "not asked for");
  log(Topic::kChecks, "%s", std::string(5000, 'x').c_str());
  set_log(nullptr, nullptr);
  EXPECT_FALSE(log_enabled(Topic::kDispatch));
  log(Topic::kDispatch, "%s", "after");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "dispatch: 1 of 2");
  EXPECT_EQ(lines[1].substr(0, 12), "checks: xxxx");
}

TEST(Log, APlanNamesItsKernels) {
  testing::DummyBackend tiled("tiled", testing::supports_all);
  tiled.kernels = "tiled/d64_lean";
  const Backend* const list[] = {&tiled};
  PlanCache cache(list);
  Lines lines;
  set_log(remember, &lines);
  const bool found = cache.find(testing::forward(), Device{}).ok();
  set_log(nullptr, nullptr);
  ASSERT_TRUE(found);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[2],
            "plan: tiled by tiled/d64_lean runs fwd fp32 b=2 sq=5 sk=7 hq=4 hk=2 dqk=8 dv=16");
}

TEST(Environment, IsReadOnce) {
  EXPECT_EQ(environment().log, "dispatch,checks,plan");
  EXPECT_EQ(environment().num_threads, 0);  // not a number
  setenv("TESSERA_LOG", "memory", 1);
  EXPECT_EQ(environment().log, "dispatch,checks,plan");
}

}  // namespace
}  // namespace tessera
