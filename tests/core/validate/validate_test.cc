// SPDX-License-Identifier: Apache-2.0
// Each illegal edit of a legal problem, and what the message must say.
#include <gtest/gtest.h>

#include <random>

#include "core/illegal.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT: problems to start from

TEST(Validate, Fields) {
  expect_all({
      {"pass=2", fp32, [](Problem& p) { p.pass = 2; }},
      {"layout=9", fp32, [](Problem& p) { p.format_q = 9; }},
      {"layout=-1", fp32, [](Problem& p) { p.format_kv = -1; }},
      {"align=4", fp32, [](Problem& p) { p.align = 4; }},
      {"flags=0x100000", fp32, [](Problem& p) { p.flags = 1 << 20; }},
      {"problem.reserved=5", fp32, [](Problem& p) { p.reserved[3] = 5; }},
      {"v.dtype=12", fp32, [](Problem& p) { tensor(p, TESSERA_V).dtype = 12; }},
      {"k.reserved=1", fp32, [](Problem& p) { tensor(p, TESSERA_K).reserved = 1; }},
  });
}

TEST(Validate, WhatMustBeGiven) {
  expect_all({
      {"q=None", fp32, [](Problem& p) { tensor(p, TESSERA_Q) = {}; }},
      {"k=None", fp32, [](Problem& p) { tensor(p, TESSERA_K) = {}; }},
      {"v=None", fp32, [](Problem& p) { tensor(p, TESSERA_V) = {}; }},
      {"o=None", fp32, [](Problem& p) { tensor(p, TESSERA_O) = {}; }},
      {"lse=None", gradient, [](Problem& p) { tensor(p, TESSERA_LSE) = {}; }},
      {"do=None", gradient, [](Problem& p) { tensor(p, TESSERA_DO) = {}; }},
      {"rng_state=None", fp32, [](Problem& p) { p.flags |= TESSERA_DROPOUT; }},
      {"cu_seqlens_q=None", packed, [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_Q) = {}; }},
      {"cu_seqlens_k=None", packed, [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_K) = {}; }},
      {"seqlens_k=None", paged, [](Problem& p) { tensor(p, TESSERA_SEQLENS_K) = {}; }},
  });
}

TEST(Validate, WhatBelongsTogether) {
  expect_all({
      {"do.shape=", fp32, [](Problem& p) { tensor(p, TESSERA_DO) = tensor(p, TESSERA_O); }},
      {"dq.shape=", fp32, [](Problem& p) { tensor(p, TESSERA_DQ) = tensor(p, TESSERA_Q); }},
      {"max_logit.shape=[4]: must not be given", gradient,
       [](Problem& p) { tensor(p, TESSERA_MAX_LOGIT) = dense(TESSERA_FP32, {4}); }},
      {"dbias.shape=[2, 4, 5, 7]: needs bias", gradient,
       [](Problem& p) {
         tensor(p, TESSERA_DBIAS) = dense(TESSERA_FP32, {2, 4, 5, 7});
       }},
      {"dsink.shape=[4]: needs sink", gradient,
       [](Problem& p) {
         p.flags |= TESSERA_SINK_OFF_BY_ONE;
         tensor(p, TESSERA_DSINK) = dense(TESSERA_FP32, {4});
       }},
      {"dalibi_slopes.shape=[1, 4]: needs alibi_slopes", gradient,
       [](Problem& p) {
         tensor(p, TESSERA_DALIBI_SLOPES) = dense(TESSERA_FP32, {1, 4});
       }},
      {"page_table_v.shape=[2, 3]: needs page_table", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_PAGE_TABLE_V) = dense(TESSERA_INT32, {2, 3});
       }},
      {"keep.shape=[1, 1, 5, 7]: at most one data mask", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_MASK) = dense(TESSERA_BOOL, {1, 1, 5, 7});
         tensor(p, TESSERA_KEY_RANGES) = dense(TESSERA_INT32, {1, 1, 5, 2});
       }},
      {"TESSERA_MASK_DROP", fp32, [](Problem& p) { p.flags |= TESSERA_MASK_DROP; }},
      {"segment_ids_q.shape=[2, 5]: needs segment_ids_k", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_SEGMENT_IDS_Q) = dense(TESSERA_INT32, {2, 5});
       }},
      {"segment_ids_k.shape=[2, 7]: needs segment_ids_q", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_SEGMENT_IDS_K) = dense(TESSERA_INT32, {2, 7});
       }},
      {"sink.shape=[4]: the off-by-one", fp32,
       [](Problem& p) {
         p.flags |= TESSERA_SINK_OFF_BY_ONE;
         tensor(p, TESSERA_SINK) = dense(TESSERA_FP32, {4});
       }},
      {"k_scale.shape=[1, 2, 1]: scales an fp8 k", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_K_SCALE) = dense(TESSERA_FP32, {1, 2, 1});
       }},
      {"v_scale.shape=[2, 2, 1]: scales an fp8 v", bf16,
       [](Problem& p) {
         tensor(p, TESSERA_V_SCALE) = dense(TESSERA_FP32, {2, 2, 1});
       }},
      {"batch_invariant=True: is a mode of the forward", gradient,
       [](Problem& p) { p.flags |= TESSERA_BATCH_INVARIANT; }},
      {"batch_invariant=True: excludes dropout", fp32,
       [](Problem& p) {
         p.flags |= TESSERA_BATCH_INVARIANT | TESSERA_DROPOUT;
         tensor(p, TESSERA_RNG_STATE) = dense(TESSERA_INT64, {2});
       }},
  });
}

