# SPDX-License-Identifier: Apache-2.0
"""The node of examples/comfyui, in a stand-in of ComfyUI: its wrap_attn, which calls an override, its registry, its
attention_pytorch and what a node sees of a model. ComfyUI is a program, not a package."""
import functools
import importlib.util
import logging
import sys
import types
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tessera.doors import comfyui  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "comfyui" / "__init__.py"
CLOSE = dict(atol=2e-5, rtol=1e-5)
REGISTERED = {}


def wrap_attn(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        outermost = "_inside_attn_wrapper" not in kwargs
        kwargs["_inside_attn_wrapper"] = True
        options = kwargs.get("transformer_options") or {}
        if outermost and "optimized_attention_override" in options:
            return options["optimized_attention_override"](func, *args, **kwargs)
        return func(*args, **kwargs)
    return wrapper


@wrap_attn
def attention_pytorch(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
                      **kwargs):
    attention_pytorch.calls += 1
    if not skip_reshape:
        q, k, v = (x.view(x.shape[0], -1, heads, q.shape[-1] // heads).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.ndim == 2 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=kwargs.get("scale"),
                                                         enable_gqa=kwargs.get("enable_gqa", False))
    return o if skip_output_reshape else o.transpose(1, 2).reshape(o.shape[0], -1, o.shape[1] * o.shape[3])


def register_attention_function(name, func):
    if name not in REGISTERED:
        REGISTERED[name] = func
    else:
        logging.warning("Attention function %s already registered, skipping registration.", name)


class Model:
    """A ModelPatcher as nodes see it."""

    def __init__(self, model_options=None):
        self.model_options = model_options or {"transformer_options": {}}

    def clone(self):
        return Model({name: dict(value) for name, value in self.model_options.items()})

    def run(self, *arguments, **keywords):
        return attention_pytorch(*arguments, transformer_options=self.model_options["transformer_options"], **keywords)


@pytest.fixture(autouse=True)
def host(monkeypatch):
    attention_pytorch.__wrapped__.calls = attention_pytorch.calls = 0
    REGISTERED.clear()
    comfyui._said.clear()
    made = types.ModuleType("comfy.ldm.modules.attention")
    made.wrap_attn, made.register_attention_function = wrap_attn, register_attention_function
    made.REGISTERED_ATTENTION_FUNCTIONS = REGISTERED
    monkeypatch.setitem(sys.modules, made.__name__, made)


def node():
    spec = importlib.util.spec_from_file_location("comfyui_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS["TesseraAttention"]()


def qkv(skip_reshape=False, hk=4):
    torch.manual_seed(0)
    shapes = [(2, h, s, 16) if skip_reshape else (2, s, h * 16) for h, s in ((4, 9), (hk, 7), (hk, 7))]
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("keywords", [
    {}, dict(skip_reshape=True), dict(skip_output_reshape=True), dict(skip_reshape=True, skip_output_reshape=True),
    dict(scale=0.3), dict(attn_precision=torch.float32),
    dict(mask=torch.arange(63).reshape(9, 7) % 3 > 0), dict(mask=torch.linspace(-1, 1, 126).reshape(2, 9, 7)),
    dict(mask=torch.linspace(-1, 1, 63).reshape(1, 1, 9, 7), skip_reshape=True),
], ids=lambda keywords: ",".join(keywords) or "plain")
def test_the_node_computes_what_the_host_does(keywords):
    model = Model()
    inputs = qkv(keywords.get("skip_reshape", False))
    theirs = model.run(*inputs, 4, **keywords)
    (patched,) = node().patch(model, True)
    before = attention_pytorch.calls
    torch.testing.assert_close(patched.run(*inputs, 4, **keywords), theirs, **CLOSE)
    assert attention_pytorch.calls == before and theirs is not None
    assert model.model_options == {"transformer_options": {}}  # the one that went in


def test_grouped_heads():
    model = Model()
    inputs = qkv(True, hk=2)
    theirs = model.run(*inputs, 4, skip_reshape=True, enable_gqa=True)
    (patched,) = node().patch(model, True)
    torch.testing.assert_close(patched.run(*inputs, 4, skip_reshape=True, enable_gqa=True), theirs, **CLOSE)


def test_disabled_is_the_model_itself():
    model = Model()
    assert node().patch(model, False) == (model,)


def test_what_it_does_not_know_stays_the_hosts_and_is_said_once():
    (patched,) = node().patch(Model(), True)
    with pytest.warns(RuntimeWarning, match="tessera.comfyui: mystery: is not known; the attention that ComfyUI chose"):
        first = patched.run(*qkv(), 4, mystery=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(patched.run(*qkv(), 4, mystery=1), first)
    assert torch.equal(first, Model().run(*qkv(), 4))


def test_what_is_refused_stays_the_hosts():
    (patched,) = node().patch(Model(), True)
    inputs = [x.double() for x in qkv()]
    with pytest.warns(RuntimeWarning, match="fp64"):
        assert torch.equal(patched.run(*inputs, 4), Model().run(*inputs, 4))


def test_an_override_before_it_gets_the_rest():
    seen = []
    model = Model({"transformer_options": {"optimized_attention_override":
                                           lambda func, *arguments, **keywords: seen.append(keywords) or "theirs"}})
    (patched,) = node().patch(model, True)
    with pytest.warns(RuntimeWarning):
        assert patched.run(*qkv(), 4, mystery=1) == "theirs"
    assert seen[0]["mystery"] == 1


def test_registered_by_name_and_undone():
    undo = comfyui.register()
    torch.testing.assert_close(REGISTERED["tessera"](*qkv(), 4), Model().run(*qkv(), 4), **CLOSE)
    undo()
    assert not REGISTERED


CALLS = [dict(skip_reshape=skip, skip_output_reshape=output, scale=scale)
         for skip in (False, True) for output in (False, True) for scale in (None, 0.3, 1)]


def test_what_is_remembered_is_told_apart_by_all_it_depends_on():
    def results(fresh=False):
        for keywords in CALLS:
            for heads, dtype in ((4, torch.float32), (8, torch.float32), (4, torch.bfloat16)):
                if fresh:
                    comfyui._plans.clear()
                h = 4 if keywords["skip_reshape"] else heads
                yield comfyui.attention(*(x.to(dtype) for x in qkv(keywords["skip_reshape"])), h, **keywords)
    first = list(results(fresh=True))
    list(results())
    for again, expected in zip(results(), first, strict=True):
        assert torch.equal(again, expected)
    assert len(comfyui._plans) == len(CALLS)


@pytest.mark.parametrize("strange", ["strides", "grouped", "autocast", "wider values"])
def test_what_is_remembered_leaves_the_rest_to_the_ordinary_way(strange):
    keywords = dict(skip_reshape=True, enable_gqa=True) if strange == "grouped" else {}
    inputs = qkv(strange == "grouped", hk=2 if strange == "grouped" else 4)
    if strange == "strides":
        inputs = [x.mT.contiguous().mT for x in inputs]
    if strange == "wider values":
        inputs[2] = inputs[2].repeat(1, 1, 2)

    def call():
        with torch.autocast("cpu", torch.bfloat16, enabled=strange == "autocast"):
            try:
                return comfyui.attention(*inputs, 4, **keywords)
            except (ValueError, RuntimeError) as error:
                return str(error)
    comfyui._plans.clear()
    expected = call()
    for more in ({}, dict(skip_reshape=True)):
        comfyui.attention(*qkv(bool(more)), 4, **more)
    again = call()
    assert again == expected if isinstance(expected, str) else torch.equal(again, expected)


def test_without_comfyui_it_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "comfy.ldm.modules.attention")
    with pytest.raises(RuntimeError, match=f"is not imported.*ComfyUI {comfyui.TESTED}"):
        comfyui.register()
