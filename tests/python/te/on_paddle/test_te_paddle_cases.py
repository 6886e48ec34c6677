# SPDX-License-Identifier: Apache-2.0
"""The attention cases of TransformerEngine 1.13's own tests for Paddle, by TE's import lines: 32 of the
layer, 18 of the operators. Lengths are an eighth of TE's unless pytest runs with --te-full, or where
they are 512 at most."""

import importlib
import sys

import pytest

paddle = pytest.importorskip("paddle")

import paddle.nn.functional as F  # noqa: E402

MIRROR = {"transformer_engine": "tessera.te",
          "transformer_engine.paddle": "tessera.te.paddle",
          "transformer_engine.paddle.constants": "tessera.te.paddle.constants",
          "transformer_engine.paddle.cpp_extensions": "tessera.te.paddle.cpp_extensions",
          "transformer_engine.paddle.layer": "tessera.te.paddle.layer",
          "transformer_engine.transformer_engine_paddle": "tessera.te.transformer_engine_paddle"}


@pytest.fixture(autouse=True)
def te(monkeypatch):
    """tessera.te under TE's names."""
    for name, ours in MIRROR.items():
        monkeypatch.setitem(sys.modules, name, importlib.import_module(ours))
    paddle.seed(11)
    import transformer_engine.paddle
    return transformer_engine.paddle


@pytest.fixture
def length(request):
    full = request.config.getoption("--te-full") or paddle.is_compiled_with_cuda()
    return lambda s: s if full or s <= 512 else s // 8


def normal(*shape, dtype):
    return (paddle.randn(shape) * 0.02).astype(dtype)


def close(actual, expected, rtol, atol):
    actual, expected = actual.astype("float32"), expected.astype("float32")
    assert bool(((actual - expected).abs() <= atol + rtol * expected.abs()).all())


def only_valid(x, lengths):
    rows = paddle.arange(x.shape[1]).unsqueeze(0) < lengths.unsqueeze(1)
    return (x.astype("float32") * rows.unsqueeze(-1).unsqueeze(-1).astype("float32")).astype(x.dtype)


# ---- the layer ----

@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask_type", ["causal", "padding"])
@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("b", [1, 2])
def test_dot_product_attention(te, length, monkeypatch, b, attention_type, mask_type, dtype,
                               deterministic):
    """The kernels beside the operations, forward and backward; twice the same where deterministic."""
    s, heads, d = length(1024), 16, 64
    q, k, v = (normal(b, s, heads, d, dtype=dtype) for _ in range(3))
    lengths_q = paddle.randint(20, s, [b])
    lengths_k = paddle.randint(20, s, [b]) if attention_type == "cross" else lengths_q
    i, j = paddle.arange(s).unsqueeze(1), paddle.arange(s)
    seen = paddle.logical_and(i < lengths_q.reshape([b, 1, 1, 1]), j < lengths_k.reshape([b, 1, 1, 1]))
    mask = paddle.logical_not(seen)
    dout = only_valid(normal(b, s, heads, d, dtype=dtype), lengths_q)
    if deterministic:
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

    def run(backend):
        layer = te.DotProductAttention(heads, d, attention_dropout=0.0, attn_mask_type=mask_type,
                                       attention_type=attention_type, backend=backend)
        inputs = [x.clone() for x in (q, k, v)]
        for x in inputs:
            x.stop_gradient = False
        out = layer(*inputs, mask)
        out.backward(dout)
        return out, *(x.grad for x in inputs)

    ours, theirs = run("transformer_engine"), run("paddle")
    for x, y, lengths in zip(ours, theirs, (lengths_q, lengths_q, lengths_k, lengths_k)):
        close(x, only_valid(y, lengths), rtol=1e-4, atol=2e-2)
        inside = [only_valid(z, paddle.minimum(lengths_q, lengths_k)) for z in (x, y)]
        close(*inside, rtol=2e-2, atol=5e-4)  # far below what TE asks
    if deterministic:
        assert all(bool((x == y).all()) for x, y in zip(ours, run("transformer_engine")))


# ---- the operators ----

def reference(q, k, v, hidden, dout):
    """By Paddle's operations, which on the CPU have no 16-bit kernels; True is hidden."""
    inputs = [x.clone() for x in (q, k, v)]
    for x in inputs:
        x.stop_gradient = False
    qt, kt, vt = (x.astype("float32").transpose([0, 2, 1, 3]) for x in inputs)
    scores = paddle.matmul(qt * q.shape[-1] ** -0.5, kt, transpose_y=True)
    scores = paddle.where(hidden, paddle.full([], -1e4), scores)
    weights = F.softmax(scores).astype(q.dtype).astype("float32")
    out = paddle.matmul(weights, vt).transpose([0, 2, 1, 3]).astype(q.dtype)
    out.backward(dout)
    return out, *(x.grad for x in inputs)


