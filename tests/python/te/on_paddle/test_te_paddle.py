# SPDX-License-Identifier: Apache-2.0
"""tessera.te.paddle: names, options, what is refused. TransformerEngine's own cases are in
test_te_paddle_cases.py."""

import importlib
import inspect
import logging
import warnings

import pytest

paddle = pytest.importorskip("paddle")

import paddle.nn.functional as F  # noqa: E402

from tessera import _explain  # noqa: E402
from tessera._call import _description, _prepared  # noqa: E402
from tessera.te import paddle as te  # noqa: E402
from tessera.te import transformer_engine_paddle as tex  # noqa: E402
from tessera.te.paddle import constants, cpp_extensions as ext  # noqa: E402
from tessera.te.paddle.layer import attention as layer  # noqa: E402

B, S, H, D = 2, 12, 4, 8


def randoms(*shapes, seed=6):
    paddle.seed(seed)
    found = [paddle.randn(shape) for shape in shapes]
    for x in found:
        x.stop_gradient = False
    return found


def qkv(groups=H, skv=S):
    return randoms([B, S, H, D], [B, skv, groups, D], [B, skv, groups, D])


def padding(*lengths, skv=S):
    """True = hidden, [b, 1, s, skv]."""
    ends = paddle.to_tensor(lengths).reshape([-1, 1, 1, 1])
    i, j = paddle.arange(S).unsqueeze(1), paddle.arange(skv)
    return paddle.logical_or(i >= ends, j >= ends)


def close(x, y, atol=2e-5):
    assert list(x.shape) == list(y.shape)
    assert float((x - y).abs().max()) <= atol


def both_backends(arguments, q, k, v, *call, **options):
    """[out, gradients of all that wants one] of each."""
    wanted = [x for x in call if isinstance(x, paddle.Tensor) and not x.stop_gradient]
    results = []
    for backend in ("transformer_engine", "paddle"):
        module = te.DotProductAttention(*arguments, attention_dropout=0.0, backend=backend, **options)
        out = module(q, k, v, *call)
        results.append([out, *paddle.grad((out[:, :5] ** 2).sum(), [q, k, v, *wanted])])
    return results


# ---- the core layer ----

@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask_type", ["causal", "padding", "no_mask"])
def test_both_backends_agree(mask_type, groups):
    q, k, v = qkv(groups)
    mask = padding(9, 5) if mask_type == "padding" else None
    ours, theirs = both_backends((H, D, groups), q, k, v, mask, attn_mask_type=mask_type)
    close(ours[0][:, :5], theirs[0][:, :5])
    for x, y in zip(ours[1:], theirs[1:]):
        close(x, y)
    if mask is not None:
        assert float(ours[0][1, 5:].abs().max()) == 0


def test_any_mask():
    q, k, v = qkv()
    mask = paddle.randn([B, 1, S, S]) > 0
    mask[:, :, :, 0] = False
    ours, theirs = both_backends((H, D), q, k, v, mask, attn_mask_type="padding")
    for x, y in zip(ours, theirs):
        close(x, y)


@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_bias(bias_type):
    q, k, v = qkv()
    bias, = randoms([1, H, S, S])
    ours, theirs = both_backends((H, D), q, k, v, None, bias_type, bias)
    for x, y in zip(ours, theirs):
        close(x, y)


def test_cross_attention_needs_a_mask():
    q, k, v = qkv(skv=7)
    module = te.DotProductAttention(H, D, attention_type="cross", attn_mask_type="padding")
    with pytest.raises(AssertionError, match="must be provided for cross attention"):
        module(q, k, v)
    ours, theirs = both_backends((H, D), q, k, v, padding(6, 7, skv=7), attn_mask_type="padding",
                                 attention_type="cross")
    for x, y in zip(ours[1:], theirs[1:]):
        close(x, y)


