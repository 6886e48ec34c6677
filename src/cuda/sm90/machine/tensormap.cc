// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/machine/tensormap.h"

#include <cuda_runtime_api.h>

#include "core/problem/dtype.h"

namespace tessera::cuda::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Asks the driver that the process has; the library is not linked with libcuda.
Encode driver_encode() {
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    constexpr unsigned kSinceCuda12 = 12000;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &entry, kSinceCuda12, cudaEnableDefault, &found);
    return error == cudaSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return encode;
}

}  // namespace

CUtensorMapDataType type_of_map(int dtype) {
  return dtype == TESSERA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

Status make_tensor_map(const MapShape& shape, const void* base, CUtensorMap* map) {
  const Encode encode = driver_encode();
  if (encode == nullptr) return failed("cuTensorMapEncodeTiled: not found in the driver");
  constexpr int kChunkColumns = 64;
  const auto bytes = [](int64_t stride, int64_t extent) {
    return static_cast<cuuint64_t>(bytes_of_stride(stride, extent));
  };
  const RowAxes row = row_axes(reinterpret_cast<uintptr_t>(base), shape.rows,
                               bytes_of_stride(shape.stride_row, shape.rows), shape.reach);
  const cuuint64_t extent[5] = {static_cast<cuuint64_t>(shape.head_dim),
                                static_cast<cuuint64_t>(shape.heads), row.extent[0], row.extent[1],
                                static_cast<cuuint64_t>(shape.batch)};
  const cuuint64_t stride[4] = {bytes(shape.stride_head, shape.heads), row.stride[0], row.stride[1],
                                bytes(shape.stride_batch, shape.batch)};
  const cuuint32_t box[5] = {kChunkColumns, static_cast<cuuint32_t>(shape.box_heads),
                             static_cast<cuuint32_t>(shape.box_rows), 1, 1};
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  // A box has rows of 128 bytes. Where memory is what bounds a kernel, L2 is not to bring more: 256
  // bytes are those of the next head, or those that the box beside this one asks for too.
  const auto promotion = shape.brings_boxes_alone ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                  : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const CUresult result =
      encode(map, shape.type, 5, reinterpret_cast<void*>(row.base), extent, stride, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return failed("cuTensorMapEncodeTiled: error %d for [%lld, %lld, %lld, %lld] at %p, reach %d",
                  static_cast<int>(result), static_cast<long long>(shape.batch),
                  static_cast<long long>(shape.rows), static_cast<long long>(shape.heads),
                  static_cast<long long>(shape.head_dim), base, shape.reach);
  }
  return {};
}

MapShape in_pairs(MapShape bytes) {
  bytes.type = type_of_map(TESSERA_BF16);
  bytes.head_dim /= 2;
  bytes.stride_head /= 2;
  bytes.stride_row /= 2;
  bytes.stride_batch /= 2;
  return bytes;
}

MapShape shape_of(const Tensor& t, int box_rows, int reach) {
  const MapShape shape{.type = type_of_map(t.dtype),
                       .head_dim = t.extent[3],
                       .heads = t.extent[2],
                       .rows = t.extent[1],
                       .batch = t.extent[0],
                       .stride_head = t.stride[2],
                       .stride_row = t.stride[1],
                       .stride_batch = t.stride[0],
                       .box_rows = box_rows,
                       .reach = reach};
  return is_fp8(t.dtype) ? in_pairs(shape) : shape;
}

Status map_of(const Problem& problem, const Buffers& buffers, int index, int box_rows, int reach,
              CUtensorMap* map) {
  const MapShape shape = shape_of(problem.tensor[index], box_rows, reach);
  return make_tensor_map(shape, buffers.data[index], map);
}

Status map_of_bias(const Problem& problem, const Buffers& buffers, int index, int box_rows,
                   CUtensorMap* map) {
  const Tensor& t = problem.tensor[index];
  const MapShape shape{.type = type_of_map(t.dtype),
                       .head_dim = t.extent[3],
                       .heads = t.stride[1] > 0 ? t.extent[1] : 1,
                       .rows = t.extent[2],
                       .batch = t.stride[0] > 0 ? t.extent[0] : 1,
                       .stride_head = t.stride[1],
                       .stride_row = t.stride[2],
                       .stride_batch = t.stride[0],
                       .box_rows = box_rows,
                       .reach = 0};
  return make_tensor_map(shape, buffers.data[index], map);
}

}  // namespace tessera::cuda::sm90
