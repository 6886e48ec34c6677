// SPDX-License-Identifier: Apache-2.0
// The kernels of tessera::attention, attention_backward and attention_into, on the CPU and on CUDA: from
// tensors, integers and the text of a call (call.h) to a tessera_problem to one call of libtessera.
// Schemas are in _ops/__init__.py.
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
#include <string_view>
#include <vector>

#include "../call.h"
#include "interrupt.h"
#include "tensors.h"
#include "tessera.h"

namespace {

using tessera_torch::check;
using tessera_torch::describe;
using tessera_torch::fail;
using tessera_torch::Layout;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// A text of the dispatcher's, which is ours to delete. to<std::string> of PyTorch 2.11 keeps it for good.
class Text {
 public:
  explicit Text(StableIValue value) : handle_(to<StringHandle>(value)) {
    size_t length = 0;
    const char* data = nullptr;
    check(torch_string_length(handle_, &length));
    check(torch_string_c_str(handle_, &data));
    view_ = {data, length};
  }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() { torch_delete_string(handle_); }

  std::string_view view() const { return view_; }

 private:
  StringHandle handle_;
  std::string_view view_;
};

// One call. Allocates outputs and workspace by PyTorch's allocators; a thread on the CPU keeps the
// workspace of its last call, up to kKeptWorkspace.
class Run {
 public:
  // Takes what all operators take, from `stack` on: tensors, integers, and the text of the call.
  explicit Run(const StableIValue* stack)
      : inputs_(to<std::vector<Tensor>>(stack[0])),
        text_(stack[2]),
        call_(tessera_front::call_of(text_.view())),
        problem_(call_.problem),
        buffers_(call_.buffers) {
    const auto sizes = to<std::vector<int64_t>>(stack[1]);
    if (inputs_.empty() || inputs_.size() != call_.inputs.size() ||
        sizes.size() != call_.sizes.size()) {
      fail("tessera: other tensors or sizes than the call names: " + std::string(text_.view()));
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      tessera_front::set(problem_, buffers_, *call_.sizes[i], sizes[i]);
    }
    check(aoti_torch_get_device_type(inputs_[0].get(), &device_type_));
    check(aoti_torch_get_device_index(inputs_[0].get(), &device_index_));
    if (device_type_ == aoti_torch_device_type_cuda()) {
      device_.kind = TESSERA_CUDA;
      device_.ordinal = device_index_;
    }
    paged_ = call_.takes(TESSERA_PAGE_TABLE_K);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const int index = tensor_of(call_.inputs[i]);
      if (index == TESSERA_DO) make_readable(inputs_[i]);
      place(index, inputs_[i]);
      if (place_of_[index]) fail("tessera: the text of a call has a tensor twice");
      place_of_[index] = static_cast<int8_t>(i + 1);
    }
  }

  void must_be(int32_t pass) const {
    if (problem_.pass != pass) fail("tessera: the call of another pass than the operator's");
  }

  // Outputs of the caller's, to write into.
  void write_into(const std::vector<Tensor>& outputs) {
    if (outputs.size() != call_.outputs.size())
      fail("tessera: outputs that the call does not name");
    for (size_t i = 0; i < outputs.size(); ++i) {
      const tessera_front::Operand& operand = call_.outputs[i];
      const int index = tensor_of(operand);
      place(index, outputs[i]);
      if (operand.dtype != TESSERA_NONE && problem_.tensor[index].dtype != operand.dtype) {
        fail("tessera: an output has another dtype than the call asks for");
      }
    }
  }

  // New outputs without gaps.
  std::vector<Tensor> allocate_outputs() {
    if (problem_.flags & TESSERA_ACCUMULATE) fail("tessera: accumulate=True adds to given outputs");
    std::vector<Tensor> outputs;
    outputs.reserve(call_.outputs.size());
    for (const tessera_front::Operand& operand : call_.outputs) {
      const int index = tensor_of(operand);
      tessera_front::describe_new(problem_, index, operand.dtype);
      const int32_t dtype = problem_.tensor[index].dtype;
      const int32_t scalar_type = tessera_torch::scalar_type_of(dtype);
      std::array<int64_t, 4> sizes{};
      const int rank =
          tessera_front::sizes_of(problem_, index, paged_, rank_like(index), sizes.data());
      const auto strides = tessera_torch::dense_strides(sizes.data(), strides_like(index), rank);
      outputs.push_back(empty(rank, sizes.data(), strides.data(), scalar_type));
      describe(problem_, index, paged_, {sizes.data(), strides.data(), rank, scalar_type});
      check(aoti_torch_get_data_ptr(outputs.back().get(), &buffers_.data[index]));
    }
    return outputs;
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
    tessera_front::pack_rows(problem_, paged_);
    tessera_front::find_v_in_k(problem_, buffers_);
    std::optional<tessera_torch::InterruptScope> scope;
    if (device_.kind == TESSERA_CPU && is_long()) buffers_.interrupt = scope.emplace().interrupt();
    tessera_error error;
    error.struct_size = sizeof error;
    const int32_t code = tessera_run(&problem_, &device_, &buffers_, &error);
    if (thrown_) std::rethrow_exception(thrown_);
    if (code != TESSERA_OK) fail(error.message);
  }

