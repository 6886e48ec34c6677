// SPDX-License-Identifier: Apache-2.0
// The C functions: structs in, Status and any stray exception out as a tessera_error.
#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <stdexcept>

#include "backends.h"
#include "core/cache/append.h"
#include "core/cache/rotate.h"
#include "core/case/case.h"
#include "core/choose/choose.h"
#include "core/choose/explain.h"
#include "core/choose/plan_cache.h"
#include "core/choose/workspace.h"
#include "core/environment.h"
#include "core/json.h"
#include "core/log.h"
#include "core/utilities/dropout_mask.h"
#include "core/utilities/merge.h"
#include "core/utilities/row_sums.h"
#include "core/validate/validate.h"

namespace tessera {
namespace {

// Never destroyed: plans may own what their runtime has torn down before the program's last line.
PlanCache& plan_cache() {
  static auto* const cache = new PlanCache(all_backends());
  return *cache;
}

const char* operation_of(const tessera_problem* problem) {
  const bool backward = problem && problem->struct_size >= offsetof(tessera_problem, flags) &&
                        problem->pass == TESSERA_BACKWARD;
  return backward ? "tessera.attention_backward" : "tessera.attention";
}

int32_t report(tessera_error* error, int32_t code, const char* operation, const char* message) {
  if (!error || error->struct_size < offsetof(tessera_error, message)) return code;
  error->code = code;
  const size_t capacity =
      std::min<size_t>(error->struct_size, sizeof *error) - offsetof(tessera_error, message);
  if (capacity == 0) return code;
  if (code == TESSERA_OK) {
    error->message[0] = '\0';
    return code;
  }
  const int length = std::snprintf(error->message, capacity, "%s: %s", operation, message);
  if (length < 0 || static_cast<size_t>(length) < capacity) return code;
  size_t end = capacity - 1;  // never end inside a UTF-8 character
  while (end > 0 && (static_cast<unsigned char>(error->message[end - 1]) & 0xC0) == 0x80) --end;
  if (end > 0 && static_cast<unsigned char>(error->message[end - 1]) >= 0xC0) --end;
  if (end < capacity - 1) error->message[end] = '\0';
  return code;
}

// body() answers a Status; nothing that it throws leaves the library.
template <typename Body>
int32_t guarded(tessera_error* error, const char* operation, Body&& body) {
  try {
    const Status status = body();
    return report(error, status.code(), operation, status.message().c_str());
  } catch (const std::bad_alloc&) {
    return report(error, TESSERA_OUT_OF_MEMORY, operation, "host memory ran out");
  } catch (const std::length_error&) {
    return report(error, TESSERA_OUT_OF_MEMORY, operation, "host memory ran out");
  } catch (const std::exception& exception) {
    return report(error, TESSERA_FAILED, operation, exception.what());
  } catch (...) {
    return report(error, TESSERA_FAILED, operation, "an unknown exception");
  }
}

#define TESSERA_ASSIGN_OR_RETURN(name, expression)        \
  auto name##_result = (expression);                      \
  if (!name##_result.ok()) return name##_result.status(); \
  auto& name = name##_result.value()

// Text into the caller's buffer; answers the bytes that all of it needs, NUL included.
int64_t write_text(const std::string& text, char* buffer, int64_t capacity) {
  if (buffer && capacity > 0) {
    const size_t length = std::min(text.size(), static_cast<size_t>(capacity - 1));
    std::memcpy(buffer, text.data(), length);
    buffer[length] = '\0';
  }
  return static_cast<int64_t>(text.size()) + 1;
}

Status check_workspace(const Buffers& buffers, const Device& device, int64_t needed) {
  if (needed == 0) return {};
  if (buffers.workspace_bytes < needed || !buffers.workspace) {
    return invalid("workspace_bytes=%" PRId64 ": must be at least %" PRId64
                   " at workspace=%p; "
                   "tessera_prepare says how many",
                   buffers.workspace_bytes, needed, buffers.workspace);
  }
  const uintptr_t alignment = device.kind == TESSERA_CPU ? 64 : 256;
  if (reinterpret_cast<uintptr_t>(buffers.workspace) % alignment == 0) return {};
  return invalid("workspace=%p: must be a multiple of %d bytes; allocate it aligned",
                 buffers.workspace, static_cast<int>(alignment));
}

// The caller's buffers, or, where it lent an allocator instead of a workspace, those with the bytes
// that the call needs, in `storage`.
Result<const Buffers*> with_workspace(const Buffers& buffers, int64_t needed, Buffers& storage) {
  if (needed == 0 || buffers.workspace || !buffers.allocate) return &buffers;
  storage = buffers;
  storage.workspace = buffers.allocate(buffers.allocate_context, needed);
  storage.workspace_bytes = needed;
  if (storage.workspace) return &storage;
  return Status(TESSERA_OUT_OF_MEMORY,
                "workspace: allocate answered NULL for " + std::to_string(needed) + " bytes");
}

Status fill_info(tessera_info* caller, const Planned& planned, int num_threads) {
  if (!caller) return {};
  const uint32_t size = caller->struct_size;
  if (size < offsetof(tessera_info, backend)) {
    return invalid(
        "info.struct_size=%u: must be the size of the caller's tessera_info; set it to "
        "sizeof(tessera_info)",
        size);
  }
  tessera_info info{};
  info.struct_size = size;
  TESSERA_ASSIGN_OR_RETURN(bytes, workspace_bytes_of(*planned.plan, planned.problem, num_threads));
  info.workspace_bytes = bytes;
  planned.backend->name().copy(info.backend, sizeof info.backend - 1);
  std::memcpy(caller, &info, std::min<size_t>(size, sizeof info));
  return {};
}

// body(problem, device, buffers) on a caller's structs, imported and not yet validated.
template <typename Body>
int32_t with_buffers(const tessera_problem* problem, const tessera_device* device,
                     const tessera_buffers* buffers, tessera_error* error, Body&& body) {
  return guarded(error, operation_of(problem), [&]() -> Status {
    Problem problem_storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import_problem(problem, problem_storage));
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    if (!buffers) return invalid("buffers=NULL: must point to a tessera_buffers");
    Buffers buffer_storage;
    TESSERA_ASSIGN_OR_RETURN(data, import_buffers(buffers, buffer_storage));
    return body(*ours, where, *data);
  });
}

// A function of the backend that owns the utilities of a device, on arguments that are imported and
// found legal.
template <typename Args>
int32_t run_utility(const char* operation, Result<const Args*> (*import)(const Args*, Args&),
                    Status (Backend::*method)(const Args&, const Buffers&, const Device&) const,
                    const Args* args, const tessera_device* device, const tessera_buffers* context,
                    tessera_error* error) {
  return guarded(error, operation, [&]() -> Status {
    Args storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import(args, storage));
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    Buffers context_storage;
    TESSERA_ASSIGN_OR_RETURN(buffers, import_buffers(context, context_storage));
    TESSERA_RETURN_IF_ERROR(validate(*ours, where));
    TESSERA_RETURN_IF_ERROR(validate_context(*buffers));
    TESSERA_ASSIGN_OR_RETURN(backend, choose_utilities(all_backends(), where));
    return (backend->*method)(*ours, *buffers, where);
  });
}

// The problem of tessera_explain, and the line that describes it.
struct Described {
  Problem problem;
  std::string case_text;  // "" when the problem was given
};

Result<Described> described(const tessera_problem* problem, const char* case_text) {
  if ((problem != nullptr) == (case_text != nullptr)) {
    return invalid("problem=%p, case_text=%p: give one of them, the other NULL",
                   static_cast<const void*>(problem), static_cast<const void*>(case_text));
  }
  if (case_text) {
    TESSERA_ASSIGN_OR_RETURN(parsed, parse_case(case_text));
    return Described{geometry_of(parsed).problem, to_text(parsed)};
  }
  Problem storage;
  TESSERA_ASSIGN_OR_RETURN(ours, import_problem(problem, storage));
  return Described{*ours, ""};
}

std::string describe() {
  JsonWriter json;
  json.begin_object();
  json.key("version").string(TESSERA_VERSION);
#if defined(__clang__)
  json.key("compiler").string("clang " __clang_version__);
#elif defined(__GNUC__)
  json.key("compiler").string("gcc " __VERSION__);
#endif
  json.key("backends").begin_array();
  for (const Backend* backend : all_backends()) {
    const bool unknown = backend->opens_library();
    const std::string why_not = unknown ? "" : backend->unavailable();
    json.begin_object();
    json.key("name").string(backend->name());
    json.key("available");
    unknown ? json.null() : json.boolean(why_not.empty());
    json.key("why_not").string(why_not);
    json.key("description").raw(backend->description_json()).end_object();
  }
  json.end_array();
  json.key("environment").begin_object();
  json.key("TESSERA_BACKEND").string(environment().backend);
  json.key("TESSERA_LOG").string(environment().log);
  json.key("TESSERA_NUM_THREADS").number(environment().num_threads);
  json.key("TESSERA_CPU_ISA").string(environment().cpu_isa);
  return std::move(json.end_object().end_object()).take();
}

}  // namespace
}  // namespace tessera

