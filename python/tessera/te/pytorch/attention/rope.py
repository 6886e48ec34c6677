# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding under TE's names.

    freqs = RotaryPositionEmbedding(64)(max_seq_len)                  # angles, fp32 [s, 1, 1, 64]
    q = apply_rotary_pos_emb(q, freqs, tensor_format="bshd")

TE's functions take angles; tessera.torch.rotate takes their cosines and sines, which are kept beside
the angles for as long as those live.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ....torch import rotate
from ... import _words
from ..._names import missing

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb",
           "FusedRoPEFunc", "FusedQKVRoPEFunc", "fused_qkv_rope_backward", "fused_qkv_rope_forward",
           "fused_rope_backward", "fused_rope_forward"]
__getattr__ = missing(__name__)

_FORMATS = ("sbhd", "bshd", "thd")


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary position embedding (Su et al., arXiv:2104.09864).

    rotary_percent of the `dim` elements of a head turn. Positions are divided by
    seq_len_interpolation_factor if that and pretrained_max_position_embeddings are given; past
    their product, by as much as the sequence exceeds what was trained (Chen et al.,
    arXiv:2306.15595).
    """

    def __init__(self, dim: int, rotary_percent: float = 1.0,
                 seq_len_interpolation_factor: int | None = None,
                 pretrained_max_position_embeddings: int | None = None,
                 rotary_base: float = 10000.0, interleaved: bool = False):
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryPositionEmbedding: dim={dim}: must be even and at least 2: elements "
                             "turn in pairs")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        device = "cuda" if torch.cuda.is_available() else None
        inv_freq = rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self.register_buffer("inv_freq", inv_freq.to(device, torch.float32))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles, fp32 [max_seq_len, 1, 1, dim], of positions offset, offset + 1, ..."""
        with torch.autocast(self.inv_freq.device.type, enabled=False):
            positions = torch.arange(max_seq_len, dtype=torch.float32,
                                     device=self.inv_freq.device) + offset
            angles = (positions / self._stretch(max_seq_len))[:, None] * self.inv_freq
            both = (angles.repeat_interleave(2, -1) if self.interleaved else
                    torch.cat((angles, angles), -1))
            return both[:, None, None]

    def _stretch(self, max_seq_len: int) -> float:
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is None or trained is None:
            return 1.0
        return max_seq_len / trained if max_seq_len > trained * factor else factor


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, tensor_format: str = "sbhd",
                         start_positions: torch.Tensor | None = None, interleaved: bool = False,
                         fused: bool = False, cu_seqlens: torch.Tensor | None = None,
                         cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
    """t turned by its positions; of t's shape and dtype, differentiable.

    t [s, b, h, d], [b, s, h, d] or [t, h, d] with cu_seqlens int32 [b + 1] (of the whole sequences with
    cp_size > 1); freqs fp32 [s2, 1, 1, d2], s2 > every position, d2 <= d. start_positions int32 [b]:
    the position of each sequence's first token. With cp_size > 1 t holds the chunks cp_rank and
    2·cp_size - 1 - cp_rank of 2·cp_size of each sequence. `fused` says nothing here: one kernel does it
    either way, and turns both elements of a pair by one angle. ValueError for freqs on the CPU that have two, as those
    of RotaryPositionEmbedding with another `interleaved` do.
    """
    thd = _word("apply_rotary_pos_emb", "tensor_format", tensor_format) == "thd"
    if thd and cu_seqlens is None:
        raise ValueError('apply_rotary_pos_emb: cu_seqlens=None: tensor_format="thd" needs int32 [b + 1]')
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"apply_rotary_pos_emb: cp_rank={cp_rank}: must be from 0 to below cp_size={cp_size}")
    if t.dim() != len(tensor_format):
        raise ValueError(f"apply_rotary_pos_emb: t.shape={list(t.shape)}: must have the axes "
                         f"[{', '.join(tensor_format)}]")
    positions = _packed_positions(t, cu_seqlens, start_positions, cp_size, cp_rank) if thd else \
        _positions(t.shape[tensor_format.index("s")], start_positions, cp_size, cp_rank, t.device)
    return rotate(t, *_tables(freqs, interleaved), positions, interleaved=interleaved,
                  layout=tensor_format)


