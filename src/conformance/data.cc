// SPDX-License-Identifier: Apache-2.0
#include "conformance/data.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "conformance/pattern.h"
#include "core/case/draw.h"
#include "core/mask/sequence.h"

namespace tessera {
namespace {

struct At {
  int64_t axis[4];
};

class Filler {
 public:
  Filler(const Case& c, const CaseGeometry& g, const Buffers& buffers)
      : c_(c), g_(g), p_(g.problem), buffers_(buffers), sizes_(sizes_of(g.problem)) {}

  void fill() {
    lengths();
    pages();
    mask();
    find_hidden_keys();
    tokens();
    scores();
    ranges();
    segments();
  }

 private:
  using Inside = std::function<bool(const At&)>;
  using Value = std::function<double(const At&, int64_t e)>;

  bool thd_q() const { return !g_.start_q.empty(); }
  bool thd_k() const { return !g_.start_k.empty(); }

  // Calls write(at, e) for every element that is to be written; expanded axes are visited once.
  void each(int index, const Inside& inside,
            const std::function<void(const At&, int64_t e)>& write) const {
    if (!given(p_, index)) return;
    const Tensor& t = p_.tensor[index];
    int64_t extent[4];
    for (int axis = 0; axis < 4; ++axis) {
      extent[axis] = axis >= tensor_rule(index).rank ? 1 : t.extent[axis];
      if (t.stride[axis] == 0 && extent[axis] > 1) extent[axis] = 1;
    }
    int64_t e = 0;
    At at;
    for (at.axis[0] = 0; at.axis[0] < extent[0]; ++at.axis[0])
      for (at.axis[1] = 0; at.axis[1] < extent[1]; ++at.axis[1])
        for (at.axis[2] = 0; at.axis[2] < extent[2]; ++at.axis[2])
          for (at.axis[3] = 0; at.axis[3] < extent[3]; ++at.axis[3], ++e)
            if (!c_.poison || inside(at)) write(at, e);
  }

  int64_t offset(int index, const At& at) const {
    return offset_of(p_.tensor[index], at.axis[0], at.axis[1], at.axis[2], at.axis[3]);
  }
  void put_integer(int index, const At& at, int64_t value) const {
    void* const data = buffers_.data[index];
    switch (p_.tensor[index].dtype) {
      case TESSERA_INT32:
        static_cast<int32_t*>(data)[offset(index, at)] = static_cast<int32_t>(value);
        break;
      case TESSERA_INT64:
        static_cast<int64_t*>(data)[offset(index, at)] = value;
        break;
      default:
        static_cast<uint8_t*>(data)[offset(index, at)] = static_cast<uint8_t>(value);
        break;
    }
  }

  void put(int index, const At& at, double value) const {
    store_element(buffers_.data[index], offset(index, at), p_.tensor[index].dtype, value);
  }

  // The nearest number that the dtype has, never an infinity.
  void put_in_reach(int index, const At& at, double value) const {
    const double largest = largest_finite(p_.tensor[index].dtype);
    put(index, at, std::clamp(value, -largest, largest));
  }

  void normals(int index, uint32_t number, const Inside& inside) const {
    NormalPair pair{};
    int64_t counter = -1;
    each(index, inside, [&](const At& at, int64_t e) {
      if (e / 2 != counter) pair = draw_normals(c_.seed, number, counter = e / 2);
      store_element(buffers_.data[index], offset(index, at), p_.tensor[index].dtype,
                    shaped(index, number, at, e, e % 2 ? pair.odd : pair.even));
    });
  }

  // What data= makes of a normal value of q, k, v or do.
  double shaped(int index, uint32_t number, const At& at, int64_t e, double value) const {
    if (number > kDrawDo) return value;
    if (c_.data == "outliers" && draw_chance(c_.seed, number, e, 0.001)) return 11 * value;
    if (c_.data == "positive") return std::abs(value);
    if (c_.data == "opposed") return opposed(index, at, value);
    if (index != TESSERA_K) return value;
    if (c_.data == "channels" && at.axis[3] % 21 == 0) return value + 12;
    return c_.data == "sink" && at.axis[1] == 0 ? 4 * value : value;
  }