using namespace tessera;  // NOLINT: the functions below are the C face of this namespace

const char* tessera_version(void) { return TESSERA_VERSION; }

int32_t tessera_outputs(tessera_problem* problem, const int32_t* wanted, int32_t num_wanted,
                        tessera_error* error) {
  return guarded(error, operation_of(problem), [&]() -> Status {
    Problem storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import_problem(problem, storage));
    if (num_wanted < 0 || (num_wanted > 0 && !wanted)) {
      return invalid("num_wanted=%d: must be the number of indices at wanted=%p", num_wanted,
                     static_cast<const void*>(wanted));
    }
    const std::span indices(wanted, static_cast<size_t>(num_wanted));
    TESSERA_ASSIGN_OR_RETURN(filled, with_outputs(*ours, indices));
    for (const int32_t index : indices) {
      const size_t end = offsetof(tessera_problem, tensor) + (index + size_t{1}) * sizeof(Tensor);
      if (end <= problem->struct_size) continue;
      return invalid("wanted=%d: lies beyond problem.struct_size=%u; update the header", index,
                     problem->struct_size);
    }
    for (const int32_t index : indices) problem->tensor[index] = filled.tensor[index];
    return {};
  });
}

int32_t tessera_prepare(const tessera_problem* problem, const tessera_device* device,
                        int32_t num_threads, tessera_info* info, tessera_error* error) {
  return guarded(error, operation_of(problem), [&]() -> Status {
    Problem storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import_problem(problem, storage));
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    if (num_threads < 0) {
      return invalid("num_threads=%d: must be 0 (the library's default) or more", num_threads);
    }
    TESSERA_ASSIGN_OR_RETURN(planned, plan_cache().find(*ours, where));
    return fill_info(info, *planned, num_threads);
  });
}

