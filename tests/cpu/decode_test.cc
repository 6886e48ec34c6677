// SPDX-License-Identifier: Apache-2.0
// Decode: how its keys and heads are shared out among tasks must show in no bit.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "conformance/conformance_case.h"

namespace tessera {
namespace {

// The bytes of o in the order [b][sq][hq][dv], whatever the layout.
std::string bytes_of_o(ConformanceCase& c, int threads) {
  const Status status = c.run("cpu", {}, threads);
  EXPECT_TRUE(status.ok()) << status.message();
  const Tensor& o = c.problem().tensor[TESSERA_O];
  const auto* data = static_cast<const char*>(c.buffers().data[TESSERA_O]);
  const auto size = static_cast<size_t>(size_of(o.dtype));
  std::string bytes;
  for (int64_t n = 0; n < o.extent[0]; ++n) {
    for (int64_t i = 0; i < o.extent[1]; ++i) {
      for (int64_t h = 0; h < o.extent[2]; ++h) {
        for (int64_t d = 0; d < o.extent[3]; ++d) {
          const int64_t at = n * o.stride[0] + i * o.stride[1] + h * o.stride[2] + d * o.stride[3];
          bytes.append(data + static_cast<size_t>(at) * size, size);
        }
      }
    }
  }
  return bytes;
}

class Decode : public testing::TestWithParam<const char*> {};

// Heads that lie beside each other take turns at a block, as many as leave every thread several
// tasks; those of bhsd do not.
TEST_P(Decode, HasTheSameBitsForAnyLayoutAndThreads) {
  std::string expected;
  for (const char* layout : {"bshd", "sbhd", "bhsd"}) {
    const std::string line = std::string(GetParam()) + " layout=" + layout;
    auto made = ConformanceCase::create(line);
    ASSERT_TRUE(made.ok()) << line << ": " << made.status().message();
    for (int threads : {1, 2, 16}) {
      const std::string bytes = bytes_of_o(*made.value(), threads);
      if (expected.empty()) expected = bytes;
      EXPECT_TRUE(bytes == expected) << line << ", " << threads << " threads";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Groups, Decode,
    testing::Values(
        "fwd bf16 b=2 sq=1 sk=2500 hq=8 hk=8 d=64",    // dot products
        "fwd bf16 b=2 sq=1 sk=2500 hq=12 hk=3 d=40",   // groups; heads that 2 divides not
        "fwd bf16 b=1 sq=2 sk=5000 hq=32 hk=8 d=128",  // groups over two tokens
        "fwd bf16 b=1 sq=1 sk=2500 hq=32 hk=2 d=64",   // strips of 16 lanes
        "fwd fp32 b=2 sq=1 sk=2500 hq=16 hk=4 d=72",   // strips of 8
        "fwd fp16 b=2 sq=5 sk=1200 hq=4 hk=4 causal align=bottom_right d=64",
        "fwd bf16 b=1 sq=16 sk=1200 hq=40 hk=2 d=32"),  // several tiles of a kv head
    [](const auto& info) { return "case" + std::to_string(info.index); });

}  // namespace
}  // namespace tessera
