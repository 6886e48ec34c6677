// SPDX-License-Identifier: Apache-2.0
// The handlers of the custom calls tessera_attention (both passes) and tessera_dropout_mask, on the
// CPU and on CUDA: from XLA's call frame to a tessera_problem to one call of libtessera.
//
// Shapes are read from the buffers, so that a program may be partitioned, batched or compiled for
// symbolic extents; the attribute `call` says the rest, as call.h reads it. Operands and results are in
// the order of its `in` and `out`. One result more is workspace, on CUDA.
//
// Seeds are 32-bit words in JAX, which has no int64 unless asked: pairs of them are read as one.
#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "../call.h"
#include "runtime.h"
#include "tessera.h"
#include "xla_ffi_abi.h"

namespace {

using tessera_front::fail;
using tessera_jax::check;
using tessera_jax::CpuWorkspace;
using tessera_jax::Failure;
using tessera_jax::on_xla_threads;
using tessera_jax::Runtime;

// Names the reason where the text of a call and its arrays do not belong together.
constexpr const char* kOtherVersion = "tessera: a custom call of another version of tessera.jax";

int32_t dtype_of(xla_ffi::DataType type) {
  switch (type) {
    case xla_ffi::DataType::kF32:
      return TESSERA_FP32;
    case xla_ffi::DataType::kBF16:
      return TESSERA_BF16;
    case xla_ffi::DataType::kF16:
      return TESSERA_FP16;
    case xla_ffi::DataType::kF64:
      return TESSERA_FP64;
    case xla_ffi::DataType::kF8E4M3FN:
      return TESSERA_E4M3;
    case xla_ffi::DataType::kF8E5M2:
      return TESSERA_E5M2;
    case xla_ffi::DataType::kBool:
      return TESSERA_BOOL;
    case xla_ffi::DataType::kS32:
      return TESSERA_INT32;
    case xla_ffi::DataType::kS64:
      return TESSERA_INT64;
    case xla_ffi::DataType::kU8:
    case xla_ffi::DataType::kU32:
      break;
  }
  return TESSERA_NONE;
}

struct Description {
  tessera_problem problem;
  tessera_buffers buffers;

  Description(const tessera_front::Call& call, int64_t num_args, const xla_ffi::Buffer* const* args,
              int64_t num_rets, const xla_ffi::Buffer* const* rets)
      : problem(call.problem), buffers(call.buffers), paged_(call.takes(TESSERA_PAGE_TABLE_K)) {
    if (!call.sizes.empty()) fail(kOtherVersion);  // extents are the arrays' own
    add(call.inputs, args, num_args);
    add(call.outputs, rets, num_rets);
    tessera_front::pack_rows(problem, paged_);
  }

 private:
  void add(const std::vector<tessera_front::Operand>& operands,
           const xla_ffi::Buffer* const* arrays, int64_t num_arrays) {
    if (static_cast<int64_t>(operands.size()) > num_arrays) fail(kOtherVersion);
    for (const tessera_front::Operand& operand : operands) {
      const xla_ffi::Buffer& array = **arrays++;
      for (int item = 0; item < operand.items; ++item) {
        add(operand.tensors[item], array, operand.axis, item);
      }
    }
  }

  void add(int index, const xla_ffi::Buffer& buffer, int64_t axis, int64_t item) {
    constexpr int64_t kMaxRank = 5;
    if (buffer.rank > kMaxRank) fail("tessera: an array of more than 5 axes");
    const bool words = buffer.dtype == xla_ffi::DataType::kU32 && index == TESSERA_RNG_STATE;
    std::array<int64_t, kMaxRank> sizes{}, strides{};
    int64_t rank = buffer.rank, step = 1, offset = 0;
    for (int64_t i = buffer.rank - 1, at = rank - 1 - (axis >= 0); i >= 0; --i) {
      if (i == axis) {
        offset = item * step;
        --rank;
      } else {
        sizes[at] = words ? buffer.dims[i] / 2 : buffer.dims[i];
        strides[at--] = step;
      }
      step *= std::max<int64_t>(buffer.dims[i], 1);
    }
    const int32_t dtype = words ? static_cast<int32_t>(TESSERA_INT64) : dtype_of(buffer.dtype);
    tessera_front::describe(problem, index, paged_, {sizes.data(), strides.data(), rank, dtype});
    const int64_t element = dtype == TESSERA_FP64 || dtype == TESSERA_INT64   ? 8
                            : dtype == TESSERA_FP32 || dtype == TESSERA_INT32 ? 4
                            : dtype == TESSERA_BF16 || dtype == TESSERA_FP16  ? 2
                                                                              : 1;
    buffers.data[index] = static_cast<char*>(buffer.data) + offset * element;
  }

