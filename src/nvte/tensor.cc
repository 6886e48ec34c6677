// SPDX-License-Identifier: Apache-2.0
#include "nvte/tensor.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>

namespace tessera::nvte {
namespace {

constexpr size_t kMaxAxes = sizeof(NVTEShape::data) / sizeof(size_t);

constexpr size_t kMostElements = size_t{1} << 48;

NVTEBasicTensor nothing() { return {nullptr, kNVTEFloat32, {{0}, 1}}; }

void check_basic(const NVTEBasicTensor& value) {
  if (value.dtype < kNVTEByte || value.dtype >= kNVTENumTypes) {
    fail("dtype=%d: must be an NVTEDType, 0 to %d", static_cast<int>(value.dtype),
         static_cast<int>(kNVTENumTypes) - 1);
  }
  if (value.shape.ndim > kMaxAxes) {
    fail("shape.ndim=%zu: must be at most %zu axes", value.shape.ndim, kMaxAxes);
  }
  // Products of extents, strides and counts of bytes are not checked again.
  size_t elements = 1;
  for (size_t axis = 0; axis < value.shape.ndim; ++axis) {
    const size_t extent = std::max<size_t>(value.shape.data[axis], 1);
    if (__builtin_mul_overflow(elements, extent, &elements) || elements > kMostElements) {
      fail("shape.data[%zu]=%zu: makes more elements than any memory holds", axis, extent);
    }
  }
}

void check_array(const void* array, size_t count, const char* name) {
  if (!array && count > 0) fail("%s=null: must point to %zu elements", name, count);
}

void check_param(NVTETensorParam param) {
  if (param >= kNVTERowwiseData && param < kNVTENumTensorParams) return;
  fail("param=%d: must be an NVTETensorParam, 0 to %d", static_cast<int>(param),
       static_cast<int>(kNVTENumTensorParams) - 1);
}

// The bytes of a parameter.
struct Bytes {
  void* data;
  size_t size;
};
Bytes bytes_of_param(Tensor& tensor, NVTETensorParam param) {
  check_param(param);
  switch (param) {
    case kNVTEWithGEMMSwizzledScales:
      return {&tensor.swizzled_scales, sizeof tensor.swizzled_scales};
    case kNVTERowScaledNVFP4:
      return {&tensor.row_scaled, sizeof tensor.row_scaled};
    case kNVTENVFP4E4M3Max:
      return {&tensor.e4m3_max, sizeof tensor.e4m3_max};
    default:
      return {&tensor.params[param], sizeof(NVTEBasicTensor)};
  }
}
bool is_tensor_param(NVTETensorParam param) { return param < kNVTEWithGEMMSwizzledScales; }

}  // namespace

Tensor::Tensor() { std::fill(std::begin(params), std::end(params), nothing()); }

Tensor::Tensor(NVTEDType dtype, std::initializer_list<int64_t> shape, void* data) : Tensor() {
  NVTEBasicTensor& value = params[kNVTERowwiseData];
  value = {data, dtype, {{}, shape.size()}};
  std::copy(shape.begin(), shape.end(), value.shape.data);
}

int64_t Tensor::numel(int64_t first, int64_t last) const {
  int64_t product = 1;
  for (int64_t axis = first; axis < last; ++axis) {
    if (__builtin_mul_overflow(product, extent(axis), &product)) return INT64_MAX;
  }
  return product;
}

int64_t bytes_of(NVTEDType dtype) {
  constexpr int64_t kBytes[] = {1, 2, 4, 8, 4, 2, 2, 1, 1, 1, 0};
  static_assert(std::size(kBytes) == kNVTENumTypes);
  return kBytes[dtype];
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t axis = 0; axis < tensor.ndim(); ++axis) {
    text += (axis ? ", " : "") + std::to_string(tensor.extent(axis));
  }
  return text + "]";
}

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Wrong{text};
}

Tensor& tensor_of(NVTETensor handle, const char* name) {
  if (!handle) {
    fail(
        "%s=null: must be a tensor; what is not given is an empty one, of "
        "nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING)",
        name);
  }
  return *static_cast<Tensor*>(handle);
}

const Tensor& tensor_or_empty(NVTETensor handle) {
  static const Tensor empty;
  return handle ? *static_cast<const Tensor*>(handle) : empty;
}

}  // namespace tessera::nvte

using namespace tessera::nvte;

NVTETensor tessera_nvte_create_tensor(NVTEScalingMode scaling_mode) {
  auto tensor = std::make_unique<Tensor>();
  tensor->mode = scaling_mode;
  return tensor.release();
}

void tessera_nvte_create_tensors(NVTEScalingMode scaling_mode, NVTETensor* tensors,
                                 size_t num_tensors) {
  named("nvte_create_tensors", [&] {
    check_array(tensors, num_tensors, "tensors");
    for (size_t i = 0; i < num_tensors; ++i) tensors[i] = tessera_nvte_create_tensor(scaling_mode);
  });
}

void tessera_nvte_destroy_tensor(NVTETensor tensor) { delete static_cast<Tensor*>(tensor); }

void tessera_nvte_destroy_tensors(NVTETensor* tensors, size_t num_tensors) {
  named("nvte_destroy_tensors", [&] {
    check_array(tensors, num_tensors, "tensors");
    for (size_t i = 0; i < num_tensors; ++i) {
      tessera_nvte_destroy_tensor(tensors[i]);
      tensors[i] = nullptr;
    }
  });
}

