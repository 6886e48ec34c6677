// SPDX-License-Identifier: Apache-2.0
// What a ring of context parallelism does beside attention: nvte_cp_thd_* and nvte_thd_*.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "nvte/tokens/arguments.h"
#include "nvte/tokens/jobs.h"

namespace tessera::nvte {
namespace {

// b sequences; on the host their boundaries are checked: they rise from 0 or more to at most
// `tokens`, in multiples of `multiple`.
Sequences sequences_of(NVTETensor handle, const char* name, int64_t tokens, int64_t multiple,
                       const tessera_device& device) {
  const Tensor& tensor = tensor_of(handle, name);
  const Sequences sequences{integers(handle, name, 1), tensor.numel() - 1};
  if (is_cuda(device)) return sequences;
  int64_t before = 0;
  for (int64_t n = 0; n <= sequences.b; ++n) {
    const int64_t at = sequences.cu_seqlens[n];
    if (at < before || at > tokens || at % multiple != 0) {
      fail("%s[%" PRId64 "]=%" PRId64 ": must not fall, be at most %" PRId64
           " and a multiple of %" PRId64 "; pad each sequence",
           name, n, at, tokens, multiple);
    }
    before = at;
  }
  return sequences;
}

// [t, h, d], or [2, t, h, d] of k and v together.
struct Tokens {
  const Tensor& tensor;
  int64_t parts, tokens, width;  // width: elements of a token
};
Tokens tokens_of(NVTETensor handle, const char* name) {
  const Tensor& tensor = tensor_of(handle, name);
  const int64_t axes = tensor.ndim();
  if ((axes != 3 && axes != 4) || (!tensor.data() && tensor.numel() > 0)) {
    fail("%s.shape=%s: must be [t, h, d] or [2, t, h, d], with memory", name,
         shape_text(tensor).c_str());
  }
  return {tensor, axes == 4 ? tensor.extent(0) : 1, tensor.extent(axes - 3),
          tensor.numel(axes - 2, axes)};
}

void check_same(const Tokens& a, const Tokens& b, const char* names) {
  if (a.parts == b.parts && a.width == b.width && a.tensor.dtype() == b.tensor.dtype() &&
      bytes_of(a.tensor.dtype()) > 0) {
    return;
  }
  fail("%s: shapes %s and %s, dtypes %d and %d: must have the same dtype and axes but tokens",
       names, shape_text(a.tensor).c_str(), shape_text(b.tensor).c_str(),
       static_cast<int>(a.tensor.dtype()), static_cast<int>(b.tensor.dtype()));
}

void check_room(int64_t tokens, int64_t room, const char* name) {
  if (tokens <= room) return;
  fail("%s: has %" PRId64 " tokens, must have %" PRId64, name, room, tokens);
}

template <typename Map>
void move_tokens(const Tokens& from, const Tokens& to, const Map& map, const tessera_device& device,
                 cudaStream_t stream) {
  const Rows rows =
      pieces_of(from.width * bytes_of(from.tensor.dtype()), from.tensor.data(), to.tensor.data());
  run(MoveJob<Map>{static_cast<const char*>(from.tensor.data()),
                   static_cast<char*>(to.tensor.data()), rows, from.parts, from.tokens, to.tokens,
                   map},
      device, stream);
}

// fp32 [h, t] packed, else [b, h, s].
Lse lse_of(NVTETensor handle, const char* name, bool packed, int64_t b) {
  const Tensor& tensor = with_data(handle, name, packed ? 2 : 3);
  if (tensor.dtype() != kNVTEFloat32 || (!packed && tensor.extent(0) != b)) {
    fail("%s.shape=%s, dtype=%d: must be kNVTEFloat32 of %s, lse_packed=%d", name,
         shape_text(tensor).c_str(), static_cast<int>(tensor.dtype()),
         packed ? "[h, t]" : "[b, h, s]", packed);
  }
  const int64_t first = packed ? 0 : 1;
  return {static_cast<float*>(tensor.data()), tensor.extent(first), tensor.extent(first + 1),
          packed};
}

void check_heads(const Lse& a, const Lse& b, const char* names) {
  if (a.heads == b.heads) return;
  fail("%s: have %" PRId64 " and %" PRId64 " heads, must have the same", names, a.heads, b.heads);
}

// On the host: every token of a sequence, or of its half, has its place.
void check_lse(const Lse& lse, const Sequences& sequences, int64_t divisor, const char* name,
               const tessera_device& device) {
  if (is_cuda(device)) return;
  int64_t longest = lse.packed ? sequences.start(sequences.b, divisor) : 0;
  for (int64_t n = 0; n < sequences.b && !lse.packed; ++n) {
    longest = std::max(longest, sequences.cu_seqlens.length(n) / divisor);
  }
  check_room(longest, lse.extent, name);
}

void second_half_lse(NVTETensor lse, NVTETensor part, NVTETensor cu_seqlens, bool packed, bool read,
                     const char* part_name, cudaStream_t stream) {
  const int64_t b = tensor_of(cu_seqlens, "cu_seqlens").numel() - 1;
  SecondHalfLseJob job{lse_of(lse, "lse", packed, b), lse_of(part, part_name, packed, b), {}, read};
  check_heads(job.lse, job.step, read ? "lse, half_lse" : "lse, lse_per_step");
  const tessera_device device = device_of(read ? job.step.data : job.lse.data);
  job.sequences = sequences_of(cu_seqlens, "cu_seqlens", INT64_MAX, 2, device);
  check_lse(job.lse, job.sequences, 1, "lse", device);
  check_lse(job.step, job.sequences, 2, part_name, device);
  run(job, device, stream);
}

Kind kind_of(const Tensor& tensor, const char* name) {
  switch (tensor.dtype()) {
    case kNVTEFloat32:
      return Kind::kFloat;
    case kNVTEFloat16:
      return Kind::kHalf;
    case kNVTEBFloat16:
      return Kind::kBFloat16;
    default:
      fail("%s.dtype=%d: must be kNVTEFloat32, kNVTEFloat16 or kNVTEBFloat16 to be added", name,
           static_cast<int>(tensor.dtype()));
  }
}

void correct_out(NVTETensor out, NVTETensor step, NVTETensor old_lse, NVTETensor lse,
                 NVTETensor lse_per_step, NVTETensor cu_seqlens, bool second, bool packed,
                 cudaStream_t stream) {
  const Tokens whole = tokens_of(out, "out"), part = tokens_of(step, "out_per_step");
  check_same(whole, part, "out, out_per_step");
  if (whole.tensor.ndim() != 3) {
    fail("out.shape=%s: must be [t, h, d]", shape_text(whole.tensor).c_str());
  }
  const int64_t b = tensor_of(cu_seqlens, "cu_seqlens").numel() - 1;
  const Kind kind = kind_of(whole.tensor, "out");
  const tessera_device device = device_of(whole.tensor.data());
  OutJob job{{whole.tensor.data(), kind},
             {part.tensor.data(), kind},
             lse_of(old_lse, "old_lse", packed, b),
             lse_of(lse, "lse", packed, b),
             lse_of(lse_per_step, "lse_per_step", packed, b),
             sequences_of(cu_seqlens, "cu_seqlens", whole.tokens, second ? 2 : 1, device),
             whole.tokens,
             part.tokens,
             whole.tensor.extent(1),
             whole.tensor.extent(2),
             second};
  const int64_t divisor = second ? 2 : 1;
  if (!is_cuda(device)) {
    check_room(job.sequences.start(b, divisor), part.tokens, "out_per_step");
  }
  for (const Lse* each : {&job.old, &job.total, &job.part}) {
    if (each->heads != job.heads) {
      fail("lse: has %" PRId64 " heads, must have those of out, %" PRId64, each->heads, job.heads);
    }
  }
  check_lse(job.old, job.sequences, 1, "old_lse", device);
  check_lse(job.total, job.sequences, 1, "lse", device);
  check_lse(job.part, job.sequences, divisor, "lse_per_step", device);
  run(job, device, stream);
}

GradWord word_of(const char* word, const char* name) {
  constexpr const char* kWords[] = {"none", "add", "copy", "zero"};
  for (int i = 0; word && i < 4; ++i) {
    if (std::strcmp(word, kWords[i]) == 0) return static_cast<GradWord>(i);
  }
  fail("%s=\"%s\": must be \"add\", \"copy\", \"none\" or \"zero\"", name, word ? word : "null");
}
bool reads_step(GradWord word) { return word == GradWord::kAdd || word == GradWord::kCopy; }

void correct_grad(NVTETensor grad, NVTETensor step, NVTETensor cu_seqlens, const char* first_half,
                  const char* second_half, cudaStream_t stream) {
  const Tokens whole = tokens_of(grad, "grad"), part = tokens_of(step, "grad_per_step");
  check_same(whole, part, "grad, grad_per_step");
  const GradWord first = word_of(first_half, "first_half"),
                 second = word_of(second_half, "second_half");
  const bool adds = first == GradWord::kAdd || second == GradWord::kAdd;
  const bool half = reads_step(first) != reads_step(second);
  const tessera_device device = device_of(whole.tensor.data());
  const GradJob job{static_cast<char*>(whole.tensor.data()),
                    static_cast<const char*>(part.tensor.data()),
                    adds ? kind_of(whole.tensor, "grad") : Kind::kFloat,
                    bytes_of(whole.tensor.dtype()),
                    sequences_of(cu_seqlens, "cu_seqlens", whole.tokens, 2, device),
                    whole.parts,
                    whole.tokens,
                    part.tokens,
                    whole.width,
                    first,
                    second,
                    half};
  if (job.element_bytes > 4) fail("grad.dtype=%d: has elements of 8 bytes", whole.tensor.dtype());
  if (!is_cuda(device) && (reads_step(first) || reads_step(second))) {
    check_room(job.sequences.start(job.sequences.b, half ? 2 : 1), part.tokens, "grad_per_step");
  }
  run(job, device, stream);
}

void check_ranks(int total_tokens, int world_size) {
  if (world_size <= 0 || world_size > 1 << 20) {
    fail("world_size=%d: must be 1 to 2^20", world_size);
  }
  if (total_tokens < 0 || total_tokens % (2 * int64_t{world_size}) != 0) {
    fail("total_tokens=%d: must be a multiple of 2 world_size=%" PRId64 "; pad each sequence",
         total_tokens, 2 * int64_t{world_size});
  }
}

// A tensor [total_tokens, ...].
Tokens whole_of(NVTETensor handle, const char* name, int total_tokens) {
  const Tensor& tensor = tensor_of(handle, name);
  if (tensor.ndim() < 1 || tensor.extent(0) != total_tokens ||
      (!tensor.data() && tensor.numel() > 0)) {
    fail("%s.shape=%s: must be [total_tokens, ..], total_tokens=%d, with memory", name,
         shape_text(tensor).c_str(), total_tokens);
  }
  return {tensor, 1, total_tokens, tensor.numel(1, tensor.ndim())};
}

void reorder(NVTETensor inp, NVTETensor cu_seqlens, NVTETensor out, int world_size,
             int total_tokens, bool to_ranks, cudaStream_t stream) {
  check_ranks(total_tokens, world_size);
  const Tokens from = whole_of(inp, "inp", total_tokens), to = whole_of(out, "out", total_tokens);
  check_same(from, to, "inp, out");
  const tessera_device device = device_of(to.tensor.data());
  const RankMap map{
      sequences_of(cu_seqlens, "cu_seqlens", total_tokens, 2 * int64_t{world_size}, device),
      total_tokens, world_size, to_ranks};
  move_tokens(from, to, map, device, stream);
}

}  // namespace
}  // namespace tessera::nvte

