// SPDX-License-Identifier: Apache-2.0
// The oracle against closed forms, hand-written masks and finite differences.
#include "conformance/reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "conformance/conformance_case.h"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::unique_ptr<ConformanceCase> make(const std::string& text) {
  auto made = ConformanceCase::create(text);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? std::move(made).value() : nullptr;
}

reference::ReferenceValues forward(ConformanceCase& c) {
  return reference::reference_forward(c.problem(), c.buffers(), reference::Arithmetic::kExact, 1);
}

std::vector<double> values(ConformanceCase& c, int index) {
  return reference::load_dense(c.problem().tensor[index], tensor_rule(index).rank,
                               c.buffers().data[index]);
}

void set_values(ConformanceCase& c, int index, const std::vector<double>& to) {
  reference::store_dense(c.problem().tensor[index], tensor_rule(index).rank, to,
                         c.buffers().data[index]);
}

// v = identity, scale 0: row i of o is the indicator of what query i sees, divided by its size.
std::vector<std::string> visible(const std::string& tokens, int64_t sq, int64_t sk) {
  auto c = make("fwd fp64 b=1 sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) +
                " h=1 dqk=4 dv=" + std::to_string(sk) + " scale=0 " + tokens);
  std::vector<double> v(sk * sk, 0);
  for (int64_t j = 0; j < sk; ++j) v[j * sk + j] = 1;
  set_values(*c, TESSERA_V, v);
  const reference::ReferenceValues out = forward(*c);
  std::vector<std::string> rows;
  for (int64_t i = 0; i < sq; ++i) {
    std::string row;
    for (int64_t j = 0; j < sk; ++j) row += out.value[TESSERA_O][i * sk + j] > 0 ? 'x' : '.';
    rows.push_back(row);
  }
  return rows;
}

using Rows = std::vector<std::string>;

TEST(ReferenceMask, Causal) {
  EXPECT_EQ(visible("causal align=top_left", 3, 5), (Rows{"x....", "xx...", "xxx.."}));
  EXPECT_EQ(visible("causal align=bottom_right", 3, 5), (Rows{"xxx..", "xxxx.", "xxxxx"}));
  EXPECT_EQ(visible("causal align=bottom_right", 4, 2), (Rows{"..", "..", "x.", "xx"}));
}

TEST(ReferenceMask, Windows) {
  EXPECT_EQ(visible("window=1,0", 4, 4), (Rows{"x...", "xx..", ".xx.", "..xx"}));
  EXPECT_EQ(visible("window=0,2", 4, 4), (Rows{"xxx.", ".xxx", "..xx", "...x"}));
  EXPECT_EQ(visible("window=-1,1 align=bottom_right", 3, 4), (Rows{"xxx.", "xxxx", "xxxx"}));
  EXPECT_EQ(visible("window=0,-1 align=bottom_right", 4, 3), (Rows{"xxx", "xxx", ".xx", "..x"}));
  EXPECT_EQ(visible("causal window=1,-1", 3, 3), (Rows{"x..", "xx.", ".xx"}));
  EXPECT_EQ(visible("window=9223372036854775807,9223372036854775807", 2, 2), (Rows{"xx", "xx"}));
}

TEST(ReferenceMask, BottomRightCountsTrueLengths) {
  // 2 queries over 3 keys of a batch padded to 4 and 5.
  EXPECT_EQ(visible("causal align=bottom_right lens_q=2 lens_k=3", 4, 5),
            (Rows{"xx...", "xxx..", ".....", "....."}));
}

TEST(ReferenceMask, PrefixRangesJoinTheirQuerysOwnKeys) {
  EXPECT_EQ(visible("ranges=prefix:2", 4, 4), (Rows{"xx..", "xx..", "xxx.", "xxxx"}));
}

