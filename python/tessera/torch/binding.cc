// SPDX-License-Identifier: Apache-2.0
// The kernels of tessera::attention, attention_out and attention_backward, on the CPU and on CUDA:
// from the dispatcher's stack to a tessera_problem to one call of libtessera. Schemas are in
// _ops.py.
//
// Written against PyTorch's stable ABI alone, so that one file serves every PyTorch from 2.11 on
// and any Python. An error crosses that ABI as a RuntimeError; _functions.py says it in full.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "interrupt.h"
#include "tensors.h"
#include "tessera.h"

namespace {

using tessera_torch::check;
using tessera_torch::describe;
using tessera_torch::fail;
using tessera_torch::Layout;
using tessera_torch::scalar_type_of;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// The tensors that operators take, _describe.INPUTS: those up to rng_state, and three more.
constexpr int kNumInputs = TESSERA_RNG_STATE + 4;
constexpr int index_of(int input) {
  return input <= TESSERA_RNG_STATE ? input : input - TESSERA_RNG_STATE - 1 + TESSERA_Q_START;
}
// _describe.MAX_LOGIT, and where in flags OUT_DTYPE and GRAD_DTYPE begin.
constexpr int64_t kMaxLogit = int64_t{1} << 32;
constexpr int kOutDtype = 33, kGradDtype = 37;

// One call. Allocates outputs and workspace by PyTorch's allocators; a thread on the CPU keeps the
// workspace of its last call, up to kKeptWorkspace.
class Call {
 public:
  // Takes the arguments that the operators share, from `stack` on: q, k and v, a list of the
  // other inputs as far as they are given, and the scalars.
  Call(const StableIValue* stack, int32_t pass) {
    inputs_[TESSERA_Q] = to<Tensor>(stack[TESSERA_Q]);
    inputs_[TESSERA_K] = to<Tensor>(stack[TESSERA_K]);
    inputs_[TESSERA_V] = to<Tensor>(stack[TESSERA_V]);
    auto more = to<std::vector<std::optional<Tensor>>>(stack[TESSERA_V + 1]);
    if (more.size() > kNumInputs - TESSERA_BIAS) fail("tessera: more inputs than there are");
    std::move(more.begin(), more.end(), inputs_.begin() + TESSERA_BIAS);
    const StableIValue* scalar = stack + TESSERA_V + 2;
    const auto integer = [&] { return to<int64_t>(*scalar++); };
    const auto number = [&] { return to<double>(*scalar++); };
    problem_.struct_size = sizeof problem_;
    buffers_.struct_size = sizeof buffers_;
    problem_.pass = pass;
    // _describe.SCALARS, in their order.
    const int64_t flags = integer();
    wants_max_logit_ = (flags & kMaxLogit) != 0;
    out_dtype_ = static_cast<int32_t>(flags >> kOutDtype & 15);
    grad_dtype_ = static_cast<int32_t>(flags >> kGradDtype & 15);
    problem_.flags = static_cast<uint32_t>(flags);
    problem_.format_q = static_cast<int32_t>(integer());
    problem_.format_kv = static_cast<int32_t>(integer());
    buffers_.softmax_scale = number();
    problem_.window_left = integer();
    problem_.window_right = integer();
    problem_.align = static_cast<int32_t>(integer());
    problem_.shift = integer();
    problem_.max_seqlen_q = integer();
    problem_.max_seqlen_k = integer();
    buffers_.softcap = number();
    buffers_.dropout_p = number();
    const std::string backend = to<std::string>(*scalar++);
    std::strncpy(problem_.backend, backend.c_str(), sizeof problem_.backend - 1);
    buffers_.sm_margin = static_cast<int32_t>(integer());
    int32_t dtype = 0;
    check(aoti_torch_get_dtype(q().get(), &dtype));
    if (dtype == aoti_torch_dtype_float8_e4m3fn() || dtype == aoti_torch_dtype_float8_e5m2()) {
      fail("tessera.attention: q is fp8, which operators do not take");  // _functions.py does
    }
    check(aoti_torch_get_device_type(q().get(), &device_type_));
    check(aoti_torch_get_device_index(q().get(), &device_index_));
    if (device_type_ == aoti_torch_device_type_cuda()) {
      device_.kind = TESSERA_CUDA;
      device_.ordinal = device_index_;
    }
    for (int i = 0; i < kNumInputs; ++i) {
      if (inputs_[i]) input(index_of(i), *inputs_[i]);
    }
  }

