// SPDX-License-Identifier: Apache-2.0
// Copies between layouts, for callers who need them: nvte_prepare_flash_attn_* and
// nvte_multi_tensor_*. tessera's own kernels read any strides.
#include <cinttypes>

#include "nvte/tokens/arguments.h"
#include "nvte/tokens/jobs.h"

namespace tessera::nvte {
namespace {

// One copy in four axes, in elements, whose last axis is contiguous on both sides.
struct Copy {
  const void* from;
  void* to;
  int64_t extent[3], from_stride[3], to_stride[3];
  int64_t from_d, to_d;
};

void copy(const Copy& c, NVTEDType dtype, cudaStream_t stream) {
  const int64_t element = bytes_of(dtype);
  if (element == 0) fail("dtype=%d: has no whole bytes", static_cast<int>(dtype));
  // Pieces divide both last axes and both strides.
  int64_t bits = c.from_d * element | c.to_d * element;
  for (int axis = 0; axis < 3; ++axis) {
    bits |= c.from_stride[axis] * element | c.to_stride[axis] * element;
  }
  const int64_t piece = pieces_of(bits, c.from, c.to).piece_bytes;
  CopyJob job{static_cast<const char*>(c.from),
              static_cast<char*>(c.to),
              piece,
              c.from_d * element / piece,
              {},
              {},
              {}};
  for (int axis = 0; axis < 3; ++axis) {
    job.extent[axis] = c.extent[axis];
    job.from_stride[axis] = c.from_stride[axis] * element / piece;
    job.to_stride[axis] = c.to_stride[axis] * element / piece;
  }
  job.extent[3] = c.to_d * element / piece;
  run(job, device_of(c.to), stream);
}

void* element_at(const Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data()) + element * bytes_of(tensor.dtype());
}

// The numel of `like` times three, and its dtype.
void check_three(const Tensor& like, const Tensor& qkv, const char* rule,
                 std::initializer_list<int64_t> shape) {
  bool right = qkv.dtype() == like.dtype() && qkv.ndim() == static_cast<int64_t>(shape.size());
  int64_t axis = 0;
  for (const int64_t extent : shape) right = right && qkv.extent(axis++) == extent;
  if (right && (qkv.data() || qkv.numel() == 0)) return;
  fail("qkv.shape=%s, dtype=%d: must be %s of dtype %d, with memory", shape_text(qkv).c_str(),
       static_cast<int>(qkv.dtype()), rule, static_cast<int>(like.dtype()));
}

void check_pairs(NVTETensor* inputs, NVTETensor* outputs, size_t num_tensors) {
  if (num_tensors > 0 && (!inputs || !outputs)) {
    fail("%s=null: must point to %zu tensors", inputs ? "outputs" : "inputs", num_tensors);
  }
}

void check_dtypes(const Tensor& from, const Tensor& to, size_t i) {
  if (from.dtype() == to.dtype()) return;
  fail("outputs[%zu].dtype=%d: must be that of inputs[%zu], %d", i, static_cast<int>(to.dtype()), i,
       static_cast<int>(from.dtype()));
}

}  // namespace
}  // namespace tessera::nvte

using namespace tessera::nvte;

void tessera_nvte_prepare_flash_attn_fwd(NVTETensor qkvi, NVTETensor qkv, cudaStream_t stream) {
  named("nvte_prepare_flash_attn_fwd", [&] {
    const Tensor& from = with_data(qkvi, "qkvi", 4);
    const Tensor& to = tensor_of(qkv, "qkv");
    const int64_t s = from.extent(0), b = from.extent(1), h = from.extent(2), d = from.extent(3);
    check_three(from, to, "[3, b, s, h, d], where qkvi is [s, b, h, d]", {3, b, s, h, d});
    for (int64_t i = 0; i < 3 && to.numel() > 0; ++i) {
      copy({element_at(from, i * d),
            element_at(to, i * b * s * h * d),
            {b, s, h},
            {h * 3 * d, b * h * 3 * d, 3 * d},
            {s * h * d, h * d, d},
            d,
            d},
           from.dtype(), stream);
    }
  });
}

