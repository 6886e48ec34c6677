// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/rules.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "core/choose/unbuilt.h"
#include "core/count.h"
#include "cuda/sm80/choice.h"
#include "cuda/sm80/convert/problem.h"
#include "cuda/sm80/products/problem.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kLeastArch = 80;
constexpr int64_t kMostHeadDim = 576;
// Positions and their sums are 32-bit in the kernels.
constexpr int64_t kMostRows = int64_t{1} << 29;
constexpr int64_t kMostGridY = 65535;

bool has_kernels(const Problem& p, int64_t head_dim, int shared_bytes) {
  const int dtype = p.tensor[TESSERA_Q].dtype;
  if (!is_backward(p)) {
    return find_kernel(Pass::forward, kGeneral, dtype, head_dim, shared_bytes);
  }
  for (const Pass pass : {Pass::dq, Pass::dkdv, Pass::dbias}) {
    if (!find_kernel(pass, kGeneral, dtype, head_dim, shared_bytes)) return false;
  }
  return true;
}

void require_most(Support& support, ReasonId id, const char* name, int64_t value, int64_t most) {
  support.require(value <= most, id, Remedy::kNone, [&] {
    return std::string(name) + "=" + std::to_string(value) + ": must be at most " +
           std::to_string(most);
  });
}

// The backward pass tiles all pages of the pools, whichever of them tables name.
void require_pool(Support& support, const Problem& p) {
  constexpr int64_t kLeastRows = 16, kMostTiles = int64_t{1} << 30;
  if (!is_backward(p) || !is_paged(p)) return;
  const Tensor &k = p.tensor[TESSERA_K], &v = p.tensor[TESSERA_V];
  const int64_t pages = std::max(k.extent[0], v.extent[0]);
  const Count tiles = Count{k.extent[1]}.pieces(kLeastRows) * pages;
  support.require(!(kMostTiles < tiles), ReasonId::kSize, Remedy::kNone, [&] {
    return "pages=" + std::to_string(pages) + ", page_size=" + std::to_string(k.extent[1]) +
           ": must be at most 2^30 tiles of 16 keys";
  });
}

// The kernel of dbias has a grid of the bias's own elements.
void require_dbias(Support& support, const Problem& p, int head_dim, int shared_bytes) {
  if (!given(p, TESSERA_DBIAS)) return;
  const int dtype = p.tensor[TESSERA_Q].dtype;
  const Tile& tile = find_kernel(Pass::dbias, kGeneral, dtype, head_dim, shared_bytes)->tile;
  const Tensor& bias = p.tensor[TESSERA_BIAS];
  const int64_t most_queries = kMostGridY * tile.rows();
  const Count columns =
      Count{bias.extent[0]} * bias.extent[1] * Count{bias.extent[3]}.pieces(tile.step);
  support.require(bias.extent[2] <= most_queries && columns < Count{INT32_MAX}, ReasonId::kSize,
                  Remedy::kNone, [&] {
                    return "bias.shape=" + shape_text(p, TESSERA_BIAS) +
                           ": dbias must have at most " + std::to_string(most_queries) +
                           " queries, and 2^31 tiles of " + std::to_string(tile.step) + " keys";
                  });
}

// What the kernels of a device run.
Problem inner_problem(const Problem& p, int shared_bytes) {
  if (!is_rounded(p)) return problem_of_kernels(p);
  return wide_problem(p, wide_columns(p, widest_head(p, shared_bytes)));
}

void require_columns(Support& support, const Problem& p, int shared_bytes) {
  if (!is_rounded(p)) return;
  const int64_t widest = widest_head(p, shared_bytes), others = is_backward(p) ? 9 : 3;
  const Sizes s = sizes_of(p);
  support.require(wide_columns(p, widest).passes > 0, ReasonId::kHeadDim, Remedy::kUseBf16, [&] {
    return "head_dim_qk=" + std::to_string(s.dqk) + ", head_dim_v=" + std::to_string(s.dv) +
           ": must be at most " + std::to_string(widest - others) +
           " with precision=\"fp8\", which needs columns of its own";
  });
}

}  // namespace

