// SPDX-License-Identifier: Apache-2.0
// What docs/semantics.md promises bit for bit on the CPU: repetition, threads, the caller's
// threads, layouts, packed = padded, alone = in the batch.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "conformance/conformance_case.h"
#include "conformance/made_case.h"

namespace tessera {
namespace {

// Every output, dense; NaN counts as a difference, which no right result has.
std::vector<double> outputs(ConformanceCase& c, int num_threads) {
  const Status status = c.run("cpu", Device{}, num_threads);
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<double> all;
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    const Role role = tensor_rule(index).role;
    const bool output =
        role == (is_backward(c.problem()) ? Role::kBackwardOutput : Role::kForwardOutput);
    if (!output || !given(c.problem(), index)) continue;
    const auto values = reference::load_dense(c.problem().tensor[index], tensor_rule(index).rank,
                                              c.buffers().data[index]);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// One case of every path: dense, window, decode, packed, pages, all gradients.
const char* const kCases[] = {
    "fwd fp32 b=2 s=129 hq=4 hk=2 d=64 causal",
    "fwd bf16 b=1 s=257 h=3 d=80 window=70,3 softcap=20 max_logit",
    "fwd bf16 b=3 sq=1 sk=600 hq=8 hk=2 d=128 lens_k=random:4",
    "fwd fp16 b=8 sq=4 sk=900 hq=16 hk=2 d=64 page=16 lens_k=random:4 sink=learnable",
    "fwd fp32 b=4 s=257 h=4 d=65 layout=thd lens=random:2 gaps=3 dropout=0.2 seed=5",
    "bwd fp32 b=2 s=129 hq=6 hk=2 d=64 causal dlse",
    "bwd bf16 b=2 s=200 hq=4 hk=1 d=72 bias=post/q sink=learnable alibi "
    "grads=dbias,dsink,dalibi_slopes",
    "bwd fp16 b=3 s=65 h=2 d=40 layout=thd lens=random:2 segments=3",
    "bwd fp32 b=3 sq=33 sk=65 hq=2 hk=1 d=32 page=7 lens_k=random:8",
};

class Exact : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Cases, Exact, testing::ValuesIn(kCases));

TEST_P(Exact, RepeatsAndForgetsTheNumberOfThreads) {
  auto c = make(GetParam());
  const std::vector<double> once = outputs(*c, 1);
  for (int threads : {1, 2, 3, 8}) EXPECT_EQ(outputs(*c, threads), once) << threads << " threads";
}

TEST_P(Exact, RunsOnTheCallersThreads) {
  auto c = make(GetParam());
  const std::vector<double> once = outputs(*c, 1);
  int calls = 0;
  c->buffers().parallel_context = &calls;
  // Backwards and on a new thread each: no order may matter.
  c->buffers().parallel_for = [](void* context, int64_t n, void (*body)(void*, int64_t),
                                 void* arg) {
    ++*static_cast<int*>(context);
    for (int64_t i = n - 1; i >= 0; --i) std::thread(body, arg, i).join();
  };
  EXPECT_EQ(outputs(*c, 4), once);
  // Small problems stay on the calling thread; this one does not.
  if (GetParam() == kCases[0]) {
    EXPECT_GT(calls, 0);
  }
}

TEST(Exact, LayoutsAgree) {
  for (const char* pass : {"fwd", "bwd"}) {
    for (const char* dtype : {"fp32", "bf16", "fp16"}) {
      const std::string sizes =
          std::string(pass) + " " + dtype + " b=2 s=70 h=3 d=40 causal lens=70,33 ";
      auto plain = make(sizes);
      const std::vector<double> once = outputs(*plain, 2);
      for (const char* layout :
           {"layout=sbhd", "layout=bhsd", "layout=bs3hd", "layout=sbh3d", "layout=bshd_bsh2d",
            "layout=bhsd,sbhd lens_q=70,33 lens_k=70,33 align=bottom_right", "strided",
            "interleaved strided"}) {
        const bool own_lens = std::strstr(layout, "lens_q") != nullptr;
        std::string text = sizes;
        if (own_lens) text.erase(text.find("lens=70,33"));
        auto other = make(text + layout);
        EXPECT_EQ(outputs(*other, 2), once) << text << layout;
      }
    }
  }
}

// Copies rows of one case's inputs into another's, so that both ask the same of one sequence.
void copy_rows(ConformanceCase& from, int64_t batch, int64_t first, ConformanceCase& to,
               int64_t to_batch, int64_t to_first, int64_t rows) {
  for (int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O, TESSERA_DO}) {
    const Tensor &a = from.problem().tensor[index], &b = to.problem().tensor[index];
    if (a.dtype == TESSERA_NONE || (index == TESSERA_O && !is_backward(to.problem()))) continue;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < a.extent[2]; ++h) {
        const auto* source = static_cast<const char*>(from.buffers().data[index]);
        auto* target = static_cast<char*>(to.buffers().data[index]);
        std::memcpy(target + offset_of(b, to_batch, to_first + i, h) * size_of(b.dtype),
                    source + offset_of(a, batch, first + i, h) * size_of(a.dtype),
                    a.extent[3] * size_of(a.dtype));
      }
    }
  }
  if (!is_backward(to.problem())) return;
  const Tensor &a = from.problem().tensor[TESSERA_LSE], &b = to.problem().tensor[TESSERA_LSE];
  for (int64_t h = 0; h < a.extent[1]; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      static_cast<float*>(to.buffers().data[TESSERA_LSE])[offset_of(b, to_batch, h, to_first + i)] =
          static_cast<const float*>(
              from.buffers().data[TESSERA_LSE])[offset_of(a, batch, h, first + i)];
    }
  }
}

