// SPDX-License-Identifier: Apache-2.0
// TransformerEngine's names on a GPU: what works on tokens gives there what it gives on host memory,
// and both generations of attention calls the same bits. 77 without a GPU.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "nvte/small_call.h"

namespace {

using nvte_test::DType;
using nvte_test::NvteCall;
using nvte_test::TensorWrapper;
using Bytes = std::vector<uint8_t>;
using Shape = std::vector<size_t>;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

size_t bytes_of(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kInt32 ? 4 : 2; }
size_t numel_of(const Shape& shape) {
  size_t numel = 1;
  for (const size_t extent : shape) numel *= extent;
  return numel;
}

// Tensors of one side, the host or the current device, and what was written into outputs.
class Side {
 public:
  explicit Side(bool device) : device_(device) {}
  ~Side() {
    for (void* memory : memory_) device_ ? (void)cudaFree(memory) : std::free(memory);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void* memory(const void* from, size_t size) {
    void* to = nullptr;
    if (device_) {
      check(cudaMalloc(&to, size + 16));
      check(cudaMemcpy(to, from, size, cudaMemcpyHostToDevice));
    } else {
      to = std::aligned_alloc(16, (size + 16) / 16 * 16);
      std::memcpy(to, from, size);
    }
    memory_.push_back(to);
    return to;
  }
  TensorWrapper numbers(const std::vector<int32_t>& values) {
    return {memory(values.data(), 4 * values.size()), Shape{values.size()}, DType::kInt32};
  }
  // Numbers in [-2, 2) of 8 bits, the same on both sides.
  TensorWrapper random(const Shape& shape, DType dtype, uint32_t seed) {
    std::mt19937 draw(seed);
    Bytes bytes(numel_of(shape) * bytes_of(dtype));
    for (size_t at = 0; at < bytes.size(); at += bytes_of(dtype)) {
      const float value = (static_cast<float>(draw() % 256) - 128) / 64;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (dtype == DType::kFloat16) {
        bits = value == 0 ? 0
                          : (bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 |
                                (bits >> 13 & 0x3ff);
      } else if (dtype == DType::kBFloat16) {
        bits >>= 16;
      }
      std::memcpy(&bytes[at], &bits, bytes_of(dtype));
    }
    return {memory(bytes.data(), bytes.size()), shape, dtype};
  }
  Bytes taken(const TensorWrapper& tensor) const {
    Bytes bytes(tensor.bytes());
    if (device_) {
      check(cudaDeviceSynchronize());
      check(cudaMemcpy(bytes.data(), tensor.dptr(), bytes.size(), cudaMemcpyDeviceToHost));
    } else {
      std::memcpy(bytes.data(), tensor.dptr(), bytes.size());
    }
    return bytes;
  }

 private:
  bool device_;
  std::vector<void*> memory_;
};

int failures;

void expect_equal(const std::string& name, const Bytes& x, const Bytes& y) {
  if (x == y) return;
  std::printf("%s: the bytes differ\n", name.c_str());
  ++failures;
}
void expect_near(const std::string& name, const Bytes& x, const Bytes& y) {
  for (size_t at = 0; at < x.size(); at += 4) {
    float a, b;
    std::memcpy(&a, &x[at], 4), std::memcpy(&b, &y[at], 4);
    if (std::fabs(a - b) <= 1e-5f * (1 + std::fabs(a))) continue;
    std::printf("%s[%zu]: %g on the host, %g here\n", name.c_str(), at / 4, a, b);
    ++failures;
    return;
  }
}

using Run = std::function<Bytes(Side&)>;
using Compare = void (*)(const std::string&, const Bytes&, const Bytes&);

void on_both(const std::string& name, const Run& run, Compare compare = expect_equal) {
  Side host(false), device(true);
  compare(name, run(host), run(device));
}

// ---- tokens ----

const std::vector<int32_t> kCu{0, 8, 8, 40, 44};  // and 4 tokens behind them
constexpr size_t kT = 48, kB = 4;

void tokens() {
  for (const size_t d : {5, 64}) {
    const Shape whole{kT, 3, d}, half{kT / 2, 3, d}, pair{2, kT, 3, d}, half_pair{2, kT / 2, 3, d};
    for (const int second : {0, 1}) {
      on_both("read_half", [&](Side& side) {
        const auto from = side.random(pair, DType::kBFloat16, 1),
                   to = side.random(half_pair, DType::kBFloat16, 2), cu = side.numbers(kCu);
        nvte_cp_thd_read_half_tensor(from.data(), cu.data(), to.data(), second, nullptr);
        return side.taken(to);
      });
    }
    for (const char* first : {"add", "copy", "none", "zero"}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        on_both(std::string("grad ") + first, [&](Side& side) {
          const bool both = first[0] == 'a' || first[0] == 'c';
          const auto grad = side.random(whole, dtype, 3),
                     step = side.random(both ? whole : half, dtype, 4), cu = side.numbers(kCu);
          nvte_cp_thd_grad_correction(grad.data(), step.data(), cu.data(), first, "add", nullptr);
          return side.taken(grad);
        });
      }
    }
    const std::vector<int32_t> inside{0, 5, 5, 30, 33};
    on_both("valid tokens", [&](Side& side) {
      const auto from = side.random(whole, DType::kFloat16, 5),
                 to = side.random(whole, DType::kFloat16, 6), padded = side.numbers(kCu),
                 cu = side.numbers(inside);
      nvte_thd_copy_valid_tokens_from_per_split_to_rank_local(
          from.data(), padded.data(), cu.data(), to.data(), static_cast<int>(kT), nullptr);
      return side.taken(to);
    });
    const std::vector<int32_t> all{0, 8, 8, 40, 48};
    for (const bool back : {false, true}) {
      on_both("order of ranks", [&](Side& side) {
        const auto from = side.random(whole, DType::kFloat16, 7),
                   to = side.random(whole, DType::kFloat16, 8), cu = side.numbers(all);
        const auto reorder = back ? nvte_thd_cp_rank_order_to_sequence_order
                                  : nvte_thd_sequence_order_to_cp_rank_order;
        reorder(from.data(), cu.data(), to.data(), 4, static_cast<int>(kT), nullptr);
        return side.taken(to);
      });
    }
    on_both("indices", [&](Side& side) {
      const auto cu = side.numbers(all), to = side.numbers(std::vector<int32_t>(kT / 4, -1));
      nvte_cp_thd_get_partitioned_indices(cu.data(), to.data(), static_cast<int>(kT), 4, 2,
                                          nullptr);
      return side.taken(to);
    });
  }
}

void joins() {
  for (const bool packed : {false, true}) {
    const auto lse_shape = [&](size_t divisor) {
      return packed ? Shape{3, kT / divisor} : Shape{kB, 3, 32 / divisor};
    };
    on_both("read lse", [&](Side& side) {
      const auto lse = side.random(lse_shape(1), DType::kFloat32, 1),
                 half = side.random(lse_shape(2), DType::kFloat32, 2), cu = side.numbers(kCu);
      nvte_cp_thd_read_second_half_lse(lse.data(), cu.data(), half.data(), packed,
                                       static_cast<int>(lse_shape(2).back()), nullptr);
      return side.taken(half);
    });
    on_both(
        "join lse",
        [&](Side& side) {
          const auto lse = side.random(lse_shape(1), DType::kFloat32, 1),
                     half = side.random(lse_shape(2), DType::kFloat32, 2), cu = side.numbers(kCu);
          nvte_cp_thd_second_half_lse_correction(lse.data(), half.data(), cu.data(), packed,
                                                 nullptr);
          return side.taken(lse);
        },
        expect_near);
    for (const bool second : {false, true}) {
      on_both(
          "join out",
          [&](Side& side) {
            const size_t divisor = second ? 2 : 1;
            const auto out = side.random({kT, 3, 16}, DType::kFloat32, 3),
                       step = side.random({kT / divisor, 3, 16}, DType::kFloat32, 4),
                       old = side.random(lse_shape(1), DType::kFloat32, 5),
                       lse = side.random(lse_shape(1), DType::kFloat32, 6),
                       part = side.random(lse_shape(divisor), DType::kFloat32, 7),
                       cu = side.numbers(kCu);
            nvte_cp_thd_out_correction(out.data(), step.data(), old.data(), lse.data(), part.data(),
                                       cu.data(), second, packed, nullptr);
            return side.taken(out);
          },
          expect_near);
    }
  }
}

void copies() {
  for (const size_t d : {5, 64}) {
    const Shape part{6, 2, 3, d};
    on_both("prepare forward", [&](Side& side) {
      const auto mixed = side.random({6, 2, 3, 3 * d}, DType::kBFloat16, 1),
                 to = side.random({3, 2, 6, 3, d}, DType::kBFloat16, 2);
      const TensorWrapper q(mixed.dptr(), part, DType::kBFloat16);
      nvte_prepare_flash_attn_fwd(q.data(), to.data(), nullptr);
      return side.taken(to);
    });
    on_both("prepare backward", [&](Side& side) {
      const auto q = side.random(part, DType::kFloat16, 1),
                 k = side.random(part, DType::kFloat16, 2),
                 v = side.random(part, DType::kFloat16, 3),
                 to = side.random({2, 6, 3, 3 * d}, DType::kFloat16, 4);
      nvte_prepare_flash_attn_bwd(q.data(), k.data(), v.data(), to.data(), nullptr);
      return side.taken(to);
    });
    on_both("transpose", [&](Side& side) {
      const auto from = side.random(part, DType::kFloat32, 1),
                 to = side.random({2, 3, 6, d + 3}, DType::kFloat32, 2);
      NVTETensor inputs[] = {from.data()}, outputs[] = {to.data()};
      nvte_multi_tensor_transpose_to_bhsd(inputs, outputs, 1, NVTE_SBHD, nullptr);
      return side.taken(to);
    });
    on_both("pad", [&](Side& side) {
      const auto from = side.random({7, d}, DType::kFloat16, 1),
                 to = side.random({7, d + 8}, DType::kFloat16, 2);
      NVTETensor inputs[] = {from.data()}, outputs[] = {to.data()};
      nvte_multi_tensor_pad_last_dim(inputs, outputs, 1, nullptr);
      return side.taken(to);
    });
  }
}

// ---- attention ----

// Both passes on the device; o, stats and gradients one behind the other.
Bytes attention(NVTE_Mask_Type mask, bool packed, bool second) {
  constexpr size_t kS = 96, kH = 2, kD = 64;
  Side side(true);
  NvteCall c;
  const Shape shape = packed ? Shape{2 * kS, kH, kD} : Shape{2, kS, kH, kD};
  TensorWrapper* const tensors[] = {&c.q, &c.k, &c.v, &c.d_o, &c.o, &c.dq, &c.dk, &c.dv};
  uint32_t seed = 0;
  for (TensorWrapper* tensor : tensors) *tensor = side.random(shape, DType::kBFloat16, ++seed);
  c.cu_q = side.numbers({0, 96, 160}), c.cu_kv = side.numbers({0, 96, 160});
  c.layout = c.dqkv_layout = packed ? NVTE_THD_THD_THD : NVTE_BSHD_BSHD_BSHD;
  c.max_q = c.max_kv = kS, c.mask = mask, c.deterministic = true, c.second = second;
  const int64_t rng[2] = {1, 2};
  c.set(c.rng_state, side.memory(rng, sizeof rng), DType::kInt64, {2});
  const auto twice = [&](void (NvteCall::*pass)(), bool gives_pack) {
    c.workspace = TensorWrapper();
    (c.*pass)();
    if (gives_pack) {
      const Bytes stats(nvte_tensor_size_bytes(c.pack.tensors[0]));
      c.aux(0, side.memory(stats.data(), stats.size()), DType::kFloat32,
            packed ? Shape{kH, 2 * kS, 1} : Shape{2, kH, kS, 1});
    }
    const Bytes memory(c.workspace.bytes());
    c.set(c.workspace, side.memory(memory.data(), memory.size()), DType::kByte, {memory.size()});
    (c.*pass)();
  };
  twice(&NvteCall::forward, true);
  twice(&NvteCall::backward, false);
  Bytes all;
  for (const TensorWrapper* tensor : {&c.o, &c.dq, &c.dk, &c.dv}) {
    const Bytes bytes = side.taken(*tensor);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void generations() {
  for (int mask = NVTE_NO_MASK; mask <= NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK; ++mask) {
    for (const bool packed : {false, true}) {
      const auto type = static_cast<NVTE_Mask_Type>(mask);
      expect_equal("mask " + std::to_string(mask) + (packed ? ", thd" : ", bshd"),
                   attention(type, packed, false), attention(type, packed, true));
    }
  }
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU");
    return 77;
  }
  try {
    tokens(), joins(), copies(), generations();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
