// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/environment.h"

namespace tessera {
namespace {

// The environment is read once, so it is set before main().
const bool kEnvironmentIsSet = setenv("TESSERA_LOG", "dispatch,checks", 1) == 0 &&
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
  EXPECT_FALSE(log_enabled(Topic::kPlan));
  log(Topic::kDispatch, "%d of %d", 1, 2);
  log(Topic::kPlan, "%s", "not asked for");
  log(Topic::kChecks, "%s", std::string(5000, 'x').c_str());
  set_log(nullptr, nullptr);
  EXPECT_FALSE(log_enabled(Topic::kDispatch));
  log(Topic::kDispatch, "%s", "after");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "dispatch: 1 of 2");
  EXPECT_EQ(lines[1].substr(0, 12), "checks: xxxx");
}

TEST(Environment, IsReadOnce) {
  EXPECT_EQ(environment().log, "dispatch,checks");
  EXPECT_EQ(environment().num_threads, 0);  // not a number
  setenv("TESSERA_LOG", "plan", 1);
  EXPECT_EQ(environment().log, "dispatch,checks");
}

}  // namespace
}  // namespace tessera
