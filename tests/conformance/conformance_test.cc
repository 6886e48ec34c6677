// SPDX-License-Identifier: Apache-2.0
// The generator's known answers, poison, guards, and that a wrong result is found.
#include "conformance/conformance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "conformance/conformance_case.h"
#include "conformance/data.h"
#include "conformance/made_case.h"

namespace tessera {
namespace {

std::vector<double> values(ConformanceCase& c, int index) {
  return reference::load_dense(c.problem().tensor[index], tensor_rule(index).rank,
                               c.buffers().data[index]);
}

template <typename T>
T* data(ConformanceCase& c, int index) {
  return static_cast<T*>(c.buffers().data[index]);
}

// ---- known answers, computed by another implementation of core/case/draw.h ----

TEST(Generator, DrawsNormals) {
  auto c = make("bwd fp64 b=1 s=2 h=1 d=3 seed=3");
  const double q[] = {0.271645984958721, 1.42882080647798, -1.55717798457695, 1.64283077396288,
                      -2.33341540398062};
  const double d_o[] = {0.353415869778814, 0.113362942036225, -0.524282400605225};
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(values(*c, TESSERA_Q)[i], q[i], 1e-13);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(values(*c, TESSERA_DO)[i], d_o[i], 1e-13);
}

TEST(Generator, DrawsMasksRangesPagesAndSegments) {
  auto mask = make("fwd fp32 b=1 s=4 h=1 d=3 keep=random:0.5 seed=3");
  const uint8_t bits[] = {0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0};
  EXPECT_EQ(std::memcmp(data<uint8_t>(*mask, TESSERA_MASK), bits, sizeof bits), 0);

  auto ranges = make("fwd fp32 b=1 sq=4 sk=20 h=1 d=3 ranges=random:3");
  const int32_t intervals[] = {6, 16, 13, 27, -3, 17, 4, 8};
  EXPECT_EQ(std::memcmp(data<int32_t>(*ranges, TESSERA_KEY_RANGES), intervals, sizeof intervals),
            0);

  auto pages = make("fwd fp32 b=2 s=12 h=1 d=3 page=4 seed=5");
  const int32_t table[] = {1, 3, 4, 1, 6, 5};
  EXPECT_EQ(std::memcmp(data<int32_t>(*pages, TESSERA_PAGE_TABLE_K), table, sizeof table), 0);

  auto bias = make("fwd fp64 b=1 s=4 h=1 d=3 bias=post/qk bias_inf=0.5 seed=3");
  auto finite = make("fwd fp64 b=1 s=4 h=1 d=3 bias=post/qk seed=3");
  int hidden = 0;
  for (int e = 0; e < 16; ++e) {
    const double x = values(*bias, TESSERA_BIAS)[e];
    hidden += std::isinf(x);
    EXPECT_EQ(x, std::isinf(x) ? -INFINITY : values(*finite, TESSERA_BIAS)[e]);
  }
  EXPECT_EQ(hidden, 7);

  auto causal = make("fwd fp64 b=1 s=4 h=1 d=3 bias=post/qk bias_low=-1e9,causal seed=3");
  for (int e = 0; e < 16; ++e) {
    const double drawn = values(*finite, TESSERA_BIAS)[e];
    EXPECT_EQ(values(*causal, TESSERA_BIAS)[e], e % 4 > e / 4 ? -1e9 : drawn);
  }
  // Whole rows, and the dtype's minimum where the value is beyond it.
  auto rows = make("fwd fp16 b=1 s=8 h=1 d=3 bias=post/qk bias_low=-1e9,rows:0.5 seed=3");
  int low = 0;
  for (int i = 0; i < 8; ++i) {
    const std::vector<double> bias = values(*rows, TESSERA_BIAS);
    low += bias[i * 8] == -65504;
    for (int j = 0; j < 8; ++j) EXPECT_EQ(bias[i * 8 + j] == -65504, bias[i * 8] == -65504);
  }
  EXPECT_GT(low, 0);
  EXPECT_LT(low, 8);
  auto from = make("fwd bf16 b=1 s=8 h=1 d=3 bias=post/k bias_low=min,from:5 sink=3e38");
  for (int j = 0; j < 8; ++j) {
    EXPECT_EQ(values(*from, TESSERA_BIAS)[j] == -0x1.FEp127, j >= 5);
  }
  EXPECT_NEAR(values(*from, TESSERA_SINK)[0], 3e38, 1e36);

  auto segments = make("fwd fp32 b=2 s=12 h=1 d=3 segments=3 seed=5");
  const int32_t ids[] = {1, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1,
                         0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  -1};
  EXPECT_EQ(std::memcmp(data<int32_t>(*segments, TESSERA_SEGMENT_IDS_Q), ids, sizeof ids), 0);
}

TEST(Generator, ExpandedInputsAreReadAgain) {
  auto c = make("bwd fp32 b=2 s=5 h=3 d=4 sink=learnable alibi dlse expanded poison lens=2,5");
  const std::vector<double> q = values(*c, TESSERA_Q), k = values(*c, TESSERA_K);
  for (int64_t row = 0; row < 2 * 5; ++row) {
    const bool padding = row >= 2 && row < 5;
    for (int e = 0; e < 4; ++e) {
      EXPECT_EQ(std::isnan(q[row * 12 + e]), padding);
      if (padding) continue;
      EXPECT_EQ(q[row * 12 + e], q[row * 12 + 8 + e]);  // heads 0 and 2
    }
  }
  for (int64_t e = 0; e < 5 * 12; ++e) EXPECT_EQ(k[e], k[5 * 12 + e]);
  EXPECT_EQ(c->problem().tensor[TESSERA_SINK].stride[0], 0);
  EXPECT_EQ(c->problem().tensor[TESSERA_ALIBI_SLOPES].stride[1], 0);
  EXPECT_EQ(c->problem().tensor[TESSERA_DLSE].stride[0], 0);
  EXPECT_NE(c->problem().tensor[TESSERA_DQ].stride[2], 0);
}

TEST(Generator, ValuesDoNotDependOnTheLayout) {
  const std::string sizes = "fwd bf16 b=2 s=5 h=3 d=7 bias=post/bqk seed=8 ";
  auto plain = make(sizes);
  for (const char* layout :
       {"layout=sbhd", "layout=bhsd", "layout=bs3hd", "layout=sbh3d", "strided", "interleaved"}) {
    auto other = make(sizes + layout);
    for (int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      EXPECT_EQ(values(*other, index), values(*plain, index)) << layout;
    }
  }
}

// ---- poison ----

class Poison : public testing::TestWithParam<const char*> {};

TEST_P(Poison, IsOutsideAndChangesNothing) {
  auto clean = make(GetParam()), poisoned = make(std::string(GetParam()) + " poison");
  const auto run = [](ConformanceCase& c) {
    EXPECT_TRUE(c.run("reference", Device{}, 1).ok());
    const CaseReport report = c.compare();
    EXPECT_TRUE(report.passed()) << (report.failures.empty() ? "" : report.failures[0]);
  };
  run(*clean);
  run(*poisoned);
  int64_t nans = 0;
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (!given(clean->problem(), index) || !is_float(clean->problem().tensor[index].dtype))
      continue;
    const Role role = tensor_rule(index).role;
    const bool output =
        role == (is_backward(clean->problem()) ? Role::kBackwardOutput : Role::kForwardOutput);
    const std::vector<double> a = values(*clean, index), b = values(*poisoned, index);
    for (size_t e = 0; e < a.size(); ++e) {
      EXPECT_FALSE(std::isnan(a[e]));
      if (output || !std::isnan(b[e])) {
        EXPECT_EQ(a[e], b[e]) << tensor_rule(index).name << '[' << e << ']';
      }
      nans += std::isnan(b[e]);
    }
  }
  EXPECT_GT(nans, 0) << "nothing was poisoned";
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Poison,
    testing::Values(
        "bwd fp32 b=3 s=9 h=2 d=4 lens=9,0,4 dlse",
        "fwd bf16 b=3 s=9 h=2 d=4 layout=thd lens=9,0,4 gaps=3",
        "fwd fp32 b=2 sq=3 sk=9 h=2 d=4 page=4 lens_k=6,9 tables=2",
        "bwd fp32 b=2 s=9 h=2 d=4 drop=keys:0.5/bhk lens_k=random:4",
        "bwd fp16 b=2 s=9 h=2 d=4 lens=4,7 bias=post/bhqk grads=dbias keep=random:0.5/qk",
        "bwd fp32 b=2 s=9 h=2 d=4 lens=4,7 layout=bs3hd strided"));

TEST(Poison, FillsTheBytesBetweenRows) {
  auto c = make("fwd fp32 b=2 s=3 h=2 d=4 strided poison");
  const auto* q = data<float>(*c, TESSERA_Q);
  EXPECT_FALSE(std::isnan(q[3]));
  EXPECT_TRUE(std::isnan(q[4]));  // past head 0, whose row has 4 elements
  auto clean = make("fwd fp32 b=2 s=3 h=2 d=4 strided");
  EXPECT_EQ(data<float>(*clean, TESSERA_Q)[4], 0);
}

TEST(Guard, NoByteAfterATensorMayBeRead) {
  auto c = make("fwd bf16 b=2 s=3 h=2 d=4");
  const auto* q = data<volatile uint16_t>(*c, TESSERA_Q);
  (void)q[2 * 3 * 2 * 4 - 1];
  EXPECT_DEATH((void)q[2 * 3 * 2 * 4], "");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(&q[0]) % 2, 0u);
}