def apply_fused_qkv_rotary_pos_emb(qkv: torch.Tensor, q_freqs: torch.Tensor, k_freqs: torch.Tensor,
                                   qkv_split_arg_list: list[int], tensor_format: str = "sbhd",
                                   start_positions: torch.Tensor | None = None,
                                   interleaved: bool = False, cu_seqlens: torch.Tensor | None = None,
                                   cp_size: int = 1, cp_rank: int = 0
                                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) from one tensor of the projections, q and k turned.

    qkv [s, b, g, w], [b, s, g, w], or [t, g, w] with cu_seqlens int32 [b + 1], for g groups of heads;
    qkv_split_arg_list = [wq, wk, wv], whose sum is w: a group holds wq / wk heads of q, one of k and one of v. Returns
    q [.., g·wq / wk, wk], k [.., g, wk] and v [.., g, wv]. The rest is apply_rotary_pos_emb's.
    """
    name = "apply_fused_qkv_rotary_pos_emb"
    axes = len(_word(name, "tensor_format", tensor_format))
    split = list(qkv_split_arg_list)
    if len(split) != 3 or qkv.dim() != axes or sum(split) != qkv.shape[-1] or split[1] < 1 or \
            split[0] % split[1]:
        raise ValueError(f"{name}: qkv_split_arg_list={split}: must be three widths whose sum is "
                         f"qkv.shape[-1], the first a multiple of the second; qkv.shape={list(qkv.shape)}")
    q, k, v = qkv.split(split, -1)
    q = q.reshape(*q.shape[:-2], -1, split[1])
    options = dict(tensor_format=tensor_format, start_positions=start_positions,
                   interleaved=interleaved, cu_seqlens=cu_seqlens, cp_size=cp_size, cp_rank=cp_rank)
    return (apply_rotary_pos_emb(q, q_freqs, **options),
            apply_rotary_pos_emb(k, k_freqs, **options), v.contiguous())


class FusedRoPEFunc:
    """apply_rotary_pos_emb in the order of TE's autograd function of this name."""

    @staticmethod
    def apply(t, freqs, start_positions=None, tensor_format="sbhd", interleaved=False,
              cu_seqlens=None, cp_size=1, cp_rank=0):
        return apply_rotary_pos_emb(t, freqs, tensor_format, start_positions, interleaved, True,
                                    cu_seqlens, cp_size, cp_rank)


class FusedQKVRoPEFunc:
    """apply_fused_qkv_rotary_pos_emb in the order of TE's autograd function of this name."""

    @staticmethod
    def apply(qkv, q_freqs, k_freqs, qkv_split_arg_list, start_positions=None,
              tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0):
        return apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, qkv_split_arg_list,
                                              tensor_format, start_positions, interleaved, cu_seqlens,
                                              cp_size, cp_rank)


# ---- as tex has them: positional, without autograd, formats by number ----

