# SPDX-License-Identifier: Apache-2.0
"""Pieces of TE's rings that loops of their own call: merging parts, orders of chunks, metadata. Plain PyTorch."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .....context_parallel import Shards
from ... import _words
from ...constants import CPLoadBalancingStrategy


_read = WeakTensorKeyDictionary()  # lengths -> (version, on the host): read once a batch


def host(lengths) -> list[int]:
    """Lengths as host integers; those on a GPU are waited for once."""
    if not isinstance(lengths, torch.Tensor):
        return [int(x) for x in lengths]
    known = _read.get(lengths)
    if known is None or known[0] != lengths._version:
        known = _read[lengths] = lengths._version, lengths.tolist()
    return known[1]


# ---- merging parts ----

def flash_attn_fwd_softmax_lse_correction(softmax_lse, softmax_lse_per_step):
    """softmax_lse becomes that of the union with a step's, in place."""
    softmax_lse.copy_(torch.logaddexp(softmax_lse, softmax_lse_per_step))


def flash_attn_fwd_second_half_softmax_lse_correction(softmax_lse, softmax_lse_per_step):
    """As above, of the second chunks of softmax_lse [b, h, 2, s / 2]."""
    flash_attn_fwd_softmax_lse_correction(softmax_lse[..., 1, :], softmax_lse_per_step)


def flash_attn_fwd_incremental_out_correction(out, out_per_step, old_softmax_lse, new_softmax_lse,
                                              softmax_lse_per_step, seq_dim: int):
    """out exp(old - new) + out_per_step exp(step - new), in place; lses [b, h, s], out with s at seq_dim. What saw
    no key has no share."""
    kept, added = (torch.where(x == -torch.inf, 0.0, (x - new_softmax_lse).exp()).movedim(2, seq_dim).unsqueeze(-1)
                   for x in (old_softmax_lse, softmax_lse_per_step))
    out.copy_(out * kept + out_per_step * added)


def flash_attn_fwd_incremental_second_half_out_correction(out, out_per_step, old_softmax_lse, new_softmax_lse,
                                                          softmax_lse_per_step, seq_dim: int):
    """As above, of the second chunks of out, which has [2, s / 2] at seq_dim, and of lses [b, h, s]."""
    old, new = (x.unflatten(-1, (2, -1))[..., 1, :] for x in (old_softmax_lse, new_softmax_lse))
    flash_attn_fwd_incremental_out_correction(out.select(seq_dim, 1), out_per_step, old, new, softmax_lse_per_step,
                                              seq_dim)


# ---- orders of chunks ----

def get_seq_chunk_ids_for_reordering_before_attn(cp_size: int, device):
    """int32 [2 cp_size]: where each chunk of a sequence lies when ranks follow one another."""
    ranks = torch.arange(cp_size, dtype=torch.int32, device=device)
    return torch.cat((2 * ranks, (2 * ranks + 1).flip(0)))


def get_seq_chunk_ids_for_reordering_after_attn(cp_size: int, device):
    """int32 [2 cp_size]: the chunks of a sequence in the order of the ranks."""
    ranks = torch.arange(cp_size, dtype=torch.int32, device=device)
    return torch.stack((ranks, 2 * cp_size - 1 - ranks), 1).flatten()


def reorder_seq_chunks_for_a2a_before_attn(x, chunk_ids_for_a2a, seq_dim: int, cp_size: int):
    """[cp, .., s, ..] -> [.., 2 cp, s / 2, ..] with 2 cp at seq_dim."""
    x = x.movedim(0, seq_dim)
    x = x.flatten(seq_dim, seq_dim + 1).unflatten(seq_dim, (2 * cp_size, -1))
    return x.index_select(seq_dim, chunk_ids_for_a2a)


def reorder_seq_chunks_for_a2a_after_attn(x, chunk_ids_for_a2a, seq_dim: int, cp_size: int):
    """[.., 2 cp, s / 2, ..] with 2 cp at seq_dim -> [cp, 2, .., s / 2, ..]."""
    return x.movedim(seq_dim, 0).index_select(0, chunk_ids_for_a2a).unflatten(0, (cp_size, 2))


def thd_sequence_order_to_cp_rank_order(x, cu_seqlens, cp_size: int, seq_dim: int = 0):
    """Packed sequences, whole one after another -> the two chunks of each that rank 0 holds, then rank 1's, ..."""
    return x.index_select(seq_dim, _rank_order(cu_seqlens, cp_size, x.device))


