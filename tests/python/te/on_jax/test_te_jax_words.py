# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax: what needs no attention. Enumerations, orders, masks, descriptors."""

import importlib
import sys

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import tessera.te.jax  # noqa: E402
from tessera.te.jax.attention import (  # noqa: E402
    AttnMaskType, AttnSoftmaxType, CPStrategy, QKVFormat, QKVLayout, ReorderStrategy,
    SequenceDescriptor, canonicalize_attn_mask_type, inverse_reorder_causal_load_balancing,
    make_swa_mask, reorder_causal_load_balancing, run_length_fill)

IDS = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 3, 0], [1, 1, 2, 2, 2, 0, 0, 0, 0, 0]], np.int32)
POS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0], [0, 1, 0, 1, 2, 3, 4, 0, 0, 0]], np.int32)


# ---- words ----

def test_masks_say_what_they_are():
    said = {mask.name: (mask.is_causal(), mask.is_padding(), mask.is_bottom_right())
            for mask in AttnMaskType}
    assert said == {
        "NO_MASK": (False, False, False), "PADDING_MASK": (False, True, False),
        "CAUSAL_MASK": (True, False, False), "PADDING_CAUSAL_MASK": (True, True, False),
        "CAUSAL_BOTTOM_RIGHT_MASK": (True, False, True),
        "PADDING_CAUSAL_BOTTOM_RIGHT_MASK": (True, True, True)}


def test_layouts_say_what_they_are():
    assert [layout.value for layout in QKVLayout] == [5, 7, 9, 10, 12, 14]
    for layout in QKVLayout:
        assert layout.is_qkvpacked() + layout.is_kvpacked() + layout.is_separate() == 1
        assert layout.get_qkv_format() == (QKVFormat.THD if layout.is_thd() else QKVFormat.BSHD)
        kin = layout.to_qkvpacked(), layout.to_kvpacked(), layout.to_separate()
        assert layout in kin and {other.is_thd() for other in kin} == {layout.is_thd()}


@pytest.mark.parametrize("text, mask", [
    ("no_mask", "NO_MASK"), ("causal_padding", "PADDING_CAUSAL_MASK"),
    ("bottom_right_causal", "CAUSAL_BOTTOM_RIGHT_MASK"),
    ("bottom_right_padding_causal", "PADDING_CAUSAL_BOTTOM_RIGHT_MASK")])
def test_mask_of_a_name(text, mask):
    assert canonicalize_attn_mask_type(text) is AttnMaskType[mask]


@pytest.mark.parametrize("text", ["arbitrary", "", None, "causal_causal_up"])
def test_no_mask_of_a_name(text):
    with pytest.raises(ValueError, match="attn_mask_type=.*must be one of"):
        canonicalize_attn_mask_type(text)


def test_strategies():
    assert [strategy.name for strategy in CPStrategy] == ["DEFAULT", "ALL_GATHER", "RING"]


def test_softmax_of_a_name():
    assert AttnSoftmaxType.from_str("off_by_one") is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX
    with pytest.raises(ValueError, match='softmax_type=.sharp.*"vanilla"'):
        AttnSoftmaxType.from_str("sharp")


# ---- orders ----

def test_orders_of_four_devices():
    tokens = jnp.arange(16)
    swapped = reorder_causal_load_balancing(tokens, ReorderStrategy.DualChunkSwap, 4, 0)
    assert swapped.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    striped = reorder_causal_load_balancing(tokens, ReorderStrategy.Striped, 4, 0)
    assert striped.tolist()[:8] == [0, 4, 8, 12, 1, 5, 9, 13]
    striped = reorder_causal_load_balancing(tokens, ReorderStrategy.Striped, 4, 0, 2)
    assert striped.tolist()[:8] == [0, 1, 8, 9, 2, 3, 10, 11]


@pytest.mark.parametrize("strategy, stripe", [(ReorderStrategy.DualChunkSwap, None),
                                              (ReorderStrategy.Striped, None),
                                              (ReorderStrategy.Striped, 3)])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_orders_have_inverses(strategy, stripe, devices):
    x = jnp.arange(2 * 72 * 5).reshape(2, 72, 5)
    there = reorder_causal_load_balancing(x, strategy, devices, 1, stripe)
    assert devices == 1 or not np.array_equal(there, x)
    back = inverse_reorder_causal_load_balancing(there, strategy, devices, 1, stripe)
    assert np.array_equal(back, x)


@pytest.mark.parametrize("strategy, devices, stripe, said", [
    (ReorderStrategy.DualChunkSwap, 4, None, r"=12: must be a multiple of 2 \* cp_size=8"),
    (ReorderStrategy.DualChunkSwap, 2, 1, "stripe_size=1: must be None"),
    (ReorderStrategy.Striped, 2, 0, "stripe_size=0: must be at least 1"),
    (ReorderStrategy.Striped, 5, None, "multiple of cp_size"), ("x", 2, None, "strategy='x'")])
def test_orders_that_do_not_fit(strategy, devices, stripe, said):
    with pytest.raises(ValueError, match=said):
        reorder_causal_load_balancing(jnp.arange(12), strategy, devices, 0, stripe)


