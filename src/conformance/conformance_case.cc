// SPDX-License-Identifier: Apache-2.0
#include "conformance/conformance_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "conformance/data.h"
#include "core/memory.h"
#include "core/problem/scales.h"

namespace tessera {
namespace {

constexpr int kPattern = 0xFF;  // NaN in every float, true in every bool, -1 in every integer

// Calls visit(byte offset from the tensor's data) for every element of an output.
template <typename Visit>
void each_element(const Tensor& t, int rank, Visit&& visit) {
  int64_t extent[4], i[4];
  for (int axis = 0; axis < 4; ++axis) extent[axis] = axis < rank ? t.extent[axis] : 1;
  for (i[0] = 0; i[0] < extent[0]; ++i[0])
    for (i[1] = 0; i[1] < extent[1]; ++i[1])
      for (i[2] = 0; i[2] < extent[2]; ++i[2])
        for (i[3] = 0; i[3] < extent[3]; ++i[3])
          visit(offset_of(t, i[0], i[1], i[2], i[3]) * size_of(t.dtype));
}

Status to_status(int32_t code, const tessera_error& error) {
  return code == TESSERA_OK ? Status() : Status(static_cast<tessera_code>(code), error.message);
}

tessera_error empty_error() {
  tessera_error error{};
  error.struct_size = sizeof error;
  return error;
}

}  // namespace

Result<std::unique_ptr<ConformanceCase>> ConformanceCase::create(std::string_view text) {
  Result<Case> parsed = parse_case(text);
  if (!parsed.ok()) return parsed.status();
  std::unique_ptr<ConformanceCase> c(new ConformanceCase);
  c->case_ = std::move(parsed).value();
  c->geometry_ = geometry_of(c->case_);
  TESSERA_RETURN_IF_ERROR(validate(c->problem()));
  try {
    c->allocate();
    fill_inputs(c->case_, c->geometry_, c->buffers_);
    if (is_backward(c->problem())) c->fill_backward_inputs();
    c->poison_outputs();
    c->held_ = reference::held_outputs(c->problem(), c->buffers_);
  } catch (const std::bad_alloc&) {
    return Status(TESSERA_OUT_OF_MEMORY, "case: its tensors do not fit into memory; smaller sizes");
  }
  return c;
}

int64_t ConformanceCase::bytes_of(int owner) const {
  int64_t bytes = 0;
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (!given(problem(), index) || geometry_.owner[index] != owner) continue;
    const Tensor& t = problem().tensor[index];
    int64_t last = geometry_.offset[index];
    bool empty = false;
    for (int axis = 0; axis < tensor_rule(index).rank; ++axis) {
      empty |= t.extent[axis] == 0;
      last += (t.extent[axis] - 1) * t.stride[axis];
    }
    if (!empty) bytes = std::max(bytes, (last + 1) * size_of(t.dtype));
  }
  return bytes;
}

bool ConformanceCase::is_output(int index) const {
  if (!given(problem(), index)) return false;
  const Role role = tensor_rule(index).role;
  return is_backward(problem()) ? role == Role::kBackwardOutput : role == Role::kForwardOutput;
}

void ConformanceCase::allocate() {
  buffers_ = scalars_of(geometry_);
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (!given(problem(), index)) continue;
    const int owner = geometry_.owner[index];
    if (memory_[owner].data() == nullptr) {
      memory_[owner] = GuardedMemory(static_cast<size_t>(bytes_of(owner)),
                                     size_of(problem().tensor[index].dtype));
      memory_[owner].fill(case_.poison || is_output(index) ? kPattern : 0);
    }
    buffers_.data[index] =
        memory_[owner].data() + geometry_.offset[index] * size_of(problem().tensor[index].dtype);
  }
}

// o and lse as the forward pass would have left them: rounded, and poisoned beside their rows. With
// precision="fp8" they are those of the rounded q, k and v.
void ConformanceCase::fill_backward_inputs() {
  reference::ReferenceValues forward =
      reference::reference_forward(problem(), buffers_, reference::Arithmetic::kStored, 1);
  if (case_.has(TESSERA_PARTIAL)) join_part(forward);
  const std::vector<bool> rows = valid_query_rows(geometry_);
  for (int index : {TESSERA_O, TESSERA_LSE}) {
    const Tensor& t = problem().tensor[index];
    const int seq_axis = index == TESSERA_O ? 1 : 2;
    size_t next = 0;
    for (int64_t a = 0; a < t.extent[0]; ++a)
      for (int64_t b = 0; b < t.extent[1]; ++b)
        for (int64_t c = 0; c < t.extent[2]; ++c)
          for (int64_t d = 0; d < (index == TESSERA_O ? t.extent[3] : 1); ++d, ++next) {
            const int64_t row = seq_axis == 1 ? b : c;
            if (case_.poison && !rows[a * t.extent[seq_axis] + row]) continue;
            const int64_t at = offset_of(t, a, b, c, index == TESSERA_O ? d : 0);
            store_scaled(buffers_.data[index], at, t.dtype, forward.value[index][next],
                         scale_at(problem(), buffers_, scale_of(index), 0, 0, 0));
          }
  }
  given_o_ = std::move(forward.value[TESSERA_O]);
  given_lse_ = std::move(forward.value[TESSERA_LSE]);
}