class Operators:
    """Inputs of one case."""

    def __init__(self, b, sq, skv, h, d, dtype, causal):
        self.dtype, self.causal, self.lengths = dtype, causal, (sq, skv)
        self.q, self.k = normal(b, sq, h, d, dtype=dtype), normal(b, skv, h, d, dtype=dtype)
        if sq == skv:
            self.k = self.q
        actual = paddle.full([b], sq, "int64") if causal else paddle.randint(20, min(sq, skv), [b])
        i, j = paddle.arange(sq).unsqueeze(1), paddle.arange(skv)
        ends = actual.reshape([b, 1, 1, 1])
        self.hidden = (j > i).expand([b, 1, sq, skv]) if causal else \
            paddle.logical_or(i >= ends, j >= ends)
        self.cu = paddle.concat([paddle.zeros([1], "int64"), actual.cumsum()]).astype("int32")
        self.actual = actual
        self.dout = normal(b, sq, h, d, dtype=dtype)

    def backend(self, layout):
        from transformer_engine import transformer_engine_paddle as tex
        from transformer_engine.paddle.constants import AttnBiasType, AttnMaskType, TE_DType
        dtype = TE_DType[self.q.dtype]
        found = tex.get_fused_attn_backend(
            dtype, dtype, tex.get_nvte_qkv_layout(layout), AttnBiasType["no_bias"],
            AttnMaskType[self.mask], 0.0, self.q.shape[2], self.k.shape[2], *self.lengths,
            self.q.shape[3])
        assert found == tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
        return found

    @property
    def mask(self):
        return "causal" if self.causal else "padding"

    def packed(self):
        from transformer_engine.paddle import constants, cpp_extensions as ext
        dtype = constants.TE_DType[self.q.dtype]
        s, skv = self.lengths
        if s == skv:
            qkv = paddle.stack([self.q, self.k, self.k], 2)
            common = dict(max_seqlen=s, qkv_dtype=dtype, fused_attention_backend=self.backend("bs3hd"),
                          attn_mask_type=self.mask, set_zero=False)
            out, aux, rng = ext.fused_attn_fwd_qkvpacked(qkv, self.cu, is_training=True, **common)
            dqkv, _ = ext.fused_attn_bwd_qkvpacked(qkv, self.cu, rng, out, self.dout, aux, **common)
            return out, *dqkv.unbind(2)
        kv = paddle.stack([self.k, self.k], 2)
        common = dict(max_seqlen_q=s, max_seqlen_kv=skv, qkv_dtype=dtype,
                      fused_attention_backend=self.backend("bshd_bs2hd"), set_zero=False)
        out, aux, rng = ext.fused_attn_fwd_kvpacked(self.q, kv, self.cu, self.cu, is_training=True,
                                                    **common)
        dq, dkv, _ = ext.fused_attn_bwd_kvpacked(self.q, kv, self.cu, self.cu, rng, out, self.dout,
                                                 aux, **common)
        return out, dq, *dkv.unbind(2)

    def separate(self):
        from transformer_engine.paddle import constants, cpp_extensions as ext
        s, skv = self.lengths
        common = dict(max_seqlen_q=s, max_seqlen_kv=skv, qkv_dtype=constants.TE_DType[self.q.dtype],
                      fused_attention_backend=self.backend("bshd_bshd_bshd"), set_zero=False,
                      qkv_layout="bshd_bshd_bshd", attn_mask_type=self.mask)
        tensors = (self.q, self.k, self.k, self.cu, self.cu)
        out, aux, rng = ext.fused_attn_fwd(*tensors, is_training=True, **common)
        assert aux.shape == [*out.shape[:1], out.shape[2], s, 1] and rng.shape == [2]
        dq, dk, dv, dbias = ext.fused_attn_bwd(*tensors, rng, out, self.dout, aux, **common)
        assert dbias is None
        return out, dq, dk, dv

    def check(self, results):
        """As TE: every element, of random tensors a fiftieth of normal; and valid rows far closer."""
        expected = reference(self.q, self.k, self.k, self.hidden, self.dout)
        valid = reference(self.q, self.k, self.k, self.hidden, only_valid(self.dout, self.actual))
        for x, y, z in zip(results, expected, valid):
            close(x, y, rtol=1e-3, atol=1e-2)
            close(x, only_valid(z, self.actual), rtol=2e-2, atol=5e-4)


SIXTEEN_BITS = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
LONG = pytest.mark.parametrize("s, d", [(1024, 64), (2048, 128)])


@SIXTEEN_BITS
@pytest.mark.parametrize("causal", [True, False])
def test_self_attention(dtype, causal):
    case = Operators(2, 512, 512, 12, 64, dtype, causal)
    case.check(case.packed())


@SIXTEEN_BITS
def test_cross_attention(dtype):
    case = Operators(2, 128, 512, 12, 64, dtype, causal=False)
    case.check(case.packed())


@SIXTEEN_BITS
@LONG
def test_long_self_attention(length, s, d, dtype):
    case = Operators(2, length(s), length(s), 16, d, dtype, causal=True)
    case.check(case.packed())


@SIXTEEN_BITS
@LONG
@pytest.mark.parametrize("causal", [False, True])
def test_separate_tensors(length, s, d, dtype, causal):
    case = Operators(2, length(s), length(s), 16, d, dtype, causal)
    case.check(case.separate())