# ---- masks ----

def test_run_lengths():
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0, 3, 0, 4, 4], [1, 0, 0, 2, 2, 2, 0, 0, 3, 3]])
    assert run_length_fill(ids).tolist() == [[2, 2, 3, 3, 3, 0, 1, 0, 2, 2],
                                             [1, 0, 0, 3, 3, 3, 0, 0, 2, 2]]
    assert run_length_fill(ids[None]).shape == (1, 2, 10)


@pytest.mark.parametrize("window", [None, (-1, -1), (2, 0), (0, 3), (-1, 1)])
def test_window_mask(window):
    q, k = np.array([[0, 1, 2, 0, 1]]), np.array([[0, 1, 2, 3]])
    mask = make_swa_mask(jnp.asarray(q), jnp.asarray(k), window, jnp.bool_)
    left, right = (n if n >= 0 else 99 for n in window or (-1, -1))
    expected = [[i - left <= j <= i + right for j in k[0]] for i in q[0]]
    assert mask.shape == (1, 1, 5, 4) and mask[0, 0].tolist() == expected


def test_window_mask_from_the_end():
    q, k = jnp.asarray([[0, 1]]), jnp.asarray([[0, 1, 2, 3]])
    mask = make_swa_mask(q, k, (1, 0), jnp.int32, jnp.ones((1, 2), int), jnp.ones((1, 4), int))
    assert mask[0, 0].tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]


# ---- descriptors ----

def test_descriptor_is_a_pytree():
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(POS))
    leaves, tree = jax.tree.flatten(descriptor)
    assert len(leaves) == 8
    assert isinstance(jax.tree.unflatten(tree, leaves), SequenceDescriptor)
    summed = jax.jit(lambda x: x.segment_ids[0].sum())(descriptor)
    assert summed == IDS.sum()


def test_lengths_and_offsets_of_ids():
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(POS))
    found, offsets = descriptor.get_seqlens_and_offsets(AttnMaskType.PADDING_MASK, QKVLayout.T3HD,
                                                        None, 4)
    assert found[0].tolist() == [[3, 4, 1, 0], [2, 3, 0, 0]]
    assert offsets[0].tolist() == [[0, 4, 8, -1, -1], [0, 2, -1, -1, -1]]
    found, _ = descriptor.get_seqlens_and_offsets(AttnMaskType.PADDING_MASK, QKVLayout.BS3HD)
    assert found[0].tolist() == [8, 5]


# ---- under TE's names ----

def test_modules_stand_for_te(monkeypatch):
    """As docs/te.md has it."""
    for name in ("attention", "cpp_extensions", "sharding"):
        monkeypatch.setitem(sys.modules, f"transformer_engine.jax.{name}",
                            importlib.import_module(f"tessera.te.jax.{name}"))
    monkeypatch.setitem(sys.modules, "transformer_engine.jax", tessera.te.jax)
    monkeypatch.setitem(sys.modules, "transformer_engine_jax",
                        tessera.te.jax.transformer_engine_jax)
    from transformer_engine.jax import MeshResource
    from transformer_engine.jax.attention import QKVLayout as Layout
    from transformer_engine_jax import NVTE_Fused_Attn_Backend
    assert Layout is QKVLayout and NVTE_Fused_Attn_Backend.NVTE_No_Backend == -1
    assert MeshResource().cp_resource is None


# ---- questions about FP8 ----

def test_quantization_is_asked_about():
    """By TE's own tests, and by programs, before they compute in FP8."""
    from tessera.te.jax import quantize
    from tessera.te.jax.quantize import helper
    assert helper.DType is tessera.te.jax.transformer_engine_jax.DType
    assert quantize.is_scaling_mode_supported() == (True, "")
    for mode in set(quantize.ScalingMode) - {quantize.ScalingMode.NO_SCALING}:
        supported, reason = quantize.is_scaling_mode_supported(mode)
        assert not supported and reason.startswith(f"{mode.name}: ") and "tessera.jax.attention" in reason
        assert quantize.is_fp8_available(mode, 0) == (False, reason)
    assert quantize.get_supported_quantization_recipes() == quantize.get_supported_scaling_modes() == []
    assert quantize.get_global_quantize_recipe() is None
    assert quantize.get_quantization_recipe("DelayedScaling").delayed()
    assert quantize.is_quantize_recipe_supported("MXFP8BlockScaling")[0] is False
    with pytest.raises(ValueError, match="name='bf16': must be one of DelayedScaling, "):
        quantize.is_quantize_recipe_supported("bf16")
    with pytest.raises(ImportError, match="QuantizerFactory.*pass 16-bit arrays"):
        from tessera.te.jax.quantize import QuantizerFactory  # noqa: F401


def test_collections_are_merged():
    update = tessera.te.jax.update_collections
    assert update({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": 1, "b": 2, "c": 4}
    flax = pytest.importorskip("flax")
    found = update({"a": 1}, flax.core.FrozenDict(b=3))
    assert isinstance(found, flax.core.FrozenDict) and dict(found) == {"a": 1, "b": 3}