// ---- judgement ----

// A reference result, spoilt by `spoil`, is a failure whose text has `words`.
void expect_failure(const std::string& text, const char* words,
                    const std::function<void(ConformanceCase&)>& spoil) {
  auto c = make(text);
  ASSERT_TRUE(c->run("reference", Device{}, 1).ok());
  ASSERT_TRUE(c->compare().passed());
  spoil(*c);
  const CaseReport report = c->compare();
  ASSERT_FALSE(report.passed()) << words;
  EXPECT_NE(report.failures[0].find(words), std::string::npos) << report.failures[0];
}

TEST(Judgement, FindsAWrongValueOfEveryOutput) {
  const auto spoil = [](int index) {
    return [index](ConformanceCase& c) { data<float>(c, index)[1] += 0.05f; };
  };
  expect_failure("fwd fp32 b=1 s=40 h=2 d=8 max_logit", "o: max error", spoil(TESSERA_O));
  expect_failure("fwd fp32 b=1 s=40 h=2 d=8 max_logit", "lse: error", spoil(TESSERA_LSE));
  expect_failure("fwd fp32 b=1 s=40 h=2 d=8 max_logit", "max_logit: error",
                 spoil(TESSERA_MAX_LOGIT));
  const char* backward =
      "bwd fp32 b=1 s=40 h=2 d=8 bias=post/qk alibi sink=learnable grads=dbias,dsink,dalibi_slopes";
  for (int index = TESSERA_DQ; index <= TESSERA_DALIBI_SLOPES; ++index) {
    expect_failure(backward, tensor_rule(index).name, [index](ConformanceCase& c) {
      data<float>(c, index)[1] *= 1.01f;
      data<float>(c, index)[1] += 0.01f;
    });
  }
}

