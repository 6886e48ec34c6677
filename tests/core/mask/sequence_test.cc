// SPDX-License-Identifier: Apache-2.0
#include "core/mask/sequence.h"

#include <gtest/gtest.h>

#include "core/problems.h"
#include "core/storage.h"

namespace tessera {
namespace {

using testing::dense;
using testing::Storage;

TEST(Sequence, PaddedBatch) {
  Problem p = testing::forward();
  p.flags |= TESSERA_CAUSAL | TESSERA_WINDOW;
  p.window_left = 2;
  p.window_right = -1;
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT64, {2});
  Storage s(p);
  s.set(TESSERA_SEQLENS_K, 1, 3);
  for (const Problem& form : {p, normalised(p)}) {
    const Sequence a = sequence_of(form, s.buffers, 0), b = sequence_of(form, s.buffers, 1);
    EXPECT_EQ(a.len_q(), 5);
    EXPECT_EQ(a.len_k(), 7);
    EXPECT_EQ(a.band.shift, 2);
    EXPECT_EQ(b.len_k(), 3);
    EXPECT_EQ(b.band.shift, -2);
    EXPECT_EQ(b.band.window.left, 2);
    EXPECT_EQ(b.band.window.right, 0);
    EXPECT_EQ(b.first_q, 0);
    EXPECT_EQ(b.batch_q, 1);
    EXPECT_EQ(b.batch_k, 1);
  }
  const Interval rows = owned_rows_k(p, s.buffers, 1);
  EXPECT_EQ(rows.lo, 0);
  EXPECT_EQ(rows.hi, 7);
}

TEST(Sequence, PositionsMoveTheDiagonal) {
  Problem p = testing::forward();
  p.flags |= TESSERA_CAUSAL;
  for (const int index : {TESSERA_Q_START, TESSERA_K_START, TESSERA_SHIFT}) {
    p.tensor[index] = dense(index == TESSERA_K_START ? TESSERA_INT32 : TESSERA_INT64, {2});
  }
  p.align = TESSERA_ALIGN_GIVEN;
  Storage s(p);
  s.set(TESSERA_Q_START, 1, 40);
  s.set(TESSERA_K_START, 1, 30);
  s.set(TESSERA_SHIFT, 0, 6);
  s.set(TESSERA_SHIFT, 1, -3);
  const auto shift = [&](int64_t n) { return sequence_of(normalised(p), s.buffers, n).band.shift; };
  EXPECT_EQ(shift(0), 6);
  EXPECT_EQ(shift(1), 7);  // key 37 stands under query 40: the 8th here under the first
  EXPECT_EQ(sequence_of(p, s.buffers, 1).q_start, 40);
  EXPECT_EQ(sequence_of(p, s.buffers, 1).k_start, 30);
  p.tensor[TESSERA_SHIFT] = {};
  p.shift = 2;
  EXPECT_EQ(shift(1), 12);
  p.shift = 0, p.align = TESSERA_ALIGN_TOP_LEFT;
  EXPECT_EQ(shift(1), 10);
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;  // of what is here, wherever it begins
  EXPECT_EQ(shift(1), 2);
}

TEST(Sequence, WindowsOfTheirOwn) {
  Problem p = testing::forward();
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  p.tensor[TESSERA_WINDOWS] = dense(TESSERA_INT64, {2, 2});
  Storage s(p);
  s.set(TESSERA_WINDOWS, 0, 3), s.set(TESSERA_WINDOWS, 1, -1);
  s.set(TESSERA_WINDOWS, 2, -1), s.set(TESSERA_WINDOWS, 3, 0);
  for (const Problem& form : {p, normalised(p)}) {
    EXPECT_TRUE(has_band(form));
    EXPECT_EQ(form.align, TESSERA_ALIGN_BOTTOM_RIGHT);
    EXPECT_EQ(distinct_sequences(form), 2);
    const Band a = sequence_of(form, s.buffers, 0).band, b = sequence_of(form, s.buffers, 1).band;
    EXPECT_EQ(a.window.left, 3);
    EXPECT_EQ(a.hi(0), 7);  // no bound
    EXPECT_EQ(b.lo(4), 0);
    EXPECT_EQ(b.window.right, 0);
    EXPECT_EQ(b.shift, 2);
  }
}

TEST(Sequence, PackedWithGaps) {
  Problem p = testing::packed();
  p.tensor[TESSERA_CU_SEQLENS_K_PADDED] = dense(TESSERA_INT32, {3});
  Storage s(p);
  s.set(TESSERA_CU_SEQLENS_K, 1, 3);
  s.set(TESSERA_CU_SEQLENS_K, 2, 5);
  s.set(TESSERA_CU_SEQLENS_K_PADDED, 0, 1);
  s.set(TESSERA_CU_SEQLENS_K_PADDED, 1, 6);
  s.set(TESSERA_CU_SEQLENS_K_PADDED, 2, 9);
  const Sequence b = sequence_of(normalised(p), s.buffers, 1);
  EXPECT_EQ(b.first_q, 4);
  EXPECT_EQ(b.len_q(), 5);
  EXPECT_EQ(b.first_k, 6);
  EXPECT_EQ(b.len_k(), 2);
  EXPECT_EQ(b.batch_k, 0);
  // They own all 11 rows together: [0, 6) with what comes first, [6, 11) with the tail.
  EXPECT_EQ(owned_rows_k(p, s.buffers, 0).lo, 0);
  EXPECT_EQ(owned_rows_k(p, s.buffers, 0).hi, 6);
  EXPECT_EQ(owned_rows_k(p, s.buffers, 1).lo, 6);
  EXPECT_EQ(owned_rows_k(p, s.buffers, 1).hi, 11);
  EXPECT_EQ(owned_rows_q(p, s.buffers, 1).lo, 4);
}

TEST(Sequence, Pages) {
  const Problem p = testing::paged();
  Storage s(p);
  s.set(TESSERA_SEQLENS_K, 0, 9);
  const Sequence a = sequence_of(normalised(p), s.buffers, 0);
  EXPECT_EQ(a.len_k(), 9);
  EXPECT_TRUE(a.band.full(0, a.len_q(), 0, 9));
  EXPECT_EQ(sequence_of(normalised(p), s.buffers, 1).len_k(), 12);
}

TEST(Sequence, WideWindowsDoNotOverflow) {
  Problem p = testing::forward();
  p.flags |= TESSERA_WINDOW;
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  p.window_left = p.window_right = INT64_MAX;
  Storage s(p);
  const Band band = sequence_of(p, s.buffers, 0).band;
  EXPECT_TRUE(band.full(0, 5, 0, 7));
}

TEST(Sequence, LengthsOfEitherWidthAndAnyStride) {
  for (const int32_t dtype : {TESSERA_INT32, TESSERA_INT64}) {
    Problem p = testing::forward();
    p.tensor[TESSERA_SEQLENS_Q] = {dtype, 0, {2}, {3}};
    Storage s(p);
    s.set(TESSERA_SEQLENS_Q, 3, 4);
    EXPECT_EQ(length_at(p, s.buffers, TESSERA_SEQLENS_Q, 1), 4);
    p.tensor[TESSERA_SEQLENS_Q].stride[0] = 0;
    s.set(TESSERA_SEQLENS_Q, 0, 2);
    EXPECT_EQ(length_at(p, s.buffers, TESSERA_SEQLENS_Q, 1), 2);
  }
}

}  // namespace
}  // namespace tessera