TEST(Validate, KindsOfLengths) {
  expect_all({
      {"seqlens_q.shape=[2]: q is packed", packed,
       [](Problem& p) { tensor(p, TESSERA_SEQLENS_Q) = dense(TESSERA_INT32, {2}); }},
      {"seqlens_k.shape=[2]: k is packed", packed,
       [](Problem& p) { tensor(p, TESSERA_SEQLENS_K) = dense(TESSERA_INT32, {2}); }},
      {"cu_seqlens_q.shape=[3]: q is not packed", fp32,
       [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_Q) = dense(TESSERA_INT32, {3}); }},
      {"cu_seqlens_k.shape=[3]: k is not packed", paged,
       [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_K) = dense(TESSERA_INT32, {3}); }},
      {"cu_seqlens_q_padded.shape=[3]: needs cu_seqlens_q", fp32,
       [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_Q_PADDED) = dense(TESSERA_INT32, {3}); }},
      {"max_seqlen_k=0: needs cu_seqlens_k", fp32,
       [](Problem& p) { p.flags |= TESSERA_MAX_SEQLEN_K; }},
      {"max_seqlen_q=-1", packed,
       [](Problem& p) {
         p.flags |= TESSERA_MAX_SEQLEN_Q;
         p.max_seqlen_q = -1;
       }},
      {"TESSERA_SAME_LENGTHS: needs", fp32, [](Problem& p) { p.flags |= TESSERA_SAME_LENGTHS; }},
      {"must be one array", packed,
       [](Problem& p) {
         p.flags |= TESSERA_SAME_LENGTHS;
         tensor(p, TESSERA_CU_SEQLENS_K).dtype = TESSERA_INT64;
       }},
      {"seqlens_q.dtype=fp32: must be int32 or int64", fp32,
       [](Problem& p) { tensor(p, TESSERA_SEQLENS_Q) = dense(TESSERA_FP32, {2}); }},
      {"seqlens_k.shape=[3]: must be [2]", paged,
       [](Problem& p) { tensor(p, TESSERA_SEQLENS_K) = dense(TESSERA_INT32, {3}); }},
      {"cu_seqlens_k.shape=[4]: must be [3]", packed,
       [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_K) = dense(TESSERA_INT32, {4}); }},
      {"cu_seqlens_q.shape=[0]: b + 1=0", packed,
       [](Problem& p) { tensor(p, TESSERA_CU_SEQLENS_Q) = dense(TESSERA_INT32, {0}); }},
  });
}

