// SPDX-License-Identifier: Apache-2.0
#include "conformance/random_cases.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "core/mask/philox.h"

namespace tessera {
namespace {

using Text = std::string;

class Builder {
 public:
  Builder(uint32_t seed, uint64_t index) : seed_(seed), index_(index) {}

  RandomCase build() {
    backward_ = chance(0.5);
    dtype_ = pick({"fp32", "bf16", "fp16"});
    if (chance(0.01)) dtype_ = pick({"fp64", "e4m3", "e5m2"});
    out_.refused = dtype_ == "fp64";
    sizes();
    layout();
    out_.refused |= dtype_[0] == 'e' && paged_;
    lengths();
    band();
    masks();
    scores();
    rest();
    if (!out_.refused && chance(0.05)) break_a_rule();
    out_.text = Text(backward_ ? "bwd " : "fwd ") + dtype_ + words_;
    return std::move(out_);
  }

 private:
  // ---- draws ----

  uint32_t draw() {
    const auto counter = static_cast<uint32_t>(draws_++);
    return philox4x32_7(seed_, 0x7E55E4A, static_cast<uint32_t>(index_),
                        static_cast<uint32_t>(index_ >> 32), counter, 0)
        .word[0];
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return draw() / 4294967296.0 < p; }
  template <typename T>
  T pick_of(std::initializer_list<T> from) {
    return from.begin()[below(static_cast<int64_t>(from.size()))];
  }
  Text pick(std::initializer_list<const char*> from) { return pick_of<const char*>(from); }

  void word(const Text& text) { words_ += " " + text; }
  void size(const Text& key, int64_t value) { word(key + "=" + std::to_string(value)); }
  void flag(double p, const char* text) {
    if (chance(p)) word(text);
  }
  Text random() { return "random:" + std::to_string(below(1000)); }

  // ---- parts of a case, in the order in which they decide ----

  int64_t length() {
    if (chance(0.3)) return pick_of<int64_t>({1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65});
    if (chance(0.04)) return 0;
    return chance(0.1) ? 1 + below(300) : 1 + below(40);
  }
  int64_t head_dim() {
    if (chance(0.2)) return pick_of<int64_t>({64, 72, 80, 96, 112, 128, 192, 256, 512, 576});
    return chance(0.5) ? 8 * (1 + below(8)) : 1 + below(chance(0.1) ? 576 : 70);
  }

  void sizes() {
    const double kWork = 4e5;  // multiply-adds of a product: milliseconds of the reference
    do {
      b_ = chance(0.02) ? 0 : 1 + below(3);
      sq_ = length();
      sk_ = chance(0.4) ? sq_ : length();
      hk_ = 1 + below(chance(0.2) ? 4 : 2);
      hq_ = hk_ * pick_of<int64_t>({1, 1, 1, 2, 3, 4});
      dqk_ = head_dim();
      dv_ = chance(0.7) ? dqk_ : head_dim();
    } while (hq_ > 12 || static_cast<double>(b_ * hq_ * sq_ * sk_ * (dqk_ + dv_)) > kWork);
    size("b", b_), size("sq", sq_), size("sk", sk_);
    size("hq", hq_), size("hk", hk_), size("dqk", dqk_), size("dv", dv_);
  }

  void layout() {
    constexpr const char* kFormats[] = {"bshd", "sbhd", "bhsd", "thd"};
    const bool one_token = sq_ == sk_ && hq_ == hk_ && dqk_ == dv_;
    paged_ = chance(0.15);
    Text name;
    if (paged_) {
      name = pick({"paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd",
                   "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd",
                   "bhsd", "thd,bhsd", "bshd"});
      thd_q_ = name.find("thd") != Text::npos;
    } else if (one_token && chance(0.25)) {
      name = pick({"sb3hd", "sbh3d", "bs3hd", "bsh3d", "t3hd", "th3d"});
      thd_q_ = thd_k_ = name[0] == 't';
      shared_ = all_shared_ = true;
    } else if (dqk_ == dv_ && chance(0.15)) {
      name = pick({"sbhd_sb2hd", "sbhd_sbh2d", "bshd_bs2hd", "bshd_bsh2d", "thd_t2hd", "thd_th2d"});
      thd_q_ = thd_k_ = name[0] == 't';
      shared_ = true;
    } else {
      const Text q = kFormats[below(4)], k = chance(0.6) ? q : Text(kFormats[below(4)]);
      name = q == k ? q : q + "," + k;
      thd_q_ = q == "thd", thd_k_ = k == "thd";
      if (q == k && one_token && chance(0.15)) interleaved_ = shared_ = all_shared_ = true;
    }
    word("layout=" + name);
    if (interleaved_) word("interleaved");
    if (paged_) {
      size("page", pick_of<int64_t>({1, 3, 5, 16, 64}));
      if (chance(0.3)) word("tables=2");
    }
    // fp8 keys under 16-bit queries.
    if (!all_shared_ && (dtype_ == "bf16" || dtype_ == "fp16") && chance(0.08)) {
      word("kv=" + pick({"e4m3", "e5m2"}));
      fp8_keys_ = true;
      out_.refused |= backward_;
    }
  }

