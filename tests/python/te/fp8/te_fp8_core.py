# SPDX-License-Identifier: Apache-2.0
"""What tests of FP8 attention share: a module, problems, and a core that stands in for kernels."""

import types

import pytest
import torch

import tessera.te.pytorch as te
import tessera.torch
from tessera.te.pytorch.constants import TE_DType
from tessera.te.pytorch.quantization import FP8GlobalStateManager, autocast

E4M3, E5M2 = TE_DType[torch.float8_e4m3fn], TE_DType[torch.float8_e5m2]
QKV, O, P, DQKV, DO, DP = 2, 3, 8, 0, 3, 5  # slots


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("NVTE_DPA_FP8_RECIPE", "NVTE_UnfusedDPA_Emulate_FP8", "NVTE_FP8_DPA_BWD", "NVTE_FUSED_ATTN",
                 "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    FP8GlobalStateManager.reset()
    te.attention._attention_backends["backend_selection_requires_update"] = True
    yield
    FP8GlobalStateManager.reset()


def module(**more):
    return te.DotProductAttention(4, 16, qkv_format="bshd", **more)


def problem(seed=0, s=48, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, s, 4, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)] + \
        [torch.randn(2, s, 64, generator=generator).to(dtype)]


def step(m, recipe, inputs, enabled=True, **more):
    """(out, dq, dk, dv)."""
    *qkv, do = inputs
    with autocast(enabled=enabled, recipe=recipe):
        out = m(*qkv, **more)
    return out, *torch.autograd.grad(out, qkv, do)


def error(got, expected):
    got, expected = (x.dequantize().float() if isinstance(x, te.Float8Tensor) else x.float()
                     for x in (got, expected))
    return ((got - expected).norm() / expected.norm()).item()


def contained(inputs, dtype=E4M3):
    """q, k, v as containers that ask for gradients, and do."""
    quantizer = te.Float8CurrentScalingQuantizer(dtype, "cpu")
    return [quantizer(x.detach()).requires_grad_() for x in inputs[:3]] + inputs[3:]


def largest(*tensors):
    return max(x.abs().max().item() for x in tensors)


class Core:
    """tessera.torch's attention of fp8 tensors, by its fp32 kernels at the values that are stored. What the
    module asks for is kept in `calls`, whether for lse and amax in `asked`."""

    def __init__(self):
        self.calls, self.asked = [], []

    @staticmethod
    def value(x, scale):
        assert (x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)) == (scale is not None)
        return x.float() if scale is None else x.float() * scale

    @staticmethod
    def stored(x, dtype, scale):
        limit = torch.finfo(dtype).max
        return x.to(dtype) if scale is None else (x / scale).clamp(-limit, limit).to(dtype)

    @staticmethod
    def wide(more):
        return {name: x.float() if name == "bias" else x for name, x in more.items()}

    def attention(self, q, k, v, *, q_scale=None, k_scale=None, v_scale=None, out_dtype=None, o_scale=None,
                  precision=None, return_amax=False, **more):
        self.calls.append(("forward", q.dtype, out_dtype, precision))
        if precision is not None:
            return tessera.torch.attention(q, k, v, **more)
        more = self.wide(more)
        self.asked.append((more["return_lse"], return_amax))
        assert o_scale is None  # which the fast kernels do not have
        results = tessera.torch.attention(self.value(q, q_scale), self.value(k, k_scale), self.value(v, v_scale),
                                          **more)
        o, *rest = results if isinstance(results, tuple) else (results,)
        rest += [o.abs().max().reshape(1)] * return_amax
        return (self.stored(o, out_dtype, None), *rest) if rest else self.stored(o, out_dtype, None)

    def attention_backward(self, do, q, k, v, o, lse, *, grads, q_scale=None, k_scale=None, v_scale=None,
                           do_scale=None, grad_dtype=None, dq_scale=None, dk_scale=None, dv_scale=None,
                           return_amax=False, **more):
        self.calls.append(("backward", do.dtype, q.dtype, grad_dtype))
        wide = tessera.torch.attention_backward(
            self.value(do, do_scale), self.value(q, q_scale), self.value(k, k_scale), self.value(v, v_scale),
            o.float(), lse, grads=grads, **self.wide(more))
        dbias = wide.dbias if wide.dbias is None else wide.dbias.to(more["bias"].dtype)
        g = types.SimpleNamespace(dbias=dbias, dsink=wide.dsink, dalibi_slopes=wide.dalibi_slopes)
        for name, scale in (("dq", dq_scale), ("dk", dk_scale), ("dv", dv_scale)):
            if name in grads:
                x = getattr(wide, name)
                setattr(g, f"amax_{name}", x.abs().max().reshape(1) if return_amax else None)
                setattr(g, name, self.stored(x, grad_dtype or o.dtype, scale))
        return g
