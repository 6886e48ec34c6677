// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>

#include "core/problems.h"
#include "core/storage.h"

namespace tessera {
namespace {

using testing::dense;
using testing::Storage;

constexpr Device kCpu{};
constexpr Device kCuda{TESSERA_CUDA, 0, 90, 0};

void expect_invalid(const Problem& p, const Storage& s, const char* expected,
                    const Device& device = kCpu) {
  const Status status = validate(normalised(p), s.buffers, device);
  EXPECT_EQ(status.code(), TESSERA_INVALID) << "accepted: " << expected;
  EXPECT_NE(status.message().find(expected), std::string::npos)
      << "expected: " << expected << "\n     got: " << status.message();
}

void expect_valid(const Problem& p, const Storage& s, const Device& device = kCpu) {
  const Status status = validate(normalised(p), s.buffers, device);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(ValidateBuffers, LegalOnes) {
  for (const Problem& p :
       {testing::forward(), testing::backward(), testing::packed(), testing::paged()}) {
    expect_valid(p, Storage(p));
  }
}

TEST(ValidateBuffers, Scalars) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  Problem p = testing::forward();
  p.flags |= TESSERA_SOFTMAX_SCALE | TESSERA_SOFTCAP | TESSERA_DROPOUT;
  p.tensor[TESSERA_RNG_STATE] = dense(TESSERA_INT64, {2});
  Storage s(p);
  s.buffers.softcap = 30;
  s.buffers.dropout_p = 0.1;
  expect_valid(p, s);  // a scale of 0 is legal
  for (const double scale : {nan, infinity, -infinity, -0.5}) {
    s.buffers.softmax_scale = scale;
    expect_invalid(p, s, "softmax_scale=");
  }
  s.buffers.softmax_scale = 1;
  for (const double softcap : {nan, infinity, 0.0, -1.0}) {
    s.buffers.softcap = softcap;
    expect_invalid(p, s, "softcap=");
  }
  s.buffers.softcap = 30;
  for (const double dropout_p : {nan, infinity, 0.0, 1.0, -0.1, 1e-9, 0.999999}) {
    s.buffers.dropout_p = dropout_p;
    expect_invalid(p, s, "dropout_p=");
  }
  p.flags = 0;
  expect_valid(p, s);  // scalars without their flags are not read
  s.buffers.num_threads = -1;
  expect_invalid(p, s, "num_threads=-1");
  s.buffers.num_threads = 0;
  s.buffers.reserved[1] = 9;
  expect_invalid(p, s, "buffers.reserved=9");
}

TEST(ValidateBuffers, Pointers) {
  const Problem p = testing::forward();
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O, TESSERA_LSE}) {
    Storage s(p);
    s.buffers.data[i] = nullptr;
    expect_invalid(p, s, (std::string(tensor_rule(i).name) + ".data=NULL").c_str());
    s = Storage(p);
    s.buffers.data[i] = static_cast<char*>(s.buffers.data[i]) + 2;
    expect_invalid(p, s, "must be a multiple of the element's 4 bytes");
  }
  Problem empty = testing::forward();
  for (const int i : {TESSERA_K, TESSERA_V}) empty.tensor[i].extent[1] = 0;
  Storage s(empty);
  s.buffers.data[TESSERA_K] = s.buffers.data[TESSERA_V] = nullptr;
  expect_valid(empty, s);
}

TEST(ValidateBuffers, SameLengthsAreOneArray) {
  Problem p = testing::packed();
  p.flags |= TESSERA_SAME_LENGTHS;
  Storage s(p);
  expect_invalid(p, s, "they are one array");
  s.buffers.data[TESSERA_CU_SEQLENS_K] = s.buffers.data[TESSERA_CU_SEQLENS_Q];
  expect_valid(p, s);
}

TEST(ValidateBuffers, Overlap) {
  const Problem p = testing::backward();
  Storage s(p);
  s.buffers.data[TESSERA_DQ] = s.buffers.data[TESSERA_Q];
  expect_invalid(p, s, "dq.data=");
  expect_invalid(p, s, "shares memory with q;");
  s = Storage(p);
  s.buffers.data[TESSERA_DV] = s.buffers.data[TESSERA_DK];
  expect_invalid(p, s, "dk.data=");
  s = Storage(p);
  s.buffers.data[TESSERA_K] = s.buffers.data[TESSERA_V];  // inputs may share
  expect_valid(p, s);
  s = Storage(p);
  s.buffers.workspace = s.buffers.data[TESSERA_DQ];
  s.buffers.workspace_bytes = 8;
  expect_invalid(p, s, "shares memory with dq");
}

