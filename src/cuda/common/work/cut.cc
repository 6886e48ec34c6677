// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/work/cut.h"

#include <algorithm>

#include "core/count.h"

namespace tessera::cuda {
namespace {

// Parts of a sequence that do not depend on the batch: enough that one fills any GPU.
constexpr int64_t kChunksOfSequence = 512;

}  // namespace

int64_t units_of(const Problem& problem, int rows, int pack) {
  const Sizes s = sizes_of(problem);
  const int64_t queries = rows / pack, batch = std::max<int64_t>(s.batch, 1);
  // num_tile_slots, of any sizes.
  const Count slots =
      is_thd_q(problem) ? Count{s.sq / queries} + batch + 1 : Count{s.sq}.pieces(queries) * batch;
  return (slots * (s.hq / pack)).value();
}

Cut cut_of(const Problem& problem, const CutTile& tile, int64_t ctas, int64_t most_ctas) {
  const Sizes s = sizes_of(problem);
  Cut cut{.tile = tile};
  cut.units = units_of(problem, tile.rows, tile.pack);
  const int64_t step_keys = tile.step_keys;
  const int64_t steps = std::max<int64_t>((s.sk + step_keys - 1) / step_keys, 1);
  cut.least_steps = (tile.least_keys + step_keys - 1) / step_keys;
  if (has(problem, TESSERA_BATCH_INVARIANT)) {
    cut.chunks = std::clamp<int64_t>(kChunksOfSequence / (s.hq / tile.pack), 8, tile.most_parts);
    cut.chunks = std::min(cut.chunks, (steps + cut.least_steps - 1) / cut.least_steps);
  }
  // Sequences, packs and steps; where lengths are live, perhaps fewer.
  const int64_t cells = cut.units * (cut.chunks > 0 ? cut.chunks : steps);
  cut.ctas = std::clamp<int64_t>(std::min(ctas, most_ctas), 1, std::max<int64_t>(cells, 1));
  cut.ctas = std::max<int64_t>(cut.ctas / tile.beside, 1) * tile.beside;
  cut.slots = cut.chunks > 0 ? cut.units * cut.chunks : 2 * most_ctas;
  return cut;
}

WorkArgs work_args(const Params& params, const Cut& cut) {
  const int pack = cut.tile.pack;
  return {.params = params,
          .pack = pack,
          .queries = Divisor::of(cut.tile.rows / pack),
          .beside = Divisor::of(cut.tile.beside),
          .packs = Divisor::of(params.hq / pack / cut.tile.beside),
          .packs_kv = Divisor::of(params.group / pack),
          .whole = cut.chunks == 0 && is_whole(params, cut.tile.rows / pack),
          .units = static_cast<int>(cut.units / cut.tile.beside),
          .most_runs = static_cast<int>(cut.slots / 2 / cut.tile.beside),
          .chunks = static_cast<int>(cut.chunks),
          .least_steps = static_cast<int>(cut.least_steps),
          .least_apart = 0};
}

}  // namespace tessera::cuda
