# SPDX-License-Identifier: Apache-2.0
"""xformers' modules over parts of the keys, merge_training and tree_attention, beside attention over all of them."""
import pytest

torch = pytest.importorskip("torch")

import tessera.xformers as xops  # noqa: E402
from dropins import close, normal, same_gradients  # noqa: E402
from tessera.xformers.fmha.merge_training import (  # noqa: E402
    Partial, memory_efficient_attention_partial_autograd, merge_attentions_autograd)
from tessera.xformers.tree_attention import tree_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_device")
H, D = 2, 8


def shaped(x, groups):
    """[b, s, h, d], or the same heads as [b, s, g, h / g, d]."""
    return x.unflatten(2, (groups, -1)) if groups else x


@pytest.mark.parametrize("groups", [0, 2], ids=["heads", "groups"])
def test_parts_with_gradients(groups):
    leaves = [normal(2, s, 4, D, grad=True, seed=i) for i, s in enumerate((4, 9, 9))]
    q, k, v = (shaped(x, groups) for x in leaves)
    for bounds, some in (((0, 2, 3, 9), None), ((0, 4, 9), lambda x: x[:, 1:3].flip(1)), ((0, 9), None)):
        parts = [memory_efficient_attention_partial_autograd(q, k[:, a:b], v[:, a:b], scale=0.3)
                 for a, b in zip(bounds, bounds[1:])]
        whole = xops.memory_efficient_attention(q, k, v, scale=0.3)
        assert all(isinstance(x, Partial) and x.is_bmghk() == bool(groups) for x in parts)
        if some:
            parts, whole = [x.apply(some) for x in parts], some(whole)
        o = merge_attentions_autograd(*parts)
        close(o, whole)
        same_gradients(o, whole, leaves)


def test_packed_parts():
    q, k, v = (normal(1, s, H, D, grad=True, seed=i) for i, s in enumerate((5, 7, 7)))
    mask = xops.BlockDiagonalMask.from_seqlens([2, 3], [3, 4])
    halves = [xops.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], starts, lengths)
              for starts, lengths in (([0, 3, 7], [2, 1]), ([2, 4, 7], [1, 3]))]
    o = merge_attentions_autograd(*(memory_efficient_attention_partial_autograd(q, k, v, half) for half in halves))
    whole = xops.memory_efficient_attention(q, k, v, mask)
    close(o, whole)
    same_gradients(o, whole, (q, k, v))


@pytest.mark.parametrize("groups", [0, 2], ids=["heads", "groups"])
@pytest.mark.parametrize("tree, drafts", [(3, 3), (2, 4)])
def test_a_tree_over_a_context(tree, drafts, groups):
    b, room, lengths = 2, 6, [4, 6]
    q, *spec = (normal(b, s, 4, D, seed=i) for i, s in enumerate((tree, drafts, drafts)))
    cache = [normal(b, room, 4, D, seed=i) for i in (7, 8)]
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])[-tree:, :drafts] if drafts == 4 else \
        torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    bias = torch.where(seen.bool(), 0.0, -torch.inf)
    context = xops.BlockDiagonalPaddedKeysMask.from_seqlens([tree] * b, room, lengths)
    o = tree_attention(*(shaped(x, groups) for x in (q, *spec, *cache)), bias, context, xops.fmha.triton_splitk.FwOp)
    for i, n in enumerate(lengths):
        k, v = (torch.cat([kept[i:i + 1, :n], new[i:i + 1]], 1) for kept, new in zip(cache, spec))
        whole = xops.memory_efficient_attention(q[i:i + 1], k, v, torch.cat([torch.zeros(tree, n), bias], 1))
        close(o[i:i + 1], shaped(whole, groups))


def test_a_tree_over_pages():
    q, *spec = (normal(2, 3, H, D, seed=i) for i in range(3))
    pool = [normal(1, 8, H, D, seed=i) for i in (7, 8)]
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    context = xops.PagedBlockDiagonalPaddedKeysMask.from_seqlens([3, 3], [3, 4], table, 2)
    rows = table[:, :, None] * 2 + torch.arange(2)
    cache = [x[0, rows.flatten(1).long()] for x in pool]
    bias = torch.where(torch.eye(3).bool(), 0.0, -torch.inf)
    padded = xops.BlockDiagonalPaddedKeysMask.from_seqlens([3, 3], 4, [3, 4])
    close(tree_attention(q, *spec, *pool, bias, context), tree_attention(q, *spec, *cache, bias, padded))


@pytest.mark.parametrize("call, error, message", [
    (lambda x: merge_attentions_autograd(), ValueError, r"partials=\(\)"),
    (lambda x: memory_efficient_attention_partial_autograd(x, x, x, None, 0.1), NotImplementedError, "p: dropout"),
    (lambda x: tree_attention(x, x, x, x, x, torch.zeros(2, 2), None), ValueError, r"spec_attn_bias.shape=\[2, 2\]"),
    (lambda x: tree_attention(x, x, x, x.to(torch.uint8), x.to(torch.uint8), torch.zeros(3, 3), None), ValueError,
     "cache_k.dtype=torch.uint8, .* quantized_kv_scales"),
])
def test_what_is_illegal_or_refused_has_a_name(call, error, message):
    with pytest.raises(error, match=message):
        call(normal(2, 3, H, D))
