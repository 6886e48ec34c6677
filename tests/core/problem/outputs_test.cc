// SPDX-License-Identifier: Apache-2.0
// What with_outputs() describes, against shapes and dtypes written out here.
#include <vector>

#include "core/illegal.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT: problems to start from

// The problem without the tensors `wanted`, and then with them again.
Result<Problem> refilled(Problem p, const std::vector<int32_t>& wanted) {
  for (const int32_t index : wanted) p.tensor[index] = Tensor{};
  return with_outputs(p, wanted);
}

void expect_filled(const Problem& p, const std::vector<int32_t>& wanted, const char* what) {
  const auto filled = refilled(p, wanted);
  ASSERT_TRUE(filled.ok()) << what << ": " << filled.status().message();
  EXPECT_TRUE(same(normalised(filled.value()), normalised(p))) << what;
}

const std::vector<int32_t> kForward = {TESSERA_LSE, TESSERA_O};
const std::vector<int32_t> kBackward = {TESSERA_DQ, TESSERA_DK, TESSERA_DV};

TEST(Outputs, OfEachFormat) {
  expect_filled(forward(), kForward, "bshd");
  expect_filled(forward(TESSERA_FP64), kForward, "fp64 statistics");
  expect_filled(packed(), kForward, "thd");
  expect_filled(paged(), kForward, "pages");
  expect_filled(backward(TESSERA_BF16), kBackward, "gradients");
  expect_filled(backward(TESSERA_BF16),
                {TESSERA_O, TESSERA_LSE, TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV},
                "all of a backward pass");
  Problem p = forward();
  p.format_q = TESSERA_SBHD, p.format_kv = TESSERA_BHSD;
  const auto o = [&](int axis) {
    return refilled(p, kForward).value().tensor[TESSERA_O].stride[axis];
  };
  EXPECT_EQ(o(1), 2 * 4 * 16);  // [sq, b, hq, dv]
  EXPECT_EQ(o(0), 4 * 16);
  p = backward();
  p.format_q = TESSERA_SBHD, p.format_kv = TESSERA_BHSD;
  const auto filled = refilled(p, kBackward);
  ASSERT_TRUE(filled.ok()) << filled.status().message();
  const Tensor& dv = filled.value().tensor[TESSERA_DV];  // [b, hk, sk, dv]
  EXPECT_EQ(dv.stride[0], 2 * 7 * 16);
  EXPECT_EQ(dv.stride[1], 16);
  EXPECT_EQ(dv.stride[2], 7 * 16);
}

TEST(Outputs, OfInputsThatAreExpanded) {
  Problem p = backward();
  for (const int i : {TESSERA_Q, TESSERA_DO}) p.tensor[i].stride[0] = 0;
  p.tensor[TESSERA_BIAS] = dense(TESSERA_FP32, {1, 4, 5, 7});
  p.tensor[TESSERA_BIAS].stride[1] = 0;
  p.tensor[TESSERA_DBIAS] = dense(TESSERA_FP32, {1, 4, 5, 7});
  p.tensor[TESSERA_SINK] = p.tensor[TESSERA_DSINK] = dense(TESSERA_FP32, {4});
  p.tensor[TESSERA_ALIBI_SLOPES] = p.tensor[TESSERA_DALIBI_SLOPES] = dense(TESSERA_FP32, {1, 4});
  p.align = TESSERA_ALIGN_TOP_LEFT;
  expect_filled(
      p, {TESSERA_DQ, TESSERA_DK, TESSERA_DV, TESSERA_DBIAS, TESSERA_DSINK, TESSERA_DALIBI_SLOPES},
      "all gradients");
}

TEST(Outputs, UsualDtypes) {
  const auto dtype = [](const Problem& p, int index) {
    const auto filled = with_outputs(p, std::vector<int32_t>{index});
    EXPECT_TRUE(filled.ok()) << filled.status().message();
    return filled.ok() ? filled.value().tensor[index].dtype : -1;
  };
  Problem p = forward(TESSERA_E4M3);
  p.tensor[TESSERA_LSE].dtype = TESSERA_FP32;
  p.tensor[TESSERA_O].dtype = TESSERA_NONE;
  EXPECT_EQ(dtype(p, TESSERA_O), TESSERA_BF16);
  p.tensor[TESSERA_O].dtype = TESSERA_E5M2;  // asked for
  EXPECT_EQ(dtype(p, TESSERA_O), TESSERA_E5M2);
  EXPECT_EQ(dtype(p, TESSERA_AMAX_O), TESSERA_FP32);

  p = backward(TESSERA_E4M3);
  p.tensor[TESSERA_LSE].dtype = TESSERA_FP32;
  for (const int i : kBackward) p.tensor[i] = Tensor{};
  for (const auto& [o, expected] :
       {std::pair(TESSERA_FP16, TESSERA_FP16), std::pair(TESSERA_BF16, TESSERA_BF16),
        std::pair(TESSERA_E4M3, TESSERA_BF16)}) {
    p.tensor[TESSERA_O].dtype = o;
    for (const int i : kBackward) EXPECT_EQ(dtype(p, i), expected);
    p.tensor[TESSERA_DO].dtype = TESSERA_NONE;
    EXPECT_EQ(dtype(p, TESSERA_DO), o);
    p.tensor[TESSERA_DO].dtype = TESSERA_E5M2;
  }
  p = backward(TESSERA_BF16);
  p.tensor[TESSERA_DK].dtype = TESSERA_FP32;
  EXPECT_EQ(dtype(p, TESSERA_DK), TESSERA_FP32);
}

