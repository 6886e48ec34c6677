# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax under transformer_engine.jax's name: what is found there, that it is undone, and MaxText's call of it
(attention: cudnn_flash_te), by a stand-in with the lines of MaxText 0.2.5's cudnn_flash_attention."""
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import door_examples  # noqa: E402
import flax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import tessera.te.common.recipe  # noqa: E402
import tessera.te.jax.flax.transformer  # noqa: E402
from tessera.doors import te_jax as door  # noqa: E402

B, S, HQ, HK, D = 2, 12, 4, 2, 8


def names():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "transformer_engine")


def test_the_names_are_tesseras_and_are_given_back():
    assert not names()
    with door.install():
        import transformer_engine.jax
        from transformer_engine.common import recipe
        from transformer_engine.jax.flax.transformer import DotProductAttention
        from transformer_engine.jax.sharding import MeshResource, global_shard_guard  # noqa: F401
        assert transformer_engine.jax is tessera.te.jax and recipe is tessera.te.common.recipe
        from transformer_engine.jax.quantize.helper import is_fp8_available
        assert not is_fp8_available()[0]
        assert DotProductAttention is tessera.te.jax.flax.transformer.DotProductAttention
        with pytest.raises(ImportError, match="attention only"):
            from transformer_engine.jax import moe  # noqa: F401
        for name in ("transformer_engine.pytorch", "transformer_engine.jax.layernorm"):
            with pytest.raises(ModuleNotFoundError, match=name):
                __import__(name)
        with pytest.raises(RuntimeError, match="imported already.*replace=True"):
            door.install()
    assert not names()
    assert tessera.te.jax.__name__ == tessera.te.jax.__spec__.name == "tessera.te.jax"


def test_what_was_there_is_there_again(monkeypatch):
    theirs = type(sys)("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", theirs)
    handle = door.install(replace=True)
    assert sys.modules["transformer_engine"] is not theirs
    handle.remove()
    handle.remove()
    assert names() == ["transformer_engine"] and sys.modules["transformer_engine"] is theirs


def test_importing_the_door_puts_nothing_there():
    code = ("import sys, tessera, tessera.doors.te_jax\n"
            "print([x for x in sys.modules if x in ('transformer_engine', 'jax')])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_example(capsys):
    text = door_examples.printed("te_jax", capsys)
    assert door_examples.differences(text)[0] < 1e-5
    assert "calls of tessera in the program 1" in text
    assert text.splitlines()[-1] == "removed: No module named 'transformer_engine'"


# ---- MaxText ----

def cudnn_flash_attention(query, key, value, segment_ids, positions, packing=False, sliding_window=None, sinks=None):
    """As AttentionOp.cudnn_flash_attention, on one device."""
    from transformer_engine.jax.attention import SequenceDescriptor
    from transformer_engine.jax.flax.transformer import DotProductAttention

    def descriptor(ids):
        try:
            return SequenceDescriptor.from_segment_ids_and_pos(
                segment_ids=ids, segment_pos=positions, is_thd=True, is_segment_ids_reordered=False)
        except TypeError:
            return SequenceDescriptor.from_segment_ids_and_pos(segment_ids=ids, segment_pos=positions)

    if packing:
        mask, dummy = descriptor(segment_ids), descriptor(jnp.ones_like(segment_ids))
    else:
        seen = segment_ids[:, None, None, :, None] == segment_ids[:, None, None, None, :]  # [b, 1, 1, s, s]
        mask = jnp.where(seen, 0, 1).astype(jnp.uint8)
        dummy = jnp.zeros((1, 1, 1, S, S), jnp.uint8)
    layer = DotProductAttention(
        head_dim=D, num_attention_heads=HQ, num_gqa_groups=HK, attn_mask_type="padding_causal",
        attn_bias_type="no_bias", attention_dropout=0.0, dropout_rng_name="aqt", dtype=query.dtype,
        float32_logits=False, qkv_layout="THD_THD_THD" if packing else "BSHD_BSHD_BSHD", scale_factor=1.0,
        transpose_batch_sequence=False,
        window_size=None if sliding_window is None else [sliding_window - 1, 0],
        context_parallel_causal_load_balanced=True, context_parallel_axis="context",
        context_parallel_strategy="all_gather",
        max_segments_per_seq=4 if packing else 1, softmax_type="vanilla" if sinks is None else "learnable")
    layer = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(params=0))
    if sinks is not None:
        layer.lazy_init(*(jnp.zeros((1, S, h, D), query.dtype) for h in (HQ, HK, HK)),
                        sequence_descriptor=dummy)
        path, = (path for path, _ in nnx.to_flat_state(nnx.state(layer)) if path[-1] == "softmax_offset")
        nnx.update(layer, nnx.from_flat_state([(path, nnx.Param(jnp.asarray(sinks).reshape(1, HQ, 1, 1)))]))
    return layer(query, key, value, sequence_descriptor=mask)


def expected(query, key, value, segment_ids, sliding_window=None, sinks=None):
    """In float64, as MaxText's own dot_product: its queries are scaled already."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    k, v = (np.repeat(x, HQ // HK, 2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k)
    i, j = np.arange(S)[:, None], np.arange(S)
    seen = (i >= j) if sliding_window is None else (i >= j) & (i - j < sliding_window)
    ids = np.asarray(segment_ids)
    seen = seen & (ids[:, :, None] == ids[:, None, :])[:, None] & (ids > 0)[:, None, :, None]
    weights = np.exp(scores) * seen
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[:, None, None]
    return np.einsum("bhij,bjhd->bihd", weights / np.where(total == 0, 1, total), v)


SEGMENTS = {False: np.array([[1] * S, [1] * 9 + [0] * 3], np.int32),
            True: np.array([[1] * 5 + [2] * 4 + [3] * 3, [1] * 7 + [2] * 3 + [0] * 2], np.int32)}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("more", [
    {}, dict(sliding_window=3), dict(sinks=np.linspace(-1, 1, HQ, dtype=np.float32))], ids=str)
def test_maxtexts_call(packing, more):
    segments = SEGMENTS[packing]
    positions = np.zeros_like(segments)
    for row, ids in zip(positions, segments):
        for segment in set(ids):
            row[ids == segment] = np.arange((ids == segment).sum())
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (B, S, h, D)) for key, h in zip(keys, (HQ, HK, HK)))
    with door.install(), jax.set_mesh(jax.make_mesh((1,), ("context",), (jax.sharding.AxisType.Auto,))), \
            flax.linen.logical_axis_rules([("nvte_head", None)]):
        o = cudnn_flash_attention(q, k, v, jnp.asarray(segments), jnp.asarray(positions), packing, **more)
    real = (segments > 0)[:, :, None, None]
    o = np.where(real, o.reshape(B, S, HQ, D), 0)
    np.testing.assert_allclose(o, expected(q, k, v, segments, **more), atol=2e-5)
