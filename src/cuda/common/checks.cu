// SPDX-License-Identifier: Apache-2.0
#include <climits>
#include <mutex>
#include <string>
#include <vector>

#include "core/cache/lost.h"
#include "core/log.h"
#include "core/validate/values.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

// What is looked at: rules, each of a number of items, and what is said of one that breaks.
struct AttentionSubject {
  using Bad = BadValue;
  ValueRules rules;
  Problem problem;

  struct OnDevice {
    ValueRules rules;
    TESSERA_HOST_DEVICE int count() const { return rules.count; }
    TESSERA_HOST_DEVICE int64_t items(int rule) const { return rules.rule[rule].items; }
    TESSERA_HOST_DEVICE bool breaks(int rule, int64_t item, Bad* bad) const {
      return tessera::breaks(rules, rule, item, bad);
    }
  };
  OnDevice on_device() const { return {rules}; }
  std::string text(int rule, const Bad& bad) const {
    return refuse(problem, rules.rule[rule], bad).message() +
           " (on the device: the call goes on with the value clamped)";
  }
};

struct AppendSubject {
  using Bad = LostTokens;
  AppendLists lists;

  struct OnDevice {
    AppendLists lists;
    TESSERA_HOST_DEVICE int count() const { return 1; }
    TESSERA_HOST_DEVICE int64_t items(int) const { return lists.items; }
    TESSERA_HOST_DEVICE bool breaks(int, int64_t item, Bad* bad) const {
      return tessera::breaks(lists, item, bad);
    }
  };
  OnDevice on_device() const { return {lists}; }
  std::string text(int, const Bad& bad) const {
    return "append_kv: " + refuse(lists, bad).message() + " (on the device: " + fate_of(bad) + ")";
  }
};

// What a check finds: the rule that is broken, -1 for none, and how.
template <typename Subject>
struct Finding {
  int32_t rule;
  typename Subject::Bad bad;
};

// One check under way, in memory of the host that kernels can write.
template <typename Subject>
struct Check {
  Finding<Subject> finding;
  Subject subject;
};

template <typename Subject>
struct CheckArgs {
  typename Subject::OnDevice subject;
  Finding<Subject>* finding;
};

// One CTA looks at kThreads items at a time, in order, and stops at the first that is wrong.
template <typename Subject>
__global__ void __launch_bounds__(kThreads)
    check_values_kernel(const __grid_constant__ CheckArgs<Subject> args) {
  static_assert(sizeof args <= 4096, "kernel arguments are 4 KB");
  __shared__ int first;
  if (threadIdx.x == 0) args.finding->rule = -1;
  for (int r = 0; r < args.subject.count(); ++r) {
    const int64_t items = args.subject.items(r);
    for (int64_t item0 = 0; item0 < items; item0 += kThreads) {
      if (threadIdx.x == 0) first = kThreads;
      __syncthreads();
      typename Subject::Bad bad;
      const int64_t item = item0 + threadIdx.x;
      const bool wrong = item < items && args.subject.breaks(r, item, &bad);
      if (wrong) atomicMin(&first, static_cast<int>(threadIdx.x));
      if (!__syncthreads_or(wrong)) continue;
      if (first == static_cast<int>(threadIdx.x)) *args.finding = {r, bad};
      return;
    }
  }
}

// Checks come from blocks of pinned memory and go back when their message has been given: at the
// end of a call's check, or with the graph that holds it. Blocks live as long as the process.
template <typename Subject>
class Pool {
 public:
  Check<Subject>* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty() && !grow()) return nullptr;
    Check<Subject>* check = free_.back();
    free_.pop_back();
    return check;
  }
  void give_back(Check<Subject>* check) {
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
    const cudaError_t error = cudaHostAlloc(&block, kChecks * sizeof(Check<Subject>),
                                            cudaHostAllocPortable | cudaHostAllocMapped);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    free_.reserve(free_.capacity() + kChecks);
    for (int i = 0; i < kChecks; ++i) free_.push_back(static_cast<Check<Subject>*>(block) + i);
    return true;
  }

  std::mutex mutex_;
  std::vector<Check<Subject>*> free_;
};

template <typename Subject>
Pool<Subject>& pool() {
  static auto* const instance = new Pool<Subject>;  // outlives the driver's threads
  return *instance;
}

template <typename Subject>
void CUDART_CB report(void* data) {
  const auto& check = *static_cast<const Check<Subject>*>(data);
  if (check.finding.rule < 0) return;
  log(Topic::kChecks, "%s", check.subject.text(check.finding.rule, check.finding.bad).c_str());
}
template <typename Subject>
void CUDART_CB release(void* check) {
  pool<Subject>().give_back(static_cast<Check<Subject>*>(check));
}
template <typename Subject>
void CUDART_CB report_once(void* check) {
  report<Subject>(check);
  release<Subject>(check);
}

// The graph that is being captured keeps the check as long as it lives.
template <typename Subject>
Status keep_with_graph(Check<Subject>* check, cudaStream_t stream) {
  cudaUserObject_t object = nullptr;
  cudaGraph_t graph = nullptr;
  cudaStreamCaptureStatus status;
#if CUDART_VERSION >= 13000
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph);
#else
  cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph);
#endif
  if (error == cudaSuccess) {
    error =
        cudaUserObjectCreate(&object, check, release<Subject>, 1, cudaUserObjectNoDestructorSync);
  }
  if (error != cudaSuccess) {
    release<Subject>(check);
    return cuda_status(error, "cudaUserObjectCreate");
  }
  error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) (void)cudaUserObjectRelease(object);
  return cuda_status(error, "cudaGraphRetainUserObject");
}

// Queues the check and its report.
template <typename Subject>
Status queue_check(const Subject& subject, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TESSERA_RETURN_IF_ERROR(
      cuda_status(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  Check<Subject>* check = pool<Subject>().take();
  if (!check) {
    log(Topic::kChecks, "not checked: no pinned memory is left");
    return {};
  }
  check->finding.rule = -1;
  check->subject = subject;
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (captured) TESSERA_RETURN_IF_ERROR(keep_with_graph(check, stream));

  const CheckArgs<Subject> args{subject.on_device(), &check->finding};
  const Status launched =
      launch_kernel("check_values", reinterpret_cast<const void*>(&check_values_kernel<Subject>),
                    dim3(1), kThreads, 0, &args, stream);
  const Status queued =
      launched.ok()
          ? cuda_status(cudaLaunchHostFunc(
                            stream, captured ? report<Subject> : report_once<Subject>, check),
                        "cudaLaunchHostFunc")
          : launched;
  if (!queued.ok() && !captured) release<Subject>(check);
  return queued;
}

}  // namespace

Status report_checks(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  if (!log_enabled(Topic::kChecks)) return {};
  const ValueRules rules(problem, buffers);
  return rules.count == 0 ? Status() : queue_check(AttentionSubject{rules, problem}, stream);
}

Status report_lost(const AppendArgs& args, cudaStream_t stream) {
  if (!log_enabled(Topic::kChecks)) return {};
  const AppendLists lists(args);
  return lists.items == 0 ? Status() : queue_check(AppendSubject{lists}, stream);
}

}  // namespace tessera::cuda