int32_t tessera_run(const tessera_problem* problem, const tessera_device* device,
                    const tessera_buffers* buffers, tessera_error* error) {
  const auto run = [](const Problem& ours, const Device& where, const Buffers& data) -> Status {
    TESSERA_ASSIGN_OR_RETURN(planned, plan_cache().find(ours, where));
    TESSERA_RETURN_IF_ERROR(validate(planned->problem, data, where));
    if (!writes_anything(planned->problem)) return {};
    TESSERA_ASSIGN_OR_RETURN(
        needed, workspace_bytes_of(*planned->plan, planned->problem, data.num_threads));
    Buffers workspace_storage;
    TESSERA_ASSIGN_OR_RETURN(ready, with_workspace(data, needed, workspace_storage));
    TESSERA_RETURN_IF_ERROR(check_workspace(*ready, where, needed));
    return planned->plan->run(planned->problem, *ready, where);
  };
  return with_buffers(problem, device, buffers, error, run);
}

int32_t tessera_validate(const tessera_problem* problem, const tessera_device* device,
                         const tessera_buffers* buffers, tessera_error* error) {
  const auto check = [](const Problem& ours, const Device& where, const Buffers& data) -> Status {
    TESSERA_RETURN_IF_ERROR(validate(ours));
    TESSERA_ASSIGN_OR_RETURN(forced, with_forced_backend(all_backends(), normalised(ours)));
    return validate(forced, data, where);
  };
  return with_buffers(problem, device, buffers, error, check);
}

int64_t tessera_explain(const tessera_problem* problem, const char* case_text,
                        const tessera_device* device, char* buffer, int64_t capacity,
                        tessera_error* error) {
  int64_t needed = -1;
  const int32_t code = guarded(error, "tessera.explain", [&]() -> Status {
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    TESSERA_ASSIGN_OR_RETURN(ours, described(problem, case_text));
    TESSERA_RETURN_IF_ERROR(validate(ours.problem));
    TESSERA_ASSIGN_OR_RETURN(forced, with_forced_backend(all_backends(), normalised(ours.problem)));
    const std::string line = ours.case_text.empty() ? to_case(forced) : ours.case_text;
    needed = write_text(explain_json(all_backends(), forced, where, line), buffer, capacity);
    return {};
  });
  return code == TESSERA_OK ? needed : -1;
}