  // 40 queries of 80 have scores of about -120.
  double opposed(int index, const At& at, double value) const {
    const double mean = std::sqrt(120 / std::sqrt(static_cast<double>(sizes_.dqk)));
    if (index == TESSERA_K) return value - mean;
    return index == TESSERA_Q && at.axis[1] / 40 % 2 == 0 ? value + mean : value;
  }

  void lengths() const {
    const Inside always = [](const At&) { return true; };
    const auto list = [&](int index, const PerSequence& values) {
      each(index, always, [&](const At& at, int64_t e) { put_integer(index, at, values[e]); });
    };
    const auto sums = [](const PerSequence& lens) {
      std::vector<int64_t> cu(1, 0);
      for (int64_t n = 0; n < lens.size(); ++n) cu.push_back(cu.back() + lens[n]);
      return PerSequence(std::move(cu));
    };
    list(TESSERA_SEQLENS_Q, g_.len_q);
    list(TESSERA_SEQLENS_K, g_.len_k);
    list(TESSERA_CU_SEQLENS_Q, sums(g_.len_q));
    list(TESSERA_CU_SEQLENS_K, sums(g_.len_k));
    list(TESSERA_CU_SEQLENS_Q_PADDED, g_.start_q);
    list(TESSERA_CU_SEQLENS_K_PADDED, g_.start_k);
    list(TESSERA_RNG_STATE, std::vector<int64_t>{c_.seed, 0, c_.rng_first, c_.rng_stride});
    list(TESSERA_Q_START, g_.position_q);
    list(TESSERA_K_START, g_.position_k);
    list(TESSERA_SHIFT, g_.shift);
    each(TESSERA_WINDOWS, always, [&](const At& at, int64_t) {
      put_integer(TESSERA_WINDOWS, at, g_.windows[2 * at.axis[0] + at.axis[1]]);
    });
  }

  void pages() {
    for (int t = 0; t < 2; ++t) {
      const int index = TESSERA_PAGE_TABLE_K + t;
      if (!given(p_, index)) continue;
      const int64_t pages = p_.tensor[t == 0 ? TESSERA_K : TESSERA_V].extent[0];
      const int64_t max_pages = p_.tensor[index].extent[1];
      std::vector<int64_t>& order = page_order_[t];
      order.resize(pages);
      std::iota(order.begin(), order.end(), 0);
      for (int64_t i = pages - 1; i > 0; --i) {
        const uint64_t draw = (static_cast<uint64_t>(t) << 32) + static_cast<uint64_t>(i);
        std::swap(order[i], order[draw_integer(c_.seed, kDrawPages, draw, i + 1)]);
      }
      if (c_.b >= 2) order[max_pages] = order[0];
      const Inside used = [&](const At& at) { return page_is_seen(at.axis[0], at.axis[1]); };
      each(index, used, [&](const At& at, int64_t) {
        put_integer(index, at, order[at.axis[0] * max_pages + at.axis[1]]);
      });
    }
  }

  // True if page `page` of sequence n holds a key that the band shows to some query. Others may
  // hold anything, as may their entries of the table.
  bool page_is_seen(int64_t n, int64_t page) const {
    const Interval seen = sequence_of(p_, buffers_, n).band.keys();
    return !seen.empty() && page * c_.page < seen.hi && seen.lo < (page + 1) * c_.page;
  }