void tessera_nvte_prepare_flash_attn_bwd(NVTETensor q, NVTETensor k, NVTETensor v, NVTETensor qkv,
                                         cudaStream_t stream) {
  named("nvte_prepare_flash_attn_bwd", [&] {
    const Tensor* const from[] = {&with_data(q, "q", 4), &with_data(k, "k", 4),
                                  &with_data(v, "v", 4)};
    const Tensor& to = tensor_of(qkv, "qkv");
    const int64_t b = from[0]->extent(0), s = from[0]->extent(1), h = from[0]->extent(2),
                  d = from[0]->extent(3);
    check_three(*from[0], to, "[s, b, h, 3 d], where q is [b, s, h, d]", {s, b, h, 3 * d});
    for (const Tensor* each : from) {
      if (each->dtype() != from[0]->dtype() || shape_text(*each) != shape_text(*from[0])) {
        fail("k, v: shape %s, dtype %d: must be those of q, %s, %d", shape_text(*each).c_str(),
             static_cast<int>(each->dtype()), shape_text(*from[0]).c_str(),
             static_cast<int>(from[0]->dtype()));
      }
    }
    for (int64_t i = 0; i < 3 && to.numel() > 0; ++i) {
      copy({from[i]->data(),
            element_at(to, i * d),
            {s, b, h},
            {h * d, s * h * d, d},
            {b * h * 3 * d, h * 3 * d, 3 * d},
            d,
            d},
           to.dtype(), stream);
    }
  });
}

void tessera_nvte_multi_tensor_transpose_to_bhsd(NVTETensor* inputs, NVTETensor* outputs,
                                                 size_t num_tensors,
                                                 NVTE_QKV_Format original_format,
                                                 cudaStream_t stream) {
  named("nvte_multi_tensor_transpose_to_bhsd", [&] {
    check_pairs(inputs, outputs, num_tensors);
    const bool sbhd = original_format == NVTE_SBHD;
    if (!sbhd && original_format != NVTE_BSHD) {
      fail("original_format=%d: must be NVTE_SBHD (0) or NVTE_BSHD (1)",
           static_cast<int>(original_format));
    }
    const auto one = [&](size_t i, bool run_it) {
      const Tensor &from = with_data(inputs[i], "inputs", 4),
                   &to = with_data(outputs[i], "outputs", 4);
      const int64_t b = from.extent(sbhd ? 1 : 0), s = from.extent(sbhd ? 0 : 1),
                    h = from.extent(2), d = from.extent(3), to_d = to.extent(3);
      check_dtypes(from, to, i);
      if (to.extent(0) != b || to.extent(1) != h || to.extent(2) != s || to_d < d) {
        fail("outputs[%zu].shape=%s: must be [b, h, s, d or more] of inputs[%zu].shape=%s", i,
             shape_text(to).c_str(), i, shape_text(from).c_str());
      }
      if (!run_it || to.numel() == 0) return;
      copy({from.data(),
            to.data(),
            {b, h, s},
            {sbhd ? h * d : s * h * d, d, sbhd ? b * h * d : h * d},
            {h * s * to_d, s * to_d, to_d},
            d,
            to_d},
           from.dtype(), stream);
    };
    for (const bool run_it : {false, true}) {
      for (size_t i = 0; i < num_tensors; ++i) one(i, run_it);
    }
  });
}

void tessera_nvte_multi_tensor_pad_last_dim(NVTETensor* inputs, NVTETensor* outputs,
                                            size_t num_tensors, cudaStream_t stream) {
  named("nvte_multi_tensor_pad_last_dim", [&] {
    check_pairs(inputs, outputs, num_tensors);
    const auto one = [&](size_t i, bool run_it) {
      const Tensor &from = with_data(inputs[i], "inputs", 2),
                   &to = with_data(outputs[i], "outputs", 2);
      const int64_t rows = from.extent(0), d = from.extent(1), to_d = to.extent(1);
      check_dtypes(from, to, i);
      if (to.extent(0) != rows || to_d < d) {
        fail("outputs[%zu].shape=%s: must be [rows, columns or more] of inputs[%zu].shape=%s", i,
             shape_text(to).c_str(), i, shape_text(from).c_str());
      }
      if (!run_it || to.numel() == 0) return;
      copy({from.data(), to.data(), {1, 1, rows}, {0, 0, d}, {0, 0, to_d}, d, to_d}, from.dtype(),
           stream);
    };
    for (const bool run_it : {false, true}) {
      for (size_t i = 0; i < num_tensors; ++i) one(i, run_it);
    }
  });
}
