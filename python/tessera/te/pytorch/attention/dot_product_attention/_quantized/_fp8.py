# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention in FP8: which tensors are rounded, by whose scale, and what is remembered.

    DelayedScaling         q, k, v by the one scale of slot QKV, do by that of slot dO; products by
                           tessera.torch.attention of fp8 tensors and their scales
    Float8CurrentScaling   fp8_dpa: precision="fp8", finer than a scale a tensor; fp8_mha: a scale a tensor

Kernels write o in 16 bits: with fp8_mha it is rounded after them to a Float8Tensor, and the backward pass
takes the 16-bit o for delta either way. Gradients are 16-bit, but for containers: where q, k and v came as
Float8Tensors, so do their gradients.
P is stored as 256 exp(x - m) by every kernel, so that slot S notes the amax 1 and its scale is not read;
dP is not stored, so that slot dP stays as it is.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch.autograd.function import once_differentiable

from ......torch import attention as core_attention
from ......torch import attention_backward as core_backward
from ....._logging import fused_logger, switch
from ....cpp_extensions._tables import META_DO, META_DQKV, META_O, META_QKV, META_S
from ....quantization import FP8GlobalStateManager
from ....tensor.float8_tensor import Float8Quantizer, Float8Tensor, largest, torch_dtype
from ....tensor.quantized_tensor import QuantizedTensor

# What may have a gradient beside q, k and v, and its name in attention_backward.
_LEARNT = {"bias": "dbias", "sink": "dsink", "alibi_slopes": "dalibi_slopes"}
_GRADIENTS = ("dq", "dk", "dv", *_LEARNT.values())
_SCALES = ("q_scale", "k_scale", "v_scale")


@dataclasses.dataclass
class _How:
    """What one call does: the quantizers of its tensors, and the keywords of tessera.torch.attention but for
    what may have a gradient."""
    qkv: object
    o: object
    s: object
    dqkv: object
    do: object
    keywords: dict
    fp8_output: bool
    wide_backward: bool  # 16-bit products
    trains: bool


def attention(module, q, k, v, keywords: dict, fp8_output: bool, wide_backward: bool):
    """o [.., h, dv], or (o, max_logit), by the recipe of `module` (Float8Module); `keywords` are those of
    tessera.torch.attention, q, k, v 16-bit tensors or Float8Tensors."""
    used = module.fp8_meta["local_recipes"]
    containers = any(isinstance(x, QuantizedTensor) for x in (q, k, v))
    if fused_logger.isEnabledFor(logging.DEBUG):
        fused_logger.debug("Running forward in FP8")
    if len(used) == 2 and not (fp8_output or wide_backward or containers):
        result = core_attention(q, k, v, precision="fp8", **keywords)
        _announce_backward(result[0] if isinstance(result, tuple) else result)
        return result
    forward, backward = module.forward_quantizers(), module.quantizers["scaling_bwd"]
    learnt = {name: keywords[name] for name in _LEARNT if isinstance(keywords.get(name), torch.Tensor)}
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *learnt.values()))
    how = _How(forward[META_QKV], forward[META_O], forward[META_S], backward[META_DQKV], backward[META_DO],
               {name: x for name, x in keywords.items() if name not in learnt}, fp8_output, wide_backward,
               trains)
    o, max_logit = _Rounded.apply(how, q, k, v, *(learnt.get(name) for name in _LEARNT))
    return (o, max_logit) if keywords.get("return_max_logit") else o


def wants_wide_backward(bf16_backward: bool) -> bool:
    return bool(bf16_backward) or not switch("NVTE_FP8_DPA_BWD", 1)


