# SPDX-License-Identifier: Apache-2.0
"""tessera.xformers: every bias beside what its documentation says of it, pair by pair."""
import pickle

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.xformers as xops  # noqa: E402
from dropins import attend, close, normal, same_gradients  # noqa: E402
from tessera.xformers.fmha import attn_bias as biases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_device")
H, D = 2, 8
LENS_Q, LENS_K, PADDING = [3, 1, 4], [5, 2, 4], 6
STARTS = [1, 7, 10, 18]
TABLE = torch.tensor([[4, 0, 5], [1, 7, 8], [2, 6, 3]], dtype=torch.int32)
PAGE = 2


def causal(i, j, sq, sk):
    return j <= i


def from_bottom_right(i, j, sq, sk):
    return j <= i + sk - sq


def everything(i, j, sq, sk):
    return True


def local(left, right, bottom_right=True):
    def rule(i, j, sq, sk):
        at = i + (sk - sq if bottom_right else 0)
        return at - left <= j <= at + right
    return rule


def block_of(rule, sq, sk):
    return torch.tensor([[bool(rule(i, j, sq, sk)) for j in range(sk)] for i in range(sq)],
                        dtype=torch.bool).reshape(sq, sk)


# ---- biases of one sequence ----

DENSE = {
    "none": (lambda: None, everything),
    "LowerTriangularMask": (xops.LowerTriangularMask, causal),
    "LowerTriangularFromBottomRightMask": (xops.LowerTriangularFromBottomRightMask, from_bottom_right),
    "make_local_attention": (lambda: xops.LowerTriangularFromBottomRightMask().make_local_attention(3),
                             local(2, 0)),
    "LowerTriangularFromBottomRightLocalAttentionMask":
        (lambda: xops.LowerTriangularFromBottomRightLocalAttentionMask(2), local(1, 0)),
    "LocalAttentionFromBottomRightMask": (lambda: xops.LocalAttentionFromBottomRightMask(1, 2),
                                          local(1, 2)),
}


@pytest.mark.parametrize("sq, sk", [(5, 5), (4, 6), (6, 4)])
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, sq, sk):
    make, rule = DENSE[name]
    q, k, v = (normal(2, s, H, D, grad=True, seed=i) for i, s in enumerate((sq, sk, sk)))
    seen = block_of(rule, sq, sk)
    o = torch.stack([attend(*x, seen, scale=0.3)[0] for x in zip(q, k, v)])
    lse = torch.stack([attend(*x, seen, scale=0.3)[1] for x in zip(q, k, v)])
    bias = make()
    close(xops.memory_efficient_attention(q, k, v, bias, scale=0.3), o)
    same_gradients(xops.memory_efficient_attention(q, k, v, bias, scale=0.3), o, (q, k, v))
    out, rows = xops.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=0.3)
    close(rows, lse)
    assert not out.requires_grad
    if bias is not None:
        assert torch.equal(bias.materialize((2, sq, sk), device=seen.device)[0] == 0, seen)
        other = bias.materialize((sq, sk), dtype=torch.bfloat16)
        assert other.dtype == torch.bfloat16 and other.device.type == "cpu"


def test_tensor_biases_with_a_gradient():
    q, k, v = (normal(2, s, H, D, grad=True, seed=i) for i, s in enumerate((4, 6, 6)))
    bias = normal(2, H, 4, 6, grad=True)
    for seen, given in ((torch.ones(4, 6, dtype=torch.bool), bias),
                        (block_of(causal, 4, 6), xops.LowerTriangularMask().add_bias(bias))):
        o = torch.stack([attend(*x[:3], seen, bias=x[3])[0] for x in zip(q, k, v, bias)])
        same_gradients(xops.memory_efficient_attention(q, k, v, given), o, (q, k, v, bias))
    three = [x[:, :, 0] for x in (q, k, v)]
    close(xops.memory_efficient_attention(*three, bias[:, 0]),
          xops.memory_efficient_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], bias[:, :1])[:, :, 0])