  // Some sequence has this pair inside its lengths; broadcast axes stand for all of theirs.
  Inside valid_pairs(int index) const {
    const Tensor& t = p_.tensor[index];
    return [this, &t](const At& at) {
      const auto fits = [](const Tensor& tensor, int axis, int64_t i, int64_t start,
                           int64_t length) {
        const bool one = tensor.extent[axis] == 1 || tensor.stride[axis] == 0;
        return one ? length > 0 : start <= i && i < start + length;
      };
      const bool one_batch = t.extent[0] == 1 || t.stride[0] == 0;
      for (int64_t n = one_batch ? 0 : at.axis[0]; n < (one_batch ? c_.b : at.axis[0] + 1); ++n) {
        if (fits(t, 2, at.axis[2], g_.dense_start_q(n), g_.len_q[n]) &&
            fits(t, 3, at.axis[3], g_.dense_start_k(n), g_.len_k[n])) {
          return true;
        }
      }
      return false;
    };
  }

  PatternElement pattern_element(int index, const At& at, int64_t e) const {
    const Tensor& t = p_.tensor[index];
    PatternElement element{};
    element.e = e;
    for (int axis = 0; axis < 4; ++axis) {
      element.extent[axis] = t.stride[axis] == 0 ? 1 : t.extent[axis];
      element.axis[axis] = at.axis[axis];
    }
    return element;
  }

  void mask() const {
    if (!given(p_, TESSERA_MASK)) return;
    each(TESSERA_MASK, valid_pairs(TESSERA_MASK), [&](const At& at, int64_t e) {
      const bool blocks = c_.mask.what == CaseMask::What::kBlocks;
      const int64_t draw = blocks ? pattern_element(TESSERA_MASK, at, e).block() : e;
      const bool visible = draw_chance(c_.seed, kDrawMask, draw, c_.mask.p);
      put_integer(TESSERA_MASK, at, visible != c_.mask.drop);
    });
  }

  // A key-only mask hides keys from every query; those that all heads hide may hold anything.
  void find_hidden_keys() {
    hidden_.assign(c_.b, {});
    if (!given(p_, TESSERA_MASK)) return;
    const Tensor& t = p_.tensor[TESSERA_MASK];
    if (t.extent[2] != 1) return;
    const auto* data = static_cast<const uint8_t*>(buffers_.data[TESSERA_MASK]);
    for (int64_t n = 0; n < c_.b; ++n) {
      hidden_[n].assign(g_.len_k[n], true);
      for (int64_t j = 0; j < g_.len_k[n]; ++j) {
        if (t.extent[3] == 1 && sizes_.sk != 1) hidden_[n][j] = false;
        // A row without queries has an unread mask.
        if (g_.len_q[n] == 0) continue;
        const int64_t key = broadcast(t, 3, g_.dense_start_k(n) + j);
        for (int64_t h = 0; h < t.extent[1]; ++h) {
          const bool set = data[offset_of(t, broadcast(t, 0, n), h, 0, key)] != 0;
          if (set != c_.mask.drop) hidden_[n][j] = false;
        }
      }
    }
  }

  // Keys that a sequence may see, in the storage of k or v: [batch][row] or [page][slot].
  std::vector<bool> valid_key_rows(int index) const {
    const Tensor& t = p_.tensor[index];
    std::vector<bool> valid(t.extent[0] * t.extent[1], false);
    const auto& order = page_order_[index == TESSERA_V && given(p_, TESSERA_PAGE_TABLE_V)];
    for (int64_t n = 0; n < c_.b; ++n) {
      for (int64_t j = 0; j < g_.len_k[n]; ++j) {
        if (!hidden_[n].empty() && hidden_[n][j]) continue;
        if (c_.page > 0 && !page_is_seen(n, j / c_.page)) continue;
        int64_t row = n * t.extent[1] + j;
        if (c_.page > 0) {
          const int64_t max_pages = p_.tensor[TESSERA_PAGE_TABLE_K].extent[1];
          row = order[n * max_pages + j / c_.page] * c_.page + j % c_.page;
        } else if (thd_k()) {
          row = g_.start_k[n] + j;
        }
        valid[row] = true;
      }
    }
    return valid;
  }

