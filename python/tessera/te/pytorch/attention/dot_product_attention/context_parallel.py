# SPDX-License-Identifier: Apache-2.0
"""TE's context parallelism: its names, its layouts (two equal chunks of every padded sequence on a rank, or one of the
packed batch) and its exchanges, over tessera.torch.context_parallel.

    cp_comm_type   "p2p"   "all_gather"   "a2a"     "a2a+p2p"
    exchange       ring    keys           heads     heads inside, ring across
"""

from __future__ import annotations

import numpy as np
import torch

from .....context_parallel import Shards
from .....torch import context_parallel as cp
from .... import _words as te_words
from ...._names import missing
from ... import _words
from ..._translate import Call
from ...constants import CPLoadBalancingStrategy
from ._cp_exchanges import (flash_attn_a2a_communicate, flash_attn_a2a_communicate_softmax_offset,  # noqa: F401
                            flash_attn_p2p_communicate)
from ._cp_parts import (cp_per_step_configs, flash_attn_fwd_incremental_out_correction,  # noqa: F401 - TE has them here
                        flash_attn_fwd_incremental_second_half_out_correction,
                        flash_attn_fwd_second_half_softmax_lse_correction, flash_attn_fwd_softmax_lse_correction,
                        get_bsh_dims, get_cu_seqlens_on_cp_rank, get_kv_seq_info_after_all_gather,
                        get_no_load_balance_thd_causal_metadata,
                        get_seq_chunk_ids_for_reordering_after_attn, get_seq_chunk_ids_for_reordering_before_attn,
                        get_thd_partitioned_indices, host, reorder_seq_chunks_for_a2a_after_attn,
                        reorder_seq_chunks_for_a2a_before_attn, restore_thd_gathered_kv,
                        thd_cp_rank_order_to_sequence_order, thd_sequence_order_to_cp_rank_order,
                        unrestore_thd_gathered_kv, validate_no_load_balance_thd_metadata)
from ._cp_steps import (cp_p2p_bwd_flash_attn, cp_p2p_bwd_fused_attn, cp_p2p_bwd_prepare_qkv,  # noqa: F401
                        cp_p2p_fwd_flash_attn, cp_p2p_fwd_fused_attn, cp_p2p_fwd_prepare_qkv, get_fa_args)

__all__ = ["attn_forward_func_with_cp", "generate_positional_ids_for_cp",
           "get_batch_on_this_cp_rank", "get_cu_seqlens_on_cp_rank", "pad_thd_sequences_for_cp"]
__getattr__ = missing(__name__)

_EXCHANGES = {"p2p": "ring", "all_gather": "keys", "a2a": "heads", "a2a+p2p": "heads+ring"}


