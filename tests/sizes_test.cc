// SPDX-License-Identifier: Apache-2.0
// Extents of any 63 bits, through the C header: a workspace is as large as what it must hold, or
// the call is one clear error. UBSan shows that nothing wraps on the way.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_time.h"
#include "random_problem.h"
#include "tessera.h"

namespace {

constexpr tessera_device kCpu{TESSERA_CPU, 0, 0, 0};

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

// One memory for all sequences, so that a batch of 2^40 is looked at once.
TEST(Sizes, WhatIsExpandedIsReadOnce) {
  constexpr int64_t kHuge = int64_t{1} << 40, kKeys = 1 << 20;
  Error e;
  int32_t zero = 0, one_key = 1;
  int64_t zero64 = 0;
  float one = 1, bad = -1;
  tessera_buffers b{};
  b.struct_size = sizeof b;
  b.data[TESSERA_K] = b.data[TESSERA_V] = &one;

  tessera_problem packed = forward({1, 0, 1, 1, 1, 1, 1});
  packed.format_q = packed.format_kv = TESSERA_THD;
  give(packed, TESSERA_CU_SEQLENS_Q, TESSERA_INT64, {kHuge + 1});
  give(packed, TESSERA_CU_SEQLENS_K, TESSERA_INT64, {kHuge + 1});
  b.data[TESSERA_CU_SEQLENS_Q] = b.data[TESSERA_CU_SEQLENS_K] = &zero64;
  ASSERT_EQ(describe(packed, {TESSERA_O}, &e), TESSERA_OK) << e.message;
  EXPECT_EQ(tessera_validate(&packed, &kCpu, &b, &e), TESSERA_OK) << e.message;
  zero64 = 1;
  EXPECT_EQ(tessera_validate(&packed, &kCpu, &b, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("cu_seqlens_q[0]=1: must be 0")) << e.message;

  tessera_problem paged = forward({kHuge, 1, 1, 1, 1, 1, 1});
  for (int t : {TESSERA_K, TESSERA_V}) paged.tensor[t].extent[0] = 1;  // a pool of one page
  give(paged, TESSERA_PAGE_TABLE_K, TESSERA_INT32, {kHuge, 1 << 18});
  give(paged, TESSERA_SEQLENS_K, TESSERA_INT32, {kHuge});
  b.data[TESSERA_Q] = &one;
  b.data[TESSERA_O] = reinterpret_cast<void*>(int64_t{1} << 62);  // nobody writes there
  b.data[TESSERA_PAGE_TABLE_K] = &zero, b.data[TESSERA_SEQLENS_K] = &one_key;
  ASSERT_EQ(describe(paged, {TESSERA_O}, &e), TESSERA_OK) << e.message;
  EXPECT_EQ(tessera_validate(&paged, &kCpu, &b, &e), TESSERA_OK) << e.message;
  zero = 1;
  EXPECT_EQ(tessera_validate(&paged, &kCpu, &b, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("page_table[0, 0]=1: must be a page")) << e.message;

  tessera_problem scaled = forward({kHuge, 0, kKeys, 1, 1, 1, 1}, TESSERA_E4M3);
  const uint8_t byte = 0x38;
  for (int t : {TESSERA_Q_SCALE, TESSERA_K_SCALE, TESSERA_V_SCALE}) {
    give(scaled, t, TESSERA_FP32, {1, 1, 1});
    b.data[t] = &one;
  }
  give(scaled, TESSERA_V_SCALE, TESSERA_FP32, {kHuge, 1, kKeys / 128});
  give(scaled, TESSERA_K_SCALE, TESSERA_FP32, {kHuge, 1, kKeys / 128});
  scaled.k_scale_block = 128;
  b.data[TESSERA_K] = b.data[TESSERA_V] = const_cast<uint8_t*>(&byte);
  ASSERT_EQ(describe(scaled, {TESSERA_O}, &e), TESSERA_OK) << e.message;
  EXPECT_EQ(tessera_validate(&scaled, &kCpu, &b, &e), TESSERA_OK) << e.message;
  b.data[TESSERA_V_SCALE] = &bad;
  EXPECT_EQ(tessera_validate(&scaled, &kCpu, &b, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("v_descale=-1") || e.says("v_scale=-1")) << e.message;
}

// Whatever a call lists for each sequence: one element for 2^40 of them, or one row of a table.
TEST(Sizes, ListsThatAreExpandedAreNotWalked) {
  constexpr int64_t kHuge = int64_t{1} << 40, kPages = 4;
  for (const int32_t list :
       {TESSERA_SEQLENS_Q, TESSERA_SEQLENS_K, TESSERA_Q_START, TESSERA_K_START, TESSERA_SHIFT,
        TESSERA_WINDOWS, TESSERA_PAGE_TABLE_K, TESSERA_PAGE_TABLE_V}) {
    const bool paged = list == TESSERA_PAGE_TABLE_K || list == TESSERA_PAGE_TABLE_V;
    tessera_problem p = forward({kHuge, 1, 1, 1, 1, 1, 1});
    int32_t pages[kPages] = {0, 0, 0, 0}, zero = 0;
    float one = 1;
    tessera_buffers b{};
    b.struct_size = sizeof b;
    b.data[TESSERA_Q] = b.data[TESSERA_K] = b.data[TESSERA_V] = &one;
    b.data[TESSERA_O] = reinterpret_cast<void*>(int64_t{1} << 62);  // nobody writes there
    if (paged) {
      for (int t : {TESSERA_K, TESSERA_V}) p.tensor[t].extent[0] = 1;
      give(p, TESSERA_SEQLENS_K, TESSERA_INT32, {kHuge});
      b.data[TESSERA_SEQLENS_K] = &zero;
      for (int t = TESSERA_PAGE_TABLE_K; t <= list; ++t) {
        give(p, t, TESSERA_INT32, {kHuge, kPages});
        p.tensor[t].stride[1] = 1;
        b.data[t] = pages;
      }
    } else {
      const bool windows = list == TESSERA_WINDOWS;
      give(p, list, TESSERA_INT32, {kHuge});
      if (windows) p.tensor[list].extent[1] = 2;
      b.data[list] = &zero;
      if (!windows) p.flags |= TESSERA_CAUSAL;
      p.align = list == TESSERA_SHIFT ? TESSERA_ALIGN_GIVEN : TESSERA_ALIGN_TOP_LEFT;
    }
    Error e;
    ASSERT_EQ(describe(p, {TESSERA_O}, &e), TESSERA_OK) << list << e.message;
    const double start = milliseconds();
    EXPECT_EQ(tessera_validate(&p, &kCpu, &b, &e), TESSERA_OK) << list << ": " << e.message;
    EXPECT_LT(milliseconds() - start, kMostMilliseconds) << list;
  }
}

// Every sequence of an append has the same place for its tokens.
TEST(Sizes, AnAppendToOnePlaceIsDoneOnce) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  tessera_append_args args{};
  args.struct_size = sizeof args;
  const auto give_to = [&](int index, int32_t dtype, std::initializer_list<int64_t> extent,
                           void* data) {
    tessera_tensor& t = args.tensor[index];
    t.dtype = dtype;
    std::fill(t.extent, t.extent + 4, 1);
    std::copy(extent.begin(), extent.end(), t.extent);
    args.data[index] = data;
  };
  float k = 3, cache[2] = {7, 7};
  int32_t length = 1, page = 0, fresh = 0;
  give_to(TESSERA_APPEND_K, TESSERA_FP32, {kHuge, 1, 1, 1}, &k);
  give_to(TESSERA_APPEND_K_CACHE, TESSERA_FP32, {1, 2, 1, 1}, cache);
  for (int t : {TESSERA_APPEND_K, TESSERA_APPEND_K_CACHE}) args.tensor[t].stride[3] = 1;
  args.tensor[TESSERA_APPEND_K_CACHE].stride[1] = 1;
  give_to(TESSERA_APPEND_SEQLENS, TESSERA_INT32, {kHuge}, &length);
  give_to(TESSERA_APPEND_PAGE_TABLE, TESSERA_INT32, {kHuge, 1}, &page);
  Error e;
  ASSERT_EQ(tessera_append(&args, &kCpu, nullptr, &e), TESSERA_OK) << e.message;
  EXPECT_EQ(cache[0], 7);
  EXPECT_EQ(cache[1], 3);

  give_to(TESSERA_APPEND_SEQLENS_Q, TESSERA_INT32, {kHuge}, &fresh);  // no new tokens
  k = 5;
  ASSERT_EQ(tessera_append(&args, &kCpu, nullptr, &e), TESSERA_OK) << e.message;
  EXPECT_EQ(cache[1], 3);
}

// Lengths that are all full are no list of them.
TEST(Sizes, ACaseOfManySequencesIsSmall) {
  for (const char* text :
       {"fwd bf16 b=1000000000000 s=1 h=1 d=1",
        "fwd bf16 b=400000000 s=3 h=1 d=1 layout=thd gaps=2",
        "bwd fp32 b=1000000000000 sq=1 sk=2 h=1 d=1 lens_k=full causal align=top_left"}) {
    Error e;
    std::vector<char> answer(1 << 16);
    EXPECT_GT(tessera_explain(nullptr, text, &kCpu, answer.data(),
                              static_cast<int64_t>(answer.size()), &e),
              0)
        << e.message;
  }
  Error e;
  EXPECT_EQ(tessera_explain(nullptr, "fwd bf16 b=400000000 s=1 h=1 d=1 lens=random:1", &kCpu,
                            nullptr, 0, &e),
            -1);
  EXPECT_TRUE(e.says("b=400000000; at most 2^20 sequences")) << e.message;
}

// Backends of CUDA that take a problem on a GPU that is only imagined, whose kernels count tiles in
// 32 bits: those of all sequences and heads of a side.
int expect_tiles_fit(const tessera_problem& p, int32_t arch) {
  const tessera_device device{TESSERA_CUDA, 0, arch, 0};
  static std::vector<char> answer(1 << 20);
  if (tessera_explain(&p, nullptr, &device, answer.data(), static_cast<int64_t>(answer.size()),
                      nullptr) < 0)
    return 0;
  const std::string json = answer.data();
  int taken = 0;
  for (const char* name : {"cuda_sm80", "cuda_sm90"}) {
    const size_t at = json.find(std::string("{\"name\": \"") + name);
    if (at == std::string::npos) continue;
    // Without CUDA in the build, that is the only reason of a backend that would take it.
    const size_t first = json.find("\"reasons\": [", at), last = json.find(']', first);
    const std::string reasons = json.substr(first, last - first);
    const bool is_unbuilt = reasons.find("\"id\": \"not_built\"") != std::string::npos;
    if (std::count(reasons.begin(), reasons.end(), '{') != (is_unbuilt ? 1 : 0)) continue;
    ++taken;
    const bool packed = p.format_q == TESSERA_THD;
    const auto batch = packed ? static_cast<double>(p.tensor[TESSERA_CU_SEQLENS_Q].extent[0] - 1)
                              : static_cast<double>(p.tensor[TESSERA_Q].extent[0]);
    const auto rows = static_cast<double>(p.tensor[TESSERA_Q].extent[1]);
    const auto heads = static_cast<double>(p.tensor[TESSERA_Q].extent[2]);
    const double tiles = packed ? rows / 16 + batch + 1 : std::ceil(rows / 16) * batch;
    EXPECT_LT(tiles * heads, 2147483648.0) << name << json;
  }
  return taken;
}

// Random extents of up to 2^60, both passes and all formats: what is accepted has room for what a
// call holds for each sequence, and for the rows of a worker.
TEST(Sizes, NothingWraps) {
  RandomProblems problems(20261125, {.rows = 61, .heads = 30, .dims = 61, .in_units = false});
  const Extents& e = problems.extents;
  int accepted = 0, too_many = 0, on_cuda = 0;
  for (int i = 0; i < 40000; ++i) {
    tessera_problem p;
    if (!problems.next(p)) continue;
    if (i % 7 == 3) on_cuda += expect_tiles_fit(p, i % 3 ? 80 : 90);
    const double start = milliseconds();
    const Answer answer = prepare(p, i % 7 == 0 ? 256 : 1);
    EXPECT_LT(milliseconds() - start, kMostMilliseconds) << answer.message;
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
  EXPECT_GT(on_cuda, 100);
}

}  // namespace
