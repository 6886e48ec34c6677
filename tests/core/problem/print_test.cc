// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "core/case/case.h"
#include "core/problems.h"

namespace tessera {
namespace {

using testing::dense;

TEST(ShapeText, TheCallersOrder) {
  Problem p = testing::forward();
  EXPECT_EQ(shape_text(p, TESSERA_Q), "[2, 5, 4, 8]");
  p.format_q = TESSERA_SBHD;
  p.format_kv = TESSERA_BHSD;
  EXPECT_EQ(shape_text(p, TESSERA_Q), "[5, 2, 4, 8]");
  EXPECT_EQ(shape_text(p, TESSERA_O), "[5, 2, 4, 16]");
  EXPECT_EQ(shape_text(p, TESSERA_K), "[2, 2, 7, 8]");
  EXPECT_EQ(shape_text(p, TESSERA_LSE), "[2, 4, 5]");
  p = testing::packed();
  EXPECT_EQ(shape_text(p, TESSERA_V), "[11, 2, 16]");
  EXPECT_EQ(shape_text(p, TESSERA_LSE), "[4, 9]");
  EXPECT_EQ(shape_text(p, TESSERA_CU_SEQLENS_Q), "[3]");
  p.tensor[TESSERA_KEY_RANGES] = dense(TESSERA_INT32, {1, 4, 9, 2});
  EXPECT_EQ(shape_text(p, TESSERA_KEY_RANGES), "[4, 9, 2]");
  EXPECT_EQ(shape_text(testing::paged(), TESSERA_K), "[6, 4, 2, 8]");
}

TEST(ToCase, Lines) {
  Problem p = testing::forward(TESSERA_BF16);
  EXPECT_EQ(to_case(p), "fwd bf16 b=2 sq=5 sk=7 hq=4 hk=2 dqk=8 dv=16");
  p.flags |= TESSERA_CAUSAL;
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  EXPECT_EQ(to_case(p), "fwd bf16 b=2 sq=5 sk=7 hq=4 hk=2 dqk=8 dv=16 causal align=bottom_right");
  EXPECT_EQ(to_case(p), to_case(normalised(p)));
  Problem empty = testing::forward();
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O, TESSERA_LSE}) {
    empty.tensor[i].extent[0] = 0;
  }
  EXPECT_EQ(to_case(normalised(empty)), "fwd fp32 b=0 sq=5 sk=7 hq=4 hk=2 dqk=8 dv=16");
  EXPECT_EQ(to_case(testing::paged()),
            "fwd fp32 b=2 sq=5 sk=12 hq=4 hk=2 dqk=8 dv=16 lens_k=random:0 page=4 int64");
}

// Whatever is printed can be read, and what is read prints the same line.
TEST(ToCase, CanBePastedBack) {
  for (const char* line : {
           "fwd bf16 b=2 s=16 h=4 d=64 causal",
           "bwd fp32 b=1 sq=17 sk=33 hq=6 hk=2 dqk=40 dv=24 layout=sbhd window=4,2 align=top_left",
           "fwd fp16 b=3 s=20 h=2 d=8 layout=thd lens=4,0,20 gaps=3 dropout=0.1",
           "fwd fp16 b=3 s=20 h=2 d=8 layout=thd,bshd lens_q=4,0,20 causal align=bottom_right",
           "fwd bf16 b=2 sq=1 sk=64 hq=8 hk=2 d=32 page=16 tables=2 lens_k=64,9",
           "bwd bf16 b=2 s=8 h=4 d=8 bias=pre/hk bias_dtype=fp32 grads=dbias dlse deterministic",
           "bwd fp32 b=2 s=8 h=4 d=8 alibi=bh sink=learnable grads=dsink,dalibi_slopes",
           "fwd fp32 b=2 s=8 h=4 d=8 drop=random:0.5/bk softcap=20 max_logit sink=off_by_one",
           "fwd fp32 b=2 s=8 h=4 d=8 ranges=two:3 segments=2 batch_invariant layout=bhsd",
           "fwd bf16 kv=e4m3 b=1 s=8 h=1 d=16 strided",
       }) {
    const auto parsed = parse_case(line);
    ASSERT_TRUE(parsed.ok()) << line << ": " << parsed.status().message();
    const Problem problem = geometry_of(parsed.value()).problem;
    ASSERT_TRUE(validate(problem).ok()) << line << ": " << validate(problem).message();
    const std::string printed = to_case(normalised(problem));
    const auto again = parse_case(printed);
    ASSERT_TRUE(again.ok()) << printed << ": " << again.status().message();
    const Problem second = geometry_of(again.value()).problem;
    ASSERT_TRUE(validate(second).ok()) << printed << ": " << validate(second).message();
    EXPECT_EQ(to_case(normalised(second)), printed) << line;
    EXPECT_EQ(second.pass, problem.pass) << printed;
    const Sizes a = sizes_of(problem), b = sizes_of(second);
    EXPECT_EQ(a.batch, b.batch) << printed;
    EXPECT_EQ(a.hq, b.hq) << printed;
    EXPECT_EQ(a.dv, b.dv) << printed;
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      EXPECT_EQ(given(problem, i), given(second, i)) << printed << " " << tensor_rule(i).name;
    }
  }
}

}  // namespace
}  // namespace tessera