TEST(Judgement, FindsAnUnwrittenElement) {
  expect_failure("fwd bf16 b=1 s=9 h=2 d=8", "o: element 5 is",
                 [](ConformanceCase& c) { data<uint16_t>(c, TESSERA_O)[5] = 0xFFFF; });
  auto c = make("fwd bf16 b=1 s=9 h=2 d=8");
  c->poison_outputs();
  const CaseReport report = c->compare();
  ASSERT_FALSE(report.passed());
  EXPECT_NE(report.failures.back().find("were not written"), std::string::npos)
      << report.failures.back();
}

TEST(Judgement, FindsATouchedByteBetweenRows) {
  expect_failure("fwd fp32 b=1 s=9 h=2 d=8 strided", "o: 4 bytes between its rows",
                 [](ConformanceCase& c) { data<float>(c, TESSERA_O)[8] = 0; });
  // The neighbour of dq in one buffer is dk, and that of dv the next token's dq.
  expect_failure("bwd fp32 b=1 s=9 h=2 d=8 interleaved strided", "dq: 4 bytes between its rows",
                 [](ConformanceCase& c) { data<float>(c, TESSERA_DQ)[8] = 0; });
}

TEST(Judgement, PaddingMustBeZeroAndMinusInfinity) {
  expect_failure("fwd fp32 b=1 s=9 h=1 d=4 lens=5 poison", "lse",
                 [](ConformanceCase& c) { data<float>(c, TESSERA_LSE)[7] = 0; });
  expect_failure("fwd fp32 b=1 s=9 h=1 d=4 layout=thd lens=5 gaps=2 poison", "o",
                 [](ConformanceCase& c) { data<float>(c, TESSERA_O)[6 * 4] = 1; });
}

