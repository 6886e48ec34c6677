# SPDX-License-Identifier: Apache-2.0
"""What stands around flash_attn's functions: padding, rotary embeddings, the passes alone, beside plain PyTorch."""
import pytest

torch = pytest.importorskip("torch")

import tessera.flash_attn as flash_attn  # noqa: E402
import tessera.flash_attn_interface as fa3  # noqa: E402
from dropins import close, normal  # noqa: E402
from tessera.flash_attn import bert_padding as padding, flash_attn_interface as interface  # noqa: E402
from tessera.flash_attn.layers import rotary  # noqa: E402

B, S, H, D, R = 2, 6, 3, 16, 8


def test_the_version_is_that_of_the_interface():
    assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_padding_goes_out_and_comes_back(dtype):
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]]).to(dtype)
    unused = torch.tensor([[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).to(dtype)
    x = normal(B, S, H, D, grad=True)
    tokens, indices, cu, longest, used = padding.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()]) and cu.tolist() == [0, 3, 7] and used.tolist() == [3, 4]
    assert longest == 4 and isinstance(longest, int) and {cu.dtype, used.dtype} == {torch.int32}
    back = padding.pad_input(tokens, indices, B, S)
    assert torch.equal(back, x * mask.bool()[..., None, None])
    grad, = torch.autograd.grad((back * 3).sum(), x)
    assert torch.equal(grad, 3.0 * mask.bool()[..., None, None].expand_as(x))
    tokens, _, cu, longest, used = padding.unpad_input(x, mask, unused)
    assert cu.tolist() == [0, 4, 8] and longest == 4 and used.tolist() == [3, 4] and len(tokens) == 8
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 11] and longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1]]))


