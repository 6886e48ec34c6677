// SPDX-License-Identifier: Apache-2.0
// A consumer of decode/kernel.cuh: a warp that has a quarter of each of its team's blocks of keys, for
// all rows of a unit.
#pragma once

#include "cuda/common/few/rows.cuh"
#include "cuda/sm90/decode/shape.cuh"
#include "cuda/sm90/machine/cluster.cuh"
#include "cuda/sm90/machine/pipeline.cuh"

namespace tessera::cuda::sm90 {

template <typename S>
class DecodeConsumer {
 public:
  using T = typename S::Query;
  using Shared = typename S::Shared;
  using Storage = typename S::SharedStorage;

  __device__ DecodeConsumer(const DecodeArgs& args, Storage& storage, const Shared& shared)
      : args_(args),
        storage_(storage),
        shared_(shared),
        warp_(uniform(threadIdx.x / kWarp)),
        lane_(threadIdx.x % kWarp) {}

  __device__ __forceinline__ void run() {
    for (int count = 0;; ++count) {
      const int slot = count % 2;
      mbarrier_wait(shared_.q_full(slot), count / 2 % 2);
      const DecodeWork& work = storage_.work[slot];
      if (uniform(work.last)) return;
      add_and_finish(work, slot);
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(shared_.q_empty(slot));
    }
  }

 private:
  static constexpr int kQuads = S::kD / 4;

  __device__ __forceinline__ void meet() { named_barrier_sync(kDecodeMeeting, S::kConsumers); }

  __device__ __forceinline__ void add_and_finish(const DecodeWork& work, int slot) {
    const Params& p = args_.params;
    const Piece& piece = work.piece;
    const TileRows of{piece.row0, work.head0, args_.pack};
    if (threadIdx.x == 0 && args_.cluster == 1) open_count(args_, piece);
    if constexpr (S::kFp8) convert_queries(shared_.q(slot));

    const float to_log2 =
        logit_scale<T>(p) * (S::kFp8 ? k_scale_of(p, work.sequence.n, work.kv_head) : 1.f);
    float scale[S::kGroups][2];
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        scale[n][e] = to_log2;
        if constexpr (S::kFp8) scale[n][e] *= storage_.q_scale[8 * n + lane_ % 4 * 2 + e];
      }
    }

    TransposedRows<S> rows;
    rows.set_queries(S::kFp8 ? shared_.q_half() : shared_.q(slot));
    const Interval visible = work.visible, clean = work.clean;
    const int blocks = uniform(work.blocks), team = warp_ / S::kTile.kWarpsOfTeam;
    const int quarter = warp_ % S::kTile.kWarpsOfTeam, first = quarter * S::kKeys;
    int key0 = piece.key_begin + team * S::kStepKeys + first;
#pragma unroll 1
    for (int block = team; block < blocks; block += S::kTeams, key0 += S::kTeams * S::kStepKeys) {
      mbarrier_wait(shared_.full(team, ring_.stage), ring_.phase);
      const uint32_t k = shared_.k(team, ring_.stage) + first * kChunkRowBytes;
      const bool all_see = key0 >= clean.lo && key0 + S::kKeys <= clean.hi;
      rows.add(k, k + S::kTileBytes, scale, key0, all_see, visible, [&](int n, int e) {
        return work.sequence.band.row(of.query(8 * n + lane_ % 4 * 2 + e));
      });
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(shared_.empty(team, ring_.stage));
      ring_.advance();
    }
    finish(work, FewRows{p, work.sequence, of, args_.queries.divisor * args_.pack}, rows);
  }

  // The sums of the warps, eight rows at a time; then, where a unit has several pieces, of all of
  // them by the CTA that brings the last.
  __device__ __forceinline__ void finish(const DecodeWork& work, const FewRows& tile,
                                         TransposedRows<S>& rows) {
    const int parts = uniform(work.piece.parts);
    rows.add_lanes();
#pragma unroll 1
    for (int pass = 0; 8 * pass < tile.used; ++pass) {
      meet();  // nobody reads the sums of before
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
        if (S::kGroups == 1 || n == pass) rows.store(storage_.parts, warp_, 0, n);
      }
      meet();
      const int here = min(tile.used - 8 * pass, 8);
#pragma unroll 1
      for (int i = threadIdx.x; i < here * kQuads; i += S::kConsumers) {
        const int row = i / kQuads, column = i % kQuads * 4;
        const RowSum total = sum_of_teams(storage_.parts, row, column);
        if (parts == 1) {
          tile.template finish<T, true>(8 * pass + row, column, total);
        } else if (args_.cluster > 1) {
          share_part(8 * pass + row, column, total);
        } else {
          store_part(work.piece, 8 * pass + row, column, total);
        }
      }
    }
    if (parts == 1) return;
    if (args_.cluster > 1) return sum_in_cluster(tile);
    meet();  // the CTA has written its part
    if (threadIdx.x == 0) storage_.last = brings_last(args_, work.piece);
    meet();
    if (!storage_.last) return;
    const int quads = tile.used * kQuads;
