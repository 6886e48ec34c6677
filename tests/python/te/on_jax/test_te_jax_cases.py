# SPDX-License-Identifier: Apache-2.0
"""What TransformerEngine's own tests of fused_attn vary, against attention written out: layouts,
masks, windows, biases, softmax types, GQA, cross attention, dtypes, dropout, descriptors."""

import pytest

pytest.importorskip("jax")
np = pytest.importorskip("numpy")

import jax.numpy as jnp  # noqa: E402
import te_jax_cases  # noqa: E402

CI, MORE = 36, 402
# Half an ulp of each dtype, times a few for what is rounded on the way.
TOLERANCE = {"bfloat16": 6 * 2.0 ** -9, "float16": 6 * 2.0 ** -12, "float32": 1e-5}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        number = MORE if metafunc.config.getoption("--te-jax-all") else CI
        metafunc.parametrize("case", te_jax_cases.cases(number), ids=str)


def test_every_value_is_drawn():
    drawn = te_jax_cases.cases(CI)
    for name, values in te_jax_cases.AXES.items():
        missing = set(values) - {getattr(case, name) for case in drawn}
        assert not missing, f"{name}: {missing}"


def test_as_written_out(case):
    problem = te_jax_cases.Problem(case)
    arrays = (problem.q, problem.k, problem.v, problem.bias, problem.offset)
    descriptor = problem.descriptor()
    fused = te_jax_cases.gradients(lambda *x: problem.fused(*x, descriptor), arrays)
    written = te_jax_cases.gradients(problem.written_out, arrays)
    weights = problem.weights.astype(jnp.float32)
    out, grads = fused(weights)
    expected, expected_grads = written(weights)
    assert out.dtype == problem.q.dtype
    assert out.shape == expected.shape
    close("out", out, expected, case)
    assert np.all(np.asarray(out, np.float32)[problem.ids_q == 0] == 0)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        close(f"d{name}", grad, expected_grads[name], case)
    for name, ids in (("q", problem.ids_q), ("k", problem.ids_k), ("v", problem.ids_k)):
        assert np.all(np.asarray(grads[name], np.float32)[ids == 0] == 0), f"d{name} of padding"


def close(name, got, expected, case):
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    assert np.isfinite(got).all()
    error = np.abs(got - expected).max(initial=0)
    # Where each row sees one key at most, dq and dk are 0 but for what rounding left of terms of order 1.
    limit = TOLERANCE[case.dtype] * np.abs(expected).max(initial=1e-2)
    assert error <= limit, f"{name}: {error} > {limit}"