def fused_rope_forward(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    """apply_rotary_pos_emb of `input`; qkv_format is a QKVFormat."""
    with torch.no_grad():
        return apply_rotary_pos_emb(input, freqs, _format(qkv_format), start_positions, interleaved, True, cu_seqlens,
                                    cp_size, cp_rank)


def fused_rope_backward(output_grads, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    """Gradient of fused_rope_forward's input: output_grads turned back."""
    return fused_rope_forward(output_grads, -freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size,
                              cp_rank)


def fused_qkv_rope_forward(qkv_input, q_freqs, k_freqs, start_positions, qkv_split_arg_list, qkv_format, interleaved,
                           cp_size, cp_rank):
    """(q, k, v) of apply_fused_qkv_rotary_pos_emb; formats without packed sequences."""
    with torch.no_grad():
        return apply_fused_qkv_rotary_pos_emb(qkv_input, q_freqs, k_freqs, qkv_split_arg_list, _format(qkv_format),
                                              start_positions, interleaved, None, cp_size, cp_rank)


def fused_qkv_rope_backward(q_grad_out, k_grad_out, v_grad_out, q_freqs, k_freqs, qkv_split_arg_list, qkv_format,
                            interleaved, cp_size, cp_rank):
    """Gradient of fused_qkv_rope_forward's qkv_input, of a call without start_positions."""
    rest = None, qkv_format, interleaved, None, cp_size, cp_rank
    dq = fused_rope_backward(q_grad_out, q_freqs, *rest)
    dk = fused_rope_backward(k_grad_out, k_freqs, *rest)
    return torch.cat((dq.reshape(*dk.shape[:-1], qkv_split_arg_list[0]), dk, v_grad_out), -1)


# ---- below: how ----

def _format(number) -> str:
    """Its word, which apply_rotary_pos_emb looks at."""
    return _words.FORMATS[number] if 0 <= number < len(_words.FORMATS) else "not_set"


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # freqs -> {interleaved: (version, tables)}


def _tables(freqs: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [s, d/2], of the angles of each pair."""
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1:
        raise ValueError(f"apply_rotary_pos_emb: freqs.shape={list(freqs.shape)}: must be [s, 1, 1, d], as "
                         "RotaryPositionEmbedding returns it")
    if torch.compiler.is_compiling():
        return _turns(freqs, interleaved)
    version = 0 if freqs.is_inference() else freqs._version
    kept = _kept.setdefault(freqs, {})
    if kept.get(interleaved, (None,))[0] != version:
        kept[interleaved] = version, _turns(freqs, interleaved)
    return kept[interleaved][1]


def _turns(freqs, interleaved):
    both = freqs.detach()[:, 0, 0].float()
    if both.shape[1] % 2:
        raise ValueError(f"apply_rotary_pos_emb: freqs.shape={list(freqs.shape)}: must end with an even number: "
                         "elements turn in pairs")
    angles, others = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    if both.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.equal(angles, others):
        raise ValueError(f"apply_rotary_pos_emb: interleaved={interleaved}: freqs turns the elements of a pair by two "
                         f"angles; make it with RotaryPositionEmbedding(.., interleaved={interleaved})")
    return angles.cos().contiguous(), angles.sin().contiguous()


def _positions(s: int, start, cp_size: int, cp_rank: int, device) -> torch.Tensor | None:
    """[1, s] or [b, s]; None is 0, 1, 2, ..."""
    if cp_size == 1:
        return start
    local = torch.arange(s, device=device)
    positions = _in_whole(local, s, cp_size, cp_rank)[None]
    return positions if start is None else positions + start[:, None]


def _in_whole(local, length, cp_size: int, cp_rank: int):
    """Positions of the local rows of sequences of `length` local rows: two chunks, the second
    counted from the end."""
    chunk = length // 2
    return torch.where(local < chunk, local + cp_rank * chunk,
                       local + (2 * cp_size - 2 - cp_rank) * chunk)


def _packed_positions(t, cu_seqlens, start, cp_size: int, cp_rank: int) -> torch.Tensor:
    """[t], without a look at the host. Rows past the last sequence are at 0."""
    cu_seqlens = cu_seqlens // cp_size
    row = torch.arange(t.shape[0], device=t.device)
    n = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    outside = n >= cu_seqlens.shape[0] - 1
    n = n.clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    positions = row - cu_seqlens[n]
    if cp_size > 1:
        positions = _in_whole(positions, cu_seqlens[n + 1] - cu_seqlens[n], cp_size, cp_rank)
    if start is not None:
        positions = positions + start[n]
    return positions.masked_fill(outside, 0)


def _word(operation: str, name: str, value) -> str:
    if value not in _FORMATS:
        raise ValueError(f"{operation}: {name}={value!r}: must be " +
                         " or ".join(f'"{word}"' for word in _FORMATS))
    return value
