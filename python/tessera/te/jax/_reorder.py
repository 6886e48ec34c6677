# SPDX-License-Identifier: Apache-2.0
"""Orders of a sequence's tokens in which devices of a ring have even work under a causal mask."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ._enums import ReorderStrategy
from ._words import enum_member, error

_NAME = "reorder_causal_load_balancing"


def reorder_causal_load_balancing(tensor, strategy: ReorderStrategy, cp_size: int, seq_dim: int,
                                  stripe_size: int | None = None):
    """`tensor` with the tokens of axis `seq_dim` in an order of which device r of cp_size holds the
    r-th part. DualChunkSwap gives it chunks r and 2 * cp_size - 1 - r, Striped every cp_size-th
    stripe of stripe_size (1) tokens."""
    order = _order(tensor.shape[seq_dim], strategy, cp_size, stripe_size)
    return jnp.take(tensor, order, axis=seq_dim)


def inverse_reorder_causal_load_balancing(tensor, strategy: ReorderStrategy, cp_size: int,
                                          seq_dim: int, stripe_size: int | None = None):
    """What reorder_causal_load_balancing was given."""
    order = _order(tensor.shape[seq_dim], strategy, cp_size, stripe_size)
    return jnp.take(tensor, np.argsort(order), axis=seq_dim)


def reorder_causal_dual_chunk_swap(tensor, cp_size: int, seq_dim: int, to_contiguous: bool):
    """cpp_extensions' spelling of DualChunkSwap and its inverse."""
    way = inverse_reorder_causal_load_balancing if to_contiguous else reorder_causal_load_balancing
    return way(tensor, ReorderStrategy.DualChunkSwap, cp_size, seq_dim)


def reorder_causal_striped(tensor, cp_size: int, seq_dim: int, is_inverse: bool,
                           stripe_size: int = 1):
    """cpp_extensions' spelling of Striped and its inverse."""
    way = inverse_reorder_causal_load_balancing if is_inverse else reorder_causal_load_balancing
    return way(tensor, ReorderStrategy.Striped, cp_size, seq_dim, stripe_size)


def _order(tokens: int, strategy, cp_size: int, stripe_size: int | None) -> np.ndarray:
    """The tokens in their new order, [tokens]."""
    strategy = enum_member("strategy", strategy, ReorderStrategy, _NAME)
    if cp_size < 1:
        raise error("cp_size", cp_size, "must be at least 1", _NAME)
    if strategy == ReorderStrategy.Striped:
        stripe = 1 if stripe_size is None else stripe_size
        if stripe < 1:
            raise error("stripe_size", stripe_size, "must be at least 1", _NAME)
        _divides("cp_size * stripe_size", cp_size * stripe, tokens)
        return np.arange(tokens).reshape(-1, cp_size, stripe).swapaxes(0, 1).reshape(-1)
    if stripe_size is not None:
        raise error("stripe_size", stripe_size, "must be None for DualChunkSwap", _NAME)
    if cp_size == 1:
        return np.arange(tokens)
    _divides("2 * cp_size", 2 * cp_size, tokens)
    chunks = np.arange(tokens).reshape(2, cp_size, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


def _divides(name: str, divisor: int, tokens: int):
    if tokens % divisor:
        raise error("tensor.shape[seq_dim]", tokens, f"must be a multiple of {name}={divisor}",
                    _NAME)
