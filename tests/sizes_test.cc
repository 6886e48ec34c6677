// SPDX-License-Identifier: Apache-2.0
// Extents of any 63 bits, through the C header: a workspace is as large as what it must hold, or
// the call is one clear error. UBSan shows that nothing wraps on the way.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tessera.h"

namespace {

constexpr tessera_device kCpu{TESSERA_CPU, 0, 0, 0};

void give(tessera_problem& p, int index, int32_t dtype, std::initializer_list<int64_t> extent) {
  tessera_tensor& t = p.tensor[index];
  t.dtype = dtype;
  std::fill(t.extent, t.extent + 4, 1);
  std::copy(extent.begin(), extent.end(), t.extent);
}

struct Extents {
  int64_t b, sq, sk, hq, hk, dqk, dv;
};

// All that is read is expanded, so that no extent is bounded by memory.
tessera_problem forward(const Extents& e, int32_t dtype = TESSERA_FP32) {
  tessera_problem p{};
  p.struct_size = sizeof p;
  give(p, TESSERA_Q, dtype, {e.b, e.sq, e.hq, e.dqk});
  give(p, TESSERA_K, dtype, {e.b, e.sk, e.hk, e.dqk});
  give(p, TESSERA_V, dtype, {e.b, e.sk, e.hk, e.dv});
  for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) p.tensor[i].stride[3] = 1;
  return p;
}

int32_t describe(tessera_problem& p, std::initializer_list<int32_t> wanted, tessera_error* e) {
  return tessera_outputs(&p, std::data(wanted), static_cast<int32_t>(wanted.size()), e);
}

struct Error : tessera_error {
  Error() : tessera_error{} { struct_size = sizeof(tessera_error); }
  bool says(const char* text) const { return std::strstr(message, text) != nullptr; }
};

struct Answer {
  int32_t code;
  int64_t bytes;
  std::string message;
};
Answer prepare(const tessera_problem& p, int32_t num_threads = 0) {
  Error e;
  tessera_info info{};
  info.struct_size = sizeof info;
  const int32_t code = tessera_prepare(&p, &kCpu, num_threads, &info, &e);
  return {code, info.workspace_bytes, e.message};
}

TEST(Sizes, AnEmptyProblemOfAnyExtentNeedsNothing) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  for (const Extents& e : {Extents{kHuge, 0, 1, 1, 1, 1, 1}, Extents{0, kHuge, kHuge, 1, 1, 1, 1},
                           Extents{kHuge, 0, 0, 4, 2, 64, 64}, Extents{0, 0, 0, 1, 1, kHuge, 1}}) {
    tessera_problem p = forward(e);
    Error error;
    ASSERT_EQ(describe(p, {TESSERA_O, TESSERA_LSE, TESSERA_MAX_LOGIT}, &error), TESSERA_OK)
        << error.message;
    const Answer answer = prepare(p);
    EXPECT_EQ(answer.code, TESSERA_OK) << answer.message;
    EXPECT_EQ(answer.bytes, 0);

    tessera_buffers b{};
    b.struct_size = sizeof b;
    std::vector<float> max_logit(static_cast<size_t>(e.hq), 7);
    b.data[TESSERA_MAX_LOGIT] = max_logit.data();
    float one = 1;
    b.data[TESSERA_K] = b.data[TESSERA_V] = &one;
    EXPECT_EQ(tessera_run(&p, &kCpu, &b, &error), TESSERA_OK) << error.message;
    for (float x : max_logit) EXPECT_EQ(x, -__builtin_inff());
  }
}

TEST(Sizes, GradientsOfNoQueriesAreZero) {
  const Extents e{int64_t{1} << 40, 0, 0, 2, 1, 8, 8};
  tessera_problem p = forward(e);
  p.pass = TESSERA_BACKWARD;
  give(p, TESSERA_SINK, TESSERA_FP32, {2});
  p.tensor[TESSERA_SINK].stride[0] = 1;
  Error error;
  ASSERT_EQ(describe(p, {TESSERA_O, TESSERA_LSE, TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DSINK},
                     &error),
            TESSERA_OK)
      << error.message;
  p.tensor[TESSERA_DSINK].stride[0] = 2;
  EXPECT_EQ(prepare(p).bytes, 0);
  float sink[2] = {1, 2}, dsink[4] = {7, 7, 7, 7};
  tessera_buffers b{};
  b.struct_size = sizeof b;
  b.data[TESSERA_SINK] = sink, b.data[TESSERA_DSINK] = dsink;
  EXPECT_EQ(tessera_run(&p, &kCpu, &b, &error), TESSERA_OK) << error.message;
  const float expected[4] = {0, 7, 0, 7};
  EXPECT_EQ(std::memcmp(dsink, expected, sizeof expected), 0);
}

