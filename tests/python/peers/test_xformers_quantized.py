# SPDX-License-Identifier: Apache-2.0
"""Keys in codes, as xformers' triton_splitk has them, beside attention in float64 over what a loop decodes."""
import struct

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.xformers as xops  # noqa: E402
from dropins import attend, close, normal, visible  # noqa: E402
from tessera.xformers import fmha  # noqa: E402
from tessera.xformers.fmha.triton_splitk import InputsFp8  # noqa: E402
from tessera.xformers.tree_attention import tree_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_device")
B, S, H, D = 2, 7, 2, 32


def drawn(*shape, seed):
    """int32 whose bits are all drawn."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(-2**31, 2**31, shape, generator=generator, device="cpu").to(torch.int32)


def coefficients(*shape, seed):
    """int32 of two fp16 numbers: a scale of 1/16 … 3/16 in the low half, a shift about 0 in the high one."""
    scale = normal(*shape, seed=seed).sigmoid().cpu() / 8 + 0.0625
    return torch.stack([scale, normal(*shape, seed=seed + 1).cpu() / 4], -1).half().view(torch.int32)[..., 0]


def here(x):
    return x.to(torch.get_default_device())


def four_bits(*shape, groups, seed):
    """int32 [*shape, groups + D / 8]."""
    return torch.cat([coefficients(*shape, groups, seed=seed), drawn(*shape, D // 8, seed=seed)], -1)


def e4m3(byte):
    """The number of a byte: sign, 4 bits of an exponent, 3 of a mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2**(exponent - 7)
    return -size if byte >> 7 else size


def halves(word):
    return struct.unpack("<ee", struct.pack("<i", word))


