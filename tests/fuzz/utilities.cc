// SPDX-License-Identifier: Apache-2.0
// rotate, append, merge, dropout_mask and contexts: small legal calls, spoilt.
#include <algorithm>
#include <array>

#include "core/problem/dtype.h"
#include "fuzz/memory.h"
#include "tensor.h"
#include "tessera.h"

namespace {

using fuzz::Bytes;
using fuzz::Memory;

constexpr tessera_device kCpu{TESSERA_CPU, 0, 0, 0};

struct Error : tessera_error {
  Error() : tessera_error{} { struct_size = sizeof(tessera_error); }
};

tessera_buffers context_of(Bytes& bytes) {
  tessera_buffers context{};
  context.struct_size = sizeof context;
  context.num_threads = 1;
  if (bytes.coin()) return context;
  int32_t* const fields[] = {&context.num_threads, &context.sm_margin, &context.reserved_half};
  *fields[bytes.below(3)] = static_cast<int32_t>(bytes.integer());
  if (bytes.coin()) context.workspace_bytes = bytes.integer();
  if (bytes.coin()) context.reserved[bytes.below(2)] = bytes.integer();
  return context;
}

// An output that may lie where an input does.
struct Pair {
  int input, output;
};

// Fields of tensors and of the struct become anything; false where no memory can be had for them.
template <typename Args, size_t kRanks>
bool spoil(Args& args, const std::array<int, kRanks>& ranks, std::initializer_list<int> outputs,
           Pair pair, Bytes& bytes, Memory& memory) {
  const bool in_place = bytes.coin();
  while (!bytes.done()) {
    const int what = bytes.below(8);
    if (what == 0) break;
    if (what == 1) args.flags = static_cast<uint32_t>(bytes.integer());
    if (what == 2) args.format = static_cast<int32_t>(bytes.integer());
    if (what == 3) args.reserved[bytes.below(4)] = bytes.integer();
    const auto count = static_cast<int>(std::size(args.tensor));
    if (what == 4) args.tensor[bytes.below(count)] = args.tensor[bytes.below(count)];
    if (what > 4) fuzz::edit(args.tensor[bytes.below(count)], bytes);
  }
  for (size_t i = 0; i < kRanks; ++i) {
    const tessera_tensor& t = args.tensor[i];
    if (t.dtype == TESSERA_NONE) continue;
    const int64_t reach = fuzz::reach_of(t, ranks[i]);
    if (reach < 0) return false;
    args.data[i] = memory.add(reach);
    if (t.dtype == TESSERA_INT32 || t.dtype == TESSERA_INT64) {
      for (int64_t at = 0; at < reach / 4; ++at)
        fuzz::put_integer(args.data[i], t.dtype, reach, at, at % 2);
    }
  }
  const auto reach_at = [&](int i) {
    return fuzz::reach_of(args.tensor[i], ranks[static_cast<size_t>(i)]);
  };
  if (in_place && args.data[pair.input] && args.data[pair.output] &&
      reach_at(pair.output) <= reach_at(pair.input))
    args.data[pair.output] = args.data[pair.input];
  for (const int i : outputs)
    if (args.data[i]) memory.allow(args.tensor[i], ranks[static_cast<size_t>(i)], args.data[i]);
  while (!bytes.done()) {  // values of lists
    const size_t i = static_cast<size_t>(bytes.below(static_cast<int>(kRanks)));
    const int64_t at = bytes.byte(), value = bytes.integer();
    const tessera_tensor& t = args.tensor[i];
    if (args.data[i] && (t.dtype == TESSERA_INT32 || t.dtype == TESSERA_INT64))
      fuzz::put_integer(args.data[i], t.dtype, fuzz::reach_of(t, ranks[i]), at, value);
  }
  memory.remember();
  return true;
}

template <typename Args, typename Function>
void call(Function function, Args& args, const tessera_buffers& context, const Memory& memory) {
  Error e;
  const int32_t code = function(&args, &kCpu, &context, &e);
  fuzz::check_error(code, e);
  FUZZ_CHECK(memory.is_as_remembered(code != TESSERA_OK));
}

void rotate(Bytes& bytes) {
  const tessera_buffers context = context_of(bytes);
  tessera_rotate_args args{};
  args.struct_size = sizeof args;
  const int64_t b = bytes.below(3), s = bytes.below(5);
  args.tensor[TESSERA_ROTATE_X] = args.tensor[TESSERA_ROTATE_Y] =
      tensor(TESSERA_FP32, {b, s, 2, 8});
  args.tensor[TESSERA_ROTATE_COS] = args.tensor[TESSERA_ROTATE_SIN] = tensor(TESSERA_FP32, {8, 4});
  if (bytes.coin()) args.tensor[TESSERA_ROTATE_POSITIONS] = tensor(TESSERA_INT64, {b, s});
  Memory memory;
  if (spoil(args, std::array{4, 4, 2, 2, 2}, {TESSERA_ROTATE_Y},
            {TESSERA_ROTATE_X, TESSERA_ROTATE_Y}, bytes, memory))
    call(tessera_rotate, args, context, memory);
}

void append(Bytes& bytes) {
  const tessera_buffers context = context_of(bytes);
  tessera_append_args args{};
  args.struct_size = sizeof args;
  const int64_t b = bytes.below(3), s = bytes.below(4);
  const int32_t cache = bytes.coin() ? TESSERA_FP32 : TESSERA_E4M3;
  const int has = bytes.byte();  // a bit each
  auto* const t = args.tensor;
  t[TESSERA_APPEND_K] = t[TESSERA_APPEND_V] = tensor(TESSERA_FP32, {b, s, 2, 8});
  t[TESSERA_APPEND_K_CACHE] = t[TESSERA_APPEND_V_CACHE] = tensor(cache, {b, 8, 2, 8});
  t[TESSERA_APPEND_SEQLENS] = tensor(TESSERA_INT32, {b});
  if (has & 1) {
    args.format = TESSERA_THD;
    t[TESSERA_APPEND_K] = t[TESSERA_APPEND_V] = tensor(TESSERA_FP32, {1, s, 2, 8});
    t[TESSERA_APPEND_CU_SEQLENS] = tensor(TESSERA_INT32, {b + 1});
  } else if (has & 2) {
    t[TESSERA_APPEND_SEQLENS_Q] = tensor(TESSERA_INT64, {b});
  }
  if (has & 4) {
    t[TESSERA_APPEND_PAGE_TABLE] = tensor(TESSERA_INT32, {b, 3});
    t[TESSERA_APPEND_K_CACHE] = t[TESSERA_APPEND_V_CACHE] = tensor(cache, {4, 3, 2, 8});
  }
  if (cache == TESSERA_E4M3)
    t[TESSERA_APPEND_K_SCALE] = t[TESSERA_APPEND_V_SCALE] = tensor(TESSERA_FP32, {1, 2});
  if (has & 8) {
    t[TESSERA_APPEND_COS] = t[TESSERA_APPEND_SIN] = tensor(TESSERA_FP32, {16, 4});
    t[TESSERA_APPEND_Q] = t[TESSERA_APPEND_Q_OUT] = t[TESSERA_APPEND_K];
  }
  Memory memory;
  if (spoil(args, std::array{4, 4, 4, 4, 1, 1, 2, 2, 2, 2, 2, 4, 4, 1},
            {TESSERA_APPEND_K_CACHE, TESSERA_APPEND_V_CACHE, TESSERA_APPEND_Q_OUT},
            {TESSERA_APPEND_Q, TESSERA_APPEND_Q_OUT}, bytes, memory))
    call(tessera_append, args, context, memory);
}

void merge(Bytes& bytes) {
  const tessera_buffers context = context_of(bytes);
  const int64_t b = bytes.below(3), s = bytes.below(4);
  // Two parts and the result: o, then lse.
  tessera_tensor o[3], lse[3];
  std::fill(o, o + 3, tensor(TESSERA_FP32, {b, s, 2, 4}));
  std::fill(lse, lse + 3, tensor(TESSERA_FP32, {b, 2, s}));
  int64_t parts = 2;
  int32_t format = TESSERA_BSHD;
  while (!bytes.done()) {
    const int what = bytes.below(8);
    if (what == 0) parts = bytes.below(3);
    if (what == 1) format = static_cast<int32_t>(bytes.integer());
    if (what > 1) fuzz::edit((bytes.coin() ? o : lse)[bytes.below(3)], bytes);
  }
  Memory memory;
  void *o_data[3], *lse_data[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t reach = fuzz::reach_of(o[i], 4), of_lse = fuzz::reach_of(lse[i], 3);
    if (reach < 0 || of_lse < 0) return;
    o_data[i] = memory.add(reach), lse_data[i] = memory.add(of_lse);
  }
  memory.allow(o[2], 4, o_data[2]), memory.allow(lse[2], 3, lse_data[2]);
  memory.remember();
  Error e;
  const int32_t code = tessera_merge(parts, format, o, o_data, lse, lse_data, &o[2], o_data[2],
                                     &lse[2], lse_data[2], &kCpu, &context, &e);
  fuzz::check_error(code, e);
  FUZZ_CHECK(memory.is_as_remembered(code != TESSERA_OK));
}

void dropout_mask(Bytes& bytes) {
  const tessera_buffers context = context_of(bytes);
  int64_t extent[4];
  for (int64_t& n : extent) n = bytes.integer();
  __int128 count = 1;
  bool is_empty = false, is_large = false;
  for (const int64_t n : extent) {
    is_empty |= n == 0;
    count = is_large ? count : count * n;
    is_large |= count > fuzz::kMostBytes || count < 0;
  }
  if (is_empty) count = 0, is_large = false;
  // Beyond that the caller has no such memory, unless an extent is negative.
  if (is_large && std::none_of(extent, extent + 4, [](int64_t n) { return n < 0; })) return;
  Memory memory;
  const int32_t words = bytes.coin() ? 2 : static_cast<int32_t>(bytes.integer());
  auto* state = static_cast<int64_t*>(memory.add(words == 4 ? 32 : 16));
  const double p = bytes.real();
  auto* keep = static_cast<uint8_t*>(memory.add(is_large ? 0 : static_cast<int64_t>(count)));
  if (!is_large) {
    const tessera_tensor t = tensor(TESSERA_BOOL, {static_cast<int64_t>(count)});
    memory.allow(t, 1, keep);
  }
  memory.remember();
  Error e;
  const int32_t code = tessera_dropout_mask_at(extent[0], extent[1], extent[2], extent[3], p, state,
                                               words, nullptr, nullptr, keep, &kCpu, &context, &e);
  fuzz::check_error(code, e);
  FUZZ_CHECK(memory.is_as_remembered(code != TESSERA_OK));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  void (*const calls[])(Bytes&) = {rotate, append, append, merge, dropout_mask};
  calls[bytes.below(5)](bytes);
  return 0;
}