  // rows: [batch][count] of a side; an expanded batch uses a row that any sequence does.
  static bool used(const std::vector<bool>& rows, const Tensor& t, int64_t n, int64_t count,
                   int64_t row) {
    if (t.extent[0] <= 1 || t.stride[0] != 0) return rows[n * count + row];
    for (int64_t other = 0; other < t.extent[0]; ++other) {
      if (rows[other * count + row]) return true;
    }
    return false;
  }

  void tokens() const {
    const std::vector<bool> q_rows = valid_query_rows(g_);
    const int64_t rows = p_.tensor[TESSERA_Q].extent[1];
    const Inside query = [&](const At& at) { return q_rows[at.axis[0] * rows + at.axis[1]]; };
    normals(TESSERA_Q, kDrawQ, query);
    normals(TESSERA_DO, kDrawDo, query);
    normals(TESSERA_DLSE, kDrawDlse, [&](const At& at) {
      return used(q_rows, p_.tensor[TESSERA_DLSE], at.axis[0], rows, at.axis[2]);
    });
    for (int index : {TESSERA_K, TESSERA_V}) {
      if (index == TESSERA_V && c_.has(TESSERA_V_IN_K)) continue;  // k's own elements
      const std::vector<bool> valid = valid_key_rows(index);
      const int64_t key_rows = p_.tensor[index].extent[1];
      normals(index, index == TESSERA_K ? kDrawK : kDrawV, [&](const At& at) {
        return used(valid, p_.tensor[index], at.axis[0], key_rows, at.axis[1]);
      });
    }
    const Inside always = [](const At&) { return true; };
    for (int index : {TESSERA_K_SCALE, TESSERA_Q_SCALE, TESSERA_DO_SCALE, TESSERA_O_SCALE,
                      TESSERA_DQ_SCALE, TESSERA_DK_SCALE, TESSERA_DV_SCALE}) {
      each(index, always, [&](const At& at, int64_t e) {
        store_element(buffers_.data[index], offset(index, at), TESSERA_FP32, 0.5 + 0.25 * (e % 4));
      });
    }
    each(TESSERA_V_SCALE, always, [&](const At& at, int64_t e) {
      store_element(buffers_.data[TESSERA_V_SCALE], offset(TESSERA_V_SCALE, at), TESSERA_FP32,
                    1.5 - 0.25 * (e % 4));
    });
  }

  void scores() const {
    const Inside always = [](const At&) { return true; };
    if (given(p_, TESSERA_BIAS)) {
      const Inside valid = valid_pairs(TESSERA_BIAS);
      normals(TESSERA_BIAS, kDrawBias, valid);
      each(TESSERA_BIAS, valid, [&](const At& at, int64_t e) {
        if (c_.bias_inf > 0 && draw_chance(c_.seed, kDrawBias, e, c_.bias_inf)) {
          return put(TESSERA_BIAS, at, -std::numeric_limits<double>::infinity());
        }
        if (is_low(c_.bias_low, c_.seed, pattern_element(TESSERA_BIAS, at, e))) {
          put_in_reach(TESSERA_BIAS, at, c_.bias_low.value);
        }
      });
    }
    normals(TESSERA_SINK, kDrawSink, always);
    if (c_.sink_value != 0) {
      each(TESSERA_SINK, always,
           [&](const At& at, int64_t) { put_in_reach(TESSERA_SINK, at, c_.sink_value); });
    }
    normals(TESSERA_ALIBI_SLOPES, kDrawSlopes, always);
  }

