// SPDX-License-Identifier: Apache-2.0
#include "cuda/imagined/runtime.h"

#include <cuda_runtime_api.h>

#include "cuda/common/checks.h"
#include "cuda/common/general.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/quantise/quantise.h"
#include "cuda/common/row_sums/row_sums.h"
#include "cuda/common/score/blocks.h"
#include "cuda/sm80/backward/row_kernels.h"
#include "cuda/sm80/convert/rows.h"
#include "cuda/sm80/products/rows.h"
#include "cuda/sm90/backward/score/pack_mask.h"
#include "cuda/sm90/backward/sink.h"
#include "cuda/sm90/bias/pad.h"
#include "cuda/sm90/bias/problem.h"
#include "cuda/sm90/dbias/host.h"
#include "cuda/sm90/forward/score/pack_mask.h"
#include "cuda/sm90/forward/score/segments.h"
#include "cuda/sm90/fp8/transpose.h"

namespace imagined {

Seen& seen() {
  static Seen instance;
  return instance;
}
void reset() { seen() = {}; }

namespace {

int current = kA100;

void require(bool condition, const std::string& what) {
  if (!condition && seen().fault.empty()) seen().fault = what;
}

// What CUDA allows of a grid on all its GPUs.
void see_launch(dim3 grid, dim3 block) {
  ++seen().launches;
  const std::string text = "grid (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) +
                           ", " + std::to_string(grid.z) + ") of " + std::to_string(block.x);
  require(grid.x > 0 && grid.y > 0 && grid.z > 0, text);
  require(grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535, text);
  require(block.x > 0 && block.x <= 1024, text);
}

}  // namespace

void use(int ordinal) { current = ordinal; }

}  // namespace imagined

using imagined::require;  // NOLINT: the functions below are the C face of this namespace

const char* cudaGetErrorString(cudaError_t) { return "an imagined error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorImagined"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }

cudaError_t cudaGetDevice(int* ordinal) { return *ordinal = imagined::current, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  const bool hopper = ordinal == imagined::kH100;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = hopper ? 132 : 108;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = hopper ? 9 : 8;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = (hopper ? 227 : 163) << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = (hopper ? 228 : 164) << 10;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  imagined::see_launch(grid, block);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  imagined::see_launch(config->gridDim, config->blockDim);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  return *clusters = 66, cudaSuccess;
}

// The rules that the driver's documentation states.
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void* base,
                                const cuuint64_t* extent, const cuuint64_t* stride,
                                const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  ++imagined::seen().maps;
  require(reinterpret_cast<uintptr_t>(base) % 16 == 0, "a map's base");
  for (cuuint32_t axis = 0; axis < rank; ++axis) {
    const std::string name = " of a map's axis " + std::to_string(axis);
    require(extent[axis] > 0 && extent[axis] <= uint64_t{1} << 32,
            "extent " + std::to_string(extent[axis]) + name);
    require(box[axis] > 0 && box[axis] <= 256, "box" + name);
    if (axis + 1 < rank) {
      require(stride[axis] % 16 == 0 && stride[axis] < uint64_t{1} << 40,
              "stride " + std::to_string(stride[axis]) + name);
    }
  }
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *entry = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return cudaSuccess;
}

// What files of kernels launch.
namespace tessera::cuda {

Status report_checks(const Problem&, const Buffers&, cudaStream_t) { return {}; }
Status launch_merge(const MergeLaunch&, cudaStream_t) { return {}; }
Status launch_merge(const PartsMerge&, bool, cudaStream_t) { return {}; }
Status merge(const MergeArgs&, const Buffers&, const Device&) { return {}; }
Status sum_rows(const RowSums&, const Buffers&, const Device&) { return {}; }
Status dropout_mask(const DropoutMaskArgs&, const Buffers&, const Device&) { return {}; }
Status launch_copy(const Copy&, cudaStream_t) { return {}; }
Status launch_fill(float*, int64_t, int, float, cudaStream_t) { return {}; }
Status rotate(const tessera_rotate_args&, const Buffers&, const Device&) { return {}; }
Status append(const tessera_append_args&, const Buffers&, const Device&) { return {}; }
Status map_blocks(const Problem&, const Params&, Walked, int, int, void*, BlockMap*, cudaStream_t,
                  bool) {
  return {};
}
Status launch_quantise(const Problem&, const Params&, const Rounded&, cudaStream_t,
                       const ValuesByColumns*) {
  return {};
}

namespace sm80 {
Status launch_row_statistics(const BackwardArgs&, Cleared, DqOrder*, cudaStream_t,
                             std::optional<float>) {
  return {};
}
Status launch_row_sums(const BackwardArgs&, cudaStream_t) { return {}; }
Status launch_widen(const Problem&, const Buffers&, int, const View&, cudaStream_t) { return {}; }
Status launch_narrow(const Problem&, const Buffers&, int, const View&, const ColumnPart&,
                     cudaStream_t) {
  return {};
}
Status launch_wide(const Problem&, const Params&, const Rounded&, const WideColumns&, int, int,
                   const View&, cudaStream_t) {
  return {};
}
}  // namespace sm80

namespace sm90 {
Status launch_dsink(const BackwardParams&, int, cudaStream_t) { return {}; }
Status launch_dbias_sum(const float*, int64_t, const int (&)[4], const View&, cudaStream_t) {
  return {};
}
Status launch_pad_bias(const Tensor&, void*, const Tensor& to, void* copy, cudaStream_t) {
  require(reinterpret_cast<uintptr_t>(copy) % 16 == 0 && to.stride[2] % 8 == 0, "a padded bias");
  imagined::seen().padded_bytes += bytes_of_padded(to);
  return {};
}
Status launch_transpose(const Problem&, const Params&, void*, cudaStream_t) { return {}; }
Status pack_mask(const Tensor&, const ForwardTile&, void*, ForwardParams&, cudaStream_t) {
  return {};
}
Status pack_backward_mask(const Tensor&, const BackwardTile&, void*, BackwardParams&,
                          cudaStream_t) {
  return {};
}
Status find_segments(const Problem&, const ForwardTile&, bool, void*, ForwardParams&,
                     cudaStream_t) {
  return {};
}
}  // namespace sm90
}  // namespace tessera::cuda
