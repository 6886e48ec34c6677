// SPDX-License-Identifier: Apache-2.0
// xla_ffi_abi.h beside the header of an installed jaxlib: compiles if every size, offset and number
// that binding.cc relies on is the same.
#include <cstddef>

#include "jax/xla_ffi_abi.h"
#include "xla/ffi/api/c_api.h"

// Offsets by the names of either side; the last member's end is what runtimes compare sizes with.
#define SAME(Ours, member, Theirs, their_member)                                    \
  static_assert(offsetof(xla_ffi::Ours, member) == offsetof(Theirs, their_member)); \
  static_assert(sizeof(xla_ffi::Ours::member) == sizeof(Theirs::their_member))
#define HEADER(Ours, Theirs)                                              \
  static_assert(sizeof(xla_ffi::Ours) >= XLA_FFI_STRUCT_SIZE_OF(Theirs)); \
  SAME(Ours, header.struct_size, Theirs, struct_size);                    \
  SAME(Ours, header.extensions, Theirs, extension_start)
#define XLA_FFI_STRUCT_SIZE_OF(Theirs) static_cast<size_t>(Theirs##_STRUCT_SIZE)
#define FUNCTION(member, Theirs) SAME(Api, member, XLA_FFI_Api, Theirs)
#define NUMBER(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))

NUMBER(xla_ffi::kMajor, XLA_FFI_API_MAJOR);
static_assert(XLA_FFI_API_MINOR >= xla_ffi::kFirstMinor);

HEADER(Version, XLA_FFI_Api_Version);
SAME(Version, major, XLA_FFI_Api_Version, major_version);
SAME(Version, minor, XLA_FFI_Api_Version, minor_version);

