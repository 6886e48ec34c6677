// SPDX-License-Identifier: Apache-2.0
// The planners of the CUDA backends on a GPU that is only imagined, through the C
// header and with the sizes of sizes_test.cc: the workspace holds what a call needs, every grid and
// tensor map is one that CUDA takes, and none of it takes long.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "cpu_time.h"
#include "cuda/imagined/runtime.h"
#include "random_problem.h"

namespace {

struct Error : tessera_error {
  Error() : tessera_error{} { struct_size = sizeof(tessera_error); }
};

// Addresses that nobody reads: 2^57 bytes for each tensor, and the last for the workspace.
void* imagined_memory(int i) { return reinterpret_cast<void*>((int64_t{i} + 1) << 57); }

tessera_buffers imagined_buffers(const tessera_problem& p, int64_t workspace_bytes) {
  tessera_buffers b{};
  b.struct_size = sizeof b;
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i)
    if (p.tensor[i].dtype != TESSERA_NONE) b.data[i] = imagined_memory(i);
  b.workspace = imagined_memory(TESSERA_NUM_TENSORS);
  b.workspace_bytes = workspace_bytes;
  b.softcap = 10, b.dropout_p = 0.5;
  return b;
}

std::string text_of(const tessera_problem& p, const tessera_device& device) {
  static std::vector<char> answer(1 << 20);
  const int64_t size = static_cast<int64_t>(answer.size());
  return tessera_explain(&p, nullptr, &device, answer.data(), size, nullptr) < 0 ? ""
                                                                                 : answer.data();
}

class Calls {
 public:
  explicit Calls(const tessera_device& device) : device_(device) { imagined::use(device.ordinal); }

  // Prepared and run; a call that cannot be is one clear error.
  void make(const tessera_problem& p, const Extents& e) {
    Error error;
    tessera_info info{};
    info.struct_size = sizeof info;
    const double start = milliseconds();
    int32_t code = tessera_prepare(&p, &device_, 0, &info, &error);
    double most = milliseconds() - start;
    ASSERT_LT(code, TESSERA_FAILED) << error.message;
    explain(p);
    if (code != TESSERA_OK) return;
    EXPECT_GE(info.workspace_bytes, least_bytes(p, e)) << text_of(p, device_);

    imagined::reset();
    const tessera_buffers b = imagined_buffers(p, info.workspace_bytes);
    const double run = milliseconds();
    code = tessera_run(&p, &device_, &b, &error);
    most = std::max(most, milliseconds() - run);
    EXPECT_LT(code, TESSERA_FAILED) << error.message << text_of(p, device_);
    EXPECT_EQ(imagined::seen().fault, "") << text_of(p, device_);
    // The first call of a kind makes a plan.
    if (prepared_[info.backend]++ > 100) {
      EXPECT_LT(most, kMostMilliseconds) << text_of(p, device_);
    }
    if (code == TESSERA_OK && imagined::seen().launches > 0) ++launched_[info.backend];
  }

  int launched(const char* backend) { return launched_[backend]; }

 private:
  // One in 16 of the problems, legal or refused.
  void explain(const tessera_problem& p) {
    if (++asked_ % 16 != 0) return;
    const double start = milliseconds();
    const std::string text = text_of(p, device_);
    const double took = milliseconds() - start;
    if (asked_ > 100) {
      EXPECT_LT(took, kMostMilliseconds) << text;
    }
  }

  // The backward pass has two floats for each row and head.
  static int64_t least_bytes(const tessera_problem& p, const Extents& e) {
    if (p.pass != TESSERA_BACKWARD) return 0;
    return 8 * p.tensor[TESSERA_Q].extent[0] * e.sq * e.hq;
  }

  tessera_device device_;
  int asked_ = 0;
  std::map<std::string, int> prepared_, launched_;
};

void force(tessera_problem& p, const char* backend) {
  std::strncpy(p.backend, backend, sizeof p.backend - 1);
}

