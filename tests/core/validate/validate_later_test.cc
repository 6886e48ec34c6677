// SPDX-License-Identifier: Apache-2.0
// The rules of fields whose features come later: positions, parts and fp8.
#include "core/illegal.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT: problems to start from

Problem given_align() {
  Problem p = forward();
  p.align = TESSERA_ALIGN_GIVEN;
  return p;
}

TEST(ValidateLater, PositionsAndParts) {
  expect_all({
      {"align.shape=[2]: must not be given", fp32,
       [](Problem& p) { tensor(p, TESSERA_SHIFT) = dense(TESSERA_INT32, {2}); }},
      {"shift=3: must be 0", fp32, [](Problem& p) { p.shift = 3; }},
      {"align.shape=[3]: must be [2]", given_align,
       [](Problem& p) { tensor(p, TESSERA_SHIFT) = dense(TESSERA_INT32, {3}); }},
      {"align.dtype=fp32: must be int32 or int64", given_align,
       [](Problem& p) { tensor(p, TESSERA_SHIFT) = dense(TESSERA_FP32, {2}); }},
      {"shift=3: must be 0 beside the SHIFT", given_align,
       [](Problem& p) { tensor(p, TESSERA_SHIFT) = dense(TESSERA_INT64, {2}), p.shift = 3; }},
      {"align=2305843009213693952: a diagonal must be between -2^60 and 2^60", given_align,
       [](Problem& p) { p.shift = int64_t{1} << 61; }},
      {"q_start.shape=[3]: must be [2]", fp32,
       [](Problem& p) { tensor(p, TESSERA_Q_START) = dense(TESSERA_INT32, {3}); }},
      {"windows.shape=[2, 3]: must be [2, 2]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_WINDOWS) = dense(TESSERA_INT32, {2, 3});
       }},
      {"windows.shape=[2, 2]: must not be given; beside causal=True", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_WINDOWS) = dense(TESSERA_INT32, {2, 2}), p.flags |= TESSERA_CAUSAL;
       }},
      {"because windows has a diagonal", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_WINDOWS) = dense(TESSERA_INT64, {2, 2});
       }},
      {"partial=True: says what o and lse of the backward", fp32,
       [](Problem& p) { p.flags |= TESSERA_PARTIAL; }},
      {"accumulate=True: needs lse", fp32,
       [](Problem& p) { p.flags |= TESSERA_ACCUMULATE, tensor(p, TESSERA_LSE) = {}; }},
      {"v.shape=[2, 7, 2, 16]: TESSERA_V_IN_K", fp32,
       [](Problem& p) { p.flags |= TESSERA_V_IN_K, p.tensor[TESSERA_V].stride[1] += 4; }},
      {"keep_tail.shape=[1, 1, 5, 7]: must be [2|1, 4|1, 5, 5]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_KEEP_TAIL) = dense(TESSERA_BOOL, {1, 1, 5, 7});
       }},
      {"rng_state.shape=[3]: must be [2]", fp32,
       [](Problem& p) { tensor(p, TESSERA_RNG_STATE) = dense(TESSERA_INT64, {3}); }},
  });
  Problem p = forward();
  tensor(p, TESSERA_Q_START) = dense(TESSERA_INT32, {2});
  p.flags |= TESSERA_CAUSAL;
  p.tensor[TESSERA_K].extent[1] = p.tensor[TESSERA_V].extent[1] = 5;
  EXPECT_NE(validate(p).message().find("nor where they begin"), std::string::npos);
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  expect_legal(p, "a start beside align");
  tensor(p, TESSERA_RNG_STATE) = dense(TESSERA_INT64, {4});
  expect_legal(p, "four words");
}

TEST(ValidateLater, RoundingToFp8) {
  expect_all({
      {"precision=\"fp8\": rounds 16-bit", fp32,
       [](Problem& p) { p.flags |= TESSERA_FP8_PRODUCTS; }},
      {"smooth: belongs to precision", bf16, [](Problem& p) { p.flags |= TESSERA_SMOOTH_MEAN; }},
      {"smooth: TESSERA_SMOOTH_HADAMARD", bf16,
       [](Problem& p) { p.flags |= TESSERA_FP8_PRODUCTS | TESSERA_SMOOTH_HADAMARD; }},
      {"o_scale.shape=[1]: scales an fp8 o", bf16,
       [](Problem& p) { tensor(p, TESSERA_O_SCALE) = dense(TESSERA_FP32, {1}); }},
      {"dq_scale.shape=[1]: must not be given", fp32,
       [](Problem& p) { tensor(p, TESSERA_DQ_SCALE) = dense(TESSERA_FP32, {1}); }},
      {"amax_o.shape=[1]: belongs to fp8", bf16,
       [](Problem& p) { tensor(p, TESSERA_AMAX_O) = dense(TESSERA_FP32, {1}); }},
      {"amax_o.shape=[1]: must not be given", gradient,
       [](Problem& p) { tensor(p, TESSERA_AMAX_O) = dense(TESSERA_FP32, {1}); }},
      {"scale_block=7: that of q", bf16, [](Problem& p) { p.q_scale_block = 7; }},
      {"scale_block=64: that of k", bf16, [](Problem& p) { p.k_scale_block = 64; }},
      {"scale_block=128: that of k must be beside", bf16,
       [](Problem& p) { p.k_scale_block = 128; }},
  });
  Problem p = forward(TESSERA_E4M3);
  tensor(p, TESSERA_O).dtype = TESSERA_BF16;
  tensor(p, TESSERA_LSE).dtype = TESSERA_FP32;
  p.q_scale_block = 1;
  tensor(p, TESSERA_Q_SCALE) = dense(TESSERA_FP32, {2, 4, 5});
  expect_legal(p, "a scale for each row of q");
  tensor(p, TESSERA_Q_SCALE).extent[2] = 4;
  EXPECT_NE(validate(p).message().find("q_scale.shape=[2, 4, 4]: must be [2|1, 4|1, 5|1]"),
            std::string::npos)
      << validate(p).message();
}

TEST(ValidateLater, ADiagonalWithoutEffectIsBlanked) {
  Problem p = given_align();
  p.shift = 3;
  EXPECT_EQ(normalised(p).align, TESSERA_ALIGN_NONE);
  EXPECT_EQ(normalised(p).shift, 0);
  p.flags |= TESSERA_CAUSAL;
  EXPECT_EQ(normalised(p).align, TESSERA_ALIGN_GIVEN);
  EXPECT_EQ(normalised(p).shift, 3);
  // A window as wide as the tensors hides something where the diagonal lies elsewhere.
  p.flags |= TESSERA_WINDOW;
  p.window_left = 7, p.window_right = -1;
  EXPECT_EQ(normalised(p).window_left, 7);
  p.shift = 0;
  EXPECT_EQ(normalised(p).align, TESSERA_ALIGN_TOP_LEFT);
}

}  // namespace
}  // namespace tessera
