// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/launch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <mutex>

#include "core/philox.h"

namespace tessera::cuda {
namespace {

// The largest power of two up to 16 that divides the base address and every stride of the tensor
// but the last axis', in bytes: how wide an access to the start of any row may be.
int32_t vector_bytes_of(const Tensor& t, const void* data) {
  uint64_t bits = reinterpret_cast<uintptr_t>(data) | 16;
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] > 1) bits |= static_cast<uint64_t>(t.stride[axis] * size_of(t.dtype));
  }
  return static_cast<int32_t>(bits & -bits);
}

View view_of(const Tensor& t, void* data) {
  View view{};
  if (t.dtype == TESSERA_NONE) return view;
  view.data = data;
  view.dtype = t.dtype;
  view.vector_bytes = vector_bytes_of(t, data);
  for (int axis = 0; axis < 4; ++axis) view.stride[axis] = t.extent[axis] > 1 ? t.stride[axis] : 0;
  return view;
}

int32_t narrow(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, -1, int64_t{1} << 30));
}

Status launch_status(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return {};
  char name[64];
  std::snprintf(name, sizeof name, "cudaLaunchKernel (%s)", operation);
  return cuda_status(error, name);
}

}  // namespace

Params params_of(const Problem& problem, const Buffers& buffers) {
  Params p{};
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    p.tensor[i] = view_of(problem.tensor[i], buffers.data[i]);
    for (int axis = tensor_rule(i).rank; axis < 4; ++axis) p.tensor[i].stride[axis] = 0;
  }
  // Slopes of no sequences, [0, hq], have the strides of slopes that all sequences share.
  if (problem.tensor[TESSERA_DALIBI_SLOPES].extent[0] == 0) {
    p.tensor[TESSERA_DALIBI_SLOPES].data = nullptr;
  }
  const Sizes sizes = sizes_of(problem);
  p.batch = narrow(sizes.batch);
  p.sq = narrow(sizes.sq);
  p.sk = narrow(sizes.sk);
  p.hq = narrow(sizes.hq);
  p.hk = narrow(sizes.hk);
  p.group = narrow(sizes.group());
  p.dqk = narrow(sizes.dqk);
  p.dv = narrow(sizes.dv);
  p.thd_q = is_thd_q(problem);
  p.thd_k = is_thd_k(problem);
  if (p.batch == 0 && (p.thd_q || p.thd_k)) {
    // Packed rows of no sequences are rows of a sequence of length 0; a padded side has none then.
    p.batch = 1;
    if (!p.thd_q) p.sq = 0;
    if (!p.thd_k) p.sk = 0;
    for (const int index : {TESSERA_SEQLENS_Q, TESSERA_SEQLENS_K}) p.tensor[index].data = nullptr;
  }
  if (is_paged(problem)) {
    p.page_size = narrow(problem.tensor[TESSERA_K].extent[1]);
    p.max_pages = narrow(problem.tensor[TESSERA_PAGE_TABLE_K].extent[1]);
    p.pages_k = narrow(problem.tensor[TESSERA_K].extent[0]);
    p.pages_v = narrow(problem.tensor[TESSERA_V].extent[0]);
    if (!given(problem, TESSERA_PAGE_TABLE_V)) {
      p.tensor[TESSERA_PAGE_TABLE_V] = p.tensor[TESSERA_PAGE_TABLE_K];
    }
  }

  p.flags = problem.flags;
  p.bottom_right = problem.align == TESSERA_ALIGN_BOTTOM_RIGHT;
  const bool window = has(problem, TESSERA_WINDOW);
  p.left = window ? narrow(problem.window_left) : -1;
  p.right = has(problem, TESSERA_CAUSAL) ? 0 : window ? narrow(problem.window_right) : -1;
  if (given(problem, TESSERA_KEY_RANGES)) {
    p.num_ranges = static_cast<int32_t>(problem.tensor[TESSERA_KEY_RANGES].extent[3] / 2);
  }

  p.softmax_scale = static_cast<float>(softmax_scale_of(problem, buffers));
  p.softcap = static_cast<float>(softcap_of(problem, buffers));
  p.dropout_scale = 1;
  if (has(problem, TESSERA_DROPOUT)) {
    p.dropout_threshold = static_cast<uint32_t>(std::floor(buffers.dropout_p * 65536 + 0.5));
    p.dropout_scale = static_cast<float>(Dropout{0, 0, 0, p.dropout_threshold}.scale());
  }
  return p;
}

Status cuda_status(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return failed("%s: %s (%s)", operation, cudaGetErrorString(error), cudaGetErrorName(error));
}

Status launch_kernel(const char* operation, const void* function, dim3 grid, int threads,
                     int shared_bytes, const void* args, cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(args)};
  return launch_status(cudaLaunchKernel(function, grid, dim3(static_cast<unsigned>(threads)),
                                        arguments, static_cast<size_t>(shared_bytes), stream),
                       operation);
}

Status launch_overlapping(const char* operation, const void* function, dim3 grid, int threads,
                          int shared_bytes, const void* args, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<void*>(args)};
  return launch_status(cudaLaunchKernelExC(&config, function, arguments), operation);
}

DeviceScope::DeviceScope(int ordinal) {
  int current = -1;
  status_ = cuda_status(cudaGetDevice(&current), "cudaGetDevice");
  if (!status_.ok() || current == ordinal) return;
  status_ = cuda_status(cudaSetDevice(ordinal), "cudaSetDevice");
  if (status_.ok()) previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

Result<DeviceInfo> device_info(int ordinal) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceInfo, kMaxDevices> infos;
  static std::array<cudaError_t, kMaxDevices> errors;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return invalid("device.ordinal=%d: must be in [0, %d)", ordinal, kMaxDevices);
  }
  std::call_once(once[ordinal], [ordinal] {
    DeviceInfo& info = infos[ordinal];
    cudaError_t& error = errors[ordinal];
    int major = 0, minor = 0;
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, ordinal);
    };
    ask(&major, cudaDevAttrComputeCapabilityMajor);
    ask(&minor, cudaDevAttrComputeCapabilityMinor);
    ask(&info.multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(&info.shared_memory_per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(&info.shared_memory_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    info.arch = 10 * major + minor;
  });
  if (errors[ordinal] != cudaSuccess) return cuda_status(errors[ordinal], "cudaDeviceGetAttribute");
  return infos[ordinal];
}

const std::string& driver_unavailable() {
  static const std::string reason = []() -> std::string {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return std::string("no CUDA device: ") + cudaGetErrorString(error);
    }
    return count > 0 ? "" : "no CUDA device: the driver lists none";
  }();
  return reason;
}

int arch_of(const Device& device) {
  if (device.arch != 0 || !driver_unavailable().empty()) return device.arch;
  const Result<DeviceInfo> info = device_info(device.ordinal);
  return info.ok() ? info.value().arch : 0;
}

}  // namespace tessera::cuda