  Text list(int64_t longest) {
    if (chance(0.5)) return random();
    Text text;
    for (int64_t n = 0; n < b_; ++n) {
      const int64_t value = chance(0.25) ? 0 : chance(0.3) ? longest : below(longest + 1);
      text += (n ? "," : "") + std::to_string(value);
    }
    return b_ == 0 ? random() : text;
  }

  void lengths() {
    const bool one_array = !paged_ && thd_q_ == thd_k_;
    known_equal_ = one_array && sq_ == sk_;
    if (all_shared_ && thd_q_) {
      if (chance(0.8)) word("lens=" + list(sq_));
    } else if (const int64_t which = below(5); which == 0) {
      const bool full = chance(0.1);
      word("lens=" + (full ? Text("full") : list(std::min(sq_, sk_))));
      known_equal_ = one_array && (!full || sq_ == sk_);
    } else if (which < 4) {
      const bool q = which != 2, k = which != 1;
      if (q) word("lens_q=" + (chance(0.1) ? "full" : list(sq_)));
      if (k) word("lens_k=" + (chance(0.1) ? "full" : list(sk_)));
      known_equal_ = false;
    }
    if ((thd_q_ || thd_k_) && chance(0.5))
      word("gaps=" + (chance(0.5) ? random() : pick({"0", "1", "5"})));
    flag(0.25, "int64");
  }

  Text bound() { return pick({"-1", "0", "1", "5", "16", "70", "9223372036854775807"}); }

  void band() {
    const bool causal = chance(0.35), window = chance(0.3);
    if (causal) word("causal");
    if (window) word("window=" + bound() + "," + (causal ? pick({"0", "-1"}) : bound()));
    alibi_ = chance(0.2);
    if (alibi_) word(pick({"alibi", "alibi=bh"}));
    diagonal_ = causal || alibi_ || window;
    positions();
    aligned_ = (diagonal_ && !known_equal_) || chance(0.2);
    if (!aligned_) return;
    if (chance(0.2)) {
      word("shift=" + (chance(0.5) ? random() : std::to_string(below(80) - 40)));
    } else {
      word("align=" + pick({"top_left", "bottom_right"}));
    }
  }

  Text starts() {
    Text text;
    for (int64_t n = 0; n < b_; ++n) {
      text += (n ? "," : "") + std::to_string(chance(0.5) ? 16 * below(9) : below(100));
    }
    return b_ == 0 || chance(0.3) ? random() : text;
  }

  void positions() {
    if (!chance(0.2)) return;
    const int64_t which = below(3);
    if (which != 1) word("q_start=" + starts());
    if (which != 0) word("k_start=" + starts());
    known_equal_ = false;
  }

  Text shape(bool with_q = true) {
    Text letters;
    for (const char letter : Text("bhqk")) {
      if ((letter != 'q' || with_q) && chance(0.6)) letters += letter;
    }
    return letters.empty() ? "1" : letters;
  }

  void masks() {
    const int64_t which = below(8);
    const Text p = pick({"0", "0.05", "0.3", "0.7", "0.95", "1"});
    if (which < 2) {
      const Text what = pick({"random", "blocks", "keys"});
      word(pick({"keep", "drop"}) + "=" + what + ":" + p + "/" + shape(what != "keys"));
    } else if (which == 2) {
      word("ranges=" + pick({"random", "two", "prefix"}) + ":" + std::to_string(below(40)));
    }
    if (chance(0.15)) {
      const Text ids = std::to_string(1 + below(chance(0.3) ? 40 : 4));
      word("segments=" + pick({"", "", "again:", "random:"}) + ids);
    }
  }

  // A low bias: any value, where a bias of these axes can have it.
  Text low(const Text& axes) {
    const auto has = [&](char axis) { return axes.find(axis) != Text::npos; };
    Text where = pick({"random", "blocks"});
    if (has('k') && chance(0.4)) where = "keys";
    if (has('q') && chance(0.4)) where = "rows";
    const Text value = pick({"min", "min", "-3.4e38", "-1e10", "-1e9", "-65504", "-1e4"}) + ",";
    if (has('k') && chance(0.2)) return value + "from:" + std::to_string(below(sk_ + 1));
    if (has('k') && has('q') && chance(0.2)) return value + "causal";
    return value + where + ":" + pick({"0.3", "0.7", "1"});
  }