TEST(ValidateBuffers, InterleavedGradientsAreLegal) {
  Problem p = testing::backward();
  const int64_t b = 2, s = 6, h = 4, d = 8;
  const Tensor part{TESSERA_FP32, 0, {b, s, h, d}, {s * 3 * h * d, 3 * h * d, d, 1}};
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
    p.tensor[i] = part;
  }
  p.tensor[TESSERA_O] = p.tensor[TESSERA_DO] = dense(TESSERA_FP32, {b, s, h, d});
  p.tensor[TESSERA_LSE] = dense(TESSERA_FP32, {b, h, s});
  ASSERT_TRUE(validate(p).ok()) << validate(p).message();
  Storage storage(p);
  std::vector<float> qkv(static_cast<size_t>(b * s * 3 * h * d)), gradient(qkv.size());
  for (int i = 0; i < 3; ++i) {
    storage.buffers.data[TESSERA_Q + i] = qkv.data() + i * h * d;
    storage.buffers.data[TESSERA_DQ + i] = gradient.data() + i * h * d;
  }
  expect_valid(p, storage);
  storage.buffers.data[TESSERA_DK] = gradient.data() + h * d - 1;  // the last element of dq
  expect_invalid(p, storage, "shares memory with dk");
}

TEST(ValidateBuffers, Lengths) {
  Problem p = testing::forward();
  p.tensor[TESSERA_SEQLENS_Q] = dense(TESSERA_INT32, {2});
  p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT64, {2});
  Storage s(p);
  s.set(TESSERA_SEQLENS_Q, 1, 6);
  expect_invalid(p, s, "seqlens_q[1]=6: must be between 0 and the extent, 5");
  expect_valid(p, s, kCuda);  // values on a GPU are not read
  s.set(TESSERA_SEQLENS_Q, 1, 0);
  s.set(TESSERA_SEQLENS_K, 0, -1);
  expect_invalid(p, s, "seqlens_k[0]=-1");
}

TEST(ValidateBuffers, PackedOffsets) {
  const Problem p = testing::packed();
  const auto with = [&](double a, double b, double c) {
    Storage s(p);
    s.set(TESSERA_CU_SEQLENS_Q, 0, a);
    s.set(TESSERA_CU_SEQLENS_Q, 1, b);
    s.set(TESSERA_CU_SEQLENS_Q, 2, c);
    return s;
  };
  expect_valid(p, with(0, 0, 0));
  expect_valid(p, with(0, 9, 9));
  expect_invalid(p, with(1, 4, 9), "cu_seqlens_q[0]=1: must be 0");
  expect_invalid(p, with(0, 5, 4), "cu_seqlens_q[2]=4: must not be below cu_seqlens_q[1]=5");
  expect_invalid(p, with(0, 5, 10), "cu_seqlens_q[2]=10: must be at most the 9 tokens");
  expect_invalid(p, with(0, -1, 9), "cu_seqlens_q[1]=-1");
  Problem limited = p;
  limited.flags |= TESSERA_MAX_SEQLEN_Q;
  limited.max_seqlen_q = 5;
  expect_valid(limited, with(0, 4, 9));
  expect_invalid(limited, with(0, 3, 9), "max_seqlen_q=5: must be at least every length");
}

TEST(ValidateBuffers, StoredOffsets) {
  Problem p = testing::packed();
  p.tensor[TESSERA_CU_SEQLENS_K_PADDED] = dense(TESSERA_INT64, {3});
  const auto with = [&](double a, double b, double c) {
    Storage s(p);
    s.set(TESSERA_CU_SEQLENS_K, 1, 3);
    s.set(TESSERA_CU_SEQLENS_K, 2, 7);
    s.set(TESSERA_CU_SEQLENS_K_PADDED, 0, a);
    s.set(TESSERA_CU_SEQLENS_K_PADDED, 1, b);
    s.set(TESSERA_CU_SEQLENS_K_PADDED, 2, c);
    return s;
  };
  expect_valid(p, with(0, 3, 7));
  expect_valid(p, with(2, 6, 11));  // need not begin at 0
  expect_invalid(p, with(-1, 3, 7), "cu_seqlens_k_padded[0]=-1");
  expect_invalid(p, with(0, 2, 7), "cu_seqlens_k_padded[1]=2: must be at least 3");
  expect_invalid(p, with(0, 4, 7), "cu_seqlens_k_padded[2]=7: must be at least 8");
  expect_invalid(p, with(0, 4, 12), "cu_seqlens_k_padded[2]=12: must be at most the 11 tokens");
}

TEST(ValidateBuffers, Pages) {
  Problem p = testing::paged();
  p.tensor[TESSERA_V].extent[0] = 5;  // a smaller pool behind the same table
  Storage s(p);
  s.set(TESSERA_PAGE_TABLE_K, 5, 1);
  expect_valid(p, s);
  s.set(TESSERA_PAGE_TABLE_K, 4, 5);
  expect_invalid(p, s, "page_table[1, 1]=5: must be a page of v, between 0 and 4");
  s.set(TESSERA_SEQLENS_K, 1, 4);  // one page: the entry behind it is never read
  expect_valid(p, s);
  s.set(TESSERA_PAGE_TABLE_K, 3, -1);
  expect_invalid(p, s, "page_table[1, 0]=-1");
  s.set(TESSERA_SEQLENS_K, 1, 0);
  expect_valid(p, s);
  s.set(TESSERA_SEQLENS_K, 0, 13);
  expect_invalid(p, s, "seqlens_k[0]=13: must be between 0 and the extent, 12");
}