class Spread:
    """A module's cp_group and cp_comm_type, read: `group` for tessera's attention, and `exchange`.
    a2a+p2p with a group of one rank is the other alone."""

    def __init__(self, cp_group, cp_comm_type: str, strategy):
        if cp_comm_type not in _EXCHANGES:
            raise _words.error("cp_comm_type", cp_comm_type,
                               f"must be one of {_words.quoted(_EXCHANGES)}")
        if strategy not in (*CPLoadBalancingStrategy,):
            raise _words.error("load_balancing_strategy", strategy, "must be a CPLoadBalancingStrategy")
        self.shards_of = Shards.te if strategy is CPLoadBalancingStrategy.DUAL_CHUNK_SWAP else Shards.cut
        groups = list(cp_group) if isinstance(cp_group, (list, tuple)) else [cp_group]
        if len(groups) != 1 + (cp_comm_type == "a2a+p2p"):
            raise _words.error("cp_group", f"{len(groups)} groups", 'must be [a2a_group, p2p_group] for '
                               'cp_comm_type="a2a+p2p", and one group for the others')
        sizes = [torch.distributed.get_world_size(group) for group in groups]
        self.size, self.exchange = int(np.prod(sizes)), _EXCHANGES[cp_comm_type]
        self.rank = 0  # ranks of [a2a, p2p] count along a2a first
        for group, size in zip(reversed(groups), reversed(sizes)):
            self.rank = self.rank * size + torch.distributed.get_rank(group)
        self.group = tuple(groups) if len(groups) == 2 else groups[0]
        if len(groups) == 2 and min(sizes) == 1:
            self.exchange = "ring" if sizes[0] == 1 else "heads"
            self.group = groups[sizes[0] == 1]

    @staticmethod
    def of(cp_group, cp_comm_type: str, strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP) -> Spread | None:
        """None for no group, and for one of one rank."""
        if cp_group is None or isinstance(cp_group, (list, tuple)) and not cp_group:
            return None
        spread = Spread(cp_group, cp_comm_type, strategy)
        return spread if spread.size > 1 else None

    def attention(self, call: Call, dropout: float = 0.0):
        """out [.., h, dv], or (out, max_logit), of this rank's rows; a Call of this rank's tensors
        and the whole batch's lengths."""
        given = self._keywords(call)
        if dropout:
            given["dropout_p"] = dropout  # the state is rank 0's
        return cp.attention(call.q, call.k, call.v, group=self.group, exchange=self.exchange, **given)

    def _keywords(self, call: Call) -> dict:
        if call.masked:
            raise _words.error("attention_mask", "padding", "under context parallelism lengths say what "
                               "is padding; give cu_seqlens_q and cu_seqlens_kv of the whole batch")
        bias, kind, mask = call.bias, call.bias_type, call.attention_mask
        if kind not in ("no_bias", "alibi"):
            call.bias, call.bias_type = None, "no_bias"  # its rows are this rank's, its keys all
        call._check_tensors()
        given = {"layout": (call.q_format, call.kv_format), "softmax_scale": call.softmax_scale, **call.band(),
                 "deterministic": call.deterministic, "return_max_logit": call.return_max_logit,
                 "shards": self._shards("q", call), "shards_k": self._shards("kv", call)}
        call.cap(given)
        call._scores(given)
        if bias is not None and call.bias is None:
            given |= te_words.bias(kind, bias)
        if call.mask == "arbitrary":
            call._boolean(mask)
            given["drop"] = mask
        return given | call.sink()

    def _shards(self, side: str, call: Call) -> Shards:
        x, layout = (call.q, call.q_format) if side == "q" else (call.k, call.kv_format)
        lengths = getattr(call, f"cu_seqlens_{side}")
        if layout == "thd":
            lengths = host(_words.cu_seqlens(f"cu_seqlens_{side}", lengths, 'qkv_format="thd"'))
            stored = getattr(call, f"cu_seqlens_{side}_padded")
            stored = lengths if stored is None else host(stored)
            return self.shards_of(stored, self.size, lengths)
        if self.shards_of is Shards.cut:
            raise _words.error("load_balancing_strategy", "NO_LOAD_BALANCE", f"must be DUAL_CHUNK_SWAP for "
                               f'qkv_format="{layout}"; "thd" packs sequences')
        name = {"q": "query_layer", "kv": "key_layer"}[side]
        at, b = layout.index("s"), x.shape[layout.index("b")]
        if x.shape[at] % 2:
            raise _words.error(f"{name}.shape[{at}]", x.shape[at], "an odd number of rows cannot be two "
                               "chunks of equal length; pad the sequence to a multiple of "
                               f"2 * cp_size = {2 * self.size}, or use tessera.torch.context_parallel, "
                               "whose Shards need no padding")
        whole = x.shape[at] * self.size
        stored = np.arange(b + 1) * whole
        padded = "padding" in call.mask and lengths is not None
        return Shards.te(stored, self.size, host(lengths) if padded else None)


def attn_forward_func_with_cp(
        is_training, q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, dropout_p, cp_group, cp_global_ranks, cp_stream,
        cp_comm_type, softmax_scale=None, qkv_format="bshd", attn_mask_type="causal",
        attn_bias_type="no_bias", attn_bias=None, deterministic=False, use_fused_attention=False,
        window_size=None, softcap=0.0, fp8=False, fp8_meta=None, quantizers=None, pad_between_seqs=False,
        use_flash_attn_3=False, use_flash_attn_4=False, softmax_type="vanilla", softmax_offset=None,
        fp8_output=False, layer_number=1, return_max_logit=False,
        load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP, bottom_right_diagonal=None):
    """Attention of this rank's q, k and v, of a sequence on the ranks of cp_group: out [.., h, dv], and
    max_logit [h] where asked for. Lengths are the whole batch's. Streams, ranks and the choice of a
    kernel say how, not what."""
    del max_seqlen_q, max_seqlen_kv, cp_global_ranks, cp_stream, use_fused_attention, fp8_meta, \
        quantizers, pad_between_seqs, use_flash_attn_3, use_flash_attn_4, layer_number
    for name, value in (("fp8", fp8), ("fp8_output", fp8_output)):
        if value:
            raise _words.later(name, str(value), "FP8 attention over several ranks",
                               "pass 16-bit tensors")
    mask = _words.mask_type(attn_mask_type)
    call = Call(q, k, v, qkv_format, qkv_format, mask, _words.check_set_window_size(mask, window_size),
                _words.bottom_right(mask, bottom_right_diagonal), None, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, None, None, None, None,
                _words.bias_type(attn_bias_type), attn_bias, None, softmax_scale,
                _words.softmax_type(softmax_type), softmax_offset, deterministic, return_max_logit,
                _words.softcap(softcap))
    spread = Spread.of(cp_group, cp_comm_type, load_balancing_strategy)
    if spread is None:
        raise _words.error("cp_group", "one rank", "must have at least two; call DotProductAttention")
    return spread.attention(call, dropout_p if is_training else 0.0)