using namespace tessera::nvte;

void tessera_nvte_cp_thd_read_half_tensor(const NVTETensor& tensor, const NVTETensor& cu_seqlens,
                                          NVTETensor half, int half_idx, cudaStream_t stream) {
  named("nvte_cp_thd_read_half_tensor", [&] {
    if (half_idx != 0 && half_idx != 1) fail("half_idx=%d: must be 0 or 1", half_idx);
    const Tokens from = tokens_of(tensor, "tensor"), to = tokens_of(half, "half");
    check_same(from, to, "tensor, half");
    const tessera_device device = device_of(to.tensor.data());
    const Sequences sequences = sequences_of(cu_seqlens, "cu_seqlens", from.tokens, 2, device);
    if (!is_cuda(device)) check_room(sequences.start(sequences.b, 2), to.tokens, "half");
    move_tokens(from, to, HalfMap{sequences, to.tokens, half_idx == 1}, device, stream);
  });
}

void tessera_nvte_cp_thd_second_half_lse_correction(NVTETensor lse, const NVTETensor& lse_per_step,
                                                    const NVTETensor& cu_seqlens, int lse_packed,
                                                    cudaStream_t stream) {
  named("nvte_cp_thd_second_half_lse_correction", [&] {
    second_half_lse(lse, lse_per_step, cu_seqlens, lse_packed != 0, false, "lse_per_step", stream);
  });
}

