// SPDX-License-Identifier: Apache-2.0
// A forward worker's scratch: the state of a tile's strips over the blocks of keys, and what one
// strip and one block need at a time.
#pragma once

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
constexpr int64_t strip_state_floats(int64_t dv) {
  return Tile<S>::kStrip * (2 + round_up(dv, 16));
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
  float* state;       // m, l, O^T of all strips
  Strip<S>* strips;
};

// Hands out 64-byte aligned pieces of one range of memory; counts only if it begins at null.
struct Arena {
  char* next;
  template <typename T>
  T* take(int64_t count) {
    char* p = next;
    next += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(p);
  }
};

template <typename S>
int64_t lay_out(const ForwardShape& shape, char* base, ForwardScratch<S>** result) {
  constexpr int kStrip = Tile<S>::kStrip, kBlock = Tile<S>::kBlock, kTable = Block<S>::kTable;
  const int64_t strips = (shape.rows + kStrip - 1) / kStrip;
  const int64_t longest = round_up(larger(shape.dqk, shape.dv), 32);
  Arena arena{base};
  auto* scratch = arena.take<ForwardScratch<S>>(1);
  auto* table = arena.take<Strip<S>>(strips);
  char* zeros = arena.take<char>(longest * 4);
  const int64_t k_stride = round_up(shape.dqk, 16);  // whole vectors of any level
  const int64_t v_stride = round_up(shape.dv, 16);
  float* k = arena.take<float>(shape.convert_k || shape.spread_k ? kBlock * k_stride : 0);
  const bool has_v = (shape.convert_v && !shape.bf16) || shape.spread_v;
  float* v = arena.take<float>(has_v ? kBlock * v_stride : 0);
  auto* v_pairs = arena.take<uint32_t>(shape.bf16 ? kBlock / 2 * v_stride : 0);
  float* scores = arena.take<float>(kTable * kStrip);
  auto* p_pairs = arena.take<uint32_t>(shape.bf16 ? kTable / 2 * kStrip : 0);
  const int64_t q_step = kStrip * k_stride;
  const int64_t o_step = shape.decodes ? kDecodeRows<S> * decode_step(shape.dv) : 0;
  float* q_t = arena.take<float>(strips * q_step);
  float* o = arena.take<float>(strips * o_step);
  float* state = arena.take<float>(strips * strip_state_floats<S>(shape.dv));
  if (base) {
    scratch->block.zeros = zeros;
    scratch->block.k = k, scratch->block.v = v, scratch->block.v_pairs = v_pairs;
    scratch->block.k_stride = k_stride, scratch->block.v_stride = v_stride;
    scratch->scores = scores, scratch->p_pairs = p_pairs;
    scratch->state = state, scratch->strips = table;
    memset(zeros, 0, static_cast<size_t>(longest) * 4);
    for (int64_t s = 0; s < strips; ++s)
      table[s].q_t = q_t + s * q_step, table[s].o = o + s * o_step;
    *result = scratch;
  }
  return arena.next - base;
}

// Bytes of scratch of one worker.
template <typename S>
int64_t forward_scratch_bytes(const ForwardShape& shape) {
  return larger(lay_out<S>(shape, nullptr, nullptr),
                lay_out<typename S::Narrow>(shape, nullptr, nullptr));
}

template <typename S>
int64_t forward_partial_bytes(const ForwardShape& shape) {
  const int64_t strips = (shape.rows + Tile<S>::kStrip - 1) / Tile<S>::kStrip;
  return round_up(strips * strip_state_floats<S>(shape.dv) * 4, 64);
}

template <typename S>
void place_state(const ForwardShape& shape, int strip, float* state, Strip<S>& to) {
  to.m = state + strip * strip_state_floats<S>(shape.dv);
  to.l = to.m + Tile<S>::kStrip;
  to.o_t = to.l + Tile<S>::kStrip;
}

}  // namespace
}  // namespace tessera::cpu