HEADER(ErrorCreate, XLA_FFI_Error_Create_Args);
SAME(ErrorCreate, message, XLA_FFI_Error_Create_Args, message);
SAME(ErrorCreate, code, XLA_FFI_Error_Create_Args, errc);
NUMBER(xla_ffi::Code::kInvalidArgument, XLA_FFI_Error_Code_INVALID_ARGUMENT);
NUMBER(xla_ffi::Code::kResourceExhausted, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
NUMBER(xla_ffi::Code::kUnimplemented, XLA_FFI_Error_Code_UNIMPLEMENTED);
NUMBER(xla_ffi::Code::kInternal, XLA_FFI_Error_Code_INTERNAL);

HEADER(Buffer, XLA_FFI_Buffer);
static_assert(sizeof(xla_ffi::Buffer) == sizeof(XLA_FFI_Buffer));
SAME(Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(Buffer, data, XLA_FFI_Buffer, data);
SAME(Buffer, rank, XLA_FFI_Buffer, rank);
SAME(Buffer, dims, XLA_FFI_Buffer, dims);
NUMBER(xla_ffi::DataType::kBool, XLA_FFI_DataType_PRED);
NUMBER(xla_ffi::DataType::kS32, XLA_FFI_DataType_S32);
NUMBER(xla_ffi::DataType::kS64, XLA_FFI_DataType_S64);
NUMBER(xla_ffi::DataType::kU8, XLA_FFI_DataType_U8);
NUMBER(xla_ffi::DataType::kU32, XLA_FFI_DataType_U32);
NUMBER(xla_ffi::DataType::kF16, XLA_FFI_DataType_F16);
NUMBER(xla_ffi::DataType::kF32, XLA_FFI_DataType_F32);
NUMBER(xla_ffi::DataType::kF64, XLA_FFI_DataType_F64);
NUMBER(xla_ffi::DataType::kBF16, XLA_FFI_DataType_BF16);
NUMBER(xla_ffi::DataType::kF8E5M2, XLA_FFI_DataType_F8E5M2);
NUMBER(xla_ffi::DataType::kF8E4M3FN, XLA_FFI_DataType_F8E4M3FN);

SAME(Bytes, data, XLA_FFI_ByteSpan, ptr);
SAME(Bytes, size, XLA_FFI_ByteSpan, len);
SAME(Scalar, dtype, XLA_FFI_Scalar, dtype);
SAME(Scalar, value, XLA_FFI_Scalar, value);

HEADER(StreamGet, XLA_FFI_Stream_Get_Args);
SAME(StreamGet, context, XLA_FFI_Stream_Get_Args, ctx);
SAME(StreamGet, stream, XLA_FFI_Stream_Get_Args, stream);
HEADER(ThreadPoolSchedule, XLA_FFI_ThreadPool_Schedule_Args);
SAME(ThreadPoolSchedule, context, XLA_FFI_ThreadPool_Schedule_Args, ctx);
SAME(ThreadPoolSchedule, task, XLA_FFI_ThreadPool_Schedule_Args, task);
SAME(ThreadPoolSchedule, data, XLA_FFI_ThreadPool_Schedule_Args, data);
HEADER(ThreadPoolNumThreads, XLA_FFI_ThreadPool_NumThreads_Args);
SAME(ThreadPoolNumThreads, context, XLA_FFI_ThreadPool_NumThreads_Args, ctx);
SAME(ThreadPoolNumThreads, num_threads, XLA_FFI_ThreadPool_NumThreads_Args, num_threads);
HEADER(ErrorDestroy, XLA_FFI_Error_Destroy_Args);
SAME(ErrorDestroy, error, XLA_FFI_Error_Destroy_Args, error);

SAME(Api, header.struct_size, XLA_FFI_Api, struct_size);
SAME(Api, header.extensions, XLA_FFI_Api, extension_start);
SAME(Api, version, XLA_FFI_Api, api_version);
SAME(Api, internal, XLA_FFI_Api, internal_api);
FUNCTION(error_create, XLA_FFI_Error_Create);
FUNCTION(error_destroy, XLA_FFI_Error_Destroy);
FUNCTION(stream_get, XLA_FFI_Stream_Get);
FUNCTION(thread_pool_schedule, XLA_FFI_ThreadPool_Schedule);
FUNCTION(thread_pool_num_threads, XLA_FFI_ThreadPool_NumThreads);

HEADER(Args, XLA_FFI_Args);
SAME(Args, size, XLA_FFI_Args, size);
SAME(Args, types, XLA_FFI_Args, types);
SAME(Args, args, XLA_FFI_Args, args);
static_assert(sizeof(xla_ffi::Args) == sizeof(XLA_FFI_Args));
HEADER(Rets, XLA_FFI_Rets);
SAME(Rets, size, XLA_FFI_Rets, size);
SAME(Rets, types, XLA_FFI_Rets, types);
SAME(Rets, args, XLA_FFI_Rets, rets);
static_assert(sizeof(xla_ffi::Rets) == sizeof(XLA_FFI_Rets));
HEADER(Attrs, XLA_FFI_Attrs);
SAME(Attrs, size, XLA_FFI_Attrs, size);
SAME(Attrs, types, XLA_FFI_Attrs, types);
SAME(Attrs, names, XLA_FFI_Attrs, names);
SAME(Attrs, attrs, XLA_FFI_Attrs, attrs);
static_assert(sizeof(xla_ffi::Attrs) == sizeof(XLA_FFI_Attrs));
NUMBER(xla_ffi::AttrType::kArray, XLA_FFI_AttrType_ARRAY);
NUMBER(xla_ffi::AttrType::kDictionary, XLA_FFI_AttrType_DICTIONARY);
NUMBER(xla_ffi::AttrType::kScalar, XLA_FFI_AttrType_SCALAR);
NUMBER(xla_ffi::AttrType::kString, XLA_FFI_AttrType_STRING);

HEADER(CallFrame, XLA_FFI_CallFrame);
SAME(CallFrame, api, XLA_FFI_CallFrame, api);
SAME(CallFrame, context, XLA_FFI_CallFrame, ctx);
SAME(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(CallFrame, args, XLA_FFI_CallFrame, args);
SAME(CallFrame, rets, XLA_FFI_CallFrame, rets);
SAME(CallFrame, attrs, XLA_FFI_CallFrame, attrs);
NUMBER(xla_ffi::Stage::kInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
NUMBER(xla_ffi::Stage::kPrepare, XLA_FFI_ExecutionStage_PREPARE);
NUMBER(xla_ffi::Stage::kInitialize, XLA_FFI_ExecutionStage_INITIALIZE);
NUMBER(xla_ffi::Stage::kExecute, XLA_FFI_ExecutionStage_EXECUTE);

NUMBER(xla_ffi::kCommandBufferCompatible, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
SAME(Metadata, struct_size, XLA_FFI_Metadata, struct_size);
SAME(Metadata, version, XLA_FFI_Metadata, api_version);
SAME(Metadata, traits, XLA_FFI_Metadata, traits);
SAME(MetadataExtension, base, XLA_FFI_Metadata_Extension, extension_base);
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);

// What the header of a minor version has not, or calls otherwise.
#if XLA_FFI_API_MINOR >= 2
HEADER(DeviceOrdinalGet, XLA_FFI_DeviceOrdinal_Get_Args);
SAME(DeviceOrdinalGet, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(DeviceOrdinalGet, ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
FUNCTION(device_ordinal_get, XLA_FFI_DeviceOrdinal_Get);
#endif
#if XLA_FFI_API_MINOR < 4
using Extension = XLA_FFI_Extension_Base;
#else
using Extension = XLA_FFI_InternalExtension;
#endif
SAME(Extension, struct_size, Extension, struct_size);
SAME(Extension, type, Extension, type);
SAME(Extension, next, Extension, next);
NUMBER(xla_ffi::kMetadataExtension, XLA_FFI_Extension_Metadata);
