// SPDX-License-Identifier: Apache-2.0
// Graph: one problem as cuDNN computes it. The only place that knows cuDNN's front end; no header of
// it or of cuDNN is seen from here.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "core/status.h"

namespace tessera::cuda::cudnn {

// What a graph depends on. Strides are of the axes [b, h, s, d], in elements.
struct Shape {
  bool backward;
  int32_t dtype;  // TESSERA_BF16 or TESSERA_FP16
  int64_t batch, hq, hk, sq, sk, dqk, dv;
  // How many tokens a packed side has in the backward pass, whose sums in the workspace are as long; 0:
  // the side is not packed.
  int64_t tokens_q, tokens_k;
  int64_t q[4], k[4], v[4], o[4], stats[4];
  int64_t grad_o[4], grad_q[4], grad_k[4], grad_v[4];
  // Sequences have lengths of their own and begin at offsets that are read on the device; the
  // strides of the batch mean nothing then.
  bool ragged;
  bool has_stats;       // the forward pass writes them, the backward pass reads them
  bool bottom_right;    // where the diagonal is
  int64_t left, right;  // what a query sees beside the diagonal; -1: all
};

// Device memory of a call. Lengths and offsets are read of a ragged shape.
struct Pointers {
  void *q, *k, *v, *o;
  void* stats;  // fp32: the natural logarithm of a row's sum
  void *grad_o, *grad_q, *grad_k, *grad_v;
  void *len_q, *len_k;  // int32 [batch]
  // int64 [batch + 1]: the element where each sequence begins
  void *offset_q, *offset_k, *offset_v, *offset_o, *offset_stats;
  void *offset_grad_o, *offset_grad_q, *offset_grad_k, *offset_grad_v;
};

class Graph {
 public:
  virtual ~Graph() = default;
  virtual int64_t workspace_bytes() const = 0;
  // Queues on the stream of `handle`, which no other thread may use meanwhile. workspace is aligned
  // to 256 bytes.
  virtual Status run(void* handle, const Pointers& pointers, float softmax_scale,
                     void* workspace) const = 0;
};

// TESSERA_REFUSED, with cuDNN's own text, where it has no kernel for the shape. Compiles kernels: up
// to a second. arch, handle: of the current device; a cudnnHandle_t.
Result<std::unique_ptr<Graph>> build_graph(const Shape& shape, int arch, void* handle);

// What the front end, which has many of cuDNN's rules, says of the shape on an architecture that need
// not be here. Asks libcudnn for its version alone.
Status check_graph(const Shape& shape, int arch);

// Likewise what cuDNN's heuristics say for a GPU that `device` describes in JSON, as
// CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION has it, and that need not be here. cuDNN then wants a
// libcuda.so.1 to open, for which the toolkit's stub will do.
Status check_graph(const Shape& shape, int arch, std::string_view device);

}  // namespace tessera::cuda::cudnn