def thd_cp_rank_order_to_sequence_order(x, cu_seqlens, cp_size: int, seq_dim: int = 0):
    """thd_sequence_order_to_cp_rank_order undone."""
    return x.index_select(seq_dim, _rank_order(cu_seqlens, cp_size, x.device).argsort())


def restore_thd_gathered_kv(x, cu_seqlens_padded, cp_size: int, load_balancing_strategy):
    """Ranks' packed rows, one rank after another -> whole sequences."""
    if load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE:
        return x
    return thd_cp_rank_order_to_sequence_order(x, cu_seqlens_padded, cp_size)


def unrestore_thd_gathered_kv(x, cu_seqlens_padded, cp_size: int, load_balancing_strategy):
    """restore_thd_gathered_kv undone."""
    if load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE:
        return x
    return thd_sequence_order_to_cp_rank_order(x, cu_seqlens_padded, cp_size)


def halves(cu_seqlens) -> list[torch.Tensor]:
    """Rows of the first and of the second chunks of packed sequences."""
    ends = host(cu_seqlens)
    parts = [[], []]
    for begin, end in zip(ends, ends[1:]):
        middle = (begin + end) // 2
        parts[0].append(torch.arange(begin, middle, device=cu_seqlens.device))
        parts[1].append(torch.arange(middle, end, device=cu_seqlens.device))
    return [torch.cat(part) if part else cu_seqlens.new_zeros(0, dtype=torch.int64) for part in parts]


def _rank_order(cu_seqlens, cp_size: int, device):
    shards = Shards.te(host(cu_seqlens), cp_size)
    return torch.cat([torch.from_numpy(shards.index(rank)) for rank in range(cp_size)]).to(device)


# ---- metadata ----

def get_cu_seqlens_on_cp_rank(cu_seqlens, cu_seqlens_padded_on_cp_rank, cp_size, cp_rank, first_half,
                              second_half):
    """Cumulative true lengths of this rank's first chunks, second chunks or both, [batch + 1]."""
    lengths = cu_seqlens.diff()
    chunk = cu_seqlens_padded_on_cp_rank.diff() // 2
    held = torch.zeros_like(lengths)
    for wanted, number in ((first_half, cp_rank), (second_half, 2 * cp_size - 1 - cp_rank)):
        if wanted:
            held += (lengths - number * chunk).clamp(torch.zeros_like(chunk), chunk)
    return torch.cat([cu_seqlens.new_zeros(1), held.cumsum(0, dtype=cu_seqlens.dtype)])


def get_bsh_dims(tensor_format: str) -> tuple[int, int, int]:
    """Axes of b, s and h; of packed tensors t is both b and s."""
    batch, sequence = ("t", "t") if tensor_format == "thd" else ("b", "s")
    return tensor_format.index(batch), tensor_format.index(sequence), tensor_format.index("h")


def get_thd_partitioned_indices(cu_seqlens_padded, total_tokens: int, cp_size: int, cp_rank: int, device=None,
                                load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP):
    """Places of a rank's tokens in the packed whole, int32 [total_tokens / cp_size]: its two chunks of every
    sequence, or one chunk of the whole."""
    device = cu_seqlens_padded.device if device is None else device
    if load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE:
        validate_no_load_balance_thd_metadata(cu_seqlens_padded, cu_seqlens_padded, total_tokens, cp_size)
        own = total_tokens // cp_size
        return torch.arange(cp_rank * own, (cp_rank + 1) * own, dtype=torch.int32, device=device)
    shards = Shards.te(host(cu_seqlens_padded), cp_size)
    return torch.from_numpy(shards.index(cp_rank)).to(device, torch.int32)


def validate_no_load_balance_thd_metadata(cu_seqlens, cu_seqlens_padded, total_tokens: int, cp_size: int):
    """ValueError where lengths do not ascend from 0, are longer than their places, or do not end at total_tokens,
    a multiple of cp_size. Waits for lengths on a GPU."""
    true, stored = host(cu_seqlens), host(cu_seqlens_padded)
    fits = len(true) == len(stored) and true[0] == stored[0] == 0 and stored[-1] == total_tokens and \
        total_tokens % cp_size == 0 and all(
            0 <= b - a <= d - c for a, b, c, d in zip(true, true[1:], stored, stored[1:]))
    if not fits:
        raise _words.error("cu_seqlens_padded", stored, f"must ascend from 0 to total_tokens={total_tokens}, a "
                           f"multiple of cp_size={cp_size}, with room for cu_seqlens={true}")


