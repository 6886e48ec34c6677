// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass: workspace, tensor maps, the order of tiles, three launches.
#include <algorithm>
#include <string>

#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/backward_kernels.h"
#include "cuda/sm90/backward_sink.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};
constexpr int64_t kL2Bytes =
    32 << 20;  // what q, do and the sums of the heads in flight may take of 50 MB

const BackwardKernel* find_backward_kernel(int dtype, int64_t dqk, int64_t dv) {
  for (const BackwardKernel& kernel : backward_kernels()) {
    if (kernel.dtype == dtype && kernel.tile.dqk >= dqk && kernel.tile.dv >= dv) return &kernel;
  }
  return nullptr;
}

class BackwardPlan final : public Plan {
 public:
  BackwardPlan(const BackwardKernel& kernel, std::unique_ptr<Plan> fallback)
      : kernel_(kernel), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    return std::max(workspace_of(problem).bytes, fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!aligned(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    const BackwardTile& tile = kernel_.tile;
    BackwardParams a{};
    a.problem = params_of(problem, buffers);
    const Params& p = a.problem;
    a.ragged_q = given(problem, TESSERA_SEQLENS_Q) || p.thd_q;
    a.ragged_k = given(problem, TESSERA_SEQLENS_K) || p.thd_k;
    const auto map = [&](int index, int box_rows, bool ragged, CUtensorMap* to) {
      return map_of(problem, buffers, index, box_rows, ragged, to);
    };
    TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, tile.tile_m, a.ragged_q, &a.q));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_O, tile.tile_m, a.ragged_q, &a.o));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, tile.tile_m, a.ragged_q, &a.grad_o));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_K, tile.tile_n(), a.ragged_k, &a.k));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_V, tile.tile_n(), a.ragged_k, &a.v));
    order_tiles(a);
    const Workspace workspace = workspace_of(problem);
    auto* base = static_cast<char*>(buffers.workspace);
    a.slots = workspace.slots;
    a.lse2 = reinterpret_cast<float*>(base);
    a.delta = reinterpret_cast<float*>(base + workspace.delta);
    if (p.tensor[TESSERA_DQ].data) a.dq_sums = reinterpret_cast<float*>(base + workspace.dq_sums);

    const auto heads = static_cast<unsigned>(p.hq);
    TESSERA_RETURN_IF_ERROR(launch(kernel_.rows, dim3(static_cast<unsigned>(a.slots), heads),
                                   kRowThreads, kernel_.rows_shared_bytes, a, stream));
    TESSERA_RETURN_IF_ERROR(launch(kernel_.gradients, dim3(static_cast<unsigned>(a.tiles)),
                                   BackwardTile::kThreads, kernel_.shared_bytes, a, stream));
    if (a.dq_sums) {
      const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, tile.tile_m);
      TESSERA_RETURN_IF_ERROR(launch(kernel_.convert, dim3(static_cast<unsigned>(slots), heads),
                                     kRowThreads, 0, a, stream));
    }
    return launch_dsink(a, tile.tile_m, stream);
  }

 private:
  static constexpr int kRowThreads = 128;
  static constexpr int64_t kBytesOfDq = 2 * 64 * 64 * 4;  // sums of a block: a part for each owner

  struct Workspace {
    int slots;
    int64_t delta, dq_sums, bytes;  // lse2 stands at 0
  };
  Workspace workspace_of(const Problem& problem) const {
    const Sizes s = sizes_of(problem);
    const int tile_m = kernel_.tile.tile_m;
    Workspace w;
    w.slots = num_slots(is_thd_q(problem), static_cast<int>(s.sq),
                        static_cast<int>(std::max<int64_t>(s.batch, 1)), tile_m);
    const int64_t rows = s.hq * w.slots * tile_m;
    w.delta = rows * 4;
    w.dq_sums = 2 * w.delta;
    w.bytes = w.dq_sums + (given(problem, TESSERA_DQ) ? s.hq * w.slots * kBytesOfDq : 0);
    return w;
  }

  // Strides are rules of support; addresses are only known now.
  static bool aligned(const Problem& problem, const Buffers& buffers) {
    uintptr_t bits = 0;
    for (const int index : kTensors) {
      if (given(problem, index)) bits |= reinterpret_cast<uintptr_t>(buffers.data[index]);
    }
    return bits % 16 == 0;
  }

  void order_tiles(BackwardParams& a) const {
    const Params& p = a.problem;
    const int tile_n = kernel_.tile.tile_n();
    const int tiles_n = (p.sk + tile_n - 1) / tile_n;
    const int heads = p.batch * p.hk;
    a.tiles = num_tile_slots(p.thd_k, p.sk, p.batch, tile_n) * p.hk;
    a.longest_first = p.right >= 0;
    const int64_t bytes_of_head = int64_t{p.group} * p.sq * (2 * (p.dqk + p.dv) + 4 * p.dqk);
    int per_section = static_cast<int>(
        std::clamp<int64_t>(kL2Bytes / std::max<int64_t>(bytes_of_head, 1), 1, heads));
    while (heads % per_section != 0) --per_section;
    a.tiles_n = Divisor::of(tiles_n);
    a.heads = Divisor::of(p.hk);
    a.heads_per_section = Divisor::of(per_section);
    a.per_section = Divisor::of(per_section * tiles_n);
  }

  static Status launch(const void* function, dim3 grid, int threads, int shared_bytes,
                       const BackwardParams& a, cudaStream_t stream) {
    cudaLaunchAttribute overlap{};  // with the end of the kernel before (wait_for_predecessors)
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    void* arguments[] = {const_cast<BackwardParams*>(&a)};
    return cuda_status(cudaLaunchKernelExC(&config, function, arguments),
                       "cudaLaunchKernel (backward)");
  }

  const BackwardKernel& kernel_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

