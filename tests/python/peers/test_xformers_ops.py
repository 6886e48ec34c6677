# SPDX-License-Identifier: Apache-2.0
"""xformers' calls as objects, Inputs, the passes that take them, and the description of a tree of drafts."""
import pytest

torch = pytest.importorskip("torch")

import tessera.xformers as xops  # noqa: E402
from dropins import close, normal  # noqa: E402
from tessera.xformers import fmha  # noqa: E402
from tessera.xformers.fmha.common import Context, Inputs  # noqa: E402
from tessera.xformers.tree_attention import (  # noqa: E402
    TreeAttnMetadata, construct_full_tree_choices, construct_tree_choices, get_full_tree_size, tree_attention)

pytestmark = pytest.mark.usefixtures("one_device")
B, S, H, D = 2, 6, 4, 8


def inputs(*shape, dv=D, **words):
    q, k = (normal(*shape, D, seed=i) for i in range(2))
    return Inputs(q, k, normal(*shape, dv, seed=2), **words)


# ---- Inputs ----

def test_what_inputs_knows():
    inp = inputs(B, S, H, dv=16, p=0.1)
    assert fmha.Inputs is Inputs and inp.device == inp.query.device
    assert inp.scale_float == D ** -0.5 and inputs(B, S, H, scale=0.3).scale_float == 0.3
    assert inp.nbytes == 4 * B * S * H * (D + D + 16)
    assert inp.get_output_dtype() == torch.float32
    half = Inputs(*(x.half() for x in (inp.query, inp.key, inp.value)))
    assert half.get_output_dtype() == torch.float16
    half.is_partial = True
    assert half.get_output_dtype() == torch.float32
    half.output_dtype = torch.bfloat16
    assert half.get_output_dtype() == torch.bfloat16


@pytest.mark.parametrize("shape, wide", [((B, S), (B, S, 1, 1, D)), ((B, S, H), (B, S, 1, H, D)),
                                         ((B, S, 2, 2), (B, S, 2, 2, D))], ids=str)
def test_axes(shape, wide):
    inp = inputs(*shape, attn_bias=normal(B, S, S) if len(shape) == 2 else None, dv=16)
    q, k, v = inp.get_qkv_in_bmghk()
    assert q.shape == k.shape == wide and v.shape == (*wide[:-1], 16)
    assert torch.equal(q.flatten(), inp.query.flatten())
    before = inp.query
    assert inp.normalize_bmhk() == (*shape, 16)
    if len(shape) > 2:
        assert inp.query is before
    else:
        assert inp.query.shape == (B, S, 1, D) and inp.value.shape == (B, S, 1, 16)
        assert inp.attn_bias.shape == (B, 1, S, S)
        masked = inputs(B, S, attn_bias=xops.LowerTriangularMask().add_bias(normal(B, S, S)))
        masked.normalize_bmhk()
        assert masked.attn_bias.bias.shape == (B, 1, S, S)


def changed(**words):
    inp = inputs(B, S, H)
    for name, value in words.items():
        setattr(inp, name, value(inp) if callable(value) else value)
    return inp


INVALID = [
    ({"query": lambda x: x.query[0, 0]}, r"query.shape=\[4, 8\]"),
    ({"key": lambda x: x.key[:, :, 0]}, r"key.shape=\[2, 6, 8\].* must all be"),
    ({"key": lambda x: x.key.half()}, "key.dtype=torch.float16.* must be one"),
    ({"value": lambda x: x.value.to("meta")}, "value.device=meta.* must be one"),
    ({"p": 1.5}, "p=1.5: must be between"),
    ({"key": lambda x: x.key[..., :4]}, r"key.shape=\[2, 6, 4, 4\].* must agree"),
    ({"key": lambda x: x.key[:, :3]}, r"key.shape=\[2, 3, 4, 8\].* must agree"),
    ({"key": lambda x: x.key[:, :, :3], "value": lambda x: x.value[:, :, :3]}, "h of query be a multiple"),
    ({"attn_bias": lambda x: xops.BlockDiagonalMask.from_seqlens([4, 8])}, "b = 1 with BlockDiagonal"),
]


