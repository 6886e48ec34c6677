# SPDX-License-Identifier: Apache-2.0
"""tessera.te.pytorch.DotProductAttention against fp64, for every mask, format and feature."""

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
import torch._dynamo.testing  # noqa: E402,F811
from dropins import normal  # noqa: E402
from tessera.te.pytorch import DotProductAttention  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends  # noqa: E402
from tessera.te.pytorch.distributed import CudaRNGStatesTracker  # noqa: E402
from te_oracle import HEADS, MASKS, Problem  # noqa: E402

BACKENDS = {"FusedAttention": {},
            "FlashAttention": {"NVTE_FUSED_ATTN": "0"},
            "UnfusedDotProductAttention": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}}
SAME = dict(sq=8, sk=8, lens_q=(5, 8), lens_k=(5, 8))
FEATURES = {
    "plain": {},
    "self": SAME,
    "long queries": dict(sq=9, sk=6, lens_q=(9, 4), lens_k=(3, 6)),
    "window": dict(window=(2, 1)),
    "left window": dict(window=(3, 0)),
    "top left": dict(window=(2, 2), bottom_right=False),
    "bottom right": dict(window=(2, 2), bottom_right=True),
    "grouped": dict(groups=2),
    "mla": dict(dqk=12, dv=5),
    "post bias": dict(bias="post_scale_bias"),
    "pre bias": dict(bias="pre_scale_bias"),
    "bias and window": dict(bias="post_scale_bias", window=(2, 0), bias_shape="1hss"),
    "alibi": dict(bias="alibi"),
    "alibi per batch": dict(bias="alibi", slopes=(2, HEADS)),
    "alibi per head": dict(bias="alibi", slopes=(HEADS,), groups=1),
    "off-by-one": dict(softmax="off-by-one"),
    "learnable": dict(softmax="learnable", window=(3, 0)),
    "max logit": dict(max_logit=True),
    "softcap": dict(softcap=0.7, groups=2),
    "softcap and pre bias": dict(softcap=1.5, bias="pre_scale_bias", window=(3, 0), max_logit=True),
    "softcap and alibi": dict(softcap=0.7, bias="alibi", softmax="learnable", dropout=0.25),
    "dropout": dict(dropout=0.25),
    "dropout and window": dict(dropout=0.25, window=(3, 0), softmax="learnable"),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, one_device):
    for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    _attention_backends["backend_selection_requires_update"] = True


def select(monkeypatch, backend):
    for name, value in BACKENDS[backend].items():
        monkeypatch.setenv(name, value)
    _attention_backends["backend_selection_requires_update"] = True