# ---- data of a rank ----

def pad_thd_sequences_for_cp(input_ids, labels, cu_seqlens, divisibility_factor, padding_token_id=0,
                             padding_label_id=-100):
    """(input_ids, labels, cu_seqlens_padded): each sequence of the packed batch [t] or [1, t] padded
    to a multiple of divisibility_factor, 2 * cp_size for context parallelism."""
    lengths = np.diff(host(cu_seqlens))
    padded = -(-lengths // divisibility_factor) * divisibility_factor
    begins, stored = np.cumsum([0, *lengths]), np.cumsum([0, *padded])
    source = _ranges(begins[:-1], lengths)
    target = _ranges(stored[:-1], lengths)
    results = []
    for x, fill in ((input_ids, padding_token_id), (labels, padding_label_id)):
        flat = x.reshape(-1)
        out = flat.new_full((int(stored[-1]),), fill)
        out[torch.from_numpy(target).to(x.device)] = flat[torch.from_numpy(source).to(x.device)]
        results.append(out)
    return *results, torch.from_numpy(stored).to(cu_seqlens)


def generate_positional_ids_for_cp(cu_seqlens, divisibility_factor, dtype=torch.long):
    """Positions 0, 1, ... of each sequence padded to a multiple of divisibility_factor, packed."""
    lengths = np.diff(host(cu_seqlens))
    padded = -(-lengths // divisibility_factor) * divisibility_factor
    return torch.from_numpy(_ranges(np.zeros_like(padded), padded)).to(cu_seqlens.device, dtype)


def get_batch_on_this_cp_rank(cu_seqlens_padded, input_ids_padded, labels_padded,
                              position_ids_padded, cp_group=None, qvk_format="thd",
                              load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP, cp_rank=None):
    """(input_ids, labels, position_ids) of this rank: its two chunks of each sequence, or one of the whole, along the
    axis that is as long as cu_seqlens_padded says, the second or the first. cp_rank replaces the group's."""
    if qvk_format != "thd":
        raise _words.error("qvk_format", qvk_format, 'must be "thd"; of padded batches take chunks '
                           "along the sequence axis with tessera.torch.context_parallel.shard")
    size = torch.distributed.get_world_size(cp_group)
    rank = torch.distributed.get_rank(cp_group) if cp_rank is None else cp_rank
    if size == 1:
        return input_ids_padded, labels_padded, position_ids_padded
    stored = host(cu_seqlens_padded)
    index = get_thd_partitioned_indices(cu_seqlens_padded, stored[-1], size, rank, "cpu", load_balancing_strategy)
    return tuple(None if x is None else x.index_select(_axis_of(name, x, stored[-1]), index.to(x.device))
                 for name, x in (("input_ids_padded", input_ids_padded), ("labels_padded", labels_padded),
                                 ("position_ids_padded", position_ids_padded)))


# ---- below: how ----

def _axis_of(name: str, x: torch.Tensor, tokens: int) -> int:
    """The axis of the sequences, [t, ..] or [1, t, ..]."""
    for axis in (1, 0):
        if axis < x.dim() and x.shape[axis] == tokens:
            return axis
    raise _words.error(f"{name}.shape", list(x.shape), "the first or the second axis must be "
                       f"cu_seqlens_padded[-1] = {tokens} long; pad_thd_sequences_for_cp pads so")


def _ranges(starts, lengths) -> np.ndarray:
    """start, start + 1, ... of each length, one after another."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths)] +
                          [np.zeros(0, np.int64)]).astype(np.int64)