void tessera_nvte_cp_thd_read_second_half_lse(const NVTETensor& lse, const NVTETensor& cu_seqlens,
                                              NVTETensor half_lse, int lse_packed,
                                              int second_half_lse_seqlen, cudaStream_t stream) {
  named("nvte_cp_thd_read_second_half_lse", [&] {
    const Tensor& half = tensor_of(half_lse, "half_lse");
    if (half.ndim() < 1 || half.extent(half.ndim() - 1) != second_half_lse_seqlen) {
      fail("half_lse.shape=%s: must end in second_half_lse_seqlen=%d", shape_text(half).c_str(),
           second_half_lse_seqlen);
    }
    second_half_lse(lse, half_lse, cu_seqlens, lse_packed != 0, true, "half_lse", stream);
  });
}

void tessera_nvte_cp_thd_out_correction(NVTETensor out, const NVTETensor& out_per_step,
                                        const NVTETensor& old_lse, const NVTETensor& lse,
                                        const NVTETensor& lse_per_step,
                                        const NVTETensor& cu_seqlens, int only_second_half,
                                        int lse_packed, cudaStream_t stream) {
  named("nvte_cp_thd_out_correction", [&] {
    correct_out(out, out_per_step, old_lse, lse, lse_per_step, cu_seqlens, only_second_half != 0,
                lse_packed != 0, stream);
  });
}

