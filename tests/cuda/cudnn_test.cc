// SPDX-License-Identifier: Apache-2.0
// The cuDNN backend without a GPU: what becomes of a libcudnn.so.9 that is absent, too old or lacks a
// function, by stand-ins on LD_LIBRARY_PATH, and the rules against those of cuDNN's front end.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "core/case/case.h"
#include "cuda/cudnn/library.h"
#include "cuda/cudnn/rules.h"

namespace tessera::cuda::cudnn {
namespace {

// TESSERA_TEST_EXPECTED: the text up to what helps; "" where the library is to be taken.
TEST(CudnnLibrary, SaysWhyItIsNotTaken) {
  EXPECT_EQ(dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD), nullptr)
      << "open before it is needed";
  const char* expected = getenv("TESSERA_TEST_EXPECTED");
  if (!expected) GTEST_SKIP() << "TESSERA_TEST_EXPECTED is not set";
  const std::string& why = library_unavailable();
  EXPECT_EQ(why.substr(0, why.find(';')), expected);
}

Problem problem_of(const char* text) {
  const Result<Case> parsed = parse_case(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  return normalised(geometry_of(parsed.value()).problem);
}

// A plan that cuDNN refuses is TESSERA_REFUSED, upon which the library asks the next backend, with its text.
TEST(CudnnLibrary, RefusesPlans) {
  const char* expected = getenv("TESSERA_TEST_EXPECTED");
  if (!expected || *expected) GTEST_SKIP() << "not the stand-in that is taken";
  ASSERT_EQ(library_unavailable(), "");
  const CudnnRules rules;
  const Shape shape = shape_of(rules.canonical(problem_of("fwd bf16 b=2 s=256 h=4 d=64")));
  int handle = 0;
  const auto graph = build_graph(shape, 90, &handle);
  ASSERT_FALSE(graph.ok());
  EXPECT_EQ(graph.status().code(), TESSERA_REFUSED);
  EXPECT_NE(graph.status().message().find("NOT_SUPPORTED"), std::string::npos)
      << graph.status().message();
}

// What the rules take of all of this.
constexpr const char* kCases[] = {
    "fwd bf16 b=2 s=256 h=4 d=64",
    "fwd fp16 b=2 sq=100 sk=300 hq=8 hk=2 d=128 causal align=bottom_right",
    "fwd bf16 b=2 sq=100 sk=300 hq=8 hk=2 d=128 window=16,0 align=top_left",
    "fwd bf16 b=2 sq=300 sk=100 h=2 d=64 causal align=top_left",
    "fwd bf16 b=2 s=256 h=4 d=64 window=16,8",
    "fwd bf16 b=2 s=256 h=4 d=64 layout=bhsd no_lse",
    "fwd bf16 b=2 s=256 h=4 d=64 layout=sbhd",
    "fwd bf16 b=2 s=256 h=4 dqk=192 dv=128 causal",
    "fwd bf16 b=3 s=256 h=4 d=64 lens=random:7",
    "fwd bf16 b=3 sq=64 sk=256 h=4 d=64 lens=random:7 causal align=bottom_right",
    "fwd bf16 b=3 s=256 h=4 d=64 layout=thd lens=random:7 causal",
    "fwd bf16 b=3 s=256 h=4 d=64 layout=thd lens=random:7 gaps=3 window=32,0",
    "fwd bf16 b=3 s=256 h=4 d=256 layout=thd lens=random:7 no_lse",
    "fwd bf16 b=2 sq=1 sk=300 hq=8 hk=2 d=128",
    "bwd bf16 b=2 s=256 h=4 d=64",
    "bwd bf16 b=2 s=250 hq=8 hk=2 d=72 causal",
    "bwd fp16 b=2 sq=100 sk=300 hq=8 hk=2 d=128 causal align=bottom_right",
    "bwd bf16 b=2 sq=100 sk=300 hq=8 hk=2 d=128 window=16,8 align=top_left",
    "bwd bf16 b=2 sq=300 sk=100 h=2 d=64 causal align=top_left",
    "bwd bf16 b=2 s=256 h=4 d=64 layout=bs3hd",
    "bwd bf16 b=2 s=256 h=4 d=64 layout=sbhd",
    "bwd bf16 b=2 s=256 h=4 d=256",
    "bwd bf16 b=2 s=256 h=4 dqk=192 dv=128 causal",
    "bwd bf16 b=3 s=250 hq=4 hk=2 d=40 lens=random:7",
    "bwd bf16 b=3 sq=64 sk=256 h=4 d=64 lens=random:7 causal align=bottom_right",
    "bwd bf16 b=3 s=256 hq=4 hk=2 d=64 layout=thd lens=random:7 gaps=3 causal",
    "bwd fp16 b=3 s=256 h=4 dqk=192 dv=128 layout=thd lens=random:7 window=32,0",
    "bwd bf16 b=3 sq=64 sk=256 hq=4 hk=1 d=128 layout=thd_bshd_bshd lens_k=random:7",
};

// check(shape, arch) of every case on every architecture that the rules take; how many those are.
template <typename Check>
int check_taken(const Check& check) {
  const CudnnRules rules;
  int taken = 0;
  for (const char* text : kCases) {
    const Problem p = problem_of(text);
    for (const int arch : {80, 90, 100, 103, 120}) {
      if (!rules.supports(p, {TESSERA_CUDA, 0, arch, 0})) continue;
      ++taken;
      const Status status = check(shape_of(rules.canonical(p)), arch);
      EXPECT_TRUE(status.ok()) << text << " on sm" << arch << ": " << status.message();
    }
  }
  return taken;
}

// What the rules take, the front end takes too, at the least version.
TEST(CudnnRules, AreNoWiderThanTheFrontEnds) {
  if (!library_unavailable().empty()) GTEST_SKIP() << library_unavailable();
  EXPECT_GT(check_taken([](const Shape& shape, int arch) { return check_graph(shape, arch); }), 50);
}

// What cuDNN wants to know of a GPU. Shared memory and registers are those of the architecture, the
// rest of a GPU that is sold as such, and of little weight.
std::string description_of(int arch) {
  const bool small = arch == 120, ampere = arch == 80;
  const int shared_of_sm = small ? 100 << 10 : ampere ? 164 << 10 : 228 << 10;
  const std::pair<const char*, int64_t> properties[] = {
      {"deviceVer", 10 * arch},
      {"driverVer", 13000},
      {"cudaDeviceId", 0},
      {"regsPerBlock", 65536},
      {"multiProcessorCount", ampere       ? 108
                              : arch == 90 ? 132
                              : small      ? 188
                                           : 148},
      {"smCountOrigin", 0},
      {"warpSize", 32},
      {"maxSharedMemoryPerBlock", 48 << 10},
      {"maxSharedMemoryPerBlockOptin", shared_of_sm - 1024},
      {"oversizedSharedMemoryPerBlock", 0},
      {"reservedSharedMemoryPerBlock", 1024},
      {"maxSharedMemoryPerSM", shared_of_sm},
      {"maxRegistersPerSM", 65536},
      {"maxCtasPerSM", small ? 24 : 32},
      {"maxThreadsPerBlock", 1024},
      {"maxThreadsPerSM", small ? 1536 : 2048},
      {"pciDeviceId", 0},
      {"pciBusId", 0},
      {"pciDomainId", 0},
      {"isTccDriver", 0},
      {"supportCoopLaunch", 1},
      {"totalGlobalMem", int64_t{80} << 30},
      {"smClockRateKHz", 1700000},
      {"memClockRateKHz", 2600000},
      {"memoryBusWidth", 5120},
      {"l2CacheSize", 50 << 20},
  };
  std::string json =
      R"({"deviceName":"imagined","maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64])";
  for (const auto& [name, value] : properties) {
    json += ",\"" + std::string(name) + "\":" + std::to_string(value);
  }
  return json + "}";
}

