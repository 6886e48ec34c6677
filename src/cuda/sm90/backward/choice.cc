// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward/choice.h"

#include <algorithm>
#include <string>

#include "core/mask/sequence.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {
namespace {

// Rows of 16-bit elements can be copied by 16 bytes, if the first one is aligned.
bool has_vectors(const Tensor& t) {
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] > 1 && t.stride[axis] % 8 != 0) return false;
  }
  return t.extent[3] > 1 && t.stride[3] == 1;
}

BackwardNeeds needs_of(const Problem& p) {
  uint32_t features = features_of(p) & kEverything;
  if (features & kBias && !copies_bias(p)) features = kEverything;
  return {features, has(p, TESSERA_DETERMINISTIC)};
}

// A kernel of its own, where one is built for the head dims.
bool has_segments_alone(const Problem& p) { return features_of(p) == (kMasks | kSegments); }

bool is_causal(const Problem& p) {
  const auto band = band_rule_of<int64_t>(p);
  return band.window.left < 0 && band.window.right == 0;
}

// ---- where two kernels are faster than the fused one (docs/kernels/sm90_backward_apart.md) ----

// What that depends on; tiles are of 128 keys, of the whole batch.
struct Extent {
  int64_t rows, tiles;
  bool in_groups, small_heads;  // heads that share keys; head dims up to 64
};
constexpr int64_t kShortRows = 512, kLongRows = 1024, kManyTiles = 512;

Extent extent_of(const Problem& p) {
  constexpr int64_t kTile = 128;
  const Sizes s = sizes_of(p);
  const int64_t rows = std::max(s.sq, s.sk);
  return {rows, (rows + kTile - 1) / kTile * s.batch * s.hk, s.hq > s.hk,
          std::max(s.dqk, s.dv) <= 64};
}

// The lengths of packed sequences are not known here; what is: the longest, if the caller says it
// or all tokens are few, and about how many tiles there are.
bool is_faster_apart_packed(const Problem& p, const Extent& of, int multiprocessors) {
  constexpr int64_t kLongest = 2048, kRounds = 4, kTile = 128;
  if (!is_thd_q(p) || !is_thd_k(p)) return false;
  const Sizes s = sizes_of(p);
  const int64_t rows = std::max(most_queries(p), most_keys(p));
  const int64_t tiles = (std::min(s.sq, s.sk) / kTile + s.batch) * s.hq;
  const int64_t most = of.in_groups                     ? kShortRows
                       : of.small_heads && is_causal(p) ? kLongest
                                                        : kLongRows;
  return rows <= most && tiles >= kRounds * multiprocessors;
}

// True if what a tile walks is short although the sequence is not: the band, when tiles are many.
bool is_narrow(const Problem& p, const Extent& of) {
  const auto band = band_rule_of<int64_t>(p);
  if (band.window.left < 0 || band.window.right < 0) return false;
  const int64_t keys =
      std::min(band.window.left, of.rows) + std::min(band.window.right, of.rows) + 1;
  const int64_t most = !of.in_groups ? 640 : of.small_heads ? 256 : 384;
  return keys <= most && of.tiles >= kManyTiles;
}

// Tiles of the deterministic fused kernel wait for each other, but hardly where they are few and
// start one after the other on a diagonal.
bool is_short_in_turn(const Problem& p, const Extent& of, int multiprocessors) {
  if (of.in_groups) return of.rows <= kShortRows;
  const bool is_chain = is_causal(p) && of.tiles <= multiprocessors && !of.small_heads;
  return of.rows <= kLongRows && !is_chain;
}

bool is_short(const Problem& p, const Extent& of, int multiprocessors) {
  const bool half_a_wave = 2 * of.tiles <= multiprocessors && of.small_heads;
  if (of.rows <= kShortRows) return of.tiles >= kManyTiles || half_a_wave;
  return of.rows <= kLongRows && is_causal(p) && !of.in_groups && of.tiles >= 2 * kManyTiles;
}

