# SPDX-License-Identifier: Apache-2.0
"""TE's exchanges between ranks as functions. tessera's own are tessera.torch.context_parallel's, which also
differentiates them. Streams say how, not what: all is done on the current one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ... import _words
from ._cp_parts import (get_bsh_dims, reorder_seq_chunks_for_a2a_after_attn, reorder_seq_chunks_for_a2a_before_attn,
                        thd_cp_rank_order_to_sequence_order, thd_sequence_order_to_cp_rank_order)

_OF_QUERIES = ("q", "out", "dout", "dq")


def flash_attn_p2p_communicate(rank: int, send_tensor, send_dst: int, recv_tensor, recv_src: int, cp_group,
                               batch_p2p_comm: bool):
    """Requests, to be waited for, of a message to one rank and one from another. Even ranks send first."""
    ways = [(dist.isend, send_tensor, send_dst), (dist.irecv, recv_tensor, recv_src)]
    ways = ways[::-1] if rank % 2 else ways
    if batch_p2p_comm:
        return dist.batch_isend_irecv([dist.P2POp(way, x, peer, cp_group) for way, x, peer in ways])
    return [way(x, peer, cp_group) for way, x, peer in ways]


def flash_attn_a2a_communicate(a2a_inputs, chunk_ids_for_a2a, seq_dim: int, cp_size: int, cp_group, cp_stream,
                               before_attn: bool, qkv_format: str = "bshd", cu_seqlens_q_padded=None,
                               cu_seqlens_kv_padded=None, a2a_input_names=None):
    """A tensor, or each of a list. Before attention two chunks of each sequence, with all heads, become whole sequences
    with h / cp_size heads; after it they come back, as [b * s, h, d] in the order of qkv_format."""
    del cp_stream
    inputs = a2a_inputs if isinstance(a2a_inputs, list) else [a2a_inputs]
    names = list(a2a_input_names or ())
    if len(names) != len(inputs):
        raise _words.error("a2a_input_names", a2a_input_names, f'must name {len(inputs)} tensors, such as "q", "dout"')
    padded = [cu_seqlens_q_padded if name in _OF_QUERIES else cu_seqlens_kv_padded for name in names]
    for name, lengths in zip(names, padded):
        if qkv_format == "thd" and lengths is None:
            side = "q" if name in _OF_QUERIES else "kv"
            raise _words.error(f"cu_seqlens_{side}_padded", None, f'must be given for {name!r} and qkv_format="thd"')
    heads = get_bsh_dims(qkv_format)[2]
    sent = []
    for x, lengths in zip(inputs, padded):
        if before_attn:
            x = x.unflatten(heads, (cp_size, -1)).movedim(heads, 0)
        elif qkv_format == "thd":
            x = thd_sequence_order_to_cp_rank_order(x, lengths, cp_size).unflatten(0, (cp_size, -1))
        else:
            x = reorder_seq_chunks_for_a2a_after_attn(x.unflatten(seq_dim, (2 * cp_size, -1)), chunk_ids_for_a2a,
                                                      seq_dim, cp_size)
        sent.append(x.contiguous())
    received = [torch.empty_like(x) for x in sent]
    for request in [dist.all_to_all_single(to, x, group=cp_group, async_op=True) for to, x in zip(received, sent)]:
        request.wait()
    outputs = []
    for x, lengths in zip(received, padded):
        if not before_attn:
            x = _with_all_heads(x, qkv_format)
        elif qkv_format == "thd":
            x = thd_cp_rank_order_to_sequence_order(x.flatten(0, 1), lengths, cp_size)
        else:
            x = reorder_seq_chunks_for_a2a_before_attn(x, chunk_ids_for_a2a, seq_dim, cp_size)
            x = x.flatten(seq_dim, seq_dim + 1)
        outputs.append(x)
    return outputs if len(outputs) > 1 else outputs[0]


def _with_all_heads(x, qkv_format: str):
    """[cp, 2, ..] of the parts' format (packed [cp, ..]) -> [-1, h, d], or [-1, s, d] of bhsd."""
    have = "c" + "2" * (qkv_format != "thd") + qkv_format
    want = qkv_format.replace("h", "ch").replace("s", "2s")
    x = x.permute([have.index(axis) for axis in want])
    return x.reshape(-1, x.shape[-3] * x.shape[-2], x.shape[-1])


def flash_attn_a2a_communicate_softmax_offset(tensor, h_dim: int, cp_size: int, cp_group, cp_stream, before_attn: bool):
    """This rank's heads of a softmax offset, or after attention all ranks' of its gradient; None for None."""
    del cp_stream
    if tensor is None:
        return None
    if before_attn:
        return tensor.chunk(cp_size, h_dim)[dist.get_rank(cp_group)]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(cp_size)]
    dist.all_gather(parts, tensor.contiguous(), group=cp_group)
    return torch.cat(parts, h_dim)