TEST(Sizes, AnExtentBeyondTwoToTheSixtyIsNamed) {
  tessera_problem p = forward({(int64_t{1} << 60) + 1, 0, 1, 1, 1, 1, 1});
  Error e;
  EXPECT_EQ(describe(p, {TESSERA_O}, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("1152921504606846977")) << e.message;
}

TEST(Sizes, AWorkspaceBeyondSixtyThreeBitsNamesTheExtent) {
  tessera_problem p = forward({1, 1, int64_t{1} << 51, 1, 1, 1, 1});
  p.pass = TESSERA_BACKWARD;
  Error e;
  ASSERT_EQ(describe(p, {TESSERA_O, TESSERA_LSE, TESSERA_DO}, &e), TESSERA_OK) << e.message;
  give(p, TESSERA_BIAS, TESSERA_FP32, {1, 1, 1, int64_t{1} << 51});
  p.tensor[TESSERA_Q].extent[2] = int64_t{1} << 10;
  ASSERT_EQ(describe(p, {TESSERA_O, TESSERA_LSE, TESSERA_DO, TESSERA_DBIAS}, &e), TESSERA_OK)
      << e.message;
  const Answer answer = prepare(p, 256);
  EXPECT_EQ(answer.code, TESSERA_INVALID) << answer.bytes;
  EXPECT_NE(answer.message.find("sk=2251799813685248"), std::string::npos) << answer.message;
}

TEST(Sizes, NothingIsWalkedForNothing) {
  constexpr int64_t kHuge = int64_t{1} << 50;
  Error e;
  const int64_t state[] = {1, 2};
  EXPECT_EQ(tessera_dropout_mask(1, 1, kHuge, 0, 0.5, state, nullptr, &kCpu, nullptr, &e),
            TESSERA_OK)
      << e.message;

  tessera_problem p = forward({kHuge, 0, 1, 1, 1, 1, 1});  // one length for all sequences
  give(p, TESSERA_SEQLENS_K, TESSERA_INT32, {kHuge});
  ASSERT_EQ(describe(p, {TESSERA_O}, &e), TESSERA_OK) << e.message;
  int32_t length = 1;
  float one = 1;
  tessera_buffers b{};
  b.struct_size = sizeof b;
  b.data[TESSERA_SEQLENS_K] = &length, b.data[TESSERA_K] = b.data[TESSERA_V] = &one;
  EXPECT_EQ(tessera_validate(&p, &kCpu, &b, &e), TESSERA_OK) << e.message;
  length = 2;
  EXPECT_EQ(tessera_validate(&p, &kCpu, &b, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("seqlens_k[0]=2")) << e.message;
}

// Random extents of up to 2^60, both passes and all formats: what is accepted has room for what a
// call holds for each sequence, and for the rows of a worker.
TEST(Sizes, NothingWraps) {
  std::mt19937_64 random(20261125);
  const auto draw = [&](int most) {
    const int bits =
        static_cast<int>(random() % 4 == 0 ? random() % static_cast<unsigned>(most) : random() % 6);
    return static_cast<int64_t>(random() % (uint64_t{2} << bits));
  };
  int accepted = 0, too_many = 0;
  for (int i = 0; i < 20000; ++i) {
    Extents e{draw(61), draw(61), draw(61), 0, draw(30) + 1, draw(61) + 1, draw(61) + 1};
    e.hq = e.hk * (draw(8) + 1);
    tessera_problem p = forward(e, std::vector{TESSERA_FP32, TESSERA_BF16, TESSERA_E4M3}[i % 3]);
    if (i % 5 == 0) {
      p.format_q = p.format_kv = TESSERA_THD;
      for (int t : {TESSERA_Q, TESSERA_K, TESSERA_V}) p.tensor[t].extent[0] = 1;
      for (int t : {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K})
        give(p, t, TESSERA_INT64, {e.b + 1});
    } else if (i % 5 == 1) {
      give(p, TESSERA_PAGE_TABLE_K, TESSERA_INT32, {e.b, draw(61) + 1});
      give(p, TESSERA_SEQLENS_K, TESSERA_INT32, {e.b});
      for (int t : {TESSERA_K, TESSERA_V}) p.tensor[t].extent[0] = draw(61) + 1;
    }
    if (i % 2) {
      p.pass = TESSERA_BACKWARD;
      give(p, TESSERA_SINK, TESSERA_FP32, {e.hq});
      if (describe(p,
                   {TESSERA_O, TESSERA_LSE, TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV,
                    TESSERA_DSINK},
                   nullptr) != TESSERA_OK)
        continue;
    } else if (describe(p, {TESSERA_O, TESSERA_LSE}, nullptr) != TESSERA_OK) {
      continue;
    }
    const Answer answer = prepare(p, i % 7 == 0 ? 256 : 1);
    if (answer.code == TESSERA_OK) {
      ++accepted;
      const bool rows = p.tensor[TESSERA_Q].extent[0] > 0 && p.tensor[TESSERA_Q].extent[1] > 0;
      const double least = rows ? 64.0 * static_cast<double>(e.b) +
                                      4.0 * static_cast<double>(e.dqk) +
                                      4.0 * static_cast<double>(e.dv)
                                : 0;
      EXPECT_GE(static_cast<double>(answer.bytes), least) << i;
    } else if (answer.message.find("workspace") != std::string::npos) {
      ++too_many;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(too_many, 10);
}

}  // namespace