def run(p: Problem, **more):
    """{name: tensor in [b, s, ...]} of out, max_logit and gradients, through the module."""
    module = DotProductAttention(
        HEADS, p.dqk if p.dqk == p.dv else (p.dqk, p.dv), num_gqa_groups=p.groups,
        attention_dropout=p.dropout, qkv_format=p.format, attn_mask_type=p.mask,
        bottom_right_diagonal=p.bottom_right, softmax_type=p.softmax,
        window_size=None if p.window is None else
        (p.window[0], 0) if "causal" in p.mask else p.window, return_max_logit=p.max_logit, softcap=p.softcap)
    if p.softmax == "learnable":
        module.softmax_offset.data.copy_(p.offset)
    leaves = [p.stored(x, lens).requires_grad_() for x, lens in (
        (p.q, p.lens_q), (p.k, p.lens_k), (p.v, p.lens_k))]
    given = dict(core_attention_bias_type=p.bias)
    if p.bias.endswith("scale_bias"):
        given["core_attention_bias"] = p.core_bias.clone().requires_grad_()
    if p.custom is not None:
        given["alibi_slopes"] = p.custom
    if p.mask == "arbitrary":
        given["attention_mask"] = p.hidden_pairs
    if p.by_mask:
        masks = p.hidden_q[:, None, None], p.hidden_k[:, None, None]
        given["attention_mask"] = masks[0] if p.sq == p.sk else masks
    elif p.padded:
        given.update(cu_seqlens_q=p.cumulative(p.lens_q), cu_seqlens_kv=p.cumulative(p.lens_k))
    if p.gap:
        given.update(cu_seqlens_q_padded=p.cumulative(p.lens_q, p.gap),
                     cu_seqlens_kv_padded=p.cumulative(p.lens_k, p.gap))
    if p.format == "thd":
        given.update(max_seqlen_q=p.sq, max_seqlen_kv=p.sk)
    result = module(*leaves, **given, **more)
    out, max_logit = result if p.max_logit else (result, None)
    heads = (HEADS, p.dv)
    assert out.shape == (*leaves[0].shape[:-2], HEADS * p.dv)
    (out.unflatten(-1, heads) * p.stored(p.do, p.lens_q).nan_to_num()).sum().backward()
    answer = {"out": p.loaded(out.detach().unflatten(-1, heads), p.lens_q, p.sq)}
    for name, leaf, lens, s in zip(("dq", "dk", "dv"), leaves, (p.lens_q, p.lens_k, p.lens_k),
                                   (p.sq, p.sk, p.sk)):
        answer[name] = p.loaded(leaf.grad, lens, s)
    if p.bias.endswith("scale_bias"):
        answer["dbias"] = given["core_attention_bias"].grad
    if p.softmax == "learnable":
        answer["doffset"] = module.softmax_offset.grad
    if p.max_logit:
        answer["max_logit"] = max_logit
    return answer


def close(got, expected, rtol=2e-5, atol=2e-5):
    for name, value in got.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=rtol, atol=atol,
                                   msg=lambda text, name=name: f"{name}: {text}")


def keep_of(p, seed):
    """The dropout mask of a module's first call after manual_seed."""
    if not p.dropout:
        return None
    torch.manual_seed(seed)
    state = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
    torch.manual_seed(seed)
    return tessera.torch.dropout_mask(2, HEADS, p.sq, p.sk, p.dropout, state)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("mask", MASKS)
