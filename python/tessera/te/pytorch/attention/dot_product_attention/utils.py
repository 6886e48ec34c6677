# SPDX-License-Identifier: Apache-2.0
"""What TE's users import from dot_product_attention.utils."""

from __future__ import annotations

from ...._logging import AttentionLogging, logger
from ...._names import missing
from ..._words import check_set_window_size
from ..._words import qkv_layout as _layout
from ...cpp_extensions._tables import META_DO, META_DP, META_DQKV, META_O, META_QKV, META_S
from ...tensor.float8_tensor import Float8Quantizer
from ...tensor.quantized_tensor import QuantizedTensor
from ._fused import FusedAttentionParams, FusedAttnSpec, get_fused_attn_spec
from ._inputs._layouts import get_qkv_format, get_qkv_layout, maybe_contiguous, qkv_layout_needs_detection
from ._inputs._masks import get_alibi, get_full_mask, get_padding_mask, get_thd_padding_mask
from ._choice._selection import AttentionParams, flash_version, get_attention_backend
from ._inputs._sequences import (ConvertBSHDtoTHD, ConvertTHDtoBSHD, PackTensors, UnpackTensor,
                                 _cu_seqlens_cache,  # noqa: F401 - where TE has it
                                 get_cu_seqlens, get_cu_seqlens_and_indices, get_full_cu_seqlens, get_indices)

__all__ = ["AttentionLogging", "AttentionParams", "ConvertBSHDtoTHD", "ConvertTHDtoBSHD",
           "FlashAttentionUtils", "FusedAttentionParams", "FusedAttnSpec", "PackTensors",
           "UnpackTensor", "check_set_window_size",
           "combine_and_dequantize", "combine_and_quantize", "get_alibi", "get_attention_backend",
           "get_attention_quantizers", "get_cu_seqlens", "get_cu_seqlens_and_indices", "get_full_cu_seqlens",
           "get_full_mask", "get_fused_attn_spec", "get_indices", "get_padding_mask", "get_qkv_format",
           "get_qkv_layout", "get_thd_padding_mask", "maybe_contiguous", "no_op_logger", "print_quantizers",
           "qkv_layout_needs_detection", "transpose_to_bhsd_htd_pytorch"]
__getattr__ = missing(__name__)

_alibi_cache = {
    "_num_heads": None,
    "_alibi_slopes": None,
    "_max_seqlen_q": None,
    "_max_seqlen_kv": None,
    "_bottom_right_alignment": True,
    "_alibi_bias": None,
    "_alibi_slopes_require_update": False,
    "_alibi_bias_require_update": False,
}


def _get_supported_versions(version_min, version_max) -> str:
    """The range of versions, as TE's messages spell it."""
    return f">= {version_min}, <= {version_max}"


class FlashAttentionUtils:
    """FlashAttention is tessera's kernels: always installed, with everything that flash-attn 2 came
    to have in its versions. flash-attn 3 and 4 are no part of it."""
    is_installed = True
    version = flash_version()
    version_required = version_required_blackwell = max_version = version
    v2_plus = v2_1_plus = v2_3_plus = v2_4_plus = v2_4_1_plus = v2_5_plus = v2_5_7_plus = True
    v2_6_0_plus = v2_7_0_plus = True
    warning_printed = v3_warning_printed = False
    v3_is_installed = v3_0_0_beta = use_v3 = False
    v4_is_installed = use_v4 = False
    fa3_version = fa4_version = type(version)("0")
    fa3_supports_softcap = False
    v4_validate_head_dims = None
    _get_supported_versions = staticmethod(_get_supported_versions)

    @staticmethod
    def set_flash_attention_version():
        """There is one, of which all here is said already."""

    set_flash_attention_3_params = set_flash_attention_4_params = set_flash_attention_version

    @classmethod
    def is_version_supported(cls, version=None, minimum_version=None) -> bool:
        """Whether `version` is at least `minimum_version`; without the latter whether it, by default the one that
        is here, lies between version_required and max_version."""
        version = cls.version if version is None else cls._read("version", version)
        if minimum_version is not None:
            return cls._read("minimum_version", minimum_version) <= version
        return cls.version_required <= version <= cls.max_version

    @classmethod
    def _read(cls, name: str, version):
        try:
            return type(cls.version)(str(version))
        except ValueError as error:
            raise ValueError(f"FlashAttentionUtils: {name}={version!r}: must be a version such as "
                             f'"{cls.version}"') from error