def of_row(words, groups):
    """The columns of a row of 4 bits."""
    found = []
    for i in range(D):
        scale, shift = halves(words[i // (D // groups)])
        found.append((words[groups + i // 8] >> 4 * (i % 8) & 15) * scale + shift)
    return found


def of_fp8_row(words, word):
    scale, shift = halves(word)
    return [e4m3(words[i // 4] >> 8 * (i % 4) & 255) * scale + shift for i in range(D)]


def rows_of(x, read, *more):
    """x [..., n] read row by row, [..., D] in float64."""
    flat = [y.reshape(-1, *y.shape[x.dim() - 1:]).tolist() for y in (x, *more)]
    return torch.tensor([read(*row) for row in zip(*flat)], dtype=torch.float64).reshape(*x.shape[:-1], D)


def fp8_rows(*shape, seed):
    """(int32 [*shape, D / 4] of bytes that are numbers, coefficients [*shape])."""
    x = normal(*shape, D, seed=seed).cpu().to(torch.float8_e4m3fn)
    return x.view(torch.int32), coefficients(*shape, seed=seed + 5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits(groups, dtype):
    q = normal(B, S, H, D, dtype=dtype)
    k, v = (four_bits(B, S, H, groups=groups, seed=seed) for seed in (3, 5))
    keys, values = (here(rows_of(x, lambda words: of_row(words, groups)).to(dtype)) for x in (k, v))
    op = type("FwOp_groups", (fmha.triton_splitk.FwOp,), {"NUM_GROUPS": groups})
    mask = xops.LowerTriangularMask()
    o = xops.memory_efficient_attention_forward(q, here(k), here(v), mask, op=op)
    assert o.dtype == dtype and o.shape == q.shape
    for n in range(B):
        close(o[n], attend(q[n], keys[n], values[n], visible(S, S, True))[0], 2e-5 if dtype == torch.float32 else 2e-2)
    inp = fmha.Inputs(q, here(k), here(v), mask)
    assert op.supports(inp) and torch.equal(op.apply(inp, False)[0], o)
    assert "no backward pass" in fmha.triton_splitk.BwOp.not_supported_reasons(inp)[0]


@pytest.mark.parametrize("code", ["4 bits", "fp8"])
@pytest.mark.parametrize("kind", ["padded", "gappy", "paged"])
def test_caches_hold_anything_behind_their_lengths(kind, code):
    lengths, room, page = [5, 2], 8, 4
    q = normal(1, 2, H, D)
    if code == "fp8":
        (k, of_k), (v, of_v) = (fp8_rows(1, 2 * room, H, seed=seed) for seed in (3, 5))
        keys, values = rows_of(k, of_fp8_row, of_k), rows_of(v, of_fp8_row, of_v)
        garbage = [k, v, of_k, of_v]
    else:
        k, v = (four_bits(1, 2 * room, H, groups=2, seed=seed) for seed in (3, 5))
        keys, values = (rows_of(x, lambda words: of_row(words, 2)) for x in (k, v))
        garbage = [k, v]
    table = here(torch.tensor([[3, 0], [1, 2]], dtype=torch.int32))
    if kind == "paged":
        mask = xops.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], lengths, table, page)
        places = [[int(table[n, j // page]) * page + j % page for j in range(length)]
                  for n, length in enumerate(lengths)]
    elif kind == "gappy":
        mask = xops.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [1, 9, 16], lengths)
        places = [[start + j for j in range(length)] for start, length in zip((1, 9), lengths)]
    else:
        mask = xops.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], room, lengths)
        places = [[n * room + j for j in range(length)] for n, length in enumerate(lengths)]
    unseen = [i for i in range(2 * room) if not any(i in each for each in places)]
    for x in garbage:
        x[:, unseen] = 0x7FFF7FFF  # NaN, as fp16 and as e4m3
    if code == "fp8":
        inp = InputsFp8(q, here(k), here(v), mask, k_fp8_scale_shift=here(of_k), v_fp8_scale_shift=here(of_v))
    else:
        inp = fmha.Inputs(q, here(k), here(v), mask)
    o, context = fmha._memory_efficient_attention_forward_requires_grad(inp, fmha.triton_splitk.FwOp)
    assert torch.equal(fmha._memory_efficient_attention_forward(inp, None), o)
    for n, at in enumerate(places):
        want, lse = attend(q[0, n:n + 1], here(keys[0, at]), here(values[0, at]), visible(1, len(at)))
        close(o[0, n:n + 1], want)
        close(context.lse[0, :, n:n + 1], lse)


def test_expanded_heads_of_groups_are_decoded_once():
    """[b, s, g, h, d / 4] whose heads of a group are one, and so are their scales."""
    g, h = 2, 3
    q = normal(B, S, g, h, D)
    (k, of_k), (v, of_v) = (fp8_rows(B, S, g, 1, seed=seed) for seed in (3, 5))
    keys, values = (here(rows_of(x, of_fp8_row, of_x)) for x, of_x in ((k, of_k), (v, of_v)))
    wide = [here(x).expand(-1, -1, -1, h, -1) for x in (k, v)]
    scales = [here(x).expand(-1, -1, -1, h) for x in (of_k, of_v)]
    inp = InputsFp8(q, *wide, k_fp8_scale_shift=scales[0], v_fp8_scale_shift=scales[1])
    o, context = fmha.triton_splitk.FwOp.apply(inp, needs_gradient=True)
    assert inp.nbytes == 4 * (q.numel() + 2 * B * S * g * (D // 4 + 1)) and context.lse.shape == (B, g, h, S)
    for n in range(B):
        close(o[n].flatten(1, 2), attend(q[n].flatten(1, 2), keys[n].flatten(1, 2), values[n].flatten(1, 2),
                                         visible(S, S))[0])


@pytest.mark.parametrize("groups", [0, 1], ids=["heads", "groups"])
def test_a_tree_over_a_cache_of_bytes(groups):
    tree, room, lengths = 3, 6, [4, 6]
    q, *spec = (normal(B, tree, H, D, seed=i) for i in range(3))
    codes = [fp8_rows(B, room, H, seed=seed) for seed in (3, 5)]
    keys, values = (here(rows_of(x, of_fp8_row, of_x)) for x, of_x in codes)
    bias = torch.where(torch.ones(tree, tree).tril().bool(), 0.0, -torch.inf)
    context = xops.BlockDiagonalPaddedKeysMask.from_seqlens([tree] * B, room, lengths)

    def grouped(x):
        return here(x).unsqueeze(2) if groups else here(x)
    o = tree_attention(*map(grouped, (q, *spec)), *(grouped(x.view(torch.uint8)) for x, _ in codes), bias, context,
                       quantized_kv_scales=tuple(grouped(of_x) for _, of_x in codes))
    for n, length in enumerate(lengths):
        k, v = (torch.cat([kept[n, :length], new[n].double()]) for kept, new in zip((keys, values), spec))
        close(o[n].reshape(tree, H, D), attend(q[n], k, v, visible(tree, length + tree, True))[0])


def fp8_call(**words):
    k, scales = (here(x) for x in fp8_rows(B, S, H, seed=3))
    return InputsFp8(**dict(query=normal(B, S, H, D), key=k, value=k, k_fp8_scale_shift=scales,
                            v_fp8_scale_shift=scales) | {name: make(k, scales) for name, make in words.items()})


@pytest.mark.parametrize("call, error, message", [
    (lambda: fp8_call(v_fp8_scale_shift=lambda k, s: None), ValueError, "v_fp8_scale_shift=None: must be"),
    (lambda: fp8_call(k_fp8_scale_shift=lambda k, s: s[:, :1]), ValueError, r"k_fp8_scale_shift=.*\[2, 7, 1, 2\]"),
    (lambda: fp8_call(k_fp8_scale_shift=lambda k, s: s.float()), ValueError, "k_fp8_scale_shift=torch.float32"),
    (lambda: fp8_call(query=lambda k, s: normal(B, S, H, 16)), ValueError, "fp8 must have d / 4 int32"),
    (lambda: fp8_call(key=lambda k, s: normal(B, S, H, D), value=lambda k, s: normal(B, S, H, D)), ValueError,
     "must both be torch.int32"),
], ids=["no scales of v", "scales of other lengths", "scales in fp32", "another head dim", "values for codes"])
def test_what_is_illegal_has_a_name(call, error, message):
    with pytest.raises(error, match=message):
        fmha.triton_splitk.FwOp.apply(call(), False)


def test_gradients_are_refused():
    q, k = normal(B, S, H, D), here(four_bits(B, S, H, groups=1, seed=3))
    o, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, k)
    with pytest.raises(tessera.Refused, match="keys and values in codes have no backward pass"):
        xops.memory_efficient_attention_backward(o, o, lse, q, k, k)