TEST(CudaSizes, NothingWraps) {
  Calls on_a100({TESSERA_CUDA, imagined::kA100, 80, 0});
  RandomProblems problems(20261126, {.rows = 31, .heads = 17, .dims = 9, .in_units = true});
  for (int i = 0; i < 20000; ++i) {
    tessera_problem p;
    if (problems.next(p)) on_a100.make(p, problems.extents);
  }
  EXPECT_GT(on_a100.launched("cuda_sm80"), 2000);

  Calls on_h100({TESSERA_CUDA, imagined::kH100, 90, 0});
  for (int i = 0; i < 40000; ++i) {
    tessera_problem p;
    if (!problems.next(p)) continue;
    if (i % 2) force(p, "cuda_sm90");
    on_h100.make(p, problems.extents);
  }
  EXPECT_GT(on_h100.launched("cuda_sm80"), 1000);
  EXPECT_GT(on_h100.launched("cuda_sm90"), 1000);
}

// The workspace of either pass has the copy first and the kernels' own pieces behind it, and the
// kernels' maps are of the copy.
TEST(CudaSizes, BiasesThatTmaCannotReadAreCopied) {
  Calls calls({TESSERA_CUDA, imagined::kH100, 90, 0});
  const auto bytes_for = [&](int32_t pass, int64_t keys, int64_t row) {
    const Extents e{3, 49, keys, 2, 2, 64, 64};
    tessera_problem p = forward(e, TESSERA_BF16);
    for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      tessera_tensor& t = p.tensor[i];
      t.stride[2] = 64, t.stride[1] = 128, t.stride[0] = 128 * t.extent[1];
    }
    give(p, TESSERA_BIAS, TESSERA_BF16, {3, 2, 49, keys});
    tessera_tensor& bias = p.tensor[TESSERA_BIAS];
    bias.stride[3] = 1, bias.stride[2] = row, bias.stride[1] = 49 * row, bias.stride[0] = 98 * row;
    EXPECT_EQ(describe(p, {TESSERA_O, TESSERA_LSE}, nullptr), TESSERA_OK);
    if (pass == TESSERA_BACKWARD) {
      p.pass = pass;
      EXPECT_EQ(
          describe(p, {TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV, TESSERA_DBIAS}, nullptr),
          TESSERA_OK);
    }
    force(p, "cuda_sm90");
    calls.make(p, e);
    tessera_device device{TESSERA_CUDA, imagined::kH100, 90, 0};
    tessera_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(tessera_prepare(&p, &device, 0, &info, nullptr), TESSERA_OK);
    return info.workspace_bytes;
  };
  for (const int32_t pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    const int64_t aligned = bytes_for(pass, 50, 56);
    EXPECT_EQ(imagined::seen().padded_bytes, 0);
    const int64_t padded = bytes_for(pass, 50, 50);
    EXPECT_EQ(imagined::seen().padded_bytes, 2 * 3 * 2 * 49 * 56);
    EXPECT_EQ(padded, aligned + (imagined::seen().padded_bytes + 255) / 256 * 256);
  }
  EXPECT_EQ(calls.launched("cuda_sm90"), 4);
}

// A batch that only 1 and itself divide.
TEST(CudaSizes, HeadsThatNothingDividesAreOrderedAtOnce) {
  constexpr int64_t kPrime = 16777213;
  Calls calls({TESSERA_CUDA, imagined::kH100, 90, 0});
  for (int repeats = 0; repeats < 110; ++repeats) {
    for (const int64_t keys : {1, 512}) {
      const Extents e{kPrime, 1, keys, 1, 1, 64, 64};
      tessera_problem p = forward(e, TESSERA_BF16);
      for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
        p.tensor[i].stride[0] = 64 * p.tensor[i].extent[1];
        p.tensor[i].stride[1] = p.tensor[i].stride[2] = 64;
      }
      ASSERT_EQ(describe(p, {TESSERA_O, TESSERA_LSE}, nullptr), TESSERA_OK);
      force(p, "cuda_sm90");
      calls.make(p, e);
    }
  }
  EXPECT_EQ(calls.launched("cuda_sm90"), 220);
}

}  // namespace