  bool paged_;
};

// ---- attributes ----

template <typename T>
const T* attribute(const xla_ffi::CallFrame& frame, int64_t place, const char* name) {
  const auto& attrs = frame.attrs;
  if (place >= attrs.size || attrs.names[place]->size != std::strlen(name) ||
      std::memcmp(attrs.names[place]->data, name, attrs.names[place]->size) != 0) {
    fail(std::string("tessera: a custom call without the attribute ") + name);
  }
  return static_cast<const T*>(attrs.attrs[place]);
}

const tessera_front::Call& call_of(const xla_ffi::CallFrame& frame) {
  const auto& text = *attribute<xla_ffi::Bytes>(frame, 0, "call");
  if (frame.attrs.types[0] != xla_ffi::AttrType::kString) fail(kOtherVersion);
  return tessera_front::call_of({text.data, static_cast<size_t>(text.size)});
}

// ---- handlers ----

void attention(const xla_ffi::CallFrame& frame, int32_t kind) {
  Description description(call_of(frame), frame.args.size, frame.args.args, frame.rets.size,
                          frame.rets.args);
  tessera_problem& problem = description.problem;
  tessera_buffers& buffers = description.buffers;
  Runtime runtime(frame);
  const tessera_device device = runtime.device(kind);
  tessera_error error;
  error.struct_size = sizeof error;
  if (kind == TESSERA_CUDA) {
    buffers.stream = runtime.stream();
    if (frame.rets.size > 0) {
      const xla_ffi::Buffer& last = *frame.rets.args[frame.rets.size - 1];
      if (last.dtype == xla_ffi::DataType::kU8) {
        buffers.workspace = last.data;
        buffers.workspace_bytes = last.dims[0];
      }
    }
    check(tessera_run(&problem, &device, &buffers, &error), error);
    return;
  }
  buffers.num_threads = runtime.num_threads();
  buffers.parallel_for = on_xla_threads;
  buffers.parallel_context = &runtime;
  CpuWorkspace workspace;
  buffers.allocate = CpuWorkspace::allocate;
  buffers.allocate_context = &workspace;
  check(tessera_run(&problem, &device, &buffers, &error), error);
}

// (rng_state [, q_start] [, k_start]) -> keep bool [b, hq, sq, sk], all inputs int64 in pairs of
// words. The attribute `starts` has bit 0 where q_start is given, bit 1 where k_start is.
void dropout_mask(const xla_ffi::CallFrame& frame, int32_t kind) {
  const auto& dropout_p = *attribute<xla_ffi::Scalar>(frame, 0, "dropout_p");
  const auto& starts = *attribute<xla_ffi::Scalar>(frame, 1, "starts");
  if (frame.args.size < 1 || frame.rets.size != 1 || frame.rets.args[0]->rank != 4 ||
      dropout_p.dtype != xla_ffi::DataType::kF64 || starts.dtype != xla_ffi::DataType::kS32) {
    fail(kOtherVersion);
  }
  const xla_ffi::Buffer &state = *frame.args.args[0], &keep = *frame.rets.args[0];
  const int32_t given = *static_cast<const int32_t*>(starts.value);
  int64_t next = 1;
  const auto start = [&](int bit) -> const int64_t* {
    if ((given >> bit & 1) == 0 || next >= frame.args.size) return nullptr;
    return static_cast<const int64_t*>(frame.args.args[next++]->data);
  };
  const int64_t* const q_start = start(0);
  const int64_t* const k_start = start(1);
  Runtime runtime(frame);
  const tessera_device device = runtime.device(kind);
  tessera_buffers context{};
  context.struct_size = sizeof context;
  if (kind == TESSERA_CUDA) {
    context.stream = runtime.stream();
  } else {
    context.num_threads = runtime.num_threads();
    context.parallel_for = on_xla_threads;
    context.parallel_context = &runtime;
  }
  tessera_error error;
  error.struct_size = sizeof error;
  check(tessera_dropout_mask_at(keep.dims[0], keep.dims[1], keep.dims[2], keep.dims[3],
                                *static_cast<const double*>(dropout_p.value),
                                static_cast<const int64_t*>(state.data),
                                static_cast<int32_t>(state.dims[0] / 2), q_start, k_start,
                                static_cast<uint8_t*>(keep.data), &device, &context, &error),
        error);
}

// A runtime refuses a handler that says it was written for a newer interface than its own: ours
// says the runtime's own version, which has what is read. Before minor version 2 it asks without
// its table.
bool answers_metadata(xla_ffi::CallFrame& frame, uint32_t traits) {
  xla_ffi::Extension* extension = frame.header.extensions;
  if (extension == nullptr || extension->type != xla_ffi::kMetadataExtension) return false;
  xla_ffi::Metadata& metadata = *reinterpret_cast<xla_ffi::MetadataExtension*>(extension)->metadata;
  metadata.version.major = xla_ffi::kMajor;
  metadata.version.minor = xla_ffi::kFirstMinor;
  if (frame.api != nullptr && frame.api->version.major == xla_ffi::kMajor) {
    metadata.version.minor = frame.api->version.minor;
  }
  metadata.traits = traits;
  return true;
}

xla_ffi::Error* handle(xla_ffi::CallFrame* frame, int32_t kind,
                       void (*body)(const xla_ffi::CallFrame&, int32_t)) {
  if (answers_metadata(*frame, kind == TESSERA_CUDA ? xla_ffi::kCommandBufferCompatible : 0)) {
    return nullptr;
  }
  if (frame->stage != xla_ffi::Stage::kExecute) return nullptr;
  const Runtime runtime(*frame);
  try {
    body(*frame, kind);
    return nullptr;
  } catch (const Failure& failure) {
    return runtime.error(failure.code, failure.what());
  } catch (const std::bad_alloc&) {
    return runtime.error(TESSERA_OUT_OF_MEMORY, "tessera: host memory ran out");
  } catch (const std::exception& exception) {
    return runtime.error(TESSERA_FAILED, exception.what());
  }
}

}  // namespace