Support Sm80Rules::supports(const Problem& p, const Device& device) const {
  const DeviceTraits traits = traits_of(device);
  Support support;
  const Sizes s = sizes_of(p);
  const int32_t q = p.tensor[TESSERA_Q].dtype, k = p.tensor[TESSERA_K].dtype;
  support.require(device.kind == TESSERA_CUDA, ReasonId::kDevice, Remedy::kNone,
                  [] { return std::string("device=cpu: must be a CUDA device"); });
  if (device.kind == TESSERA_CUDA) {
    const int arch = traits.arch;
    support.require(arch == 0 || arch >= kLeastArch, ReasonId::kDevice, Remedy::kDeviceCpu,
                    [&] { return "arch=" + std::to_string(arch) + ": must be 80 or later"; });
  }
  support.require(q != TESSERA_FP64, ReasonId::kDtype, Remedy::kUseBf16, [] {
    return std::string("q.dtype=fp64: must be fp32, bf16, fp16, e4m3 or e5m2");
  });
  support.require(!is_fp8(q) || !is_paged(p), ReasonId::kFeature, Remedy::kUseBf16, [&] {
    return "page_table.shape=" + shape_text(p, TESSERA_PAGE_TABLE_K) +
           ": pages of fp8 need q in bf16 or fp16";
  });
  support.require(
      !is_backward(p) || !is_fp8(k) || is_fp8(q), ReasonId::kDtype, Remedy::kUseBf16, [&] {
        return "k.dtype=" + std::string(dtype_name(k)) + ": has no gradient; must be that of q";
      });
  require_most(support, ReasonId::kHeadDim, "head_dim_qk", s.dqk, kMostHeadDim);
  require_most(support, ReasonId::kHeadDim, "head_dim_v", s.dv, kMostHeadDim);
  if (support) require_columns(support, p, traits.shared_bytes);
  const Problem inner = support ? inner_problem(p, traits.shared_bytes) : p;
  const Sizes of_inner = sizes_of(inner);
  const int64_t head_dim = std::max(of_inner.dqk, of_inner.dv);
  if (support) {
    // Only the backward pass in fp32 of the widest heads meets a device that is too small for it.
    support.require(has_kernels(inner, head_dim, traits.shared_bytes), ReasonId::kHeadDim,
                    Remedy::kUseBf16, [&] {
                      return "head_dim=" + std::to_string(std::max(s.dqk, s.dv)) + ": in " +
                             std::string(dtype_name(q)) +
                             " needs more shared memory than this device has; must be at most 256";
                    });
  }
  require_most(support, ReasonId::kSize, "sq", s.sq, kMostRows);
  require_most(support, ReasonId::kSize, "sk", s.sk, kMostRows);
  require_most(support, ReasonId::kSize, "batch", s.batch, kMostRows);
  require_most(support, ReasonId::kSize, "num_heads_q", s.hq, kMostGridY);
  require_tiles(support, p);
  require_pool(support, p);
  if (support) {
    require_dbias(support, inner, static_cast<int>(head_dim), traits.shared_bytes);
  }
  if (given(p, TESSERA_ALIBI_SLOPES)) {  // distances are 32-bit
    require_most(support, ReasonId::kSize, "align", std::abs(p.shift), kMostRows);
  }
  require_built(support, p, Fp8Inputs::kRounded);
  return support;
}

std::string Sm80Rules::kernels_for(const Problem& problem, const Device& device) const {
  const int shared_bytes = traits_of(device).shared_bytes;
  const Problem inner = inner_problem(problem, shared_bytes);
  return is_backward(inner) ? backward_names(inner, shared_bytes)
                            : forward_names(inner, shared_bytes);
}

std::vector<const char*> Sm80Rules::kernel_names() const {
  std::vector<const char*> names;
  for (const auto table : {forward_kernels(), decode_kernels(), backward_kernels()}) {
    for (const Kernel& kernel : table) names.push_back(kernel.name);
  }
  for (const StreamKernel& kernel : stream_kernels()) names.push_back(kernel.name);
  return names;
}

}  // namespace tessera::cuda::sm80