TEST(Validate, Dtypes) {
  expect_all({
      {"q.dtype=int32: must be fp32 or bf16", fp32,
       [](Problem& p) { tensor(p, TESSERA_Q).dtype = TESSERA_INT32; }},
      {"k.dtype=bf16: must be fp32", fp32,
       [](Problem& p) { tensor(p, TESSERA_K).dtype = TESSERA_BF16; }},
      {"k.dtype=e4m3: must be fp32", fp32,
       [](Problem& p) { tensor(p, TESSERA_K).dtype = tensor(p, TESSERA_V).dtype = TESSERA_E4M3; }},
      {"v.dtype=e5m2: must be e4m3", bf16,
       [](Problem& p) {
         tensor(p, TESSERA_K).dtype = TESSERA_E4M3;
         tensor(p, TESSERA_V).dtype = TESSERA_E5M2;
       }},
      {"o.dtype=fp16: must be fp32 or bf16", bf16,
       [](Problem& p) { tensor(p, TESSERA_O).dtype = TESSERA_FP16; }},
      {"lse.dtype=bf16: must be fp32", bf16,
       [](Problem& p) { tensor(p, TESSERA_LSE).dtype = TESSERA_BF16; }},
      {"bias.dtype=fp16: must be fp32 or bf16", bf16,
       [](Problem& p) {
         tensor(p, TESSERA_BIAS) = dense(TESSERA_FP16, {1, 1, 5, 7});
       }},
      {"keep.dtype=int32: must be bool", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_MASK) = dense(TESSERA_INT32, {1, 1, 5, 7});
       }},
      {"drop.dtype=fp32: must be bool", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_MASK) = dense(TESSERA_FP32, {1, 1, 5, 7});
         p.flags |= TESSERA_MASK_DROP;
       }},
      {"key_ranges.dtype=int64: must be int32", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_KEY_RANGES) = dense(TESSERA_INT64, {1, 1, 5, 2});
       }},
      {"sink.dtype=fp16", bf16,
       [](Problem& p) { tensor(p, TESSERA_SINK) = dense(TESSERA_FP16, {4}); }},
      {"page_table.dtype=int64: must be int32", paged,
       [](Problem& p) { tensor(p, TESSERA_PAGE_TABLE_K).dtype = TESSERA_INT64; }},
      {"rng_state.dtype=int32: must be int64", fp32,
       [](Problem& p) { tensor(p, TESSERA_RNG_STATE) = dense(TESSERA_INT32, {2}); }},
      {"do.dtype=bf16: must be fp32", gradient,
       [](Problem& p) { tensor(p, TESSERA_DO).dtype = TESSERA_BF16; }},
      {"dq.dtype=fp64: must be fp32", gradient,
       [](Problem& p) { tensor(p, TESSERA_DQ).dtype = TESSERA_FP64; }},
      {"dlse.dtype=fp64: must be fp32", gradient,
       [](Problem& p) {
         tensor(p, TESSERA_DLSE) = dense(TESSERA_FP64, {2, 4, 5});
       }},
  });
}