  bool wants_max_logit() const { return wants_max_logit_; }
  bool is_bhsd() const { return problem_.format_q == TESSERA_BHSD; }
  // PyTorch's dtypes of o, and of the gradient of a tensor of `scalar_type` (only q, k and v have
  // one of their own).
  int32_t out_type(int32_t scalar_type) const { return scalar_type_of(out_dtype_, scalar_type); }
  int32_t grad_type(int index, int32_t scalar_type) const {
    return index > TESSERA_V ? scalar_type : scalar_type_of(grad_dtype_, scalar_type);
  }
  const Tensor& q() const { return *inputs_[TESSERA_Q]; }
  const Tensor& v() const { return *inputs_[TESSERA_V]; }
  const Tensor& of(int index) const {
    if (!inputs_[index]) fail("tessera.attention_backward: a gradient of something not given");
    return *inputs_[index];
  }
  const tessera_tensor& described(int index) const { return problem_.tensor[index]; }

  // A tensor of the caller's, o included.
  void input(int index, const Tensor& tensor) {
    describe(problem_, index, paged(), Layout(tensor));
    check(aoti_torch_get_data_ptr(tensor.get(), &buffers_.data[index]));
    int32_t type = 0, ordinal = 0;
    check(aoti_torch_get_device_type(tensor.get(), &type));
    check(aoti_torch_get_device_index(tensor.get(), &ordinal));
    if (type != device_type_ || ordinal != device_index_) {
      fail("tessera: tensor " + std::to_string(index) + " is not on q's device");
    }
  }

  // A new tensor without gaps that the call fills, its axes in the order of the strides `like`.
  Tensor output(int index, const int64_t* sizes, int64_t rank, int32_t scalar_type,
                const int64_t* like = nullptr) {
    const std::array<int64_t, 4> strides = tessera_torch::dense_strides(sizes, like, rank);
    Tensor tensor = empty(rank, sizes, strides.data(), scalar_type);
    describe(problem_, index, paged(), {sizes, strides.data(), rank, scalar_type});
    check(aoti_torch_get_data_ptr(tensor.get(), &buffers_.data[index]));
    return tensor;
  }

  Tensor empty(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t scalar_type) {
    AtenTensorHandle handle;
    check(aoti_torch_empty_strided(rank, sizes, strides, scalar_type, device_type_, device_index_,
                                   &handle));
    return Tensor(handle);
  }

  void run() {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (device_.kind == TESSERA_CUDA) {
      guard.emplace(device_.ordinal);
      buffers_.stream = current_stream(device_.ordinal);
    } else {
      buffers_.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
      buffers_.parallel_for = on_torch_threads;
    }
    buffers_.allocate = allocate;
    buffers_.allocate_context = this;
    std::optional<tessera_torch::InterruptScope> scope;
    if (device_.kind == TESSERA_CPU && is_long()) buffers_.interrupt = scope.emplace().interrupt();
    tessera_error error;
    error.struct_size = sizeof error;
    const int32_t code = tessera_run(&problem_, &device_, &buffers_, &error);
    if (thrown_) std::rethrow_exception(thrown_);
    if (code != TESSERA_OK) fail(error.message);
  }

 private:
  // Worth the two system calls that watching for Ctrl-C takes: 20 ms of one core, and more.
  bool is_long() const {
    const auto& q = problem_.tensor[TESSERA_Q].extent;
    const int64_t pages = paged() ? problem_.tensor[TESSERA_PAGE_TABLE_K].extent[1] : 1;
    const double pairs = 1.0 * q[0] * q[1] * q[2] * problem_.tensor[TESSERA_K].extent[1] * pages;
    return pairs * (q[3] + problem_.tensor[TESSERA_V].extent[3]) >= 1e9;
  }

  bool paged() const { return inputs_[TESSERA_PAGE_TABLE_K].has_value(); }

  // The library's tessera_allocate; what PyTorch throws goes round it.
  static void* allocate(void* context, int64_t bytes) {
    Call& call = *static_cast<Call*>(context);
    try {
      return call.workspace_of(bytes);
    } catch (...) {
      call.thrown_ = std::current_exception();
      return nullptr;
    }
  }

  void* workspace_of(int64_t bytes) {
    constexpr int64_t kKeptWorkspace = 16 << 20, kAlignment = 64, one = 1;
    if (device_.kind == TESSERA_CPU && bytes <= kKeptWorkspace) {
      thread_local std::unique_ptr<char[]> kept;
      thread_local int64_t capacity = 0;
      if (bytes > capacity) {
        kept.reset(new char[bytes + kAlignment]);
        capacity = bytes;
      }
      const auto address = reinterpret_cast<uintptr_t>(kept.get());
      return kept.get() + (kAlignment - address % kAlignment) % kAlignment;
    }
    workspace_ = empty(1, &bytes, &one, aoti_torch_dtype_uint8());
    void* data = nullptr;
    check(aoti_torch_get_data_ptr(workspace_->get(), &data));
    return data;
  }

