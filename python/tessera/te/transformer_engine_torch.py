# SPDX-License-Identifier: Apache-2.0
"""TE's compiled extension, as far as packed sequences on several ranks need it: what a training loop,
or a ring of its own, imports as ``tex``. A rank holds two chunks of equal length of every sequence;
cu_seqlens are of its own tensors, padding included.

    import tessera.te.transformer_engine_torch as tex
    index = tex.thd_get_partitioned_indices(cu_seqlens_padded, t, cp_size, cp_rank)
"""

from __future__ import annotations

import torch

from ..context_parallel import Shards
from ._names import missing
from .pytorch.attention.dot_product_attention.context_parallel import _host

__all__ = ["thd_get_partitioned_indices", "thd_grad_correction", "thd_out_correction",
           "thd_read_half_tensor", "thd_read_second_half_lse", "thd_second_half_lse_correction"]
__getattr__ = missing(__name__)


def thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank):
    """Places of a rank's tokens in the packed whole, int32 [total_tokens / world_size]."""
    shards = Shards.te(_host(cu_seqlens), world_size)
    if sum(shards.lengths) != total_tokens:
        raise ValueError(f"thd_get_partitioned_indices: total_tokens={total_tokens}: must be the end "
                         f"of cu_seqlens, {sum(shards.lengths)}")
    return torch.from_numpy(shards.index(rank)).to(cu_seqlens.device, torch.int32)


def thd_read_half_tensor(tensor, cu_seqlens, half_idx):
    """The first (0) or second (1) chunks of every sequence, of [t, h, d] or of the pair
    [2, t, h, d]."""
    axis = tensor.dim() - 3
    return tensor.index_select(axis, _halves(cu_seqlens)[half_idx])


def thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    """lse of the second chunks: [h, t / 2] packed, else [b, h, second_half_lse_seqlen]."""
    if lse_packed:
        return lse.index_select(1, _halves(cu_seqlens)[1])
    out = lse.new_zeros(*lse.shape[:2], second_half_lse_seqlen)
    for n, (begin, end) in enumerate(_spans(cu_seqlens)):
        half = (end - begin) // 2
        out[n, :, :half] = lse[n, :, half:2 * half]
    return out


def thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed):
    """lse of the second chunks becomes that of the union with a step's, in place."""
    if lse_packed:
        rows = _halves(cu_seqlens)[1]
        lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step.to(lse.dtype))
        return
    for n, (begin, end) in enumerate(_spans(cu_seqlens)):
        half = (end - begin) // 2
        own = lse[n, :, half:2 * half]
        own.copy_(torch.logaddexp(own, lse_per_step[n, :, :half].to(lse.dtype)))


def thd_out_correction(out, out_per_step, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed):
    """Adds a step's share to out [t, h, d], in place: out_per_step exp(lse_per_step - lse)."""
    rows = _halves(cu_seqlens)[1] if only_second_half else \
        torch.arange(out.shape[0], device=out.device)
    lse, step = (x if lse_packed else _packed(x, cu_seqlens, half) for x, half in
                 ((lse, False), (lse_per_step, only_second_half)))
    lse = lse.index_select(1, rows)
    weight = torch.where(step == -torch.inf, 0.0, (step - lse).exp())
    share = out_per_step.float() * weight.T[..., None]
    out[rows] = (out[rows].float() + share).to(out.dtype)


def thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half):
    """Adds ("add"), copies ("copy") or leaves ("none") a step's gradient in the first and second chunks
    of grad [t, h, d] or [2, t, h, d], in place. grad_per_step has the chunks that are used."""
    words = {"first_half": first_half, "second_half": second_half}
    for name, word in words.items():
        if word not in ("add", "copy", "none"):
            raise ValueError(f'thd_grad_correction: {name}={word!r}: must be "add", "copy" or "none"')
    axis = grad.dim() - 3
    halves = _halves(cu_seqlens)
    used = [i for i, word in enumerate((first_half, second_half)) if word != "none"]
    for i in used:
        word = (first_half, second_half)[i]
        step = grad_per_step if len(used) == 1 else grad_per_step.index_select(axis, halves[i])
        if word == "add":
            step = (grad.index_select(axis, halves[i]).float() + step.float()).to(grad.dtype)
        grad.index_copy_(axis, halves[i], step.to(grad.dtype))


# ---- below: how ----

def _spans(cu_seqlens) -> list[tuple[int, int]]:
    ends = _host(cu_seqlens)
    return list(zip(ends, ends[1:]))


def _halves(cu_seqlens):
    """Rows of the first and of the second chunks."""
    parts = [[], []]
    for begin, end in _spans(cu_seqlens):
        middle = (begin + end) // 2
        parts[0].append(torch.arange(begin, middle, device=cu_seqlens.device))
        parts[1].append(torch.arange(middle, end, device=cu_seqlens.device))
    return [torch.cat(part) if part else cu_seqlens.new_zeros(0, dtype=torch.int64)
            for part in parts]


def _packed(lse, cu_seqlens, half: bool):
    """[b, h, s] -> [h, t], of whole sequences or of halves."""
    return torch.cat([lse[n, :, :(end - begin) // (2 if half else 1)]
                      for n, (begin, end) in enumerate(_spans(cu_seqlens))], 1)
