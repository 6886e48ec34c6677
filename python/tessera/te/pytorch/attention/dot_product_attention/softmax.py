# SPDX-License-Identifier: Apache-2.0
"""TE's softmax of given scores [b, h, sq, sk], in plain PyTorch: for callers that hold scores. DotProductAttention
never does.

    softmax = FusedScaleMaskSoftmax(lambda scores, hidden: scores.masked_fill(hidden, -10000.0))
    p = softmax(scores, hidden, "padding", scale=0.125)
"""

from __future__ import annotations

import torch

from ...._logging import switch
from ...._names import missing
from ._inputs._masks import causal_hidden

__all__ = ["FusedScaleMaskSoftmax"]
__getattr__ = missing(__name__)

THREADS_PER_WARP, THREADS_PER_BLOCK = 32, 128
_HIDDEN = -10000.0  # what TE's kernels give a hidden score; a row that hides all is zero


class FusedScaleMaskSoftmax(torch.nn.Module):
    """softmax(mask_func(scale * scores, mask)) along the last axis, in the dtype of the scores; with
    softmax_in_fp32 16-bit ones are computed in fp32. A causal mask hides by itself."""

    def __init__(self, mask_func, softmax_in_fp32: bool = True):
        super().__init__()
        self.scaled_masked_softmax_fusion_type = bool(switch("NVTE_MASKED_SOFTMAX_FUSION", 1))
        self.mask_func, self.softmax_in_fp32 = mask_func, softmax_in_fp32

    def forward(self, inp, mask, attn_mask_type: str, scale: float | None = None):
        if inp.dim() != 4:
            raise ValueError(f"FusedScaleMaskSoftmax: inp.shape={list(inp.shape)}: must be [b, h, sq, sk]")
        if scale is not None and not self.softmax_in_fp32:
            raise ValueError(f"FusedScaleMaskSoftmax: scale={scale}: needs softmax_in_fp32=True")
        self.input_in_fp16, self.input_in_bf16 = inp.dtype == torch.float16, inp.dtype == torch.bfloat16
        self.input_in_float16 = self.input_in_fp16 or self.input_in_bf16
        self.attn_mask_type = attn_mask_type
        if self.is_kernel_available(mask, *inp.size()):
            return self.forward_fused_softmax(inp, mask, scale)
        return self.forward_torch_softmax(inp, mask, scale)

    def is_kernel_available(self, mask, b: int, np: int, sq: int, sk: int) -> bool:
        """Where TE has a kernel, which ignores mask_func: the same calls hide alike here."""
        fits = self.scaled_masked_softmax_fusion_type and self.input_in_float16 and 16 < sk < 16384 and \
            sk % 8 == 0 and sq > 1 and sq % 4 == 0 and b * np % 4 == 0 and \
            (self.attn_mask_type != "causal" or sq == sk) and sq % self.get_batch_per_block(sk) == 0
        if fits and ("padding" in self.attn_mask_type or self.attn_mask_type == "arbitrary"):
            fits = mask is not None and mask.shape[0] in (1, b) and tuple(mask.shape[1:]) == (1, sq, sk)
        return bool(fits)

    def forward_fused_softmax(self, inp, mask, scale: float | None = None):
        scale = 1.0 if scale is None else float(scale)
        mask = self._with_causal(inp, mask)
        if mask is not None and self.attn_mask_type != "no_mask":
            return scaled_masked_softmax_forward(inp, mask, scale)
        return scaled_softmax_forward(inp, scale)

    def forward_torch_softmax(self, inp, mask, scale: float | None = None):
        dtype = inp.dtype
        scores = inp.float() if self.input_in_float16 and self.softmax_in_fp32 else inp
        scores = scores if scale is None else scores * scale
        mask = self._with_causal(inp, mask)
        if mask is not None and self.attn_mask_type != "no_mask":
            scores = self.mask_func(scores, mask)
        return scores.softmax(-1).to(dtype)

    def _with_causal(self, inp, mask):
        if self.attn_mask_type not in ("causal", "causal_bottom_right"):
            return mask
        hidden = causal_hidden(self.attn_mask_type, *inp.shape[2:], inp.device)
        return hidden if mask is None else mask | hidden

    @staticmethod
    def get_batch_per_block(key_seq_len: int) -> int:
        """Rows of a block of TE's kernels."""
        width = 1 << (key_seq_len - 1).bit_length()
        return THREADS_PER_BLOCK // min(width, THREADS_PER_WARP) * (2 if width <= 128 else 1)


def scaled_softmax_forward(inputs, scale: float):
    """softmax(scale * inputs), computed in fp32."""
    return (inputs.float() * scale).softmax(-1).to(inputs.dtype)


def scaled_masked_softmax_forward(inputs, mask, scale: float):
    """softmax of scale * inputs where mask is False, and of -10000 where it is True; a row that hides all is
    zero."""
    scores = (inputs.float() * scale).masked_fill(mask, _HIDDEN)
    return scores.softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0).to(inputs.dtype)


def scaled_upper_triang_masked_softmax_forward(inputs, scale: float):
    """inputs [b * h, s, s], of which row i sees columns up to i; what is hidden is zero."""
    return scaled_aligned_causal_masked_softmax_forward(inputs, scale)


def scaled_aligned_causal_masked_softmax_forward(inputs, scale: float):
    """inputs [.., sq, sk] along the bottom-right diagonal; what is hidden is zero, as is a row that sees nothing."""
    hidden = causal_hidden("causal_bottom_right", *inputs.shape[-2:], inputs.device)
    scores = (inputs.float() * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0).to(inputs.dtype)


def scaled_softmax_backward(output_grads, softmax_results, scale: float):
    """The gradient of each of the softmaxes of this module: scale * p * (dp - rowsum(p * dp))."""
    p, dp = softmax_results.float(), output_grads.float()
    return (scale * p * (dp - (p * dp).sum(-1, keepdim=True))).to(output_grads.dtype)


scaled_masked_softmax_backward = scaled_upper_triang_masked_softmax_backward = \
    scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