  // The handle of a stream lives in libtorch_cuda, which is there exactly when a CUDA tensor is.
  static void* current_stream(int32_t ordinal) {
    using Getter = AOTITorchError (*)(int32_t, void**);
    static const Getter get = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
      return reinterpret_cast<Getter>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream")
                                              : nullptr);
    }();
    if (get == nullptr) fail("tessera: this PyTorch has no libtorch_cuda");
    void* stream = nullptr;
    check(get(ordinal, &stream));
    return stream;
  }

  static void on_torch_threads(void*, int64_t n, void (*body)(void*, int64_t), void* arg) {
    torch::stable::parallel_for(0, n, 1, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(arg, i);
    });
  }

  tessera_problem problem_{};
  tessera_buffers buffers_{};
  tessera_device device_{};
  bool wants_max_logit_ = false;
  int32_t out_dtype_ = TESSERA_NONE, grad_dtype_ = TESSERA_NONE;
  int32_t device_type_ = 0, device_index_ = -1;
  std::array<std::optional<Tensor>, kNumInputs> inputs_;
  std::optional<Tensor> workspace_;
  std::exception_ptr thrown_;
};

// lse, and max_logit or an empty tensor: what a forward call fills beside o.
std::pair<Tensor, Tensor> row_outputs(Call& call) {
  const bool wide = call.described(TESSERA_Q).dtype == TESSERA_FP64;
  const int32_t rows = wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const int64_t* extent = call.described(TESSERA_Q).extent;
  const int64_t rank = Layout(call.q()).rank;
  const std::array<int64_t, 3> sizes = {extent[0], extent[2], extent[1]};
  Tensor lse = call.output(TESSERA_LSE, sizes.data() + (rank == 3), rank - 1, rows);
  const int64_t none = 0, one = 1;
  Tensor max_logit = call.wants_max_logit() ? call.output(TESSERA_MAX_LOGIT, &extent[2], 1, rows)
                                            : call.empty(1, &none, &one, rows);
  return {lse, max_logit};
}

void attention(StableIValue* stack, uint64_t, uint64_t) {
  Call call(stack, TESSERA_FORWARD);
  const Layout q(call.q()), v(call.v());
  std::array<int64_t, 4> sizes{};
  std::copy_n(q.sizes, q.rank, sizes.begin());
  sizes[q.rank - 1] = v.sizes[v.rank - 1];
  const int64_t* like = call.is_bhsd() ? q.strides : nullptr;
  const Tensor o = call.output(TESSERA_O, sizes.data(), q.rank, call.out_type(q.scalar_type), like);
  const auto [lse, max_logit] = row_outputs(call);
  call.run();
  stack[0] = from(o);
  stack[1] = from(lse);
  stack[2] = from(max_logit);
}

void attention_out(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor out = to<Tensor>(stack[0]);
  Call call(stack + 1, TESSERA_FORWARD);
  call.input(TESSERA_O, out);
  const auto [lse, max_logit] = row_outputs(call);
  call.run();
  stack[0] = from(lse);
  stack[1] = from(max_logit);
}

void attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  Tensor grad_o = to<Tensor>(stack[0]);
  const Tensor o = to<Tensor>(stack[1]), lse = to<Tensor>(stack[2]);
  const auto grad_lse = to<std::optional<Tensor>>(stack[3]);
  const int64_t wanted = to<int64_t>(stack[4]);
  Call call(stack + 5, TESSERA_BACKWARD);
  const Layout layout(grad_o);
  if (layout.rank > 0 && layout.strides[layout.rank - 1] != 1) {  // autograd made it: o.sum()
    grad_o = torch::stable::contiguous(grad_o);
  }
  call.input(TESSERA_DO, grad_o);
  call.input(TESSERA_O, o);
  call.input(TESSERA_LSE, lse);
  if (grad_lse) call.input(TESSERA_DLSE, *grad_lse);
  constexpr std::array kOf = {TESSERA_Q,    TESSERA_K,    TESSERA_V,
                              TESSERA_BIAS, TESSERA_SINK, TESSERA_ALIBI_SLOPES};
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < kOf.size(); ++i) {
    if ((wanted >> i & 1) == 0) continue;
    const Layout of(call.of(kOf[i]));
    gradients.push_back(call.output(TESSERA_DQ + static_cast<int>(i), of.sizes, of.rank,
                                    call.grad_type(kOf[i], of.scalar_type),
                                    kOf[i] <= TESSERA_V ? of.strides : nullptr));
  }
  call.run();
  stack[0] = from(gradients);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tessera, CPU, cpu) {
  cpu.impl("attention", attention);
  cpu.impl("attention_out", attention_out);
  cpu.impl("attention_backward", attention_backward);
}

STABLE_TORCH_LIBRARY_IMPL(tessera, CUDA, cuda) {
  cuda.impl("attention", attention);
  cuda.impl("attention_out", attention_out);
  cuda.impl("attention_backward", attention_backward);
}
