// SPDX-License-Identifier: Apache-2.0
// nvte_fused_attn_fwd and _bwd against tessera_run, bit by bit.
#include <gtest/gtest.h>

#include "nvte/problems.h"

namespace nvte_test {
namespace {

constexpr int kMasks = 6;

bool has_thd(const std::string& name) { return name.find('t') != std::string::npos; }
bool is_paged(const std::string& name) { return name.rfind("paged", 0) == 0; }

// As large as the layout permits: tensors of one buffer have one shape.
Attention attention_for(const std::string& layout) {
  Attention a{};
  a.sq = 13, a.sk = 17, a.hq = 4, a.hk = 2, a.dqk = 16, a.dv = 24;
  a.q.lens = {13, 6, 0}, a.k.lens = {17, 9, 4};
  a.q.gap = a.k.gap = has_thd(layout) && layout.find('_') != 3 ? 3 : 0;
  if (layout.find('2') != std::string::npos) a.dv = 16;
  if (layout.find('3') != std::string::npos) {
    a.sq = a.sk, a.hk = a.hq, a.dv = a.dqk;
    a.q.lens = a.k.lens;
  }
  return a;
}

void compare(const Through& through, const Attention& attention) {
  const std::string name = kLayoutNames[through.layout];
  // Packed sequences and pages have lengths, so that every mask is read as its padding form.
  Attention plain = attention;
  if ((has_thd(name) || is_paged(name)) && attention.mask % 2 == 0) {
    plain.mask = NVTE_Mask_Type(attention.mask + 1);
  }
  Values expected = values_of(plain), got = values_of(attention);
  run_plain(plain, expected);
  run_through(through, attention, got);
  if (::testing::Test::HasFatalFailure()) return;
  expect_equal(plain, expected, got, !is_paged(name) && through.is_training);
}

TEST(NvteAttention, EveryLayoutUnderEveryMask) {
  for (int layout = 0; layout <= NVTE_BHSD_BHSD_BHSD; ++layout) {
    for (int mask = 0; mask < kMasks; ++mask) {
      SCOPED_TRACE(std::string(kLayoutNames[layout]) + ", mask " + std::to_string(mask));
      Attention a = attention_for(kLayoutNames[layout]);
      a.mask = NVTE_Mask_Type(mask);
      compare({NVTE_QKV_Layout(layout)}, a);
      a.left = 5, a.right = mask >= 2 ? 0 : 2;
      a.bottom_right = mask % 2 == 1;
      a.dtype = DType::kBFloat16;
      compare({NVTE_QKV_Layout(layout)}, a);
      if (HasFatalFailure()) return;
    }
  }
}

void expect_same_bits(const Values& x, const Values& y) {
  for (const auto& [name, plain] : x.plain)
    EXPECT_EQ(plain.memory.bytes, y.plain.at(name).memory.bytes) << name;
  for (const auto& [name, flat] : x.flat) EXPECT_EQ(flat.bytes, y.flat.at(name).bytes) << name;
}

TEST(NvteAttention, BothGenerationsOfCallsGiveTheSameBits) {
  for (int layout = 0; layout <= NVTE_BHSD_BHSD_BHSD; ++layout) {
    for (int mask = 0; mask < kMasks; ++mask) {
      SCOPED_TRACE(std::string(kLayoutNames[layout]) + ", mask " + std::to_string(mask));
      Attention a = attention_for(kLayoutNames[layout]);
      a.mask = NVTE_Mask_Type(mask);
      a.left = mask % 2 ? 5 : -1, a.bottom_right = mask % 3 == 1;
      a.dropout = mask == 3 ? 0.25f : 0, a.max_logit = mask == 4;
      a.softmax = mask == 5 ? NVTE_LEARNABLE_SOFTMAX : NVTE_VANILLA_SOFTMAX;
      a.bias = mask == 0 ? NVTE_ALIBI : NVTE_NO_BIAS;
      Values first = values_of(a), second = values_of(a);
      run_through({NVTE_QKV_Layout(layout)}, a, first);
      Through through{NVTE_QKV_Layout(layout)};
      through.second = true;
      run_through(through, a, second);
      expect_same_bits(first, second);
      if (HasFailure()) return;
    }
  }
}

// What else a score may have, once padded and once packed.
TEST(NvteAttention, Scores) {
  struct Variant {
    const char* name;
    void (*change)(Attention&);
  };
  constexpr Variant kVariants[] = {
      {"post-scale bias",
       [](Attention& a) {
         a.bias = NVTE_POST_SCALE_BIAS, a.bias_shape = {1, a.hq, a.sq, a.sk};
       }},
      {"pre-scale bias",
       [](Attention& a) {
         a.bias = NVTE_PRE_SCALE_BIAS, a.bias_shape = {1, 1, 1, a.sk};
       }},
      {"alibi", [](Attention& a) { a.bias = NVTE_ALIBI; }},
      {"alibi, six heads",
       [](Attention& a) { a.bias = NVTE_ALIBI, a.hq = 6, a.bottom_right = true; }},
      {"off by one", [](Attention& a) { a.softmax = NVTE_OFF_BY_ONE_SOFTMAX; }},
      {"learnable", [](Attention& a) { a.softmax = NVTE_LEARNABLE_SOFTMAX; }},
      {"bias and learnable",
       [](Attention& a) {
         a.softmax = NVTE_LEARNABLE_SOFTMAX;
         a.bias = NVTE_POST_SCALE_BIAS, a.bias_shape = {a.q.b(), 1, a.sq, a.sk};
       }},
      {"dropout", [](Attention& a) { a.dropout = 0.25f; }},
      {"max_logit", [](Attention& a) { a.max_logit = true; }},
      {"scale 0", [](Attention& a) { a.scale = 0; }},
      {"not deterministic", [](Attention& a) { a.deterministic = false; }},
  };
  for (const NVTE_QKV_Layout layout : {NVTE_SBHD_SB2HD, NVTE_THD_THD_THD}) {
    for (const Variant& variant : kVariants) {
      SCOPED_TRACE(std::string(kLayoutNames[layout]) + ", " + variant.name);
      Attention a = attention_for(kLayoutNames[layout]);
      a.mask = NVTE_PADDING_MASK;
      variant.change(a);
      compare({layout}, a);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(NvteAttention, ShapesWithoutABatchAxis) {
  for (const NVTE_QKV_Layout layout : {NVTE_BS3HD, NVTE_BSHD_BS2HD, NVTE_SBHD_SBHD_SBHD}) {
    SCOPED_TRACE(kLayoutNames[layout]);
    Attention a = attention_for(kLayoutNames[layout]);
    a.mask = NVTE_PADDING_CAUSAL_MASK;
    compare({layout, true, /*flat_shapes=*/true}, a);
  }
}

TEST(NvteAttention, InferenceNeedsNoStats) {
  Attention a = attention_for("bshd_bshd_bshd");
  a.mask = NVTE_CAUSAL_BOTTOM_RIGHT_MASK;
  Values expected = values_of(a), got = values_of(a);
  run_plain(a, expected);
  a.dropout = 0.5f;  // of training
  run_through({NVTE_BSHD_BSHD_BSHD, /*is_training=*/false}, a, got);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(expected.plain.at("o").memory.bytes, got.plain.at("o").memory.bytes);
}

// A causal mask has its own diagonal; bottom_right_diagonal is that of windows and ALiBi.
TEST(NvteAttention, ACausalMaskDecidesItsDiagonal) {
  Attention a = attention_for("bshd_bshd_bshd");
  a.mask = NVTE_CAUSAL_MASK;
  Values expected = values_of(a), got = values_of(a);
  run_plain(a, expected);
  a.bottom_right = true;
  run_through({NVTE_BSHD_BSHD_BSHD}, a, got);
  expect_equal(a, expected, got, true);
}

TEST(NvteAttention, NoSequences) {
  Attention a = attention_for("thd_thd_thd");
  a.q.lens = a.k.lens = {};
  a.mask = NVTE_PADDING_MASK;
  Values values = values_of(a);
  run_through({NVTE_THD_THD_THD}, a, values);
}

}  // namespace
}  // namespace nvte_test