TEST(Validate, Shapes) {
  expect_all({
      {"k.shape=[3, 7, 2, 8]: must be [2, sk, hk, 8]", fp32,
       [](Problem& p) { tensor(p, TESSERA_K).extent[0] = 3; }},
      {"k.shape=[2, 7, 2, 9]: must be", fp32,
       [](Problem& p) { tensor(p, TESSERA_K).extent[3] = 9; }},
      {"v.shape=[2, 6, 2, 16]: must be [2, 7, 2, dv]", fp32,
       [](Problem& p) { tensor(p, TESSERA_V).extent[1] = 6; }},
      {"v.shape=[2, 7, 1, 16]", fp32, [](Problem& p) { tensor(p, TESSERA_V).extent[2] = 1; }},
      {"o.shape=[2, 5, 4, 8]: must be [2, 5, 4, 16]", fp32,
       [](Problem& p) { tensor(p, TESSERA_O).extent[3] = 8; }},
      {"lse.shape=[2, 5, 4]: must be [2, 4, 5]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_LSE) = dense(TESSERA_FP32, {2, 5, 4});
       }},
      {"the heads of q (4) must be a multiple of the heads of k and v (3)", fp32,
       [](Problem& p) { tensor(p, TESSERA_K).extent[2] = tensor(p, TESSERA_V).extent[2] = 3; }},
      {"q.shape=[2, 5, 0, 8]: heads=0", fp32,
       [](Problem& p) { tensor(p, TESSERA_Q).extent[2] = 0; }},
      {"head_dim=0", fp32, [](Problem& p) { tensor(p, TESSERA_V).extent[3] = 0; }},
      {"q.shape=[-1, 5, 4, 8]: an extent=-1", fp32,
       [](Problem& p) { tensor(p, TESSERA_Q).extent[0] = -1; }},
      {"bias.shape=[2, 4, 5, 6]: must be [2|1, 4|1, 5|1, 7|1]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_BIAS) = dense(TESSERA_FP32, {2, 4, 5, 6});
       }},
      {"keep.shape=[2, 2, 5, 7]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_MASK) = dense(TESSERA_BOOL, {2, 2, 5, 7});
       }},
      {"key_ranges.shape=[1, 1, 5, 3]: must be [2|1, 4|1, 5|1, 2|4]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_KEY_RANGES) = dense(TESSERA_INT32, {1, 1, 5, 3});
       }},
      {"key_ranges.shape=[1, 5, 2]: must be [4|1, 9|1, 2|4]", packed,
       [](Problem& p) {
         tensor(p, TESSERA_KEY_RANGES) = dense(TESSERA_INT32, {1, 1, 5, 2});
       }},
      {"segment_ids_k.shape=[2, 5]: must be [2, 7]", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_SEGMENT_IDS_Q) = tensor(p, TESSERA_SEGMENT_IDS_K) =
             dense(TESSERA_INT32, {2, 5});
       }},
      {"sink.shape=[2]: must be [4]", fp32,
       [](Problem& p) { tensor(p, TESSERA_SINK) = dense(TESSERA_FP32, {2}); }},
      {"alibi_slopes.shape=[3, 4]: must be [2|1, 4]", fp32,
       [](Problem& p) {
         p.align = TESSERA_ALIGN_TOP_LEFT;
         tensor(p, TESSERA_ALIBI_SLOPES) = dense(TESSERA_FP32, {3, 4});
       }},
      {"v.shape=[6, 3, 2, 16]: must be [pages, 4, 2, dv]", paged,
       [](Problem& p) { tensor(p, TESSERA_V).extent[1] = 3; }},
      {"page_table_v.shape=[2, 4]: must be [2, 3]", paged,
       [](Problem& p) {
         tensor(p, TESSERA_PAGE_TABLE_V) = dense(TESSERA_INT32, {2, 4});
       }},
      {"page_table.shape=[2, 0]: max_pages=0", paged,
       [](Problem& p) {
         tensor(p, TESSERA_PAGE_TABLE_K) = dense(TESSERA_INT32, {2, 0});
       }},
      {"page_size=0", paged,
       [](Problem& p) { tensor(p, TESSERA_K).extent[1] = tensor(p, TESSERA_V).extent[1] = 0; }},
      {"rng_state.shape=[3]: must be [2]", fp32,
       [](Problem& p) { tensor(p, TESSERA_RNG_STATE) = dense(TESSERA_INT64, {3}); }},
      {"q.extent[0]=2: a thd tensor has batch extent 1", packed,
       [](Problem& p) { tensor(p, TESSERA_Q).extent[0] = 2; }},
      {"dk.shape=[2, 6, 2, 8]: must be [2, 7, 2, 8]", gradient,
       [](Problem& p) { tensor(p, TESSERA_DK).extent[1] = 6; }},
      {"dbias.shape=[2, 4, 5, 7]: must be [1, 4, 5, 7]", gradient,
       [](Problem& p) {
         tensor(p, TESSERA_BIAS) = dense(TESSERA_FP32, {1, 4, 5, 7});
         tensor(p, TESSERA_DBIAS) = dense(TESSERA_FP32, {2, 4, 5, 7});
       }},
      {"max_logit.shape=[2]: must be [4]", fp32,
       [](Problem& p) { tensor(p, TESSERA_MAX_LOGIT) = dense(TESSERA_FP32, {2}); }},
  });
}