@pytest.mark.parametrize("words, message", INVALID, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_invalid(words, message):
    inp = changed(**words)
    with pytest.raises(ValueError, match=message):
        inp.validate_inputs()
    reason, = fmha.flash.FwOp.not_supported_reasons(inp)
    assert "\n" not in reason and reason.startswith("tessera.xformers.Inputs: ")
    assert not fmha.flash.FwOp.supports(inp)


# ---- passes ----

CALLS = {
    "dense": lambda: inputs(B, S, H, scale=0.3),
    "one head": lambda: inputs(B, S, attn_bias=xops.LowerTriangularMask()),
    "groups": lambda: inputs(B, S, 2, 2, attn_bias=xops.LowerTriangularFromBottomRightMask()),
    "bias": lambda: inputs(B, S, H, attn_bias=normal(1, H, S, S, seed=7, grad=True), dv=16),
    "groups with a bias": lambda: inputs(B, S, 2, 2, attn_bias=normal(B, 2, 2, S, S, seed=7, grad=True)),
    "a bias of each group": lambda: inputs(B, S, 2, 2, attn_bias=normal(1, 2, 1, S, S, seed=7, grad=True)),
    "a bias of all groups": lambda: inputs(B, S, 2, 2, attn_bias=normal(B, 1, 1, 1, S, seed=7, grad=True)),
    "packed": lambda: inputs(1, S, H, attn_bias=xops.BlockDiagonalMask.from_seqlens([2, 4]).make_causal()),
}


@pytest.mark.parametrize("kernel", ["flash", "cutlass"])
@pytest.mark.parametrize("name", CALLS)
def test_apply_is_the_function(name, kernel):
    inp, op = CALLS[name](), getattr(fmha, kernel)
    assert op.FwOp.supports(inp) and op.BwOp.not_supported_reasons(inp) == []
    leaves = [x.clone().requires_grad_() for x in (inp.query, inp.key, inp.value)]
    want = xops.memory_efficient_attention(*leaves, inp.attn_bias, scale=inp.scale)
    out, nothing = op.FwOp.apply(inp, needs_gradient=False)
    assert nothing is None and torch.equal(out, want) and not out.requires_grad
    out, ctx = op.FwOp.apply(inp, needs_gradient=True)
    rows = xops.memory_efficient_attention_forward_requires_grad(*leaves, inp.attn_bias, scale=inp.scale)[1]
    assert torch.equal(out, want) and torch.equal(ctx.lse, rows) and ctx.out is out
    cotangent = normal(*out.shape, seed=9)
    given = inp.attn_bias if isinstance(inp.attn_bias, torch.Tensor) else None
    theirs = torch.autograd.grad(want, [*leaves, *([] if given is None else [given])], cotangent)
    grads = op.BwOp.apply(ctx, inp, cotangent)
    found = [grads.dq, grads.dk, grads.dv, *([] if given is None else [grads.db])]
    assert (grads.db is None) == (given is None)
    for x, y in zip(found, theirs, strict=True):
        close(x, y)


def test_dropout_has_its_state_in_the_context():
    inp = inputs(B, S, H, p=0.4)
    leaves = [x.clone().requires_grad_() for x in (inp.query, inp.key, inp.value)]
    torch.manual_seed(3)
    out, ctx = fmha.cutlass.FwOp.apply(inp, needs_gradient=True)
    torch.manual_seed(3)
    want = xops.memory_efficient_attention(*leaves, p=0.4)
    assert torch.equal(out, want)
    grads = fmha.cutlass.BwOp.apply(ctx, inp, torch.ones_like(out))
    for x, y in zip((grads.dq, grads.dk, grads.dv), torch.autograd.grad(want.sum(), leaves)):
        close(x, y)
    with pytest.raises(ValueError, match="cutlassB: ctx.rng_state=None"):
        fmha.cutlass.BwOp.apply(Context(ctx.lse, ctx.out), inp, torch.ones_like(out))


def test_a_part_is_float32():
    inp = inputs(B, S, H, is_partial=True)
    inp.query, inp.key, inp.value = (x.bfloat16() for x in (inp.query, inp.key, inp.value))
    out, ctx = fmha.triton_splitk.FwOp.apply(inp, True)
    assert out.dtype == ctx.lse.dtype == torch.float32


def test_reasons_are_tesseras():
    double = inputs(B, S, H)
    double.query, double.key, double.value = (x.double() for x in (double.query, double.key, double.value))
    reasons = fmha.flash.FwOp.not_supported_reasons(double)
    assert any("q.dtype=fp64" in reason for reason in reasons) and not any("\n" in reason for reason in reasons)
    four_bits = changed(key=lambda x: x.key.int(), value=lambda x: x.value.int())
    assert "keys of 4 bits must have" in fmha.triton_splitk.FwOp.not_supported_reasons(four_bits)[0]
    assert issubclass(fmha.flash3.FwOp_KVSplit, fmha.flash3.FwOp)
    split = fmha.triton_splitk
    assert split.FwOp_S4 is split.FwOp_Map[4] and split.FwOp_S128.SPLIT_K == 128 and split.FwOp.SPLIT_K is None
    assert issubclass(split.FwOp.get_operator(3, block_n=32), split.FwOp) and split.FwOp_S2.NAME == "triton_splitK2"
    for bias in (type(None), torch.Tensor, xops.LowerTriangularMask, xops.PagedBlockDiagonalPaddedKeysMask):
        assert bias in fmha.flash.FwOp.SUPPORTED_ATTN_BIAS_TYPES


def test_rows_are_filled_up():
    ctx = Context(lse=torch.zeros(1, 2, 5), out=torch.zeros(1, 3, 2, 4))
    assert ctx.get_padded_lse(4).isinf().sum(-1).tolist() == [[3, 3]]
    assert ctx.get_padded_lse(4, force_pad_inf=True).tolist() == [[[0, 0, 0, torch.inf]] * 2]


# ---- trees ----

#        root
#   1      2      3
#   4     5 6
#           7
CHOICES = [(1, 1, 0), (0,), (1,), (1, 1), (2,), (0, 0), (1, 0)]


def test_a_tree():
    tree = TreeAttnMetadata.from_tree_choices(CHOICES, torch.float16)
    assert tree.tree_choices == [(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]
    assert tree.tree_indices.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
    assert sorted(tree.retrieval_indices.tolist()) == [[0, 1, 4, -1], [0, 2, 5, -1], [0, 2, 6, 7], [0, 3, -1, -1]]
    assert [sum(i >= 0 for i in row) for row in tree.retrieval_indices.tolist()] == tree.path_lengths
    assert tree.tree_seq_position_ids.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert tree.tree_seq_position_ids.dtype == torch.int32
    assert tree.parent_node_indices.tolist() == [0, 0, 0, 1, 2, 2, 6]
    assert tree.child_node_indices.tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5], [0, 0, 0], [0, 0, 0], [0, 0, 0],
                                                [6, 6, 6], [0, 0, 0]]
    assert tree.num_children_per_node.tolist() == [3, 1, 2, 0, 0, 0, 1, 0]
    assert tree.candidate_idx.tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert tree.num_nodes_per_level.tolist() == tree.num_nodes_per_level_cpu.tolist() == [1, 3, 3, 1]
    at_level = [[3], [1, 2, 0], [0, 0, 1], [0]]
    assert [x.tolist() for x in tree.num_children_per_node_at_level] == at_level
    assert [x.tolist() for x in tree.num_children_per_node_at_level_cpu] == at_level
    assert tree.subtree_sizes == [1, 4, 7, 8]
    assert tree.attention_bias.dtype == torch.float16 and set(tree.attention_bias.unique().tolist()) == {-torch.inf, 0}
    assert [row.nonzero().flatten().tolist() for row in tree.attention_bias == 0] == [
        [0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6], [0, 2, 6, 7]]
    assert TreeAttnMetadata.from_tree_choices_cached(tuple(CHOICES)) is \
        TreeAttnMetadata.from_tree_choices_cached(tuple(CHOICES))


