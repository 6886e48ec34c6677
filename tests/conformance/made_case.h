// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "conformance/conformance_case.h"

namespace tessera {

// The case of a line, or null and a failure of the test.
inline std::unique_ptr<ConformanceCase> make(const std::string& text) {
  auto made = ConformanceCase::create(text);
  EXPECT_TRUE(made.ok()) << text << ": " << made.status().message();
  return made.ok() ? std::move(made).value() : nullptr;
}

}  // namespace tessera