TEST(Judgement, RefusalsAndErrorsAreNotPasses) {
  auto c = make("bwd fp16 b=1 s=9 h=1 d=8 kv=e4m3");
  EXPECT_EQ(c->run("reference", Device{}, 1).code(), TESSERA_REFUSED);
  EXPECT_TRUE(c->compare().refused);
  EXPECT_FALSE(c->compare().passed());
  EXPECT_EQ(c->run("nonsense", Device{}, 1).code(), TESSERA_INVALID);
  EXPECT_FALSE(c->compare().refused);
  EXPECT_FALSE(c->compare().passed());
}

TEST(Judgement, IllegalProblemsAreNoCases) {
  const auto made = ConformanceCase::create("fwd fp32 b=1 sq=3 sk=5 h=1 d=8 causal");
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("align"), std::string::npos) << made.status().message();
}

// ---- the C door ----

std::string text_of(int64_t (*call)(tessera_case*, char*, int64_t), tessera_case* c) {
  std::string text(static_cast<size_t>(call(c, nullptr, 0)), '\0');
  EXPECT_EQ(call(c, text.data(), static_cast<int64_t>(text.size())),
            static_cast<int64_t>(text.size()));
  text.pop_back();
  return text;
}

TEST(CDoor, SaysHowToAsk) {
  tessera_error error{};
  error.struct_size = sizeof error;
  tessera_case* c = tessera_case_new(
      "bwd bf16 b=2 s=8 h=2 d=8 layout=thd lens=3,8 causal segments=2 "
      "sink=learnable grads=dsink drop=random:0.5/bqk out",
      &error);
  ASSERT_NE(c, nullptr) << error.message;
  EXPECT_EQ(error.code, TESSERA_OK);
  const std::string json =
      text_of([](tessera_case* c, char* b, int64_t n) { return tessera_case_json(c, b, n); }, c);
  for (const char* part :
       {"\"layout\": \"thd\"", "\"causal\": true", "\"drop\": 4", "\"segment_ids\": [6, 7]",
        "\"same\": [[\"cu_seqlens_q\", \"cu_seqlens_k\"]]", "\"max_seqlen_q\": 8",
        "\"grads\": [\"dq\", \"dk\", \"dv\", \"dsink\"]", "\"out\": true", "\"0\": [1, 2, 3]",
        "\"do\": 24"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << " in " << json;
  }
  EXPECT_EQ(tessera_case_problem(c)->pass, TESSERA_BACKWARD);
  EXPECT_EQ(tessera_case_buffers(c)->data[TESSERA_CU_SEQLENS_Q],
            tessera_case_buffers(c)->data[TESSERA_CU_SEQLENS_K]);
  tessera_case_free(c);
}

TEST(CDoor, RunsAndJudges) {
  tessera_error error{};
  error.struct_size = sizeof error;
  tessera_case* c = tessera_case_new("fwd bf16 b=2 s=8 h=2 d=8 causal", &error);
  const tessera_device cpu{};
  ASSERT_EQ(tessera_case_run(c, "reference", &cpu, 1, &error), TESSERA_OK) << error.message;
  EXPECT_NE(text_of(tessera_case_compare, c).find("\"passed\": true"), std::string::npos);
  tessera_case_poison_outputs(c);
  const std::string json = text_of(tessera_case_compare, c);
  EXPECT_NE(json.find("\"passed\": false"), std::string::npos);
  EXPECT_NE(json.find("\"max_err\": null"), std::string::npos) << json;
  char few[8];
  EXPECT_EQ(tessera_case_compare(c, few, sizeof few), static_cast<int64_t>(json.size()) + 1);
  EXPECT_EQ(std::strlen(few), 7u);
  tessera_case_free(c);
  EXPECT_EQ(tessera_case_new("fwd bf16 cuasal", &error), nullptr);
  EXPECT_EQ(error.code, TESSERA_INVALID);
  EXPECT_NE(std::string(error.message).find("cuasal"), std::string::npos);
}

}  // namespace
}  // namespace tessera