void tessera_nvte_set_tensor_param(NVTETensor* tensor, NVTETensorParam param_name,
                                   const NVTEBasicTensor* param) {
  named("nvte_set_tensor_param", [&] {
    if (!tensor || !param) fail("%s=null: must be given", tensor ? "param" : "tensor");
    tessera_nvte_set_tensor_param_v2(*tensor, param_name, param, sizeof *param);
  });
}

NVTEBasicTensor tessera_nvte_get_tensor_param(const NVTETensor tensor, NVTETensorParam param_name) {
  return named("nvte_get_tensor_param", [&] {
    check_param(param_name);
    if (!is_tensor_param(param_name)) {
      fail("param=%d: is no tensor; nvte_get_tensor_param_v2 answers it", param_name);
    }
    return tensor_or_empty(tensor).params[param_name];
  });
}

void tessera_nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam param, const void* buf,
                                      size_t size_in_bytes) {
  named("nvte_set_tensor_param", [&] {
    const Bytes target = bytes_of_param(tensor_of(tensor, "tensor"), param);
    if (!buf || size_in_bytes != target.size) {
      fail("size_in_bytes=%zu: must be %zu, at a pointer that is not null", size_in_bytes,
           target.size);
    }
    if (is_tensor_param(param)) {
      NVTEBasicTensor value;
      std::memcpy(&value, buf, sizeof value);
      check_basic(value);
    }
    std::memcpy(target.data, buf, target.size);
  });
}

void tessera_nvte_get_tensor_param_v2(const NVTETensor tensor, NVTETensorParam param, void* buf,
                                      size_t size_in_bytes, size_t* size_written) {
  named("nvte_get_tensor_param_v2", [&] {
    Tensor source = tensor_or_empty(tensor);
    const auto [data, size] = bytes_of_param(source, param);
    if (size_written) *size_written = size;
    if (!buf) return;
    if (size_in_bytes < size) fail("size_in_bytes=%zu: must be at least %zu", size_in_bytes, size);
    std::memcpy(buf, data, size);
  });
}

NVTEDType tessera_nvte_tensor_type(const NVTETensor tensor) {
  return tensor_or_empty(tensor).dtype();
}
NVTEShape tessera_nvte_tensor_shape(const NVTETensor tensor) {
  return tensor_or_empty(tensor).shape();
}
size_t tessera_nvte_tensor_ndims(const NVTETensor tensor) {
  return tensor_or_empty(tensor).shape().ndim;
}

size_t tessera_nvte_tensor_size(const NVTETensor tensor, const size_t dim) {
  return named("nvte_tensor_size", [&] {
    const NVTEShape& shape = tensor_or_empty(tensor).shape();
    if (dim >= shape.ndim) fail("dim=%zu: must be below %zu, the axes of it", dim, shape.ndim);
    return shape.data[dim];
  });
}

size_t tessera_nvte_tensor_numel(const NVTETensor tensor) {
  return static_cast<size_t>(tensor_or_empty(tensor).numel());
}
size_t tessera_nvte_tensor_element_size(const NVTETensor tensor) {
  return static_cast<size_t>(bytes_of(tensor_or_empty(tensor).dtype()));
}
size_t tessera_nvte_tensor_size_bytes(const NVTETensor tensor) {
  return tessera_nvte_tensor_numel(tensor) * tessera_nvte_tensor_element_size(tensor);
}
void* tessera_nvte_tensor_data(const NVTETensor tensor) { return tensor_or_empty(tensor).data(); }
float* tessera_nvte_tensor_amax(const NVTETensor tensor) {
  return static_cast<float*>(tensor_or_empty(tensor).amax());
}
float* tessera_nvte_tensor_scale(const NVTETensor tensor) {
  return static_cast<float*>(tensor_or_empty(tensor).params[kNVTEScale].data_ptr);
}
float* tessera_nvte_tensor_scale_inv(const NVTETensor tensor) {
  return static_cast<float*>(tensor_or_empty(tensor).scale_inv());
}
NVTEScalingMode tessera_nvte_tensor_scaling_mode(const NVTETensor tensor) {
  return tensor_or_empty(tensor).mode;
}

NVTEShape tessera_nvte_make_shape(const size_t* data, size_t ndim) {
  return named("nvte_make_shape", [&] {
    if (ndim > kMaxAxes) fail("ndim=%zu: must be at most %zu axes", ndim, kMaxAxes);
    check_array(data, ndim, "data");
    NVTEShape shape{{}, ndim};
    std::copy_n(data, ndim, shape.data);
    return shape;
  });
}

void tessera_nvte_tensor_pack_create(NVTETensorPack* pack) {
  named("nvte_tensor_pack_create", [&] { check_array(pack, 1, "pack"); });
  tessera_nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, pack->tensors, NVTETensorPack::MAX_SIZE);
}

void tessera_nvte_tensor_pack_destroy(NVTETensorPack* pack) {
  named("nvte_tensor_pack_destroy", [&] { check_array(pack, 1, "pack"); });
  tessera_nvte_destroy_tensors(pack->tensors, NVTETensorPack::MAX_SIZE);
}
