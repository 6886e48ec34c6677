// SPDX-License-Identifier: Apache-2.0
#include "core/utilities/row_sums.h"

#include <cinttypes>

#include "core/validate/validate.h"

namespace tessera {
namespace {

// Rows of one sum, with their name for messages: "sums[3].term[0]".
struct Place {
  std::string name;
  const tessera_rows* rows;
};

Status check_tensor(const Place& place, const char* field, int32_t tensor, const RowSums& args) {
  if (tensor >= 0 && tensor < args.num_tensors && args.tensors[tensor]) return {};
  return invalid("%s.%s=%d: must be one of num_tensors=%" PRId64 " tensors that are not NULL",
                 place.name.c_str(), field, tensor, args.num_tensors);
}

Status check_place(const Place& place, const tessera_row_sum& sum, const RowSums& args) {
  const tessera_rows& rows = *place.rows;
  const char* name = place.name.c_str();
  if (size_of(rows.dtype) == 0)
    return invalid("%s.dtype=%d: must be of tessera_dtype", name, rows.dtype);
  TESSERA_RETURN_IF_ERROR(check_tensor(place, "tensor", rows.tensor, args));
  if (rows.index != -1) TESSERA_RETURN_IF_ERROR(check_tensor(place, "index", rows.index, args));
  const int64_t size = size_of(rows.dtype);
  const int64_t address = static_cast<int64_t>(
      reinterpret_cast<uintptr_t>(args.tensors[rows.tensor]) + static_cast<uint64_t>(rows.offset));
  const auto is_aligned = [&](int64_t stride, int64_t extent) {
    return extent == 1 || stride % size == 0;
  };
  if (address % size != 0 || !is_aligned(rows.row, rows.index == -1 ? sum.rows : 2) ||
      !is_aligned(rows.head, sum.heads)) {
    return invalid("%s: offset=%" PRId64 ", row=%" PRId64 ", head=%" PRId64
                   ": elements must lie at multiples of their %" PRId64 " bytes",
                   name, rows.offset, rows.row, rows.head, size);
  }
  return {};
}

bool can_be_summed(int32_t dtype, const Device& device) {
  return dtype == TESSERA_FP32 || is_16bit(dtype) ||
         (dtype == TESSERA_FP64 && device.kind == TESSERA_CPU);
}

Status check_dtypes(const Place& place, const tessera_row_sum& sum, const Device& device) {
  const int32_t dtype = place.rows->dtype;
  if (sum.num_terms == 1) {
    if (dtype == sum.to.dtype) return {};
    if (can_be_summed(dtype, device) && can_be_summed(sum.to.dtype, device)) return {};
    return invalid(
        "%s.dtype=%s: must be %s, as what it is copied to; fp32, bf16 and fp16 are converted",
        place.name.c_str(), dtype_name(dtype).data(), dtype_name(sum.to.dtype).data());
  }
  if (can_be_summed(dtype, device)) return {};
  return invalid("%s.dtype=%s: must be fp32, bf16 or fp16 in a sum, on the CPU also fp64",
                 place.name.c_str(), dtype_name(dtype).data());
}

Status check_sum(int64_t i, const RowSums& args, const Device& device) {
  const tessera_row_sum& sum = args.sums[i];
  const std::string name = "sums[" + std::to_string(i) + "]";
  constexpr int64_t kMost = int64_t{1} << 40;
  for (const int64_t extent : {sum.rows, sum.heads, sum.columns}) {
    if (extent >= 0 && extent <= kMost) continue;
    return invalid("%s: rows=%" PRId64 ", heads=%" PRId64 ", columns=%" PRId64
                   ": must be between 0 and 2^40",
                   name.c_str(), sum.rows, sum.heads, sum.columns);
  }
  if (sum.num_terms < 0 || sum.num_terms > TESSERA_MAX_TERMS) {
    return invalid("%s.num_terms=%d: must be from 0 to %d; sum further terms in another call",
                   name.c_str(), sum.num_terms, TESSERA_MAX_TERMS);
  }
  if (sum.rows == 0 || sum.heads == 0 || sum.columns == 0) return {};
  const Place to{name + ".to", &sum.to};
  TESSERA_RETURN_IF_ERROR(check_place(to, sum, args));
  if (sum.num_terms != 1) TESSERA_RETURN_IF_ERROR(check_dtypes(to, sum, device));
  for (int t = 0; t < sum.num_terms; ++t) {
    const Place term{name + ".term[" + std::to_string(t) + "]", &sum.term[t]};
    TESSERA_RETURN_IF_ERROR(check_place(term, sum, args));
    TESSERA_RETURN_IF_ERROR(check_dtypes(term, sum, device));
  }
  return {};
}

}  // namespace

Status validate(const RowSums& args, const Device& device) {
  if (args.num_sums < 0 || args.num_tensors < 0) {
    return invalid("num_sums=%" PRId64 ", num_tensors=%" PRId64 ": must not be negative",
                   args.num_sums, args.num_tensors);
  }
  if (args.num_sums > 0 && (!args.sums || !args.tensors)) {
    return invalid("sums=NULL or tensors=NULL: must be arrays of num_sums=%" PRId64
                   " and num_tensors=%" PRId64 " elements",
                   args.num_sums, args.num_tensors);
  }
  for (int64_t i = 0; i < args.num_sums; ++i) TESSERA_RETURN_IF_ERROR(check_sum(i, args, device));
  return {};
}

}  // namespace tessera
