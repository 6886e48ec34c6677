// SPDX-License-Identifier: Apache-2.0
// TransformerEngine's C names: small legal calls, whose tensors and options become anything, and
// tensors whose parameters do. What is illegal is a std::runtime_error, as in TransformerEngine.
// Handles are null or of tensors that live: the ABI has no way to tell another pointer from one.
#include <algorithm>
#include <cstring>
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
  const size_t element =
      nvte_tensor_element_size(nvte_test::TensorWrapper(nullptr, extents, dtype).data());
  const int64_t size = is_empty ? 0 : static_cast<int64_t>(count * element);
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

void attention(Bytes& bytes) {
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
  if (bytes.coin()) c.pack.size = static_cast<size_t>(bytes.integer());
  expect_answer([&] { backward ? c.backward() : c.forward(); });
}

// All getters of a tensor, or of null.
void ask(NVTETensor tensor, Bytes& bytes) {
  const NVTEShape shape = nvte_tensor_shape(tensor);
  FUZZ_CHECK(shape.ndim == nvte_tensor_ndims(tensor));
  FUZZ_CHECK(nvte_tensor_size_bytes(tensor) ==
             nvte_tensor_numel(tensor) * nvte_tensor_element_size(tensor));
  (void)nvte_tensor_type(tensor), (void)nvte_tensor_data(tensor), (void)nvte_tensor_amax(tensor);
  (void)nvte_tensor_scale(tensor), (void)nvte_tensor_scale_inv(tensor);
  (void)nvte_tensor_scaling_mode(tensor);
  expect_answer([&] { (void)nvte_tensor_size(tensor, static_cast<size_t>(bytes.integer())); });
}

// Any parameter of a tensor, or of null, becomes anything, by either version of the call.
void params(Bytes& bytes) {
  NVTETensor tensor = bytes.below(8) > 0
                          ? nvte_create_tensor(static_cast<NVTEScalingMode>(bytes.below(6)))
                          : nullptr;
  while (!bytes.done()) {
    NVTEBasicTensor value{nullptr, static_cast<NVTEDType>(bytes.below(16)), {}};
    value.shape.ndim = static_cast<size_t>(bytes.coin() ? bytes.below(9) : bytes.integer());
    for (size_t& n : value.shape.data) n = static_cast<size_t>(bytes.integer());
    const auto param = static_cast<NVTETensorParam>(bytes.below(16));
    const int what = bytes.below(8);
    const auto size =
        static_cast<size_t>(bytes.coin() ? static_cast<int64_t>(sizeof value) : bytes.below(96));
    expect_answer([&] {
      // The memory is as large as the caller says.
      std::vector<char> buffer(size);
      std::copy_n(reinterpret_cast<const char*>(&value), std::min(size, sizeof value),
                  buffer.begin());
      size_t written = 0;
      if (what < 3) nvte_set_tensor_param(&tensor, param, &value);
      if (what == 3) nvte_set_tensor_param_v2(tensor, param, buffer.data(), size);
      if (what == 4) nvte_get_tensor_param_v2(tensor, param, buffer.data(), size, &written);
      if (what == 5) (void)nvte_get_tensor_param(tensor, param);
      if (what == 6) nvte_set_tensor_param(bytes.coin() ? nullptr : &tensor, param, nullptr);
      if (what == 7) (void)nvte_make_shape(value.shape.data, value.shape.ndim);
    });
    ask(tensor, bytes);
  }
  nvte_destroy_tensor(tensor);
}

// Caches, conversions and counts: two sequences of four new tokens.
void helpers(Bytes& bytes) {
  fuzz::Memory memory;
  using nvte_test::DType;
  const auto make = [&](DType dtype, std::vector<size_t> shape, int64_t size) {
    void* const data = memory.add(size);
    if (dtype == DType::kInt32)
      for (int64_t at = 0; at < size / 4; ++at)
        fuzz::put_integer(data, TESSERA_INT32, size, at, at);
    return nvte_test::TensorWrapper(data, shape, dtype);
  };
  constexpr int64_t kRow = 2 * 4 * 4;  // bytes of two heads of four fp32
  nvte_test::TensorWrapper new_k = make(DType::kFloat32, {2, 4, 2, 4}, 8 * kRow),
                           new_v = make(DType::kFloat32, {2, 4, 2, 4}, 8 * kRow),
                           k_cache = make(DType::kFloat32, {4, 4, 2, 4}, 16 * kRow),
                           v_cache = make(DType::kFloat32, {4, 4, 2, 4}, 16 * kRow),
                           table = make(DType::kInt32, {2, 2}, 16),
                           cu_new = make(DType::kInt32, {3}, 12),
                           cu_cached = make(DType::kInt32, {3}, 12),
                           packed = make(DType::kFloat32, {8, 2, 4}, 8 * kRow),
                           rng = make(DType::kInt64, {2}, 16), seed = make(DType::kInt64, {1}, 8);
  nvte_test::TensorWrapper* const tensors[] = {&new_k,  &new_v,     &k_cache, &v_cache, &table,
                                               &cu_new, &cu_cached, &packed,  &rng,     &seed};
  int numbers[] = {2, 4, 4, 2, 1, 8};
  const int what = bytes.below(5), format = bytes.below(8);
  while (!bytes.done()) {
    expect_answer([&] {
      if (bytes.coin())
        numbers[bytes.below(6)] = static_cast<int>(bytes.integer());
      else
        spoil(*tensors[bytes.below(10)], bytes, memory);
    });
  }
  expect_answer([&] {
    const auto& n = numbers;
    if (what == 0)
      nvte_copy_to_kv_cache(new_k.data(), new_v.data(), k_cache.data(), v_cache.data(),
                            table.data(), cu_new.data(), cu_cached.data(),
                            static_cast<NVTE_QKV_Format>(format), n[0], n[1], n[2], n[3], n[4],
                            nullptr);
    if (what == 1)
      nvte_convert_thd_to_bshd(packed.data(), cu_new.data(), new_k.data(), n[0], n[1], nullptr);
    if (what == 2)
      nvte_convert_bshd_to_thd(new_k.data(), cu_new.data(), packed.data(), n[5], nullptr);
    if (what == 3)
      (void)nvte_get_runtime_num_segments(cu_new.data(), rng.data(), static_cast<size_t>(n[0]),
                                          nullptr);
    if (what == 4)
      nvte_populate_rng_state_async(rng.data(), seed.data(), static_cast<size_t>(n[0]),
                                    static_cast<size_t>(n[1]),
                                    static_cast<NVTE_Fused_Attn_Backend>(n[2]), nullptr);
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  void (*const calls[])(Bytes&) = {attention, attention, params, helpers};
  calls[bytes.below(4)](bytes);
  return 0;
}
