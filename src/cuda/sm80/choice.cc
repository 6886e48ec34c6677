// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/choice.h"

#include <algorithm>

#include "cuda/common/rules/arguments.h"
#include "cuda/common/work/cut.h"

namespace tessera::cuda::sm80 {
namespace {

std::span<const Kernel> table_of(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return forward_kernels();
    case Pass::decode:
      return decode_kernels();
    default:
      return backward_kernels();
  }
}

bool is_of(Pass pass, Loop loop) {
  switch (pass) {
    case Pass::forward:
    case Pass::decode:
      return true;
    case Pass::dq:
      return loop == Loop::dq;
    case Pass::dkdv:
      return loop == Loop::dkdv;
    case Pass::dbias:
      return loop == Loop::dbias;
    case Pass::fused:
      return loop == Loop::fused || loop == Loop::fused_lean;
  }
  return false;
}

// True if the kernel knows the features. One that knows a single feature takes it for granted.
bool serves(const Kernel& kernel, uint32_t features) {
  const bool several = (kernel.features & (kernel.features - 1)) != 0;
  return kernel.features == features || (several && (features & ~kernel.features) == 0);
}

StreamKernels find_stream(const Problem& problem, int64_t head_dim, int shared_bytes) {
  const int dtype = problem.tensor[TESSERA_Q].dtype, cache = problem.tensor[TESSERA_K].dtype;
  StreamKernels found{};
  if (!is_16bit(dtype) || (cache != dtype && cache != TESSERA_E4M3)) return found;
  const Cache stored = cache == dtype ? Cache::same : Cache::e4m3;
  constexpr int kRows[] = {8, 16, 32, 64};
  for (const StreamKernel& kernel : stream_kernels()) {
    if (kernel.dtype != dtype || kernel.tile.cache != stored || kernel.tile.bucket < head_dim ||
        kernel.tile.shared_bytes > shared_bytes) {
      continue;
    }
    const auto at = std::ranges::find(kRows, kernel.tile.rows) - kRows;
    if (!found[at]) found[at] = &kernel;
  }
  return found;
}

// True if queries are so few that the decode kernel, which is bound by loads, takes them.
bool decodes(const Problem& problem) {
  return !has(problem, TESSERA_DROPOUT) &&
         most_queries(problem) * pack_of(problem, kDecodeRows) <= kDecodeRows;
}

// A do that is rounded first has rows of its own, which are aligned.
bool has_aligned_queries(const Params& p) {
  const View &q = p.tensor[TESSERA_Q], &grad_o = p.tensor[TESSERA_DO];
  return q.vector_bytes == 16 && (grad_o.vector_bytes == 16 || grad_o.dtype != q.dtype);
}

ApartKernels find_apart(int dtype, int64_t head_dim, int shared_bytes) {
  const auto find = [&](Pass pass) {
    return find_kernel(pass, kGeneral, dtype, head_dim, shared_bytes);
  };
  return {find(Pass::dq), find(Pass::dkdv), find(Pass::dbias)};
}

int dtype_of(const Problem& problem) { return problem.tensor[TESSERA_Q].dtype; }

int64_t head_dim_of(const Problem& problem) {
  const Sizes s = sizes_of(problem);
  return std::max(s.dqk, s.dv);
}

void append(std::string& names, const Kernel* kernel) {
  names += (names.empty() ? "" : ", ") + std::string(kernel->name);
}

}  // namespace

const Kernel* find_kernel(Pass pass, uint32_t features, int dtype, int64_t head_dim,
                          int shared_bytes) {
  for (const Kernel& kernel : table_of(pass)) {
    const Tile& tile = kernel.tile;
    if (is_of(pass, tile.loop) && kernel.dtype == dtype && serves(kernel, features) &&
        tile.bucket >= head_dim && tile.shared_bytes <= shared_bytes &&
        (tile.gpus != Gpus::large || shared_bytes >= kLargeSharedBytes)) {
      return &kernel;
    }
  }
  return nullptr;
}

