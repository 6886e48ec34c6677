// SPDX-License-Identifier: Apache-2.0
// A problem with its tensors on the device, for the tests of exact properties. It knows the C
// header and cudart alone, as a user does.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera.h"

namespace tessera_test {

// Something that a property does not hold for, or a call that failed.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A legal problem that the forced backend leaves to another.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A property that this device is too small for.
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool condition, const std::string& what);
void require(cudaError_t error, const char* operation);
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Where arrays lie that are made while it is the one in use; cudaMalloc's memory where none is. It
// outlives them.
class Memory {
 public:
  Memory() = default;
  virtual ~Memory();
  Memory(const Memory&) = delete;
  void use();
  virtual char* take(size_t bytes) = 0;  // at a multiple of 256 bytes
  virtual void give_back(char* base) = 0;
};

// Device memory between two guards: a write outside is found by check_guards().
class DeviceArray {
 public:
  // Filled with 0xFF, a NaN in every floating type.
  explicit DeviceArray(size_t bytes);
  ~DeviceArray();
  DeviceArray(DeviceArray&& other) noexcept;
  DeviceArray& operator=(DeviceArray&&) = delete;

  char* data() const { return base_ + kGuard; }
  size_t bytes() const { return bytes_; }
  void check_guards(const char* name) const;

 private:
  static constexpr size_t kGuard = 1024;
  Memory* memory_ = nullptr;
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

class Stream {
 public:
  Stream() {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronise() const { require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

struct Options {
  int pass = TESSERA_FORWARD;
  int dtype = TESSERA_BF16;
  int64_t b = 2, sq = 300, sk = 300, hq = 4, hk = 2, d = 64;
  uint32_t flags = 0;  // TESSERA_CAUSAL, TESSERA_DETERMINISTIC, TESSERA_DROPOUT, ...
  int64_t window_left = -1;
  double dropout_p = 0.1, softcap = 1;  // read with their flags
  int format = TESSERA_BSHD;
  std::vector<int64_t> lengths;  // of every sequence, both sides; with thd they are packed
  float outside = NAN;           // what the rows beyond a sequence's length hold
  std::string backend;           // "" = choose
};
std::string name_of(const Options& options);

// q, k, v, o, lse and, backward, do, dq, dk, dv. What a tensor holds depends on logical indices
// alone, so that one problem in two layouts is the same problem. The rest is options.outside.
class Attention {
 public:
  explicit Attention(const Options& options);

  void run(cudaStream_t stream = nullptr) { require_ok(run_status(stream), "tessera_run"); }
  int32_t run_status(cudaStream_t stream = nullptr);
  const tessera_error& error() const { return error_; }
  const std::string& backend() const { return backend_; }

  // The elements of every output in logical order, valid rows only. Waits for the device.
  std::vector<uint8_t> outputs() const;
  // The bytes of every output as they lie.
  void raw_outputs(std::vector<uint8_t>& to) const;
  // Every output becomes NaN again.
  void spoil(cudaStream_t stream = nullptr);
  // What is outside the tensors is untouched.
  void check_guards() const;

  tessera_problem problem{};
  tessera_buffers buffers{};
  Options options;

  // Allocates a contiguous tensor of `data`, which has its bytes, or of NaN.
  void give(int index, int dtype, std::initializer_list<int64_t> extent, const void* data);
  // Builds the plan and its workspace; again after the problem was changed.
  void prepare();

 private:
  void require_ok(int32_t code, const char* operation) const;
  void describe(int index, int64_t s, int64_t heads, int64_t d, int format);
  void fill(int index, int64_t heads);
  int64_t length(int64_t n, int64_t extent) const;
  int64_t start(int64_t n) const;
  std::vector<int> output_indices() const;
  void forward_first();

  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  DeviceArray* array_[TESSERA_NUM_TENSORS] = {};
  std::unique_ptr<DeviceArray> workspace_;
  tessera_error error_{sizeof(tessera_error), 0, {}};
  std::string backend_;
};

inline constexpr tessera_device kDevice{TESSERA_CUDA, 0, 0, 0};

// Compute capability of device 0, as 90; 0 where there is none.
int device_arch();

}  // namespace tessera_test
