// SPDX-License-Identifier: Apache-2.0
// What a handler asks of the runtime that calls it: errors, threads, the device and its stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "tessera.h"
#include "xla_ffi_abi.h"

namespace tessera_jax {

// Fails with a code of libtessera.
struct Failure : std::runtime_error {
  Failure(int32_t code, const std::string& message) : std::runtime_error(message), code(code) {}
  int32_t code;
};

inline void check(int32_t code, const tessera_error& error) {
  if (code != TESSERA_OK) throw Failure(code, error.message);
}

struct Runtime {
  const xla_ffi::Api* api;
  xla_ffi::Context* context;

  explicit Runtime(const xla_ffi::CallFrame& frame) : api(frame.api), context(frame.context) {}

  template <typename Function>
  bool has(Function xla_ffi::Api::*function) const {
    const auto* end = reinterpret_cast<const char*>(&(api->*function) + 1);
    return end <= reinterpret_cast<const char*>(api) + api->header.struct_size;
  }

  void destroy(xla_ffi::Error* error) const {
    xla_ffi::ErrorDestroy destroy{{sizeof destroy, nullptr}, error};
    api->error_destroy(&destroy);
  }

  void check(xla_ffi::Error* error, const char* what) const {
    if (error == nullptr) return;
    destroy(error);
    throw Failure(TESSERA_FAILED, std::string("tessera: XLA gives no ") + what);
  }

  xla_ffi::Error* error(int32_t code, const char* message) const {
    using xla_ffi::Code;
    const Code theirs = code == TESSERA_INVALID         ? Code::kInvalidArgument
                        : code == TESSERA_REFUSED       ? Code::kUnimplemented
                        : code == TESSERA_OUT_OF_MEMORY ? Code::kResourceExhausted
                                                        : Code::kInternal;
    xla_ffi::ErrorCreate create{{sizeof create, nullptr}, message, theirs};
    return api->error_create(&create);
  }

  int32_t num_threads() const {
    // The system is asked once: it reads a file, which takes longer than a small call.
    static const int64_t cores = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
    if (!has(&xla_ffi::Api::thread_pool_num_threads)) return static_cast<int32_t>(cores);
    int64_t count = 1;
    xla_ffi::ThreadPoolNumThreads get{{sizeof get, nullptr}, context, &count};
    check(api->thread_pool_num_threads(&get), "number of threads");
    return static_cast<int32_t>(std::max<int64_t>(count, 1));
  }

  tessera_device device(int32_t kind) const {
    tessera_device device{};
    device.kind = kind;
    if (kind == TESSERA_CUDA) {
      if (!has(&xla_ffi::Api::device_ordinal_get)) {
        throw Failure(TESSERA_REFUSED,
                      "tessera: this jaxlib does not say on which device a call "
                      "runs; needs jaxlib 0.6 or later");
      }
      xla_ffi::DeviceOrdinalGet get{{sizeof get, nullptr}, context, 0};
      check(api->device_ordinal_get(&get), "device");
      device.ordinal = get.ordinal;
    }
    return device;
  }

  void* stream() const {
    xla_ffi::StreamGet get{{sizeof get, nullptr}, context, nullptr};
    check(api->stream_get(&get), "stream");
    return get.stream;
  }
};

// One parallel loop on XLA's threads. A helper may start late, or never: the caller works too, and
// waits only for items that were begun. The last to leave frees it.
struct Loop {
  int64_t n;
  void (*body)(void* arg, int64_t i);
  void* arg;
  std::atomic<int64_t> next{0}, done{0};

  void work() {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) {
      body(arg, i);
      if (done.fetch_add(1) + 1 == n) done.notify_all();
    }
  }
};

inline void on_xla_threads(void* runtime_pointer, int64_t n, void (*body)(void*, int64_t),
                           void* arg) {
  const auto& runtime = *static_cast<const Runtime*>(runtime_pointer);
  auto loop = std::make_shared<Loop>();
  loop->n = n;
  loop->body = body;
  loop->arg = arg;
  for (int64_t i = 1; i < n; ++i) {
    auto* mine = new std::shared_ptr<Loop>(loop);
    const auto task = [](void* data) {
      const std::unique_ptr<std::shared_ptr<Loop>> held(static_cast<std::shared_ptr<Loop>*>(data));
      (*held)->work();
    };
    xla_ffi::ThreadPoolSchedule schedule{{sizeof schedule, nullptr}, runtime.context, task, mine};
    if (xla_ffi::Error* error = runtime.api->thread_pool_schedule(&schedule)) {
      runtime.destroy(error);
      delete mine;
      break;  // the caller does what is left
    }
  }
  loop->work();
  for (int64_t done = loop->done; done != n; done = loop->done) loop->done.wait(done);
}

// The memory of one call on the CPU, of which libtessera says how much when it has found the plan. A
// thread keeps that of its last call, up to 16 MiB.
class CpuWorkspace {
 public:
  // A tessera_allocate; the context is a CpuWorkspace.
  static void* allocate(void* context, int64_t bytes) {
    try {
      return static_cast<CpuWorkspace*>(context)->memory_of(bytes);
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

 private:
  void* memory_of(int64_t bytes) {
    constexpr int64_t kKept = 16 << 20, kAlignment = 64;
    thread_local std::unique_ptr<char[]> kept;
    thread_local int64_t capacity = 0;
    char* memory = nullptr;
    if (bytes > kKept) {
      own_.reset(new char[bytes + kAlignment]);
      memory = own_.get();
    } else {
      if (bytes > capacity) {
        capacity = 0;
        kept.reset(new char[bytes + kAlignment]);
        capacity = bytes;
      }
      memory = kept.get();
    }
    return memory + (-reinterpret_cast<uintptr_t>(memory) & (kAlignment - 1));
  }

  std::unique_ptr<char[]> own_;
};

}  // namespace tessera_jax