// Rows of a 4-axis output, bitwise.
void expect_rows(ConformanceCase& a, int64_t batch, int64_t first, ConformanceCase& b,
                 int64_t b_batch, int64_t b_first, int64_t rows, int index) {
  const Tensor &ta = a.problem().tensor[index], &tb = b.problem().tensor[index];
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < ta.extent[2]; ++h) {
      EXPECT_EQ(std::memcmp(static_cast<char*>(a.buffers().data[index]) +
                                offset_of(ta, batch, first + i, h) * size_of(ta.dtype),
                            static_cast<char*>(b.buffers().data[index]) +
                                offset_of(tb, b_batch, b_first + i, h) * size_of(tb.dtype),
                            ta.extent[3] * size_of(ta.dtype)),
                0)
          << tensor_rule(index).name << " row " << i << " head " << h;
    }
  }
}

TEST(Exact, PackedIsPadded) {
  const int64_t lens[] = {40, 0, 70};
  for (const char* dtype : {"fp32", "bf16"}) {
    for (const char* pass : {"fwd", "bwd"}) {
      const std::string sizes = std::string(pass) + " " + dtype +
                                " b=3 s=70 hq=4 hk=2 d=64 lens=40,0,70 dropout=0.2 seed=3 ";
      auto padded = make(sizes), packed = make(sizes + "layout=thd gaps=5");
      for (int64_t n = 0; n < 3; ++n) {
        copy_rows(*padded, n, 0, *packed, 0, packed->geometry().start_q[n], lens[n]);
      }
      outputs(*padded, 2), outputs(*packed, 2);
      for (int64_t n = 0; n < 3; ++n) {
        for (int index : {TESSERA_DQ, TESSERA_DK, TESSERA_DV, TESSERA_O}) {
          if (!given(padded->problem(), index) || (index == TESSERA_O) != (pass[0] == 'f'))
            continue;
          expect_rows(*padded, n, 0, *packed, 0, packed->geometry().start_q[n], lens[n], index);
        }
      }
    }
  }
}

TEST(Exact, AloneIsInTheBatch) {
  for (const char* sizes : {"s=130 hq=4 hk=2 d=64 causal", "sq=1 sk=700 hq=8 hk=2 d=64",
                            "sq=5 sk=700 hq=8 hk=8 d=80 causal align=bottom_right"}) {
    for (const char* dtype : {"fp32", "bf16"}) {
      const std::string head = std::string("fwd ") + dtype,
                        tail = std::string(sizes) + " batch_invariant";
      auto batch = make(head + " b=5 " + tail), alone = make(head + " b=1 " + tail);
      for (int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
        const Tensor& t = batch->problem().tensor[index];
        const int64_t bytes = t.stride[0] * size_of(t.dtype);
        std::memcpy(alone->buffers().data[index],
                    static_cast<char*>(batch->buffers().data[index]) + 3 * bytes,
                    static_cast<size_t>(bytes));
      }
      outputs(*batch, 3), outputs(*alone, 1);
      expect_rows(*batch, 3, 0, *alone, 0, 0, alone->problem().tensor[TESSERA_Q].extent[1],
                  TESSERA_O);
    }
  }
}

}  // namespace
}  // namespace tessera