def tables(positions=16, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] / 7 ** (torch.arange(R // 2) / 3)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([4, 1])], ids=["none", "integer", "tensor"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad", [False, "leaf", "inner"])
def test_rotary(interleaved, offsets, inplace, grad):
    cos, sin = tables()
    places = torch.arange(S) + torch.as_tensor(offsets).expand(B)[:, None]
    x = normal(B, S, H, D, grad=bool(grad))
    before = x.detach().clone().requires_grad_(bool(grad))
    expected = rotary.apply_rotary_emb_torch(before, cos[places], sin[places], interleaved)
    given = x * 1 if grad == "inner" else x
    o = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
    close(o, expected)
    close(given, expected if inplace else before)
    if grad:
        weight = normal(B, S, H, D, seed=5)
        for a, b in zip(torch.autograd.grad((o * weight).sum(), x),
                        torch.autograd.grad((expected * weight).sum(), before)):
            close(a, b)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    first = torch.as_tensor(offsets).expand(B)
    where = torch.cat([torch.arange(2) + first[0], torch.arange(4) + first[1]])
    packed = rotary.apply_rotary_emb(before[0].detach(), cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu,
                                     max_seqlen=4)
    close(packed, rotary.apply_rotary_emb_torch(before[0].detach(), cos[where], sin[where], interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotary_rounds_once(dtype, interleaved):
    """As flash_attn's kernels: float32 within, so that no element is further from the exact value than half a unit
    in its last place, and a little of float32."""
    x = normal(B, 16, 64, D).to(dtype)
    cos, sin = tables(dtype=dtype)
    exact = rotary.apply_rotary_emb_torch(x.double(), cos.double(), sin.double(), interleaved)
    error = (rotary.apply_rotary_emb(x, cos, sin, interleaved).double() - exact).abs()
    unit = torch.finfo(dtype).eps * 2.0 ** torch.frexp(exact)[1].double() / 2
    assert (error <= 0.5 * unit + 1e-6).all()
    in_halves = rotary.apply_rotary_emb_torch(x, cos, sin, interleaved).double()
    assert ((in_halves - exact).abs() > 0.5 * unit + 1e-6).any()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("scale_base", [None, 512])
def test_modules_turn_q_and_k_alone(scale_base, grad):
    module = rotary.RotaryEmbedding(R, scale_base=scale_base)
    qkv = normal(B, S, 3, H, D, grad=grad)
    q, k, v = (x.detach().clone() for x in qkv.unbind(2))
    kv = torch.stack([k, v], 2)
    module._update_cos_sin_cache(S, qkv.device, qkv.dtype)
    of_k = (module._cos_k_cached, module._sin_k_cached) if scale_base else (module._cos_cached, module._sin_cached)
    expected = [rotary.apply_rotary_emb_torch(q, module._cos_cached, module._sin_cached),
                rotary.apply_rotary_emb_torch(k, *of_k), v]
    fused = module(qkv.flatten(2, 3).detach().clone(), num_heads_q=H)
    close(fused.view(B, S, 3, H, D), torch.stack(expected, 2))
    turned_q, turned_kv = module(q.clone(), kv)
    close(turned_q, expected[0])
    close(kv, torch.stack(expected[1:], 2))
    assert turned_kv.data_ptr() == kv.data_ptr()
    o = module(qkv)
    close(o, torch.stack(expected, 2))
    close(qkv, torch.stack(expected, 2))
    if grad:
        grad_qkv, = torch.autograd.grad(o[:, :, 2].sum() * 2, qkv)
        assert torch.equal(grad_qkv[:, :, 2], torch.full_like(v, 2.0)) and not grad_qkv[:, :, :2].any()
    with pytest.raises(ValueError, match="num_heads_q=None"):
        module(fused)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_two_passes_alone(packed, dropout):
    """Those of the functions with autograd; and of keys in two parts, whose gradients add up."""
    q, k, v = (normal(B, S, H, D, grad=True, seed=i) for i in range(3))
    where, flat = (), (lambda x: x)
    if packed:
        cu = torch.tensor([0, S, 2 * S], dtype=torch.int32)
        where, flat = (cu, cu, S, S), (lambda x: x.flatten(0, 1))
    passes = interface._flash_attn_forward, interface._flash_attn_backward, interface.flash_attn_func
    if packed:
        passes = (interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward,
                  interface.flash_attn_varlen_func)
    forward, backward, function = passes
    tensors = [flat(x) for x in (q, k, v)]
    shape = (dropout, 0.2, True, 3, 0, 5.0, None)
    torch.manual_seed(3)
    o, lse, _, state = forward(*tensors, *where, *shape, False)
    torch.manual_seed(3)
    expected = function(*tensors, *where, dropout, 0.2, True, (3, 0), 5.0)
    close(o, expected)
    close(lse, function(*tensors, *where, 0.0, 0.2, True, (3, 0), 5.0, return_attn_probs=True)[1])
    do = normal(*o.shape, seed=9)
    grads = [torch.full_like(x, torch.nan) for x in tensors]
    delta = backward(do, *tensors, o, lse, *grads, *where, *shape, False, state)
    close(delta, (do * o).sum(-1).transpose(-1, -2))
    for a, b in zip(grads, torch.autograd.grad((expected * do).sum(), tensors)):
        close(a, b)


def test_keys_in_two_parts():
    q, k, v = (normal(B, S, H, D, grad=True, seed=i) for i in range(3))
    shape = (0.0, 0.2, False, -1, -1, 0.0, None)
    parts = [interface._flash_attn_forward(q, k[:, part], v[:, part], *shape, False)[:2]
             for part in (slice(0, 2), slice(2, S))]
    o, lse = fa3.flash_attn_combine(torch.stack([o for o, _ in parts]),
                                    torch.stack([lse.transpose(1, 2) for _, lse in parts]))
    whole, whole_lse, _ = interface.flash_attn_func(q, k, v, softmax_scale=0.2, return_attn_probs=True)
    close(o, whole)
    close(lse, whole_lse.transpose(1, 2))
    out = torch.empty_like(o, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(torch.stack([o for o, _ in parts]), torch.stack(
        [lse.transpose(1, 2) for _, lse in parts]), out)[0] is out
    close(out, whole.to(torch.bfloat16), 1e-2)
    do = normal(*o.shape, seed=9)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for part in (slice(0, 2), slice(2, S)):
        own = torch.empty_like(q)
        interface._flash_attn_backward(do, q, k[:, part], v[:, part], o, lse.transpose(1, 2).contiguous(), own,
                                       dk[:, part],
                                       dv[:, part], *shape, True)
        dq += own
    for a, b in zip((dq, dk, dv), torch.autograd.grad((whole * do).sum(), (q, k, v))):
        close(a, b)


def test_metadata_has_no_effect():
    q, k, v = (normal(B, 1 + 5 * (i > 0), H, D, seed=i) for i in range(3))
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    plan = fa3.get_scheduler_metadata(B, 1, S, H, H, D, lengths, qkv_dtype=torch.float32, causal=True)
    assert torch.equal(*(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, scheduler_metadata=each)
                         for each in (plan, None)))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("keywords", [
    {}, {"causal": True, "softcap": 3.0}, {"window_size": (2, 1), "softmax_scale": 0.5},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3])}], ids=lambda x: ",".join(x) or "plain")
def test_weights_of_dropout_are_those_of_out(packed, keywords):
    """out is the weights that are kept, 1 / (1 - p) of each, times v; without dropout's signs they are the softmax."""
    p, d = 0.25, 16  # a p that dropout's 16 bits have
    if packed:
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 6], [0, 5, 11]))
        q, k, v = normal(6, 4, d, grad=True), normal(11, 2, d), normal(11, 2, d)

        def run(v):
            return interface.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 6, p, return_attn_probs=True, **keywords)
    else:
        q, k, v = normal(2, 4, 4, d, grad=True), normal(2, 6, 2, d), normal(2, 6, 2, d)

        def run(v):
            return interface.flash_attn_func(q, k, v, p, return_attn_probs=True, **keywords)
    out, _, weights = run(v)
    assert weights.shape == (2, 4, 4, 6) and weights.dtype == q.dtype and not weights.requires_grad
    assert (weights < 0).any() and (weights > 0).any()
    pieces = [(out[0], v[0]), (out[1], v[1])] if not packed else [(out[:2], v[:5]), (out[2:], v[5:])]
    for one, (o, values) in zip(weights, pieces):
        one = one[:, :o.shape[0], :values.shape[0]]
        kept = one.clamp(min=0) / (1 - p)
        found = torch.einsum("hij,jhd->ihd", kept, values.repeat_interleave(2, 1))
        torch.testing.assert_close(found, o, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.abs().sum(-1), torch.ones(one.shape[:2]), rtol=1e-5, atol=1e-5)