uint32_t needs_of(const Problem& problem) {
  constexpr int64_t kMostMasks = 65535;  // a grid's z; see map_blocks
  const int dtype = dtype_of(problem);
  uint32_t needs = features_of(problem) & ~uint32_t{kSegments};
  // Lean loops move the diagonal and key ranges alone.
  for (const int start : {TESSERA_Q_START, TESSERA_K_START}) {
    const bool others = needs & (kDropout | kBias) || given(problem, TESSERA_MASK);
    if (others && counted_from(problem, start)) needs |= kOther;
  }
  if (given(problem, TESSERA_BIAS)) {
    const Tensor& bias = problem.tensor[TESSERA_BIAS];
    const bool copied = !has(problem, TESSERA_BIAS_PRE_SCALE) && bias.dtype == dtype &&
                        is_16bit(dtype) && bias.extent[3] > 1 && bias.stride[3] == 1;
    if (!copied) needs |= kOther;
  }
  if (given(problem, TESSERA_MASK)) {
    const Tensor& mask = problem.tensor[TESSERA_MASK];
    const bool packed = mask.extent[2] > 1 && mask.extent[0] * mask.extent[1] <= kMostMasks;
    if (!packed) needs |= kOther;
  }
  return needs;
}

uint32_t needs_of(const Problem& problem, const Params& p) {
  const View& bias = p.tensor[TESSERA_BIAS];
  const bool aligned = has_aligned_keys(p) && (!bias.data || bias.vector_bytes == 16);
  return needs_of(problem) | (aligned ? kLean : kOther);
}

// ---- forward ----

int rows_of(const Kernel& kernel) {
  return kernel.tile.loop == Loop::decode ? kDecodeRows : kernel.tile.rows();
}

int pack_of(const Problem& problem, int rows) {
  if (has(problem, TESSERA_DROPOUT)) return 1;  // its patches are of one head
  const int64_t group = sizes_of(problem).group();
  const int64_t queries = std::max<int64_t>(most_queries(problem), 1);
  for (int64_t pack = std::min(group, rows / queries); pack > 1; --pack) {
    if (group % pack == 0) return static_cast<int>(pack);
  }
  return 1;
}

ForwardKernels::ForwardKernels(const Problem& canonical, int shared_bytes)
    : forward(Pass::forward, dtype_of(canonical), head_dim_of(canonical), shared_bytes),
      decode(Pass::decode, dtype_of(canonical), head_dim_of(canonical), shared_bytes),
      stream(find_stream(canonical, head_dim_of(canonical), shared_bytes)) {}

namespace {

// True if the kernels of forward/ or decode/ keep what the stream kernel could take: keys in the
// type of q and without pages, of a prefill, whose keys serve many rows; or of few queries, where all
// sequences have all keys and units are so many that decode/ is faster (docs/kernels/sm80_design.md).
bool stays_plain(const Problem& problem, int64_t queries, int64_t units) {
  constexpr int64_t kFewUnits = 64;
  if (is_paged(problem) || problem.tensor[TESSERA_K].dtype != problem.tensor[TESSERA_Q].dtype) {
    return false;
  }
  if (queries > kDecodeRows) return true;
  const bool dense = !is_thd_k(problem) && !given(problem, TESSERA_SEQLENS_K);
  const int64_t rows = queries * sizes_of(problem).group();
  return dense && rows <= kDecodeRows && units > kFewUnits &&
         !has(problem, TESSERA_BATCH_INVARIANT);
}

}  // namespace

const StreamKernel* ForwardKernels::stream_of(const Problem& problem) const {
  const bool plain = (features_of(problem) & ~uint32_t{kOther}) == kLean &&
                     !has_positions(problem) &&
                     problem.tensor[TESSERA_V].dtype == problem.tensor[TESSERA_K].dtype;
  if (!plain) return nullptr;
  // The least tile that holds a group's heads of all queries; else the largest, with some of them.
  const int64_t queries = std::max<int64_t>(most_queries(problem), 1);
  const int64_t group = sizes_of(problem).group();
  const StreamKernel* found = decodes(problem) ? stream.back() : nullptr;
  for (const StreamKernel* kernel : stream) {
    if (kernel && queries * group <= kernel->tile.rows) {
      found = kernel;
      break;
    }
  }
  if (!found) return nullptr;
  const int rows = found->tile.rows;
  const int64_t units = units_of(problem, rows, pack_of(problem, rows));
  if (stays_plain(problem, queries, units)) return nullptr;
  const int64_t steps = sizes_of(problem).sk / found->tile.step_keys() + 1;
  return units < kMostCells / steps ? found : nullptr;
}