// Two kernels that each own what they add up make seven products instead of five, but neither clear
// nor convert sums: faster where sequences or bands are short.
bool is_faster_apart(const Problem& p, int multiprocessors) {
  const Sizes s = sizes_of(p);
  const int64_t columns = std::max(s.dqk, s.dv);
  const Extent of = extent_of(p);
  const bool is_packed = is_thd_q(p) || is_thd_k(p);
  if (columns > 64 && columns <= 96) {  // in the kernels of 128 columns; the fused one has 96
    return !is_packed && !given(p, TESSERA_SEQLENS_Q) && !given(p, TESSERA_SEQLENS_K) &&
           of.rows <= kShortRows && of.tiles >= kManyTiles;
  }
  if (is_packed) return is_faster_apart_packed(p, of, multiprocessors);
  const bool in_turn = has(p, TESSERA_DETERMINISTIC);
  // A warp stores the zeros of tiles without work, one after the other.
  if (given(p, TESSERA_SEQLENS_Q) || given(p, TESSERA_SEQLENS_K)) {
    return in_turn && of.rows <= kShortRows && of.tiles < kManyTiles;
  }
  return is_narrow(p, of) ||
         (in_turn ? is_short_in_turn(p, of, multiprocessors) : is_short(p, of, multiprocessors));
}

// A box wholly outside a ragged map faults, so that all chunks of 64 columns must begin inside.
bool begins_inside(const Problem& p, const BackwardTile& tile) {
  const Sizes s = sizes_of(p);
  const bool ragged =
      is_thd_q(p) || is_thd_k(p) || given(p, TESSERA_SEQLENS_Q) || given(p, TESSERA_SEQLENS_K);
  const auto in_last_chunk = [](int64_t dim, int columns) { return dim > (columns - 1) / 64 * 64; };
  return !ragged || (in_last_chunk(s.dqk, tile.dqk) && in_last_chunk(s.dv, tile.dv));
}

// In products of E4M3; null: none.
const BackwardKernel* find_rounded_kernel(const Problem& p) {
  const Sizes s = sizes_of(p);
  const BackwardNeeds needs = needs_of(p);
  return find_backward_kernel(p.tensor[TESSERA_Q].dtype, s.dqk, s.dv,
                              {needs.features, needs.deterministic, false, true});
}

}  // namespace

bool copies_bias(const Problem& p) {
  const Tensor& bias = p.tensor[TESSERA_BIAS];
  return given(p, TESSERA_BIAS) && bias.dtype == p.tensor[TESSERA_Q].dtype && has_vectors(bias) &&
         bias.extent[2] > 1 && bias.stride[2] != 0;
}

bool sums_bias(const Problem& p) {
  constexpr int kMostSequences = 2;  // sums grow in the dtype of dbias
  if (!given(p, TESSERA_DBIAS) || needs_of(p).features != kBias || has(p, TESSERA_BIAS_PRE_SCALE)) {
    return false;
  }
  const Sizes s = sizes_of(p);
  const Tensor& t = p.tensor[TESSERA_DBIAS];
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] > 1 && (t.stride[axis] <= 0 || t.stride[axis] >= kMostStride)) return false;
  }
  return t.dtype == p.tensor[TESSERA_Q].dtype && has_vectors(t) && !given(p, TESSERA_SEQLENS_Q) &&
         !given(p, TESSERA_SEQLENS_K) && !is_thd_q(p) && !is_thd_k(p) && t.extent[1] == s.hq &&
         t.extent[2] == s.sq && t.extent[3] == s.sk &&
         (t.extent[0] == s.batch || s.batch <= kMostSequences);
}

const BackwardKernel* find_backward_kernel(int dtype, int64_t dqk, int64_t dv,
                                           const BackwardNeeds& needs) {
  for (const BackwardKernel& kernel : backward_kernels()) {
    if (kernel.dtype == dtype && kernel.tile.dqk >= dqk && kernel.tile.dv >= dv &&
        (needs.features & ~kernel.features) == 0 &&
        (kernel.tile.deterministic || !needs.deterministic) &&
        (kernel.tile.sums_dbias || !needs.sums_dbias) && kernel.tile.fp8 == needs.fp8) {
      return &kernel;
    }
  }
  return nullptr;
}