def test_groups_of_heads():
    q = normal(2, 5, 3, 2, D, grad=True)
    bases = [normal(2, 7, 3, 1, D, grad=True, seed=i) for i in (1, 2)]
    k, v = (x.expand(-1, -1, -1, 2, -1) for x in bases)
    flat = [x.flatten(2, 3) for x in (q, k, v)]
    mask = xops.LowerTriangularFromBottomRightMask()
    expected = xops.memory_efficient_attention(*flat, mask)
    close(xops.memory_efficient_attention(q, k, v, mask).flatten(2, 3), expected)
    inputs = (q, k, v)
    same_gradients(xops.memory_efficient_attention(*inputs, mask).flatten(2, 3), expected, (q, *bases))
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, mask)
    assert lse.shape == (2, 3, 2, 5)
    grads = xops.memory_efficient_attention_backward(torch.ones_like(out), out, lse, q, k, v, mask)
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    wide = [x.detach().contiguous().requires_grad_() for x in inputs]
    theirs = torch.autograd.grad(xops.memory_efficient_attention(*wide, mask).sum(), wide)
    for a, b in zip(grads, theirs):
        close(a, b)


@pytest.mark.parametrize("shape", [(2, 3, 1, 5, 7), (2, 1, 2, 5, 7), (1, 3, 1, 1, 7), (1, 1, 1, 5, 7), (1, 1, 2, 5, 1)],
                         ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_biases_of_groups_broadcast(shape, causal):
    q, k, v = (normal(2, s, 3, 2, D, grad=True, seed=i) for i, s in enumerate((5, 7, 7)))
    bias = normal(*shape, grad=True, seed=3)
    ours, theirs = (xops.memory_efficient_attention(q, k, v, xops.LowerTriangularMask().add_bias(x) if causal else x)
                    for x in (bias, bias.expand(2, 3, 2, 5, 7)))
    close(ours, theirs)
    same_gradients(ours, theirs, (q, k, v, bias))


# ---- packed sequences ----

def places(lengths, starts=None):
    ends = [sum(lengths[:n]) for n in range(len(lengths))] if starts is None else starts
    return [list(range(start, start + n)) for start, n in zip(ends, lengths)]


PADDED = places(LENS_K, [0, PADDING, 2 * PADDING])
GAPPY = places(LENS_K, STARTS)
PAGED = [[int(TABLE[n, j // PAGE]) * PAGE + j % PAGE for j in range(length)]
         for n, length in enumerate(LENS_K)]
LATER = [1, 0, 2]
PAGED_LATER = [[int(TABLE[n, j // PAGE]) * PAGE + j % PAGE for j in range(first, first + length)]
               for n, (first, length) in enumerate(zip(LATER, [4, 2, 4]))]


def plain():
    return xops.BlockDiagonalMask.from_seqlens(LENS_Q, LENS_K)


def padded(kind, *more):
    make = kind.from_seqlens_local if more else kind.from_seqlens
    return make(LENS_Q, PADDING, LENS_K, *more)


def gappy(kind, starts=STARTS):
    return kind.from_seqlens(LENS_Q, starts, LENS_K)


BLOCKS = {
    "BlockDiagonalMask": (plain, everything, places(LENS_K), 11),
    "make_causal": (lambda: plain().make_causal(), causal, places(LENS_K), 11),
    "make_causal_from_bottomright": (lambda: plain().make_causal_from_bottomright(),
                                     from_bottom_right, places(LENS_K), 11),
    "make_local_attention": (lambda: plain().make_local_attention(2), local(1, 0, False),
                             places(LENS_K), 11),
    "make_local_attention_from_bottomright":
        (lambda: plain().make_local_attention_from_bottomright(3), local(2, 0), places(LENS_K), 11),
    "PaddedKeys": (lambda: padded(xops.BlockDiagonalPaddedKeysMask), everything, PADDED, 18),
    "CausalWithOffsetPaddedKeys":
        (lambda: padded(xops.BlockDiagonalCausalWithOffsetPaddedKeysMask), from_bottom_right, PADDED, 18),
    "LocalAttentionPaddedKeys":
        (lambda: padded(xops.BlockDiagonalLocalAttentionPaddedKeysMask, 1, 1), local(1, 1), PADDED, 18),
    "PaddedKeys make_local_attention":
        (lambda: padded(xops.BlockDiagonalPaddedKeysMask).make_local_attention(1, 1), local(1, 1), PADDED, 18),
    "CausalLocalAttentionPaddedKeys":
        (lambda: padded(xops.BlockDiagonalCausalLocalAttentionPaddedKeysMask, 2), local(1, 0), PADDED, 18),
    "GappyKeys": (lambda: gappy(xops.BlockDiagonalGappyKeysMask), everything, GAPPY, 18),
    "CausalWithOffsetGappyKeys":
        (lambda: gappy(xops.BlockDiagonalCausalWithOffsetGappyKeysMask), from_bottom_right, GAPPY, 18),
    "GappyKeys descending": (lambda: gappy(xops.BlockDiagonalGappyKeysMask, [12, 7, 1, 18]), everything,
                             places(LENS_K, [12, 7, 1]), 18),
    "GappyKeys overlapping": (lambda: gappy(xops.BlockDiagonalCausalWithOffsetGappyKeysMask, [1, 3, 4, 18]),
                              from_bottom_right, places(LENS_K, [1, 3, 4]), 18),
    "GappyKeys of one place": (lambda: gappy(xops.BlockDiagonalGappyKeysMask, [2, 2, 2, 18]), everything,
                               places(LENS_K, [2, 2, 2]), 18),
    "PagedPaddedKeys":
        (lambda: xops.PagedBlockDiagonalPaddedKeysMask.from_seqlens(LENS_Q, LENS_K, TABLE, PAGE),
         everything, PAGED, 18),
    "make_paged":
        (lambda: padded(xops.BlockDiagonalCausalWithOffsetPaddedKeysMask).make_paged(
            TABLE, PAGE, xops.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
         from_bottom_right, PAGED, 18),
    "PagedGappyKeys":
        (lambda: xops.PagedBlockDiagonalGappyKeysMask.from_seqlens(LENS_Q, LATER, [4, 2, 4], TABLE, PAGE),
         everything, PAGED_LATER, 18),
    "gappy make_paged":
        (lambda: xops.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            LENS_Q, [1, 6, 14, 18], [4, 2, 4]).make_paged(
                TABLE, PAGE, 6, xops.PagedBlockDiagonalCausalWithOffsetGappyKeysMask),
         from_bottom_right, PAGED_LATER, 18),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    make, rule, where, keys = BLOCKS[name]
    bias = make()
    used = sorted(j for each in where for j in each)
    q = normal(1, sum(LENS_Q), H, D, grad=True)
    k, v = (normal(1, keys, H, D, grad=True, seed=i) for i in (1, 2))
    poison = torch.full((1, keys, 1, 1), torch.nan)
    poison[:, used] = 0.0
    parts, seen = [], torch.zeros(sum(LENS_Q), keys, dtype=torch.bool)
    for queries, mine in zip(places(LENS_Q), where):
        block = block_of(rule, len(queries), len(mine))
        parts.append(attend(q[0, queries], k[0, mine], v[0, mine], block))
        seen[torch.tensor(queries)[:, None], torch.tensor(mine)] = block
    o = torch.cat([x for x, _ in parts])[None]
    ours = xops.memory_efficient_attention(q, k + poison, v + poison, bias)
    close(ours, o)
    same_gradients(ours, o, (q, k, v))
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k + poison, v + poison, bias)
    close(lse, torch.cat([x for _, x in parts], 1)[None])
    assert torch.equal(bias.materialize((sum(LENS_Q), keys), device=seen.device) == 0, seen)
    grads = xops.memory_efficient_attention_backward(torch.ones_like(out), out, lse, q, k + poison,
                                                     v + poison, bias)
    again = torch.autograd.grad(xops.memory_efficient_attention(q, k + poison, v + poison, bias).sum(),
                                (q, k, v))
    for a, b in zip(grads, again):
        close(a, b)


def test_every_bias_is_tested():
    made = {type(make()).__name__ for make, *_ in (*BLOCKS.values(), *DENSE.values())}
    assert made >= set(biases.__all__) - {"AttentionBias", "LowerTriangularMaskWithTensorBias"}


def test_joining_and_splitting():
    tensors = [normal(2, 3, H, D), normal(1, 5, H, D, seed=3)]
    mask, x = xops.BlockDiagonalMask.from_tensor_list(tensors)
    assert x.shape == (1, 11, H, D)
    for part, alone in zip(mask.split(xops.memory_efficient_attention(x, x, x, mask)), tensors):
        close(part, xops.memory_efficient_attention(alone, alone, alone))
    keys = [normal(2, 4, H, D), normal(1, 2, H, D)]
    mask, q, k, v = xops.BlockDiagonalMask.from_tensor_lists_qkv(tensors, keys, keys)
    out = mask.split_queries(xops.memory_efficient_attention(q, k, v, mask))
    for part, mine, theirs in zip(out, tensors, keys):
        close(part, xops.memory_efficient_attention(mine, theirs, theirs))
    assert [x.shape for x in mask.split_kv(k)] == [x.shape for x in keys]
    with pytest.raises(ValueError, match="split_queries"):
        mask.split(q)
    with pytest.raises(ValueError, match="all tokens"):
        mask.split_queries(q[:, 1:])


def test_lengths_change_in_place():
    mask = padded(xops.BlockDiagonalCausalWithOffsetPaddedKeysMask)
    address = mask.k_seqinfo.seqlen.data_ptr()
    mask.k_seqinfo.from_seqlens_padded_inplace([4, 1, 5])
    assert mask.k_seqinfo.seqlen.data_ptr() == address
    q, k = normal(1, 8, H, D), normal(1, 18, H, D)
    fresh = xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(LENS_Q, PADDING, [4, 1, 5])
    close(xops.memory_efficient_attention(q, k, k, mask), xops.memory_efficient_attention(q, k, k, fresh))
    with pytest.raises(ValueError, match="max_seqlen=5"):
        mask.k_seqinfo.from_seqlens_padded_inplace([6, 1, 1])


def test_parts_merge():
    q, k, v = (normal(2, s, H, D, grad=True, seed=i) for i, s in enumerate((4, 9, 9)))
    parts = [xops.fmha.memory_efficient_attention_partial(q, k[:, a:b], v[:, a:b])
             for a, b in ((0, 2), (2, 9))]
    whole, lse = xops.memory_efficient_attention(q, k, v), \
        xops.memory_efficient_attention_forward_requires_grad(q, k, v)[1]
    outs, lses = zip(*parts)
    for given in ((outs, lses), (torch.stack(outs), torch.stack(lses))):
        o, rows = xops.fmha.merge_attentions(*given)
        close(o, whole)
        close(rows, lse)
    assert xops.fmha.merge_attentions(outs, lses, write_lse=False)[1] is None
    same_gradients(o, whole, (q, k, v))


def test_dropout_and_forward():
    q = normal(1, 5, H, D, grad=True)
    assert not xops.memory_efficient_attention_forward(q, q, q).requires_grad
    torch.manual_seed(1)
    a = xops.memory_efficient_attention(q, q, q, p=0.5)
    torch.manual_seed(1)
    assert torch.equal(a, xops.memory_efficient_attention(q, q, q, p=0.5))
    with pytest.raises(NotImplementedError, match="p:"):
        xops.memory_efficient_attention_forward_requires_grad(q, q, q, p=0.5)


@pytest.mark.parametrize("dtype, output", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
                                           (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_the_dtype_of_the_output(dtype, output):
    q = normal(2, 5, H, D, dtype=dtype)
    for call in (xops.memory_efficient_attention, xops.fmha.memory_efficient_attention_forward,
                 lambda *x, **k: xops.fmha.memory_efficient_attention_partial(*x, **k)[0]):
        o = call(q, q, q, output_dtype=output)
        assert o.dtype == output
        close(o.float(), xops.memory_efficient_attention(*[q.float()] * 3), 2e-2)


def test_kernels_by_name_have_no_effect():
    q = normal(2, 5, H, D)
    for op in (xops.MemoryEfficientAttentionFlashAttentionOp, xops.MemoryEfficientAttentionCutlassOp,
               (xops.fmha.flash.FwOp, None), (xops.fmha.triton_splitk.FwOp, xops.fmha.flash.BwOp)):
        assert torch.equal(xops.memory_efficient_attention(q, q, q, op=op), xops.memory_efficient_attention(q, q, q))
    xops.memory_efficient_attention_forward(q, q, q, op=xops.fmha.cutlass.FwOp)
    from tessera.xformers.fmha.flash import BwOp, FwOp
    assert (FwOp, BwOp) == xops.MemoryEfficientAttentionFlashAttentionOp and pickle.loads(pickle.dumps(FwOp)) is FwOp
    assert {op.NAME for op in xops.fmha.ALL_FW_OPS}.isdisjoint(op.NAME for op in xops.fmha.ALL_BW_OPS)


def test_pieces_of_one_tensor():
    x = normal(2, 5, 3, H, D, grad=True)
    pieces = xops.unbind(x * 1, 2)
    whole = xops.stack_or_none(pieces, 2)
    assert torch.equal(whole, x) and whole.data_ptr() == pieces[0].data_ptr() and whole.stride() == x.stride()
    assert torch.equal(torch.autograd.grad((whole * 2).sum(), x)[0], torch.full_like(x, 2.0))
    q, k, v = x.detach().unbind(2)
    assert xops.stack_or_none((q, k.clone(), v), 2) is None and xops.stack_or_none((v, k, k), 2) is None


def test_rows_of_packed_groups():
    q = normal(1, 5, 2, 3, D)
    mask = xops.BlockDiagonalMask.from_seqlens([2, 3])
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, q, q, mask)
    assert lse.shape == (1, 2, 3, 5)
    same, rows = xops.memory_efficient_attention_forward_requires_grad(*[q.flatten(2, 3)] * 3, mask)
    close(lse.flatten(1, 2), rows)
    for a, b in zip(xops.memory_efficient_attention_backward(torch.ones_like(out), out, lse, q, q, q, mask),
                    xops.memory_efficient_attention_backward(torch.ones_like(same), same, rows,
                                                             *[q.flatten(2, 3)] * 3, mask)):
        close(a.flatten(2, 3), b)


@pytest.mark.parametrize("call, error, message", [
    (lambda x: xops.memory_efficient_attention(x, x, x, op=object()), tessera.Refused, "op="),
    (lambda x: xops.memory_efficient_attention(x, x.int(), x.int()), ValueError,
     r"key.shape=\[1, 5, 2, 8\]: keys of 4 bits must have"),
    (lambda x: xops.memory_efficient_attention(x, x, x, torch.ones(5, 5, dtype=torch.bool)), ValueError,
     "attn_bias.dtype=torch.bool"),
    (lambda x: xops.memory_efficient_attention(x, x, x, "causal"), ValueError, "attn_bias=str"),
    (lambda x: xops.memory_efficient_attention(x, x[0], x), ValueError, "key.shape"),
    (lambda x: xops.memory_efficient_attention(*[x.expand(2, -1, -1, -1)] * 3,
                                               xops.BlockDiagonalMask.from_seqlens([5])), ValueError,
     "b = 1"),
    (lambda x: xops.LocalAttentionFromBottomRightMask(-1, 0), ValueError, "window_left=-1"),
    (lambda x: xops.LowerTriangularFromBottomRightLocalAttentionMask(0), ValueError, "window_size=0"),
    (lambda x: xops.BlockDiagonalMask.from_seqlens([1], [1, 2]), ValueError, "1 sequences"),
    (lambda x: xops.BlockDiagonalPaddedKeysMask.from_seqlens([1], 2, [3]), ValueError, "kv_seqlen"),
    *((lambda x, make=make: xops.memory_efficient_attention(x, x, x, make()), ValueError, message)
      for make, message in (
          (lambda: xops.BlockDiagonalMask.from_seqlens([2, 1], [2, 3]), r"query.shape\[1\]=5: must be 3, "),
          (lambda: xops.BlockDiagonalMask.from_seqlens([2, 4], [2, 3]), r"query.shape\[1\]=5: must be 6, "),
          (lambda: xops.BlockDiagonalMask.from_seqlens([2, 3], [2, 4]).make_causal(), r"key.shape\[1\]=5: must be 6, "),
          (lambda: xops.BlockDiagonalMask.from_seqlens([2, 3], [2, 2]), r"key.shape\[1\]=5: must be 4, "),
          (lambda: xops.BlockDiagonalPaddedKeysMask.from_seqlens([2, 3], 3, [2, 3]), r"key.shape\[1\]=5: must be 6 or"),
          (lambda: xops.BlockDiagonalPaddedKeysMask.from_seqlens([2, 2], 2, [2, 1]),
           r"query.shape\[1\]=5: must be 4, "),
          (lambda: xops.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [3, 0, 5], [3, 1]), r"must be 6 or more"),
          (lambda: xops.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [-1, 0, 5], [2, 1]), r"not from -1"),
          (lambda: xops.PagedBlockDiagonalPaddedKeysMask.from_seqlens([2, 2], [1, 1], TABLE[:2, :1] * 0, 1),
           r"query.shape\[1\]=5: must be 4, "))),
])
def test_what_is_illegal_or_refused_has_a_name(call, error, message):
    with pytest.raises(error, match=message):
        call(normal(1, 5, H, D))