  void scores() {
    if (chance(0.25)) word("scale=" + pick({"0", "0.05", "0.5", "1", "3"}));
    if (chance(0.2)) word("softcap=" + pick({"0.5", "3", "50"}));
    const bool bias = chance(0.3), sink = chance(0.2);
    if (bias) {
      const Text letters = shape();
      word("bias=" + pick({"post", "pre"}) + "/" + letters);
      if (chance(0.25)) word("bias_inf=" + pick({"0.1", "0.5", "1"}));
      if (chance(0.35)) word("bias_low=" + low(letters));
    }
    if (sink) word("sink=" + pick({"learnable", "learnable", "learnable", "3e38", "-3e38", "-5"}));
    if (!sink && chance(0.1)) word("sink=off_by_one");
    if ((bias || sink || alibi_) && chance(0.3)) word("bias_dtype=fp32");
    Text grads;
    if (bias && chance(0.7)) grads += ",dbias";
    if (sink && chance(0.7)) grads += ",dsink";
    if (alibi_ && chance(0.7)) grads += ",dalibi_slopes";
    if (backward_ && !grads.empty()) word("grads=" + grads.substr(1));
  }

  void rest() {
    dropout_ = chance(0.15);
    if (dropout_) word("dropout=" + pick({"0.00001", "0.1", "0.5", "0.9", "0.99999"}));
    if (dropout_ && chance(0.3)) word("rng=" + pick({"0,0", "5,12", "4294967295,1099511627776"}));
    if (backward_) flag(0.4, "dlse");
    if (!backward_) flag(0.3, "max_logit");
    if ((dtype_ == "bf16" || dtype_ == "fp16") && !fp8_keys_ && chance(0.15)) {
      if (chance(0.6)) word("o=fp32");
      if (backward_) flag(0.6, "grad=fp32");
    }
    if (dtype_[0] != 'e') flag(0.08, "accumulate");
    flag(0.2, "deterministic");
    if (!backward_ && !dropout_) flag(0.2, "batch_invariant");
    flag(0.3, "strided");
    if (!shared_) flag(0.15, "expanded");
    flag(0.2, "out");
    flag(0.8, "poison");
    size("seed", below(100000));
    const bool rounds = dtype_ == "bf16" || dtype_ == "fp16";
    if (rounds && !fp8_keys_ && !paged_ && words_.find(" accumulate") == Text::npos &&
        chance(0.05)) {
      word("precision=fp8");
      if (chance(0.4)) word("smooth=" + pick({"none", "mean"}));
    }
  }

  // Exactly one thing that is illegal whatever else was drawn.
  void break_a_rule() {
    const auto broken = [&](bool applies, const Text& more) {
      if (applies && out_.legal) word(more), out_.legal = false;
    };
    const bool window = words_.find(" window=") != Text::npos;
    const bool causal = words_.find(" causal") != Text::npos;
    switch (below(8)) {
      case 0:
        return broken(!causal && !window && !aligned_ && !known_equal_ &&
                          words_.find("=full") == Text::npos,  // which may be no lengths at all
                      "causal");
      case 1:
        return broken(!causal && !window, "causal window=3,4");
      case 2:
        return broken(backward_, "max_logit");
      case 3:
        return broken(!backward_, "dlse");
      case 4:
        return broken(words_.find(" grads=") == Text::npos && words_.find(" bias=") == Text::npos,
                      "grads=dbias");
      case 5:
        return broken(words_.find(" lens") == Text::npos && b_ > 0,
                      "lens_k=" + std::to_string(sk_ + 1));
      case 6:
        return broken(words_.find("keep=") == Text::npos && words_.find("drop=") == Text::npos &&
                          words_.find(" ranges=") != Text::npos,
                      "keep=random:0.5");
      default:
        return broken(!dropout_, "dropout=1e-7");
    }
  }

  const uint32_t seed_;
  const uint64_t index_;
  uint64_t draws_ = 0;
  RandomCase out_;
  Text dtype_, words_;
  bool backward_ = false, paged_ = false, thd_q_ = false, thd_k_ = false;
  bool shared_ = false, all_shared_ = false, interleaved_ = false, fp8_keys_ = false;
  bool known_equal_ = false, alibi_ = false, diagonal_ = false, aligned_ = false, dropout_ = false;
  int64_t b_ = 0, sq_ = 0, sk_ = 0, hq_ = 0, hk_ = 0, dqk_ = 0, dv_ = 0;
};

}  // namespace

RandomCase random_case(uint32_t seed, uint64_t index) { return Builder(seed, index).build(); }

}  // namespace tessera
