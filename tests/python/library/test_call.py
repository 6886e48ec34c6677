# SPDX-License-Identifier: Apache-2.0
"""The text of a call: what Python writes, Python and call.h read back."""

import ctypes
import importlib.util
import locale
import shutil
import subprocess
import types
from pathlib import Path

import every_keyword
import numpy as np
import pytest

import tessera
from tessera import _call, _lib, _numpy
from tessera._call import Call, fields_of, _description

CASES = Path(__file__).resolve().parents[2] / "cases"
check = _lib.load("libtessera_check.so")


def read_by_cpp(text: str):
    """The structs that a binding fills for a call whose arrays are left out, and what it refuses."""
    describe = _lib.load("libtessera_jax.so").tessera_jax_describe
    describe.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
                         *[ctypes.c_void_p] * 4]
    problem, buffers, error = _lib.Problem(), _lib.Buffers(), _lib.error_of_thread()
    code = describe(text.encode(), 0, None, 0, None, *map(ctypes.addressof, (problem, buffers, error)))
    return problem, buffers, error.message.decode() if code else ""


def scalars(problem, buffers) -> dict:
    values = {"flags": problem.flags}
    for name, field in _call.FIELDS.items():
        member = _call._MEMBERS.get(name, name)
        if field.kind != _call.FLAG:
            values[name] = getattr(problem if hasattr(problem, member) else buffers, member)
    return values


def call_of(problem, buffers) -> Call:
    given = [name for name, tensor in zip(_lib.TENSORS, problem.tensor) if tensor.dtype]
    backward = problem.pass_ == _lib.BACKWARD
    outputs = [name for name in given if (name[1:] in _call.GRADIENT_OF or name.startswith("amax_d"))] \
        if backward else [name for name in given if name in ("o", "lse", "max_logit", "amax_o")]
    return Call("attention_backward" if backward else "attention",
                tuple(name for name in given if name not in outputs), fields_of(problem, buffers),
                tuple(outputs))


@pytest.mark.parametrize("file", ["ci.cases", "nightly.cases"])
def test_every_case_there_and_back(file):
    lines = [line.partition("#")[0].strip() for line in (CASES / file).read_text().splitlines()]
    texts = {}
    for line in filter(None, lines):
        problem, buffers, error = _lib.Problem(), _lib.Buffers(), _lib.error_of_thread()
        code = check.tessera_case_describe(line.encode(), *map(ctypes.byref, (problem, buffers, error)))
        assert code == _lib.OK, (line, error.message)
        call = call_of(problem, buffers)
        if call.text not in texts:
            texts[call.text] = scalars(problem, buffers)
            assert Call.of(call.text) == call, line
    assert len(texts) > 500
    for text, expected in texts.items():
        words = [word for word in text.split() if not word.startswith(("in=", "out="))]
        problem, buffers, refusal = read_by_cpp(" ".join(words))
        assert not refusal and scalars(problem, buffers) == expected, text


def test_text_says_what_is_not_zero():
    call = Call("attention", ("q+k+v@2", "bias"), (("causal", True), ("window_left", 8), ("softcap", 20.0),
                                                   ("backend", "cpu")), ("o:float32", "lse"))
    assert call.text == "in=q+k+v@2,bias causal=True window_left=8 softcap=20.0 backend=cpu out=o:float32,lse"
    assert Call.of(call.text) == call and Call.of(call.text) is Call.of(call.text)
    assert call.flags == _lib.CAUSAL | _lib.WINDOW | _lib.SOFTCAP
    assert call.places["v"] == (0, 2, 2) and call.places["bias"] == (1, -1, 0)
    backward = call.backward((0, 1), with_dlse=False)
    assert backward.outputs == ("dq+dk+dv@2", "dbias") and backward.likes == (3, 4)
    assert Call.of(backward.text) == backward
    nothing = call.backward((), with_dlse=True)
    assert "out=" not in nothing.text and Call.of(nothing.text) == nothing


def test_sizes_may_come_beside_it():
    assert dict(Call.of("in=q max_seqlen_q=$0 out=o").fields) == {"max_seqlen_q": "$0"}


@pytest.mark.parametrize(("text", "said"), [
    ("in=q dilation=2 out=o", "dilation=2: no such name; this version knows in, out, pass, "),
    ("in=q,scores out=o", "scores: no such tensor; one of q, k, "),
    ("in=q out=o:float12", "no such dtype; one of float32, "),
    ("in=q+k out=o", "items of an axis, as in k"),
    ("in=q causal=1 out=o", "causal=1: must be True, or left out"),
    ("in=q align=top out=o", "align=top: must be one of none, top_left"),
    ("in=q window_left=x out=o", "window_left=x: must be an integer"),
    ("in=q softcap=20,0 out=o", "softcap=20,0: must be a number such as 20.0"),
])
def test_a_wrong_text_is_refused_by_name(text, said):
    with pytest.raises(ValueError, match=said):
        Call.of(text)


def test_a_binding_says_what_it_refuses():
    assert "dilation=2: no such name; this library knows in, out, pass, " in read_by_cpp("dilation=2")[2]
    assert "another version" in read_by_cpp("in=q,k,v out=o,lse")[2]


def test_a_backend_is_one_word_of_a_text():
    x = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="backend='cpu causal=True': must be one of"):
        tessera.attention(x, x, x, backend="cpu causal=True")


def test_a_locale_with_decimal_commas_reads_the_same(tmp_path, monkeypatch):
    if not shutil.which("localedef"):
        pytest.skip("no localedef to make a locale with")
    done = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"],
                          capture_output=True, text=True)
    if not (tmp_path / "de_DE.UTF-8").exists():
        pytest.skip(f"localedef: {done.stderr}")
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        locale.setlocale(locale.LC_NUMERIC, "de_DE.UTF-8")
        assert locale.localeconv()["decimal_point"] == ","
        text = Call("attention", ("q",), (("softcap", 0.5),), ("o",)).text
        assert "softcap=0.5" in text and Call.of(text).values["softcap"] == 0.5
        assert read_by_cpp("softcap=0.5 dropout_p=0.25")[1].softcap == 0.5
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)


def test_a_tensor_that_no_keyword_gives_fails_at_import(monkeypatch):
    monkeypatch.setattr(_lib, "TENSORS", (*_lib.TENSORS, "temperature"))
    spec = importlib.util.spec_from_file_location("tessera._call._description_again", _description.__file__)
    with pytest.raises(ImportError, match="temperature"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_no_keyword_is_ignored(monkeypatch):
    assert every_keyword.ignored(monkeypatch, tessera, ones) == []


def test_no_keyword_is_ignored_by_jax(monkeypatch):
    pytest.importorskip("jax")
    import jax.numpy as jnp

    import tessera.jax
    known = tessera.jax._functions._kept
    assert every_keyword.ignored(monkeypatch, tessera.jax, lambda *form: jnp.asarray(ones(*form)), known) == []


def test_an_ignored_keyword_is_seen(monkeypatch):
    """By every_keyword.ignored: a front end that drops one."""
    def attention(q, k, v, softcap=None, **keywords):
        return tessera.attention(q, k, v, **keywords)
    front = types.SimpleNamespace(attention=attention, attention_backward=tessera.attention_backward)
    assert every_keyword.ignored(monkeypatch, front, ones) == ["attention: softcap"]


def ones(shape, dtype):
    return np.ones(shape, _numpy.dtype(dtype))
