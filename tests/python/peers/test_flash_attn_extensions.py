# SPDX-License-Identifier: Apache-2.0
"""What lies below flash-attn's functions: the extension flash_attn_2_cuda, and the passes of version 3, beside the
functions above them."""
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.flash_attn_interface as fa3  # noqa: E402
from dropins import close, normal  # noqa: E402
from tessera.flash_attn import flash_attn_2_cuda as extension, flash_attn_interface as interface  # noqa: E402

B, S, H, D = 2, 6, 4, 16
CU = torch.tensor([0, 4, 2 * S], dtype=torch.int32)
USED = torch.tensor([3, 5], dtype=torch.int32)


def tensors(packed=False, grad=True):
    found = [normal(B, S, h, D, seed=i) for i, h in enumerate((H, 2, 2))]
    return [(x.flatten(0, 1) if packed else x).clone().requires_grad_(grad) for x in found]


# ---- version 2 ----

def test_the_interface_has_the_extension():
    assert interface.flash_attn_gpu is extension


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_both_passes(packed, dropout, given):
    q, k, v = tensors(packed)
    slopes = torch.linspace(0.1, 0.4, H)
    out = torch.full_like(q, torch.nan) if given else None
    torch.manual_seed(3)
    if packed:
        o, lse, weights, state = extension.varlen_fwd(q, k, v, out, CU, CU, None, None, None, slopes, 8, 8, dropout,
                                                      0.2, False, True, -1, -1, 5.0, True, None)
    else:
        o, lse, weights, state = extension.fwd(q, k, v, out, slopes, dropout, 0.2, True, -1, -1, 5.0, True, None)
    assert not given or o is out
    torch.manual_seed(3)
    if packed:
        want = interface.flash_attn_varlen_func(q, k, v, CU, CU, 8, 8, dropout, 0.2, True, (-1, -1), 5.0, slopes, False,
                                                True)
    else:
        want = interface.flash_attn_func(q, k, v, dropout, 0.2, True, (-1, -1), 5.0, slopes, False, True)
    close(o, want[0])
    close(lse, want[1])
    assert torch.equal(weights, want[2]) if dropout else weights.numel() == 0
    do = normal(*o.shape, seed=9)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)] if given else [None] * 3
    if packed:
        found = extension.varlen_bwd(do, q, k, v, o, lse, *grads, CU, CU, slopes, 8, 8, dropout, 0.2, False, True, -1,
                                     -1, 5.0, False, None, state)
    else:
        found = extension.bwd(do, q, k, v, o, lse, *grads, slopes, dropout, 0.2, True, -1, -1, 5.0, False, None, state)
    assert not given or all(a is b for a, b in zip(grads, found))
    for a, b in zip(found, torch.autograd.grad((want[0] * do).sum(), (q, k, v))):
        close(a, b)
    close(found[3], (do * o).sum(-1).transpose(-1, -2))


def test_a_cache():
    q, k, v = tensors(grad=False)
    caches = [[x.clone() for x in (k, v)] for _ in range(2)]
    new = [normal(B, 1, 2, D, seed=i) for i in (5, 6)]
    out = torch.empty(B, 1, H, D)
    o, lse = extension.fwd_kvcache(q[:, :1], *caches[0], *new, USED, None, None, None, None, None, None, out, 0.2, True,
                                   2, 0, 0.0, True, 0)
    want = interface.flash_attn_with_kvcache(q[:, :1], *caches[1], *new, cache_seqlens=USED, softmax_scale=0.2,
                                             causal=True, window_size=(2, 0), return_softmax_lse=True)
    assert o is out and torch.equal(o, want[0]) and torch.equal(lse, want[1])
    assert all(map(torch.equal, *caches)) and torch.equal(caches[0][0][0, 3], new[0][0, 0])


# ---- version 3 ----

def forward(q, k, v, *, softmax_scale=0.2, causal=True, **words):
    """_flash_attn_forward, whose parameters without defaults are None here."""
    names = ("k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
             "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
             "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")
    return fa3._flash_attn_forward(q, k, v, **{**dict.fromkeys(names), **words}, softmax_scale=softmax_scale,
                                   causal=causal)


PACKED = dict(cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=8, max_seqlen_k=8)