TEST(Validate, ShapesInTheCallersOrder) {
  expect_all({
      {"k.shape=[7, 3, 2, 8]: must be [sk, 2, hk, 8]", fp32,
       [](Problem& p) {
         p.format_kv = TESSERA_SBHD;
         tensor(p, TESSERA_K).extent[0] = 3;
       }},
      {"v.shape=[2, 2, 6, 16]: must be [2, 2, 7, dv]", fp32,
       [](Problem& p) {
         p.format_kv = TESSERA_BHSD;
         tensor(p, TESSERA_V).extent[1] = 6;
       }},
      {"o.shape=[8, 4, 16]: must be [9, 4, 16]", packed,
       [](Problem& p) { tensor(p, TESSERA_O).extent[1] = 8; }},
      {"lse.shape=[4, 8]: must be [4, 9]", packed,
       [](Problem& p) { tensor(p, TESSERA_LSE).extent[2] = 8; }},
      {"segment_ids_q.shape=[5]: must be [9]", packed,
       [](Problem& p) {
         tensor(p, TESSERA_SEGMENT_IDS_Q) = dense(TESSERA_INT32, {1, 5});
         tensor(p, TESSERA_SEGMENT_IDS_K) = dense(TESSERA_INT32, {1, 11});
       }},
  });
}

TEST(Validate, PackedMasksNeedMaxSeqlen) {
  expect_all({
      {"need max_seqlen_q and max_seqlen_k", packed,
       [](Problem& p) {
         tensor(p, TESSERA_MASK) = dense(TESSERA_BOOL, {2, 1, 6, 1});
       }},
      {"bias.shape=[1, 1, 1, 6]: must be [2|1, 4|1, max_seqlen_q|1, 8|1]", packed,
       [](Problem& p) {
         p.flags |= TESSERA_MAX_SEQLEN_K;
         p.max_seqlen_k = 8;
         tensor(p, TESSERA_BIAS) = dense(TESSERA_FP32, {1, 1, 1, 6});
       }},
  });
  Problem p = packed();
  p.flags |= TESSERA_MAX_SEQLEN_K;
  p.max_seqlen_k = 6;
  p.tensor[TESSERA_BIAS] = dense(TESSERA_FP32, {1, 4, 1, 6});
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
}

TEST(Validate, SizesThatOverflow) {
  constexpr int64_t kHuge = int64_t{1} << 60;
  expect_all({
      {"must fit in 63 bits", fp32,
       [](Problem& p) { tensor(p, TESSERA_Q).extent[1] = tensor(p, TESSERA_O).extent[1] = kHuge; }},
      {"must fit in 63 bits", fp32, [](Problem& p) { tensor(p, TESSERA_K).stride[1] = kHuge; }},
      {"at most 2^60", fp32, [](Problem& p) { tensor(p, TESSERA_Q).extent[1] = INT64_MAX; }},
      {"max_pages times page_size", paged,
       [](Problem& p) {
         p.tensor[TESSERA_PAGE_TABLE_K] = {TESSERA_INT32, 0, {2, int64_t{1} << 50}, {0, 1}};
         for (const int i : {TESSERA_K, TESSERA_V}) {
           p.tensor[i].extent[1] = int64_t{1} << 30;
           p.tensor[i].stride[1] = 0;
         }
       }},
  });
}

TEST(Validate, Strides) {
  expect_all({
      {"q.stride=[160, -32, 8, 1]: must not be negative", fp32,
       [](Problem& p) { tensor(p, TESSERA_Q).stride[1] = -32; }},
      {"q.stride=[320, 64, 16, 2]: the last axis must have stride 1", fp32,
       [](Problem& p) {
         for (int64_t& s : tensor(p, TESSERA_Q).stride) s *= 2;
       }},
      {"v.stride=[224, 32, 16, 0]: the last axis", fp32,
       [](Problem& p) { tensor(p, TESSERA_V).stride[3] = 0; }},
      {"bias.stride=[0, 0, 14, 2]: the last axis must have stride 1, or 0", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_BIAS) = {TESSERA_FP32, 0, {1, 1, 5, 7}, {0, 0, 14, 2}};
       }},
      {"o.stride=[0, 64, 16, 1]: an output must not be expanded", fp32,
       [](Problem& p) { tensor(p, TESSERA_O).stride[0] = 0; }},
      {"o.stride=[320, 63, 16, 1]: an output must not overlap itself", fp32,
       [](Problem& p) { tensor(p, TESSERA_O).stride[1] = 63; }},
      {"dv.stride=[0, 32, 16, 1]: an output must not be expanded", gradient,
       [](Problem& p) { tensor(p, TESSERA_DV).stride[0] = 0; }},
      {"lse.stride=[40, 10, 2]: the forward pass writes it contiguous", fp32,
       [](Problem& p) {
         for (int64_t& s : tensor(p, TESSERA_LSE).stride) s *= 2;
       }},
  });
}