  void ranges() const {
    if (!given(p_, TESSERA_KEY_RANGES)) return;
    const std::vector<bool> q_rows = valid_query_rows(g_);
    const std::vector<int64_t> position = query_positions();
    const Tensor& t = p_.tensor[TESSERA_KEY_RANGES];
    const int64_t rows = t.extent[2], keys = c_.sk;
    const auto seed = static_cast<uint32_t>(c_.ranges.value);
    const Inside inside = [&](const At& at) {
      if (t.extent[0] > 1 || thd_q()) return used(q_rows, t, at.axis[0], rows, at.axis[2]);
      for (int64_t n = 0; n < c_.b; ++n) {
        if (at.axis[2] < g_.len_q[n]) return true;
      }
      return false;
    };
    each(TESSERA_KEY_RANGES, inside, [&](const At& at, int64_t e) {
      int64_t value;
      if (c_.ranges.kind == CaseRanges::Kind::kPrefix) {
        const int64_t i = thd_q() ? position[at.axis[2]] : at.axis[2];
        value = at.axis[3] == 0 ? 0 : std::max(c_.ranges.value, i + 1);
      } else {
        value = draw_integer(seed, kDrawRanges, e / 2 * 2, keys + 1) - keys / 4;
        if (e % 2) value += draw_integer(seed, kDrawRanges, e, keys + 3) - 2;
      }
      put_integer(TESSERA_KEY_RANGES, at, value);
    });
  }

  void segments() const {
    if (c_.segments.ids == 0) return;
    segment_side(TESSERA_SEGMENT_IDS_Q, g_.len_q, g_.start_q);
    segment_side(TESSERA_SEGMENT_IDS_K, g_.len_k, g_.start_k);
  }
  void segment_side(int index, const PerSequence& lens, const PerSequence& starts) const {
    const Tensor& t = p_.tensor[index];
    // Gaps of a packed side are in no sequence.
    each(
        index, [](const At&) { return false; },
        [&](const At& at, int64_t) { put_integer(index, at, 0); });
    for (int64_t n = 0; n < c_.b; ++n) {
      const int64_t extent = starts.empty() ? t.extent[1] : lens[n];
      const auto [kind, ids] = c_.segments;
      const int64_t num_cuts = (kind == CaseSegments::Kind::kAgain ? 3 * ids : ids) - 1;
      std::vector<int64_t> cuts(num_cuts);
      for (int64_t c = 0; c < num_cuts; ++c) {
        cuts[c] = draw_integer(c_.seed, kDrawSegments, n * num_cuts + c, extent + 1);
      }
      std::sort(cuts.begin(), cuts.end());
      for (int64_t i = 0; i < (c_.poison ? lens[n] : extent); ++i) {
        const int64_t id =
            kind == CaseSegments::Kind::kRandom
                ? draw_integer(c_.seed, kDrawSegments, (n << 32) + i, ids)
                : (std::upper_bound(cuts.begin(), cuts.end(), i) - cuts.begin()) % ids;
        const At at = starts.empty() ? At{n, i, 0, 0} : At{0, starts[n] + i, 0, 0};
        put_integer(index, at, 1 - id);  // any values are ids, negative ones too
      }
    }
  }

  std::vector<int64_t> query_positions() const {
    std::vector<int64_t> position(p_.tensor[TESSERA_Q].extent[1], 0);
    for (int64_t n = 0; thd_q() && n < c_.b; ++n) {
      for (int64_t i = 0; i < g_.len_q[n]; ++i) position[g_.start_q[n] + i] = i;
    }
    return position;
  }

  const Case& c_;
  const CaseGeometry& g_;
  const Problem& p_;
  const Buffers& buffers_;
  Sizes sizes_;
  std::vector<int64_t> page_order_[2];
  std::vector<std::vector<bool>> hidden_;
};

}  // namespace

void fill_inputs(const Case& c, const CaseGeometry& geometry, const Buffers& buffers) {
  Filler(c, geometry, buffers).fill();
}

std::vector<bool> valid_query_rows(const CaseGeometry& g) {
  const Tensor& q = g.problem.tensor[TESSERA_Q];
  std::vector<bool> valid(q.extent[0] * q.extent[1], false);
  for (int64_t n = 0; n < g.len_q.size(); ++n) {
    const int64_t first = g.start_q.empty() ? n * q.extent[1] : g.start_q[n];
    std::fill_n(valid.begin() + first, g.len_q[n], true);
  }
  return valid;
}

}  // namespace tessera