// Entries of pages that the band hides from every query may be anything.
TEST(ValidateBuffers, PagesBehindTheBand) {
  Problem p = testing::paged();  // 5 queries, two tables of three pages of 4 keys
  p.flags |= TESSERA_WINDOW;
  p.window_left = 1, p.window_right = 0;
  p.align = TESSERA_ALIGN_GIVEN;
  for (const int index : {TESSERA_Q_START, TESSERA_K_START, TESSERA_SHIFT, TESSERA_SEQLENS_Q}) {
    p.tensor[index] = testing::dense(TESSERA_INT32, {2});
  }
  Storage s(p);
  for (const int64_t n : {0, 1}) {
    s.set(TESSERA_SEQLENS_Q, n, 2);
    s.set(TESSERA_SEQLENS_K, n, 12);
    s.set(TESSERA_SHIFT, n, 5);  // rows 0 and 1 see keys 4 to 6
    s.set(TESSERA_Q_START, n, 0), s.set(TESSERA_K_START, n, 0);
  }
  for (const int64_t entry : {0, 2, 3, 5}) s.set(TESSERA_PAGE_TABLE_K, entry, INT32_MAX);
  for (const int64_t entry : {1, 4}) s.set(TESSERA_PAGE_TABLE_K, entry, 0);
  expect_valid(p, s);
  s.set(TESSERA_SHIFT, 1, 4);  // keys 3 to 5
  expect_invalid(p, s, "page_table[1, 0]=2147483647: must be a page of k, between 0 and 5");
  s.set(TESSERA_Q_START, 1, 9), s.set(TESSERA_K_START, 1, 7);  // keys 5 to 7
  expect_valid(p, s);
  s.set(TESSERA_Q_START, 1, 10);  // keys 6 to 8
  expect_invalid(p, s, "page_table[1, 2]=2147483647");
  s.set(TESSERA_SEQLENS_Q, 1, 0);
  s.set(TESSERA_PAGE_TABLE_K, 4, -1);
  expect_valid(p, s);
}

TEST(ValidateBuffers, WindowsOfSequences) {
  Problem p = testing::paged();
  p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
  p.tensor[TESSERA_WINDOWS] = testing::dense(TESSERA_INT32, {2, 2});
  Storage s(p);
  for (const int64_t n : {0, 1}) s.set(TESSERA_SEQLENS_K, n, 12);
  for (const int64_t entry : {0, 1, 2, 3, 4, 5}) s.set(TESSERA_PAGE_TABLE_K, entry, 0);
  for (const int64_t entry : {0, 1, 2}) s.set(TESSERA_WINDOWS, entry, -1);
  s.set(TESSERA_WINDOWS, 3, 0);
  expect_valid(p, s);
  s.set(TESSERA_PAGE_TABLE_K, 3, -1);  // the first page of the second sequence
  expect_invalid(p, s, "page_table[1, 0]=-1");
  s.set(TESSERA_WINDOWS, 2, 1);  // of keys 7 to 11: from 6 on
  expect_valid(p, s);
  s.set(TESSERA_WINDOWS, 1, -2);
  expect_invalid(p, s,
                 "windows[0, 1]=-2: a side must be -1, which is no bound, or between 0 and 2^60");
}

TEST(ValidateBuffers, SinksAndSlopesAreFinite) {
  Problem p = testing::forward(TESSERA_BF16);
  p.align = TESSERA_ALIGN_TOP_LEFT;
  p.tensor[TESSERA_SINK] = dense(TESSERA_BF16, {4});
  p.tensor[TESSERA_ALIBI_SLOPES] = dense(TESSERA_FP32, {2, 4});
  Storage s(p);
  expect_valid(p, s);
  s.set(TESSERA_ALIBI_SLOPES, 6, std::nan(""));
  expect_invalid(p, s, "alibi_slopes[2]=nan");
  s.set(TESSERA_ALIBI_SLOPES, 6, 0);
  s.set(TESSERA_SINK, 3, -std::numeric_limits<double>::infinity());
  expect_invalid(p, s, "sink[3]=-inf");
}

TEST(ValidateBuffers, AddressesDoNotWrap) {
  Problem p = testing::forward();
  Storage s(p);
  p.tensor[TESSERA_K].stride[0] = (int64_t{1} << 61) - 1024;
  ASSERT_TRUE(validate(p).ok()) << validate(p).message();
  s.buffers.data[TESSERA_K] = reinterpret_cast<void*>(uintptr_t{1} << 62);
  expect_invalid(p, s, "leaves the address space", kCuda);
}

}  // namespace
}  // namespace tessera
