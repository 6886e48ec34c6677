// SPDX-License-Identifier: Apache-2.0
#include <climits>
#include <mutex>
#include <vector>

#include "core/log.h"
#include "core/validate/values.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

// What a check finds: the rule that is broken, -1 for none, and how.
struct Finding {
  int32_t rule;
  BadValue bad;
};

// One check under way, in memory of the host that kernels can write.
struct Check {
  Finding finding;
  ValueRules rules;
  Problem problem;
};

struct CheckArgs {
  ValueRules rules;
  Finding* finding;
};
static_assert(sizeof(CheckArgs) <= 4096, "kernel arguments are 4 KB");

// One CTA looks at kThreads items at a time, in order, and stops at the first that is wrong.
__global__ void __launch_bounds__(kThreads)
    check_values_kernel(const __grid_constant__ CheckArgs args) {
  __shared__ int first;
  if (threadIdx.x == 0) args.finding->rule = -1;
  for (int r = 0; r < args.rules.count; ++r) {
    const ValueRule& rule = args.rules.rule[r];
    for (int64_t item0 = 0; item0 < rule.items; item0 += kThreads) {
      if (threadIdx.x == 0) first = kThreads;
      __syncthreads();
      BadValue bad;
      const int64_t item = item0 + threadIdx.x;
      const bool wrong = item < rule.items && breaks(args.rules, r, item, &bad);
      if (wrong) atomicMin(&first, static_cast<int>(threadIdx.x));
      if (!__syncthreads_or(wrong)) continue;
      if (first == static_cast<int>(threadIdx.x)) *args.finding = {r, bad};
      return;
    }
  }
}

// Checks come from blocks of pinned memory and go back when their message has been given: at the
// end of a call's check, or with the graph that holds it. Blocks live as long as the process.
class Pool {
 public:
  Check* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty() && !grow()) return nullptr;
    Check* check = free_.back();
    free_.pop_back();
    return check;
  }
  void give_back(Check* check) {
    const std::lock_guard lock(mutex_);
    free_.push_back(check);
  }

 private:
  // An allocation during another thread's capture, or during this one's, spoils neither.
  bool grow() {
    constexpr int kChecks = 64;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    void* block = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&block, kChecks * sizeof(Check), cudaHostAllocPortable | cudaHostAllocMapped);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    free_.reserve(free_.capacity() + kChecks);
    for (int i = 0; i < kChecks; ++i) free_.push_back(static_cast<Check*>(block) + i);
    return true;
  }

  std::mutex mutex_;
  std::vector<Check*> free_;
};

Pool& pool() {
  static Pool* const instance = new Pool;  // outlives the driver's threads
  return *instance;
}

void log_finding(const Check& check) {
  const int rule = check.finding.rule;
  if (rule < 0) return;
  log(Topic::kChecks, "%s (on the device: the call goes on with the value clamped)",
      refuse(check.problem, check.rules.rule[rule], check.finding.bad).message().c_str());
}

void CUDART_CB report(void* check) { log_finding(*static_cast<const Check*>(check)); }
void CUDART_CB report_once(void* check) {
  report(check);
  pool().give_back(static_cast<Check*>(check));
}
void CUDART_CB release(void* check) { pool().give_back(static_cast<Check*>(check)); }

// The graph that is being captured keeps the check as long as it lives.
Status keep_with_graph(Check* check, cudaStream_t stream) {
  cudaUserObject_t object = nullptr;
  cudaGraph_t graph = nullptr;
  cudaStreamCaptureStatus status;
#if CUDART_VERSION >= 13000
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph);
#else
  cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph);
#endif
  if (error == cudaSuccess) {
    error = cudaUserObjectCreate(&object, check, release, 1, cudaUserObjectNoDestructorSync);
  }
  if (error != cudaSuccess) {
    pool().give_back(check);
    return cuda_status(error, "cudaUserObjectCreate");
  }
  error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) (void)cudaUserObjectRelease(object);
  return cuda_status(error, "cudaGraphRetainUserObject");
}

}  // namespace

Status report_checks(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  if (!log_enabled(Topic::kChecks)) return {};
  const ValueRules rules(problem, buffers);
  if (rules.count == 0) return {};
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TESSERA_RETURN_IF_ERROR(
      cuda_status(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  Check* check = pool().take();
  if (!check) {
    log(Topic::kChecks, "not checked: no pinned memory is left");
    return {};
  }
  check->finding.rule = -1;
  check->rules = rules;
  check->problem = problem;
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (captured) TESSERA_RETURN_IF_ERROR(keep_with_graph(check, stream));

  const CheckArgs args{rules, &check->finding};
  const Status launched =
      launch_kernel("check_values", reinterpret_cast<const void*>(&check_values_kernel), dim3(1),
                    kThreads, 0, &args, stream);
  const Status queued =
      launched.ok()
          ? cuda_status(cudaLaunchHostFunc(stream, captured ? report : report_once, check),
                        "cudaLaunchHostFunc")
          : launched;
  if (!queued.ok() && !captured) pool().give_back(check);
  return queued;
}

}  // namespace tessera::cuda
