// SPDX-License-Identifier: Apache-2.0
// The part of XLA's C interface for custom calls ("FFI") that binding.cc uses, declared here as
// facts of that interface, so that the library builds without JAX and one binary serves every
// jaxlib whose interface has major version 0. What is read has not changed since minor version 1;
// what came later is read only where the runtime's table is long enough to have it.
// tests/jax/abi_test.cc holds this beside the header of the installed jaxlib.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xla_ffi {

inline constexpr int kMajor = 0;
inline constexpr int kFirstMinor = 1;

// Each struct that crosses begins with its size, as its author knows it, and a list of extensions.
struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
inline constexpr int32_t kMetadataExtension = 1;

struct Header {
  size_t struct_size;
  Extension* extensions;
};

struct Version {
  Header header;
  int major;
  int minor;
};

enum class Code : int32_t {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
};

enum class DataType : int32_t {
  kBool = 1,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU32 = 8,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
};

struct Error;    // the runtime's
struct Context;  // of one execution

struct ErrorCreate {
  Header header;
  const char* message;
  Code code;
};

struct ErrorDestroy {
  Header header;
  Error* error;
};

// Dense, the last axis innermost.
struct Buffer {
  Header header;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Bytes {  // a text, not NUL-terminated
  const char* data;
  size_t size;
};

struct Scalar {
  DataType dtype;
  void* value;
};

struct StreamGet {
  Header header;
  Context* context;
  void* stream;  // out: cudaStream_t
};

struct ThreadPoolSchedule {
  Header header;
  Context* context;
  void (*task)(void* data);  // on some thread, at some time, or on this one now
  void* data;
};

struct ThreadPoolNumThreads {
  Header header;
  Context* context;
  int64_t* num_threads;  // out
};

struct DeviceOrdinalGet {
  Header header;
  Context* context;
  int32_t ordinal;  // out
};

// The runtime's functions; those that nothing here calls have no type.
struct Api {
  Header header;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* error_get_message;
  void (*error_destroy)(ErrorDestroy*);
  void* handler_register;
  Error* (*stream_get)(StreamGet*);
  void* type_register;
  void* execution_context_get;
  void* state_set;
  void* state_get;
  void* device_memory_allocate;
  void* device_memory_free;
  Error* (*thread_pool_schedule)(ThreadPoolSchedule*);
  Error* (*thread_pool_num_threads)(ThreadPoolNumThreads*);
  void* future_create;
  void* future_set_available;
  void* future_set_error;
  void* run_id_get;
  Error* (*device_ordinal_get)(DeviceOrdinalGet*);
};

struct Args {
  Header header;
  int64_t size;
  int32_t* types;  // 1: Buffer
  Buffer** args;
};
using Rets = Args;  // laid out alike

enum class AttrType : int32_t { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct Attrs {  // sorted by name
  Header header;
  int64_t size;
  AttrType* types;
  Bytes** names;
  void** attrs;  // Scalar*, Bytes*
};

enum class Stage : int32_t { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct CallFrame {
  Header header;
  const Api* api;
  Context* context;
  Stage stage;
  Args args;
  Rets rets;
  Attrs attrs;
};

inline constexpr uint32_t kCommandBufferCompatible = 1;  // a trait

// The runtime asks what a handler is by a call with this extension and nothing else.
struct Metadata {
  size_t struct_size;
  Version version;  // out: of the interface that the handler was written for
  uint32_t traits;  // out
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

}  // namespace xla_ffi