TEST(Validate, Band) {
  const auto window = [](int64_t left, int64_t right) {
    return [=](Problem& p) {
      p.flags |= TESSERA_WINDOW;
      p.align = TESSERA_ALIGN_TOP_LEFT;
      p.window_left = left;
      p.window_right = right;
    };
  };
  expect_all({
      {"window=(-2, 0): each side", fp32, window(-2, 0)},
      {"window=(0, -3): each side", fp32, window(0, -3)},
      {"window=(4, 1): causal=True means right = 0", fp32,
       [&](Problem& p) {
         window(4, 1)(p);
         p.flags |= TESSERA_CAUSAL;
       }},
      {"align=None: must be given, because causal=True", fp32,
       [](Problem& p) { p.flags |= TESSERA_CAUSAL; }},
      {"align=None: must be given, because the window", fp32,
       [&](Problem& p) {
         window(3, -1)(p);
         p.align = TESSERA_ALIGN_NONE;
       }},
      {"align=None: must be given, because alibi_slopes", fp32,
       [](Problem& p) {
         tensor(p, TESSERA_ALIBI_SLOPES) = dense(TESSERA_FP32, {1, 4});
       }},
      {"align=None", packed, [](Problem& p) { p.flags |= TESSERA_CAUSAL; }},
      {"align=None", paged,
       [](Problem& p) {  // one array for both sides does not help with pages
         tensor(p, TESSERA_SEQLENS_Q) = tensor(p, TESSERA_SEQLENS_K);
         p.flags |= TESSERA_CAUSAL | TESSERA_SAME_LENGTHS;
       }},
  });
}

// ---- what must stay legal ----

TEST(Validate, LegalAlignments) {
  Problem p = forward();
  p.flags |= TESSERA_CAUSAL;
  p.tensor[TESSERA_K].extent[1] = p.tensor[TESSERA_V].extent[1] = 5;
  expect_legal(p, "equal extents");
  p.tensor[TESSERA_SEQLENS_Q] = p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT32, {2});
  EXPECT_FALSE(validate(p).ok());
  p.flags |= TESSERA_SAME_LENGTHS;
  expect_legal(p, "one array of lengths");
  p = packed();
  p.flags |= TESSERA_CAUSAL | TESSERA_SAME_LENGTHS;
  expect_legal(p, "one array of offsets");
  p = forward();
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  expect_legal(p, "an alignment without effect");
  p.flags |= TESSERA_CAUSAL | TESSERA_WINDOW;
  p.window_left = 3;
  p.window_right = -1;
  expect_legal(p, "causal with a left window");
}

TEST(Validate, LegalZeros) {
  for (const int axis : {0, 1}) {
    Problem p = forward();
    for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) p.tensor[i].extent[axis] = 0;
    p.tensor[TESSERA_LSE] = dense(TESSERA_FP32, {axis == 0 ? 0 : 2, 4, axis == 1 ? 0 : 5});
    p.tensor[TESSERA_Q].stride[2] = -3;  // strides of empty arrays are ignored
    expect_legal(p, "an extent of 0");
  }
  Problem p = packed();
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) p.tensor[i].extent[1] = 0;
  p.tensor[TESSERA_LSE].extent[2] = 0;
  p.tensor[TESSERA_CU_SEQLENS_Q] = p.tensor[TESSERA_CU_SEQLENS_K] = dense(TESSERA_INT64, {1});
  expect_legal(p, "an empty batch");
}