def test_agrees_with_fp64(mask, qkv_format, feature, monkeypatch):
    p = Problem(mask, qkv_format, **FEATURES[feature])
    expected = p.expected(keep_of(p, 3))
    for backend in ("FusedAttention", "UnfusedDotProductAttention"):
        select(monkeypatch, backend)
        torch.manual_seed(3)
        close(run(p), expected)
        assert _attention_backends["use_fused_attention"] == (backend == "FusedAttention")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("extents", [SAME, dict(sq=7, sk=9)], ids=["self", "cross"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_padding_by_mask_assumes_no_prefix(qkv_format, extents, mask, backend, monkeypatch):
    for feature in ({}, dict(window=(2, 1)), dict(softmax="learnable", max_logit=True),
                    dict(bias="alibi", window=(4, 3), dropout=0.25), dict(bias="alibi", slopes=(2, HEADS))):
        p = Problem(mask, qkv_format, by_mask=True, **extents, **feature)
        expected = p.expected(keep_of(p, 3))
        select(monkeypatch, backend)
        torch.manual_seed(3)
        close(run(p), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_gaps_between_sequences(mask, backend, monkeypatch):
    p = Problem(mask, "thd", gap=3, softmax="learnable", bias="post_scale_bias", bias_shape="1hss")
    select(monkeypatch, backend)
    close(run(p, pad_between_seqs=True), p.expected())


def test_gaps_without_starts_are_none():
    """TE's own callers say pad_between_seqs=True of tensors that lie one after another."""
    q, cu = torch.randn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu)
    expected = module(q, q, q, **lengths)
    assert torch.equal(module(q, q, q, **lengths, pad_between_seqs=True), expected)
    for longest in (5, torch.tensor(5), torch.tensor([64], dtype=torch.int32)):
        assert torch.equal(expected, module(q, q, q, **lengths, max_seqlen_q=longest,
                                            max_seqlen_kv=longest))


@pytest.mark.parametrize("shape", ["1hss", "b1ss", "bhss", "11ss", "111s"])
@pytest.mark.parametrize("mask", ["no_mask", "padding_causal"])
def test_bias_shapes(mask, shape):
    p = Problem(mask, bias="post_scale_bias", bias_shape=shape)
    close(run(p), p.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_sixteen_bits_within_te_s_bar(mask, dtype):
    p = Problem(mask, "sbhd", dtype=dtype, groups=2)
    tolerance = 1e-3 if dtype == torch.float16 else 8e-3  # TE: 1e-3 and 1.5e-2
    close(run(p), p.expected(), rtol=2 * tolerance, atol=2 * tolerance)


def test_checkpointing_replays_dropout():
    p = Problem("causal", dropout=0.25, softmax="learnable")
    expected = p.expected(keep_of(p, 5))
    close(run(p, checkpoint_core_attention=True), expected)


def test_rng_tracker_and_eval():
    class Tracker:
        forks = 0

        def fork(self, name="model-parallel-rng"):
            Tracker.forks += 1
            return torch.random.fork_rng(devices=[])

    module = DotProductAttention(2, 8, attention_dropout=0.5, get_rng_state_tracker=Tracker)
    q = torch.randn(4, 1, 2, 8)
    before = torch.get_rng_state()
    a = module(q, q, q)
    assert Tracker.forks == 1 and torch.equal(before, torch.get_rng_state())
    b = module.eval()(q, q, q)
    assert Tracker.forks == 1 and not torch.equal(a, b)
    torch.testing.assert_close(b, DotProductAttention(2, 8)(q, q, q))


def test_te_s_rng_tracker():
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 42)
    tracker.add("other", 43)
    before, states = torch.get_rng_state(), tracker.get_states()
    module = DotProductAttention(2, 8, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    q = normal(4, 1, 2, 8)
    a, b = module(q, q, q), module(q, q, q)
    assert torch.equal(before, torch.get_rng_state()) and not torch.equal(a, b)
    tracker.set_states(states)
    assert torch.equal(a, module(q, q, q))
    torch.manual_seed(42)
    assert torch.equal(a, DotProductAttention(2, 8, attention_dropout=0.5)(q, q, q))
    with tracker.fork("other"):
        torch.manual_seed(43)
        expected = torch.rand(3)
    torch.manual_seed(43)
    assert torch.equal(torch.rand(3), expected)
    for wrong in (lambda: tracker.add("other", 44), lambda: tracker.add("third", 43)):
        with pytest.raises(RuntimeError, match="added before"):
            wrong()
    with pytest.raises(KeyError, match="third"), tracker.fork("third"):
        pass


@pytest.mark.parametrize("interleave_dim", [-3, -2])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_packed_inputs(qkv_format, interleave_dim):
    shape = {"sbhd": (6, 2), "bshd": (2, 6), "thd": (12,)}[qkv_format]
    cu_seqlens = torch.tensor([0, 6, 12], dtype=torch.int32)
    given = dict(qkv_format=qkv_format, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                 max_seqlen_q=6, max_seqlen_kv=6)
    module = DotProductAttention(2, 8)

    def packed(n):
        x = torch.randn(*shape, *((n, 2, 8) if interleave_dim == -3 else (2, n, 8)))
        return x.requires_grad_()

    qkv, q, kv = packed(3), torch.randn(*shape, 2, 8), packed(2)
    for got, parts, leaf in (
            (module(qkv_layer=qkv, qkv_interleave_dim=interleave_dim, **given),
             qkv.unbind(interleave_dim), qkv),
            (module(q, kv_layer=kv, qkv_interleave_dim=interleave_dim, **given),
             (q, *kv.unbind(interleave_dim)), kv)):
        plain = module(*(x.contiguous() for x in parts), **given)
        torch.testing.assert_close(got, plain)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), leaf),
                                   torch.autograd.grad(plain.sum(), leaf))


