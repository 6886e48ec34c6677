# SPDX-License-Identifier: Apache-2.0
"""Projections under the parameters' names that TE gives them: kernel, bias, scale, ln_bias,
lora_a_kernel, lora_b_kernel. Not TE's own modules, which do more."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from .._words import error
from ..sharding import W_NO_SHARD_AXES, with_sharding_constraint_by_logical_axes


class Weights(nn.Module):
    """The fields and the arithmetic that a projection and an MLP share."""
    kernel_init: Callable
    use_bias: bool = False
    bias_init: Callable = nn.initializers.zeros
    norm: str | None = None                    # "layernorm", "rmsnorm" or None
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    input_axes: tuple[str, ...] | None = None  # of x between norm and projection
    dtype: jnp.dtype = jnp.float32             # of the parameters

    def normed(self, x):
        """x after the norm if there is one."""
        if self.norm is not None:
            x = with_sharding_constraint_by_logical_axes(self._normed(x), self.input_axes)
        return x

    def projected(self, x, features, init, kernel_axes, bias_axes, prefix=""):
        """x [..., hidden] -> [..., *features], by parameters whose names begin with `prefix`."""
        y = jnp.tensordot(x, self._param(f"{prefix}kernel", init, kernel_axes,
                                         (x.shape[-1], *features), x.dtype), 1)
        if self.enable_low_rank_adaptation:
            y += self._low_rank(x, features, init, prefix)
        if self.use_bias:
            y += self._param(f"{prefix}bias", self.bias_init, bias_axes, features, x.dtype)
        return y

    def _param(self, name, init, axes, shape, dtype):
        init = nn.with_logical_partitioning(init, axes)
        return self.param(name, init, shape, self.dtype).astype(dtype)

    def _normed(self, x):
        name = self.norm.lower().replace("_", "")
        if name not in ("layernorm", "rmsnorm"):
            raise error("layernorm_type", repr(self.norm), 'must be "layernorm" or "rmsnorm"',
                        self.operation)
        axes, shape = (W_NO_SHARD_AXES,), (x.shape[-1],)
        ones = nn.initializers.zeros if self.zero_centered_gamma else nn.initializers.ones
        scale = self._param("scale", ones, axes, shape, jnp.float32) + self.zero_centered_gamma
        wide = x.astype(jnp.float32)
        if name == "rmsnorm":
            size = jnp.mean(wide * wide, axis=-1, keepdims=True)
            return (wide * jax.lax.rsqrt(size + self.epsilon) * scale).astype(x.dtype)
        bias = self._param("ln_bias", nn.initializers.zeros, axes, shape, jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(x.dtype)

    def _low_rank(self, x, features, init, prefix):
        """One pair of kernels [hidden, rank], [rank, width] for each of the leading features."""
        *several, width = features
        rank, none = self.low_rank_adaptation_dim, (None,) * (len(several) + 2)
        a = self._param(f"{prefix}lora_a_kernel", init, none, (x.shape[-1], *several, rank),
                        x.dtype)
        b = self._param(f"{prefix}lora_b_kernel", nn.initializers.zeros, none,
                        (*several, rank, width), x.dtype)
        alpha = self.low_rank_adaptation_alpha
        low = jnp.tensordot(x, a, 1)
        return jnp.einsum("...r,...ro->...o", low, b) * (1.0 if alpha is None else alpha / rank)


class Projection(Weights):
    """x [..., hidden] -> [..., *features], after a norm if there is one; a LoRA of rank
    low_rank_adaptation_dim is added if enabled. Returns the projection and what the norm gave."""
    features: tuple[int, ...] = ()
    kernel_axes: tuple[str, ...] = ()
    bias_axes: tuple[str, ...] = ()
    operation = "MultiHeadAttention"

    @nn.compact
    def __call__(self, x):
        x = self.normed(x)
        return self.projected(x, self.features, self.kernel_init, self.kernel_axes, self.bias_axes), x


class Norm(Weights):
    """The norm alone."""
    operation = "TransformerLayer"

    @nn.compact
    def __call__(self, x):
        return self.normed(x)
