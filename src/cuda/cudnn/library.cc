// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/library.h"

#include <cudnn.h>
#include <dlfcn.h>
#include <nvrtc.h>

#include <array>
#include <memory>
#include <type_traits>

#include "cuda/cudnn/rules.h"

namespace tessera::cuda::cudnn {
namespace {

// The functions of libcudnn that are called, here and by its front end.
struct Functions {
  decltype(&::cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&::cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&::cudnnBackendExecute) execute;
  decltype(&::cudnnBackendFinalize) finalize;
  decltype(&::cudnnBackendGetAttribute) get_attribute;
  decltype(&::cudnnBackendSetAttribute) set_attribute;
  decltype(&::cudnnCreate) create;
  decltype(&::cudnnGetErrorString) error_string;
  decltype(&::cudnnGetLastErrorString) last_error_string;
  decltype(&::cudnnGetStream) get_stream;
  decltype(&::cudnnGetVersion) version;
  decltype(&::cudnnSetStream) set_stream;
#if CUDNN_VERSION >= 92300
  decltype(&::cudnnGetExecutionPlanWorkspaceSize) workspace_size;  // null in an older library
#endif
};

struct Library {
  Functions functions{};
  std::string unavailable;
};

// Where pip puts libcudnn beside the installed package; "" where nobody knows where this library is.
std::string beside_the_package() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&library_unavailable), &info) || !info.dli_fname) {
    return {};
  }
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  if (slash == std::string::npos) return {};
  return file.substr(0, slash) + "/../nvidia/cudnn/lib/libcudnn.so.9";
}

// The one that the process has comes first: two of them fight over their sub-libraries.
void* opened() {
  constexpr const char* kName = "libcudnn.so.9";
  constexpr int kFlags = RTLD_LAZY | RTLD_LOCAL;
  if (void* library = dlopen(kName, kFlags | RTLD_NOLOAD)) return library;
  const std::string beside = beside_the_package();
  if (!beside.empty()) {
    if (void* library = dlopen(beside.c_str(), kFlags)) return library;
  }
  return dlopen(kName, kFlags);
}

std::string version_text(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Library open_library() {
  Library library;
  void* const handle = opened();
  if (!handle) {
    library.unavailable = "libcudnn.so.9 not found; pip install nvidia-cudnn-cu13";
    return library;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function && library.unavailable.empty()) {
      library.unavailable = std::string("libcudnn.so.9 has no ") + name;
    }
  };
  Functions& f = library.functions;
  find(f.version, "cudnnGetVersion");
  if (f.version && f.version() < static_cast<size_t>(kLeastVersion)) {
    library.unavailable = "libcudnn " + version_text(f.version()) + " is older than " +
                          version_text(kLeastVersion) + "; pip install -U nvidia-cudnn-cu13";
    return library;
  }
  find(f.create_descriptor, "cudnnBackendCreateDescriptor");
  find(f.destroy_descriptor, "cudnnBackendDestroyDescriptor");
  find(f.execute, "cudnnBackendExecute");
  find(f.finalize, "cudnnBackendFinalize");
  find(f.get_attribute, "cudnnBackendGetAttribute");
  find(f.set_attribute, "cudnnBackendSetAttribute");
  find(f.create, "cudnnCreate");
  find(f.error_string, "cudnnGetErrorString");
  find(f.last_error_string, "cudnnGetLastErrorString");
  find(f.get_stream, "cudnnGetStream");
  find(f.set_stream, "cudnnSetStream");
#if CUDNN_VERSION >= 92300
  f.workspace_size = reinterpret_cast<decltype(f.workspace_size)>(
      dlsym(handle, "cudnnGetExecutionPlanWorkspaceSize"));
#endif
  return library;
}

// Never destroyed: threads may still run when the process ends.
const Library& library() {
  static const Library& instance = *new Library(open_library());
  return instance;
}

const Functions& functions() { return library().functions; }

std::string text_of(cudnnStatus_t status) { return functions().error_string(status); }

}  // namespace

const std::string& library_unavailable() { return library().unavailable; }

Result<Handle*> handle_of(int ordinal) {
  constexpr int kMostDevices = 64;
  static auto& handles = *new std::array<Handle, kMostDevices>;
  if (ordinal < 0 || ordinal >= kMostDevices) {
    return failed("device.ordinal=%d: must be in [0, 64)", ordinal);
  }
  Handle& handle = handles[static_cast<size_t>(ordinal)];
  const std::lock_guard lock(handle.mutex);
  if (handle.cudnn) return &handle;
  cudnnHandle_t made = nullptr;
  const cudnnStatus_t status = functions().create(&made);
  if (status != CUDNN_STATUS_SUCCESS) return failed("cudnnCreate: %s", text_of(status).c_str());
  handle.cudnn = made;
  return &handle;
}

Status set_stream(const Handle& handle, cudaStream_t stream) {
  const cudnnStatus_t status =
      functions().set_stream(static_cast<cudnnHandle_t>(handle.cudnn), stream);
  if (status == CUDNN_STATUS_SUCCESS) return {};
  return failed("cudnnSetStream: %s", text_of(status).c_str());
}

}  // namespace tessera::cuda::cudnn

// ---- what the front end calls: hidden, so that no other library finds these ----

using tessera::cuda::cudnn::functions;

extern "C" {

size_t cudnnGetVersion() { return functions().version(); }
const char* cudnnGetErrorString(cudnnStatus_t status) { return functions().error_string(status); }
void cudnnGetLastErrorString(char* message, size_t max_size) {
  functions().last_error_string(message, max_size);
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  return functions().get_stream(handle, stream);
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  return functions().create_descriptor(type, descriptor);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  return functions().destroy_descriptor(descriptor);
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  return functions().finalize(descriptor);
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* elements) {
  return functions().set_attribute(descriptor, name, type, count, elements);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested,
                                       int64_t* count, void* elements) {
  return functions().get_attribute(descriptor, name, type, requested, count, elements);
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variant_pack) {
  return functions().execute(handle, plan, variant_pack);
}

#if CUDNN_VERSION >= 92300
// Only the sizes of graphs of many shapes ask for it.
cudnnStatus_t cudnnGetExecutionPlanWorkspaceSize(cudnnHandle_t handle,
                                                 cudnnBackendDescriptor_t plan,
                                                 cudnnBackendDescriptor_t variant_pack,
                                                 size_t* bytes) {
  if (!functions().workspace_size) return CUDNN_STATUS_NOT_SUPPORTED;
  return functions().workspace_size(handle, plan, variant_pack, bytes);
}
#endif

// An engine of norms wants these; no graph of attention does.
nvrtcResult nvrtcCreateProgram(nvrtcProgram*, const char*, const char*, int, const char* const*,
                               const char* const*) {
  return NVRTC_ERROR_INTERNAL_ERROR;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) {
  return NVRTC_ERROR_INTERNAL_ERROR;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }

}  // extern "C"
