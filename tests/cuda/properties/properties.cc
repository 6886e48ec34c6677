// SPDX-License-Identifier: Apache-2.0
// tessera_cuda_properties [NAME...]: what must hold exactly on a GPU, through the C header. Prints
// a line for each property and case, and a summary; exits with 0 when all hold, with 77 without a
// GPU.
//
//   repeat   1000 runs give the same bits
//   layouts  bshd, sbhd and bhsd give the same bits
//   packed   thd gives the bits of padded tensors
//   outside  what the rows beyond a sequence's length hold changes no bit
//   nan      NaN in q, k or v reaches what sees it, with a softcap too, and no row beyond a length
//   graph    a replay gives the bits of a call
//   streams  three streams at once give the bits of one after the other
//   dropout  the mask is the CPU's, and kernels use it forward and backward
//   errors   the caller's errors, failed launches and spoilt captures leave the context usable
//   lengths  wrong lengths and page tables write nothing outside; TESSERA_LOG=checks names them
//   addresses  low and high ones, of cuMemMap and cudaMallocAsync, give the bits of cudaMalloc's
//   bias     a 16-bit one in rows that begin anywhere gives the bits of aligned rows (Hopper)
//   host     prepared calls run 10^5 times; prints what one costs the host
//   large    tensors of more than 2^31 elements
#include "properties.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace tessera_test {
namespace {

int passed = 0, failed = 0, skipped = 0, refused = 0;

constexpr struct {
  const char* name;
  void (*run)();
} kProperties[] = {
    {"repeat", repeat},  {"layouts", layouts}, {"packed", packed},       {"outside", outside},
    {"nan", nan},        {"graph", graph},     {"streams", streams},     {"dropout", dropout},
    {"errors", errors},  {"lengths", lengths}, {"addresses", addresses}, {"bias", biases},
    {"host", host_cost}, {"large", large}};

}  // namespace

void check(const char* property, const std::string& what,
           const std::function<std::string()>& body) {
  const char* verdict = "ok";
  std::string found;
  try {
    found = body();
    ++passed;
  } catch (const Refused&) {
    ++refused;  // another backend's case
    return;
  } catch (const Skipped& why) {
    ++skipped;
    verdict = "skipped";
    found = why.what();
  } catch (const std::exception& problem) {
    ++failed;
    verdict = "FAILED";
    found = problem.what();
  }
  std::printf("%-7s %-8s %s: %s\n", verdict, property, what.c_str(), found.c_str());
  std::fflush(stdout);
}

std::vector<std::string> backends() {
  if (device_arch() == 90) return {"cuda_sm90", "cuda_sm80"};
  return {"cuda_sm80"};
}

std::vector<Options> cases() {
  constexpr uint32_t kDeterministic = TESSERA_DETERMINISTIC;
  std::vector<Options> all;
  for (const std::string& backend : backends()) {
    Options o;
    o.backend = backend;
    o.b = 2, o.sq = o.sk = 450, o.hq = 2, o.hk = 1;
    const auto add = [&](auto change) {
      Options copy = o;
      change(copy);
      all.push_back(copy);
    };
    for (const int64_t d : {64, 128, 256}) {
      add([&](Options& c) { c.d = d; });
      add([&](Options& c) { c.d = d, c.flags = TESSERA_CAUSAL; });
      add([&](Options& c) { c.d = d, c.pass = TESSERA_BACKWARD, c.flags = kDeterministic; });
      add([&](Options& c) {
        c.d = d, c.pass = TESSERA_BACKWARD, c.flags = kDeterministic | TESSERA_CAUSAL;
      });
    }
    add([&](Options& c) { c.flags = TESSERA_DROPOUT, c.dtype = TESSERA_FP16; });
    add([&](Options& c) {
      c.flags = TESSERA_DROPOUT | kDeterministic, c.dtype = TESSERA_FP16, c.pass = TESSERA_BACKWARD;
    });
    add([&](Options& c) { c.dtype = TESSERA_FP32; });
    add([&](Options& c) {
      c.dtype = TESSERA_FP32, c.pass = TESSERA_BACKWARD, c.flags = kDeterministic | TESSERA_CAUSAL;
    });
    add([&](Options& c) { c.sq = 1, c.sk = 4096, c.d = 128, c.hq = 8, c.hk = 2; });
  }
  return all;
}

void require_equal(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& found,
                   const std::string& what) {
  require(expected.size() == found.size(), what + ": sizes differ");
  if (expected == found) return;
  size_t count = 0, first = expected.size();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == found[i]) continue;
    first = std::min(first, i);
    ++count;
  }
  throw Failure(text("%s: %zu of %zu bytes differ, first byte %zu", what.c_str(), count,
                     expected.size(), first));
}

}  // namespace tessera_test

int main(int argc, char** argv) {
  using namespace tessera_test;
  setenv("TESSERA_LOG", "checks,dispatch", 1);  // the topics are silent until a callback listens
  for (int i = 1; i < argc; ++i) {
    const auto named = [&](const auto& property) { return !std::strcmp(argv[i], property.name); };
    if (std::none_of(std::begin(kProperties), std::end(kProperties), named)) {
      std::fprintf(stderr, "tessera_cuda_properties: %s: no such property\n", argv[i]);
      return 2;
    }
  }
  if (device_arch() == 0) {
    std::printf("tessera_cuda_properties: skipped, no CUDA device\n");
    return 77;
  }
  for (const auto& property : kProperties) {
    const bool wanted = argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* name) {
                          return std::strcmp(name, property.name) == 0;
                        });
    if (wanted) property.run();
  }
  std::printf("tessera_cuda_properties: %d hold, %d fail, %d skipped, %d left to another backend\n",
              passed, failed, skipped, refused);
  return failed > 0 || passed == 0 ? 1 : 0;
}
