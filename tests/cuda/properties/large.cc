// SPDX-License-Identifier: Apache-2.0
// Tensors of more than 2^31 elements: slices of the result against the CPU's fp64 reference.
//
// Inputs repeat a block of a prime number of random elements, so that the host knows every element.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "properties.h"

namespace tessera_test {
namespace {

constexpr size_t kPeriod = 4194301;  // a prime

struct Large {
  const char* name;
  int64_t b, s, h, d, window_left;  // -1: every key is visible
  int64_t row_of_slice[2];          // rows of all sequences, one after the other
  int64_t rows;                     // of a slice
  int64_t margin;                   // rows at either end of a slice that see keys outside of it
  int64_t elements() const { return b * s * h * d; }
};
constexpr int64_t kMillion = int64_t{1} << 20;
constexpr Large kShapes[] = {
    {"one sequence of 2^21 + 512 rows, window 128",
     1,
     2 * kMillion + 512,
     8,
     128,
     127,
     {kMillion - 192, 2 * kMillion + 128},
     384,
     127},
    {"8193 sequences of 256 rows", 8193, 256, 8, 128, -1, {4096 * 256, 8192 * 256}, 256, 0}};

std::vector<uint16_t> random_block(uint32_t seed) {
  std::vector<uint16_t> block(kPeriod);
  std::minstd_rand random(seed);
  for (uint16_t& element : block) {
    // bf16: a random sign and fraction, 1/8 to 1.
    element =
        static_cast<uint16_t>((random() % 2) << 15 | (124 + random() % 3) << 7 | random() % 128);
  }
  return block;
}

tessera_tensor contiguous(int dtype, int64_t b, int64_t s, int64_t h, int64_t d) {
  return {dtype, 0, {b, s, h, d}, {s * h * d, h * d, d, 1}};
}

double as_number(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return static_cast<double>(value);
}

class LargeProblem {
 public:
  LargeProblem(const Large& shape, const std::string& backend, int pass)
      : shape_(shape), backend_(backend), backward_(pass == TESSERA_BACKWARD) {
    size_t available = 0, total = 0;
    require(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    const size_t needed = static_cast<size_t>(shape.elements()) * (backward_ ? 22 : 9);
    if (available < needed) throw Skipped(text("needs %zu GiB", needed >> 30));
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) allocate(index);
    lse_ = std::make_unique<DeviceArray>(static_cast<size_t>(shape.b * shape.h * shape.s * 4));
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) fill(index);
  }

  std::string run() {
    compute(TESSERA_FORWARD);
    double worst = 0;
    if (backward_) {
      for (const int index : {TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) allocate(index);
      fill(TESSERA_DO);
      compute(TESSERA_BACKWARD);
    }
    for (const int64_t row : shape_.row_of_slice) worst = std::max(worst, check_slice(row));
    return text("%s, slices within %.2g of the largest", ran_.c_str(), worst);
  }

 private:
  void allocate(int index) {
    array_[index] = std::make_unique<DeviceArray>(static_cast<size_t>(shape_.elements() * 2));
  }

  void fill(int index) {
    block_[index] = random_block(static_cast<uint32_t>(index + 1));
    char* to = array_[index]->data();
    const size_t bytes = array_[index]->bytes();
    size_t done = kPeriod * 2;
    require(cudaMemcpy(to, block_[index].data(), done, cudaMemcpyHostToDevice), "cudaMemcpy");
    while (done < bytes) {  // a whole number of periods is there
      const size_t more = std::min(done, bytes - done);
      require(cudaMemcpy(to + done, to, more, cudaMemcpyDeviceToDevice), "cudaMemcpy");
      done += more;
    }
  }

  tessera_problem problem_of(int pass, int64_t b, int64_t s, const std::string& backend) const {
    tessera_problem p{};
    p.struct_size = sizeof p;
    p.pass = pass;
    p.align = TESSERA_ALIGN_TOP_LEFT;
    if (shape_.window_left >= 0) {
      p.flags = TESSERA_CAUSAL | TESSERA_WINDOW;
      p.window_left = shape_.window_left;
      p.window_right = -1;
    }
    std::strncpy(p.backend, backend.c_str(), sizeof p.backend - 1);
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) {
      p.tensor[index] = contiguous(TESSERA_BF16, b, s, shape_.h, shape_.d);
    }
    p.tensor[TESSERA_LSE] = {TESSERA_FP32, 0, {b, shape_.h, s, 1}, {shape_.h * s, s, 1, 1}};
    if (pass == TESSERA_BACKWARD) {
      for (const int index : {TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
        p.tensor[index] = p.tensor[TESSERA_Q];
      }
    }
    return p;
  }

  void compute(int pass) {
    const tessera_problem p = problem_of(pass, shape_.b, shape_.s, backend_);
    tessera_info info{};
    info.struct_size = sizeof info;
    tessera_error error{sizeof error, 0, {}};
    const int32_t code = tessera_prepare(&p, &kDevice, 0, &info, &error);
    if (code == TESSERA_REFUSED) throw Refused(error.message);
    require(code == TESSERA_OK, error.message);
    ran_ = info.backend;
    const DeviceArray workspace(static_cast<size_t>(info.workspace_bytes));
    tessera_buffers buffers{};
    buffers.struct_size = sizeof buffers;
    buffers.workspace = workspace.data();
    buffers.workspace_bytes = info.workspace_bytes;
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      if (array_[i]) buffers.data[i] = array_[i]->data();
    }
    buffers.data[TESSERA_LSE] = lse_->data();
    require(tessera_run(&p, &kDevice, &buffers, &error) == TESSERA_OK, error.message);
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    workspace.check_guards("the workspace");
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      if (array_[i]) array_[i]->check_guards(text("tensor %d", i).c_str());
    }
  }

