// SPDX-License-Identifier: Apache-2.0
#include "core/utilities/row_sums.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace tessera {
namespace {

// Rows 2 and 3 of the first tensor become the sum of those of two others, by number.
struct Call {
  std::vector<float> memory = std::vector<float>(3 * 64);
  std::vector<int64_t> numbers = {1, 0};
  void* tensors[4] = {memory.data(), memory.data() + 64, memory.data() + 128, numbers.data()};
  tessera_row_sum sum{2, 2, 4, 2, 0, {0, -1, TESSERA_FP32, 0, 64, 32, 16}, {}};
  RowSums args{1, &sum, 4, tensors};
  Device device{};

  Call() {
    sum.term[0] = {1, 3, TESSERA_FP32, 0, 0, 32, 16};
    sum.term[1] = {2, -1, TESSERA_BF16, 0, 0, 16, 8};
  }
};

void expect_invalid(const char* expected, const std::function<void(Call&)>& edit) {
  Call call;
  ASSERT_TRUE(validate(call.args, call.device).ok()) << validate(call.args, call.device).message();
  edit(call);
  const Status status = validate(call.args, call.device);
  EXPECT_EQ(status.code(), TESSERA_INVALID) << "accepted: " << expected;
  EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
}

TEST(ValidateRowSums, EveryRule) {
  expect_invalid("num_sums=-1", [](Call& c) { c.args.num_sums = -1; });
  expect_invalid("num_tensors=-4", [](Call& c) { c.args.num_tensors = -4; });
  expect_invalid("sums=NULL or tensors=NULL", [](Call& c) { c.args.sums = nullptr; });
  expect_invalid("rows=-2", [](Call& c) { c.sum.rows = -2; });
  expect_invalid("between 0 and 2^40", [](Call& c) { c.sum.columns = int64_t{1} << 41; });
  expect_invalid("sums[0].num_terms=9", [](Call& c) { c.sum.num_terms = 9; });
  expect_invalid("sums[0].num_terms=-1", [](Call& c) { c.sum.num_terms = -1; });
  expect_invalid("sums[0].to.tensor=4: must be one of num_tensors=4",
                 [](Call& c) { c.sum.to.tensor = 4; });
  expect_invalid("sums[0].term[0].index=-2", [](Call& c) { c.sum.term[0].index = -2; });
  expect_invalid("sums[0].term[1].tensor=2", [](Call& c) { c.tensors[2] = nullptr; });
  expect_invalid("sums[0].term[1].dtype=77", [](Call& c) { c.sum.term[1].dtype = 77; });
  expect_invalid("sums[0].term[1].dtype=e4m3", [](Call& c) { c.sum.term[1].dtype = TESSERA_E4M3; });
  expect_invalid("sums[0].to.dtype=int32", [](Call& c) { c.sum.to.dtype = TESSERA_INT32; });
  expect_invalid("must be int32, as what it is copied to", [](Call& c) {
    c.sum.num_terms = 1;
    c.sum.to.dtype = TESSERA_INT32;
  });
  expect_invalid("offset=66", [](Call& c) { c.sum.to.offset = 66; });
  expect_invalid("multiples of their 2 bytes", [](Call& c) { c.sum.term[1].head = 7; });
}

TEST(ValidateRowSums, WhatIsNotReadMayBeAnything) {
  Call call;
  call.sum.rows = 0;
  call.sum.to = {};
  call.sum.to.tensor = 99;
  EXPECT_TRUE(validate(call.args, call.device).ok());
  call = Call();
  call.args.sums = &call.sum, call.args.tensors = call.tensors;
  call.sum.rows = 1;
  call.sum.to.row = 3;  // of one row
  EXPECT_TRUE(validate(call.args, call.device).ok());
}

TEST(ValidateRowSums, Fp64IsSummedOnTheCpuAlone) {
  Call call;
  call.sum.to.dtype = TESSERA_FP64;
  EXPECT_TRUE(validate(call.args, call.device).ok());
  call.device.kind = TESSERA_CUDA;
  const Status status = validate(call.args, call.device);
  EXPECT_NE(status.message().find("sums[0].to.dtype=fp64"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace tessera
