# SPDX-License-Identifier: Apache-2.0
"""Random legal problems through tessera.attention and attention_backward, against the oracle."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import tessera
from problems import DTYPES, problems
from tessera import _numpy

ROUNDING = {"fp32": 4e-6, "bf16": 1.6e-2, "fp16": 2e-3}  # of the sum of absolute terms


def close(name, got, expected, tolerance):
    got = np.asarray(got, np.float64)
    assert got.shape == expected.shape, name
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected), err_msg=name)
    finite = np.isfinite(expected)
    error = np.max(np.abs(got[finite] - expected[finite]), initial=0.0)
    assert error <= tolerance, f"{name}: error {error:.3g} > {tolerance:.3g}"


def check(problem, backend):
    truth = problem.oracle()
    o, lse, max_logit = tessera.attention(problem.q, problem.k, problem.v, **problem.keywords,
                                          return_lse=True, return_max_logit=True, backend=backend)
    assert o.dtype == DTYPES[problem.dtype] and lse.dtype == max_logit.dtype == np.float32
    assert o.flags.c_contiguous and lse.flags.c_contiguous
    rounding = ROUNDING[problem.dtype] + 2e-6 * truth.score_size
    score = 1e-5 + 1e-6 * truth.score_size + (1e-3 if problem.dtype != "fp32" else 0)
    close("o", o, truth.o, rounding * (truth.value_size + 1e-6))
    close("lse", lse, truth.lse, score)
    close("max_logit", max_logit, truth.max_logit, score)
    return truth, o, lse, rounding


def gradient_names(kw):
    names = ["dq", "dk", "dv"]
    names += ["dbias"] if "bias" in kw else []
    names += ["dsink"] if isinstance(kw.get("sink"), np.ndarray) else []
    return tuple(names + (["dalibi_slopes"] if "alibi_slopes" in kw else []))


def rows_inside(truth, shape):
    """True where a row of q is a query of some sequence: [b, s] or [t]."""
    inside = np.zeros(truth.q.shape[:2], bool)
    for n in range(truth.batch):
        inside[truth._side(n, 0)[1:]] = True
    return inside


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_forward(backend, examples, relaxed):
    @settings(max_examples=examples if backend == "cpu" else examples // 4, **relaxed)
    @given(problems())
    def run(problem):
        check(problem, backend)
    run()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backward(backend, examples, relaxed):
    @settings(max_examples=examples if backend == "cpu" else examples // 4, **relaxed)
    @given(problems(), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
    def run(problem, with_dlse, partial, seed):
        truth, o, lse, rounding = check(problem, backend)
        rng = np.random.default_rng(seed)
        do = rng.standard_normal(o.shape).astype(o.dtype)
        dlse = rng.standard_normal(lse.shape).astype(np.float32) if with_dlse else None
        more = {}
        if partial:  # with keys that weigh about as much, and with some that weigh all
            o, lse = joined(truth, o, lse, rng)
            more = {"partial": True}
        expected = truth.backward(do, dlse, (o, lse) if partial else None)
        inside = rows_inside(truth, do.shape)
        garbage = do.copy()
        oracle.canonical(garbage, truth.layout_q)[~inside] = np.nan
        if dlse is not None:
            per_row = dlse[None] if truth.packed_q else dlse
            per_row[np.broadcast_to(~inside[:, None, :], per_row.shape)] = np.nan
        names = gradient_names(problem.keywords)
        g = tessera.attention_backward(garbage, problem.q, problem.k, problem.v, o, lse, dlse,
                                       grads=names, backend=backend, **more, **problem.keywords)
        for name in ("dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes"):
            got = getattr(g, name)
            if name not in names:
                assert got is None
                continue
            of = getattr(problem, name[1:], None)
            of = problem.keywords[name[1:]] if of is None else of
            assert got.dtype == of.dtype and got.flags.c_contiguous
            worst = max(ROUNDING[problem.dtype], rounding)
            close(name, got, expected[name], worst * (truth.size[name] + 1e-6))
    run()


def joined(truth, o, lse, rng):
    """o and lse of the union with another part."""
    inside = np.broadcast_to(rows_inside(truth, o.shape)[:, None], truth_rows(truth, lse).shape)
    mine = truth_rows(truth, lse).astype(np.float64)
    other = np.where(mine > -np.inf, mine, 0) + rng.standard_normal(mine.shape) + \
        1000 * (rng.random(mine.shape) < 0.1)
    both = np.where(inside, np.logaddexp(mine, other), mine)
    weight = np.exp(np.where(inside, mine, 0) - np.where(inside, both, 0))
    rows = oracle.canonical(np.array(o), truth.layout_q)
    weight = weight.transpose(0, 2, 1)[..., None]
    rows[...] = (weight * rows + (1 - weight) * rng.standard_normal(rows.shape)).astype(o.dtype)
    return truth._back(rows, truth.layout_q), (both[0] if truth.packed_q else both).astype(np.float32)


def truth_rows(truth, lse):
    return lse[None] if truth.packed_q else lse


class Memory:
    """Stands for tessera._numpy's allocations: full of one byte, with a fence on both sides."""
    FENCE = 4096

    def __init__(self, monkeypatch):
        self.fill, self.made = 0, []
        monkeypatch.setattr(_numpy, "empty", self.empty)
        monkeypatch.setattr(_numpy, "workspace", self.workspace)

    def empty(self, _, name, shape, dtype, like):
        dtype = np.dtype(dtype)
        inside = self.allocate(name, math.prod(shape) * dtype.itemsize)
        return inside.view(dtype).reshape(shape)

    def workspace(self, _, size, like):
        inside = self.allocate("workspace", size)
        return _numpy.pointer(inside), inside

    def allocate(self, name, size):
        raw = np.full(size + 2 * self.FENCE + 64, self.fill, np.uint8)
        begin = self.FENCE + -(_numpy.pointer(raw) + self.FENCE) % 64
        self.made.append((name, raw, begin, begin + size))
        return raw[begin:begin + size]

    def check(self):
        for name, raw, begin, end in self.made:
            assert (raw[:begin] == self.fill).all(), f"written before {name}"
            assert (raw[end:] == self.fill).all(), f"written after {name}"
        self.made.clear()