// Rows outside their sequences belong to no union.
void ConformanceCase::join_part(reference::ReferenceValues& forward) const {
  const Tensor& o = problem().tensor[TESSERA_O];
  const std::vector<bool> valid = valid_query_rows(geometry_);
  std::vector<int64_t> statistic;  // of each row of o
  for (int64_t a = 0; a < o.extent[0]; ++a)
    for (int64_t i = 0; i < o.extent[1]; ++i)
      for (int64_t h = 0; h < o.extent[2]; ++h)
        statistic.push_back(valid[a * o.extent[1] + i] ? (a * o.extent[2] + h) * o.extent[1] + i
                                                       : -1);
  join_other_part(case_, o.extent[3], forward.value[TESSERA_O], forward.value[TESSERA_LSE],
                  statistic);
}

void ConformanceCase::compute_references() {
  using reference::Arithmetic;
  if (low_) return;
  const Problem& p = problem();
  const bool fp64 = p.tensor[TESSERA_Q].dtype == TESSERA_FP64;
  if (!is_backward(p)) {
    exact_ = reference::reference_forward(p, buffers_, Arithmetic::kExact, 1, &held_);
    low_ = fp64 ? *exact_ : reference::reference_forward(p, buffers_, Arithmetic::kLow, 1, &held_);
    return;
  }
  // low gets o and lse as a kernel does: rounded.
  const auto rounded = [&](int index, std::vector<double> values) {
    for (double& value : values) value = reference::rounded_as(p, buffers_, index, value);
    return values;
  };
  const auto backward = [&](Arithmetic arithmetic, const std::vector<double>& o,
                            const std::vector<double>& lse) {
    return reference::reference_backward(p, buffers_, arithmetic, 1, o, lse, &held_);
  };
  low_ = fp64 ? backward(Arithmetic::kExact, given_o_, given_lse_)
              : backward(Arithmetic::kLow, rounded(TESSERA_O, given_o_),
                         rounded(TESSERA_LSE, given_lse_));
  if (!has(p, TESSERA_FP8_PRODUCTS)) {
    exact_ = backward(Arithmetic::kExact, given_o_, given_lse_);
    return;
  }
  reference::ReferenceValues forward =
      reference::reference_forward(p, buffers_, Arithmetic::kExact, 1);
  if (case_.has(TESSERA_PARTIAL)) join_part(forward);
  exact_ = backward(Arithmetic::kExact, forward.value[TESSERA_O], forward.value[TESSERA_LSE]);
}

void ConformanceCase::poison_outputs() {
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (is_output(index)) memory_[geometry_.owner[index]].fill(kPattern);
  }
  if (case_.has(TESSERA_ACCUMULATE)) fill_held(case_, geometry_, buffers_);
}

Status ConformanceCase::run(std::string_view backend, const Device& device, int num_threads) {
  Problem p = problem();
  poison_outputs();
  if (backend.size() > sizeof p.backend)
    return invalid("backend=%.60s: unknown", std::string(backend).c_str());
  backend.copy(p.backend, sizeof p.backend);
  run_status_ =
      device.kind == TESSERA_CPU ? run_here(p, device, num_threads) : run_there(p, device);
  return run_status_;
}

Status ConformanceCase::run_here(const Problem& p, const Device& device, int num_threads) {
  tessera_info info{};
  info.struct_size = sizeof info;
  tessera_error error = empty_error();
  TESSERA_RETURN_IF_ERROR(
      to_status(tessera_prepare(&p, &device, num_threads, &info, &error), error));
  GuardedMemory workspace(static_cast<size_t>(info.workspace_bytes), 64);
  workspace.fill(kPattern);
  Buffers buffers = buffers_;
  buffers.num_threads = num_threads;
  buffers.workspace = info.workspace_bytes > 0 ? workspace.data() : nullptr;
  buffers.workspace_bytes = info.workspace_bytes;
  return to_status(tessera_run(&p, &device, &buffers, &error), error);
}