def test_dropout_is_for_training():
    q, k, v = qkv()
    module = te.DotProductAttention(H, D, attention_dropout=0.5)
    paddle.seed(1)
    first = module(q, k, v)
    paddle.seed(1)
    close(first, module(q, k, v), 0)
    module.eval()
    close(module(q, k, v), te.DotProductAttention(H, D, attention_dropout=0.0)(q, k, v), 0)
    assert float((first - module(q, k, v)).abs().max()) > 0


def test_switches(monkeypatch, caplog):
    q, k, v = qkv()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.warns(UserWarning, match="falling back to Paddle"):
        module = te.DotProductAttention(H, D, attention_dropout=0.0)
    assert module.backend == "paddle"
    monkeypatch.delenv("NVTE_FUSED_ATTN")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    module = te.DotProductAttention(H, D, attention_dropout=0.0)
    assert module.deterministic and module.backend == "transformer_engine"
    for name in ("DotProductAttention", "FusedAttnFunc"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    module(q, k, v)
    assert "Running with FusedAttention backend" in caplog.text and "config={" in caplog.text


def test_where_no_kernel_can_paddle_does(monkeypatch):
    q, k, v = qkv()
    module = te.DotProductAttention(H, D, attention_dropout=0.0)
    expected = module(q, k, v)
    monkeypatch.setattr(tex, "get_fused_attn_backend",
                        lambda *_: constants.FusedAttnBackend["No_Backend"])
    with pytest.warns(UserWarning, match="falling back to Paddle"):
        close(module(q, k, v), expected)


def test_recompute():
    q, k, v = qkv()
    module = te.DotProductAttention(H, D, attention_dropout=0.3)
    results = []
    for call in (module, lambda *x: te.recompute(module, *x, use_reentrant=False)):
        paddle.seed(2)
        out = call(q, k, v)
        results.append([out, *paddle.grad(out.square().sum(), [q, k, v])])
    for x, y in zip(*results):
        close(x, y, 0)


@pytest.mark.parametrize("arguments, message", [
    (dict(attn_mask_type="padding_causal"), "attn_mask_type='padding_causal'"),
    (dict(attention_type="both"), "attention_type='both'"),
    (dict(backend="torch"), "backend='torch'")])
def test_bad_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        te.DotProductAttention(H, D, **arguments)


def test_bad_tensors():
    q, k, v = qkv()
    module = te.DotProductAttention(H, D)
    with pytest.raises(AssertionError, match="same shape"):
        module(q, k, v[:, :5])
    with pytest.raises(AssertionError, match="num_gqa_group"):
        module(q, k[:, :, :2], v[:, :, :2])
    with pytest.raises(ValueError, match="core_attention_bias_type='alibi'"):
        module(q, k, v, None, "alibi")


# ---- the operators ----

CU = [0, 9, 14]


@pytest.mark.parametrize("bias_type", ["no_bias", "post_scale_bias"])
@pytest.mark.parametrize("mask_type", ["causal", "padding", "no_mask"])
def test_functions_by_layout(mask_type, bias_type):
    """The three functions beside the layer, gradients of packed tensors included."""
    q, k, v = qkv()
    bias, = randoms([1, H, S, S], seed=9) if bias_type != "no_bias" else [None]
    cu = paddle.to_tensor(CU, dtype="int32")
    mask = padding(9, 5) if mask_type == "padding" else None
    module = te.DotProductAttention(H, D, attention_dropout=0.0, attn_mask_type=mask_type)
    expected = module(q, k, v, mask, bias_type, bias)
    inputs = [q, k, v] + [bias] * (bias is not None)
    gradients = paddle.grad(expected.sin().sum(), inputs)
    rest = (D ** -0.5, constants.TE_DType[q.dtype], 0.0, True)
    last = (bias_type, mask_type, True, constants.FusedAttnBackend["F16_arbitrary_seqlen"])
    packed = paddle.stack([q, k, v], 2), paddle.stack([k, v], 2)
    for out in (layer.FusedAttnFunc.apply(q, k, v, cu, cu, bias, S, S, *rest, "bshd_bshd_bshd", *last),
                layer.FusedAttnFuncPackedQKV.apply(packed[0], cu, bias, S, *rest, "bs3hd", *last),
                layer.FusedAttnFuncPackedKV.apply(q, packed[1], cu, cu, bias, S, S, *rest,
                                                  "bshd_bs2hd", *last)):
        close(out, expected, 1e-6)  # lengths here, a mask in the layer
        for x, y in zip(paddle.grad(out.sin().sum(), inputs), gradients):
            close(x, y, 1e-5)


def test_dropout_of_the_operators():
    q, k, v = (x.detach() for x in qkv())
    cu = paddle.to_tensor([0, S, 2 * S], dtype="int32")
    common = dict(max_seqlen_q=S, max_seqlen_kv=S, qkv_dtype=tex.DType.kFloat32, dropout=0.5,
                  fused_attention_backend=constants.FusedAttnBackend["F16_arbitrary_seqlen"])
    out, aux, state = ext.fused_attn_fwd(q, k, v, cu, cu, True, **common)
    assert aux.shape == [B, H, S, 1] and aux.dtype == paddle.float32 and state.shape == [2]
    import tessera.paddle as tp
    close(out, tp.attention(q, k, v, dropout_p=0.5, rng_state=state), 0)
    grads = ext.fused_attn_bwd(q, k, v, cu, cu, state, out, out, aux, **common)
    o, lse = tp.attention(q, k, v, dropout_p=0.5, rng_state=state, return_lse=True)
    theirs = tp.attention_backward(out, q, k, v, o, lse, dropout_p=0.5, rng_state=state)
    for x, y in zip(grads, (theirs.dq, theirs.dk, theirs.dv)):
        close(x, y, 0)
    out, aux, _ = ext.fused_attn_fwd(q, k, v, cu, cu, False, **common)
    assert aux is None
    close(out, tp.attention(q, k, v), 0)


@pytest.mark.parametrize("change, message", [
    (dict(max_seqlen_q=5), "max_seqlen_q=5"), (dict(qkv_layout="sbhd_sbhd_sbhd"), "qkv_layout"),
    (dict(attn_mask_type="arbitrary"), "attn_mask_type"), (dict(bias_type="alibi"), "bias_type"),
    (dict(bias_type="post_scale_bias"), "Bias=None")])
def test_bad_operands(change, message):
    q, k, v = qkv()
    cu = paddle.to_tensor([0, S, 2 * S], dtype="int32")
    common = dict(max_seqlen_q=S, max_seqlen_kv=S, qkv_dtype=tex.DType.kFloat32,
                  fused_attention_backend=constants.FusedAttnBackend["F16_arbitrary_seqlen"])
    with pytest.raises(ValueError, match=message):
        ext.fused_attn_fwd(q, k, v, cu, cu, True, **{**common, **change})
    with pytest.raises(AssertionError, match="does not support"):
        ext.fused_attn_fwd(q, k, v, cu, cu, True, **dict(
            common, fused_attention_backend=constants.FusedAttnBackend["No_Backend"]))


def test_mask_to_cu_seqlens():
    q, kv = ext.mask_to_cu_seqlens(padding(9, 5), need_kv=True)
    assert q.tolist() == kv.tolist() == CU and q.dtype == paddle.int32
    q, kv = ext.mask_to_cu_seqlens(padding(9, 5))
    assert q.tolist() == CU and kv is None


def test_backends_of_problems():
    def ask(dtype, head_size=64, heads=4, groups=2):
        return tex.get_fused_attn_backend(
            dtype, dtype, tex.get_nvte_qkv_layout("bshd_bshd_bshd"),
            constants.AttnBiasType["post_scale_bias"], constants.AttnMaskType["causal"], 0.1, heads,
            groups, 128, 128, head_size)
    known = constants.FusedAttnBackend
    for dtype in ("kFloat16", "kBFloat16", "kFloat32"):
        assert ask(tex.DType[dtype]) == known["F16_arbitrary_seqlen"]
    assert ask(tex.DType.kByte) == known["No_Backend"]
    with pytest.raises(ValueError, match="qkv_layout='bhsd'"):
        tex.get_nvte_qkv_layout("bhsd")


@pytest.mark.parametrize("mask", constants.AttnMaskTypes)
@pytest.mark.parametrize("bias", ["no_bias", "pre_scale_bias", "post_scale_bias"])
def test_what_is_asked_is_what_runs(mask, bias, monkeypatch):
    """The question describes the Call that fused_attn_fwd then makes."""
    def calls_of(function):
        found = []

        class Spy(_description.Description):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                found.append(self.call)
        for module in (_explain, _prepared):
            monkeypatch.setattr(module, "Description", Spy)
        _prepared._kept.clear()
        tex._has_backend.cache_clear()
        function()
        return [call.text for call in found]

    q, k, v = qkv()
    kind, cu = constants.AttnBiasType[bias], paddle.to_tensor([0, S, 2 * S], dtype="int32")
    dtype, matrix = tex.DType.kFloat32, paddle.ones([1, H, S, S])
    asked = calls_of(lambda: tex.get_fused_attn_backend(
        dtype, dtype, tex.get_nvte_qkv_layout("bshd_bshd_bshd"), kind, constants.AttnMaskType[mask], 0.1, H, k.shape[2],
        S, S, D))
    ran = calls_of(lambda: ext.fused_attn_fwd(
        q, k, v, cu, cu, True, S, S, dtype, constants.FusedAttnBackend["F16_arbitrary_seqlen"], dropout=0.1,
        Bias=None if bias == "no_bias" else matrix, bias_type=bias, attn_mask_type=mask))
    assert asked == ran and len(ran) == 1


def test_a_question_without_an_answer():
    """Heads of k and v that do not divide those of q have no backend, and no error, as in TE."""
    dtype = tex.DType.kBFloat16
    assert tex.get_fused_attn_backend(
        dtype, dtype, tex.get_nvte_qkv_layout("bshd_bshd_bshd"), constants.AttnBiasType["no_bias"],
        constants.AttnMaskType["no_mask"], 0.0, 4, 3, 8, 8, 64) == constants.FusedAttnBackend["No_Backend"]


# ---- multi-head attention ----

WIDTH = H * D


def by_linear(module, x, weight, bias):
    return F.linear(x, weight.T if module.backend == "transformer_engine" else weight, bias)


@pytest.mark.parametrize("backend", ["transformer_engine", "paddle"])
@pytest.mark.parametrize("groups", [2, 4])
def test_self_attention(groups, backend):
    """Beside its own parts, in TE's order of features."""
    paddle.seed(4)
    module = te.MultiHeadAttention(WIDTH, H, attention_dropout=0.0, num_gqa_groups=groups,
                                   backend=backend)
    x, = randoms([B, S, WIDTH])
    mixed = by_linear(module, x, module.qkv.weight, module.qkv.bias)
    mixed = mixed.reshape([B, S, H // groups + 2, groups, D])
    q = mixed[:, :, :-2].reshape([B, S, H, D])
    context = module.core_attention(q, mixed[:, :, -2], mixed[:, :, -1])
    expected = by_linear(module, context.flatten(2), module.proj.weight, module.proj.bias)
    close(module(x), expected, 1e-5)
    close(module(x, recompute_core_attention=True), expected, 1e-5)
    flat = te.MultiHeadAttention(WIDTH, H, attention_dropout=0.0, num_gqa_groups=groups,
                                 backend=backend, max_sequence_length=S)
    flat.set_state_dict(module.state_dict())
    close(flat(x.flatten(0, 1)), expected.flatten(0, 1), 1e-5)
    shape = [WIDTH + 2 * WIDTH * groups // H, WIDTH]
    assert module.qkv.weight.shape == (shape if backend == "transformer_engine" else shape[::-1])


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_input_layernorm(normalization, zero_centered):
    module = te.MultiHeadAttention(WIDTH, H, attention_dropout=0.0, input_layernorm=True,
                                   return_layernorm_output=True, normalization=normalization,
                                   zero_centered_gamma=zero_centered, layernorm_epsilon=1e-3)
    names = {"ln_weight", "weight", "bias"} | ({"ln_bias"} if normalization == "LayerNorm" else set())
    assert {name.split(".")[1] for name in module.state_dict() if name.startswith("layernorm_qkv")} == names
    x, = randoms([B, S, WIDTH])
    output, normalised = module(x)
    if normalization == "LayerNorm":
        close(normalised, F.layer_norm(x, [WIDTH], epsilon=1e-3))
    else:
        close(normalised, x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))
    plain = te.MultiHeadAttention(WIDTH, H, attention_dropout=0.0)
    plain.set_state_dict({name.replace("layernorm_qkv", "qkv"): value
                          for name, value in module.state_dict().items() if ".ln_" not in name})
    close(output, plain(normalised), 1e-5)
    output.sum().backward()
    assert module.layernorm_qkv.ln_weight.grad is not None


def test_cross_attention_layer():
    module = te.MultiHeadAttention(WIDTH, H, attention_dropout=0.0, attention_type="cross",
                                   attn_mask_type="padding", num_gqa_groups=2)
    x, encoded = randoms([B, S, WIDTH], [B, 7, WIDTH])
    mask = padding(6, 7, skv=7)
    q = by_linear(module, x, module.query_layer.weight, module.query_layer.bias).reshape([B, S, H, D])
    kv = by_linear(module, encoded, module.key_value.weight, module.key_value.bias)
    k, v = kv.reshape([B, 7, 4, D]).chunk(2, 2)
    context = module.core_attention(q, k, v, mask)
    expected = by_linear(module, context.flatten(2), module.proj.weight, module.proj.bias)
    close(module(x, mask, encoded), expected, 1e-5)
    with pytest.raises(AssertionError, match="boolean"):
        module(x, mask.astype("float32"), encoded)


def test_rotary():
    rope = te.RotaryPositionEmbedding(D, 32)
    cos, sin = rope(S)
    assert cos.shape == sin.shape == [1, S, 1, D]
    q, k, _ = qkv()
    rotated, _ = layer.apply_rotary_pos_emb(q, k, cos, sin)
    close(rotated[:, 0], q[:, 0], 0)
    # A rotation of pairs (i, i + d/2): lengths stay, and products know differences only.
    close(rotated.square().sum(-1), q.square().sum(-1), 1e-4)
    same = q[:, :1].expand([B, S, H, D])
    a, b = layer.apply_rotary_pos_emb(same, same, cos, sin)
    close((a[:, 2] * b[:, 5]).sum(-1), (a[:, 6] * b[:, 9]).sum(-1), 1e-4)
    angle = 3 * 10000.0 ** (-2 / D)
    one = paddle.zeros([1, S, 1, D])
    one[..., 1] = 1.0
    turned, _ = layer.apply_rotary_pos_emb(one, one, cos, sin)
    close(turned[0, 3, 0, 1], paddle.cos(paddle.to_tensor(angle)), 1e-5)
    close(turned[0, 3, 0, 1 + D // 2], paddle.sin(paddle.to_tensor(angle)), 1e-5)
    ids = paddle.arange(S).unsqueeze(0).expand([B, S])
    close(layer.apply_rotary_pos_emb(q, k, cos, sin, ids)[1],
          layer.apply_rotary_pos_emb(q, k, cos, sin)[1], 0)
    module = te.MultiHeadAttention(WIDTH, H, attention_dropout=0.0)
    x, = randoms([B, S, WIDTH])
    assert float((module(x, rotary_pos_emb=(cos, sin)) - module(x)).abs().max()) > 1e-3


@pytest.mark.parametrize("options, message", [
    (dict(fuse_wgrad_accumulation=True), "fuse_wgrad_accumulation=True"),
    (dict(input_layernorm=True, normalization="BatchNorm"), "normalization='BatchNorm'")])
def test_bad_layers(options, message):
    with pytest.raises(ValueError, match=message):
        te.MultiHeadAttention(WIDTH, H, **options)


def test_bad_hidden_states():
    module = te.MultiHeadAttention(WIDTH, H)
    with pytest.raises(ValueError, match="2 or 3 dimensions, got 1"):
        module(paddle.ones([WIDTH]))
    with pytest.raises(AssertionError, match="max_sequence_length"):
        module(paddle.ones([S, WIDTH]))


# ---- names ----

@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP",
                                  "TransformerLayer", "FusedScaleMaskSoftmax", "fp8_autocast"])
def test_what_is_not_here_says_so(name):
    with pytest.raises(AttributeError, match="does not have this part"):
        getattr(te, name)
    with pytest.raises(ImportError, match="does not have this part"):
        exec(f"from tessera.te.paddle import {name}")


def test_signatures_are_tes():
    def names(function):
        return list(inspect.signature(function).parameters)
    assert names(te.DotProductAttention.__init__)[1:] == [
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "attn_mask_type",
        "attention_type", "tp_size", "backend"]
    assert names(te.DotProductAttention.forward)[1:] == [
        "query_layer", "key_layer", "value_layer", "attention_mask", "core_attention_bias_type",
        "core_attention_bias", "set_zero"]
    assert names(te.MultiHeadAttention.__init__)[1:] == [
        "hidden_size", "num_attention_heads", "attention_dropout", "layernorm_epsilon", "weight_attr",
        "bias_attr", "max_sequence_length", "attn_mask_type", "params_dtype",
        "return_layernorm_output", "input_layernorm", "attention_type", "normalization",
        "zero_centered_gamma", "set_parallel_mode", "sequence_parallel", "tp_group", "num_gqa_groups",
        "fuse_wgrad_accumulation", "rng_state_name", "backend"]
    assert names(ext.fused_attn_fwd) == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "is_training", "max_seqlen_q", "max_seqlen_kv",
        "qkv_dtype", "fused_attention_backend", "Bias", "attn_scale", "dropout", "set_zero",
        "qkv_layout", "bias_type", "attn_mask_type"]
    assert names(layer.FusedAttnFunc.forward)[1:] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "attn_bias", "max_seqlen_q", "max_seqlen_kv",
        "attn_scale", "qkv_dtype", "dropout_p", "set_zero", "qkv_layout", "attn_bias_type",
        "attn_mask_type", "is_training", "fused_attention_backend"]


def test_module_paths():
    for path in ("paddle", "paddle.layer", "paddle.layer.attention", "paddle.cpp_extensions",
                 "paddle.constants", "paddle.distributed", "paddle.recompute", "paddle.utils",
                 "transformer_engine_paddle"):
        importlib.import_module(f"tessera.te.{path}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.DotProductAttention(H, D)
    from tessera.te.paddle.distributed import get_tp_group_and_world_size, track_rng_state
    assert get_tp_group_and_world_size(None) == (None, 1)
    with track_rng_state(enable=False, name="local_seed"):
        pass
    from tessera.te.paddle.utils import divide
    with pytest.raises(AssertionError, match="7 is not divisible by 2"):
        divide(7, 2)


def test_named_states_of_dropout():
    """Ranks of tensor parallelism draw from states of their own."""
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker
    from tessera.te.paddle.distributed import track_rng_state
    tracker = get_rng_state_tracker()
    if "tessera_test" not in tracker.states_:
        tracker.add("tessera_test", 12345)
    module, inputs = te.DotProductAttention(H, D, attention_dropout=0.5), qkv()
    before = paddle.get_rng_state()
    with track_rng_state(enable=True, name="tessera_test"):
        first = module(*inputs)
    with track_rng_state(enable=True, name="tessera_test"):
        second = module(*inputs)
    assert float((first - second).abs().max()) > 0
    assert paddle.get_rng_state()[0].__getstate__() == before[0].__getstate__()
