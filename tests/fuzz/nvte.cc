// SPDX-License-Identifier: Apache-2.0
// TransformerEngine's C names: a small legal call, whose tensors and options become anything. What
// is illegal is a std::runtime_error, as in TransformerEngine.
#include <stdexcept>

#include "fuzz/memory.h"
#include "nvte/small_call.h"

namespace {

using fuzz::Bytes;

constexpr size_t kMostElements = 1 << 12;

// A tensor of any dtype and shape, with exactly its memory or none.
void spoil(nvte_test::TensorWrapper& tensor, Bytes& bytes, fuzz::Memory& memory) {
  const auto dtype = static_cast<nvte_test::DType>(bytes.below(10));
  std::vector<size_t> extents(static_cast<size_t>(bytes.below(5)));
  for (size_t& n : extents)
    n = static_cast<size_t>(bytes.coin() ? bytes.below(9) : bytes.integer());
  size_t count = 1;
  bool is_empty = false, fits = true;
  for (const size_t n : extents) {
    is_empty |= n == 0;
    fits = fits && n <= kMostElements && (count *= n) <= kMostElements;
  }
  if (!fits && !is_empty) {
    tensor = nvte_test::TensorWrapper(nullptr, extents, dtype);
    return;
  }
  const int64_t size = is_empty ? 0 : static_cast<int64_t>(count * 8);  // of the widest dtype
  void* const data = memory.add(size);
  for (int64_t at = 0; at < size / 4; ++at)
    fuzz::put_integer(data, TESSERA_INT32, size, at, bytes.done() ? 0 : bytes.integer());
  tensor = nvte_test::TensorWrapper(data, extents, dtype);
}

void spoil_option(nvte_test::NvteCall& c, Bytes& bytes) {
  const int64_t value = bytes.integer();
  switch (bytes.below(12)) {
    case 0:
      c.max_q = static_cast<size_t>(value);
      break;
    case 1:
      c.max_kv = static_cast<size_t>(value);
      break;
    case 2:
      c.training = value % 2 != 0;
      break;
    case 3:
      c.max_logit = value % 2 != 0;
      break;
    case 4:
      c.scale = static_cast<float>(bytes.real());
      break;
    case 5:
      c.dropout = static_cast<float>(bytes.real());
      break;
    case 6:
      c.layout = c.dqkv_layout = static_cast<NVTE_QKV_Layout>(value & 31);
      break;
    case 7:
      c.bias_type = static_cast<NVTE_Bias_Type>(value & 3);
      break;
    case 8:
      c.mask = static_cast<NVTE_Mask_Type>(value & 7);
      break;
    case 9:
      c.softmax = static_cast<NVTE_Softmax_Type>(value & 3);
      break;
    case 10:
      c.left = value;
      break;
    default:
      c.right = value;
      break;
  }
}

template <typename Function>
void expect_answer(Function function) {
  try {
    function();
  } catch (const std::runtime_error& e) {
    FUZZ_CHECK(e.what()[0] != 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  fuzz::Memory memory;
  nvte_test::SmallCall c;
  nvte_test::TensorWrapper* const tensors[] = {
      &c.q,       &c.k,         &c.v,        &c.o,         &c.d_o,
      &c.dq,      &c.dk,        &c.dv,       &c.s,         &c.dp,
      &c.bias,    &c.dbias,     &c.cu_q,     &c.cu_kv,     &c.table_k,
      &c.table_v, &c.rng_state, &c.padded_q, &c.padded_kv, &c.softmax_offset};
  const bool backward = bytes.coin();
  while (!bytes.done()) {
    expect_answer([&] {
      if (bytes.coin())
        spoil_option(c, bytes);
      else
        spoil(*tensors[bytes.below(static_cast<int>(std::size(tensors)))], bytes, memory);
    });
  }
  expect_answer([&] { backward ? c.backward() : c.forward(); });
  return 0;
}