TEST(ReferenceMask, DataMasksAreAsGivenInEitherPolarity) {
  auto c = make("fwd fp64 b=1 s=12 h=1 dqk=4 dv=12 keep=random:0.5 seed=3");
  const auto* mask = static_cast<const uint8_t*>(c->buffers().data[TESSERA_MASK]);
  const Rows keep = visible("keep=random:0.5 seed=3", 12, 12);
  for (int64_t i = 0; i < 12; ++i) {
    for (int64_t j = 0; j < 12; ++j)
      EXPECT_EQ(keep[i][j] == 'x', mask[i * 12 + j] != 0) << i << ' ' << j;
  }
  EXPECT_EQ(visible("drop=random:0.5 seed=3", 12, 12), keep);
}

TEST(ReferenceMask, SegmentsHideOtherSegments) {
  for (const std::string text :
       {"segments=3 seed=5", "segments=again:2 seed=5", "segments=random:3 seed=5"}) {
    auto c = make("fwd fp64 b=1 s=12 h=1 dqk=4 dv=12 " + text);
    const auto* ids = static_cast<const int32_t*>(c->buffers().data[TESSERA_SEGMENT_IDS_Q]);
    const Rows rows = visible(text, 12, 12);
    for (int64_t i = 0; i < 12; ++i) {
      for (int64_t j = 0; j < 12; ++j)
        EXPECT_EQ(rows[i][j] == 'x', ids[i] == ids[j]) << text << ' ' << i << ' ' << j;
    }
    EXPECT_EQ(std::is_sorted(ids, ids + 12, std::greater()), text.find(':') == text.npos) << text;
  }
}

TEST(ReferenceForward, EqualScoresGiveTheMean) {
  auto c = make("fwd fp64 b=1 s=7 h=1 d=3 scale=0");
  const std::vector<double> v = values(*c, TESSERA_V);
  const reference::ReferenceValues out = forward(*c);
  for (int64_t column = 0; column < 3; ++column) {
    double mean = 0;
    for (int64_t j = 0; j < 7; ++j) mean += v[j * 3 + column] / 7;
    EXPECT_NEAR(out.value[TESSERA_O][column], mean, 1e-14);
  }
  EXPECT_NEAR(out.value[TESSERA_LSE][0], std::log(7.0), 1e-14);
}

TEST(ReferenceForward, OneKeyIsCopied) {
  auto c = make("fwd fp64 b=1 sq=2 sk=1 h=1 d=4 max_logit");
  const std::vector<double> q = values(*c, TESSERA_Q), k = values(*c, TESSERA_K),
                            v = values(*c, TESSERA_V);
  const reference::ReferenceValues out = forward(*c);
  double most = -kInfinity;
  for (int64_t i = 0; i < 2; ++i) {
    double x = 0;
    for (int64_t d = 0; d < 4; ++d) x += q[i * 4 + d] * k[d] / 2;
    most = std::max(most, x);
    EXPECT_NEAR(out.value[TESSERA_LSE][i], x, 1e-14);
    for (int64_t d = 0; d < 4; ++d) EXPECT_NEAR(out.value[TESSERA_O][i * 4 + d], v[d], 1e-14);
  }
  EXPECT_NEAR(out.value[TESSERA_MAX_LOGIT][0], most, 1e-14);
}

TEST(ReferenceForward, ScoreIsCappedAndBiasedInOrder) {
  auto c = make("fwd fp64 b=1 s=1 h=1 d=4 softcap=3 scale=0.5 bias=post/1");
  auto pre = make("fwd fp64 b=1 s=1 h=1 d=4 softcap=3 scale=0.5 bias=pre/1");
  const std::vector<double> q = values(*c, TESSERA_Q), k = values(*c, TESSERA_K);
  const double bias = values(*c, TESSERA_BIAS)[0];
  double s = 0;
  for (int64_t d = 0; d < 4; ++d) s += q[d] * k[d];
  EXPECT_NEAR(forward(*c).value[TESSERA_LSE][0], 3 * std::tanh(0.5 * s / 3) + bias, 1e-14);
  EXPECT_NEAR(forward(*pre).value[TESSERA_LSE][0], 3 * std::tanh(0.5 * (s + bias) / 3), 1e-14);
}

