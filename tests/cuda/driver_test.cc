// SPDX-License-Identifier: Apache-2.0
// A call on the host leaves the CUDA driver alone, whatever backends the build has: a process that
// has started it loses CUDA in the children that it forks. A stand-in for libcuda.so.1 counts.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tessera.h"

extern "C" int driver_starts;  // of the stand-in

namespace {

constexpr tessera_device kHost{TESSERA_CPU, 0, 0, 0}, kGpu{TESSERA_CUDA, 0, 0, 0};
constexpr int64_t kB = 2, kS = 40, kH = 3, kD = 16, kTokens = kB * kS * kH;

tessera_tensor tensor(int32_t dtype, std::vector<int64_t> extents) {
  tessera_tensor t{};
  t.dtype = dtype;
  int64_t stride = 1;
  for (size_t i = extents.size(); i-- > 0;) {
    t.extent[i] = extents[i];
    t.stride[i] = stride;
    stride *= extents[i];
  }
  return t;
}

// Both passes of causal attention, with all that is in memory.
struct Attention {
  tessera_problem problem{};
  std::vector<std::vector<float>> memory;
  tessera_buffers buffers{};

  explicit Attention(int pass) {
    problem.struct_size = sizeof problem;
    problem.pass = pass;
    problem.flags = TESSERA_CAUSAL;
    add(TESSERA_LSE, {kB, kH, kS, 1});
    for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) add(i, {kB, kS, kH, kD});
    if (pass == TESSERA_FORWARD) return;
    for (const int i : {TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) add(i, {kB, kS, kH, kD});
  }
  void add(int index, std::vector<int64_t> extents) {
    problem.tensor[index] = tensor(TESSERA_FP32, extents);
    memory.emplace_back(kTokens * kD, 0.5f);
    buffers.data[index] = memory.back().data();
  }
  tessera_error run() {
    tessera_error error{};
    error.struct_size = sizeof error;
    tessera_info info{};
    info.struct_size = sizeof info;
    if (tessera_prepare(&problem, &kHost, 0, &info, &error) != TESSERA_OK) return error;
    std::vector<char> workspace(static_cast<size_t>(info.workspace_bytes) + 64);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    buffers.struct_size = sizeof buffers;
    buffers.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
    buffers.workspace_bytes = info.workspace_bytes;
    tessera_run(&problem, &kHost, &buffers, &error);
    return error;
  }
};

TEST(Driver, IsLeftAloneByAttention) {
  for (const int pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    EXPECT_STREQ(Attention(pass).run().message, "");
    EXPECT_EQ(driver_starts, 0);
  }
}

TEST(Driver, IsLeftAloneByRefusals) {
  Attention wide(TESSERA_FORWARD);  // fp64 is the reference's alone
  for (tessera_tensor& t : wide.problem.tensor) {
    if (t.dtype == TESSERA_FP32) t.dtype = TESSERA_FP64;
  }
  EXPECT_EQ(wide.run().code, TESSERA_REFUSED);
  EXPECT_EQ(driver_starts, 0);
}

TEST(Driver, IsLeftAloneByMergesAndMasks) {
  const tessera_tensor o = tensor(TESSERA_FP32, {kB, kS, kH, kD}),
                       lse = tensor(TESSERA_FP32, {kB, kH, kS, 1});
  std::vector<float> part(kTokens * kD, 1), sums(kTokens), o_out(kTokens * kD), lse_out(kTokens);
  const tessera_tensor o_parts[] = {o, o}, lse_parts[] = {lse, lse};
  const void *o_data[] = {part.data(), part.data()}, *lse_data[] = {sums.data(), sums.data()};
  EXPECT_EQ(tessera_merge(2, TESSERA_BSHD, o_parts, o_data, lse_parts, lse_data, &o, o_out.data(),
                          &lse, lse_out.data(), &kHost, nullptr, nullptr),
            TESSERA_OK);
  EXPECT_EQ(driver_starts, 0);
  const int64_t state[] = {1, 2};
  std::vector<uint8_t> keep(kB * kH * kS * kS);
  EXPECT_EQ(tessera_dropout_mask(kB, kH, kS, kS, 0.5, state, keep.data(), &kHost, nullptr, nullptr),
            TESSERA_OK);
  EXPECT_EQ(driver_starts, 0);
}

TEST(Driver, IsLeftAloneByCaches) {
  std::vector<float> x(kTokens * kD, 1), table(kS * kD / 2, 1), cache(2 * kTokens * kD);
  tessera_rotate_args rotate{};
  rotate.struct_size = sizeof rotate;
  for (const int i : {TESSERA_ROTATE_X, TESSERA_ROTATE_Y}) {
    rotate.tensor[i] = tensor(TESSERA_FP32, {kB, kS, kH, kD});
    rotate.data[i] = x.data();
  }
  for (const int i : {TESSERA_ROTATE_COS, TESSERA_ROTATE_SIN}) {
    rotate.tensor[i] = tensor(TESSERA_FP32, {kS, kD / 2});
    rotate.data[i] = table.data();
  }
  EXPECT_EQ(tessera_rotate(&rotate, &kHost, nullptr, nullptr), TESSERA_OK);
  EXPECT_EQ(driver_starts, 0);
  tessera_append_args append{};
  append.struct_size = sizeof append;
  append.tensor[TESSERA_APPEND_K] = tensor(TESSERA_FP32, {kB, kS, kH, kD});
  append.data[TESSERA_APPEND_K] = x.data();
  append.tensor[TESSERA_APPEND_K_CACHE] = tensor(TESSERA_FP32, {kB, 2 * kS, kH, kD});
  append.data[TESSERA_APPEND_K_CACHE] = cache.data();
  std::vector<int32_t> lengths(kB);
  append.tensor[TESSERA_APPEND_SEQLENS] = tensor(TESSERA_INT32, {kB});
  append.data[TESSERA_APPEND_SEQLENS] = lengths.data();
  EXPECT_EQ(tessera_append(&append, &kHost, nullptr, nullptr), TESSERA_OK);
  EXPECT_EQ(driver_starts, 0);
}

// That the count can rise; the last, for the driver is asked once in a process.
TEST(Driver, StartsForCallsOnAGpu) {
  const Attention on_gpu(TESSERA_FORWARD);
  tessera_error error{};
  error.struct_size = sizeof error;
  EXPECT_EQ(tessera_prepare(&on_gpu.problem, &kGpu, 0, nullptr, &error), TESSERA_REFUSED);
  EXPECT_NE(std::strstr(error.message, "no CUDA device"), nullptr) << error.message;
  EXPECT_GT(driver_starts, 0);
}

}  // namespace
