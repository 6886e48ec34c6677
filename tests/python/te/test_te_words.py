# SPDX-License-Identifier: Apache-2.0
"""TE's words and numbers in Python are those of the C layer, src/nvte."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import tessera
from tessera.te import _words

ROOT = Path(__file__).resolve().parents[3]
HEADER = (ROOT / "include" / "tessera_nvte.h").read_text()
CALL = (ROOT / "src" / "nvte" / "call.cc").read_text()
PARAMS = (ROOT / "src" / "nvte" / "params.h").read_text()


@pytest.mark.parametrize("name, words, suffix", [
    ("NVTE_QKV_Layout", _words.LAYOUTS, ""), ("NVTE_QKV_Format", _words.FORMATS, ""),
    ("NVTE_Bias_Type", _words.BIASES, ""), ("NVTE_Mask_Type", _words.MASKS, "_MASK"),
    ("NVTE_Softmax_Type", _words.SOFTMAXES, "_SOFTMAX")])
def test_numbers_are_those_of_the_header(name, words, suffix):
    body = re.search(r"enum %s : int \{(.*?)\};" % name, HEADER, re.DOTALL)[1]
    expected = {member: int(number) for member, number in re.findall(r"(NVTE_\w+) = (-?\d+)", body)}
    assert {x.name: x.value for x in _words.numbers(name, words, suffix=suffix)} == expected


def test_tags_of_dtypes_are_those_of_the_header():
    body = re.search(r"enum NVTEDType(?: : int)? \{(.*?)\};", HEADER, re.DOTALL)[1]
    expected = {f"k{name}": int(number) for name, number in re.findall(r"kNVTE(\w+) = (\d+)", body)}
    assert {x.name: x.value for x in _words.DType}.items() <= expected.items()


def test_masks_have_the_bands_of_the_c_layer():
    """Which masks are causal, and end at the bottom right, as src/nvte/call.cc says it."""
    causal_from = re.search(r"is_causal\(NVTE_Mask_Type mask\) \{ return mask >= (\w+); \}", CALL)[1]
    bottom_right = set(re.findall(r"NVTE_\w+_MASK", re.search(r"is_bottom_right\(NVTE_Mask_Type mask\) \{(.*?)\}",
                                                            CALL, re.DOTALL)[1]))
    numbers = _words.numbers("NVTE_Mask_Type", _words.MASKS, suffix="_MASK")
    for mask, number in zip(_words.MASKS, numbers):
        band = _words.band(mask)
        assert band["causal"] == (number >= numbers[causal_from]), mask
        assert (band["align"] == "bottom_right") == (number.name in bottom_right), mask


def test_a_band_shows_what_its_words_say():
    """visible() beside tessera's own masks of the same words."""
    for mask in ("no_mask", "causal", "causal_bottom_right"):
        for window in ((-1, -1), (3, 0), (2, 4), (-1, 2), (0, -1)):
            given = _words.band(mask, *window)
            sq, sk = 5, 8
            q, k = np.zeros((1, sq, 1, 8), np.float32), np.zeros((1, sk, 1, 8), np.float32)
            v = np.eye(sk, dtype=np.float32)[None, :, None]
            weights = tessera.attention(q, k, v, **given)[0, :, 0]
            shift = sk - sq if given["align"] == "bottom_right" else 0
            distance = np.arange(sq)[:, None] + shift - np.arange(sk)
            assert ((weights > 0) == _words.visible(distance, given["causal"], window)).all(), (mask, window)


def test_biases_and_softmaxes_mean_what_they_do_in_the_c_layer():
    """Which biases are arrays, which of them comes before the scale, and which softmax needs no offset."""
    arrays = re.search(r"bool has_bias\(.*?\) \{(.*?)\}", CALL, re.DOTALL)[1]
    before, = re.findall(r"bias_type == (\w+)\) p\.flags \|= TESSERA_BIAS_PRE_SCALE", CALL)
    for kind, number in zip(_words.BIASES, _words.numbers("NVTE_Bias_Type", _words.BIASES)):
        found = _words.bias(kind, "bias")
        assert bool(found) == (number.name in arrays), kind
        assert (found.get("bias_at") == "pre_scale") == (number.name == before), kind
    needs_none, = re.findall(r"softmax == (\w+)\) \{\s+p\.flags \|= TESSERA_SINK_OFF_BY_ONE", CALL)
    for kind, number in zip(_words.SOFTMAXES, _words.numbers("NVTE_Softmax_Type", _words.SOFTMAXES, suffix="_SOFTMAX")):
        assert _words.sink(kind, "offset") == ({} if kind == "vanilla" else {"sink": "offset"})
        if number.name == needs_none:
            assert _words.sink(kind) == {"sink": "off_by_one"}


def fields_of_config():
    """Names and defaults of the configuration of a fused call, in the C layer's order; numbers for words."""
    rows = re.findall(r"X\(\w+, [^,]+, (\w+), ([^)]+)\)", re.search(
        r"#define TESSERA_NVTE_CONFIG_FIELDS\(X\)(.*?)\n\n", PARAMS, re.DOTALL)[1])
    words = dict(re.findall(r"(k?NVTE\w+) = (-?\d+)", HEADER)) | {"true": 1, "false": 0}
    words |= {"NVTE_QKV_Layout_NOT_SET": len(_words.LAYOUTS), "NVTE_QKV_Format_NOT_SET": len(_words.FORMATS)}
    return {name: float(words.get(default, default.removesuffix("f"))) for name, default in rows}


def defaults(kind):
    return {field.name: float(field.default) for field in dataclasses.fields(kind)}


def test_pytorchs_question_has_the_fields_of_the_c_layer():
    pytest.importorskip("torch")
    from tessera.te.pytorch.attention.dot_product_attention.utils import FusedAttentionParams

    found, expected = defaults(FusedAttentionParams), fields_of_config()
    assert list(found) == list(expected) and found == expected


def test_jaxs_question_has_the_fields_of_the_c_layer():
    """But for those of pages."""
    pytest.importorskip("jax")
    from tessera.te.jax.cpp_extensions import FusedAttnParams

    expected = {name: default for name, default in fields_of_config().items() if "page" not in name}
    found = defaults(FusedAttnParams)
    assert list(found) == list(expected) and found == expected


def test_a_window_beside_a_mask():
    assert _words.band("causal", 8, 3)["window"] == (8, 0)  # a causal mask ends at the diagonal
    assert _words.band("no_mask", -1, 3)["window"] == (-1, 3)
    assert _words.band("no_mask", 2, 3, True)["align"] == _words.band("causal_bottom_right")["align"] == "bottom_right"
    assert _words.band("causal_bottom_right", bottom_right=False)["align"] == "top_left"
    assert "window" not in _words.band("causal", -1, 0) and "window" not in _words.band("padding")


def test_words_of_a_mask_stand_in_any_order():
    assert _words.mask_of("causal,padding") == _words.mask_of("causal_padding") == "padding_causal"
    assert _words.mask_of("casual") is None and _words.mask_of(3) is None
