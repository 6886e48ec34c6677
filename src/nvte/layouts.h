// SPDX-License-Identifier: Apache-2.0
// TransformerEngine's names of layouts as formats and strides.
#pragma once

#include "tessera.h"
#include "tessera_nvte.h"

namespace tessera::nvte {

// bshd, sbhd, thd or bhsd of q and of k and v; in pages, the order inside the pool.
struct Layout {
  NVTE_QKV_Layout_Group group;
  NVTE_QKV_Format q, kv;
};

// `argument` names the value in the error of one that is none.
const Layout& layout_of(NVTE_QKV_Layout layout, const char* argument);
// One tensor has bshd, sbhd, thd or bhsd; the formats of two are wrong.
tessera_format format_of(NVTE_QKV_Format format, const char* argument);

inline bool is_paged(const Layout& layout) { return layout.group == NVTE_Paged_KV_HD_HD_HD; }

// One tensor of a layout. `sharing` tensors lie in one buffer, and are interleaved token by token
// ([.., 3, h, d]), or head by head ([.., h, 3, d]) with heads_apart.
struct Placed {
  tessera_format format;
  int64_t b, s, h, d;  // packed (thd): 1 and all tokens
  int64_t sharing = 1;
  bool heads_apart = false;
};

// q, k or v (TESSERA_Q, _K, _V) of a layout.
Placed placed(const Layout& layout, int tensor, int64_t b, int64_t s, int64_t h, int64_t d);

tessera_tensor describe(tessera_dtype dtype, const Placed& placed);

}  // namespace tessera::nvte