TEST(ReferenceForward, AlibiCountsFromTheDiagonal) {
  auto c = make("fwd fp64 b=1 sq=2 sk=5 h=1 d=1 scale=0 alibi align=bottom_right window=0,0");
  // Row i sees key i + 3 only, on the diagonal, where the distance is 0.
  for (double lse : forward(*c).value[TESSERA_LSE]) EXPECT_DOUBLE_EQ(lse, 0);
  auto wide = make("fwd fp64 b=1 sq=1 sk=4 h=1 d=1 scale=0 alibi align=top_left");
  const double slope = values(*wide, TESSERA_ALIBI_SLOPES)[0];
  double sum = 0;
  for (int64_t j = 0; j < 4; ++j) sum += std::exp(-slope * static_cast<double>(j));
  EXPECT_NEAR(forward(*wide).value[TESSERA_LSE][0], std::log(sum), 1e-14);
}

TEST(ReferenceForward, SinksTakeTheirShare) {
  auto off = make("fwd fp64 b=1 s=7 h=1 d=3 scale=0 sink=off_by_one");
  EXPECT_NEAR(forward(*off).value[TESSERA_LSE][0], std::log(8.0), 1e-14);
  auto alone = make("fwd fp64 b=1 s=7 h=2 d=3 keep=random:0/qk sink=learnable max_logit");
  const std::vector<double> sink = values(*alone, TESSERA_SINK);
  const reference::ReferenceValues out = forward(*alone);
  for (double o : out.value[TESSERA_O]) EXPECT_EQ(o, 0);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(out.value[TESSERA_LSE][h * 7 + i], sink[h]);
    EXPECT_EQ(out.value[TESSERA_MAX_LOGIT][h], -kInfinity);
  }
}

TEST(ReferenceForward, RowsThatSeeNothingAreZero) {
  auto c = make("fwd fp64 b=1 sq=5 sk=2 h=1 d=3 causal align=bottom_right");
  const reference::ReferenceValues out = forward(*c);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(out.value[TESSERA_LSE][i], -kInfinity);
    for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(out.value[TESSERA_O][i * 3 + d], 0);
  }
  EXPECT_TRUE(std::isfinite(out.value[TESSERA_LSE][3]));
}

TEST(ReferenceForward, MinusInfinityInABiasHidesItsKeyAnywhere) {
  for (const char* at : {"pre", "post"}) {
    for (const char* more : {"", " softcap=2", " scale=0"}) {
      auto c = make(std::string("bwd fp64 b=1 s=3 h=1 d=2 grads=dbias bias=") + at + "/qk" + more);
      std::vector<double> bias = values(*c, TESSERA_BIAS);
      bias[1] = -kInfinity;                      // row 0, key 1
      bias[3] = bias[4] = bias[5] = -kInfinity;  // row 1 sees nothing
      set_values(*c, TESSERA_BIAS, bias);
      const reference::ReferenceValues out = forward(*c);
      EXPECT_EQ(out.value[TESSERA_LSE][1], -kInfinity);
      std::vector<double> v = values(*c, TESSERA_V);
      v[2] += 100;  // key 1
      set_values(*c, TESSERA_V, v);
      EXPECT_EQ(forward(*c).value[TESSERA_O][0], out.value[TESSERA_O][0]);
      const reference::ReferenceValues g =
          reference::reference_backward(c->problem(), c->buffers(), reference::Arithmetic::kExact,
                                        1, out.value[TESSERA_O], out.value[TESSERA_LSE]);
      for (int64_t at_hidden : {1, 3, 4, 5}) EXPECT_EQ(g.value[TESSERA_DBIAS][at_hidden], 0);
    }
  }
}

TEST(ReferenceForward, NanSpreadsOnlyToRowsThatSeeIt) {
  auto c = make("fwd fp64 b=1 s=4 h=1 d=2 causal");
  std::vector<double> k = values(*c, TESSERA_K);
  k[2 * 2] = std::nan("");  // key 2
  set_values(*c, TESSERA_K, k);
  const reference::ReferenceValues out = forward(*c);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(std::isnan(out.value[TESSERA_LSE][i]), i >= 2);
    EXPECT_EQ(std::isnan(out.value[TESSERA_O][i * 2]), i >= 2);
  }
}

