# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward and backward pass are CUDA graphs, under TE's name. The capture is PyTorch's,
torch.cuda.make_graphed_callables; beside it there are keyword arguments, and arguments that are no
tensors, which stay as they were when the graph was captured."""

from __future__ import annotations

import functools

import torch
from torch.utils import _pytree as pytree

from ..._lib import Refused
from .._names import missing

__all__ = ["make_graphed_callables"]
__getattr__ = missing(__name__)


def make_graphed_callables(modules, sample_args, num_warmup_iters: int = 3, allow_unused_input: bool = False,
                           sample_kwargs=None, fp8_enabled=False, fp8_calibrating: bool = False,
                           fp8_recipe=None, fp8_group=None, fp8_weight_caching: bool = False, enabled=None,
                           calibrating: bool | None = None, recipe=None, amax_reduction_group=None,
                           cache_quantized_params: bool | None = None, _order: list[int] | None = None,
                           _num_layers_per_chunk: list[int] | None = None, pool=None,
                           retain_graph_in_backward: bool = False,
                           _reuse_graph_input_output_buffers: bool = False):
    """`modules`, a callable or a tuple of them, as callables that replay CUDA graphs.

    sample_args is the tuple of positional arguments of a module, or a tuple of one for each of several;
    sample_kwargs likewise the dictionary of its keyword arguments. Tensors of later calls have their
    shapes, dtypes and requires_grad, other arguments their values. A torch.nn.Module is changed in place,
    and runs without a graph in the mode, training or evaluation, in which it was not captured. Several
    modules are captured in the order in which they will run. pool is a memory pool of
    torch.cuda.graph_pool_handle(). Refused: no CUDA device; FP8; orders of pipelines.

    >>> layer = make_graphed_callables(layer, (x,), sample_kwargs={"attn_mask_type": "causal"})
    """
    for name, value in (("fp8_enabled", fp8_enabled), ("enabled", enabled), ("fp8_calibrating", fp8_calibrating),
                        ("calibrating", calibrating), ("_order", _order),
                        ("_num_layers_per_chunk", _num_layers_per_chunk),
                        ("retain_graph_in_backward", retain_graph_in_backward),
                        ("_reuse_graph_input_output_buffers", _reuse_graph_input_output_buffers)):
        if any(value) if isinstance(value, (tuple, list)) else value:
            raise NotImplementedError(
                f"make_graphed_callables: {name}={value!r}: tessera.te captures whole forward and backward "
                f"passes in order, without FP8; leave {name} at its default")
    if not torch.cuda.is_available():
        raise Refused("make_graphed_callables: there is no CUDA device, and only CUDA has graphs to capture; call "
                      "the modules as they are, the results are the same")
    several = isinstance(modules, tuple)
    modules = modules if several else (modules,)
    args = sample_args if several else (sample_args,)
    kwargs = ({},) * len(modules) if sample_kwargs is None else sample_kwargs if several else (sample_kwargs,)
    for name, given in (("sample_args", args), ("sample_kwargs", kwargs)):
        if len(given) != len(modules):
            raise ValueError(f"make_graphed_callables: {name} of {len(given)} callables: must be one for each of "
                             f"{len(modules)}")
    positional = tuple(map(_OfTensors, modules, args, kwargs))
    graphed = torch.cuda.make_graphed_callables(
        positional, tuple(each.tensors(*one, **more) for each, one, more in zip(positional, args, kwargs)),
        num_warmup_iters, allow_unused_input, pool)
    results = tuple(map(_installed, modules, positional, graphed))
    return results if several else results[0]


class _OfTensors(torch.nn.Module):
    """A callable as a module of positional tensors, which is what PyTorch captures. As a module it has
    the callable's parameters, which then are inputs of the graph that gradients are accumulated in."""

    def __init__(self, function, args, kwargs):
        super().__init__()
        # The function is what runs when the module's own forward has become the graph.
        self.function = function.forward if isinstance(function, torch.nn.Module) else function
        if isinstance(function, torch.nn.Module):
            self.module = function
            self.training = function.training
        leaves, self.spec = _flat(args, kwargs)
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def tensors(self, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """The tensors of a call, which otherwise is the one that was captured; ValueError if it is not."""
        leaves, spec = _flat(args, kwargs)
        if spec != self.spec or self.places != [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]:
            raise ValueError("make_graphed_callables: a graphed callable was called with other arguments than "
                             "sample_args and sample_kwargs; capture it with these")
        for i, (leaf, captured) in enumerate(zip(leaves, self.leaves)):
            if i not in self.places and leaf is not captured and leaf != captured:
                raise ValueError(f"make_graphed_callables: argument {leaf!r}: was {captured!r} when the graph was "
                                 "captured; capture another for it")
        return tuple(leaves[place] for place in self.places)


def _flat(args, kwargs):
    return pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))


def _installed(function, positional: _OfTensors, graphed):
    """What the user calls in the place of `function`."""
    if not isinstance(function, torch.nn.Module):
        return functools.wraps(function)(lambda *args, **kwargs: graphed(*positional.tensors(*args, **kwargs)))
    plain, captured = function.forward, function.training

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        if function.training != captured:
            return plain(*args, **kwargs)
        return graphed(*positional.tensors(*args, **kwargs))
    function.forward = forward
    return function