const StreamKernel* ForwardKernels::stream_of(const Problem& problem, const Params& p) const {
  const bool aligned = has_aligned_keys(p) && p.tensor[TESSERA_Q].vector_bytes == 16;
  return aligned && !is_steep(p.softmax_scale) ? stream_of(problem) : nullptr;
}

const KernelSet& ForwardKernels::of(const Problem& problem) const {
  return decode[kLean] && decodes(problem) ? decode : forward;
}

const Kernel& ForwardKernels::of(const Problem& problem, const Params& p) const {
  const KernelSet& kernels = of(problem);
  const bool exact = is_steep(p.softmax_scale) || is_large_cap(p.softcap);
  const uint32_t needs = needs_of(problem, p) | (exact ? kOther : kLean);
  const Kernel& kernel = *kernels[needs];
  // Heads share a tile where nothing or everything is expected of the scores.
  const bool shares = kernel.features != kLean && pack_of(problem, rows_of(kernel)) > 1;
  return shares ? *kernels[kGeneral] : kernel;
}

std::string forward_names(const Problem& problem, int shared_bytes) {
  const Params p = params_of(problem, nominal_buffers(problem));
  if (p.batch == 0 || p.sq == 0) return {};
  const ForwardKernels kernels(problem, shared_bytes);
  const StreamKernel* stream = kernels.stream_of(problem, p);
  return stream ? stream->name : kernels.of(problem, p).name;
}

// ---- backward ----

BackwardKernels::BackwardKernels(const Problem& canonical, int shared_bytes)
    : fused(Pass::fused, dtype_of(canonical), head_dim_of(canonical), shared_bytes),
      apart(find_apart(dtype_of(canonical), head_dim_of(canonical), shared_bytes)) {}

const Kernel* BackwardKernels::fused_of(const Problem& problem, uint32_t needs) const {
  const Kernel* kernel = fused[needs];
  if (!kernel || given(problem, TESSERA_DALIBI_SLOPES)) return nullptr;
  const bool asked =
      given(problem, TESSERA_DQ) || given(problem, TESSERA_DK) || given(problem, TESSERA_DV);
  const bool any_order = given(problem, TESSERA_DQ) && !has(problem, TESSERA_DETERMINISTIC);
  return asked && (any_order || adds_in_turn(*kernel)) ? kernel : nullptr;
}

const Kernel* BackwardKernels::fused_of(const Problem& problem, const Params& p) const {
  const bool fast = has_aligned_queries(p) && !is_large_cap(p.softcap);
  const Kernel* kernel = fused_of(problem, needs_of(problem, p) | (fast ? kLean : kOther));
  return kernel && (adds_in_turn(*kernel) || adds_to_dq(p, *kernel)) ? kernel : nullptr;
}

bool adds_to_dq(const Params& p, const Kernel& kernel) {
  return p.tensor[TESSERA_DQ].data && num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.step) > 0;
}

std::string backward_names(const Problem& problem, int shared_bytes) {
  const Params p = params_of(problem, nominal_buffers(problem));
  const BackwardKernels kernels(problem, shared_bytes);
  std::string names;
  if (const Kernel* kernel = kernels.fused_of(problem, p)) {
    append(names, kernel);
  } else {
    if (p.tensor[TESSERA_DQ].data || given(problem, TESSERA_DALIBI_SLOPES)) {
      append(names, kernels.apart.dq);
    }
    if (p.tensor[TESSERA_DK].data || p.tensor[TESSERA_DV].data) append(names, kernels.apart.dkdv);
  }
  if (p.tensor[TESSERA_DBIAS].data) append(names, kernels.apart.dbias);
  return names;
}

}  // namespace tessera::cuda::sm80
