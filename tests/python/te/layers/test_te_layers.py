# SPDX-License-Identifier: Apache-2.0
"""TE's MultiheadAttention and TransformerLayer against PyTorch's own operators, in fp64."""

from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from tessera.te.pytorch import (  # noqa: E402
    InferenceParams, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer,
    apply_rotary_pos_emb)
from tessera.te.pytorch._linear import Norm  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_device")
HIDDEN, H, G, D = 24, 6, 3, 4


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def named(module):
    return {name for name, _ in module.named_parameters()}


def norm(module, x, prefix="layer_norm_", zero_centered=False):
    weight = getattr(module, f"{prefix}weight") + zero_centered
    bias = getattr(module, f"{prefix}bias")
    if bias is None:
        return F.rms_norm(x, (x.shape[-1],), weight, module.eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, module.eps)


def sdpa(q, k, v, causal):
    """[b, s, h, d] -> [b, s, h * d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return o.transpose(1, 2).flatten(2)


def by_hand(module, x, causal=True, rope=None, source=None):
    """A MultiheadAttention of layout bshd from the names of its parameters."""
    first = next(getattr(module, name) for name in ("layernorm_qkv", "qkv", "layernorm_query", "query_layer")
                 if hasattr(module, name))
    if hasattr(first, "layer_norm_weight"):
        x = norm(first, x, zero_centered=first.zero_centered_gamma)

    def heads(projection, x, part):
        if hasattr(projection, f"{part}_weight"):
            y = F.linear(x, getattr(projection, f"{part}_weight"), getattr(projection, f"{part}_bias"))
            return y.unflatten(-1, (-1, D))
        y = F.linear(x, projection.weight, projection.bias)
        parts = ["query"] * (H // G) + ["key", "value"]
        if module.attention_type == "cross":
            parts = ["query"] if part == "query" else ["key", "value"]
        if parts == ["query"]:
            return y.unflatten(-1, (-1, D))
        at = [i for i, name in enumerate(parts) if name == part]
        if module.qkv_weight_interleaved:
            return y.unflatten(-1, (G, len(parts), D))[..., at, :].flatten(-3, -2)
        return y.unflatten(-1, (len(parts), G, D))[..., at, :, :].flatten(-3, -2)

    kv = first if source is None else module.key_value
    source = x if source is None else source
    q, k, v = heads(first, x, "query"), heads(kv, source, "key"), heads(kv, source, "value")
    if module.qk_norm_before_rope:
        q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = (apply_rotary_pos_emb(y, rope, "bshd", interleaved=module.rotary_pos_interleaved)
                for y in (q, k))
    if not module.qk_norm_before_rope:
        q, k = module.q_norm(q), module.k_norm(k)
    return F.linear(sdpa(q, k, v, causal), module.proj.weight, module.proj.bias)


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "fused": {"fuse_qkv_params": True},
    "fused, apart": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "norm": {"input_layernorm": True},
    "norm, fused": {"input_layernorm": True, "fuse_qkv_params": True, "normalization": "RMSNorm"},
    "zero-centred": {"input_layernorm": True, "zero_centered_gamma": True},
    "L2": {"qk_norm_type": "L2Normalization"},
    "norms before rope": {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
    "layer norms of heads": {"qk_norm_type": "LayerNorm", "rotary_pos_interleaved": True},
}


def attention(**options):
    module = MultiheadAttention(HIDDEN, H, num_gqa_groups=G, attention_dropout=0.0, qkv_format="bshd",
                                **options)
    for parameter in module.parameters():  # norms at 1 and 0 would hide a mistake
        torch.nn.init.normal_(parameter, 0.3, 0.5)
    return module


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_multihead_attention(name, kind):
    module = attention(**OPTIONS[name], attention_type=kind,
                       attn_mask_type="causal" if kind == "self" else "no_mask")
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    source = None if kind == "self" else torch.randn(2, 7, HIDDEN)
    rope = RotaryPositionEmbedding(D, interleaved=module.rotary_pos_interleaved)(8) if "rope" in name or \
        "heads" in name else None
    expected = by_hand(module, x, kind == "self", rope, source)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *module.parameters()])
    # The kernels compute in fp32 at most.
    small, x32 = module.float(), x.detach().float().requires_grad_()
    out = small(x32, encoder_output=None if source is None else source.float(), rotary_pos_emb=rope)
    got = torch.autograd.grad(out.square().sum(), [x32, *small.parameters()])
    # Some gradients are sums that cancel (that of the keys' bias is 0): others say what is small.
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    torch.testing.assert_close(out.detach().double(), expected.detach(), rtol=2e-4, atol=1e-4)
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-4, atol=2e-5 * largest)


def test_names_are_tes():
    assert named(attention()) == {
        f"{layer}{kind}" for kind in ("weight", "bias")
        for layer in ("qkv.query_", "qkv.key_", "qkv.value_", "proj.")}
    assert named(attention(fuse_qkv_params=True, input_layernorm=True, qk_norm_type="RMSNorm")) == {
        "layernorm_qkv.layer_norm_weight", "layernorm_qkv.layer_norm_bias", "layernorm_qkv.weight",
        "layernorm_qkv.bias", "proj.weight", "proj.bias", "q_norm.weight", "k_norm.weight"}
    assert named(attention(attention_type="cross", bias=False)) == {
        "query_layer.weight", "key_value.key_weight", "key_value.value_weight", "proj.weight"}
    layer = TransformerLayer(HIDDEN, 48, H, layer_type="decoder", fuse_qkv_params=True, bias=False,
                             normalization="RMSNorm", output_layernorm=True)
    assert named(layer) == {
        "self_attention.qkv.weight", "self_attention.proj.weight",
        "inter_attention.layernorm_query.layer_norm_weight", "inter_attention.layernorm_query.weight",
        "inter_attention.key_value.weight", "inter_attention.proj.weight", "layernorm.weight",
        "layernorm_mlp.layer_norm_weight", "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"}


def test_a_state_dict_with_fp8_state_loads():
    layer = TransformerLayer(HIDDEN, 48, H)
    state = {name: value for name, value in layer.state_dict().items() if "_extra_state" not in name}
    layer.load_state_dict(state)
    state["layernorm_mlp._extra_state"] = torch.arange(3, dtype=torch.uint8)
    layer.load_state_dict(state)
    assert layer.state_dict()["layernorm_mlp._extra_state"].tolist() == [0, 1, 2]


def test_returns():
    module = attention(input_layernorm=True, return_bias=True, return_layernorm_output=True)
    x = torch.randn(2, 5, HIDDEN)
    out, bias, normed = module.float()(x.float())
    assert bias is module.proj.bias
    torch.testing.assert_close(normed, norm(module.layernorm_qkv, x.float()))
    whole = attention(input_layernorm=True).float()
    whole.load_state_dict(module.state_dict())
    torch.testing.assert_close(out + bias, whole(x.float()))


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x), "srelu": lambda x: F.relu(x) ** 2}


def mlp(module, x):
    x = norm(module, x)
    y = F.linear(x, module.fc1_weight, module.fc1_bias)
    name = module.activation
    gated = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "qgeglu": "qgelu", "sreglu": "srelu"}
    if name in gated:
        a, b = y.chunk(2, -1)
        y = ACTIVATIONS[gated[name]](a) * b
    elif name == "glu":
        a, b = y.chunk(2, -1)
        y = a.sigmoid() * b
    else:
        y = ACTIVATIONS[name](y)
    return F.linear(y, module.fc2_weight, module.fc2_bias), x


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "geglu", "reglu", "swiglu", "qgeglu", "sreglu", "glu"])
def test_encoder_layer(activation):
    layer = TransformerLayer(HIDDEN, 40, H, G, hidden_dropout=0.0, attention_dropout=0.0,
                             attn_input_format="bshd", activation=activation).float()
    x = torch.randn(2, 5, HIDDEN).float()
    y = x + by_hand(layer.self_attention, x)
    torch.testing.assert_close(layer(x), y + mlp(layer.layernorm_mlp, y)[0], rtol=1e-4, atol=1e-5)


def test_other_shapes_of_a_layer():
    common = dict(num_gqa_groups=G, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
    x, source = torch.randn(2, 2, 5, HIDDEN).float()
    layer = TransformerLayer(HIDDEN, 40, H, **common, parallel_attention_mlp=True).float()
    torch.testing.assert_close(
        layer(x), x + by_hand(layer.self_attention, x) + mlp(layer.layernorm_mlp, x)[0],
        rtol=1e-4, atol=1e-5)
    layer = TransformerLayer(HIDDEN, 40, H, **common, output_layernorm=True).float()
    y = x + by_hand(layer.self_attention, x)
    torch.testing.assert_close(layer(x), norm(layer.layernorm, y + mlp(layer.layernorm_mlp, y)[0], ""),
                               rtol=1e-4, atol=1e-5)
    layer = TransformerLayer(HIDDEN, 40, H, **common,
                             apply_residual_connection_post_layernorm=True).float()
    y = norm(layer.self_attention.layernorm_qkv, x) + by_hand(layer.self_attention, x)
    z, normed = mlp(layer.layernorm_mlp, y)
    torch.testing.assert_close(layer(x), normed + z, rtol=1e-4, atol=1e-5)
    layer = TransformerLayer(HIDDEN, 40, H, **common, layer_type="decoder").float()
    y = x + by_hand(layer.self_attention, x)
    y = y + by_hand(layer.inter_attention, y, False, source=source)
    torch.testing.assert_close(layer(x, encoder_output=source), y + mlp(layer.layernorm_mlp, y)[0],
                               rtol=1e-4, atol=1e-5)


def decoder(qkv_format="bshd", **options):
    layer = TransformerLayer(HIDDEN, 40, H, G, hidden_dropout=0.0, attention_dropout=0.0, layer_type="decoder",
                             attn_input_format=qkv_format, **options).float()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return layer


def test_a_decoder_turns_queries_and_keys_of_both_attentions():
    layer, rope = decoder(), RotaryPositionEmbedding(D)(8)
    x, source = torch.randn(2, 5, HIDDEN).float(), torch.randn(2, 7, HIDDEN).float()
    y = x + by_hand(layer.self_attention, x, rope=rope)
    y = y + by_hand(layer.inter_attention, y, False, rope, source)
    torch.testing.assert_close(layer(x, encoder_output=source, rotary_pos_emb=rope),
                               y + mlp(layer.layernorm_mlp, y)[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="rotary_pos_emb beside inference_params"):
        layer(x, encoder_output=source, rotary_pos_emb=rope, inference_params=InferenceParams(2, 8, G, D))


def test_a_packed_decoder_with_gaps_is_each_sequence_alone():
    """Self attention has the queries' lengths and starts for both sides, cross attention the keys' as well."""
    layer = decoder("thd", self_attn_mask_type="padding_causal", enc_dec_attn_mask_type="padding")
    x, source, lens_q, lens_k = torch.randn(9, HIDDEN).float(), torch.randn(14, HIDDEN).float(), (3, 4), (6, 5)
    numbers = [torch.tensor(n, dtype=torch.int32) for n in ((0, 3, 7), (0, 6, 11), (0, 4, 9), (0, 8, 14))]
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    out = layer(x, encoder_output=source, pad_between_seqs=True, **dict(zip(names, numbers)))
    for at, length, at_k, length_k in zip((0, 4), lens_q, (0, 8), lens_k):
        part, part_k = x[None, at:at + length], source[None, at_k:at_k + length_k]
        y = part + by_hand(layer.self_attention, part)
        y = y + by_hand(layer.inter_attention, y, False, source=part_k)
        torch.testing.assert_close(out[None, at:at + length], y + mlp(layer.layernorm_mlp, y)[0], rtol=1e-4, atol=1e-4)


def test_an_encoder_needs_the_lengths_of_queries_only():
    layer = TransformerLayer(HIDDEN, 40, H, G, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="thd",
                             self_attn_mask_type="padding_causal").float()
    x, cu_seqlens = torch.randn(9, HIDDEN).float(), torch.tensor([0, 4, 9], dtype=torch.int32)
    assert torch.equal(layer(x, cu_seqlens_q=cu_seqlens), layer(x, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens))


def test_cross_attention_has_no_drop_path():
    layer = decoder(drop_path_rate=1 - 1e-9)  # leaves the other branches out
    x, source = torch.randn(2, 5, HIDDEN).float(), torch.randn(2, 7, HIDDEN).float()
    torch.testing.assert_close(layer(x, encoder_output=source),
                               x + by_hand(layer.inter_attention, x, False, source=source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_of_heads_are_not_zero_centred(kind):
    module = MultiheadAttention(HIDDEN, H, qk_norm_type=kind, zero_centered_gamma=True)
    assert torch.equal(module.k_norm.weight, torch.ones(D))
    torch.nn.init.normal_(module.q_norm.weight)
    x = torch.randn(3, D)
    torch.testing.assert_close(module.q_norm(x), norm(module.q_norm, x, ""))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
def test_norms_of_16_bits_round_once(kind):
    """A weight that bfloat16 cannot tell from 1, beside 1, counts all the same."""
    x = torch.randn(64, HIDDEN, dtype=torch.float32).bfloat16()
    if kind == "L2Normalization":
        module = MultiheadAttention(HIDDEN, 1, qk_norm_type=kind).q_norm
        expected = x.double() * (x.double().square().sum(-1, keepdim=True) + module.eps).rsqrt()
    else:
        module = Norm(HIDDEN, 1e-5, kind, True, dtype=torch.bfloat16)
        torch.nn.init.constant_(module.weight, 0.0035)
        weight = 1 + module.weight.double()
        expected = F.rms_norm(x.double(), (HIDDEN,), weight, 1e-5) if kind == "RMSNorm" else \
            F.layer_norm(x.double(), (HIDDEN,), weight, None, 1e-5)
    got = module(x)
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().sum() <= 1.001 * (expected.bfloat16().double() - expected).abs().sum()


@pytest.mark.parametrize("options", [{}, {"output_layernorm": True}, {"layer_type": "decoder"},
                                     {"apply_residual_connection_post_layernorm": True},
                                     {"parallel_attention_mlp": True}, {"qk_norm_type": "RMSNorm"}], ids=str)
def test_a_layer_under_autocast_returns_its_dtype(options):
    layer = TransformerLayer(HIDDEN, 40, H, hidden_dropout=0.0, attention_dropout=0.0, **options).float()
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float32, requires_grad=True)
    more = {"encoder_output": torch.randn(4, 2, HIDDEN).float()} if "layer_type" in options else {}
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, **more)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, **more), rtol=5e-2, atol=5e-2)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in layer.parameters()
                                                 if p.grad is not None)
    assert layer(x, **more).dtype == torch.float32


def test_dropout_and_drop_path_are_for_training():
    layer = TransformerLayer(HIDDEN, 40, H, hidden_dropout=0.5, attention_dropout=0.1,
                             drop_path_rate=0.5).float()
    x = torch.randn(5, 2, HIDDEN).float()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_step_by_step_is_the_whole(qkv_format, grad):
    """Two layers with rotary embedding over caches give what the whole sequences give."""
    layers = [TransformerLayer(HIDDEN, 40, H, G, hidden_dropout=0.0, attention_dropout=0.0,
                               attn_input_format=qkv_format, layer_number=number,
                               self_attn_mask_type="padding_causal").float().eval() for number in (1, 2)]
    freqs = RotaryPositionEmbedding(D)(32)
    x = torch.randn(2, 9, HIDDEN).float()
    params = InferenceParams(2, 32, G, D, torch.float32, qkv_format=qkv_format)  # layers allocate

    def run(y, inference_params=None, **lengths):
        for layer in layers:
            y = layer(y, rotary_pos_emb=freqs, inference_params=inference_params, **lengths)
        return y

    def laid_out(y):
        return {"bshd": y, "sbhd": y.transpose(0, 1), "thd": y.flatten(0, 1)}[qkv_format]

    with torch.set_grad_enabled(grad):
        cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32)
        whole = run(laid_out(x), cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                    **({"max_seqlen_q": 9, "max_seqlen_kv": 9} if qkv_format == "thd" else {}))
        parts, at = [], 0
        for count in (4, 1, 1, 3):
            params.pre_step(OrderedDict([(0, count), (1, count)]))
            out = run(laid_out(x[:, at:at + count]), params)
            parts.append({"bshd": out, "sbhd": out.transpose(0, 1),
                          "thd": out.unflatten(0, (2, -1)) if qkv_format == "thd" else out}[qkv_format])
            at += count
    torch.testing.assert_close(laid_out(torch.cat(parts, 1)), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{"tp_size": 2}, {"sequence_parallel": True},
                                   {"fuse_wgrad_accumulation": True}])
@pytest.mark.parametrize("make", [lambda **given: MultiheadAttention(HIDDEN, H, **given),
                                  lambda **given: TransformerLayer(HIDDEN, 40, H, **given)])
def test_what_distributes_is_refused_by_name(make, given):
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        make(**given)


def test_bad_arguments():
    for make, text in ((lambda: MultiheadAttention(HIDDEN, H, attention_type="both"), "attention_type='both'"),
                       (lambda: MultiheadAttention(HIDDEN, H, qk_norm_type="max"), "qk_norm_type='max'"),
                       (lambda: MultiheadAttention(HIDDEN, H, layer_number=0), "layer_number=0: must be at least 1"),
                       (lambda: MultiheadAttention(HIDDEN, H, normalization="Batch",
                                                   input_layernorm=True), "normalization='Batch'"),
                       (lambda: TransformerLayer(HIDDEN, 40, H, layer_type="middle"), "layer_type='middle'"),
                       (lambda: TransformerLayer(HIDDEN, 40, H, activation="tan"), "activation='tan'"),
                       (lambda: TransformerLayer(HIDDEN, 40, H, parallel_attention_mlp=True,
                                                 layer_type="decoder"), "parallel_attention_mlp")):
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(ValueError, match="encoder_output=None"):
        attention(attention_type="cross")(torch.randn(1, 2, HIDDEN))
