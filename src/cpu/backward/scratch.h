// SPDX-License-Identifier: Apache-2.0
// A backward worker's scratch: what it keeps for a head, a block of keys, a tile of queries and a
// strip of them. Steps are between rows, in words.
#pragma once

#include "core/workspace.h"
#include "cpu/backward/args.h"
#include "cpu/backward/tile.h"

namespace tessera::cpu {
namespace {

template <bool kPairs>
struct WordOf {
  using Type = float;
};
template <>
struct WordOf<true> {
  using Type = uint32_t;
};

template <typename S, bool kPairs>
struct Scratch {
  static constexpr int kPerWord = kPairs ? 2 : 1;
  static constexpr bool kTiles = kPairs && S::kHasTiles;
  static constexpr int W = Tile<S>::kStrip, B = Tile<S>::kBlock;
  static constexpr int M = kBackwardTile;
  static_assert(M % W == 0);
  using Word = typename WordOf<kPairs>::Type;

  // One head: a ring of its strips. lse is +inf where p is 0 whatever the score. mean =
  // rowsum(do o), delta = mean - dlse.
  StripRows<S>* rows;                // [held]
  Word *q_rows, *do_rows;            // [held * W][q_rows_step], pairs along head dims
  float *lse, *delta, *mean, *dlse;  // [held][W]
  float* dq;                         // [held][gradient_rows(dqk)][W]
  bool* dq_begun;                    // [held] there is something in dq
  float* bias_rows;                  // [strips][W]
  float *dk_sum, *dv_sum;            // [bound_k][dqk or dv]: of the group's heads so far

  // One block of keys.
  Word *k, *v;       // [B][k_step], pairs along head dims
  Word* k_pairs;     // [B / 2][k_pairs_step], pairs along keys; k itself if a word is one element
  Word* k_t;         // [dqk, up to 32][k_t_step], the same turned over, instead of it
  float *dk, *dv;    // [B][dk_step]
  float* bias_keys;  // [B][kLanes]

  // One tile of queries.
  Word *q_t, *do_t;    // [M / W][depth][W], pairs along head dims
  Word *o_rows, *o_t;  // [W][do_rows_step], [v_depth][W]: o of a strip, for delta
  Word *q, *d_o;       // [M / 2][q_step], pairs along queries; q_rows if a word is one element
  Word *p, *ds;        // [B][p_step], pairs along queries
  Word* ds_pairs;    // [B / 2][ds_pairs_step], pairs along keys; ds itself if a word is one element
  float* bias_tile;  // [M][B]
  float* bias_part;  // [M][B], of a sequence whose tiles lie across bias_tile

  // One strip.
  float *s, *dp, *cap;  // [B][W]
  char* zeros;          // a row of q, k, v, o or do
  uint16_t* narrowed;   // [W][dv], of rows of o or do that are fp32 beside inputs of 16 bits

  int64_t k_step, v_step, k_pairs_step, k_t_step, dk_step, dv_step;
  int64_t q_rows_step, do_rows_step, q_step, do_step;
  int64_t p_step, ds_pairs_step, qk_depth, v_depth;
  int64_t depth_piece;  // words of head dims that are summed on their own
  int64_t bytes;

  // base may be null: then only bytes is of use.
  Scratch(const BackwardArgs& args, char* base) {
    const Call& call = args.call;
    const int64_t dqk = call.dqk, dim_v = call.dv, strips = pad_to(args.bound_q, W) / W;
    const int64_t dq_rows = gradient_rows(dqk);
    const Count held = args.held_strips;
    // Matrix tiles take whole ones.
    constexpr int kDepth = kTiles ? 32 : kPerWord;
    qk_depth = pad_to(dqk, kDepth) / kPerWord, v_depth = pad_to(dim_v, kDepth) / kPerWord;
    // Dropout scales dP after and o before its rounding, so that sums do not cancel where they
    // should.
    depth_piece = call.has_dropout && !kPairs ? 32 : 128;
    k_step = odd_lines(kPairs ? qk_depth : dq_rows), v_step = odd_lines(v_depth);
    k_pairs_step = kPairs ? odd_lines(dq_rows) : k_step, k_t_step = odd_lines(B / 2);
    dk_step = q_step = odd_lines(dqk), dv_step = do_step = odd_lines(dim_v);
    q_rows_step = odd_lines(qk_depth), do_rows_step = odd_lines(v_depth);
    p_step = odd_lines(M / kPerWord), ds_pairs_step = kPairs ? odd_lines(M) : p_step;

    Workspace pieces(base);
    const auto take = [&]<typename T>(T*& place, Count rows, Count step = 1) {
      place = pieces.take<T>(rows * step, 64);
    };
    const Count summed = args.parts == 1 && call.group > 1 ? args.bound_k : 0;
    take(rows, held);
    take(q_rows, held * W * q_rows_step), take(do_rows, held * W, do_rows_step);
    take(lse, held * W), take(delta, held * W), take(mean, held * W), take(dlse, held * W);
    take(dq, args.chunks == 1 ? held * dq_rows * W : 0);
    take(dq_begun, held);
    take(bias_rows, args.bias_gradient == BiasGradient::kRows ? Count{strips} * W : 0);
    take(dk_sum, summed * dqk), take(dv_sum, summed * dim_v);
    take(k, B, k_step), take(v, B, v_step);
    if (kPairs)
      take(k_pairs, kTiles ? 0 : B / 2, k_pairs_step);
    else
      k_pairs = k;
    take(k_t, kTiles ? pad_to(dqk, 32) : 0, k_t_step);
    take(dk, B, dk_step), take(dv, B, dv_step);
    take(bias_keys, args.bias_gradient == BiasGradient::kKeys ? B * S::kLanes : 0);
    take(q_t, M, qk_depth), take(do_t, M, v_depth);
    take(o_rows, W, do_rows_step), take(o_t, W, v_depth);
    take(q, kPairs ? M / 2 : 0, q_step), take(d_o, kPairs ? M / 2 : 0, do_step);
    take(p, B, p_step), take(ds, B, p_step);
    if (kPairs)
      take(ds_pairs, B / 2, ds_pairs_step);
    else
      ds_pairs = ds;
    take(bias_tile, args.bias_gradient == BiasGradient::kBlock ? M * B : 0);
    take(bias_part, args.bias_gradient == BiasGradient::kBlock && args.has_starts ? M * B : 0);
    take(s, B * W), take(dp, B * W), take(cap, call.softcap > 0 ? B * W : 0);
    take(zeros, 4, pad_to(larger(dqk, dim_v), 64));
    const bool wide = call.o.dtype == TESSERA_FP32 || args.d_o.dtype == TESSERA_FP32;
    take(narrowed, wide && call.q.dtype != TESSERA_FP32 ? W : 0, dim_v);
    bytes = Count{pieces.bytes()}.up_to(64).value();
  }
};

}  // namespace
}  // namespace tessera::cpu
