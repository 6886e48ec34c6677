# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax.flax.TransformerLayer: TE's parameters, the sum of its parts, a cache that continues."""

import functools

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen as nn  # noqa: E402

import tessera.jax  # noqa: E402
from tessera.te.jax.flax import MultiHeadAttention, TransformerLayer, TransformerLayerType  # noqa: E402
from tessera.te.jax.flax.transformer import RelativePositionBiases  # noqa: E402

KEY = jax.random.key(5)
DECODER = TransformerLayerType.DECODER
Layer = functools.partial(TransformerLayer, hidden_size=16, mlp_hidden_size=24, num_attention_heads=2,
                          hidden_dropout=0.0, attention_dropout=0.0)
NORM = {"scale": (16,), "ln_bias": (16,)}
ATTENTION = {"qkv/kernel": (16, 3, 16), "qkv/scale": (16,), "qkv/ln_bias": (16,), "out/kernel": (16, 16)}


def hidden(s=6, dtype=jnp.float32, key=KEY):
    return jax.random.normal(key, (2, s, 16), dtype)


def random(variables):
    """Parameters of which none is 0 or 1 by its initialiser."""
    leaves, tree = jax.tree.flatten(nn.meta.unbox(variables))
    keys = jax.random.split(KEY, len(leaves))
    return jax.tree.unflatten(tree, [x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
                                     for key, x in zip(keys, leaves)])


def prefixed(prefix, shapes):
    return {f"{prefix}/{name}": shape for name, shape in shapes.items()}


@pytest.mark.parametrize("fields, expected", [
    ({}, {**prefixed("attention", ATTENTION), "relpos_bias/rel_embedding": (2, 32),
          **prefixed("mlp", {"wi_kernel": (16, 1, 24), "wo_kernel": (24, 16), **NORM})}),
    (dict(layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), use_bias=True, output_layernorm=True,
          enable_relative_embedding=False, low_rank_adaptation_scope="mlp", low_rank_adaptation_dim=3),
     {**prefixed("attention", {"qkv/kernel": (16, 3, 16), "qkv/bias": (3, 16), "out/kernel": (16, 16),
                               "out/bias": (16,)}),
      **prefixed("mlp", {"wi_kernel": (16, 2, 24), "wi_bias": (2, 24), "wo_kernel": (24, 16), "wo_bias": (16,),
                         "scale": (16,), "wi_lora_a_kernel": (16, 2, 3), "wi_lora_b_kernel": (2, 3, 24),
                         "wo_lora_a_kernel": (24, 3), "wo_lora_b_kernel": (3, 16)}),
      "output_layernorm/scale": (16,)}),
    (dict(layer_type=DECODER, num_gqa_groups=1, enable_relative_embedding=False),
     {**{f"{name}/{part}": shape for name in ("self_attention", "encoder_decoder_attention") for part, shape in {
         "query/kernel": (16, 16), "query/scale": (16,), "query/ln_bias": (16,), "kv/kernel": (16, 2, 8),
         "out/kernel": (16, 16)}.items()},
      **prefixed("mlp", {"wi_kernel": (16, 1, 24), "wo_kernel": (24, 16), **NORM})})])
def test_parameters_have_their_names(fields, expected):
    more = (hidden(4), None, jnp.zeros((2, 1, 6, 4), bool)) if fields.get("layer_type") == DECODER else ()
    variables = jax.eval_shape(lambda: Layer(**fields).init(KEY, hidden(), *more))
    flat = jax.tree.leaves_with_path(nn.meta.unbox(variables["params"]))
    assert {"/".join(part.key for part in path): x.shape for path, x in flat} == expected


def normed(x, p, rms=False):
    x = x - (0 if rms else x.mean(-1, keepdims=True))
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"] + (0 if rms else p["ln_bias"])


@pytest.mark.parametrize("after_norm", [False, True])
def test_encoder_is_what_its_parts_are(after_norm):
    x = hidden()
    layer = Layer(use_bias=True, mlp_activations=("silu", "linear"), self_attn_mask_type="no_mask",
                  apply_residual_connection_post_layernorm=after_norm)
    variables = random(layer.init(KEY, x))
    p = variables["params"]
    attention = MultiHeadAttention(8, 2, use_bias=True, attn_mask_type="no_mask", return_layernorm_output=True)
    bias = RelativePositionBiases(32, 128, 2).apply({"params": p["relpos_bias"]}, 6, 6)
    y, norm = attention.apply({"params": p["attention"]}, x, x, None, bias)
    y += norm if after_norm else x
    m = p["mlp"]
    inner = normed(y, m)
    wide = jnp.einsum("bsn,nam->bsam", inner, m["wi_kernel"]) + m["wi_bias"]
    out = (jax.nn.silu(wide[:, :, 0]) * wide[:, :, 1]) @ m["wo_kernel"] + m["wo_bias"]
    np.testing.assert_allclose(layer.apply(variables, x), out + (inner if after_norm else y), atol=1e-5)