// The same with every buffer copied to the device, each between two bands of 256 guard bytes.
Status ConformanceCase::run_there(const Problem& p, const Device& device) {
  const DeviceMemory* memory = &cuda_memory == nullptr ? nullptr : cuda_memory();
  if (memory == nullptr)
    return failed("device.kind=%d: this build has no device memory; TESSERA_CUDA=ON", device.kind);
  constexpr size_t kBand = 256;
  struct Block {
    const DeviceMemory* memory = nullptr;
    int32_t ordinal = 0;
    std::byte* data = nullptr;
    ~Block() {
      if (data) memory->free(ordinal, data);
    }
  };
  Block blocks[TESSERA_NUM_TENSORS + 1];
  std::vector<std::byte> image;
  const auto upload = [&](Block& block, const std::byte* from, size_t bytes) -> Status {
    block.memory = memory;
    block.ordinal = device.ordinal;
    void* data = nullptr;
    image.assign(bytes + 2 * kBand, std::byte{kPattern});
    if (from && bytes > 0) std::memcpy(image.data() + kBand, from, bytes);
    TESSERA_RETURN_IF_ERROR(memory->allocate(device.ordinal, image.size(), &data));
    block.data = static_cast<std::byte*>(data);
    return memory->to_device(device.ordinal, data, image.data(), image.size());
  };
  const auto intact = [&](size_t bytes) {
    const auto kept = [](std::byte byte) { return byte == std::byte{kPattern}; };
    return std::all_of(image.begin(), image.begin() + kBand, kept) &&
           std::all_of(image.begin() + kBand + bytes, image.end(), kept);
  };
  const auto download = [&](const Block& block, size_t bytes) {
    image.resize(bytes + 2 * kBand);
    return memory->to_host(device.ordinal, image.data(), block.data, image.size());
  };

  tessera_info info{};
  info.struct_size = sizeof info;
  tessera_error error = empty_error();
  TESSERA_RETURN_IF_ERROR(to_status(tessera_prepare(&p, &device, 0, &info, &error), error));
  Buffers buffers = buffers_;
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (!given(p, index)) continue;
    const int owner = geometry_.owner[index];
    if (!blocks[owner].data) {
      TESSERA_RETURN_IF_ERROR(upload(blocks[owner], memory_[owner].data(), memory_[owner].size()));
    }
    buffers.data[index] = blocks[owner].data + kBand +
                          (static_cast<std::byte*>(buffers_.data[index]) - memory_[owner].data());
  }
  Block& workspace = blocks[TESSERA_NUM_TENSORS];
  const auto workspace_bytes = static_cast<size_t>(info.workspace_bytes);
  TESSERA_RETURN_IF_ERROR(upload(workspace, nullptr, workspace_bytes));
  buffers.workspace = workspace_bytes > 0 ? workspace.data + kBand : nullptr;
  buffers.workspace_bytes = info.workspace_bytes;
  TESSERA_RETURN_IF_ERROR(to_status(tessera_run(&p, &device, &buffers, &error), error));
  TESSERA_RETURN_IF_ERROR(memory->synchronise(device.ordinal));
  TESSERA_RETURN_IF_ERROR(download(workspace, workspace_bytes));
  if (!intact(workspace_bytes))
    return failed("workspace: bytes outside its %zu were written", workspace_bytes);
  for (int owner = 0; owner < TESSERA_NUM_TENSORS; ++owner) {
    if (!blocks[owner].data) continue;
    const size_t bytes = memory_[owner].size();
    TESSERA_RETURN_IF_ERROR(download(blocks[owner], bytes));
    if (!intact(bytes))
      return failed("%s: bytes outside the tensor were written", tensor_rule(owner).name);
    if (is_output(owner) && bytes > 0)
      std::memcpy(memory_[owner].data(), image.data() + kBand, bytes);
  }
  return {};
}

std::vector<double> ConformanceCase::read(int index) const {
  return reference::load_dense(problem().tensor[index], tensor_rule(index).rank,
                               buffers_.data[index],
                               scale_at(problem(), buffers_, scale_of(index), 0, 0, 0));
}