#pragma unroll 1
    for (int i = threadIdx.x; i - lane_ < quads; i += S::kConsumers) {  // by whole warps
      const int row = min(i / kQuads, tile.used - 1), column = i % kQuads * 4;
      const RowSum total = sum_of_parts<S>(args_, work.piece, row, column);
      if (i < quads) tile.template finish<T, true>(row, column, total);
    }
  }

  __device__ __forceinline__ void store_part(const Piece& piece, int row, int column,
                                             const RowSum& total) {
    const int64_t at = int64_t{piece.slot_of(piece.part)} * S::kRows + row;
    __stcg(reinterpret_cast<float4*>(args_.part_o + at * S::kD + column), total.o);
    if (column == 0) __stcg(args_.part_sums + at, make_float2(total.max, total.sum));
  }

  // The CTA's part where the other CTAs of its cluster read it: in the blocks of keys, which it has
  // used.
  __device__ __forceinline__ void share_part(int row, int column, const RowSum& total) {
    auto& part = storage_.part_of_cta();
    *reinterpret_cast<float4*>(&part.o[row][column]) = total.o;
    if (column == 0) part.sums[row] = make_float2(total.max, total.sum);
  }

  // The sums over the cluster, of which each CTA has some of the columns.
  __device__ __forceinline__ void sum_in_cluster(const FewRows& tile) {
    using Part = typename S::PartOfCta;
    constexpr int kAtOnce = 8;
    const int ctas = args_.cluster, rank = rank_in_cluster(), quads = tile.used * kQuads;
    const uint32_t part = shared_.part_of_cta();
    cluster_sync();
#pragma unroll 1
    for (int i = threadIdx.x * ctas + rank; i < quads; i += S::kConsumers * ctas) {
      const int row = i / kQuads, column = i % kQuads * 4;
      const uint32_t o = part + (row * S::kD + column) * sizeof(float);
      const uint32_t sums = part + offsetof(Part, sums) + row * sizeof(float2);
      RowSum total;
#pragma unroll 1
      for (int cta0 = 0; cta0 < ctas; cta0 += kAtOnce) {
        float2 sum[kAtOnce];
        float4 x[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          sum[j] = {-kInfinity, 0}, x[j] = {0, 0, 0, 0};
          if (cta0 + j >= ctas) continue;
          sum[j] = load2_from_cluster(address_in(cta0 + j, sums));
          x[j] = load4_from_cluster(address_in(cta0 + j, o));
        }
        float most = -kInfinity;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) most = fmaxf(most, sum[j].x);
        const float top = total.raise(most);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const float weight = exp2_approx(sum[j].x - top);
          total.sum += sum[j].y * weight;
          total.add(x[j], weight);
        }
      }
      tile.template finish<T, true>(row, column, total);
    }
    cluster_sync();  // the others may still read this CTA's part
  }

  // q as fp16 whose finite values are below 2^15 in each row, the 16 columns of a step in the order
  // in which the bytes of fp8 come out of ldmatrix.
  __device__ __forceinline__ void convert_queries(uint32_t q) {
    using Tile = typename S::QTile;
    constexpr int kUnits = S::kD / 8;  // of a row
#pragma unroll 1
    for (int i = threadIdx.x; i < S::kRows * kUnits; i += S::kConsumers) {
      const int row = i / kUnits, unit = i % kUnits;
      const uint4 x = load_shared_unit(Tile::unit(q, row, unit));
      uint32_t pairs[4];
      const float scale = halves_of_query<T, kUnits>(x, pairs);
      if (unit == 0) storage_.q_scale[row] = scale;
        // Columns 4 j + {0, 1} are elements 2 j and 2 j + 1 of a step, 4 j + {2, 3} those 8 on.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t to = Tile::unit(shared_.q_half(), row, unit / 2 * 2 + half) + unit % 2 * 8;
        store_shared_pair(to, pairs[half], pairs[half + 2]);
      }
    }
    meet();
  }

  __device__ static __forceinline__ uint4 load_shared_unit(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
    return x;
  }
  __device__ static __forceinline__ void store_shared_pair(uint32_t address, uint32_t a,
                                                           uint32_t b) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
  }

  const DecodeArgs& args_;
  Storage& storage_;
  const Shared shared_;
  const int warp_, lane_;
  Ring<S::kStages> ring_;
};

}  // namespace tessera::cuda::sm90
