// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/cache/cache.h"
#include "cuda/common/cache/move.cuh"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"

namespace tessera::cuda {
namespace {

constexpr int kMostThreads = 256;

// A CTA a token: the pieces of all heads of its rows.
template <int kWidth>
__global__ void __launch_bounds__(kMostThreads) move_kernel(const __grid_constant__ MoveLaunch m) {
  for (int64_t t = blockIdx.x; t < m.tokens; t += gridDim.x) {
    const Token token = token_of(m, t);
    if (!token.exists) continue;
    for (int unit = threadIdx.x; unit < m.heads * m.pieces; unit += blockDim.x) {
      move_unit<kWidth>(m, token, unit);
    }
  }
}

bool is_empty(const MoveLaunch& m) { return m.tokens == 0 || m.heads * m.pieces == 0; }

// On the current device.
Status launch_move(const char* operation, const MoveLaunch& m, const Buffers& context) {
  const int units = m.heads * m.pieces;
  const void* kernel = m.width == 8 ? reinterpret_cast<const void*>(&move_kernel<8>)
                                    : reinterpret_cast<const void*>(&move_kernel<1>);
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(m.tokens, 1 << 30));
  return launch_kernel(operation, kernel, dim3(ctas),
                       std::min((units + 31) / 32 * 32, kMostThreads), 0, &m,
                       static_cast<cudaStream_t>(context.stream));
}

}  // namespace

Status rotate(const RotateArgs& args, const Buffers& context, const Device& device) {
  if (args.tensor[TESSERA_ROTATE_X].dtype == TESSERA_FP64) {
    return Status(TESSERA_REFUSED,
                  "x.dtype=fp64: CUDA turns fp32, bf16 and fp16; rotate on the CPU");
  }
  const MoveLaunch m = launch_of(args);
  if (is_empty(m)) return {};
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  return launch_move("rotate", m, context);
}

Status append(const AppendArgs& args, const Buffers& context, const Device& device) {
  const MoveLaunch m = launch_of(args);
  if (is_empty(m)) return {};
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  TESSERA_RETURN_IF_ERROR(report_lost(args, static_cast<cudaStream_t>(context.stream)));
  return launch_move("append_kv", m, context);
}

}  // namespace tessera::cuda
