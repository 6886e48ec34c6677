// SPDX-License-Identifier: Apache-2.0
// Tables of illegal edits of legal problems, each with a part of its message.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/problems.h"

namespace tessera::testing {

struct Illegal {
  const char* expected;  // a part of the message
  Problem (*start)();
  std::function<void(Problem&)> edit;
};

inline Problem fp32() { return forward(); }
inline Problem bf16() { return forward(TESSERA_BF16); }
inline Problem gradient() { return backward(); }
inline Tensor& tensor(Problem& p, int index) { return p.tensor[index]; }

inline void expect_all(const std::vector<Illegal>& table) {
  for (const Illegal& illegal : table) {
    Problem p = illegal.start();
    ASSERT_TRUE(validate(p).ok()) << validate(p).message();
    illegal.edit(p);
    const Status status = validate(p);
    EXPECT_EQ(status.code(), TESSERA_INVALID) << "accepted: " << illegal.expected;
    EXPECT_NE(status.message().find(illegal.expected), std::string::npos)
        << "expected: " << illegal.expected << "\n     got: " << status.message();
  }
}

inline void expect_legal(const Problem& p, const char* what) {
  EXPECT_TRUE(validate(p).ok()) << what << ": " << validate(p).message();
}

}  // namespace tessera::testing
