// SPDX-License-Identifier: Apache-2.0
// Legal cases, spoilt: a line of the case language, then edits of its problem.
#include "core/case/case.h"
#include "fuzz/call.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  const auto parsed = tessera::parse_case(bytes.line());
  if (!parsed.ok()) return -1;  // text.cc's; not kept in the corpus
  const tessera::CaseGeometry geometry = tessera::geometry_of(parsed.value());
  fuzz::Call call;
  call.problem = geometry.problem;
  const tessera_buffers scalars = tessera::scalars_of(geometry);
  call.buffers.softmax_scale = scalars.softmax_scale;
  call.buffers.softcap = scalars.softcap;
  call.buffers.dropout_p = scalars.dropout_p;
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (call.problem.tensor[i].dtype == TESSERA_NONE) continue;
    call.owner[i] = geometry.owner[i], call.offset[i] = geometry.offset[i];
  }
  call.spoil(bytes);
  call.make(bytes);
  return 0;
}
