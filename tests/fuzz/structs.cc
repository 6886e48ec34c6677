// SPDX-License-Identifier: Apache-2.0
// Raw structs: from zeros, or from three plain tensors, field by field to anything.
#include "fuzz/call.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  fuzz::Call call;
  const int dtype = bytes.below(10);
  const int64_t sequences = bytes.below(4), rows = bytes.below(8);
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
    const int64_t extent[4] = {sequences, rows, 2, 4};
    tessera_tensor& t = call.problem.tensor[index];
    t.dtype = dtype;
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; --axis) {
      t.extent[axis] = extent[axis], t.stride[axis] = stride;
      stride *= extent[axis];
    }
  }
  call.problem.pass = bytes.below(2);
  constexpr int32_t kOutputs[] = {TESSERA_O, TESSERA_LSE};
  constexpr int32_t kGradients[] = {TESSERA_O,  TESSERA_LSE, TESSERA_DO,
                                    TESSERA_DQ, TESSERA_DK,  TESSERA_DV};
  call.problem.pass == TESSERA_BACKWARD ? tessera_outputs(&call.problem, kGradients, 6, nullptr)
                                        : tessera_outputs(&call.problem, kOutputs, 2, nullptr);
  call.spoil(bytes);
  call.make(bytes);
  return 0;
}
