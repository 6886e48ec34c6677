// SPDX-License-Identifier: Apache-2.0
// A forward worker's scratch: the state of a tile's strips over the blocks of keys, and what one
// strip and one block need at a time.
#pragma once

#include "core/workspace.h"
#include "cpu/decode/group.h"
#include "cpu/forward/block.h"

namespace tessera::cpu {
namespace {

template <typename S>
struct Strip {
  StripRows<S> rows;
  float* q_t;  // [dqk][vectors * kLanes]; decode/dot.h and decode/group.h: in their own order
  float* m;    // [kStrip] base 2
  float* l;    // [kStrip]
  float* o_t;  // [dv, rounded up to 16][vectors * kLanes]
  float* o;    // decode: rows of O, decode_step(dv) apart, until the last block is done
};

// Bytes of m, l and O^T of one strip; a partial of a split tile is that of its strips in a row.
template <typename S>
constexpr Count strip_state_floats(int64_t dv) {
  return Tile<S>::kStrip * (2 + Count{dv}.up_to(16));
}

template <typename S>
struct ForwardScratch {
  Block<S> block;
  Visible<S> visible;
  alignas(64) uint32_t keep[Tile<S>::kBlock / 32][Tile<S>::kStrip];
  alignas(64) float maximum[Tile<S>::kStrip];
  alignas(64) float alpha[Tile<S>::kStrip];
  float* scores;      // [kBlock + 8][strip]: S^T, then P^T
  uint32_t* p_pairs;  // [kBlock / 2 + 4][strip]
  Bf16* widened;      // [kBlock + 8][head dims, up to 32]: rows of fp8 K, then V
  float* state;       // m, l, O^T of all strips
  float* sum;         // the same of the chunks of keys before this one
  Strip<S>* strips;
};

template <typename S>
int64_t lay_out(const ForwardShape& shape, char* base, ForwardScratch<S>** result) {
  constexpr int kStrip = Tile<S>::kStrip, kBlock = Tile<S>::kBlock, kTable = Block<S>::kTable;
  const int64_t strips = Count{shape.rows}.pieces(kStrip).value();
  const int64_t longest = Count{larger(shape.dqk, shape.dv)}.up_to(32).value();
  Workspace pieces(base);
  const auto take = [&]<typename T>(T*& place, Count count) { place = pieces.take<T>(count, 64); };
  ForwardScratch<S>* scratch;
  Strip<S>* table;
  char* zeros;
  float *k, *v, *scores, *q_t, *o, *state, *sum;
  uint32_t *v_pairs, *p_pairs, *k_tiles, *v_tiles;
  Bf16* widened;
  take(scratch, 1), take(table, strips), take(zeros, 4 * Count{longest});
  const Count k_stride = Count{shape.dqk}.up_to(16);  // whole vectors of any level
  const Count v_stride = Count{shape.dv}.up_to(16);
  take(k, shape.convert_k || shape.spread_k ? kBlock * k_stride : 0);
  const bool has_v = (shape.convert_v && !shape.bf16) || shape.spread_v;
  take(v, has_v ? kBlock * v_stride : 0);
  const bool has_tiles = S::kHasTiles && shape.bf16;
  const Count k_words = Count{shape.dqk}.pieces(32) * 16;
  take(k_tiles, has_tiles ? kBlock * k_words : 0),
      take(v_tiles, has_tiles ? kBlock / 2 * Count{shape.dv}.up_to(32) : 0);
  take(v_pairs, shape.bf16 && !has_tiles ? kBlock / 2 * v_stride : 0);
  take(scores, kTable * kStrip),
      take(p_pairs, shape.bf16 || shape.widens_fp8 ? kTable / 2 * kStrip : 0);
  take(widened, kDecodesGroups<S> && shape.widens_fp8 ? kTable * Count{longest} : 0);
  const Count q_step = kStrip * k_stride;
  const Count o_step = shape.decodes ? kDecodeRows<S> * Count{decode_step(shape.dv)} : 0;
  take(q_t, strips * q_step), take(o, strips * o_step);
  take(state, strips * strip_state_floats<S>(shape.dv));
  take(sum, shape.uniform ? strips * strip_state_floats<S>(shape.dv) : 0);
  if (base) {
    scratch->block.zeros = zeros;
    scratch->block.k = k, scratch->block.v = v, scratch->block.v_pairs = v_pairs;
    scratch->block.k_tiles = {k_tiles, k_words.value()},
    scratch->block.v_tiles = {v_tiles, kBlock / 2};
    scratch->block.k_stride = k_stride.value(), scratch->block.v_stride = v_stride.value();
    scratch->scores = scores, scratch->p_pairs = p_pairs;
    scratch->widened = widened, scratch->state = state, scratch->sum = sum, scratch->strips = table;
    memset(zeros, 0, static_cast<size_t>(longest) * 4);
    for (int64_t s = 0; s < strips; ++s)
      table[s].q_t = q_t + s * q_step.value(), table[s].o = o + s * o_step.value();
    *result = scratch;
  }
  return Count{pieces.bytes()}.up_to(64).value();
}

// Bytes of scratch of one worker.
template <typename S>
int64_t forward_scratch_bytes(const ForwardShape& shape) {
  if constexpr (S::kHasTiles) {
    const int64_t below = S::below().forward_scratch_bytes(shape);
    return shape.bf16 ? larger(below, lay_out<S>(shape, nullptr, nullptr)) : below;
  }
  return larger(lay_out<S>(shape, nullptr, nullptr),
                lay_out<typename S::Narrow>(shape, nullptr, nullptr));
}

template <typename S>
int64_t forward_partial_bytes(const ForwardShape& shape) {
  const Count strips = Count{shape.rows}.pieces(Tile<S>::kStrip);
  return (strips * strip_state_floats<S>(shape.dv) * 4).up_to(64).value();
}

template <typename S>
void place_state(const ForwardShape& shape, int strip, float* state, Strip<S>& to) {
  to.m = state + strip * strip_state_floats<S>(shape.dv).value();
  to.l = to.m + Tile<S>::kStrip;
  to.o_t = to.l + Tile<S>::kStrip;
}

}  // namespace
}  // namespace tessera::cpu