class _Rounded(torch.autograd.Function):
    """(how, q, k, v, bias, sink, slopes) -> (o, max_logit), of q, k and v rounded with one scale each."""

    @staticmethod
    def forward(ctx, how, q, k, v, *learnt):
        inputs = _containers(how.qkv, (q, k, v))
        dtype = inputs[0].dtype
        given = {name: x for name, x in zip(_LEARNT, learnt) if x is not None}
        stored, scales = [x.stored for x in inputs], [x._scale_inv.reshape(()) for x in inputs]
        # Fast kernels write o in 16 bits, and are faster without lse.
        notes = how.fp8_output or isinstance(how.o, Float8Quantizer)
        results = core_attention(*stored, **dict(zip(_SCALES, scales)), **how.keywords, **given, out_dtype=dtype,
                                 return_lse=how.trains, return_amax=notes)
        o, *max_logit = results if isinstance(results, tuple) else (results,)
        lse = max_logit.pop(0) if how.trains else None
        amax = max_logit.pop() if notes else None
        how.s.amax.fill_(1)
        result = o
        if how.fp8_output:
            result, = how.o.quantize_together([o], amax=amax)
        elif notes:
            how.o.note(amax)
        if how.trains:
            ctx.how, ctx.dtype = how, dtype
            ctx.contained = [isinstance(x, QuantizedTensor) for x in (q, k, v)]
            ctx.save_for_backward(o, lse, *stored, *scales, *learnt)
        ctx.set_materialize_grads(False)
        if not max_logit:
            return result, None
        ctx.mark_non_differentiable(*max_logit)
        return result, *max_logit

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        how, needed = ctx.how, ctx.needs_input_grad[1:]
        names = [name for name, is_needed in zip(_GRADIENTS, needed) if is_needed]
        if do is None or not names:
            return (None,) * 7
        o, lse, *saved = ctx.saved_tensors
        stored, scales, learnt = saved[:3], saved[3:6], saved[6:]
        given = {name: x for name, x in how.keywords.items() if name != "return_max_logit"}
        given.update((name, x) for name, x in zip(_LEARNT, learnt) if x is not None)
        if fused_logger.isEnabledFor(logging.DEBUG):
            fused_logger.debug("Running backward in %s", ctx.dtype if how.wide_backward else "FP8")
        if how.wide_backward:
            # S is that of the forward pass: q and k are what it saw.
            do = do.dequantize() if isinstance(do, QuantizedTensor) else do
            qkv = [(x.float() * scale).to(ctx.dtype) for x, scale in zip(stored, scales)]
            g = core_backward(do, *qkv, o, lse, grads=tuple(names), **given)
            contained = False
        else:
            do, = _containers(how.do, (do,))
            contained = all(ctx.contained) and isinstance(how.dqkv, Float8Quantizer)
            if contained:
                scale_inv = 1 / how.dqkv.scale
                given["grad_dtype"] = torch_dtype(how.dqkv.dtype)
                given |= dict.fromkeys(("dq_scale", "dk_scale", "dv_scale"), scale_inv.reshape(()))
            g = core_backward(do.stored, *stored, o, lse, grads=tuple(names), return_amax=True,
                              do_scale=do._scale_inv.reshape(()), **dict(zip(_SCALES, scales)), **given)
        grads = {name: getattr(g, name) for name in names}
        seen = [name for name in _GRADIENTS[:3] if name in grads]
        if isinstance(how.dqkv, Float8Quantizer) and seen:
            amaxes = [largest([grads[name]]) if how.wide_backward else
                      getattr(g, f"amax_{name}").reshape(1) for name in seen]
            how.dqkv.note(torch.cat(amaxes).amax())
        for name, was_contained in zip(_GRADIENTS, ctx.contained):
            if name in grads and contained:
                grads[name] = how.dqkv.wrap(grads[name], scale_inv.clone(), ctx.dtype)
            elif name in grads and was_contained:
                grads[name], = how.dqkv.quantize_together([grads[name]])
        FP8GlobalStateManager.update_after_backward()
        return None, *map(grads.get, _GRADIENTS)


def _containers(quantizer, tensors) -> list[Float8Tensor]:
    """Each as a Float8Tensor; those that are none yet share a scale that was decided before, or have their
    own."""
    plain = [x.detach() for x in tensors if not isinstance(x, QuantizedTensor)]
    if isinstance(quantizer, Float8Quantizer):
        made = iter(quantizer.quantize_together(plain) if plain else ())
    else:
        made = iter([quantizer.quantize_together([x])[0] for x in plain])
    return [x.detach() if isinstance(x, QuantizedTensor) else next(made) for x in tensors]


def _announce_backward(out):
    if out.requires_grad and fused_logger.isEnabledFor(logging.DEBUG):
        out.register_hook(lambda _: fused_logger.debug("Running backward in FP8"))
