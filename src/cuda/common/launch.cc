// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/launch.h"

#include <array>
#include <cstdio>
#include <mutex>

namespace tessera::cuda {
namespace {

Status launch_status(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return {};
  char name[96];
  std::snprintf(name, sizeof name, "cudaLaunchKernel (%s)", operation);
  return cuda_status(error, name);
}

}  // namespace

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
                          int shared_bytes, const void* args, cudaStream_t stream,
                          int ctas_of_cluster) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(ctas_of_cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = ctas_of_cluster > 1 ? 2 : 1;
  void* arguments[] = {const_cast<void*>(args)};
  return launch_status(cudaLaunchKernelExC(&config, function, arguments), operation);
}

DeviceScope::DeviceScope(int ordinal)
    : current_(ordinal), status_(cuda_status(current_.error(), "cuCtxPushCurrent")) {}

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

DeviceTraits traits_of_device(const Device& device) {
  // A problem on the host is refused whatever GPU is here, and must not start the driver: a process
  // that has started it loses CUDA in the children that it forks.
  if (device.kind == TESSERA_CUDA && driver_unavailable().empty()) {
    const Result<DeviceInfo> info = device_info(device.ordinal);
    if (info.ok() && (device.arch == 0 || device.arch == info.value().arch)) {
      const DeviceInfo& here = info.value();
      return {here.arch, here.multiprocessors, here.shared_memory_per_cta};
    }
  }
  return imagined_traits(device);
}

}  // namespace tessera::cuda