def test_weights_of_the_passes_alone():
    q, k, v = (normal(2, 6, 2, 16) for _ in range(3))
    out, _, weights, _ = interface._flash_attn_forward(q, k, v, 0.25, 0.3, True, -1, -1, 0.0, None, True)
    found = torch.einsum("bhij,bjhd->bihd", weights.clamp(min=0) / 0.75, v)
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    pools, table = [x.reshape(6, 2, 2, 16) for x in (k, v)], torch.arange(6, dtype=torch.int32).reshape(2, 3)
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    with pytest.raises(flash_attn.Refused, match="the weights of pages are not made"):
        interface.flash_attn_varlen_func(q.flatten(0, 1), *pools, cu, cu, 6, 6, 0.1, return_attn_probs=True,
                                         block_table=table)


def test_rotary_tables_beside_a_cache_of_fp8():
    """New keys are turned in float32 and rounded once, be they fp8 already or not: one e4m3 apart at most."""
    q, k, v = (normal(2, 1, h, 16).bfloat16() for h in (4, 2, 2))
    cos, sin = torch.rand(8, 8), torch.rand(8, 8)
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    wide = [normal(2, 8, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)]
    found, rounded = [], k.to(torch.float8_e4m3fn)
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    for new in (rounded, rounded.bfloat16()):
        cache = [x.clone() for x in wide]
        o = fa3.flash_attn_with_kvcache(q, *cache, new, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
                                        causal=True)
        found.append((o, cache[0]))
    turned = rotary.apply_rotary_emb(rounded.float(), cos.float(), sin.float(), interleaved=True,
                                     seqlen_offsets=lengths)
    rounded = turned[:, 0].to(torch.float8_e4m3fn).float()
    for o, keys in found:
        torch.testing.assert_close(o, found[1][0], rtol=0.05, atol=0.05)
        torch.testing.assert_close(torch.stack([keys[0, 3], keys[1, 2]]).float(), rounded, rtol=0.13, atol=0.01)