TEST(Validate, LegalOddities) {
  Problem p = forward(TESSERA_BF16);
  p.tensor[TESSERA_K].dtype = p.tensor[TESSERA_V].dtype = TESSERA_E4M3;
  p.tensor[TESSERA_K_SCALE] = dense(TESSERA_FP32, {1, 1, 1});
  p.tensor[TESSERA_V_SCALE] = dense(TESSERA_FP32, {2, 2, 1});
  expect_legal(p, "fp8 keys beside bf16 queries");
  p = forward();
  p.tensor[TESSERA_K].stride[0] = p.tensor[TESSERA_K].stride[2] = 0;
  expect_legal(p, "expanded inputs");
  p.tensor[TESSERA_BIAS] = {TESSERA_FP32, 0, {2, 4, 5, 7}, {0, 0, 0, 0}};
  p.flags |= TESSERA_BIAS_PRE_SCALE;
  expect_legal(p, "an expanded bias");
  p = forward();
  p.tensor[TESSERA_RNG_STATE] = dense(TESSERA_INT64, {2});
  p.flags |= TESSERA_BIAS_PRE_SCALE;
  expect_legal(p, "rng_state and bias_at without effect");
  p = paged();
  p.tensor[TESSERA_V].extent[0] = 9;
  p.format_kv = 77;  // ignored with pages
  expect_legal(p, "pools of different sizes");
  p = backward();
  p.tensor[TESSERA_DQ] = p.tensor[TESSERA_DK] = p.tensor[TESSERA_DV] = {};
  expect_legal(p, "no gradient asked for");
  p = packed();
  p.tensor[TESSERA_K] = dense(TESSERA_FP32, {2, 7, 2, 8});
  p.tensor[TESSERA_V] = dense(TESSERA_FP32, {2, 7, 2, 16});
  p.format_kv = TESSERA_SBHD;
  p.tensor[TESSERA_CU_SEQLENS_K] = {};
  p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT64, {2});
  expect_legal(p, "packed queries over padded keys");
}

// Random edits with awkward numbers: an answer each time, and what is accepted can be used. The
// sanitizers watch the arithmetic.
TEST(Validate, RandomEditsAreAnswered) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  const int64_t awkward[] = {
      0, 1, 2, 3, 4, 5, 7, 8, -1, INT64_MAX, INT64_MIN, int64_t{1} << 31, int64_t{1} << 61};
  Problem (*const starts[])() = {fp32, bf16, gradient, packed, paged};
  int accepted = 0;
  for (int round = 0; round < 50000; ++round) {
    Problem p = starts[below(std::size(starts))]();
    for (int64_t edits = 1 + below(3); edits > 0; --edits) {
      Tensor& t = p.tensor[below(TESSERA_NUM_TENSORS)];
      const int64_t value = awkward[below(std::size(awkward))];
      switch (below(9)) {
        case 0:
          t.dtype = static_cast<int32_t>(below(10));
          break;
        case 1:
        case 2:
          t.extent[below(4)] = value;
          break;
        case 3:
        case 4:
          t.stride[below(4)] = value;
          break;
        case 5:
          p.flags ^= 1u << below(14);
          break;
        case 6:
          p.format_q = static_cast<int32_t>(below(4));
          break;
        case 7:
          p.format_kv = static_cast<int32_t>(below(4));
          break;
        case 8:
          p.window_left = p.max_seqlen_q = value;
          p.align = 1;
          break;
      }
    }
    const Status status = validate(p);
    // What a legal problem writes can be described again, and of any other there is an answer.
    std::vector<int32_t> wanted = {TESSERA_LSE, TESSERA_O};
    if (is_backward(p)) wanted = {TESSERA_O, TESSERA_DO, TESSERA_DV, TESSERA_DK, TESSERA_DQ};
    const auto filled = with_outputs(p, wanted);
    ASSERT_TRUE(!status.ok() || filled.ok()) << filled.status().message();
    ASSERT_TRUE(filled.ok() || filled.status().code() == TESSERA_INVALID);
    if (!status.ok()) {
      ASSERT_EQ(status.code(), TESSERA_INVALID);
      ASSERT_FALSE(status.message().empty());
      continue;
    }
    ++accepted;
    const Problem n = normalised(p);
    ASSERT_TRUE(validate(n).ok()) << validate(n).message();
    ASSERT_TRUE(same(n, normalised(n)));
    ASSERT_EQ(to_case(p).substr(0, 4), is_backward(p) ? "bwd " : "fwd ");
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace tessera