def test_trees_of_a_shape():
    assert construct_tree_choices([2, 1]) == [(0,), (1,), (0, 0), (1, 0)]
    full = construct_full_tree_choices(2, 3)
    assert len(full) + 1 == get_full_tree_size(3, 3) == 13
    tree = TreeAttnMetadata.from_tree_choices(full)
    assert tree.num_nodes_per_level.tolist() == [1, 3, 9] and tree.retrieval_indices.shape == (9, 3)
    assert tree.tree_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]


@pytest.mark.parametrize("choices", [[(0,), (1, 0)], [()]], ids=str)
def test_a_node_comes_with_its_parent(choices):
    with pytest.raises(ValueError, match="tree_choices has .* must not be the root, and come with its parent"):
        TreeAttnMetadata.from_tree_choices(choices)


def test_each_path_is_a_sequence():
    """Attention of a tree over a context: each node sees the context and the path to it, as if there were no other."""
    tree = TreeAttnMetadata.from_tree_choices(CHOICES)
    n, context = len(tree.attention_bias), 5
    q, k, v = (normal(1, n, H, D, seed=i) for i in range(3))
    cache = [normal(1, context, H, D, seed=i) for i in (5, 6)]
    prefix = xops.BlockDiagonalPaddedKeysMask.from_seqlens([n], context, [context])
    o = tree_attention(q, k, v, *cache, tree.attention_bias, prefix)
    for row, length in zip(tree.retrieval_indices, tree.path_lengths):
        path = row[:length]
        keys, values = (torch.cat([kept, new[:, path]], 1) for kept, new in zip(cache, (k, v)))
        close(o[:, path], xops.memory_efficient_attention(q[:, path], keys, values,
                                                          xops.LowerTriangularFromBottomRightMask()))