// What the rules take, the cuDNN that is here has kernels for. TESSERA_TEST_CUDNN: there must be one,
// and a libcuda.so.1 of any kind.
TEST(CudnnRules, AreNoWiderThanCudnn) {
  if (!getenv("TESSERA_TEST_CUDNN")) GTEST_SKIP() << "TESSERA_TEST_CUDNN is not set";
  ASSERT_EQ(library_unavailable(), "");
  EXPECT_GT(check_taken([](const Shape& shape, int arch) {
              return check_graph(shape, arch, description_of(arch));
            }),
            50);
  // It is cuDNN that answers, for the GPU that is described: the front end is told sm90 each time.
  const Shape wide =
      shape_of(CudnnRules().canonical(problem_of("bwd bf16 b=2 s=256 h=4 dqk=192 dv=256")));
  EXPECT_EQ(check_graph(wide, 90, description_of(90)).message(), "");
  for (const int arch : {80, 100, 120}) {
    EXPECT_EQ(check_graph(wide, 90, description_of(arch)).code(), TESSERA_REFUSED) << arch;
  }
}

// The repair of dq, which makes the backward pass right, has been tried on sm90 alone.
TEST(CudnnRules, TakeBackwardPassesOnHopper) {
  const CudnnRules rules;
  const auto reasons = [&](const char* text, int arch) {
    const Support support = rules.supports(problem_of(text), {TESSERA_CUDA, 0, arch, 0});
    return support ? std::string() : support.reasons().front().text;
  };
  EXPECT_EQ(reasons("bwd bf16 b=2 s=256 h=4 d=64", 90), "");
  EXPECT_EQ(reasons("bwd bf16 b=3 s=256 h=4 d=64 layout=thd lens=random:7", 90), "");
  EXPECT_EQ(reasons("bwd bf16 b=2 s=256 h=4 d=64", 100),
            "pass=backward, arch=100: cuDNN's dq has been checked on sm90 alone, where it needs a "
            "repair");
  EXPECT_EQ(reasons("bwd bf16 b=2 s=256 h=4 d=64 deterministic", 90),
            "deterministic=True: cuDNN's workspace is quadratic then, on sm90");
  EXPECT_EQ(
      reasons("bwd bf16 b=2 s=256 h=4 d=72 layout=thd lens=random:7", 90),
      "head_dim_qk=72: must be a multiple of 16 beside packed sequences in the backward pass; "
      "cuDNN's workspace is batch * tokens otherwise");
  EXPECT_EQ(reasons("bwd bf16 b=2 s=256 h=4 d=72 lens=random:7", 90), "");
}