def test_memory(monkeypatch, examples, relaxed):
    """What memory held before does not matter, and nothing is written beside it."""
    memory = Memory(monkeypatch)

    @settings(max_examples=examples // 2, **relaxed)
    @given(problems())
    def run(problem):
        names, results = gradient_names(problem.keywords), []
        for memory.fill in (0x00, 0x7F, 0xFF):
            o, lse, max_logit = tessera.attention(problem.q, problem.k, problem.v,
                                                  **problem.keywords, return_lse=True,
                                                  return_max_logit=True)
            g = tessera.attention_backward(np.ones_like(o), problem.q, problem.k, problem.v, o, lse,
                                           grads=names, **problem.keywords)
            memory.check()
            results.append([o, lse, max_logit] + [getattr(g, name) for name in names])
        for other in results[1:]:
            for name, a, b in zip(("o", "lse", "max_logit", *names), results[0], other):
                np.testing.assert_array_equal(a, b, err_msg=name)
    run()


def test_oracle_gradients_are_finite_differences():
    """The oracle's own gradients, by central differences of its own forward pass."""
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((1, 5, 4, 3)), rng.standard_normal((1, 6, 2, 3)), \
        rng.standard_normal((1, 6, 2, 2))
    kw = dict(causal=True, align="bottom_right", bias=rng.standard_normal((4, 1, 6)), softcap=1.5,
              sink=rng.standard_normal(4), alibi_slopes=rng.uniform(0, 1, 4), dropout_p=0.3,
              rng_state=(5, 1), seqlens_k=np.array([5]), bias_at="pre_scale")
    do, dlse = rng.standard_normal((1, 5, 4, 2)), rng.standard_normal((1, 4, 5))

    def loss():
        truth = oracle.Oracle(q, k, v, **kw)
        return (truth.o * do).sum() + (truth.lse * dlse).sum()

    gradients = oracle.Oracle(q, k, v, **kw).backward(do, dlse)
    for name, x in (("dq", q), ("dk", k), ("dv", v), ("dbias", kw["bias"]), ("dsink", kw["sink"]),
                    ("dalibi_slopes", kw["alibi_slopes"])):
        numeric = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            keep, step = x[index], 1e-6
            x[index] = keep + step
            above = loss()
            x[index] = keep - step
            numeric[index] = (above - loss()) / (2 * step)
            x[index] = keep
        np.testing.assert_allclose(gradients[name], numeric, atol=1e-7)