def test_tensor_parallel_heads():
    module = DotProductAttention(8, 16, num_gqa_groups=4, tp_size=2, softmax_type="learnable")
    assert module.num_gqa_groups_per_partition == 2 and module.softmax_offset.shape == (4,)
    q, k = torch.randn(3, 1, 4, 16), torch.randn(3, 1, 2, 16)
    assert module(q, k, k).shape == (3, 1, 64)


def test_aliases_of_masks():
    q = torch.randn(5, 1, 2, 8)
    mask = torch.tensor([False] * 4 + [True]).view(1, 1, 1, 5)
    module = DotProductAttention(2, 8)
    expected = module(q, q, q, attn_mask_type="padding_causal", attention_mask=mask)
    for name in ("causal_padding", "padding,causal", "causal,padding"):
        assert torch.equal(expected, module(q, q, q, attn_mask_type=name, attention_mask=mask))
    assert not expected[-1].any()


def test_deterministic_switch(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert DotProductAttention(2, 8).deterministic
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    assert not DotProductAttention(2, 8).deterministic


COMPILED = {
    "causal": {},
    "padding": dict(attn_mask_type="padding_causal", cu_seqlens_q=torch.tensor([0, 3, 8]),
                    cu_seqlens_kv=torch.tensor([0, 4, 10])),
    "mask": dict(attn_mask_type="padding",
                 attention_mask=torch.arange(12).view(2, 1, 1, 6) % 5 > 3),
    "alibi": dict(core_attention_bias_type="alibi"),
    "bias": dict(core_attention_bias_type="post_scale_bias",
                 core_attention_bias=torch.ones(1, 2, 6, 6)),
    "checkpoint": dict(checkpoint_core_attention=True),
}


@pytest.mark.parametrize("given", COMPILED)
def test_compiles_without_a_graph_break(given):
    torch._dynamo.reset()
    # A graph on a GPU has a generator of its own, which draws another mask than the eager call's.
    dropout = 0.1 if torch.get_default_device().type == "cpu" else 0.0
    module = DotProductAttention(2, 8, qkv_format="bshd", attention_dropout=dropout,
                                 softmax_type="learnable")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q = torch.randn(2, 6, 2, 8, requires_grad=True)
    results = []
    for one in (module, compiled):
        torch.manual_seed(0)
        out = one(q, q, q, **COMPILED[given])
        results.append((out, *torch.autograd.grad(out.sum(), [q, module.softmax_offset])))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("longest_given", [True, False])
def test_packed_sequences_compile_into_few_graphs(longest_given):
    """A graph for the first length and one for all others, or two where an integer changes too."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for n in range(5, 15):
        cu = torch.tensor([0, 2, n], dtype=torch.int32)
        q = torch.randn(n, 2, 8, requires_grad=True)
        given = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu)
        if longest_given:
            given.update(max_seqlen_q=n - 2, max_seqlen_kv=n - 2)
        results = [(out, *torch.autograd.grad(out.sum(), q))
                   for out in (run(q, q, q, **given) for run in (compiled, module))]
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2 + longest_given


# ---- state dicts ----

def test_state_dict_round_trip():
    module = DotProductAttention(4, 8, softmax_type="learnable")
    module.softmax_offset.data.normal_()
    state = module.state_dict()
    assert set(state) == {"softmax_offset", "_extra_state"}
    other = DotProductAttention(4, 8, softmax_type="learnable")
    other.load_state_dict(state, strict=True)
    assert torch.equal(other.softmax_offset, module.softmax_offset)


@pytest.mark.parametrize("extra", [{}, {"_extra_state": torch.empty(0, dtype=torch.uint8)},
                                   {"fused_attention._extra_state": torch.empty(0)}],
                         ids=["none", "te", "te 1.6"])
def test_state_dict_of_te(extra):
    layer = torch.nn.ModuleDict({"core_attention": DotProductAttention(4, 8)})
    layer.load_state_dict({f"core_attention.{key}": x for key, x in extra.items()}, strict=True)
    with pytest.raises(RuntimeError, match="core_attention.weight"):
        layer.load_state_dict({"core_attention.weight": torch.zeros(1)}, strict=True)


# ---- misuse ----

def inputs(shape=(5, 2, 4, 8), **more):
    q = torch.zeros(shape)
    return dict(dict(query_layer=q, key_layer=q, value_layer=q), **more)


MISUSE = {
    "mask": (inputs(attn_mask_type="causual"), "attn_mask_type='causual'.*padding_causal"),
    "format": (inputs(qkv_format="bhsd"), "qkv_format='bhsd'.*sbhd"),
    "bias type": (inputs(core_attention_bias_type="post"), "core_attention_bias_type='post'"),
    "no lengths": (inputs(attn_mask_type="padding"), 'cu_seqlens_q=None.*"padding"'),
    "thd without lengths": (inputs((5, 4, 8), qkv_format="thd"), 'cu_seqlens_q=None.*"thd"'),
    "thd with kv lengths": (inputs((5, 4, 8), qkv_format="thd", cu_seqlens_kv=torch.arange(2)),
                            "cu_seqlens_q=None"),
    "lengths of another batch": (inputs(attn_mask_type="padding", cu_seqlens_q=torch.arange(3),
                                        cu_seqlens_kv=torch.arange(4)),
                                 r"cu_seqlens_kv.shape=\[4\].*\[3\]"),
    "float lengths": (inputs((5, 4, 8), qkv_format="thd", cu_seqlens_q=torch.zeros(2),
                             cu_seqlens_kv=torch.zeros(2)), "cu_seqlens_q=.*float32.*int32"),
    "float length": (inputs((5, 4, 8), qkv_format="thd", cu_seqlens_q=torch.arange(2),
                            cu_seqlens_kv=torch.arange(2), max_seqlen_kv=5.0),
                     "max_seqlen_kv=5.0: must be an integer"),
    "bias missing": (inputs(core_attention_bias_type="post_scale_bias"),
                     "core_attention_bias=None"),
    "bias shape": (inputs(core_attention_bias_type="post_scale_bias",
                          core_attention_bias=torch.zeros(1, 4, 5, 6)),
                   r"core_attention_bias.shape=\[1, 4, 5, 6\].*\[2, 4, 5, 5\]"),
    "bias rank": (inputs(core_attention_bias_type="post_scale_bias",
                         core_attention_bias=torch.zeros(5, 5)), "core_attention_bias.shape"),
    "bias dtype": (inputs(core_attention_bias_type="post_scale_bias",
                          core_attention_bias=torch.zeros(1, 1, 5, 5, dtype=torch.float16)),
                   "core_attention_bias.dtype=torch.float16"),
    "bias unused": (inputs(core_attention_bias=torch.zeros(1, 1, 5, 5)), "core_attention_bias="),
    "slopes unused": (inputs(alibi_slopes=torch.zeros(4)), "alibi_slopes="),
    "slopes shape": (inputs(core_attention_bias_type="alibi", alibi_slopes=torch.zeros(3)),
                     r"alibi_slopes.shape=\[3\]"),
    "arbitrary without mask": (inputs(attn_mask_type="arbitrary"), "attention_mask=None"),
    "mask of floats": (inputs(attn_mask_type="arbitrary", attention_mask=torch.zeros(1, 1, 5, 5)),
                       "attention_mask.dtype=torch.float32.*bool"),
    "mask shape": (inputs(attn_mask_type="padding",
                          attention_mask=torch.zeros(2, 5, dtype=torch.bool)),
                   r"attention_mask.shape=\[2, 5\].*\[2, 1, 1, 5\]"),
    "mask of words": (inputs(attn_mask_type="padding", attention_mask="left"),
                      "attention_mask='str'.*pair"),
    "window": (inputs(window_size=(-2, 0)), r"window_size=\(-2, 0\)"),
    "dtype": ({name: torch.zeros(5, 2, 4, 8, dtype=torch.int32) for name in inputs()},
              "query_layer.dtype=torch.int32.*float16"),
    "dtypes": (inputs(key_layer=torch.zeros(5, 2, 4, 8, dtype=torch.float16)),
               "key_layer.dtype=torch.float16.*float32"),
    "devices": (inputs(key_layer=torch.zeros(5, 2, 4, 8, device="meta")),
                "key_layer.device='meta'.*'(cpu|cuda:0)'"),
    "device": ({name: torch.zeros(5, 2, 4, 8, device="meta") for name in inputs()}, "device"),
    "heads": (inputs((5, 2, 3, 8)), r"query_layer.shape=\[5, 2, 3, 8\].*\[4, 8\]"),
    "rank": (inputs((5, 4, 8)), "query_layer.shape"),
    "batch": (inputs(key_layer=torch.zeros(5, 3, 4, 8), value_layer=torch.zeros(5, 3, 4, 8)),
              "key_layer.shape=.*batch size, 2"),
    "key and value": (inputs(value_layer=torch.zeros(6, 2, 4, 8)), "value_layer.shape"),
    "no tensors": ({}, "query_layer='NoneType'.*required unless packed"),
    "packed twice": (inputs(qkv_layer=torch.zeros(5, 2, 3, 4, 8)),
                     "query_layer=.*must be None when qkv_layer is provided"),
    "both packed": (dict(qkv_layer=torch.zeros(5, 2, 3, 4, 8), kv_layer=torch.zeros(5, 2, 2, 4, 8)),
                    "mutually exclusive"),
    "key and value without query": (dict(kv_layer=torch.zeros(5, 2, 2, 4, 8)),
                                    "query_layer is required when kv_layer"),
    "packed size": (dict(qkv_layer=torch.zeros(5, 2, 2, 4, 8)), "must have size 3 at dim -3"),
    "packed strides": (dict(qkv_layer=torch.zeros(5, 2, 3, 8, 4).mT), "stride 1 in its last"),
    "packed axis": (dict(qkv_layer=torch.zeros(5, 2, 4, 4, 8)), "qkv_layer.shape"),
    "packed dim": (dict(qkv_layer=torch.zeros(5, 2, 3, 4, 8), qkv_interleave_dim=0),
                   "qkv_interleave_dim=0.*must be -3"),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_named(misuse):
    given, message = MISUSE[misuse]
    with pytest.raises(ValueError, match=message):
        DotProductAttention(4, 8)(**given)


@pytest.mark.parametrize("given, message", [
    (dict(num_gqa_groups=3), "num_gqa_groups=3"), (dict(tp_size=3), "tp_size=3"),
    (dict(attention_dropout=1.0), "attention_dropout=1.0"),
    (dict(softmax_type="sink"), "off-by-one"),
    (dict(attention_type="none"), "attention_type='none'"), (dict(qkv_format="hbsd"), "hbsd"),
    (dict(attn_mask_type="full"), "attn_mask_type='full'")], ids=str)
def test_constructor_misuse(given, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(4, 8, **given)


def test_what_comes_later_is_refused_by_name():
    with pytest.raises(tessera.torch.Refused, match="score_mod"):
        DotProductAttention(4, 8, attn_mask_type="no_mask")(**inputs(score_mod=lambda graph, x, _: graph.exp(x)))


def test_roles_of_fp8_are_refused():
    for name in ("get_quantizer_roles", "get_qkv_quantization_capabilities"):
        with pytest.raises(tessera.torch.Refused, match=f"{name}.*CustomRecipe's roles.*DelayedScaling"):
            getattr(DotProductAttention(4, 8), name)()


def test_nothing_fits(monkeypatch):
    for name in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "0")
    with pytest.raises(ValueError) as caught:
        DotProductAttention(4, 8)(**inputs())
    for name in ("FLASH", "FUSED", "UNFUSED"):
        assert f"NVTE_{name}_ATTN=0" in str(caught.value)
