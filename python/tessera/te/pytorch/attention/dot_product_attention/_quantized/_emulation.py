# SPDX-License-Identifier: Apache-2.0
"""FP8 without FP8 products: whole tensors are rounded and taken back, for UnfusedDotProductAttention."""

from __future__ import annotations

import dataclasses

import torch

from ....cpp_extensions._tables import META_DO, META_DP, META_DQKV, META_O, META_QKV, META_S
from ....quantization import FP8GlobalStateManager
from ....tensor.float8_tensor import Float8CurrentScalingQuantizer
from ....tensor.quantized_tensor import QuantizedTensor

_FORWARD = ("S_quantizer", "O_quantizer")
_BACKWARD = ("dO_quantizer", "dP_quantizer")


class FP8EmulationFunc(torch.autograd.Function):
    """(tensor1, tensor2, tensor3, quantizer, quantizer_name, qkv_layout) -> three tensors, of which

        "QKV_quantizer"                 rounds all three in the forward pass, with one scale where the
                                        quantizer was told it before
        "S_quantizer", "O_quantizer"    the first, in the forward pass
        "dQKV_quantizer"                the gradients of all three
        "dO_quantizer", "dP_quantizer"  the gradient of the first

    and leaves the others as they are, which may be None.
    """

    @staticmethod
    def forward(ctx, tensor1, tensor2, tensor3, quantizer, quantizer_name, qkv_layout):
        if quantizer_name not in ("QKV_quantizer", "dQKV_quantizer", *_FORWARD, *_BACKWARD):
            raise ValueError(f"FP8EmulationFunc: quantizer_name={quantizer_name!r}: must be one of "
                             "QKV_quantizer, S_quantizer, O_quantizer, dQKV_quantizer, dO_quantizer, "
                             "dP_quantizer")
        ctx.quantizer, ctx.name = quantizer, quantizer_name
        tensors = tensor1, tensor2, tensor3
        if quantizer_name == "QKV_quantizer":
            return _rounded(quantizer, tensors)
        if quantizer_name in _FORWARD:
            return *_rounded(quantizer, tensors[:1]), *tensors[1:]
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        if ctx.name == "dQKV_quantizer":
            grads = _rounded(ctx.quantizer, grads)
        elif ctx.name in _BACKWARD:
            grads = *_rounded(ctx.quantizer, grads[:1]), *grads[1:]
        if ctx.name in ("dQKV_quantizer", *_BACKWARD):
            FP8GlobalStateManager.update_after_backward()
        return *grads, None, None, None


def _rounded(quantizer, tensors) -> tuple:
    return tuple(x.dequantize() for x in quantizer.quantize_together(tensors))


@dataclasses.dataclass
class Emulation:
    """Where UnfusedDotProductAttention rounds, by the quantizers of a Float8Module."""
    module: torch.nn.Module
    fp8_output: bool

    def __post_init__(self):
        self.forward, self.backward = self.module.forward_quantizers(), self.module.quantizers["scaling_bwd"]

    def inputs(self, *qkv):
        q, k, v = (x.dequantize() if isinstance(x, QuantizedTensor) else x for x in qkv)
        q, k, v = FP8EmulationFunc.apply(q, k, v, self._of(META_QKV), "QKV_quantizer", None)
        return FP8EmulationFunc.apply(q, k, v, self._of(META_DQKV, False), "dQKV_quantizer", None)

    def scores(self, x):
        return self._one(x, self._current(META_DP, False), "dP_quantizer")

    def probabilities(self, x):
        return self._one(x, self._current(META_S), "S_quantizer")

    def output(self, o):
        o = self._one(o, self._of(META_DO, False), "dO_quantizer")
        if self.fp8_output:
            return self._of(META_O)(o)
        return self._one(o, self._of(META_O), "O_quantizer")

    def _one(self, x, quantizer, name):
        return FP8EmulationFunc.apply(x, None, None, quantizer, name, None)[0]

    def _of(self, slot: int, forward: bool = True):
        return (self.forward if forward else self.backward)[slot]

    def _current(self, slot: int, forward: bool = True):
        """P and dP are tensors here, so under Float8CurrentScaling they can be their own scales."""
        quantizer = self._of(slot, forward)
        if len(self.module.fp8_meta["local_recipes"]) == 1:
            return quantizer
        return Float8CurrentScalingQuantizer(quantizer.dtype, quantizer.scale.device)
