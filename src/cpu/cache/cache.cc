// SPDX-License-Identifier: Apache-2.0
#include "cpu/cache/cache.h"

#include <cstring>

#include "cpu/cache/rope.h"
#include "cpu/pool.h"

namespace tessera::cpu {
namespace {

// The tables [max_pos, r/2] of a call; cos is NULL where nothing turns.
struct Tables {
  const Tensor& cos;
  const Tensor& sin;
  const void *cos_data, *sin_data;
  uint32_t flags;

  Angles at(int64_t position) const {
    if (cos.dtype == TESSERA_NONE) return {};
    return {static_cast<const float*>(cos_data) + offset_of(cos, position),
            static_cast<const float*>(sin_data) + offset_of(sin, position), cos.extent[1],
            (flags & TESSERA_INTERLEAVED) != 0, (flags & TESSERA_INVERSE) != 0};
  }
};

char* row_of(const Tensor& t, void* data, int64_t n, int64_t i, int64_t h) {
  return static_cast<char*>(data) + offset_of(t, n, i, h) * size_of(t.dtype);
}

// One new token of a call of append.
class Appending {
 public:
  explicit Appending(const AppendArgs& args)
      : args_(args),
        places_(args),
        tables_{args.tensor[TESSERA_APPEND_COS], args.tensor[TESSERA_APPEND_SIN],
                args.data[TESSERA_APPEND_COS], args.data[TESSERA_APPEND_SIN], args.flags} {}

  const AppendPlaces& places() const { return places_; }

  void token(int64_t n, int64_t i) const {
    if (i >= places_.count(n)) return clear_q(n, i);
    const int64_t position = places_.start(n) + i;
    const Angles angles = tables_.at(position);
    const AppendPlaces::Place place = places_.place(n, position);
    to_cache(TESSERA_APPEND_K, TESSERA_APPEND_K_CACHE, TESSERA_APPEND_K_SCALE, n, i, place, angles);
    to_cache(TESSERA_APPEND_V, TESSERA_APPEND_V_CACHE, TESSERA_APPEND_V_SCALE, n, i, place, {});
    turn_q(n, i, angles);
  }

 private:
  int64_t batch(int64_t n) const { return places_.packed() ? 0 : n; }

  void to_cache(int from, int to, int scale, int64_t n, int64_t i, AppendPlaces::Place place,
                const Angles& angles) const {
    const Tensor &x = args_.tensor[from], &cache = args_.tensor[to], &s = args_.tensor[scale];
    if (x.dtype == TESSERA_NONE) return;
    RowMove move{x.dtype, cache.dtype, x.extent[3], angles};
    for (int64_t h = 0; h < x.extent[2]; ++h) {
      if (s.dtype != TESSERA_NONE) {
        move.scale =
            static_cast<const float*>(args_.data[scale])[offset_of(s, broadcast(s, 0, n), h)];
      }
      move_row(move, row_of(x, args_.data[from], batch(n), places_.first_row(n) + i, h),
               row_of(cache, args_.data[to], place.batch, place.row, h));
    }
  }

  void turn_q(int64_t n, int64_t i, const Angles& angles) const {
    const Tensor &q = args_.tensor[TESSERA_APPEND_Q], &out = args_.tensor[TESSERA_APPEND_Q_OUT];
    if (q.dtype == TESSERA_NONE) return;
    const RowMove move{q.dtype, out.dtype, q.extent[3], angles};
    const int64_t row = places_.first_row(n) + i;
    for (int64_t h = 0; h < q.extent[2]; ++h) {
      move_row(move, row_of(q, args_.data[TESSERA_APPEND_Q], batch(n), row, h),
               row_of(out, args_.data[TESSERA_APPEND_Q_OUT], batch(n), row, h));
    }
  }

  void clear_q(int64_t n, int64_t i) const {
    const Tensor& out = args_.tensor[TESSERA_APPEND_Q_OUT];
    if (out.dtype == TESSERA_NONE) return;
    for (int64_t h = 0; h < out.extent[2]; ++h) {
      std::memset(row_of(out, args_.data[TESSERA_APPEND_Q_OUT], n, i, h), 0,
                  static_cast<size_t>(out.extent[3] * size_of(out.dtype)));
    }
  }

  const AppendArgs& args_;
  AppendPlaces places_;
  Tables tables_;
};

}  // namespace

void rotate(const RotateArgs& args, const Buffers& context) {
  const Tensor &x = args.tensor[TESSERA_ROTATE_X], &y = args.tensor[TESSERA_ROTATE_Y];
  const Tables tables{args.tensor[TESSERA_ROTATE_COS], args.tensor[TESSERA_ROTATE_SIN],
                      args.data[TESSERA_ROTATE_COS], args.data[TESSERA_ROTATE_SIN], args.flags};
  const int64_t s = x.extent[1];
  parallel_for(context, x.extent[0] * s, [&](int64_t task, int) {
    const int64_t n = task / s, i = task % s;
    const RowMove move{x.dtype, y.dtype, x.extent[3], tables.at(position_of(args, n, i))};
    for (int64_t h = 0; h < x.extent[2]; ++h) {
      move_row(move, row_of(x, args.data[TESSERA_ROTATE_X], n, i, h),
               row_of(y, args.data[TESSERA_ROTATE_Y], n, i, h));
    }
  });
}

void append(const AppendArgs& args, const Buffers& context) {
  const Appending appending(args);
  const AppendPlaces& places = appending.places();
  const auto stored = [&](int index) {
    const Tensor& t = args.tensor[index];
    return t.dtype != TESSERA_NONE && element_count(t, 4) > 0;
  };
  const bool turns = stored(TESSERA_APPEND_Q_OUT);
  if (!turns && !stored(TESSERA_APPEND_K) && !stored(TESSERA_APPEND_V)) return;
  // Rows of q_out without a token are cleared.
  const int64_t longest =
      turns && !places.packed() ? args.tensor[TESSERA_APPEND_Q].extent[1] : places.longest();
  if (longest == 0) return;
  if (!places.packed()) {
    parallel_for(context, places.distinct() * longest,
                 [&](int64_t task, int) { appending.token(task / longest, task % longest); });
    return;
  }
  parallel_for(context, places.distinct(), [&](int64_t n, int) {
    for (int64_t i = 0; i < places.count(n); ++i) appending.token(n, i);
  });
}

}  // namespace tessera::cpu
