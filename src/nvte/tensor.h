// SPDX-License-Identifier: Apache-2.0
// What an NVTETensor points at, and how a function of this library says what is wrong.
#pragma once

#include <stdexcept>
#include <string>

#include "tessera_nvte.h"

namespace tessera::nvte {

struct Tensor {
  NVTEScalingMode mode = NVTE_DELAYED_TENSOR_SCALING;
  NVTEBasicTensor params[kNVTEWithGEMMSwizzledScales];  // by NVTETensorParam
  uint8_t swizzled_scales = 0, row_scaled = 0;  // kNVTEWithGEMMSwizzledScales, kNVTERowScaledNVFP4
  int e4m3_max = 448;                           // kNVTENVFP4E4M3Max

  Tensor();  // empty: no data, fp32 [0]
  Tensor(NVTEDType dtype, std::initializer_list<int64_t> shape, void* data = nullptr);

  void* data() const { return params[kNVTERowwiseData].data_ptr; }
  NVTEDType dtype() const { return params[kNVTERowwiseData].dtype; }
  const NVTEShape& shape() const { return params[kNVTERowwiseData].shape; }
  int64_t ndim() const { return static_cast<int64_t>(shape().ndim); }
  // A shape without axes has one element.
  int64_t numel() const { return numel(0, ndim()); }
  // The product of axes [first, last).
  int64_t numel(int64_t first, int64_t last) const;
  int64_t extent(int64_t axis) const { return static_cast<int64_t>(shape().data[axis]); }
  void* scale_inv() const { return params[kNVTERowwiseScaleInv].data_ptr; }
  void* amax() const { return params[kNVTEAmax].data_ptr; }
};

// Bytes of an element; 0 of what has no whole number of them.
int64_t bytes_of(NVTEDType dtype);

// "[2, 5, 3, 64]"
std::string shape_text(const Tensor& tensor);

// What is wrong, as it is thrown inside: "Q.shape=[2]: must ...; ...". named() puts the function
// before it.
struct Wrong {
  std::string text;
};
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

// body(), whose Wrong becomes the std::runtime_error of the exported function `operation`.
template <typename Body>
auto named(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const Wrong& wrong) {
    throw std::runtime_error(std::string(operation) + ": " + wrong.text);
  }
}

// The tensor of an argument; a null one is wrong.
Tensor& tensor_of(NVTETensor handle, const char* name);
// The tensor of an argument that need not be given: a null one is an empty one.
const Tensor& tensor_or_empty(NVTETensor handle);

}  // namespace tessera::nvte