extern "C" {

TESSERA_API xla_ffi::Error* tessera_jax_attention_cpu(xla_ffi::CallFrame* frame) {
  return handle(frame, TESSERA_CPU, attention);
}

TESSERA_API xla_ffi::Error* tessera_jax_attention_cuda(xla_ffi::CallFrame* frame) {
  return handle(frame, TESSERA_CUDA, attention);
}

TESSERA_API xla_ffi::Error* tessera_jax_dropout_mask_cpu(xla_ffi::CallFrame* frame) {
  return handle(frame, TESSERA_CPU, dropout_mask);
}

TESSERA_API xla_ffi::Error* tessera_jax_dropout_mask_cuda(xla_ffi::CallFrame* frame) {
  return handle(frame, TESSERA_CUDA, dropout_mask);
}

// Fills in the problem and the buffers of a call before there is one, for Python: what shapes and
// options make of it is then asked of libtessera. Returns TESSERA_OK, or TESSERA_INVALID where
// something is given that is never legal, with why.
TESSERA_API int32_t tessera_jax_describe(const char* text, int64_t num_args,
                                         const xla_ffi::Buffer* const* args, int64_t num_rets,
                                         const xla_ffi::Buffer* const* rets,
                                         tessera_problem* problem, tessera_buffers* buffers,
                                         tessera_error* error) {
  try {
    const Description description(tessera_front::call_of(text), num_args, args, num_rets, rets);
    *problem = description.problem;
    *buffers = description.buffers;
    return TESSERA_OK;
  } catch (const std::exception& refusal) {
    std::strncpy(error->message, refusal.what(), sizeof error->message - 1);
    return error->code = TESSERA_INVALID;
  }
}
}
