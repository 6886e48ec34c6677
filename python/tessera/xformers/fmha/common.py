# SPDX-License-Identifier: Apache-2.0
"""xformers.ops.fmha.common: a call as an object, and the classes of passes that take it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ... import Refused
from . import attn_bias as _biases
from ._base import Blocks
from ._call import Call
from .attn_bias import AttentionBias, LowerTriangularMaskWithTensorBias

__all__ = ["AttentionOp", "AttentionOpBase", "AttentionFwOpBase", "AttentionBwOpBase", "Context", "Gradients", "Inputs"]


@dataclasses.dataclass
class Inputs:
    """The arguments of memory_efficient_attention. is_partial: of a part of the keys, whose output is float32 unless
    output_dtype says otherwise."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: torch.Tensor | AttentionBias | None = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def scale_shift(self):
        """Scales and shifts of the rows of key and of value in fp8; None for others."""
        return None

    @property
    def scale_float(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of query, key and value."""
        return sum(x.untyped_storage().nbytes() for x in (self.query, self.key, self.value))

    def get_output_dtype(self) -> torch.dtype:
        if self.output_dtype is not None:
            return self.output_dtype
        return torch.float32 if self.is_partial and self.query.dtype != torch.float64 else self.query.dtype

    def get_qkv_in_bmghk(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value as [b, s, g, h, d], g = 1 where there are no groups."""
        axes = {5: (...,), 4: (slice(None), slice(None), None), 3: (slice(None), slice(None), None, None)}
        self._check_axes(self.query)
        index = axes[self.query.dim()]
        return self.query[index], self.key[index], self.value[index]

    def normalize_bmhk(self) -> tuple[int, ...]:
        """The shape of the output. Tensors [b, s, d] get an axis of one head, in place, and so does their bias."""
        self._check_axes(self.query)
        last = self.query if self.value.dtype == torch.int32 else self.value
        shape = (*self.query.shape[:-1], last.shape[-1])
        if self.query.dim() == 3:
            self.query, self.key, self.value = (x.unsqueeze(2) for x in (self.query, self.key, self.value))
            if isinstance(self.attn_bias, torch.Tensor):
                self.attn_bias = self.attn_bias.unsqueeze(1)
            elif isinstance(self.attn_bias, LowerTriangularMaskWithTensorBias):
                self.attn_bias = LowerTriangularMaskWithTensorBias(self.attn_bias.bias.unsqueeze(1))
        return shape

    def validate_inputs(self) -> None:
        """ValueError for what no kernel could mean. Key may have fewer heads than query, and a bias broadcasts."""
        q, k, v = self.query, self.key, self.value
        for x in (q, k, v):
            self._check_axes(x)
        bias = self.attn_bias
        of_bias = bias.q_seqinfo.seqstart.device if isinstance(bias, Blocks) else q.device
        quantized = k.dtype == v.dtype == torch.int32
        heads = [x.shape[-2] if x.dim() > 3 else 1 for x in (q, k)]
        shapes = f"query.shape={list(q.shape)}, key.shape={list(k.shape)}, value.shape={list(v.shape)}"
        for holds, text in (
                (q.device == k.device == v.device == of_bias,
                 f"query.device={q.device}, key.device={k.device}, value.device={v.device}, attn_bias of {of_bias}: "
                 "must be one"),
                (quantized or q.dtype == k.dtype == v.dtype,
                 f"query.dtype={q.dtype}, key.dtype={k.dtype}, value.dtype={v.dtype}: must be one"),
                (0 <= self.p <= 1, f"p={self.p}: must be between 0 and 1"),
                (k.shape[:-1] == v.shape[:-1] and q.shape[0] == k.shape[0] and q.shape[2:-2] == k.shape[2:-2]
                 and heads[1] and heads[0] % heads[1] == 0 and (quantized or q.shape[-1] == k.shape[-1]),
                 f"{shapes}: must agree in b, g and d, key and value in s and h too, and h of query be a multiple"),
                (not isinstance(bias, Blocks) or q.shape[0] == 1,
                 f"{shapes}: must have b = 1 with {type(bias).__name__}")):
            if not holds:
                raise ValueError(f"tessera.xformers.Inputs: {text}")

    def _check_axes(self, x):
        if not 3 <= self.query.dim() <= 5 or x.dim() != self.query.dim():
            raise ValueError(f"tessera.xformers.Inputs: query.shape={list(self.query.shape)}, key.shape="
                             f"{list(self.key.shape)}, value.shape={list(self.value.shape)}: must all be [b, s, d], "
                             "[b, s, h, d] or [b, s, g, h, d]")


@dataclasses.dataclass
class Context:
    """What a forward pass keeps for the backward pass: lse [b, h, s], [1, h, tokens] or with groups [b, g, h, s]."""
    lse: torch.Tensor
    out: torch.Tensor
    op_bw: type[AttentionBwOpBase] | None = None
    rng_state: Any = None
    qkv_share_storage: bool = False

    def get_padded_lse(self, pad_to: int, force_pad_inf: bool = False) -> torch.Tensor:
        """lse, filled up with inf to a multiple of pad_to rows, with force_pad_inf from the rows of out on."""
        lse = self.lse[:, :, :self.out.shape[1]] if force_pad_inf else self.lse
        return torch.nn.functional.pad(lse, [0, -lse.shape[2] % pad_to], value=torch.inf)


@dataclasses.dataclass
class Gradients:
    """db is None unless attn_bias is a tensor that requires a gradient."""
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    db: torch.Tensor | None = None


class AttentionOpBase:
    """A pass of one of xformers' kernels, by its name. Whichever is asked, tessera chooses the backend."""
    NAME = ""
    OPERATOR_CATEGORY = "memory_efficient_attention"
    SUPPORTED_DEVICES = frozenset({"cpu", "cuda"})
    SUPPORTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
    SUPPORTED_ATTN_BIAS_TYPES = (type(None), torch.Tensor, *(getattr(_biases, name) for name in _biases.__all__))
    SUPPORTS_DROPOUT = SUPPORTS_CUSTOM_SCALE = SUPPORTS_DIFFERENT_VALUE_EMBED = SUPPORTS_BMGHK = SUPPORTS_PARTIAL = \
        SUPPORTS_OUTPUT_DTYPE = VARLEN_LSE_PACKED = True
    _BACKWARD = False

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def supports(cls, d: Inputs) -> bool:
        return not cls.not_supported_reasons(d)

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        """Why tessera does not run this pass of `d`, a line each; none if it does."""
        try:
            d.validate_inputs()
            found = _call(d, share_heads=not cls._BACKWARD).explain(cls._BACKWARD)
        except (ValueError, Refused) as error:
            return str(error).splitlines()
        if found.backend is None:
            return [f"{name}: {reason}" for name, reasons in found.reasons.items() for reason in reasons]
        return [found.headline] if found.headline.endswith("not in this build") else []


class AttentionFwOpBase(AttentionOpBase):
    """A forward pass."""

    @classmethod
    @torch.no_grad()
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[torch.Tensor, Context | None]:
        """(out, what BwOp.apply wants or None)."""
        call = _call(inp)
        if not needs_gradient:
            return call.shaped(call.run()), None
        state = call.draws()
        out, lse = call.run(return_lse=True)
        out = call.shaped(out)
        return out, Context(lse=call.shaped_rows(lse), out=out, rng_state=state)


class AttentionBwOpBase(AttentionOpBase):
    """A backward pass."""
    SUPPORTS_ATTN_BIAS_GRAD = True
    _BACKWARD = True

    @classmethod
    @torch.no_grad()
    def apply(cls, ctx: Context, inp: Inputs, grad: torch.Tensor) -> Gradients:
        if inp.p and ctx.rng_state is None:
            raise ValueError(f"tessera.xformers.{cls.NAME}: ctx.rng_state=None: must be the forward pass's, with p="
                             f"{inp.p}")
        call = _call(inp, share_heads=False)
        call.draws(ctx.rng_state)
        bias = inp.attn_bias
        of_bias = isinstance(bias, torch.Tensor) and bias.requires_grad
        dq, dk, dv, *db = call.gradients(grad, ctx.out, ctx.lse, of_bias)
        return Gradients(dq.reshape(inp.query.shape), dk.reshape(inp.key.shape), dv.reshape(inp.value.shape),
                         call.shaped_bias(db[0], bias.shape) if of_bias else None)


AttentionOp = tuple  # (forward or None, backward or None)


def _call(inp: Inputs, share_heads: bool = True) -> Call:
    return Call("Inputs", inp.query, inp.key, inp.value, inp.attn_bias, inp.p, inp.scale, inp.get_output_dtype(),
                share_heads, inp.scale_shift)
