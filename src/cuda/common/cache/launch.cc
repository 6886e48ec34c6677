// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/cache/launch.h"

#include <algorithm>

namespace tessera::cuda {
namespace {

View view_of(const Tensor& t, const void* data) {
  View view{};
  if (t.dtype == TESSERA_NONE) return view;
  view.data = const_cast<void*>(data);
  view.dtype = t.dtype;
  for (int axis = 0; axis < 4; ++axis) view.stride[axis] = t.extent[axis] > 1 ? t.stride[axis] : 0;
  return view;
}

Moved moved_of(const Tensor& from, const void* from_data, const Tensor& to, const void* to_data) {
  Moved moved{};
  moved.from = view_of(from, from_data);
  moved.to = view_of(to, to_data);
  moved.heads = static_cast<int32_t>(from.extent[2]);
  moved.d = static_cast<int32_t>(from.extent[3]);
  return moved;
}

// cos and sin; half = 0 without them.
void set_tables(MoveLaunch& m, const Tensor& cos, const void* cos_data, const Tensor& sin,
                const void* sin_data, uint32_t flags) {
  if (cos.dtype == TESSERA_NONE) return;
  m.cos = static_cast<const float*>(cos_data);
  m.sin = static_cast<const float*>(sin_data);
  m.cos_stride = cos.extent[0] > 1 ? cos.stride[0] : 0;
  m.sin_stride = sin.extent[0] > 1 ? sin.stride[0] : 0;
  m.max_position = cos.extent[0];
  m.half = static_cast<int32_t>(cos.extent[1]);
  m.interleaved = (flags & TESSERA_INTERLEAVED) != 0;
  m.inverse = (flags & TESSERA_INVERSE) != 0;
}

// True if runs of 8 elements lie at multiples of their bytes in every row.
bool in_vectors(const View& view) {
  const int64_t bytes = std::min<int64_t>(8 * size_of(view.dtype), 16);
  const auto whole = [&](int64_t stride) { return stride * size_of(view.dtype) % bytes == 0; };
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 &&
         whole(view.stride[0]) && whole(view.stride[1]) && whole(view.stride[2]);
}

bool table_in_vectors(const float* table, int64_t stride) {
  return reinterpret_cast<uintptr_t>(table) % 16 == 0 && stride % 4 == 0;
}

bool all_in_vectors(const MoveLaunch& m) {
  bool all = m.half % 8 == 0 && table_in_vectors(m.cos, m.cos_stride) &&
             table_in_vectors(m.sin, m.sin_stride);
  for (const Moved& moved : m.moved) {
    if (moved.heads == 0) continue;
    all &= moved.d % 8 == 0 && in_vectors(moved.from) && in_vectors(moved.to);
  }
  return all;
}

// Cuts rows into pieces, once all tensors are there.
void cut(MoveLaunch& m) {
  m.width = all_in_vectors(m) ? 8 : 1;
  for (const Moved& moved : m.moved) {
    m.heads += moved.heads;
    if (moved.heads == 0) continue;
    const int turning = moved.turns ? m.half : 0, passing = moved.d - 2 * turning;
    m.pieces = std::max(m.pieces, turning / m.width + (passing + 2 * m.width - 1) / (2 * m.width));
  }
}

}  // namespace

MoveLaunch launch_of(const RotateArgs& args) {
  MoveLaunch m{};
  const Tensor& x = args.tensor[TESSERA_ROTATE_X];
  const Tensor& positions = args.tensor[TESSERA_ROTATE_POSITIONS];
  m.batch = static_cast<int32_t>(x.extent[0]);
  m.sequence = x.extent[1];
  m.tokens = m.batch * m.sequence;
  m.moved[0] = moved_of(x, args.data[TESSERA_ROTATE_X], args.tensor[TESSERA_ROTATE_Y],
                        args.data[TESSERA_ROTATE_Y]);
  m.moved[0].turns = true;
  m.positions = view_of(positions, args.data[TESSERA_ROTATE_POSITIONS]);
  m.position_each = positions.dtype != TESSERA_NONE && positions.extent[1] > 1;
  set_tables(m, args.tensor[TESSERA_ROTATE_COS], args.data[TESSERA_ROTATE_COS],
             args.tensor[TESSERA_ROTATE_SIN], args.data[TESSERA_ROTATE_SIN], args.flags);
  cut(m);
  return m;
}

MoveLaunch launch_of(const AppendArgs& args) {
  MoveLaunch m{};
  const auto view = [&](int index) { return view_of(args.tensor[index], args.data[index]); };
  const auto moved = [&](int from, int to) {
    return moved_of(args.tensor[from], args.data[from], args.tensor[to], args.data[to]);
  };
  const Tensor &k = args.tensor[TESSERA_APPEND_K], &cache = args.tensor[TESSERA_APPEND_K_CACHE];
  const Tensor& table = args.tensor[TESSERA_APPEND_PAGE_TABLE];
  m.batch = static_cast<int32_t>(args.tensor[TESSERA_APPEND_SEQLENS].extent[0]);
  m.sequence = k.extent[1];
  m.cu_seqlens = view(TESSERA_APPEND_CU_SEQLENS);
  m.tokens = m.cu_seqlens.data ? m.sequence : m.batch * m.sequence;
  m.seqlens_q = view(TESSERA_APPEND_SEQLENS_Q);
  m.positions = view(TESSERA_APPEND_SEQLENS);
  m.page_table = view(TESSERA_APPEND_PAGE_TABLE);
  m.pages = cache.extent[0];
  m.page_size = cache.extent[1];
  m.capacity = m.page_table.data ? table.extent[1] * m.page_size : m.page_size;
  set_tables(m, args.tensor[TESSERA_APPEND_COS], args.data[TESSERA_APPEND_COS],
             args.tensor[TESSERA_APPEND_SIN], args.data[TESSERA_APPEND_SIN], args.flags);

  m.moved[0] = moved(TESSERA_APPEND_K, TESSERA_APPEND_K_CACHE);
  m.moved[0].scale = view(TESSERA_APPEND_K_SCALE);
  m.moved[0].turns = m.half > 0;
  m.moved[1] = moved(TESSERA_APPEND_V, TESSERA_APPEND_V_CACHE);
  m.moved[1].scale = view(TESSERA_APPEND_V_SCALE);
  m.moved[2] = moved(TESSERA_APPEND_Q, TESSERA_APPEND_Q_OUT);
  m.moved[2].turns = true;
  m.moved[0].to_cache = m.moved[1].to_cache = true;
  cut(m);
  return m;
}

}  // namespace tessera::cuda