// Sums in the workspace are as long as the tokens, whatever the longest sequence is.
TEST(CudnnRules, BackwardGraphsKnowTheTokens) {
  const CudnnRules rules;
  const auto shape = [&](const char* text) { return shape_of(rules.canonical(problem_of(text))); };
  const Shape packed = shape("bwd bf16 b=3 s=200 h=4 d=64 layout=thd lens=200,150,100 longest");
  EXPECT_TRUE(packed.backward);
  EXPECT_EQ(packed.batch, 4);
  EXPECT_EQ(packed.sq, 256);
  EXPECT_EQ(packed.tokens_q, 512);
  EXPECT_EQ(packed.tokens_k, 512);
  const Shape padded = shape("bwd bf16 b=3 s=200 h=4 d=64 lens=200,150,100");
  EXPECT_EQ(padded.sq, 200);
  EXPECT_EQ(padded.tokens_q, 0);
  EXPECT_EQ(shape("fwd bf16 b=3 s=200 h=4 d=64 layout=thd lens=200,150,100").tokens_q, 0);
}

// One graph for all lengths, scales and, packed, numbers of tokens of a bucket.
TEST(CudnnRules, OneGraphServesMany) {
  const CudnnRules rules;
  const auto same_graph = [&](const char* a, const char* b) {
    return same(rules.canonical(problem_of(a)), rules.canonical(problem_of(b)));
  };
  EXPECT_TRUE(same_graph("fwd bf16 b=3 s=256 h=4 d=64 lens=random:7",
                         "fwd bf16 b=3 s=256 h=4 d=64 lens=random:7 scale=0.5 seed=7"));
  EXPECT_TRUE(same_graph("fwd bf16 b=3 s=250 h=4 d=64 layout=thd lens=random:7",
                         "fwd bf16 b=4 s=180 h=4 d=64 layout=thd lens=random:7"));
  EXPECT_FALSE(
      same_graph("fwd bf16 b=2 s=256 h=4 d=64", "fwd bf16 b=2 s=256 h=4 d=64 layout=bhsd"));
  EXPECT_FALSE(same_graph("fwd bf16 b=2 s=256 h=4 d=64", "fwd bf16 b=2 s=256 h=4 d=64 causal"));
}

}  // namespace
}  // namespace tessera::cuda::cudnn