TEST(ReferenceForward, DropoutKeepsItsShareAndTheMean) {
  auto c = make("fwd fp64 b=1 sq=64 sk=512 h=2 dqk=2 dv=1 scale=0 dropout=0.3 seed=9");
  std::vector<double> v(values(*c, TESSERA_V).size(), 1);
  set_values(*c, TESSERA_V, v);
  double mean = 0;
  const reference::ReferenceValues out = forward(*c);
  for (double o : out.value[TESSERA_O]) mean += o / (64 * 2);
  // 65536 draws of variance p / (1 - p): four standard deviations.
  EXPECT_NEAR(mean, 1, 4 * std::sqrt(0.3 / 0.7 / 65536));
  EXPECT_NEAR(out.value[TESSERA_LSE][0], std::log(512.0), 1e-13);  // of the undropped row
}

TEST(Reference, ThreadsDoNotMatter) {
  for (const char* text : {"bwd fp64 b=2 s=33 hq=6 hk=3 d=8 dlse sink=learnable grads=dsink",
                           "bwd fp64 b=2 s=17 hq=6 hk=3 d=8 bias=post/q grads=dbias"}) {
    auto c = make(text);
    const auto once = forward(*c);
    const auto run = [&](int threads) {
      return reference::reference_backward(c->problem(), c->buffers(),
                                           reference::Arithmetic::kExact, threads,
                                           once.value[TESSERA_O], once.value[TESSERA_LSE]);
    };
    const auto one = run(1), three = run(3);
    for (int index = 0; index < TESSERA_NUM_TENSORS; ++index)
      EXPECT_EQ(one.value[index], three.value[index]);
  }
}

// ---- gradients ----

// L = sum do o + sum dlse lse over the rows that see something.
double loss(ConformanceCase& c) {
  const reference::ReferenceValues out = forward(c);
  const std::vector<double> d_o = values(c, TESSERA_DO);
  double sum = 0;
  for (size_t i = 0; i < d_o.size(); ++i) sum += d_o[i] * out.value[TESSERA_O][i];
  if (!given(c.problem(), TESSERA_DLSE)) return sum;
  const std::vector<double> dlse = values(c, TESSERA_DLSE);
  for (size_t i = 0; i < dlse.size(); ++i) {
    if (out.value[TESSERA_LSE][i] != -kInfinity) sum += dlse[i] * out.value[TESSERA_LSE][i];
  }
  return sum;
}

class ReferenceGradients : public testing::TestWithParam<const char*> {};