void tessera_nvte_cp_thd_grad_correction(NVTETensor grad, const NVTETensor& grad_per_step,
                                         const NVTETensor& cu_seqlens, const char* first_half,
                                         const char* second_half, cudaStream_t stream) {
  named("nvte_cp_thd_grad_correction",
        [&] { correct_grad(grad, grad_per_step, cu_seqlens, first_half, second_half, stream); });
}

void tessera_nvte_cp_thd_get_partitioned_indices(const NVTETensor& cu_seqlens, NVTETensor output,
                                                 int total_tokens, int world_size, int rank,
                                                 cudaStream_t stream) {
  named("nvte_cp_thd_get_partitioned_indices", [&] {
    check_ranks(total_tokens, world_size);
    if (rank < 0 || rank >= world_size) {
      fail("rank=%d: must be 0 to world_size=%d less one", rank, world_size);
    }
    const Tensor& index = with_data(output, "output", 1);
    if (index.dtype() != kNVTEInt32 || index.numel() != total_tokens / world_size) {
      fail("output.shape=%s, dtype=%d: must be kNVTEInt32 [total_tokens / world_size], %d",
           shape_text(index).c_str(), static_cast<int>(index.dtype()), total_tokens / world_size);
    }
    const tessera_device device = device_of(index.data());
    const RankMap map{
        sequences_of(cu_seqlens, "cu_seqlens", total_tokens, 2 * int64_t{world_size}, device),
        total_tokens, world_size, true};
    run(PlacesJob{map, static_cast<int32_t*>(index.data()), rank}, device, stream);
  });
}

void tessera_nvte_thd_sequence_order_to_cp_rank_order(const NVTETensor& inp,
                                                      const NVTETensor& cu_seqlens, NVTETensor out,
                                                      int world_size, int total_tokens,
                                                      cudaStream_t stream) {
  named("nvte_thd_sequence_order_to_cp_rank_order",
        [&] { reorder(inp, cu_seqlens, out, world_size, total_tokens, true, stream); });
}

void tessera_nvte_thd_cp_rank_order_to_sequence_order(const NVTETensor& inp,
                                                      const NVTETensor& cu_seqlens, NVTETensor out,
                                                      int world_size, int total_tokens,
                                                      cudaStream_t stream) {
  named("nvte_thd_cp_rank_order_to_sequence_order",
        [&] { reorder(inp, cu_seqlens, out, world_size, total_tokens, false, stream); });
}

void tessera_nvte_thd_copy_valid_tokens_from_per_split_to_rank_local(
    const NVTETensor& inp, const NVTETensor& cu_seqlens_padded, const NVTETensor& cu_seqlens,
    NVTETensor out, int total_tokens, cudaStream_t stream) {
  named("nvte_thd_copy_valid_tokens_from_per_split_to_rank_local", [&] {
    const Tokens from = whole_of(inp, "inp", total_tokens), to = whole_of(out, "out", total_tokens);
    check_same(from, to, "inp, out");
    const tessera_device device = device_of(to.tensor.data());
    const Sequences places =
        sequences_of(cu_seqlens_padded, "cu_seqlens_padded", total_tokens, 1, device);
    const Integers lengths = integers(cu_seqlens, "cu_seqlens", places.b + 1);
    for (int64_t n = 0; n < places.b && !is_cuda(device); ++n) {
      const int64_t length = lengths.length(n);
      if (length >= 0 && length <= places.cu_seqlens.length(n)) continue;
      fail("cu_seqlens: sequence %" PRId64 " has %" PRId64 " tokens, must have 0 to %" PRId64
           ", its room in cu_seqlens_padded",
           n, length, places.cu_seqlens.length(n));
    }
    move_tokens(from, to, ValidMap{places, lengths, total_tokens}, device, stream);
  });
}