const BackwardKernel& choose_backward_kernel(const Problem& p) {
  const Sizes s = sizes_of(p);
  const auto find = [&](const BackwardNeeds& needs) {
    return find_backward_kernel(p.tensor[TESSERA_Q].dtype, s.dqk, s.dv, needs);
  };
  const BackwardNeeds needs = needs_of(p);
  const BackwardKernel* special = sums_bias(p) ? find({needs.features, needs.deterministic, true})
                                  : has_segments_alone(p) ? find({kSegments, needs.deterministic})
                                                          : nullptr;
  return special ? *special : *find(needs);
}

bool has_rounded_backward(const Problem& p) {
  constexpr int kTensors[] = {TESSERA_K,  TESSERA_V,  TESSERA_O, TESSERA_DO,
                              TESSERA_DQ, TESSERA_DK, TESSERA_DV};
  const int dtype = p.tensor[TESSERA_Q].dtype;
  const bool in_16_bits = std::ranges::all_of(
      kTensors, [&](int index) { return !given(p, index) || p.tensor[index].dtype == dtype; });
  const BackwardKernel* kernel = is_backward(p) && in_16_bits ? find_rounded_kernel(p) : nullptr;
  return kernel && begins_inside(p, kernel->tile);
}

const BackwardKernel& rounded_backward_kernel(const Problem& p) { return *find_rounded_kernel(p); }

const ApartKernels* find_apart_kernels(int dtype, int64_t dqk, int64_t dv) {
  const int64_t columns = std::max(dqk, dv);
  for (const ApartKernels& kernels : apart_kernels()) {
    const int dim = kernels.tile.dim;
    if (kernels.dtype == dtype && columns <= dim && std::min(dqk, dv) > dim - 64) return &kernels;
  }
  return nullptr;
}

const ApartKernels* choose_apart_kernels(const Problem& p, int multiprocessors) {
  if (needs_of(p).features != kLean || !given(p, TESSERA_DQ) || !given(p, TESSERA_DK) ||
      !given(p, TESSERA_DV) || !is_faster_apart(p, multiprocessors)) {
    return nullptr;
  }
  // dsink reads the statistics of every row, but of tiles that see no key there are none.
  const Sizes s = sizes_of(p);
  const bool sees = s.sq == s.sk && p.shift == 0 && !has_positions(p) && !is_thd_q(p) &&
                    !given(p, TESSERA_SEQLENS_Q) && !given(p, TESSERA_SEQLENS_K) &&
                    band_rule_of<int64_t>(p).window.left < 0;
  if (given(p, TESSERA_DSINK) && !sees) return nullptr;
  return find_apart_kernels(p.tensor[TESSERA_Q].dtype, s.dqk, s.dv);
}

void require_backward(Support& support, const Problem& p) {
  const Sizes s = sizes_of(p);
  const int dtype = p.tensor[TESSERA_Q].dtype;
  const BackwardKernel* kernel = find_backward_kernel(dtype, s.dqk, s.dv, needs_of(p));
  support.require(kernel || !is_16bit(dtype), ReasonId::kHeadDim, Remedy::kNone, [&] {
    return "head_dim_qk=" + std::to_string(s.dqk) +
           ": and head_dim_v must be at most 256 in the backward pass";
  });
  support.require(
      !kernel || begins_inside(p, kernel->tile), ReasonId::kHeadDim, Remedy::kNone, [&] {
        return "head_dim_qk=" + std::to_string(s.dqk) + ", head_dim_v=" + std::to_string(s.dv) +
               ": with lengths, must end in the last 64 columns of the backward tile (" +
               std::to_string(kernel->tile.dqk) + ", " + std::to_string(kernel->tile.dv) + ")";
      });
}

}  // namespace tessera::cuda::sm90
