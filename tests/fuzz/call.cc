// SPDX-License-Identifier: Apache-2.0
#include "fuzz/call.h"

#include <algorithm>
#include <numeric>

#include "core/problem/dtype.h"
#include "fuzz/memory.h"

namespace fuzz {
namespace {

struct Error : tessera_error {
  Error() : tessera_error{} { struct_size = sizeof(tessera_error); }
};

// Multiplications of a call, all of its rows against all of its keys.
double work_of(const tessera_problem& p) {
  const tessera_tensor &q = p.tensor[TESSERA_Q], &k = p.tensor[TESSERA_K], &v = p.tensor[TESSERA_V],
                       &table = p.tensor[TESSERA_PAGE_TABLE_K];
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  double keys = number(k.extent[1]), batch = number(q.extent[0]);
  if (table.dtype != TESSERA_NONE) keys *= number(table.extent[1]);
  for (const int index : {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K, TESSERA_SEQLENS_K})
    if (p.tensor[index].dtype != TESSERA_NONE)
      batch = std::max(batch, number(p.tensor[index].extent[0]));
  return (batch + 1) * (number(q.extent[1]) + 1) * (keys + 1) * (number(q.extent[2]) + 1) *
         (number(q.extent[3]) + number(v.extent[3]) + 1);
}

bool is_output(const tessera_problem& p, int index) { return tessera::is_output(p, index); }

// What a list of a legal call could hold.
int64_t plausible(const tessera_problem& p, int index, int64_t i) {
  const int64_t sq = p.tensor[TESSERA_Q].extent[1], sk = p.tensor[TESSERA_K].extent[1];
  const auto of = [](int64_t n, int64_t most) {
    return most < 0 || most == INT64_MAX ? 0 : (n * 7 + 3) % (most + 1);
  };
  const auto step = [&](int64_t tokens) {
    return tokens / std::max<int64_t>(p.tensor[index].extent[0], 1);
  };
  switch (index) {
    case TESSERA_SEQLENS_Q:
      return of(i, sq);
    case TESSERA_CU_SEQLENS_Q:
    case TESSERA_CU_SEQLENS_Q_PADDED:
      return i * step(sq);
    case TESSERA_CU_SEQLENS_K:
    case TESSERA_CU_SEQLENS_K_PADDED:
      return i * step(sk);
    case TESSERA_PAGE_TABLE_K:
    case TESSERA_PAGE_TABLE_V:
      return of(i, p.tensor[TESSERA_K].extent[0] - 1);
    default:
      return of(i, std::min<int64_t>(sk, 100));
  }
}

// Memory of all tensors, if it can be had.
bool give_memory(Call& call, Memory& memory) {
  const tessera_problem& p = call.problem;
  int64_t bytes[TESSERA_NUM_TENSORS] = {};
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    const tessera_tensor& t = p.tensor[i];
    if (t.dtype == TESSERA_NONE) continue;
    if (t.dtype < 0 || t.dtype > TESSERA_INT64) return false;
    const int64_t own = reach_of(t, tessera::tensor_rule(i).rank);
    if (own < 0 || call.offset[i] > kMostBytes) return false;
    int64_t& whole = bytes[call.owner[i]];
    whole = std::max(whole, own + call.offset[i] * tessera::size_of(t.dtype));
  }
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (call.owner[i] == i && bytes[i] >= 0) call.buffers.data[i] = memory.add(bytes[i]);
  }
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    const tessera_tensor& t = p.tensor[i];
    if (t.dtype == TESSERA_NONE) continue;
    auto* const first = static_cast<char*>(call.buffers.data[call.owner[i]]);
    call.buffers.data[i] = first + call.offset[i] * tessera::size_of(t.dtype);
    const int rank = tessera::tensor_rule(i).rank;
    const bool integers =
        t.dtype == TESSERA_INT32 || t.dtype == TESSERA_INT64 || t.dtype == TESSERA_BOOL;
    const int64_t size = tessera::size_of(t.dtype), own = reach_of(t, rank);
    const int64_t stride = std::max<int64_t>(rank == 1 ? t.stride[0] : 1, 1);
    for (int64_t at = 0; integers && at < own / size; ++at) {
      const int64_t value = t.dtype == TESSERA_BOOL ? at % 3 > 0 : plausible(p, i, at / stride);
      put_integer(call.buffers.data[i], t.dtype, own, at, value);
    }
    if (is_output(p, i)) memory.allow(t, rank, call.buffers.data[i]);
  }
  return true;
}

// Some integers of lists become anything.
void spoil_lists(Call& call, Bytes& bytes) {
  while (!bytes.done()) {
    const int index = bytes.below(TESSERA_NUM_TENSORS);
    const int64_t at = bytes.byte(), value = bytes.integer();
    const tessera_tensor& t = call.problem.tensor[index];
    if (t.dtype != TESSERA_INT32 && t.dtype != TESSERA_INT64) continue;
    put_integer(call.buffers.data[index], t.dtype, reach_of(t, tessera::tensor_rule(index).rank),
                at, value);
  }
}

void ask_without_memory(const Call& call, bool wants_all, bool explains) {
  Error e;
  tessera_problem described = call.problem;
  const bool backward = described.pass == TESSERA_BACKWARD;
  std::vector<int32_t> wanted{TESSERA_O, TESSERA_LSE};
  if (backward) wanted = {TESSERA_O, TESSERA_LSE, TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};
  if (wants_all) {
    wanted.resize(TESSERA_NUM_TENSORS);
    std::iota(wanted.begin(), wanted.end(), 0);
  }
  check_error(tessera_outputs(&described, wanted.data(), static_cast<int32_t>(wanted.size()), &e),
              e);
  if (e.code != TESSERA_OK) {
    FUZZ_CHECK(std::memcmp(&described, &call.problem, sizeof described) == 0);
  } else if (call.device.kind == TESSERA_CPU) {
    tessera_info info{};
    info.struct_size = sizeof info;
    check_error(tessera_prepare(&described, &call.device, 1, &info, &e), e);
    FUZZ_CHECK(info.workspace_bytes >= 0);
  }
  if (!explains) return;
  char answer[64];
  const int64_t needed =
      tessera_explain(&described, nullptr, &call.device, answer, sizeof answer, &e);
  FUZZ_CHECK(needed == -1 || needed > 1);
  if (needed > 1) FUZZ_CHECK(std::memchr(answer, 0, sizeof answer) != nullptr);
}

}  // namespace

