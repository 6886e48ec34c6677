# SPDX-License-Identifier: Apache-2.0
"""The device that the tests of JAX run on, JAX's default, and how near its results are to the CPU's."""

import jax
import numpy as np

# What tests compare with multiplies in fp32; a GPU's default is TF32.
jax.config.update("jax_default_matmul_precision", "highest")

CPU = jax.devices("cpu")[0]  # on a machine with a GPU too: JAX_PLATFORMS=cuda,cpu
ON_CPU = jax.default_backend() == "cpu"
DEVICE = "cpu" if ON_CPU else "cuda"
# Limits are parts of the largest value: the CPU's own distance from fp64 is 0.8e-6 for fp32; a GPU rounds probabilities
# to 16 bits, and its lse of 16-bit inputs lies 1.4e-5 away.
_NEAR = {"float32": 2e-5, "float16": 2.0 ** -9, "bfloat16": 2.0 ** -6}


def same(ours, theirs, **tolerance):
    """Trees of arrays are equal. On the CPU to the bit, or to np.testing.assert_allclose's `tolerance` where it
    is given; where a GPU computed one of them, floats to what rounding in another order makes."""
    def compare(a, b):
        near = _NEAR.get(str(a.dtype)) if _is_on_gpu(a) or _is_on_gpu(b) else None
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype}{a.shape} beside {b.dtype}{b.shape}"
        if near is not None:
            a, b = a.astype(np.float64), b.astype(np.float64)
            largest = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=1)
            np.testing.assert_allclose(a, b, rtol=0, atol=near * largest)
        elif tolerance:
            np.testing.assert_allclose(a, b, **tolerance)
        else:
            np.testing.assert_array_equal(a, b)
    jax.tree.map(compare, ours, theirs)


def _is_on_gpu(x) -> bool:
    return isinstance(x, jax.Array) and any(device.platform != "cpu" for device in x.devices())
