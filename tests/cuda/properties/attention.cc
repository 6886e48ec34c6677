// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <utility>

namespace tessera_test {
namespace {

Memory* memory_in_use = nullptr;

int64_t bytes_of(int dtype) {
  switch (dtype) {
    case TESSERA_FP32:
    case TESSERA_INT32:
      return 4;
    case TESSERA_INT64:
      return 8;
    case TESSERA_BOOL:
      return 1;
  }
  return 2;
}

// A number of about the normal distribution, the same for the same indices.
float number(uint64_t tensor, uint64_t n, uint64_t i, uint64_t h, uint64_t c) {
  uint64_t x = ((((tensor * 8191 + n) * 131071 + i) * 257 + h) * 1031 + c) * 0x9E3779B97F4A7C15u;
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 29;
  float sum = 0;
  for (int byte = 0; byte < 8; ++byte) sum += static_cast<float>(x >> 8 * byte & 0xFF);
  return (sum - 1020.f) / 209.f;
}

void store(char* to, int dtype, float value) {
  if (dtype == TESSERA_FP32) {
    std::memcpy(to, &value, 4);
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint16_t half;
  if (dtype == TESSERA_BF16) {
    half = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  } else {  // fp16: normal numbers are cut, smaller ones become 0
    const int exponent = static_cast<int>(bits >> 23 & 0xFF) - 112;
    half = static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                 (exponent <= 0 ? 0 : exponent << 10 | (bits >> 13 & 0x3FF)));
  }
  std::memcpy(to, &half, 2);
}

}  // namespace

void require(bool condition, const std::string& what) {
  if (!condition) throw Failure(what);
}

void require(cudaError_t error, const char* operation) {
  if (error != cudaSuccess)
    throw Failure(std::string(operation) + ": " + cudaGetErrorString(error));
}

std::string text(const char* format, ...) {
  char buffer[2304];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

Memory::~Memory() {
  if (memory_in_use == this) memory_in_use = nullptr;
}
void Memory::use() { memory_in_use = this; }

DeviceArray::DeviceArray(size_t bytes) : memory_(memory_in_use), bytes_(bytes) {
  if (memory_) {
    base_ = memory_->take(bytes + 2 * kGuard);
  } else {
    require(cudaMalloc(reinterpret_cast<void**>(&base_), bytes + 2 * kGuard), "cudaMalloc");
  }
  require(cudaMemset(base_, 0xA5, kGuard), "cudaMemset");
  require(cudaMemset(data(), 0xFF, bytes), "cudaMemset");
  require(cudaMemset(data() + bytes, 0xA5, kGuard), "cudaMemset");
}

DeviceArray::~DeviceArray() {
  if (!base_) return;
  if (memory_) {
    memory_->give_back(base_);
  } else {
    (void)cudaFree(base_);
  }
}

DeviceArray::DeviceArray(DeviceArray&& other) noexcept
    : memory_(other.memory_), base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}

void DeviceArray::check_guards(const char* name) const {
  std::vector<uint8_t> guards(2 * kGuard);
  require(cudaMemcpy(guards.data(), base_, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
  require(cudaMemcpy(guards.data() + kGuard, data() + bytes_, kGuard, cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  for (const uint8_t byte : guards)
    require(byte == 0xA5, text("a byte outside of %s was written", name));
}

Attention::Attention(const Options& given) : options(given) {
  problem.struct_size = sizeof problem;
  buffers.struct_size = sizeof buffers;
  const Options& o = options;
  problem.pass = o.pass;
  problem.flags = o.flags;
  problem.format_q = problem.format_kv = o.format;
  problem.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  if (o.window_left >= 0) {
    problem.flags |= TESSERA_WINDOW;
    problem.window_left = o.window_left;
    problem.window_right = -1;
  }
  buffers.dropout_p = o.dropout_p;
  buffers.softcap = o.softcap;
  std::strncpy(problem.backend, o.backend.c_str(), sizeof problem.backend - 1);

  const bool packed = o.format == TESSERA_THD, backward = o.pass == TESSERA_BACKWARD;
  int64_t tokens = 0;
  for (const int64_t n : o.lengths) tokens += n;
  const int64_t sq = packed ? tokens : o.sq, sk = packed ? tokens : o.sk;
  for (const auto& [index, s, heads] : {std::tuple{TESSERA_Q, sq, o.hq},
                                        {TESSERA_K, sk, o.hk},
                                        {TESSERA_V, sk, o.hk},
                                        {TESSERA_O, sq, o.hq}}) {
    describe(index, s, heads, o.d, o.format);
    if (index != TESSERA_O) fill(index, heads);
  }
  give(TESSERA_LSE, TESSERA_FP32, {packed ? 1 : o.b, o.hq, sq}, nullptr);
  if (!o.lengths.empty()) {
    std::vector<int32_t> lengths(o.lengths.begin(), o.lengths.end()), starts{0};
    for (const int32_t n : lengths) starts.push_back(starts.back() + n);
    for (const bool keys : {false, true}) {
      if (packed) {
        give(keys ? TESSERA_CU_SEQLENS_K : TESSERA_CU_SEQLENS_Q, TESSERA_INT32, {o.b + 1},
             starts.data());
      } else {
        give(keys ? TESSERA_SEQLENS_K : TESSERA_SEQLENS_Q, TESSERA_INT32, {o.b}, lengths.data());
      }
    }
  }
  if (o.flags & TESSERA_DROPOUT) {
    const int64_t state[] = {42, 7};
    give(TESSERA_RNG_STATE, TESSERA_INT64, {2}, state);
  }
  if (backward) {
    forward_first();
    describe(TESSERA_DO, sq, o.hq, o.d, o.format);
    fill(TESSERA_DO, o.hq);
    describe(TESSERA_DQ, sq, o.hq, o.d, o.format);
    describe(TESSERA_DK, sk, o.hk, o.d, o.format);
    describe(TESSERA_DV, sk, o.hk, o.d, o.format);
  }
  prepare();
}

// o and lse by the general backend, whichever is forced for the backward pass.
void Attention::forward_first() {
  const tessera_problem backward = problem;
  problem.pass = TESSERA_FORWARD;
  problem.flags &= ~static_cast<uint32_t>(TESSERA_DETERMINISTIC);
  std::strncpy(problem.backend, "cuda_sm80", sizeof problem.backend);
  prepare();
  run();
  require(cudaDeviceSynchronize(), "forward pass");
  problem.pass = backward.pass;
  problem.flags = backward.flags;
  std::memcpy(problem.backend, backward.backend, sizeof problem.backend);
}

void Attention::prepare() {
  tessera_info info{};
  info.struct_size = sizeof info;
  const int32_t code = tessera_prepare(&problem, &kDevice, 0, &info, &error_);
  if (code == TESSERA_REFUSED) throw Refused(error_.message);
  require_ok(code, "tessera_prepare");
  backend_ = info.backend;
  workspace_ = std::make_unique<DeviceArray>(static_cast<size_t>(info.workspace_bytes));
  buffers.workspace = workspace_->data();
  buffers.workspace_bytes = info.workspace_bytes;
}

void Attention::require_ok(int32_t code, const char* operation) const {
  if (code != TESSERA_OK) throw Failure(text("%s: %s", operation, error_.message));
}

int32_t Attention::run_status(cudaStream_t stream) {
  buffers.stream = stream;
  return tessera_run(&problem, &kDevice, &buffers, &error_);
}

std::string name_of(const Options& o) {
  const char* formats[] = {"bshd", "sbhd", "bhsd", "thd"};
  return text(
      "%s %s %s d%d%s%s%s%s%s%s", o.backend.c_str(), o.pass == TESSERA_FORWARD ? "fwd" : "bwd",
      o.dtype == TESSERA_FP32   ? "fp32"
      : o.dtype == TESSERA_BF16 ? "bf16"
                                : "fp16",
      static_cast<int>(o.d), o.sq == 1 ? " one query" : "",
      o.flags & TESSERA_CAUSAL ? " causal" : "", o.flags & TESSERA_DROPOUT ? " dropout" : "",
      o.flags & TESSERA_SOFTCAP ? " softcap" : "",
      o.format == TESSERA_BSHD ? "" : (std::string(" ") + formats[o.format]).c_str(),
      o.lengths.empty() ? "" : " lengths");
}

void Attention::describe(int index, int64_t s, int64_t heads, int64_t d, int format) {
  tessera_tensor& t = problem.tensor[index];
  const int64_t b = format == TESSERA_THD ? 1 : options.b;
  t.dtype = options.dtype;
  const int64_t extent[] = {b, s, heads, d};
  std::memcpy(t.extent, extent, sizeof extent);
  const int64_t seq_first[] = {heads * d, b * heads * d, d, 1};
  const int64_t heads_first[] = {heads * s * d, d, s * d, 1};
  const int64_t batch_first[] = {s * heads * d, heads * d, d, 1};
  std::memcpy(t.stride,
              format == TESSERA_SBHD   ? seq_first
              : format == TESSERA_BHSD ? heads_first
                                       : batch_first,
              sizeof batch_first);
  arrays_.push_back(std::make_unique<DeviceArray>(
      static_cast<size_t>(b * s * heads * d * bytes_of(options.dtype))));
  array_[index] = arrays_.back().get();
  buffers.data[index] = array_[index]->data();
}

void Attention::give(int index, int dtype, std::initializer_list<int64_t> extent,
                     const void* data) {
  tessera_tensor& t = problem.tensor[index];
  t.dtype = dtype;
  int64_t count = 1;
  for (int axis = 3; axis >= 0; --axis) {
    const bool own = axis < static_cast<int>(extent.size());
    t.extent[axis] = own ? extent.begin()[axis] : 1;
    t.stride[axis] = count;
    count *= t.extent[axis];
  }
  arrays_.push_back(std::make_unique<DeviceArray>(static_cast<size_t>(count * bytes_of(dtype))));
  array_[index] = arrays_.back().get();
  buffers.data[index] = array_[index]->data();
  if (data) {
    require(cudaMemcpy(buffers.data[index], data, array_[index]->bytes(), cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }
}

int64_t Attention::length(int64_t n, int64_t extent) const {
  return options.lengths.empty() ? extent : options.lengths[static_cast<size_t>(n)];
}
int64_t Attention::start(int64_t n) const {
  if (options.format != TESSERA_THD) return 0;
  int64_t at = 0;
  for (int64_t i = 0; i < n; ++i) at += options.lengths[static_cast<size_t>(i)];
  return at;
}

void Attention::fill(int index, int64_t heads) {
  const tessera_tensor& t = problem.tensor[index];
  const int64_t size = bytes_of(t.dtype);
  std::vector<char> host(array_[index]->bytes(), static_cast<char>(0xFF));
  if (!std::isnan(options.outside)) {
    for (size_t at = 0; at < host.size(); at += static_cast<size_t>(size)) {
      store(&host[at], t.dtype, options.outside);
    }
  }
  for (int64_t n = 0; n < options.b; ++n) {
    const int64_t batch = options.format == TESSERA_THD ? 0 : n;
    for (int64_t i = 0; i < length(n, t.extent[1]); ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t c = 0; c < options.d; ++c) {
          const int64_t at =
              batch * t.stride[0] + (start(n) + i) * t.stride[1] + h * t.stride[2] + c;
          store(
              &host[static_cast<size_t>(at * size)], t.dtype,
              number(static_cast<uint64_t>(index), static_cast<uint64_t>(n),
                     static_cast<uint64_t>(i), static_cast<uint64_t>(h), static_cast<uint64_t>(c)));
        }
      }
    }
  }
  require(cudaMemcpy(buffers.data[index], host.data(), host.size(), cudaMemcpyHostToDevice),
          "cudaMemcpy");
}

std::vector<int> Attention::output_indices() const {
  if (options.pass == TESSERA_FORWARD) return {TESSERA_O, TESSERA_LSE};
  return {TESSERA_DQ, TESSERA_DK, TESSERA_DV};
}

std::vector<uint8_t> Attention::outputs() const {
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<uint8_t> result;
  for (const int index : output_indices()) {
    const tessera_tensor& t = problem.tensor[index];
    const int64_t size = bytes_of(t.dtype);
    std::vector<uint8_t> host(array_[index]->bytes());
    require(cudaMemcpy(host.data(), buffers.data[index], host.size(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    // lse is [b, h, s]; the others [b, s, h, d].
    const bool lse = index == TESSERA_LSE;
    const int64_t row_axis = lse ? 2 : 1, head_axis = lse ? 1 : 2, width = lse ? 1 : options.d;
    for (int64_t n = 0; n < options.b; ++n) {
      const int64_t batch = options.format == TESSERA_THD ? 0 : n;
      for (int64_t i = 0; i < length(n, t.extent[row_axis]); ++i) {
        for (int64_t h = 0; h < t.extent[head_axis]; ++h) {
          const int64_t at =
              batch * t.stride[0] + (start(n) + i) * t.stride[row_axis] + h * t.stride[head_axis];
          const auto row = host.begin() + at * size;
          result.insert(result.end(), row, row + width * size);
        }
      }
    }
  }
  return result;
}

void Attention::raw_outputs(std::vector<uint8_t>& to) const {
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  size_t at = 0;
  for (const int index : output_indices()) {
    const size_t bytes = array_[index]->bytes();
    to.resize(std::max(to.size(), at + bytes));
    require(cudaMemcpy(&to[at], buffers.data[index], bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    at += bytes;
  }
}

void Attention::spoil(cudaStream_t stream) {
  for (const int index : output_indices()) {
    require(cudaMemsetAsync(buffers.data[index], 0xFF, array_[index]->bytes(), stream),
            "cudaMemset");
  }
}

void Attention::check_guards() const {
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (array_[i]) array_[i]->check_guards(text("tensor %d", i).c_str());
  }
  workspace_->check_guards("the workspace");
}

int device_arch() {
  int count = 0, major = 0, minor = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return 0;
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "device");
  require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "device");
  return 10 * major + minor;
}

}  // namespace tessera_test