 private:
  static int tensor_of(const tessera_front::Operand& operand) {
    if (operand.axis >= 0) fail("tessera: PyTorch's operators take each tensor as one of its own");
    return operand.tensors[0];
  }

  // Autograd makes strides of 0, of o.sum() say.
  static void make_readable(Tensor& tensor) {
    const Layout layout(tensor);
    if (layout.rank > 0 && layout.strides[layout.rank - 1] != 1) {
      tensor = torch::stable::contiguous(tensor);
    }
  }

  // A tensor that is there.
  void place(int index, const Tensor& tensor) {
    describe(problem_, index, paged_, Layout(tensor));
    check(aoti_torch_get_data_ptr(tensor.get(), &buffers_.data[index]));
    int32_t type = 0, ordinal = 0;
    check(aoti_torch_get_device_type(tensor.get(), &type));
    check(aoti_torch_get_device_index(tensor.get(), &ordinal));
    if (type != device_type_ || ordinal != device_index_) {
      fail("tessera: tensor " + std::to_string(index) + " is not on q's device");
    }
  }

  // The strides whose order an output's are to have: those of q for an o of BHSD, of q, k and v for
  // their gradients; null: row-major.
  const int64_t* strides_like(int index) const {
    int of = index == TESSERA_O && problem_.format_q == TESSERA_BHSD ? TESSERA_Q : -1;
    if (index >= TESSERA_DQ && index <= TESSERA_DV) of = TESSERA_Q + index - TESSERA_DQ;
    return of < 0 ? nullptr : Layout(inputs_[place_of_[of] - 1]).strides;
  }

  // The rank of what a gradient is of; -1: the output has that of its rule.
  int64_t rank_like(int index) const {
    constexpr std::array kOf = {TESSERA_Q,    TESSERA_K,    TESSERA_V,
                                TESSERA_BIAS, TESSERA_SINK, TESSERA_ALIBI_SLOPES};
    if (index < TESSERA_DQ || index > TESSERA_DALIBI_SLOPES) return -1;
    const int place = place_of_[kOf[index - TESSERA_DQ]];
    return place ? Layout(inputs_[place - 1]).rank : -1;
  }

  Tensor empty(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t scalar_type) {
    AtenTensorHandle handle;
    check(aoti_torch_empty_strided(rank, sizes, strides, scalar_type, device_type_, device_index_,
                                   &handle));
    return Tensor(handle);
  }

  // Worth the two system calls that watching for Ctrl-C takes: 20 ms of one core, and more.
  bool is_long() const {
    const auto& q = problem_.tensor[TESSERA_Q].extent;
    const int64_t pages = paged_ ? problem_.tensor[TESSERA_PAGE_TABLE_K].extent[1] : 1;
    const double pairs = 1.0 * q[0] * q[1] * q[2] * problem_.tensor[TESSERA_K].extent[1] * pages;
    return pairs * (q[3] + problem_.tensor[TESSERA_V].extent[3]) >= 1e9;
  }

  // The library's tessera_allocate; what PyTorch throws goes round it.
  static void* allocate(void* context, int64_t bytes) {
    Run& run = *static_cast<Run*>(context);
    try {
      return run.workspace_of(bytes);
    } catch (...) {
      run.thrown_ = std::current_exception();
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

  std::vector<Tensor> inputs_;
  Text text_;
  const tessera_front::Call& call_;  // until the thread reads another text: outputs are made before
  tessera_problem problem_;
  tessera_buffers buffers_;
  tessera_device device_{};
  bool paged_ = false;
  int32_t device_type_ = 0, device_index_ = -1;
  std::array<int8_t, TESSERA_NUM_TENSORS>
      place_of_{};  // of a tensor among inputs_, from 1; 0: none
  std::optional<Tensor> workspace_;
  std::exception_ptr thrown_;
};

template <int32_t pass>
void compute(StableIValue* stack, uint64_t, uint64_t) {
  Run run(stack);
  run.must_be(pass);
  const std::vector<Tensor> outputs = run.allocate_outputs();
  run.run();
  stack[0] = from(outputs);
}

void attention_into(StableIValue* stack, uint64_t, uint64_t) {
  const auto outputs = to<std::vector<Tensor>>(stack[0]);
  Run run(stack + 1);
  run.write_into(outputs);
  run.run();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tessera, CPU, cpu) {
  cpu.impl("attention", compute<TESSERA_FORWARD>);
  cpu.impl("attention_backward", compute<TESSERA_BACKWARD>);
  cpu.impl("attention_into", attention_into);
}

STABLE_TORCH_LIBRARY_IMPL(tessera, CUDA, cuda) {
  cuda.impl("attention", compute<TESSERA_FORWARD>);
  cuda.impl("attention_backward", compute<TESSERA_BACKWARD>);
  cuda.impl("attention_into", attention_into);
}