TEST_P(ReferenceGradients, AreFiniteDifferences) {
  auto c = make(GetParam());
  const reference::ReferenceValues out = forward(*c);
  const reference::ReferenceValues gradients =
      reference::reference_backward(c->problem(), c->buffers(), reference::Arithmetic::kExact, 1,
                                    out.value[TESSERA_O], out.value[TESSERA_LSE]);
  const std::pair<int, int> pairs[] = {
      {TESSERA_Q, TESSERA_DQ},       {TESSERA_K, TESSERA_DK},
      {TESSERA_V, TESSERA_DV},       {TESSERA_BIAS, TESSERA_DBIAS},
      {TESSERA_SINK, TESSERA_DSINK}, {TESSERA_ALIBI_SLOPES, TESSERA_DALIBI_SLOPES}};
  for (const auto& [input, gradient] : pairs) {
    if (!given(c->problem(), gradient)) continue;
    const std::vector<double> original = values(*c, input);
    ASSERT_EQ(gradients.value[gradient].size(), original.size());
    double largest = 0;
    for (size_t e = 0; e < original.size(); ++e) {
      constexpr double kStep = 1e-5;
      std::vector<double> moved = original;
      moved[e] = original[e] + kStep;
      set_values(*c, input, moved);
      const double above = loss(*c);
      moved[e] = original[e] - kStep;
      set_values(*c, input, moved);
      const double difference = (above - loss(*c)) / (2 * kStep);
      EXPECT_NEAR(gradients.value[gradient][e], difference, 1e-6 * (1 + std::abs(difference)))
          << tensor_rule(gradient).name << '[' << e << ']';
      largest = std::max(largest, std::abs(difference));
    }
    EXPECT_GT(largest, 1e-3) << tensor_rule(gradient).name << " is tested on zeros";
    set_values(*c, input, original);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ReferenceGradients,
    testing::Values(
        "bwd fp64 b=2 sq=4 sk=6 hq=4 hk=2 dqk=3 dv=5 dlse", "bwd fp64 b=1 s=6 h=1 d=3 causal",
        "bwd fp64 b=1 sq=7 sk=4 h=1 d=3 causal align=bottom_right dlse",
        "bwd fp64 b=1 sq=5 sk=9 h=1 d=3 window=2,1 align=bottom_right scale=1.5",
        "bwd fp64 b=3 s=6 h=1 d=2 lens=6,0,3 dlse",
        "bwd fp64 b=3 s=6 hq=2 hk=1 d=2 layout=thd lens=6,0,3 gaps=2 dlse",
        "bwd fp64 b=2 sq=3 sk=9 hq=2 hk=1 d=2 page=4 lens_k=9,6",
        "bwd fp64 b=2 s=4 h=2 d=2 layout=bsh3d strided",
        "bwd fp64 b=1 s=5 h=2 d=3 softcap=1.5 dlse",
        "bwd fp64 b=1 s=5 h=2 d=3 softcap=1 bias=pre/hqk grads=dbias dlse",
        "bwd fp64 b=2 s=5 h=2 d=3 bias=post/hqk grads=dbias dlse",
        "bwd fp64 b=2 s=4 h=2 d=3 bias=post/bk grads=dbias",
        "bwd fp64 b=2 s=4 h=2 d=3 bias=pre/bq grads=dbias dlse",
        "bwd fp64 b=2 s=4 h=2 d=3 bias=post/bhqk grads=dbias",
        "bwd fp64 b=2 s=4 h=2 d=3 bias=post/1 sink=off_by_one grads=dbias",
        "bwd fp64 b=2 s=5 h=2 d=3 alibi causal grads=dalibi_slopes dlse",
        "bwd fp64 b=2 sq=3 sk=5 h=2 d=3 alibi=bh align=bottom_right grads=dalibi_slopes",
        "bwd fp64 b=2 s=5 h=2 d=3 sink=learnable grads=dsink dlse",
        "bwd fp64 b=2 s=5 h=2 d=3 sink=learnable grads=dsink",
        "bwd fp64 b=1 s=6 h=2 d=3 keep=random:0.4/qk sink=learnable grads=dsink dlse",
        "bwd fp64 b=2 s=6 h=2 d=3 dropout=0.4 seed=4 dlse sink=learnable grads=dsink",
        "bwd fp64 b=1 s=8 h=1 d=2 ranges=two:3 dlse",
        "bwd fp64 b=1 s=8 h=1 d=2 segments=3 causal"));

TEST(ReferenceGradients, SinkOfARowThatSeesNothingGetsItsDlse) {
  auto c = make("bwd fp64 b=1 s=3 h=1 d=2 keep=random:0/qk sink=learnable grads=dsink dlse");
  const reference::ReferenceValues out = forward(*c);
  const auto g =
      reference::reference_backward(c->problem(), c->buffers(), reference::Arithmetic::kExact, 1,
                                    out.value[TESSERA_O], out.value[TESSERA_LSE]);
  double sum = 0;
  for (double dlse : values(*c, TESSERA_DLSE)) sum += dlse;
  EXPECT_DOUBLE_EQ(g.value[TESSERA_DSINK][0], sum);
  for (int index : {TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
    for (double x : g.value[index]) EXPECT_EQ(x, 0);
  }
}

}  // namespace
}  // namespace tessera