// How a wanted tensor was described does not count, and no other changes.
TEST(Outputs, KeepWhatTheyAreNotAskedFor) {
  Problem p = forward();
  p.tensor[TESSERA_O].stride[1] += 8;
  p.tensor[TESSERA_O].stride[0] += 40;
  p.tensor[TESSERA_LSE] = dense(TESSERA_FP32, {99, 1, 1});
  p.tensor[TESSERA_LSE].extent[1] = -3, p.tensor[TESSERA_LSE].extent[2] = INT64_MAX;
  const auto filled = with_outputs(p, std::vector<int32_t>{TESSERA_LSE, TESSERA_LSE});
  ASSERT_TRUE(filled.ok()) << filled.status().message();
  EXPECT_EQ(filled.value().tensor[TESSERA_O].stride[1], p.tensor[TESSERA_O].stride[1]);
  EXPECT_EQ(filled.value().tensor[TESSERA_LSE].extent[2], 5);
}

TEST(Outputs, Errors) {
  const auto expect = [](Problem p, const std::vector<int32_t>& wanted, const char* expected) {
    const auto filled = with_outputs(p, wanted);
    EXPECT_FALSE(filled.ok()) << "accepted: " << expected;
    EXPECT_EQ(filled.status().message().rfind(expected, 0), 0u) << filled.status().message();
  };
  expect(forward(), {TESSERA_O, TESSERA_NUM_TENSORS},
         "wanted[1]=47: must be a tessera_index below");
  expect(forward(), {-1}, "wanted[0]=-1: must be");
  expect(forward(), {TESSERA_BIAS}, "wanted[0]=3: bias is no output of the forward pass");
  expect(forward(), {TESSERA_DQ}, "wanted[0]=26: dq is no output of the forward pass");
  expect(backward(), {TESSERA_MAX_LOGIT}, "wanted[0]=23: max_logit is no output of the backward");
  expect(backward(), {TESSERA_DBIAS}, "dbias: is wanted in the shape of bias, which is not given");
  expect(empty_problem(), {TESSERA_O}, "q=None: must be given");
  expect(forward(), {TESSERA_AMAX_O}, "amax_o.shape=[1]: belongs to fp8");
  Problem p = forward();
  p.tensor[TESSERA_O].dtype = TESSERA_BF16;
  expect(p, {TESSERA_O}, "o.dtype=bf16: must be fp32 beside q in fp32");
  p = forward();
  p.tensor[TESSERA_O] = Tensor{};
  expect(p, {TESSERA_LSE}, "o=None: must be given");
  p = forward();
  p.tensor[TESSERA_V].extent[3] = int64_t{1} << 40;  // o overflows where v does not
  p.tensor[TESSERA_V].stride[0] = p.tensor[TESSERA_V].stride[1] = 0;
  p.tensor[TESSERA_V].stride[2] = 0;
  p.tensor[TESSERA_Q].extent[1] = int64_t{1} << 30;
  p.tensor[TESSERA_Q].stride[0] = p.tensor[TESSERA_Q].stride[1] = 0;
  expect(p, {TESSERA_O, TESSERA_LSE}, "o.shape=[2, 1073741824, 4, 1099511627776]: its bytes");
}

// Inputs that are wrong are said, whatever is wanted of them; the sanitizers watch the arithmetic.
TEST(Outputs, WrongInputs) {
  for (void (*spoil)(Problem&) : {
           +[](Problem& p) { p.tensor[TESSERA_Q].extent[1] = -1; },
           +[](Problem& p) { p.tensor[TESSERA_Q].extent[1] = INT64_MIN; },
           +[](Problem& p) { p.tensor[TESSERA_K].extent[3] = 9; },
           +[](Problem& p) { p.tensor[TESSERA_V].dtype = TESSERA_INT32; },
           +[](Problem& p) { p.tensor[TESSERA_Q].dtype = TESSERA_BOOL; },
           +[](Problem& p) { p.tensor[TESSERA_Q].dtype = 99; },
           +[](Problem& p) { p.tensor[TESSERA_K] = Tensor{}; },
           +[](Problem& p) { p.format_q = TESSERA_THD; },
           +[](Problem& p) { p.pass = 7; },
           +[](Problem& p) { p.flags = 1u << 31; },
           +[](Problem& p) {
             p.tensor[TESSERA_PAGE_TABLE_K] = dense(TESSERA_INT32, {2, 1});
             p.tensor[TESSERA_PAGE_TABLE_K].extent[1] = INT64_MAX;
           },
           +[](Problem& p) {
             p.format_q = TESSERA_THD;
             p.tensor[TESSERA_CU_SEQLENS_Q].extent[0] = INT64_MIN;  // of what is not given
           },
       }) {
    Problem p = forward();
    spoil(p);
    const auto filled = refilled(p, kForward);
    ASSERT_FALSE(filled.ok());
    EXPECT_EQ(filled.status().code(), TESSERA_INVALID);
  }
}

}  // namespace
}  // namespace tessera