CaseReport ConformanceCase::compare() {
  CaseReport report;
  if (!run_status_.ok()) {
    report.refused = run_status_.code() == TESSERA_REFUSED;
    report.failures.push_back(run_status_.message());
    return report;
  }
  compute_references();
  const int32_t q_type = problem().tensor[TESSERA_Q].dtype;
  const bool fp8_keys = !is_fp8(q_type) && is_fp8(problem().tensor[TESSERA_K].dtype);
  const int64_t depth = (problem().tensor[TESSERA_Q].extent[3] + 31) / 32 * 32;
  const bool rounded = has(problem(), TESSERA_FP8_PRODUCTS);
  const double fp8_share = is_fp8(q_type) || rounded ? 0x1p-15 * static_cast<double>(depth) : 0;
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (!is_output(index) || index >= TESSERA_AMAX_O) continue;
    const std::vector<double> out = read(index);
    const std::vector<double>&ref = exact_->value[index], &low = low_->value[index];
    const std::vector<double>& terms = exact_->terms[index];
    Comparison comparison;
    const bool statistic = index == TESSERA_LSE || index == TESSERA_MAX_LOGIT;
    if (statistic && !rounded) {
      comparison = compare_statistic(out, ref, terms, q_type, fp8_share);
    } else if (fp8_keys) {
      comparison = compare_fp8(out, ref, low);
    } else {
      const int32_t dtype = problem().tensor[index].dtype;
      const bool follows_q = index == TESSERA_O || (index >= TESSERA_DQ && index <= TESSERA_DV);
      TensorRuleInput input{out, ref, low, dtype, case_.softcap > 0};
      if (!statistic) input.terms = terms;
      input.widened = follows_q && dtype == TESSERA_FP32 && (is_16bit(q_type) || is_fp8(q_type));
      if (index == TESSERA_DQ || index == TESSERA_DK) input.fp8_share = fp8_share;
      const auto compare = [&] {
        return rounded ? compare_rounded(input, statistic ? 1e-3 : 0) : compare_tensor(input);
      };
      comparison = compare();
      if (!comparison.ok() && !statistic) {  // the floor only widens limits, and costs a pass
        if (!floor_) floor_ = reference::reference_floor(problem(), buffers_, given_o_, given_lse_);
        input.floor = floor_->value[index];
        comparison = compare();
      }
    }
    if (!comparison.ok()) {
      report.failures.push_back(std::string(tensor_rule(index).name) + ": " + comparison.failure);
    }
    compare_largest(index, comparison, report);
    report.outputs.push_back({index, std::move(comparison)});
  }
  check_bytes(report);
  return report;
}

// The largest value of a tensor may be off by what any of its values may be, before rounding.
void ConformanceCase::compare_largest(int index, const Comparison& of, CaseReport& report) {
  const int amax = amax_of(index);
  if (amax == TESSERA_NUM_TENSORS || !is_output(amax)) return;
  const double out = read(amax)[0], ref = reference::largest_of(exact_->value[index]);
  Comparison comparison;
  comparison.max_err = out == ref || (std::isnan(out) && std::isnan(ref)) ? 0 : std::abs(out - ref);
  comparison.max_limit = of.max_limit;
  if (!(comparison.max_err <= comparison.max_limit)) {
    comparison.failure = "is " + std::to_string(out) + ", must be " + std::to_string(ref);
    report.failures.push_back(std::string(tensor_rule(amax).name) + ": " + comparison.failure);
  }
  report.outputs.push_back({amax, std::move(comparison)});
}

// Every element written, no byte between rows touched. Tensors of one buffer are looked at
// together.
void ConformanceCase::check_bytes(CaseReport& report) {
  for (int owner = 0; owner < TESSERA_NUM_TENSORS; ++owner) {
    if (!is_output(owner) || geometry_.owner[owner] != owner) continue;
    const std::byte* base = memory_[owner].data();
    std::vector<bool> inside(memory_[owner].size(), false);
    for (int index = owner; index < TESSERA_NUM_TENSORS; ++index) {
      if (!is_output(index) || geometry_.owner[index] != owner) continue;
      const Tensor& t = problem().tensor[index];
      const int64_t first = static_cast<std::byte*>(buffers_.data[index]) - base,
                    size = size_of(t.dtype);
      int64_t unwritten = 0;
      each_element(t, tensor_rule(index).rank, [&](int64_t at) {
        bool pattern = true;
        for (int64_t byte = first + at; byte < first + at + size; ++byte) {
          inside[byte] = true;
          pattern = pattern && base[byte] == std::byte{kPattern};
        }
        unwritten += pattern;
      });
      if (unwritten > 0) {
        report.failures.push_back(std::string(tensor_rule(index).name) + ": " +
                                  std::to_string(unwritten) + " elements were not written");
      }
    }
    int64_t touched = 0;
    for (size_t byte = 0; byte < inside.size(); ++byte) {
      touched += !inside[byte] && base[byte] != std::byte{kPattern};
    }
    if (touched > 0) {
      report.failures.push_back(std::string(tensor_rule(owner).name) + ": " +
                                std::to_string(touched) + " bytes between its rows were written");
    }
  }
}

}  // namespace tessera
