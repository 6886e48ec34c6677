// SPDX-License-Identifier: Apache-2.0
// The text of a call, as bindings read it. tests/python/library/test_call.py has what Python writes.
#include <gtest/gtest.h>

#include "../../../python/bindings/call.h"

namespace tessera_front {
namespace {

TEST(CallText, SaysScalarsAndTensors) {
  const Call call = read_call(
      "in=q+k+v@2,bias pass=backward format_q=sbhd causal=True window_left=8 window_right=0 "
      "align=bottom_right max_seqlen_q=$1 max_seqlen_k=$0 softcap=20.5 dropout_p=1e-05 sm_margin=3 "
      "backend=cpu out=dq+dk+dv@2:float32,dbias");
  EXPECT_EQ(call.problem.pass, TESSERA_BACKWARD);
  EXPECT_EQ(call.problem.format_q, TESSERA_SBHD);
  EXPECT_EQ(call.problem.align, TESSERA_ALIGN_BOTTOM_RIGHT);
  EXPECT_EQ(call.problem.window_left, 8);
  EXPECT_EQ(call.problem.flags,
            TESSERA_CAUSAL | TESSERA_WINDOW | TESSERA_SOFTCAP | TESSERA_DROPOUT);
  EXPECT_STREQ(call.problem.backend, "cpu");
  EXPECT_EQ(call.buffers.softcap, 20.5);
  EXPECT_EQ(call.buffers.dropout_p, 1e-5);
  EXPECT_EQ(call.buffers.sm_margin, 3);
  ASSERT_EQ(call.inputs.size(), 2u);
  EXPECT_EQ(call.inputs[0].items, 3);
  EXPECT_EQ(call.inputs[0].tensors[2], TESSERA_V);
  EXPECT_EQ(call.inputs[0].axis, 2);
  EXPECT_EQ(call.inputs[1].axis, -1);
  ASSERT_EQ(call.outputs.size(), 2u);
  EXPECT_EQ(call.outputs[0].tensors[1], TESSERA_DK);
  EXPECT_EQ(call.outputs[0].dtype, TESSERA_FP32);
  EXPECT_EQ(call.outputs[1].tensors[0], TESSERA_DBIAS);
  EXPECT_TRUE(call.takes(TESSERA_BIAS));
  EXPECT_FALSE(call.takes(TESSERA_MASK));
}

TEST(CallText, SizesComeBesideIt) {
  Call call = read_call("in=q,k,v max_seqlen_q=$1 max_seqlen_k=$0 out=o,lse");
  ASSERT_EQ(call.sizes.size(), 2u);
  EXPECT_EQ(call.problem.flags, 0u);
  set(call.problem, call.buffers, *call.sizes[1], 7);
  EXPECT_EQ(call.problem.max_seqlen_q, 7);
  EXPECT_EQ(call.problem.flags, uint32_t{TESSERA_MAX_SEQLEN_Q});
}

TEST(CallText, IsReadOnce) {
  const std::string text = "in=q,k,v causal=True out=o,lse";
  const Call* first = &call_of(text);
  EXPECT_EQ(first, &call_of(std::string(text)));
  EXPECT_NE(first, &call_of("in=q,k,v out=o,lse"));
}

// A text that is wrong, and what its message must say.
TEST(CallText, RefusesByName) {
  const std::pair<const char*, const char*> kWrong[] = {
      {"in=q,k,v dilation=2", "dilation=2: no such name; this library knows in, out, pass,"},
      {"in=q,k,v,scores", "in=scores: no such name; this library knows q, k, v,"},
      {"in=q,", "in=: no such name"},
      {"in=q+k,v", "in=q+k: tensors of one array are up to 4 items of an axis"},
      {"in=q+k+v@x", "an axis is a number from 0 to 4"},
      {"out=o:float12", "out=float12: no such name"},
      {"in=q causal=1", "causal=1: must be True, or left out"},
      {"in=q align=top", "align=top: must be one of none top_left bottom_right given"},
      {"in=q window_left=8.0", "window_left=8.0: must be an integer"},
      {"in=q window_left=$64", "window_left=$64: must be from $0 to $63"},
      {"in=q window_left=$1", "no name for one of its sizes"},
      {"in=q softcap=20,0", "softcap=20,0: must be a number such as 20.0"},
      {"in=q sm_margin=4294967296", "sm_margin=4294967296: must fit int32"},
      {"in=q backend=a_name_of_16_chars", "backend=a_name_of_16_chars: must be shorter"},
      {"in=q causal", "causal=: must be name=value"},
  };
  for (const auto& [text, said] : kWrong) {
    try {
      read_call(text);
      ADD_FAILURE() << text;
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera_front