int32_t tessera_merge(int64_t num_parts, int32_t format, const tessera_tensor* o_parts,
                      const void* const* o_data, const tessera_tensor* lse_parts,
                      const void* const* lse_data, const tessera_tensor* o, void* o_out,
                      const tessera_tensor* lse, void* lse_out, const tessera_device* device,
                      const tessera_buffers* context, tessera_error* error) {
  return guarded(error, "tessera.merge", [&]() -> Status {
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    Buffers storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import_buffers(context, storage));
    if (!o || !lse) return invalid("o=NULL or lse=NULL: must describe the outputs");
    const MergeArgs args{num_parts, format, o_parts, o_data, lse_parts,
                         lse_data,  *o,     o_out,   *lse,   lse_out};
    TESSERA_RETURN_IF_ERROR(validate(args));
    TESSERA_RETURN_IF_ERROR(validate_context(*ours));
    TESSERA_ASSIGN_OR_RETURN(backend, choose_utilities(all_backends(), where));
    return backend->merge(args, *ours, where);
  });
}

int32_t tessera_sum_rows(int64_t num_sums, const tessera_row_sum* sums, int64_t num_tensors,
                         void* const* tensors, const tessera_device* device,
                         const tessera_buffers* context, tessera_error* error) {
  return guarded(error, "tessera.sum_rows", [&]() -> Status {
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    Buffers storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import_buffers(context, storage));
    const RowSums args{num_sums, sums, num_tensors, tensors};
    TESSERA_RETURN_IF_ERROR(validate(args, where));
    TESSERA_RETURN_IF_ERROR(validate_context(*ours));
    TESSERA_ASSIGN_OR_RETURN(backend, choose_utilities(all_backends(), where));
    return backend->sum_rows(args, *ours, where);
  });
}

int32_t tessera_dropout_mask(int64_t b, int64_t hq, int64_t sq, int64_t sk, double dropout_p,
                             const int64_t* rng_state, uint8_t* keep, const tessera_device* device,
                             const tessera_buffers* context, tessera_error* error) {
  return tessera_dropout_mask_at(b, hq, sq, sk, dropout_p, rng_state, 2, nullptr, nullptr, keep,
                                 device, context, error);
}

int32_t tessera_dropout_mask_at(int64_t b, int64_t hq, int64_t sq, int64_t sk, double dropout_p,
                                const int64_t* rng_state, int32_t rng_words, const int64_t* q_start,
                                const int64_t* k_start, uint8_t* keep, const tessera_device* device,
                                const tessera_buffers* context, tessera_error* error) {
  return guarded(error, "tessera.dropout_mask", [&]() -> Status {
    TESSERA_ASSIGN_OR_RETURN(where, import_device(device));
    Buffers storage;
    TESSERA_ASSIGN_OR_RETURN(ours, import_buffers(context, storage));
    const DropoutMaskCall call{b,         hq,        sq,      sk,      dropout_p,
                               rng_state, rng_words, q_start, k_start, keep};
    TESSERA_ASSIGN_OR_RETURN(args, dropout_mask_args(call, where));
    TESSERA_RETURN_IF_ERROR(validate_context(*ours));
    TESSERA_ASSIGN_OR_RETURN(backend, choose_utilities(all_backends(), where));
    if (b == 0 || sq == 0 || sk == 0) return {};
    return backend->dropout_mask(args, *ours, where);
  });
}

int32_t tessera_rotate(const tessera_rotate_args* args, const tessera_device* device,
                       const tessera_buffers* context, tessera_error* error) {
  return run_utility("tessera.rotate", import_rotate, &Backend::rotate, args, device, context,
                     error);
}

int32_t tessera_append(const tessera_append_args* args, const tessera_device* device,
                       const tessera_buffers* context, tessera_error* error) {
  return run_utility("tessera.append_kv", import_append, &Backend::append, args, device, context,
                     error);
}

const char* tessera_backend_name(int32_t i) {
  const BackendList backends = built_backends();
  if (i < 0 || static_cast<size_t>(i) >= backends.size()) return nullptr;
  return backends[static_cast<size_t>(i)]->name().data();  // names are literals
}

int64_t tessera_describe(char* buffer, int64_t capacity) {
  int64_t needed = -1;
  const int32_t code = guarded(nullptr, "tessera.env", [&]() -> Status {
    needed = write_text(describe(), buffer, capacity);
    return {};
  });
  return code == TESSERA_OK ? needed : -1;
}

void tessera_set_log(tessera_log_callback callback, void* user) { set_log(callback, user); }
