// SPDX-License-Identifier: Apache-2.0
// One attention problem as numbers by (sequence, token, head, element), as a call of tessera_run on
// plain bshd, and as a call through TransformerEngine's names in any layout. The layouts are read
// off their names here, so that nothing is shared with the library.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tessera.h"
#include "tessera_nvte.h"

namespace nvte_test {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

// Indexed by NVTE_QKV_Layout.
inline const char* const kLayoutNames[] = {"sb3hd",
                                           "sbh3d",
                                           "sbhd_sb2hd",
                                           "sbhd_sbh2d",
                                           "sbhd_sbhd_sbhd",
                                           "bs3hd",
                                           "bsh3d",
                                           "bshd_bs2hd",
                                           "bshd_bsh2d",
                                           "bshd_bshd_bshd",
                                           "t3hd",
                                           "th3d",
                                           "thd_t2hd",
                                           "thd_th2d",
                                           "thd_thd_thd",
                                           "sbhd_bshd_bshd",
                                           "bshd_sbhd_sbhd",
                                           "thd_bshd_bshd",
                                           "thd_sbhd_sbhd",
                                           "paged_kv_bshd_bshd_bshd",
                                           "paged_kv_bshd_sbhd_sbhd",
                                           "paged_kv_sbhd_bshd_bshd",
                                           "paged_kv_sbhd_sbhd_sbhd",
                                           "paged_kv_thd_bshd_bshd",
                                           "paged_kv_thd_sbhd_sbhd",
                                           "bhsd_bhsd_bhsd"};

struct Lengths {
  std::vector<int32_t> lens;
  int32_t gap = 0;  // unused tokens after each sequence, packed

  std::vector<int32_t> cu(int32_t extra = 0) const {
    std::vector<int32_t> sums{0};
    for (const int32_t length : lens) sums.push_back(sums.back() + length + extra);
    return sums;
  }
  int64_t b() const { return static_cast<int64_t>(lens.size()); }
};

// What is computed. dtype: kFloat32 or kBFloat16.
struct Attention {
  DType dtype = DType::kFloat32;
  int64_t sq, sk, hq, hk, dqk, dv;
  Lengths q, k;
  NVTE_Mask_Type mask = NVTE_NO_MASK;
  NVTE_Bias_Type bias = NVTE_NO_BIAS;
  NVTE_Softmax_Type softmax = NVTE_VANILLA_SOFTMAX;
  int64_t left = -1, right = -1;
  bool bottom_right = false, max_logit = false, deterministic = true;
  float scale = 0.2f, dropout = 0;
  std::vector<int64_t> bias_shape;
};

// Elements of one dtype, all of them NaN until they are written.
struct Memory {
  DType dtype;
  std::vector<uint8_t> bytes;

  Memory(DType type, int64_t numel)
      : dtype(type), bytes(static_cast<size_t>(numel * size()), 0xff) {}
  int64_t size() const { return dtype == DType::kBFloat16 ? 2 : dtype == DType::kInt64 ? 8 : 4; }
  uint8_t* at(int64_t i) { return bytes.data() + i * size(); }
  void* data() { return bytes.data(); }
  void fill(uint32_t seed);  // every element a number in (-1, 1)
};

// A tensor [b, s, h, d] in plain bshd.
struct Plain {
  int64_t b, s, h, d;
  Memory memory;
  Plain(DType type, int64_t b_, int64_t s_, int64_t h_, int64_t d_)
      : b(b_), s(s_), h(h_), d(d_), memory(type, b_ * s_ * h_ * d_) {}
  uint8_t* at(int64_t n, int64_t i, int64_t head, int64_t e) {
    return memory.at(((n * s + i) * h + head) * d + e);
  }
};

// What goes in and comes out, by name: "q", "k", "v", "do", "o", "dq", "dk", "dv" in plain bshd;
// "lse" [b, h, s], "max" [h], "bias", "dbias", "sink", "dsink".
struct Values {
  std::map<std::string, Plain> plain;
  std::map<std::string, Memory> flat;
};

// Random inputs; outputs are NaN.
Values values_of(const Attention& attention);

// Both passes by tessera_run on the CPU, into values. An error is a test failure.
void run_plain(const Attention& attention, Values& values);

// Where an element of q (0), k (1) or v (2) of a layout lies. Tensors that share a buffer have one
// `part`.
class Stored {
 public:
  Stored(const std::string& layout, const Attention& attention, int64_t dqk, int64_t dv,
         int32_t page_size = 0);
  // Element of a part; pages and gaps included.
  int64_t offset(int tensor, int64_t n, int64_t i, int64_t head, int64_t e) const;
  int part(int tensor) const {
    return parts_.size() == 3 ? tensor : parts_.size() == 2 ? tensor > 0 : 0;
  }
  int64_t part_numel(int part) const;
  int64_t first(int tensor) const { return offset_of(tensor, 0, 0, 0, 0); }
  std::vector<size_t> shape(int tensor) const;  // as TransformerEngine's PyTorch front end gives it
  bool paged() const { return page_size_ > 0; }
  bool packed(int tensor) const;
  std::vector<int32_t> table() const;  // [b, max_pages], pages in a scattered order
  int64_t max_pages() const { return (attention_.sk + page_size_ - 1) / page_size_; }

 private:
  int64_t extent(char axis, int tensor) const;
  int64_t offset_of(int tensor, int64_t n, int64_t i, int64_t head, int64_t e) const;
  std::vector<std::string> parts_;
  const Attention& attention_;
  int64_t dqk_, dv_;
  int32_t page_size_;
};

// Both passes through nvte_fused_attn_fwd and _bwd, by the two calls of each, under poison. Pages
// have no backward pass: then the gradients stay as they are.
struct Through {
  NVTE_QKV_Layout layout;
  bool is_training = true;
  bool flat_shapes = false;  // [b s, h, d], as TransformerEngine's JAX front end gives them
  bool second = false;       // by nvte_fused_attn_fwd_v2 and _bwd_v2
};
void run_through(const Through& through, const Attention& attention, Values& values);

// Fails the test where a row within the lengths differs in its bits.
void expect_equal(const Attention& attention, Values& expected, Values& got, bool backward);

}  // namespace nvte_test
