// SPDX-License-Identifier: Apache-2.0
// What the caller does wrong, what the driver refuses, and what a call costs the host.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "properties.h"

namespace tessera_test {
namespace {

Options small(const std::string& backend, int pass) {
  Options options;
  options.backend = backend;
  options.pass = pass;
  options.flags = TESSERA_CAUSAL;
  return options;
}

// Three packed sequences. Deterministic backward, where tiles wait for one another: none may for
// ever.
Options three_packed(const std::string& backend, int pass) {
  Options options = small(backend, pass);
  options.flags |= TESSERA_DETERMINISTIC * (pass == TESSERA_BACKWARD);
  options.format = TESSERA_THD;
  options.b = 3;
  options.lengths = {100, 57, 143};
  return options;
}

const char* pass_name(int pass) { return pass == TESSERA_FORWARD ? "fwd" : "bwd"; }

template <typename Body>
void for_each_pass(const char* property, const char* what, const Body& body) {
  for (const std::string& backend : backends()) {
    for (const int pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
      check(property, text("%s %s, %s", backend.c_str(), pass_name(pass), what),
            [&] { return body(backend, pass); });
    }
  }
}

// An error that the caller has not picked up yet is the caller's, before and after a call.
std::string keeps_callers_error(const std::string& backend, int pass) {
  Attention attention(small(backend, pass));
  void* impossible = nullptr;
  require(cudaMalloc(&impossible, size_t{1} << 60) == cudaErrorMemoryAllocation, "cudaMalloc");
  attention.run();
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  (void)cudaGetLastError();
  return "not taken for the library's";
}

// A stream whose capture the caller has spoilt refuses every launch.
std::string survives_failed_launch(const std::string& backend, int pass) {
  Options options = small(backend, pass);
  options.flags |= TESSERA_DETERMINISTIC * (pass == TESSERA_BACKWARD && backend == "cuda_sm80");
  Attention attention(options);
  attention.run();
  const std::vector<uint8_t> expected = attention.outputs();
  std::string message;
  {
    const Stream stream;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    require(cudaStreamSynchronize(stream) != cudaSuccess, "a synchronised capture must be invalid");
    (void)cudaGetLastError();
    require(attention.run_status(stream) == TESSERA_FAILED, "the launch must fail");
    message = attention.error().message;
    require(message.find("cuda") != message.npos, "the message must name CUDA's error: " + message);
    require(cudaGetLastError() == cudaSuccess, "the failed launch left an error behind");
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream, &graph);
    (void)cudaGetLastError();
  }
  attention.spoil();
  attention.run();
  const std::vector<uint8_t> found = attention.outputs();
  // The sums of dq are in no order unless asked.
  if (pass == TESSERA_FORWARD || options.flags & TESSERA_DETERMINISTIC) {
    require_equal(expected, found, "after the failed launch");
  }
  return message;
}

// Runs with `values` in place of a table, twice: in silence, and with TESSERA_LOG=checks, which
// must say `says`. Nothing outside the tensors may be written.
template <typename T>
std::string wrong_values(Attention& attention, int index, const std::vector<T>& values,
                         const std::string& says) {
  require(cudaMemcpy(attention.buffers.data[index], values.data(), values.size() * sizeof(T),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  attention.run();
  require(cudaDeviceSynchronize(), "with wrong values");
  attention.check_guards();
  std::string said;
  {
    const Log log;
    attention.run();
    require(cudaDeviceSynchronize(), "with wrong values, logged");
    require(log.messages.size() == 1, text("%zu messages", log.messages.size()));
    said = log.messages[0];
  }
  require(said.rfind("checks: " + says, 0) == 0, "said: " + said);
  return said;
}

// A call with the topic on does not wait for the stream, and a graph speaks at every replay.
std::string speaks_without_waiting(const std::string& backend, int pass) {
  Options options = small(backend, pass);
  options.lengths = {300, 17};
  Attention attention(options);
  const std::vector<int32_t> wrong{300, 301};
  require(cudaMemcpy(attention.buffers.data[TESSERA_SEQLENS_Q], wrong.data(), 8,
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  const Stream stream;
  const Log log;
  std::atomic<bool> may_go_on = false;
  require(cudaLaunchHostFunc(
              stream,
              [](void* flag) {
                while (!*static_cast<std::atomic<bool>*>(flag)) std::this_thread::yield();
              },
              &may_go_on),
          "cudaLaunchHostFunc");
  attention.run(stream);
  const bool silent = log.messages.empty();
  may_go_on = true;
  stream.synchronise();
  require(silent, "the call must return before the stream comes to it");
  require(log.messages.size() == 1, text("%zu messages of a call", log.messages.size()));

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  attention.run(stream);
  require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  for (int replay = 0; replay < 3; ++replay) {
    require(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
  }
  stream.synchronise();
  require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  require(log.messages.size() == 4, text("%zu messages with the graph's", log.messages.size()));
  for (const std::string& message : log.messages) {
    require(
        message.rfind("checks: seqlens_q[1]=301: must be between 0 and the extent, 300", 0) == 0,
        "said: " + message);
  }
  return "once for a call, three times for three replays";
}

// Packed sequences longer than the dense tensor over their scores: they count as no longer than it,
// so that nothing is read behind its rows, and rows of o or dq beyond it are zeros.
std::string longer_than(const std::string& backend, int pass, int index) {
  constexpr int64_t kLongest = 150;
  Attention attention(three_packed(backend, pass));
  tessera_problem& p = attention.problem;
  p.flags |= TESSERA_MAX_SEQLEN_Q | TESSERA_MAX_SEQLEN_K;
  p.max_seqlen_q = p.max_seqlen_k = kLongest;
  const std::vector<float> bias(4 * kLongest * kLongest, 0.5f);
  const std::vector<uint8_t> shown(4 * kLongest * kLongest, 1);
  const bool is_bias = index == TESSERA_BIAS;
  attention.give(index, is_bias ? TESSERA_FP32 : TESSERA_BOOL, {1, 4, kLongest, kLongest},
                 is_bias ? static_cast<const void*>(bias.data()) : shown.data());
  if (is_bias && pass == TESSERA_BACKWARD) {
    attention.give(TESSERA_DBIAS, TESSERA_FP32, {1, 4, kLongest, kLongest}, nullptr);
  }
  attention.prepare();
  const std::vector<int32_t> one{0, 300, 300, 300};
  require(cudaMemcpy(attention.buffers.data[TESSERA_CU_SEQLENS_K], one.data(), 16,
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  const std::string said =
      wrong_values<int32_t>(attention, TESSERA_CU_SEQLENS_Q, one, "max_seqlen_q=150: must be");
  const int result = pass == TESSERA_FORWARD ? TESSERA_O : TESSERA_DQ;
  const int64_t row = attention.options.hq * attention.options.d;
  std::vector<uint16_t> rows(static_cast<size_t>(300 * row));
  require(cudaMemcpy(rows.data(), attention.buffers.data[result], rows.size() * 2,
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  const auto beyond = rows.begin() + kLongest * row;
  require(std::any_of(rows.begin(), beyond, [](uint16_t x) { return x != 0; }), "all rows are 0");
  require(std::all_of(beyond, rows.end(), [](uint16_t x) { return (x & 0x7fff) == 0; }),
          "rows beyond the tensor are not 0");
  return said;
}

// Starts that no sequence has: the diagonal is one in range, and where a dense bias or mask is
// indexed by position nothing is read outside of it.
std::string beyond_starts(const std::string& backend, int pass, int start, int over) {
  constexpr int64_t kLongest = 150;
  Attention attention(three_packed(backend, pass));
  tessera_problem& p = attention.problem;
  p.flags |= TESSERA_CAUSAL | TESSERA_MAX_SEQLEN_Q | TESSERA_MAX_SEQLEN_K;
  p.align = TESSERA_ALIGN_TOP_LEFT;
  p.max_seqlen_q = p.max_seqlen_k = kLongest;
  const std::vector<uint8_t> data(4 * kLongest * kLongest * sizeof(float), 1);
  if (over != 0) {
    attention.give(over, over == TESSERA_BIAS ? TESSERA_FP32 : TESSERA_BOOL,
                   {1, 4, kLongest, kLongest}, data.data());
  }
  const std::vector<int64_t> zeros(3);
  attention.give(start, TESSERA_INT64, {3}, zeros.data());
  attention.prepare();
  constexpr int64_t kWrong = int64_t{1} << 61;
  return wrong_values<int64_t>(
      attention, start, {kWrong, -kWrong, INT64_MAX},
      text("%s_start[0]=%lld: a position must be between 0 and 2^60",
           start == TESSERA_Q_START ? "q" : "k", static_cast<long long>(kWrong)));
}

// k and v of a small problem as pages of 16 keys.
Attention paged(const std::string& backend) {
  Options options = small(backend, TESSERA_FORWARD);
  options.b = 2, options.sq = 1, options.sk = 256;
  Attention attention(options);
  for (const int index : {TESSERA_K, TESSERA_V}) {
    tessera_tensor& t = attention.problem.tensor[index];
    t.extent[0] = 32, t.extent[1] = 16;
    t.stride[0] = 16 * t.stride[1];
  }
  const std::vector<int32_t> lengths{256, 200};
  std::vector<int32_t> table(32);
  for (int i = 0; i < 32; ++i) table[static_cast<size_t>(i)] = 31 - i;
  attention.give(TESSERA_SEQLENS_K, TESSERA_INT32, {2}, lengths.data());
  attention.give(TESSERA_PAGE_TABLE_K, TESSERA_INT32, {2, 16}, table.data());
  attention.prepare();
  return attention;
}

}  // namespace

void errors() {
  for_each_pass("errors", "an error of the caller's", keeps_callers_error);
  for_each_pass("errors", "a failed launch", survives_failed_launch);
  check("errors", "a device that is not there", [] {
    Attention attention(small("", TESSERA_FORWARD));
    const tessera_device nowhere{TESSERA_CUDA, 63, 0, 0};
    tessera_error error{sizeof error, 0, {}};
    require(tessera_run(&attention.problem, &nowhere, &attention.buffers, &error) != TESSERA_OK,
            "must be refused");
    require(cudaGetLastError() == cudaSuccess, "left an error behind");
    attention.run();
    require(cudaDeviceSynchronize(), "afterwards");
    return std::string(error.message);
  });
}

void lengths() {
  constexpr int64_t kHuge = int64_t{1} << 40;
  for_each_pass("lengths", "seqlens_k", [](const std::string& backend, int pass) {
    Options options = small(backend, pass);
    options.lengths = {300, 17};
    Attention attention(options);
    return wrong_values<int32_t>(attention, TESSERA_SEQLENS_K, {1 << 30, -5},
                                 "seqlens_k[0]=1073741824: must be between 0 and the extent, 300");
  });
  for_each_pass("lengths", "cu_seqlens_q", [&](const std::string& backend, int pass) {
    Attention attention(three_packed(backend, pass));
    const std::string said =
        wrong_values<int32_t>(attention, TESSERA_CU_SEQLENS_Q, {0, 1000, -7, 1 << 30},
                              "cu_seqlens_q[2]=-7: must not be below cu_seqlens_q[1]=1000");
    attention.give(TESSERA_CU_SEQLENS_K, TESSERA_INT64, {4}, nullptr);
    attention.prepare();
    const std::vector<int32_t> right{0, 100, 157, 300};
    require(cudaMemcpy(attention.buffers.data[TESSERA_CU_SEQLENS_Q], right.data(), 16,
                       cudaMemcpyHostToDevice),
            "cudaMemcpy");
    wrong_values<int64_t>(attention, TESSERA_CU_SEQLENS_K, {-kHuge, kHuge, 0, 300},
                          text("cu_seqlens_k[0]=%lld: must be 0", static_cast<long long>(-kHuge)));
    return said;
  });
  for (const int index : {TESSERA_BIAS, TESSERA_MASK}) {
    for_each_pass(
        "lengths", index == TESSERA_BIAS ? "beyond a bias" : "beyond a mask",
        [&](const std::string& backend, int pass) { return longer_than(backend, pass, index); });
  }
  for (const int start : {TESSERA_Q_START, TESSERA_K_START}) {
    const char* name = start == TESSERA_Q_START ? "q_start" : "k_start";
    for_each_pass("lengths", name, [&](const std::string& backend, int pass) {
      std::string said = beyond_starts(backend, pass, start, 0);
      if (backend == "cuda_sm80") {  // the other one refuses these
        beyond_starts(backend, pass, start, TESSERA_BIAS);
        beyond_starts(backend, pass, start, TESSERA_MASK);
      }
      return said;
    });
  }
  for (const std::string& backend : backends()) {
    check("lengths", backend + " fwd, page_table", [&] {
      Attention attention = paged(backend);
      std::vector<int32_t> table(32, 3);
      table[1] = 32, table[2] = -1, table[20] = 1 << 30;
      return wrong_values<int32_t>(attention, TESSERA_PAGE_TABLE_K, table,
                                   "page_table[0, 1]=32: must be a page of k, between 0 and 31");
    });
  }
  for_each_pass("lengths", "the log", speaks_without_waiting);
  for_each_pass("lengths", "where sequences are stored", [&](const std::string& backend, int pass) {
    Attention attention(three_packed(backend, pass));
    attention.give(TESSERA_CU_SEQLENS_Q_PADDED, TESSERA_INT32, {4}, nullptr);
    attention.prepare();
    return wrong_values<int32_t>(
        attention, TESSERA_CU_SEQLENS_Q_PADDED, {0, 99, 157, 300},
        "cu_seqlens_q_padded[1]=99: must be at least 100, where the sequence before it ends");
  });
  for (const std::string& backend : backends()) {
    check("lengths", backend + " fwd, sink", [&] {
      Attention attention(small(backend, TESSERA_FORWARD));
      attention.give(TESSERA_SINK, TESSERA_FP32, {4}, nullptr);
      attention.prepare();
      return wrong_values<float>(attention, TESSERA_SINK, {0, 1, NAN, INFINITY},
                                 "sink[2]=nan: must be finite");
    });
  }
  check("lengths", "right values", [] {
    Options options = small("", TESSERA_FORWARD);
    options.lengths = {300, 17};
    Attention attention(options);
    const Log log;
    attention.run();
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    require(log.messages.empty(), "must say nothing");
    return std::string("nothing is said");
  });
}

void host_cost() {
  constexpr int kCalls = 100000, kQueued = 200;
  for (const std::string& backend : backends()) {
    for (const bool decode : {false, true}) {
      for (const int pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
        if (decode && pass == TESSERA_BACKWARD) continue;
        Options options = small(backend, pass);
        options.sq = decode ? 1 : 64;
        options.sk = 64;
        // Printed, never judged: other work on the machine is in it.
        check("host", name_of(options), [&] {
          Attention attention(options);
          std::vector<float> microseconds;
          microseconds.reserve(kCalls);
          for (int call = 0; call < kCalls; ++call) {
            if (call % kQueued == 0) require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            const auto begin = std::chrono::steady_clock::now();
            attention.run();
            const std::chrono::duration<float, std::micro> taken =
                std::chrono::steady_clock::now() - begin;
            microseconds.push_back(taken.count());
          }
          const auto median = microseconds.begin() + kCalls / 2;
          std::nth_element(microseconds.begin(), median, microseconds.end());
          return text("%.2f us, median of %d", static_cast<double>(*median), kCalls);
        });
      }
    }
  }
}

}  // namespace tessera_test