@pytest.mark.parametrize("words", [{}, {"window_size": (2, 1), "softcap": 5.0}, {"attention_chunk": 3}], ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["whole", "used"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_both_passes_of_version_3(packed, used, words):
    if used and not packed and "attention_chunk" in words:
        pytest.skip("refused, below")
    q, k, v = tensors(packed)
    lengths = dict(seqused_q=USED, seqused_k=USED) if used else {}
    out = torch.full_like(q, torch.nan)
    o, lse, *rest = forward(q, k, v, out=out, **(PACKED if packed else {}), **lengths, **words)
    assert o is out and rest == [None, None] and not o.requires_grad
    own = [slice(0, int(n)) for n in (USED if used else [S, S])]
    if packed:
        whole, rows = fa3.flash_attn_varlen_func(q, k, v, CU, CU, 8, 8, softmax_scale=0.2, causal=True, **lengths,
                                                 **words, return_attn_probs=True)
        at = [(slice(a, a + n if used else b),) for a, b, n in zip(CU, CU[1:], USED)]
        for part, in at:
            close(lse[:, part], rows[:, part])
    else:
        parts = [fa3.flash_attn_func(*(x[i:i + 1, own[i]] for x in (q, k, v)), softmax_scale=0.2, causal=True, **words,
                                     return_attn_probs=True) for i in range(B)]
        at = [(i, own[i]) for i in range(B)]
        whole = torch.zeros_like(q)
        for i, (part, theirs) in enumerate(parts):
            whole = whole.index_put((torch.tensor(i), torch.arange(S)[own[i]]), part[0])
            close(lse[i, :, own[i]], theirs[0])
    for place in at:
        close(o[place], whole[place])
    if "attention_chunk" in words:  # no argument of the backward pass
        return
    do = torch.zeros_like(q)
    for place in at:
        do[place] = normal(*o[place].shape, seed=9)
    dq = torch.full_like(q, torch.nan)
    where = [CU, CU] if packed else [None, None]
    used_of_both = [USED, USED] if used else [None, None]
    longest = [8, 8] if packed else [None, None]
    found = fa3._flash_attn_backward(do, q, k, v, o, lse, *where, *used_of_both, *longest, dq, None, None, 0.2, True,
                                     **words)
    assert found[0] is dq
    for a, b in zip(found, torch.autograd.grad((whole * do).sum(), (q, k, v))):
        for place in at:
            close(a[place], b[place])
    for place in at:
        rows = (slice(None), *place) if packed else (place[0], slice(None), place[1])
        close(found[3][rows], (do * o).sum(-1).transpose(-1, -2)[rows])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_cache_of_version_3(packed):
    q, k, v = tensors(grad=False)
    q = q[:, :2]
    caches = [[x.clone() for x in (k, v)] for _ in range(2)]
    words = {"window_size": (2, 0)}
    if packed:
        cu = torch.tensor([0, 1, 4], dtype=torch.int32)
        q = q.flatten(0, 1)
        o, lse, *_ = forward(q, *caches[0], seqused_k=USED, cu_seqlens_q=cu, max_seqlen_q=3, **words)
        want = fa3.flash_attn_with_kvcache(q, *caches[1], cache_seqlens=USED, cu_seqlens_q=cu, max_seqlen_q=3,
                                           softmax_scale=0.2, causal=True, **words, return_softmax_lse=True)
    else:
        new, rows = [normal(B, 2, 2, D, seed=i) for i in (5, 6)], torch.tensor([1, 0], dtype=torch.int32)
        lengths = USED - 2
        o, lse, *_ = forward(q, *caches[0], k_new=new[0], v_new=new[1], seqused_k=lengths, kv_batch_idx=rows, **words)
        want = fa3.flash_attn_with_kvcache(q, *caches[1], *new, cache_seqlens=lengths, cache_batch_idx=rows,
                                           softmax_scale=0.2, causal=True, **words, return_softmax_lse=True)
        assert torch.equal(caches[0][0][1, 1], new[0][0, 0])
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and all(map(torch.equal, *caches))


@pytest.mark.parametrize("call, error, message", [
    (lambda x: extension.fwd(x, x, x, None, None, 0.1, 0.2, True, -1, -1, 0.0, False, torch.Generator()),
     tessera.Refused, "flash_attn_2_cuda.fwd: gen_=Generator"),
    (lambda x: extension.bwd(*[x] * 6, None, None, None, None, 0.1, 0.2, True, -1, -1, 0.0, False, None, None),
     ValueError, "rng_state=None: .* p_dropout=0.1"),
    (lambda x: extension.varlen_fwd(*[x[0]] * 3, None, CU, CU, None, USED, None, None, 8, 8, 0.0, 0.2, False, True, -1,
                                    -1, 0.0, False, None), tessera.Refused, "leftpad_k=Tensor"),
    (lambda x: forward(x, x, x, qv=x[:, 1:]), ValueError, "qv.shape=.*must be"),
    (lambda x: forward(x, x, x, k_new=x, v_new=x, seqused_q=USED, seqused_k=USED), tessera.Refused, "seqused_q=Tensor"),
    (lambda x: forward(x, x, x, attention_chunk=3, seqused_k=USED), tessera.Refused, "attention_chunk=3"),
    (lambda x: forward(x, x, x, cu_seqlens_k=CU), ValueError, "cu_seqlens_k=Tensor: must come with cu_seqlens_q"),
    (lambda x: fa3._flash_attn_backward(*[x] * 6, None, None, None, None, None, None, None, None, None, 0.2, True,
                                        sm_margin=2), tessera.Refused, "sm_margin=2"),
])
def test_what_is_illegal_or_refused_has_a_name(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call(normal(B, S, H, D))
    assert "\n" not in str(caught.value)