def test_decoder_is_what_its_parts_are():
    x, encoded = hidden(), hidden(4, key=jax.random.key(6))
    hide = jnp.zeros((2, 1, 6, 4), bool).at[1, :, :, 3].set(True)
    layer = Layer(layer_type=DECODER, enable_relative_embedding=False, output_layernorm=True,
                  layernorm_type="rmsnorm", mlp_activations=("squared_relu",))
    variables = random(layer.init(KEY, x, encoded, None, hide))
    p = variables["params"]
    y, _ = MultiHeadAttention(8, 2, input_layernorm=False).apply({"params": p["self_attention"]}, x, x)
    y += x
    z, _ = MultiHeadAttention(8, 2, layernorm_type="rmsnorm", attn_mask_type="padding").apply(
        {"params": p["encoder_decoder_attention"]}, y, encoded, hide)
    z += y
    wide = normed(z, p["mlp"], rms=True) @ p["mlp"]["wi_kernel"][:, 0]
    out = jax.nn.relu(wide) ** 2 @ p["mlp"]["wo_kernel"] + z
    np.testing.assert_allclose(layer.apply(variables, x, encoded, None, hide),
                               normed(out, p["output_layernorm"], rms=True), atol=1e-4)


def test_decoder_continues_its_cache():
    """With a relative bias, of which each token takes its row."""
    x, encoded, hide = hidden(5), hidden(4), jnp.zeros((2, 1, 5, 4), bool)
    layer = Layer(layer_type=DECODER)
    variables = layer.init(KEY, x, encoded, None, hide, decode=True)
    params, cache = {"params": random(variables["params"])}, variables["cache"]
    whole = layer.apply(params, x, encoded, None, hide)

    @jax.jit
    def step(cache, token):
        return layer.apply({**params, "cache": cache}, token, encoded, None, hide[:, :, :1], decode=True,
                           max_decode_length=5, mutable=["cache"])
    for i in range(5):
        out, changed = step(cache, x[:, i:i + 1])
        cache = changed["cache"]
        np.testing.assert_allclose(out, whole[:, i:i + 1], atol=1e-5)
    with pytest.raises(ValueError, match="TransformerLayer: max_decode_length=None: must be the cache's length"):
        layer.apply({**params, "cache": cache}, x[:, :1], encoded, None, hide[:, :, :1], decode=True,
                    mutable=["cache"])


def test_dropout_and_gradients():
    """drop_path leaves whole samples out; every parameter has a gradient; the dtype stays."""
    x = hidden(dtype="bfloat16")
    layer = Layer(hidden_dropout=0.2, hidden_dropout_dims=(1,), attention_dropout=0.1, intermediate_dropout=0.1)
    variables = layer.init({"params": KEY, "dropout": KEY}, x)

    def loss(variables, key):
        out = layer.apply(variables, x, rngs={"dropout": key})
        assert out.dtype == x.dtype
        return (out.astype(jnp.float32) ** 2).sum()
    grads = jax.tree.leaves(jax.grad(loss)(variables, KEY))
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in grads)
    plain = layer.apply(variables, x, deterministic=True)
    assert not np.array_equal(plain, layer.apply(variables, x, rngs={"dropout": KEY}))
    np.testing.assert_array_equal(plain, Layer().apply(variables, x))
    gone = Layer(drop_path=0.999999).apply(variables, x, rngs={"dropout": KEY})
    np.testing.assert_array_equal(gone, x)


def test_sequence_first():
    x = hidden()
    variables = Layer().init(KEY, x)
    turned = Layer(transpose_batch_sequence=True).apply(variables, x.swapaxes(0, 1))
    np.testing.assert_allclose(turned.swapaxes(0, 1), Layer().apply(variables, x), atol=1e-6)


def test_activations():
    """GPT-OSS's clamped pair, named in either order, and a function."""
    x = 4 * hidden()
    variables = Layer(mlp_activations=("clamped_silu", "clamped_linear"), enable_relative_embedding=False).init(KEY, x)
    outs = [Layer(mlp_activations=names, enable_relative_embedding=False, mlp_activation_params=params).apply(
        variables, x) for names, params in (
            (("clamped_silu", "clamped_linear"), None), (("clamped_linear", "clamped_silu"), {"limit": 7.0}),
            (("clamped_silu", "clamped_linear"), {"limit": 0.5}),
            ((lambda x: x * jax.nn.sigmoid(1.702 * x), lambda x: x + 1), None))]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert np.abs(outs[0] - outs[2]).max() > 0.1
    np.testing.assert_allclose(outs[0], outs[3], atol=1e-4)  # nothing reaches 7


@pytest.mark.parametrize("fields, more, said", [
    (dict(num_attention_heads=3), {}, "hidden_size=16: must be a multiple of num_attention_heads=3"),
    (dict(hidden_size=32), {}, r"inputs.shape=\(2, 6, 16\): must be \[batch, sequence, hidden_size=32\]"),
    ({}, dict(decode=True), "decode=True: must be False for an encoder"),
    (dict(layer_type="decoder"), {}, "layer_type='decoder': must be a TransformerLayerType"),
    (dict(layer_type=DECODER), {}, "encoded=None: must be given to a decoder"),
    (dict(mlp_activations=("swish7",)), {}, "mlp_activations=.*'swish7'.*: must be functions, names of"),
    (dict(mlp_activation_params={"beta": 1}), {}, "mlp_activation_params=.*: must be among limit, alpha"),
    (dict(layernorm_type="batch", output_layernorm=True), {}, "layernorm_type='batch': must be"),
    (dict(score_mod=max), {}, "score_mod=max: tessera.te does not have")])
def test_what_does_not_fit(fields, more, said):
    with pytest.raises((ValueError, tessera.jax.Refused), match=said):
        jax.eval_shape(lambda: Layer(**fields).init(KEY, hidden(), **more))