void require_backward(Support& support, const Problem& p) {
  const Sizes s = sizes_of(p);
  const int dtype = p.tensor[TESSERA_Q].dtype;
  support.require(!has(p, TESSERA_DETERMINISTIC), ReasonId::kFeature, Remedy::kNone, [] {
    return std::string("deterministic=True: dq is a sum of atomic additions here");
  });
  support.require(find_backward_kernel(dtype, s.dqk, s.dv) || !is_16bit(dtype), ReasonId::kHeadDim,
                  Remedy::kNone, [&] {
                    return "head_dim_qk=" + std::to_string(s.dqk) +
                           ": and head_dim_v must be at most 128 in the backward pass";
                  });
  // A box wholly outside a ragged map faults, so that all chunks of 64 columns must begin inside.
  const bool ragged =
      is_thd_q(p) || is_thd_k(p) || given(p, TESSERA_SEQLENS_Q) || given(p, TESSERA_SEQLENS_K);
  support.require(!ragged || (s.dqk > 64) == (s.dv > 64), ReasonId::kHeadDim, Remedy::kNone, [&] {
    return "head_dim_v=" + std::to_string(s.dv) +
           ": with lengths, must be on the same side of 64 as "
           "head_dim_qk in the backward pass";
  });
  constexpr int kRich[] = {TESSERA_BIAS, TESSERA_MASK, TESSERA_KEY_RANGES, TESSERA_SEGMENT_IDS_Q,
                           TESSERA_ALIBI_SLOPES};
  for (const int index : kRich) {
    support.require(!given(p, index), ReasonId::kFeature, Remedy::kNone, [&] {
      return std::string(name_of(p, index)) + ": not in the backward pass of this backend";
    });
  }
  for (const auto& [flag, name] :
       {std::pair{TESSERA_SOFTCAP, "softcap"}, {TESSERA_DROPOUT, "dropout_p"}}) {
    support.require(!has(p, flag), ReasonId::kFeature, Remedy::kNone, [name = name] {
      return std::string(name) + ": not in the backward pass of this backend";
    });
  }
}

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device,
                                            std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const BackwardKernel& kernel =
      *find_backward_kernel(canonical.tensor[TESSERA_Q].dtype, s.dqk, s.dv);
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  for (const auto& [function, bytes] : {std::pair{kernel.rows, kernel.rows_shared_bytes},
                                        {kernel.gradients, kernel.shared_bytes}}) {
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute"));
  }
  return std::unique_ptr<Plan>(std::make_unique<BackwardPlan>(kernel, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
