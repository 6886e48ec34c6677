# SPDX-License-Identifier: Apache-2.0
"""TransformerLayer's MLP, under the parameters' names that TE gives it: wi_kernel, wo_kernel, wi_bias, wo_bias,
scale, ln_bias, and of a LoRA wi_lora_a_kernel and its likes."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from .._words import error
from ..sharding import (W_FSDP_AXES, W_JOINED_AXES, W_NO_SHARD_AXES, W_TP_AXES,
                        with_sharding_constraint_by_logical_axes)
from ._projections import Weights

_CLAMPED = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
_NAMED = {"linear": lambda x: x, "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
          "squared_relu": lambda x: jnp.square(jax.nn.relu(x))}


class FeedForward(Weights):
    """x [b, s, hidden] -> the product of activations of projections of x, projected back, and what the norm gave."""
    width: int = 2048
    activations: tuple = ("gelu",)
    activation_params: dict | None = None
    dropout_rate: float = 0.0
    dropout_dims: tuple[int, ...] = ()
    dropout_rng_name: str = "dropout"
    inner_axes: tuple[str, ...] | None = None  # of the second projection's input
    operation = "TransformerLayer"

    @nn.compact
    def __call__(self, x, deterministic: bool = False):
        x = self.normed(x)
        functions = self._functions()
        y = self.projected(x, (len(functions), self.width), self._stacked,
                           (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), (W_JOINED_AXES, W_TP_AXES), "wi_")
        y = checkpoint_name(y, "ffn1")
        y = math.prod(f(y[..., i, :].astype(jnp.float32)) for i, f in enumerate(functions)).astype(x.dtype)
        y = nn.Dropout(self.dropout_rate, self.dropout_dims, rng_collection=self.dropout_rng_name)(
            y, deterministic=deterministic)
        y = with_sharding_constraint_by_logical_axes(y, self.inner_axes)
        y = self.projected(y, x.shape[-1:], self.kernel_init, (W_TP_AXES, W_FSDP_AXES), (W_NO_SHARD_AXES,), "wo_")
        return checkpoint_name(y, "ffn2"), x

    def _stacked(self, key, shape, dtype):
        """[hidden, activations, width]: each projection as if it were alone."""
        return jnp.stack([self.kernel_init(part, (shape[0], shape[2]), dtype)
                          for part in jax.random.split(key, shape[1])], axis=1)

    def _functions(self) -> list[Callable]:
        """In the order of the projections: a linear one that is named first is the last, as in TE."""
        names = [name.lower() if isinstance(name, str) else name for name in self.activations]
        if names and names[0] in ("linear", "clamped_linear"):
            names.reverse()
        given = dict(self.activation_params or {})
        if set(given) - set(_CLAMPED):
            raise error("mlp_activation_params", given, f"must be among {', '.join(_CLAMPED)}",
                        self.operation)
        clamped = {**_CLAMPED, **given}
        limit, alpha, offset = (clamped[name] for name in _CLAMPED)
        named = {**_NAMED, "clamped_linear": lambda x: jnp.clip(x, -limit, limit) + offset,
                 "clamped_silu": lambda x: jnp.minimum(x, limit) * jax.nn.sigmoid(alpha * jnp.minimum(x, limit))}
        functions = [name if callable(name) else named.get(name) or getattr(nn, str(name), None) for name in names]
        if not functions or not all(map(callable, functions)):
            raise error("mlp_activations", self.activations, f"must be functions, names of flax.linen's or of "
                        f"{', '.join(named)}, at least one", self.operation)
        return functions
