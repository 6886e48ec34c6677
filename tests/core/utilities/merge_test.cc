// SPDX-License-Identifier: Apache-2.0
#include "core/utilities/merge.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "core/problems.h"

namespace tessera {
namespace {

using testing::dense;

// Two parts of shape [2, 3, 4, 8], every buffer its own.
struct Merge {
  std::vector<float> memory = std::vector<float>(6 * 192);
  Tensor o_parts[2] = {dense(TESSERA_FP32, {2, 3, 4, 8}), dense(TESSERA_FP32, {2, 3, 4, 8})};
  Tensor lse_parts[2] = {dense(TESSERA_FP32, {2, 4, 3}), dense(TESSERA_FP32, {2, 4, 3})};
  const void* o_data[2] = {at(0), at(1)};
  const void* lse_data[2] = {at(2), at(3)};
  MergeArgs args{2,        TESSERA_BSHD, o_parts, o_data,       lse_parts,
                 lse_data, o_parts[0],   at(4),   lse_parts[0], at(5)};
  float* at(int i) { return memory.data() + i * 192; }
};

void expect_invalid(const char* expected, const std::function<void(Merge&)>& edit) {
  Merge m;
  ASSERT_TRUE(validate(m.args).ok()) << validate(m.args).message();
  edit(m);
  const Status status = validate(m.args);
  EXPECT_EQ(status.code(), TESSERA_INVALID) << "accepted: " << expected;
  EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
}

TEST(ValidateMerge, EveryRule) {
  expect_invalid("num_parts=0", [](Merge& m) { m.args.num_parts = 0; });
  expect_invalid("layout=7", [](Merge& m) { m.args.format = 7; });
  expect_invalid("parts=NULL", [](Merge& m) { m.args.lse_data = nullptr; });
  expect_invalid("o_parts[0].dtype=e4m3", [](Merge& m) { m.o_parts[0].dtype = TESSERA_E4M3; });
  expect_invalid("o_parts[1].dtype=bf16", [](Merge& m) { m.o_parts[1].dtype = TESSERA_BF16; });
  expect_invalid("o_parts[1].shape=[2, 3, 4, 9]", [](Merge& m) { m.o_parts[1].extent[3] = 9; });
  expect_invalid("o_parts[0].shape=[2, 3, 0, 8]", [](Merge& m) { m.o_parts[0].extent[2] = 0; });
  expect_invalid("b = 1 for thd", [](Merge& m) { m.args.format = TESSERA_THD; });
  expect_invalid("lse_parts[0].dtype=fp64", [](Merge& m) { m.lse_parts[0].dtype = TESSERA_FP64; });
  expect_invalid("lse_parts[1].shape=[2, 3, 4]", [](Merge& m) {
    m.lse_parts[1] = dense(TESSERA_FP32, {2, 3, 4});
  });
  expect_invalid("o.dtype=fp64", [](Merge& m) { m.args.o.dtype = TESSERA_FP64; });
  expect_invalid("o.stride=[0, 32, 8, 1]", [](Merge& m) { m.args.o.stride[0] = 0; });
  expect_invalid("o.data=NULL", [](Merge& m) { m.args.o_out = nullptr; });
  expect_invalid("o_parts[1].data=NULL", [](Merge& m) { m.o_data[1] = nullptr; });
  expect_invalid("o_parts[0].stride=[-96, 32, 8, 1]",
                 [](Merge& m) { m.o_parts[0].stride[0] = -96; });
  expect_invalid("the last axis must have stride 1", [](Merge& m) { m.o_parts[1].stride[3] = 2; });
  expect_invalid("must fit in 63 bits",
                 [](Merge& m) { m.o_parts[1].stride[0] = int64_t{1} << 62; });
  expect_invalid("multiple of the element's 4 bytes",
                 [](Merge& m) { m.o_data[0] = reinterpret_cast<char*>(m.at(0)) + 1; });
  expect_invalid("shares memory with o_parts[1]", [](Merge& m) { m.args.o_out = m.at(1); });
  expect_invalid("shares memory with lse", [](Merge& m) { m.args.lse_out = m.at(4); });
}

TEST(ValidateMerge, LegalOddities) {
  Merge m;
  m.args.num_parts = 1;
  EXPECT_TRUE(validate(m.args).ok());
  for (Tensor* t : {&m.o_parts[0], &m.o_parts[1], &m.args.o}) t->extent[1] = 0;
  for (Tensor* t : {&m.lse_parts[0], &m.lse_parts[1], &m.args.lse}) t->extent[2] = 0;
  m.args.o_out = nullptr;
  EXPECT_TRUE(validate(m.args).ok()) << validate(m.args).message();
}

}  // namespace
}  // namespace tessera