Call::Call() {
  problem.struct_size = sizeof problem, buffers.struct_size = sizeof buffers;
  buffers.num_threads = 1;
  buffers.softmax_scale = 0.5, buffers.softcap = 10, buffers.dropout_p = 0.5;
  std::iota(std::begin(owner), std::end(owner), 0);
}

void Call::spoil(Bytes& bytes) {
  tessera_problem& p = problem;
  while (!bytes.done()) {
    switch (bytes.below(16)) {
      case 0:
        return;
      case 1:
        p.flags ^= 1u << bytes.below(32);
        break;
      case 2:
        p.pass = static_cast<int32_t>(bytes.integer());
        break;
      case 3:
        p.align = static_cast<int32_t>(bytes.integer());
        break;
      case 4:
        (bytes.coin() ? p.format_q : p.format_kv) = static_cast<int32_t>(bytes.integer());
        break;
      case 5: {
        int64_t* const fields[] = {&p.window_left,  &p.window_right, &p.max_seqlen_q,
                                   &p.max_seqlen_k, &p.shift,        &p.reserved[0]};
        *fields[bytes.below(6)] = bytes.integer();
        break;
      }
      case 6:
        (bytes.coin() ? p.q_scale_block : p.k_scale_block) = static_cast<int32_t>(bytes.integer());
        break;
      case 7: {
        const int from = bytes.below(TESSERA_NUM_TENSORS);
        p.tensor[bytes.below(TESSERA_NUM_TENSORS)] = p.tensor[from];
        break;
      }
      case 8: {  // any four bytes
        const int at = (bytes.byte() << 8 | bytes.byte()) % static_cast<int>(sizeof p / 4);
        const auto value = static_cast<int32_t>(bytes.integer());
        std::memcpy(reinterpret_cast<char*>(&p) + 4 * at, &value, 4);
        break;
      }
      case 9: {
        int32_t* const fields[] = {&device.kind,          &device.ordinal,      &device.arch,
                                   &device.reserved,      &buffers.num_threads, &buffers.sm_margin,
                                   &buffers.reserved_half};
        *fields[bytes.below(7)] = static_cast<int32_t>(bytes.integer());
        break;
      }
      case 10: {
        double* const fields[] = {&buffers.softmax_scale, &buffers.softcap, &buffers.dropout_p};
        *fields[bytes.below(3)] = bytes.real();
        break;
      }
      case 11:
        buffers.workspace_bytes = bytes.integer();
        break;
      default:
        edit(p.tensor[bytes.below(TESSERA_NUM_TENSORS)], bytes);
        break;
    }
  }
}

void Call::make(Bytes& bytes) {
  // A size beyond the struct's is a promise that the memory behind it is there.
  problem.struct_size = std::min(problem.struct_size, static_cast<uint32_t>(sizeof problem));
  // Imagined GPUs answer; a real one is no part of this.
  if (device.kind != TESSERA_CPU && device.arch <= 0) device.arch = 90;
  // explain() takes as long as a hundred other calls.
  const bool wants_all = bytes.coin(), explains = bytes.below(8) == 0;
  ask_without_memory(*this, wants_all, explains || device.kind != TESSERA_CPU);
  Error e, again;
  tessera_info info{};
  info.struct_size = sizeof info;
  if (device.kind != TESSERA_CPU || problem.struct_size != sizeof problem) return;
  check_error(tessera_prepare(&problem, &device, buffers.num_threads, &info, &e), e);
  FUZZ_CHECK(info.workspace_bytes >= 0);
  check_error(tessera_validate(&problem, &device, &buffers, &again), again);

  Memory memory;
  if ((problem.flags & TESSERA_SAME_LENGTHS) != 0) {
    for (const int q : {TESSERA_SEQLENS_Q, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_Q_PADDED})
      owner[q + 1] = q;
  }
  if ((problem.flags & TESSERA_V_IN_K) != 0) owner[TESSERA_V] = owner[TESSERA_K];
  if (!give_memory(*this, memory)) return;
  spoil_lists(*this, bytes);
  memory.remember();
  const int32_t legal = tessera_validate(&problem, &device, &buffers, &again);
  check_error(legal, again);
  FUZZ_CHECK(memory.is_as_remembered(true));

  constexpr double kMostWork = 1 << 20;
  if (work_of(problem) > kMostWork || info.workspace_bytes > 1 << 24) return;
  void* workspace = nullptr;
  if (buffers.workspace_bytes == 0 && info.workspace_bytes > 0) {
    FUZZ_CHECK(posix_memalign(&workspace, 64, static_cast<size_t>(info.workspace_bytes)) == 0);
    buffers.workspace = workspace, buffers.workspace_bytes = info.workspace_bytes;
  }
  const int32_t code = tessera_run(&problem, &device, &buffers, &again);
  std::free(workspace);
  check_error(code, again);
  // What no backend takes is refused before its values are looked at.
  FUZZ_CHECK(legal == TESSERA_OK || code != TESSERA_OK);
  FUZZ_CHECK(memory.is_as_remembered(code != TESSERA_OK));
}

}  // namespace fuzz
