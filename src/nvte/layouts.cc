// SPDX-License-Identifier: Apache-2.0
#include "nvte/layouts.h"

#include <iterator>

#include "nvte/tensor.h"

namespace tessera::nvte {
namespace {

// Indexed by NVTE_QKV_Layout.
constexpr Layout kLayouts[] = {
    {NVTE_3HD, NVTE_SBHD, NVTE_SBHD},
    {NVTE_H3D, NVTE_SBHD, NVTE_SBHD},
    {NVTE_HD_2HD, NVTE_SBHD, NVTE_SBHD},
    {NVTE_HD_H2D, NVTE_SBHD, NVTE_SBHD},
    {NVTE_HD_HD_HD, NVTE_SBHD, NVTE_SBHD},
    {NVTE_3HD, NVTE_BSHD, NVTE_BSHD},
    {NVTE_H3D, NVTE_BSHD, NVTE_BSHD},
    {NVTE_HD_2HD, NVTE_BSHD, NVTE_BSHD},
    {NVTE_HD_H2D, NVTE_BSHD, NVTE_BSHD},
    {NVTE_HD_HD_HD, NVTE_BSHD, NVTE_BSHD},
    {NVTE_3HD, NVTE_THD, NVTE_THD},
    {NVTE_H3D, NVTE_THD, NVTE_THD},
    {NVTE_HD_2HD, NVTE_THD, NVTE_THD},
    {NVTE_HD_H2D, NVTE_THD, NVTE_THD},
    {NVTE_HD_HD_HD, NVTE_THD, NVTE_THD},
    {NVTE_HD_HD_HD, NVTE_SBHD, NVTE_BSHD},
    {NVTE_HD_HD_HD, NVTE_BSHD, NVTE_SBHD},
    {NVTE_HD_HD_HD, NVTE_THD, NVTE_BSHD},
    {NVTE_HD_HD_HD, NVTE_THD, NVTE_SBHD},
    {NVTE_Paged_KV_HD_HD_HD, NVTE_BSHD, NVTE_BSHD},
    {NVTE_Paged_KV_HD_HD_HD, NVTE_BSHD, NVTE_SBHD},
    {NVTE_Paged_KV_HD_HD_HD, NVTE_SBHD, NVTE_BSHD},
    {NVTE_Paged_KV_HD_HD_HD, NVTE_SBHD, NVTE_SBHD},
    {NVTE_Paged_KV_HD_HD_HD, NVTE_THD, NVTE_BSHD},
    {NVTE_Paged_KV_HD_HD_HD, NVTE_THD, NVTE_SBHD},
    {NVTE_SD_SD_SD, NVTE_BHSD, NVTE_BHSD},
};
static_assert(std::size(kLayouts) == NVTE_QKV_Layout_NOT_SET);

NVTE_QKV_Format together(const Layout& layout) {
  if (layout.q == layout.kv) return layout.q;
  const bool kv_is_bshd = layout.kv == NVTE_BSHD;
  if (layout.q == NVTE_THD) return kv_is_bshd ? NVTE_THD_2BSHD : NVTE_THD_2SBHD;
  return kv_is_bshd ? NVTE_SBHD_2BSHD : NVTE_BSHD_2SBHD;
}

}  // namespace

const Layout& layout_of(NVTE_QKV_Layout layout, const char* argument) {
  if (layout < 0 || layout >= NVTE_QKV_Layout_NOT_SET) {
    fail("%s=%d: must be an NVTE_QKV_Layout, 0 to %d", argument, static_cast<int>(layout),
         static_cast<int>(NVTE_QKV_Layout_NOT_SET) - 1);
  }
  return kLayouts[layout];
}

tessera_format format_of(NVTE_QKV_Format format, const char* argument) {
  switch (format) {
    case NVTE_SBHD:
      return TESSERA_SBHD;
    case NVTE_BSHD:
      return TESSERA_BSHD;
    case NVTE_THD:
      return TESSERA_THD;
    case NVTE_BHSD:
      return TESSERA_BHSD;
    default:
      fail("%s=%d: must be NVTE_SBHD (0), NVTE_BSHD (1), NVTE_THD (2) or NVTE_BHSD (7)", argument,
           static_cast<int>(format));
  }
}

Placed placed(const Layout& layout, int tensor, int64_t b, int64_t s, int64_t h, int64_t d) {
  const bool is_q = tensor == TESSERA_Q;
  const tessera_format format = format_of(is_q ? layout.q : layout.kv, "layout");
  Placed place{format, format == TESSERA_THD ? 1 : b, s, h, d};
  if (layout.group == NVTE_3HD || layout.group == NVTE_H3D) {
    place.sharing = 3;
  } else if (layout.group == NVTE_HD_2HD || layout.group == NVTE_HD_H2D) {
    place.sharing = is_q ? 1 : 2;
  }
  place.heads_apart = layout.group == NVTE_H3D || (layout.group == NVTE_HD_H2D && !is_q);
  return place;
}

tessera_tensor describe(tessera_dtype dtype, const Placed& p) {
  const int64_t token = p.sharing * p.h * p.d, head = p.heads_apart ? p.sharing * p.d : p.d;
  tessera_tensor t{dtype, 0, {p.b, p.s, p.h, p.d}, {p.s * token, token, head, 1}};
  if (p.format == TESSERA_SBHD) {
    t.stride[0] = token;
    t.stride[1] = p.b * token;
  } else if (p.format == TESSERA_BHSD) {
    t.stride[1] = p.d;
    t.stride[2] = p.s * p.d;
  }
  return t;
}

}  // namespace tessera::nvte

using namespace tessera::nvte;

NVTE_QKV_Layout_Group tessera_nvte_get_qkv_layout_group(NVTE_QKV_Layout qkv_layout) {
  return named("nvte_get_qkv_layout_group",
               [&] { return layout_of(qkv_layout, "qkv_layout").group; });
}
NVTE_QKV_Format tessera_nvte_get_qkv_format(NVTE_QKV_Layout qkv_layout) {
  return named("nvte_get_qkv_format",
               [&] { return together(layout_of(qkv_layout, "qkv_layout")); });
}
NVTE_QKV_Format tessera_nvte_get_q_format(NVTE_QKV_Layout qkv_layout) {
  return named("nvte_get_q_format", [&] { return layout_of(qkv_layout, "qkv_layout").q; });
}
NVTE_QKV_Format tessera_nvte_get_kv_format(NVTE_QKV_Layout qkv_layout) {
  return named("nvte_get_kv_format", [&] { return layout_of(qkv_layout, "qkv_layout").kv; });
}
