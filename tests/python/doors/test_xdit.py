# SPDX-License-Identifier: Apache-2.0
"""tessera among xDiT's attention backends: in a stand-in of xfuser.core.distributed.attention_backend with its enum and
its registry, and in xfuser itself where it is installed (`./dev test hosts`): what its sequence parallelism calls, on a
CPU. Its runtimes are for GPUs and NPUs."""
import enum
import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import door_examples  # noqa: E402
import tessera  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=1e-5)


@pytest.fixture
def door(monkeypatch):
    class AttentionBackendType(enum.Enum):
        SDPA = "SDPA"
        FLASH = "Flash Attention V2"

    registry = {AttentionBackendType.SDPA: None}

    def register_attention_function(backend_type):
        def decorator(func):
            registry[backend_type] = func
            return func
        return decorator

    place = ""
    for part in ("xfuser", "core", "distributed", "attention_backend"):
        parent, place = sys.modules.get(place), f"{place}.{part}".lstrip(".")
        made = types.ModuleType(place)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, place, made)
        if parent is not None:
            setattr(parent, part, made)
    made.AttentionBackendType, made.ATTENTION_FUNCTION_REGISTRY = AttentionBackendType, registry
    made.register_attention_function = register_attention_function
    sys.modules.pop("tessera.doors.xdit", None)
    yield importlib.import_module("tessera.doors.xdit")
    sys.modules.pop("tessera.doors.xdit", None)


def qkv(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, 4, s, 16, dtype=dtype) for s in (9, 7, 7)]


@pytest.mark.parametrize("keywords", [
    {}, dict(is_causal=True), dict(attention_kwargs={"vsa_step_index": 3, "attn_mask": None}),
    dict(attention_kwargs={"scale": 0.3}),
    dict(attention_kwargs={"attn_mask": torch.arange(126).reshape(2, 1, 9, 7) % 3 > 0})], ids=str)
def test_by_its_name(door, keywords):
    handle = door.register()
    names = door.host.AttentionBackendType
    assert names["TESSERA"] is handle.member is names.TESSERA and list(names)[-1] is handle.member
    q, k, v = qkv()
    o, lse = door.host.ATTENTION_FUNCTION_REGISTRY[names["TESSERA"]](
        q, k, v, **{"dropout_p": 0.0, "is_causal": False, "attention_kwargs": None, **keywords})
    given = keywords.get("attention_kwargs") or {}
    mask = given.get("attn_mask")
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=keywords.get("is_causal", False),
                                                              scale=given.get("scale"))
    torch.testing.assert_close(o, theirs, **CLOSE)
    scores = (q @ k.mT) * given.get("scale", 0.25)
    if keywords.get("is_causal"):
        mask = torch.ones(9, 7, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, scores.logsumexp(-1), **CLOSE)


def test_undone(door):
    names, registry = door.host.AttentionBackendType, door.host.ATTENTION_FUNCTION_REGISTRY
    before = list(names), dict(registry)
    handle = door.register()
    handle.remove()
    handle.remove()
    assert (list(names), registry) == before and not hasattr(names, "TESSERA")
    with pytest.raises(KeyError):
        names["TESSERA"]


def test_what_is_refused_says_so(door):
    with pytest.raises(tessera.Refused, match="indices_k.*give attn_mask"):
        door.attention(*qkv(), attention_kwargs={"indices_k": torch.arange(3)})
    with pytest.raises(tessera.Refused, match="fp64"):
        door.attention(*qkv(torch.float64))


def test_a_changed_interface_is_one_error(door):
    del door.host.register_attention_function
    with pytest.raises(RuntimeError, match=f"register_attention_function.*{door.TESTED}"):
        door.register()


def test_what_xfuser_calls():
    usp = pytest.importorskip("xfuser.model_executor.layers.usp")
    xdit = importlib.import_module("tessera.doors.xdit")
    names = xdit.host.AttentionBackendType
    before = list(names), dict(xdit.host.ATTENTION_FUNCTION_REGISTRY)
    handle = xdit.register()
    try:
        q, k, v = qkv()
        joint = {"joint_strategy": "rear", "joint_key": k[:, :, :3], "joint_value": v[:, :, :3], "total_steps": 1}
        for more in ({}, {"joint_attn_kwargs": joint}):
            ours, theirs = (usp._get_attention_function(backend=backend)(
                q, k, v, dropout_p=0.0, is_causal=False, **{name: dict(value) for name, value in more.items()})
                for backend in (names["TESSERA"], names.SDPA_MATH))
            torch.testing.assert_close(ours[0], theirs[0], **CLOSE)
            assert ours[1].shape == (2, 4, 9)
    finally:
        handle.remove()
    assert (list(names), xdit.host.ATTENTION_FUNCTION_REGISTRY) == before
    with pytest.raises(NotImplementedError, match="not registered"):
        usp._get_attention_function(backend=handle.member or "TESSERA")


def test_the_example(capsys):
    pytest.importorskip("xfuser.model_executor.layers.usp")
    text = door_examples.printed("xdit_ring", capsys)
    assert door_examples.calls(text) == [0, 1]
    whole, parts = door_examples.differences(text)
    assert max(whole, parts) < 1e-5
    assert text.splitlines()[-1] == "removed: True"
