# SPDX-License-Identifier: Apache-2.0
"""A mask and a window for each sequence of one packed batch: TE's thd_attention_policies.

    [{"sequence_ids": ids, "mask_type": "padding_causal", "window_size": (128, 0)}, ...]

By tessera's kernels all of them are one call, whose sequences have windows and diagonals of their own. In an FP8
region, or where NVTE_* leave another package, each policy is a call over the tensors as they lie, where the sequences
of the others have length 0: nothing is copied or gathered, their rows of its output and gradients are zero, and the
outputs add up.
"""

from __future__ import annotations

import torch

from .... import _words
from .._cp_parts import host

_NEEDED = {"sequence_ids", "mask_type", "window_size"}


def checked(policies, dispatch: str, mask, window, q_format: str, **refused):
    """The policies as dicts of forward's keywords beside "sequence_ids"; `refused` cannot stand beside them.
    sequence_ids are read on the host once a tensor, but not while torch.compile traces."""
    if dispatch not in ("auto", "grouped"):
        raise _words.error("thd_attention_policy_dispatch", dispatch, 'must be "auto" or "grouped"')
    if not isinstance(policies, list) or not policies:
        raise _words.error("thd_attention_policies", type(policies).__name__, "must be a list of at least one")
    for name, value in (("attn_mask_type", mask), ("window_size", window)):
        if value is not None:
            raise _words.error(name, value, "each of thd_attention_policies has its own; leave it out")
    if q_format != "thd":
        raise _words.error("thd_attention_policies", f"{len(policies)} policies",
                           f'need qkv_format="thd", not "{q_format}"')
    for name, value in refused.items():
        if value is not None:
            raise _words.later("thd_attention_policies", f"{len(policies)} policies", f"them beside {name}",
                               "call it for each policy's sequences")
    return [_read(number, policy) for number, policy in enumerate(policies)]


def _read(number: int, policy) -> dict:
    name = f"thd_attention_policies[{number}]"
    if not isinstance(policy, dict) or not _NEEDED <= policy.keys() <= _NEEDED | {"bottom_right_diagonal"}:
        raise _words.error(name, sorted(policy) if isinstance(policy, dict) else type(policy).__name__,
                           "must be a dict of sequence_ids, mask_type, window_size and, if need be, "
                           "bottom_right_diagonal")
    mask = _words.mask_type(policy["mask_type"])
    if "padding" not in mask:
        raise _words.error(f'{name}["mask_type"]', mask, 'must be "padding", "padding_causal" or '
                           '"padding_causal_bottom_right"')
    corner = policy.get("bottom_right_diagonal")
    if not isinstance(corner, (bool, type(None))):
        raise _words.error(f'{name}["bottom_right_diagonal"]', corner, "must be True, False or None")
    ids = policy["sequence_ids"]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise _words.error(f'{name}["sequence_ids"]', type(ids).__name__ if not isinstance(ids, torch.Tensor) else
                           f"{ids.dtype}{list(ids.shape)}", "must be a tensor of integers [n]")
    given = {"attn_mask_type": mask, "window_size": policy["window_size"] or (-1, -1 if "causal" not in mask else 0)}
    return {"sequence_ids": ids, "words": given if corner is None else {**given, "bottom_right_diagonal": corner}}


def check_cover(policies, batch: int):
    """Every sequence is in one policy, and a policy names them in ascending order."""
    listed = [host(policy["sequence_ids"]) for policy in policies]
    for number, ids in enumerate(listed):
        if any(a >= b for a, b in zip(ids, ids[1:])):
            raise _words.error(f'thd_attention_policies[{number}]["sequence_ids"]', ids, "must ascend")
    if sorted(sum(listed, [])) != list(range(batch)):
        raise _words.error("thd_attention_policies", listed, f"sequence_ids must name each of the {batch} sequences "
                           "in one policy")


def windows_of(policies, cu_q, cu_kv, bottom_right: bool | None) -> dict:
    """tessera.torch.attention's windows and align. bottom_right: of policies that do not say it."""
    batch, device = cu_q.shape[0] - 1, cu_q.device
    windows = torch.full((batch, 2), -1, dtype=torch.int32, device=device)
    corners = []
    for policy in policies:
        words, ids = policy["words"], policy["sequence_ids"].to(device, torch.int64)
        mask = words["attn_mask_type"]
        left, right = _words.check_set_window_size(mask, words["window_size"])
        windows[ids] = torch.tensor((left, right), dtype=torch.int32, device=device)
        said = words.get("bottom_right_diagonal", bottom_right)
        corners.append((ids, bool(_words.bottom_right(mask, said))))
    if len({corner for _, corner in corners}) == 1:
        return {"windows": windows, "align": "bottom_right" if corners[0][1] else "top_left"}
    shift = torch.zeros(batch, dtype=cu_q.dtype, device=device)
    ends = cu_kv.diff() - cu_q.diff()
    for ids, corner in corners:
        if corner:
            shift[ids] = ends[ids]
    return {"windows": windows, "align": shift}


def forward(module, policies, q, k, v, lengths, layout, **given):
    """All policies in one call, or the sum over policies of module.forward, and the largest max_logit where it is
    returned. `lengths` are cu_seqlens_q, cu_seqlens_kv and the padded ones."""
    cu_q, cu_kv, padded_q, padded_kv = lengths
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        _words.cu_seqlens(name, x, "thd_attention_policies")
    batch = cu_q.shape[0] - 1
    if not torch.compiler.is_compiling():
        check_cover(policies, batch)
    corner = given["bottom_right_diagonal"]
    corner = module.bottom_right_diagonal if corner is None else corner
    if not module._may_be_in_fp8(q, k, v, given["fp8_output"]):
        softcap = module.softcap if given["softcap"] is None else _words.softcap(given["softcap"])
        most = (_words.max_seqlen(name, given[name]) for name in ("max_seqlen_q", "max_seqlen_kv"))
        result = module._with_windows(
            q, k, v, (None, *lengths, given["core_attention_bias"], given["alibi_slopes"], module._offset()),
            ("thd", "padding", (-1, -1), False, *most, given["core_attention_bias_type"], softcap), layout,
            windows_of(policies, cu_q, cu_kv, corner), given["checkpoint_core_attention"])
        if result is not None:
            return result
    out = max_logit = None
    for policy in policies:
        ids = policy["sequence_ids"].to(cu_q.device, torch.int64)
        if not ids.shape[0]:
            continue
        member = torch.zeros(batch, dtype=cu_q.dtype, device=cu_q.device).index_fill(0, ids, 1)
        result = module.forward(
            q, k, v, qkv_format="thd", cu_seqlens_q=_alone(cu_q, member), cu_seqlens_kv=_alone(cu_kv, member),
            cu_seqlens_q_padded=cu_q if padded_q is None else padded_q,
            cu_seqlens_kv_padded=cu_kv if padded_kv is None else padded_kv, **{**given, **policy["words"]})
        if module.return_max_logit:
            result, peak = result
            max_logit = peak if max_logit is None else torch.maximum(max_logit, peak)
        out = result if out is None else out + result
    return (out, max_logit) if module.return_max_logit else out


def _alone(cu_seqlens, member):
    """Lengths of the members, and 0 of the others, from 0 up."""
    return torch.nn.functional.pad((cu_seqlens.diff() * member).cumsum(0, dtype=cu_seqlens.dtype), (1, 0))