def combine_and_quantize(qkv_layout, q, k, v, qkv_quantizer, used_in_forward=True, used_in_backward=False,
                         keep_same_data_and_scale_inv_format=False, combined_qkv=None, combined_kv=None):
    """(q, k, v, qkv_layout, scale_inv_format): Float8Tensors that share a scale, in the layout that was
    given, and None: one scale a tensor has no format. No copy joins them, so neither the layout nor a
    buffer that holds them already (combined_qkv, combined_kv) matters."""
    del used_in_forward, used_in_backward, keep_same_data_and_scale_inv_format, combined_qkv, combined_kv
    _layout(qkv_layout)
    return *qkv_quantizer.quantize_together([x.detach() for x in (q, k, v)]), qkv_layout, None


def transpose_to_bhsd_htd_pytorch(tensor, src_format):
    """A dense copy [b, h, s, d] or [h, t, d] of `tensor`, whose axes src_format spells; itself where they are so."""
    if src_format in ("bhsd", "htd"):
        return tensor
    if src_format not in ("sbhd", "bshd", "thd") or tensor.dim() != len(src_format):
        raise ValueError(f"transpose_to_bhsd_htd_pytorch: src_format={src_format!r} of tensor.shape="
                         f"{list(tensor.shape)}: must name each axis: sbhd, bshd, bhsd, thd or htd")
    wanted = "htd" if src_format == "thd" else "bhsd"
    return tensor.permute([src_format.index(axis) for axis in wanted]).contiguous()


def combine_and_dequantize(qkv_layout, q_fp8, k_fp8, v_fp8, src_nominal_dtype=None, des_nominal_dtype=None):
    """The values of (q, k, v), in des_nominal_dtype, else src_nominal_dtype, else their own dtype."""
    _layout(qkv_layout)
    dtype = des_nominal_dtype or src_nominal_dtype
    return tuple(x.dequantize(dtype=dtype) if isinstance(x, QuantizedTensor) else x.to(dtype or x.dtype)
                 for x in (q_fp8, k_fp8, v_fp8))


_ROLES = (("scaling_fwd", META_QKV), ("scaling_fwd", META_O), ("scaling_fwd", META_S), ("scaling_bwd", META_DQKV),
          ("scaling_bwd", META_DO), ("scaling_bwd", META_DP))


def get_attention_quantizers(fp8, quantizers):
    """(QKV, O, S, dQKV, dO, dP) of a module's quantizers, six Nones outside FP8."""
    return tuple(quantizers[state][slot] for state, slot in _ROLES) if fp8 else [None] * 6


def print_quantizers(label, layer_number, QKV_quantizer, O_quantizer, S_quantizer, dQKV_quantizer, dO_quantizer,
                     dP_quantizer):
    """Logs kinds, and where they live from step to step scales and amaxes, of the pass that `label` names."""
    shown = {"QKV": QKV_quantizer, "S": S_quantizer, "O": O_quantizer} if "forward" in label else \
        {"dO": dO_quantizer, "dP": dP_quantizer, "dQKV": dQKV_quantizer}
    for name, x in shown.items():
        text = type(x).__name__
        if isinstance(x, Float8Quantizer):
            text += f", scale {x.scale.item():.4e}, amax {x.amax.item():.4e}"
        logger.debug("%s of layer %s: %s_quantizer: %s", label, layer_number, name, text)


class _NoOpLogger:
    """Says nothing, where torch.compile traces."""

    def debug(self, *args, **kwargs):
        pass

    info = warning = error = debug


no_op_logger = _NoOpLogger()
