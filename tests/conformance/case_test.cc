// SPDX-License-Identifier: Apache-2.0
#include "core/case/case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

namespace tessera {
namespace {

Case parsed(const std::string& text) {
  const auto c = parse_case(text);
  EXPECT_TRUE(c.ok()) << text << ": " << c.status().message();
  return c.ok() ? c.value() : Case{};
}

class CaseRoundTrip : public testing::TestWithParam<const char*> {};

TEST_P(CaseRoundTrip, IsItself) {
  const Case c = parsed(GetParam());
  EXPECT_EQ(to_text(c), GetParam());
  EXPECT_EQ(parsed(to_text(c)), c);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CaseRoundTrip,
    testing::Values(
        "fwd bf16 b=2 sq=1024 sk=4096 hq=16 hk=4 dqk=192 dv=128 layout=sbhd causal "
        "align=bottom_right",
        "bwd fp32 b=1 s=257 h=3 d=40 window=16,0 softcap=30 bias=post/hqk grads=dbias "
        "deterministic",
        "fwd fp16 b=4 s=300 h=8 d=64 layout=thd lens=random:7 gaps=3 dropout=0.1 poison seed=3",
        "fwd e4m3 b=1 s=8 h=1 d=16", "fwd fp16 b=1 s=8 h=1 d=16 kv=e5m2",
        "fwd fp64 b=0 sq=0 sk=3 h=1 d=16",
        "fwd fp32 b=2 s=8 h=2 d=8 layout=bshd,sbhd lens_q=3,0 lens_k=full",
        "fwd fp32 b=2 s=8 h=2 d=8 layout=paged_kv_thd_bshd_bshd lens_k=random:4294967295 page=3 "
        "tables=2 int64",
        "fwd fp32 b=2 s=8 h=2 d=8 layout=thd gaps=random:9 window=-1,9223372036854775807",
        "fwd fp32 b=2 s=8 h=2 d=8 keep=random:0.25/bk", "fwd fp32 b=2 s=8 h=2 d=8 drop=keys:0.5/1",
        "fwd fp32 b=2 s=8 h=2 d=8 keep=blocks:1/bhqk",
        "fwd fp32 b=2 s=8 h=2 d=8 ranges=random:1 segments=4",
        "fwd fp32 b=2 s=8 h=2 d=8 segments=again:4", "fwd fp32 b=2 s=8 h=2 d=8 segments=random:2",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=pre/qk bias_inf=0.25 expanded",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=post/qk bias_low=min,causal",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=post/bk bias_low=-10000,keys:0.25",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=post/q bias_inf=0.5 bias_low=-3.4e+38,rows:0.5 sink=3e+38",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=pre/1 bias_low=min,random:1 bias_dtype=fp32",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=post/k bias_low=-65504,from:5",
        "fwd fp32 b=2 s=8 h=2 d=8 bias=post/hqk bias_low=-1e+09,blocks:0.5 sink=-5",
        "fwd fp32 b=2 s=8 h=2 d=8 ranges=two:1", "fwd fp32 b=2 s=8 h=2 d=8 ranges=prefix:100",
        "fwd bf16 b=2 s=8 h=2 d=8 scale=0 bias=pre/1 bias_dtype=fp32 alibi=bh sink=off_by_one "
        "max_logit",
        "fwd e4m3 b=2 s=8 h=2 d=8 max_logit no_lse",
        "bwd bf16 b=2 s=8 h=2 d=8 alibi sink=learnable dlse grads=dsink,dalibi_slopes strided "
        "interleaved out"));

TEST(CaseText, DefaultsSpacesAndCommentsDoNotMatter) {
  EXPECT_EQ(to_text(parsed("  fwd\tbf16 sk=8  sq=8 b=1 hk=2 hq=2 dv=4 dqk=4 keep=random:0.50 "
                           "bias=post seed=0 # d=5")),
            "fwd bf16 b=1 s=8 h=2 d=4 keep=random:0.5/qk bias=post/hqk");
}

struct Broken {
  const char* text;
  const char* token;  // that the message names
  const char* works;  // what it says would work
};

class CaseErrors : public testing::TestWithParam<Broken> {};

TEST_P(CaseErrors, NameTheTokenAndWhatWouldWork) {
  const auto c = parse_case(GetParam().text);
  ASSERT_FALSE(c.ok()) << GetParam().text;
  EXPECT_EQ(c.status().code(), TESSERA_INVALID);
  EXPECT_NE(c.status().message().find(GetParam().token), std::string::npos) << c.status().message();
  EXPECT_NE(c.status().message().find(GetParam().works), std::string::npos) << c.status().message();
}

#define SIZES "b=2 s=8 h=2 d=8 "
INSTANTIATE_TEST_SUITE_P(
    Cases, CaseErrors,
    testing::Values(
        Broken{"", "''", "fwd bf16"}, Broken{"fwd", "'fwd'", "b=2"},
        Broken{"forward bf16 b=1", "'forward'", "fwd or bwd"},
        Broken{"fwd int32 b=1", "'int32'", "bf16"},
        Broken{"fwd bf16 s=8 h=2 d=8", "b is missing", "give b"},
        Broken{"fwd bf16 b=2 s=8 h=2 dqk=8", "dv is missing", "dqk and dv"},
        Broken{"fwd bf16 " SIZES "b=2", "'b=2'", "remove one"},
        Broken{"fwd bf16 " SIZES "sq=4", "'sq=4'", "remove one"},
        Broken{"fwd bf16 " SIZES "lens=full lens_q=full", "'lens_q=full'", "remove one"},
        Broken{"fwd bf16 " SIZES "keep=random:1 drop=random:1", "'drop=random:1'", "remove one"},
        Broken{"fwd bf16 " SIZES "cuasal", "'cuasal'", "causal"},
        Broken{"fwd bf16 " SIZES "causal=1", "'causal=1'", "without a value"},
        Broken{"fwd bf16 " SIZES "page", "'page'", "page=16"},
        Broken{"fwd bf16 " SIZES "page=0", "'page=0'", "at least 1"},
        Broken{"fwd bf16 b=-1 s=8 h=2 d=8", "'b=-1'", "b=2"},
        Broken{"fwd bf16 b=1 s=8 h=0 d=8", "'h=0'", "h=4"},
        Broken{"fwd bf16 " SIZES "seed=1x", "'seed=1x'", "seed=7"},
        Broken{"fwd bf16 " SIZES "window=1", "'window=1'", "window=128,0"},
        Broken{"fwd bf16 " SIZES "window=-2,0", "'window=-2,0'", "-1"},
        Broken{"fwd bf16 " SIZES "softcap=0", "'softcap=0'", "above 0"},
        Broken{"fwd bf16 " SIZES "scale=nan", "'scale=nan'", "finite"},
        Broken{"fwd bf16 " SIZES "dropout=1", "'dropout=1'", "(0, 1)"},
        Broken{"fwd bf16 " SIZES "keep=random:2", "'keep=random:2'", "[0, 1]"},
        Broken{"fwd bf16 " SIZES "keep=keys:0.5/qk", "keys", "without q"},
        Broken{"fwd bf16 " SIZES "bias=post/kq", "'bias=post/kq'", "in this order"},
        Broken{"fwd bf16 " SIZES "layout=hbsd", "'layout=hbsd'", "layout=bs3hd"},
        Broken{"fwd bf16 " SIZES "layout=bshd_sbhd_bshd", "'layout=bshd_sbhd_bshd'", "layout=sbhd"},
        Broken{"fwd bf16 " SIZES "lens=1,2,3", "lens", "one length for each"},
        Broken{"fwd bf16 " SIZES "lens=1,9", "9 exceeds", "0..8"},
        Broken{"fwd bf16 " SIZES "gaps=2", "gaps", "layout=thd"},
        Broken{"fwd bf16 " SIZES "tables=2", "tables=2", "page=N"},
        Broken{"fwd bf16 " SIZES "layout=paged_kv_bshd_bshd_bshd", "paged", "page=N"},
        Broken{"fwd bf16 b=1 s=8 hq=4 hk=2 d=8 layout=bs3hd", "bs3hd", "h=N"},
        Broken{"fwd bf16 b=1 sq=8 sk=9 h=2 d=8 interleaved", "one buffer", "s=N"},
        Broken{"fwd bf16 " SIZES "layout=bs3hd interleaved", "interleaved", "remove one"},
        Broken{"fwd bf16 " SIZES "bias_dtype=fp32", "bias_dtype", "bias"},
        Broken{"fwd bf16 " SIZES "bias_inf=0.5", "bias_inf", "bias=post"},
        Broken{"fwd bf16 " SIZES "bias=post bias_inf=0", "bias_inf", "bias_inf=0.3"},
        Broken{"fwd bf16 " SIZES "bias_low=min,causal", "bias_low", "bias=post"},
        Broken{"fwd bf16 " SIZES "bias=post/k bias_low=min,rows:0.5", "bias_low", "bias=post"},
        Broken{"fwd bf16 " SIZES "bias=post/q bias_low=min,from:5", "bias_low", "bias=post"},
        Broken{"fwd bf16 " SIZES "bias=post/hqk bias_low=1,causal", "bias_low", "bias_low=min,"},
        Broken{"fwd bf16 " SIZES "bias=post bias_low=min", "bias_low", "bias_low=min,keys:0.3"},
        Broken{"fwd bf16 " SIZES "bias=post bias_low=-inf,causal", "bias_low", "finite"},
        Broken{"fwd bf16 " SIZES "bias=post bias_low=min,keys:0", "bias_low", "(0, 1]"},
        Broken{"fwd bf16 " SIZES "sink=inf", "sink=inf", "finite"},
        Broken{"fwd bf16 " SIZES "interleaved expanded", "expanded", "separate"},
        Broken{"fwd bf16 " SIZES "dlse", "dlse", "bwd"},
        Broken{"bwd bf16 " SIZES "max_logit", "max_logit", "fwd"},
        Broken{"bwd bf16 " SIZES "no_lse", "no_lse", "fwd"},
        Broken{"fwd bf16 " SIZES "accumulate no_lse", "no_lse", "leave it out"},
        Broken{"bwd bf16 " SIZES "grads=dbias", "dbias", "bias=post"},
        Broken{"bwd bf16 " SIZES "bias=post grads=dbias,dbias", "grads", "each once"},
        Broken{"fwd bf16 b=99999999 s=99999999 h=9999 d=99999999", "2^63", "smaller"}));

TEST(CaseGeometry, StridesFollowTheLayout) {
  const auto strides = [](const std::string& layout, int index) {
    const CaseGeometry g = geometry_of(parsed("fwd fp32 b=2 s=5 h=3 d=8 " + layout));
    const Tensor& t = g.problem.tensor[index];
    return std::vector<int64_t>{g.offset[index], t.stride[0], t.stride[1], t.stride[2],
                                t.stride[3]};
  };
  using V = std::vector<int64_t>;
  EXPECT_EQ(strides("", TESSERA_Q), (V{0, 120, 24, 8, 1}));
  EXPECT_EQ(strides("layout=sbhd", TESSERA_K), (V{0, 24, 48, 8, 1}));
  EXPECT_EQ(strides("layout=bhsd", TESSERA_V), (V{0, 120, 8, 40, 1}));
  EXPECT_EQ(strides("layout=bs3hd", TESSERA_V), (V{48, 360, 72, 8, 1}));
  EXPECT_EQ(strides("layout=sbh3d", TESSERA_K), (V{8, 72, 144, 24, 1}));
  EXPECT_EQ(strides("layout=bshd_bs2hd", TESSERA_V), (V{24, 240, 48, 8, 1}));
  EXPECT_EQ(strides("layout=bshd_bsh2d", TESSERA_V), (V{8, 240, 48, 16, 1}));
  EXPECT_EQ(strides("layout=t3hd", TESSERA_K), (V{24, 720, 72, 8, 1}));
  EXPECT_EQ(strides("layout=bhsd interleaved", TESSERA_K), (V{120, 360, 8, 40, 1}));
  for (int axis = 1; axis < 4; ++axis)
    EXPECT_EQ(strides("strided", TESSERA_Q)[axis] % 2, 1) << axis;
}

TEST(CaseGeometry, LengthsAndGapsAreDrawnAsWrittenDown) {
  // Known answers, computed by another implementation of core/case/draw.h.
  const CaseGeometry random =
      geometry_of(parsed("fwd fp32 b=4 s=300 h=1 d=8 lens_q=random:7 lens_k=random:7"));
  EXPECT_EQ(random.len_q, (std::vector<int64_t>{247, 136, 150, 187}));
  EXPECT_EQ(random.len_k, (std::vector<int64_t>{69, 82, 144, 268}));
  const CaseGeometry gaps =
      geometry_of(parsed("fwd fp32 b=3 s=4 h=1 d=8 layout=thd gaps=random:5"));
  EXPECT_EQ(gaps.start_q, (std::vector<int64_t>{12, 12 + 4 + 11, 12 + 8 + 24, 12 + 12 + 33}));
  EXPECT_EQ(gaps.problem.tensor[TESSERA_Q].extent[1], gaps.start_q[3] + 1);
  EXPECT_NE(gaps.problem.flags & TESSERA_SAME_LENGTHS, 0u);
}

TEST(CaseGeometry, ProblemsAreLegal) {
  for (const char* text :
       {"fwd fp32 b=2 s=8 h=2 d=8 layout=thd keep=random:0.5/bqk strided",
        "bwd bf16 b=2 s=8 hq=4 hk=2 dqk=8 dv=24 interleaved strided bias=pre/k grads=dbias poison",
        "fwd fp16 b=2 s=8 h=2 d=8 layout=paged_kv_sbhd_sbhd_sbhd page=3 tables=2 causal "
        "align=top_left"}) {
    const Status status = validate(geometry_of(parsed(text)).problem);
    EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  }
}

// A case gives its outputs strides of its own; their shapes and dtypes are the library's.
TEST(CaseGeometry, OutputsAreAsTheLibraryDescribesThem) {
  std::ifstream file(TESSERA_CASES "/ci.cases");
  int cases = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    const Case c = parsed(line);
    const Problem p = geometry_of(c).problem;
    Problem asked = p;
    std::vector<int32_t> wanted;
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      const bool of_forward = i == TESSERA_O || i == TESSERA_LSE || i == TESSERA_DO;
      if (!given(p, i) || !(is_output(p, i) || of_forward || i == TESSERA_DLSE)) continue;
      wanted.push_back(i);
      const bool gradient = i >= TESSERA_DQ && i <= TESSERA_DV;
      const int32_t of_case = i == TESSERA_O    ? c.o_dtype
                              : i == TESSERA_DO ? c.do_dtype
                              : gradient        ? c.grad_dtype
                                                : 0;
      asked.tensor[i].dtype = of_case;
    }
    const auto filled = with_outputs(asked, wanted);
    ASSERT_TRUE(filled.ok()) << line << ": " << filled.status().message();
    for (const int32_t i : wanted) {
      const Tensor &t = filled.value().tensor[i], &expected = p.tensor[i];
      EXPECT_EQ(t.dtype, expected.dtype) << line << ": " << name_of(p, i);
      for (int axis = 0; axis < tensor_rule(i).rank; ++axis) {
        EXPECT_EQ(t.extent[axis], expected.extent[axis]) << line << ": " << name_of(p, i);
      }
    }
    ++cases;
  }
  EXPECT_GT(cases, 1000);
}

}  // namespace
}  // namespace tessera