def get_no_load_balance_thd_causal_metadata(cu_seqlens, cu_seqlens_padded, total_tokens: int, cp_size: int,
                                            cp_rank: int):
    """([cu_seqlens_q], [cu_seqlens_q_padded], [cu_seqlens_kv]) of the one step of a rank that holds one chunk of the
    whole: its part of every sequence, and the keys that a causal mask shows to it."""
    own = total_tokens // cp_size
    begin, end = cp_rank * own, (cp_rank + 1) * own
    lengths, starts = cu_seqlens.diff(), cu_seqlens_padded[:-1]
    held = (starts + lengths).clamp(begin, end) - starts.clamp(begin, end)
    seen = torch.minimum((end - starts).clamp(min=0), lengths)
    q, kv = (torch.nn.functional.pad(x.cumsum(0, dtype=cu_seqlens.dtype), (1, 0)) for x in (held, seen))
    return [q], [cu_seqlens_padded.clamp(begin, end) - begin], [kv]


def get_kv_seq_info_after_all_gather(local_chunk_id: int, cp_size: int, max_seqlen_q: int, max_seqlen_kv: int,
                                     window_size, causal: bool):
    """((first, end), window): the gathered keys that a chunk of max_seqlen_q queries sees, and its window beside them,
    whose diagonal ends in the last corner. max_seqlen_kv is of one of the 2 cp_size chunks."""
    left, right = window_size or (-1, 0 if causal else -1)
    here, last = (local_chunk_id + 1) * max_seqlen_kv, 2 * cp_size * max_seqlen_kv
    end = last if right == -1 else min(last, here + right)
    first = 0 if left == -1 else max(0, here - max_seqlen_q - left)
    return (first, end), (-1 if left == -1 else left + end - here, -1 if right == -1 else here + right - end)


def cp_per_step_configs(cp_comm_type: str, cp_size: int, cp_size_a2a: int, *, max_seqlen_q: int, max_seqlen_kv: int,
                        num_tokens_q: int, num_tokens_kv: int, num_heads: int, num_gqa_groups: int,
                        attn_mask_type: str, window_size, bottom_right_diagonal: bool) -> list[dict]:
    """The attention problems of TE's steps, as FusedAttentionParams names sizes. tessera's exchanges have steps of
    their own; whether they can run is what get_attention_backend answers."""
    def config(mask, sq, sk, split, corner, tokens, window=window_size):
        return {"attn_mask_type": mask, "max_seqlen_q": sq, "max_seqlen_kv": sk, "num_tokens_q": tokens[0],
                "num_tokens_kv": tokens[1], "num_attn_heads": num_heads // split,
                "num_gqa_groups": num_gqa_groups // split, "window_size_left": window[0],
                "window_size_right": window[1], "bottom_right_diagonal": corner}
    tokens = num_tokens_q, num_tokens_kv
    whole = max_seqlen_q, max_seqlen_kv
    causal = "causal" in attn_mask_type
    if cp_comm_type == "a2a":
        return [config(attn_mask_type, *whole, cp_size, bottom_right_diagonal, [n * cp_size for n in tokens])]
    if cp_comm_type == "all_gather":
        mask, corner = attn_mask_type, bottom_right_diagonal
        if causal and "bottom_right" not in mask:
            mask, corner = f"{mask}_bottom_right", True
        return [config(mask, max_seqlen_q // (2 * cp_size), sk, 1, corner, (tokens[0], tokens[1] * cp_size))
                for sk in dict.fromkeys((max_seqlen_kv // (2 * cp_size), max_seqlen_kv))]
    sq, sk = (s // (cp_size // cp_size_a2a) for s in whole)
    steps = [config(attn_mask_type, sq, sk, cp_size_a2a, bottom_right_diagonal, tokens)]
    if causal:
        mask, all_keys = "padding" if "padding" in attn_mask_type else "no_mask", (-1, -1)
        steps += [config(mask, sq, sk // 2, cp_size_a2a, bottom_right_diagonal, (tokens[0], tokens[1] // 2), all_keys),
                  config(mask, sq // 2, sk, cp_size_a2a, bottom_right_diagonal, (tokens[0] // 2, tokens[1]), all_keys)]
    return steps
