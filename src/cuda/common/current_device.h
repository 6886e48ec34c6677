// SPDX-License-Identifier: Apache-2.0
// CurrentDevice: a device made current for one scope, and nothing else of the process touched.
//
// cudaSetDevice() makes a context, some hundred MB, on the device that it is told. To put back
// cuda:0 behind a call on cuda:1 would make one there in a process that never used it. A context is
// put on top of the driver's stack instead, and taken off again.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <mutex>
#include <type_traits>

namespace tessera::cuda {

class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    int current = -1;
    error_ = cudaGetDevice(&current);
    if (error_ != cudaSuccess || current == ordinal) return;
    error_ = push(ordinal);
    pushed_ = error_ == cudaSuccess;
  }
  ~CurrentDevice() {
    CUcontext top;
    if (pushed_) (void)driver().pop(&top);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  // Functions of the driver, which the runtime has loaded; no library here is linked with libcuda.
  struct Driver {
    decltype(&cuDeviceGet) device;
    decltype(&cuDevicePrimaryCtxRetain) retain;
    decltype(&cuCtxPushCurrent) push;
    decltype(&cuCtxPopCurrent) pop;
  };
  static const Driver& driver() {
    static const Driver functions = [] {
      void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
      const auto find = [&](auto& function, const char* name) {
        function = library ? reinterpret_cast<std::remove_reference_t<decltype(function)>>(
                                 dlsym(library, name))
                           : nullptr;
      };
      Driver d{};
      find(d.device, "cuDeviceGet");
      find(d.retain, "cuDevicePrimaryCtxRetain");
      find(d.push, "cuCtxPushCurrent_v2");
      find(d.pop, "cuCtxPopCurrent_v2");
      return d;
    }();
    return functions;
  }

  // The context is the one that the runtime uses for the device. It is retained once, as the
  // runtime does, and lives as long as the process.
  static cudaError_t push(int ordinal) {
    constexpr int kMostDevices = 64;
    static std::once_flag once[kMostDevices];
    static CUcontext contexts[kMostDevices];
    static CUresult results[kMostDevices];
    const Driver& d = driver();
    if (!d.device || !d.retain || !d.push || !d.pop) return cudaErrorInsufficientDriver;
    if (ordinal < 0 || ordinal >= kMostDevices) return cudaErrorInvalidDevice;
    std::call_once(once[ordinal], [&] {
      CUdevice device = 0;
      results[ordinal] = d.device(&device, ordinal);
      if (results[ordinal] == CUDA_SUCCESS) {
        results[ordinal] = d.retain(&contexts[ordinal], device);
      }
    });
    // The runtime's errors have the driver's numbers.
    if (results[ordinal] != CUDA_SUCCESS) return static_cast<cudaError_t>(results[ordinal]);
    return static_cast<cudaError_t>(d.push(contexts[ordinal]));
  }

  bool pushed_ = false;
  cudaError_t error_;
};

}  // namespace tessera::cuda