  // The slice's rows as a problem of their own on the CPU; answers the largest error, relative.
  double check_slice(int64_t row) const {
    const int64_t rows = shape_.rows, row_elements = shape_.h * shape_.d;
    const size_t count = static_cast<size_t>(rows * row_elements);
    const auto from_device = [&](int index) {
      std::vector<uint16_t> slice(count);
      require(cudaMemcpy(slice.data(), array_[index]->data() + row * row_elements * 2, count * 2,
                         cudaMemcpyDeviceToHost),
              "cudaMemcpy");
      return slice;
    };
    tessera_buffers buffers{};
    buffers.struct_size = sizeof buffers;
    std::vector<uint16_t> host[TESSERA_NUM_TENSORS];
    const int pass = backward_ ? TESSERA_BACKWARD : TESSERA_FORWARD;
    const tessera_problem p = problem_of(pass, 1, rows, "reference");
    for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
      if (p.tensor[index].dtype != TESSERA_BF16) continue;
      std::vector<uint16_t>& slice = host[index];
      slice.resize(count);
      if (!block_[index].empty()) {
        for (size_t i = 0; i < count; ++i) {
          slice[i] = block_[index][(static_cast<size_t>(row * row_elements) + i) % kPeriod];
        }
      } else if (backward_ && index == TESSERA_O) {
        slice = from_device(index);
      }
      buffers.data[index] = slice.data();
    }
    std::vector<float> lse(static_cast<size_t>(shape_.h * rows));
    for (int64_t h = 0; backward_ && h < shape_.h; ++h) {
      const int64_t at = (row / shape_.s * shape_.h + h) * shape_.s + row % shape_.s;
      require(cudaMemcpy(&lse[static_cast<size_t>(h * rows)], lse_->data() + at * 4,
                         static_cast<size_t>(rows) * 4, cudaMemcpyDeviceToHost),
              "cudaMemcpy");
    }
    buffers.data[TESSERA_LSE] = lse.data();
    const tessera_device cpu{TESSERA_CPU, 0, 0, 0};
    tessera_info info{};
    info.struct_size = sizeof info;
    tessera_error error{sizeof error, 0, {}};
    require(tessera_prepare(&p, &cpu, 0, &info, &error) == TESSERA_OK, error.message);
    std::vector<char> workspace(static_cast<size_t>(info.workspace_bytes) + 64);
    buffers.workspace =
        workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64);
    buffers.workspace_bytes = info.workspace_bytes;
    require(tessera_run(&p, &cpu, &buffers, &error) == TESSERA_OK, error.message);

    double worst = 0;
    const std::vector<int> outputs = backward_
                                         ? std::vector<int>{TESSERA_DQ, TESSERA_DK, TESSERA_DV}
                                         : std::vector<int>{TESSERA_O};
    for (const int index : outputs) {
      const std::vector<uint16_t> found = from_device(index);
      double largest = 0, error_here = 0;
      for (int64_t i = shape_.margin * row_elements; i < (rows - shape_.margin) * row_elements;
           ++i) {
        const double expected = as_number(host[index][static_cast<size_t>(i)]);
        const double difference = std::abs(as_number(found[static_cast<size_t>(i)]) - expected);
        require(std::isfinite(difference), text("tensor %d: not finite", index));
        largest = std::max(largest, std::abs(expected));
        error_here = std::max(error_here, difference);
      }
      const double relative = error_here / largest;
      require(relative < 1. / 64,
              text("tensor %d, rows from %lld: off by %g of the largest element", index,
                   static_cast<long long>(row), relative));
      worst = std::max(worst, relative);
    }
    return worst;
  }

  const Large& shape_;
  std::string backend_, ran_;
  bool backward_;
  std::unique_ptr<DeviceArray> array_[TESSERA_NUM_TENSORS], lse_;
  std::vector<uint16_t> block_[TESSERA_NUM_TENSORS];
};

}  // namespace

void large() {
  std::vector<std::string> choices{""};
  if (backends().size() > 1) choices.push_back("cuda_sm80");
  for (const std::string& backend : choices) {
    for (const Large& shape : kShapes) {
      for (const int pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
        check("large", text("%s, %s", shape.name, pass == TESSERA_FORWARD ? "fwd" : "bwd"),
              [&] { return LargeProblem(shape, backend, pass).run(); });
      }
    }
  }
}

}  // namespace tessera_test
