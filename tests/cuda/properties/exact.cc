// SPDX-License-Identifier: Apache-2.0
// Bitwise properties: repeats, layouts, packing, graphs, streams, and the dropout mask.
#include <cmath>
#include <cstring>

#include "properties.h"

namespace tessera_test {

void repeat() {
  constexpr int kRuns = 1000;
  for (const Options& options : cases()) {
    check("repeat", name_of(options), [&] {
      Attention attention(options);
      attention.run();
      std::vector<uint8_t> first, found;
      attention.raw_outputs(first);
      for (int run = 1; run < kRuns; ++run) {
        attention.spoil();
        attention.run();
        attention.raw_outputs(found);
        require_equal(first, found, text("run %d", run));
      }
      attention.check_guards();
      return text("%d runs equal", kRuns);
    });
  }
}

void layouts() {
  for (Options options : cases()) {
    check("layouts", name_of(options), [&] {
      std::vector<uint8_t> expected;
      for (const int format : {TESSERA_BSHD, TESSERA_SBHD, TESSERA_BHSD}) {
        options.format = format;
        Attention attention(options);
        attention.run();
        if (format == TESSERA_BSHD) expected = attention.outputs();
        require_equal(expected, attention.outputs(), name_of(options));
        attention.check_guards();
      }
      return std::string("3 layouts equal");
    });
  }
}

void packed() {
  for (Options options : cases()) {
    if (options.sq != options.sk) continue;
    options.b = 4;
    // So few keys in all that neither form is cut along them: a cut is another order of sums. And
    // backward a block of queries: cuda_sm90 walks those of packed sequences in another order.
    options.lengths = {options.pass == TESSERA_FORWARD ? 250 : 64, 1, 0, 40};
    check("packed", name_of(options), [&] {
      Attention padded(options);
      padded.run();
      options.format = TESSERA_THD;
      Attention packed(options);
      packed.run();
      require_equal(padded.outputs(), packed.outputs(), "thd");
      padded.check_guards();
      packed.check_guards();
      return std::string("thd equals padded");
    });
  }
}

// A kernel that decides by warp how to compute (a new reference for the exponents, a form of
// softcap) would let such rows into the results where they share a warp with rows that exist. NaN,
// and scores far above and far below those of the sequence.
void outside() {
  std::vector<Options> all = cases();
  for (Options options : cases()) {
    if (options.pass != TESSERA_FORWARD || options.flags & TESSERA_DROPOUT) continue;
    options.flags |= TESSERA_SOFTCAP;
    for (const double cap : {1., 30.}) {
      options.softcap = cap;
      all.push_back(options);
    }
  }
  for (Options options : all) {
    if (options.sq != options.sk) continue;
    options.b = 4;
    options.lengths = {250, 1, 0, 417};
    check("outside", name_of(options), [&] {
      options.outside = 0;
      Attention clean(options);
      clean.run();
      for (const float value : {NAN, 3e4f, -3e4f}) {
        options.outside = value;
        Attention spoilt(options);
        spoilt.run();
        require_equal(clean.outputs(), spoilt.outputs(), text("rows of %g", double{value}));
        spoilt.check_guards();
      }
      return std::string("NaN and large numbers change nothing");
    });
  }
}

void graph() {
  for (const Options& options : cases()) {
    check("graph", name_of(options), [&] {
      Attention attention(options);
      attention.run();
      const std::vector<uint8_t> eager = attention.outputs();
      const Stream stream;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal),
              "cudaStreamBeginCapture");
      attention.run(stream);
      require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
      require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
      for (int replay = 0; replay < 5; ++replay) {
        attention.spoil(stream);
        require(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
        require_equal(eager, attention.outputs(), text("replay %d", replay));
      }
      // Replays without a pause, and a call of its own between them.
      for (int replay = 0; replay < 50; ++replay) {
        require(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
        if (replay % 7 == 0) attention.run(stream);
      }
      require_equal(eager, attention.outputs(), "50 replays in a row");
      require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
      require(cudaGraphDestroy(graph), "cudaGraphDestroy");
      attention.check_guards();
      return std::string("replays equal the call");
    });
  }
}

void streams() {
  for (const Options& options : cases()) {
    check("streams", name_of(options), [&] {
      Options other = options;
      other.b = 3;
      other.sk = options.sk / 2;
      if (options.sq > 1) other.sq = other.sk;
      Attention a(options), b(other), c(options);
      a.run();
      b.run();
      const std::vector<uint8_t> of_a = a.outputs(), of_b = b.outputs();
      const Stream first, second, third;
      for (int round = 0; round < 20; ++round) {
        for (Attention* attention : {&a, &b, &c}) attention->spoil(first);
        first.synchronise();
        for (int run = 0; run < 10; ++run) {
          a.run(first);
          b.run(second);
          c.run(third);
        }
        require_equal(of_a, a.outputs(), text("round %d, first stream", round));
        require_equal(of_b, b.outputs(), text("round %d, second stream", round));
        require_equal(of_a, c.outputs(), text("round %d, third stream", round));
      }
      return std::string("three streams at once equal one after the other");
    });
  }
}

namespace {

std::vector<uint8_t> mask_on(const tessera_device& device, const int64_t (&shape)[4], double p,
                             const int64_t* state, uint8_t* keep, size_t bytes) {
  tessera_error error{sizeof error, 0, {}};
  require(tessera_dropout_mask(shape[0], shape[1], shape[2], shape[3], p, state, keep, &device,
                               nullptr, &error) == TESSERA_OK,
          error.message);
  std::vector<uint8_t> host(bytes);
  require(cudaMemcpy(host.data(), keep, bytes, cudaMemcpyDefault), "cudaMemcpy");
  return host;
}

// o[i, j] (or dv[j, i]) is the probability of (i, j) if v (or do) is an identity: 0 where dropped.
std::string kernel_uses_mask(const std::string& backend, int pass, int dtype) {
  Options options;
  options.backend = backend;
  options.pass = pass;
  options.dtype = dtype;
  options.flags = TESSERA_DROPOUT | (pass == TESSERA_BACKWARD ? TESSERA_DETERMINISTIC : 0);
  options.b = 2, options.sq = options.sk = 64, options.hq = options.hk = 4, options.d = 64;
  Attention attention(options);
  const int64_t heads = options.b * options.hq, n = 64;
  const int identity = pass == TESSERA_FORWARD ? TESSERA_V : TESSERA_DO;
  const int64_t size = dtype == TESSERA_FP32 ? 4 : 2;
  std::vector<char> eye(static_cast<size_t>(heads * n * n * size));
  const float one = 1;
  for (int64_t row = 0; row < options.b * n * options.hq; ++row) {
    char* at = &eye[static_cast<size_t>((row * n + row / options.hq % n) * size)];
    if (size == 4) {
      std::memcpy(at, &one, 4);
    } else {
      at[0] = 0, at[1] = 0x3C;  // 1 in fp16
    }
  }
  require(
      cudaMemcpy(attention.buffers.data[identity], eye.data(), eye.size(), cudaMemcpyHostToDevice),
      "cudaMemcpy");
  attention.run();
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const int output = pass == TESSERA_FORWARD ? TESSERA_O : TESSERA_DV;
  std::vector<char> found(eye.size());
  require(cudaMemcpy(found.data(), attention.buffers.data[output], found.size(),
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  const int64_t state[] = {42, 7}, shape[4] = {options.b, options.hq, n, n};
  std::vector<uint8_t> keep(static_cast<size_t>(heads * n * n));
  const tessera_device cpu{TESSERA_CPU, 0, 0, 0};
  mask_on(cpu, shape, options.dropout_p, state, keep.data(), keep.size());
  int64_t dropped = 0;
  for (int64_t b = 0; b < options.b; ++b) {
    for (int64_t h = 0; h < options.hq; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          const bool kept = keep[static_cast<size_t>(((b * options.hq + h) * n + i) * n + j)];
          const int64_t row = pass == TESSERA_FORWARD ? i : j,
                        column = pass == TESSERA_FORWARD ? j : i;
          const char* at =
              &found[static_cast<size_t>((((b * n + row) * options.hq + h) * n + column) * size)];
          bool zero = true;
          for (int64_t byte = 0; byte < size; ++byte) zero &= at[byte] == 0;
          require(zero != kept, text("n=%d h=%d i=%d j=%d: the CPU %s it", static_cast<int>(b),
                                     static_cast<int>(h), static_cast<int>(i), static_cast<int>(j),
                                     kept ? "keeps" : "drops"));
          dropped += zero;
        }
      }
    }
  }
  return text("%d of %d dropped, as on the CPU", static_cast<int>(dropped),
              static_cast<int>(keep.size()));
}

}  // namespace

void dropout() {
  check("dropout", "tessera_dropout_mask", [] {
    const int64_t shape[4] = {2, 3, 129, 515};
    const size_t bytes = 2 * 3 * 129 * 515;
    const int64_t state[] = {-81985529216486896, 1 << 20};
    const DeviceArray state_there(sizeof state), keep_there(bytes);
    require(cudaMemcpy(state_there.data(), state, sizeof state, cudaMemcpyHostToDevice),
            "cudaMemcpy");
    std::vector<uint8_t> keep(bytes);
    const tessera_device cpu{TESSERA_CPU, 0, 0, 0};
    for (const double p : {0.1, 0.5, 0.999}) {
      require_equal(mask_on(cpu, shape, p, state, keep.data(), bytes),
                    mask_on(kDevice, shape, p, reinterpret_cast<const int64_t*>(state_there.data()),
                            reinterpret_cast<uint8_t*>(keep_there.data()), bytes),
                    text("p=%g", p));
    }
    keep_there.check_guards("keep");
    return std::string("the CPU's, bit for bit");
  });
  for (const std::string& backend : backends()) {
    for (const int pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
      for (const int dtype : {TESSERA_FP16, TESSERA_FP32}) {
        check("dropout",
              text("%s %s %s", backend.c_str(), pass == TESSERA_FORWARD ? "fwd" : "bwd",
                   dtype == TESSERA_FP16 ? "fp16" : "fp32"),
              [&] { return kernel_uses_mask(backend, pass, dtype); });
      }
    }
  }
}

}  // namespace tessera_test
