# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward and backward pass are CUDA graphs, under TE's name. PyTorch's
torch.cuda.make_graphed_callables captures them. In addition, modules may have keyword arguments, and arguments
that are not tensors, which keep the values that they had at capture; and gradients of parameters may have memory
of their own."""

from __future__ import annotations

import functools

import torch
from torch.utils import _pytree as pytree

from ..._lib import Refused
from .._names import missing
from ..common.recipe import DelayedScaling
from .attention.dot_product_attention._quantized._fp8_state import Float8Module, recipes_of
from .quantization import get_default_recipe

__all__ = ["is_graph_capturing", "make_graphed_callables", "restore_fp8_tensors", "save_fp8_tensors",
           "set_capture_end", "set_capture_start"]
__getattr__ = missing(__name__)


def make_graphed_callables(modules, sample_args, num_warmup_iters: int = 3, allow_unused_input: bool = False,
                           sample_kwargs=None, fp8_enabled=None, fp8_calibrating: bool | None = None,
                           fp8_recipe=None, fp8_group=None, fp8_weight_caching: bool | None = None, enabled=None,
                           calibrating: bool | None = None, recipe=None, amax_reduction_group=None,
                           cache_quantized_params: bool | None = None, _order: list[int] | None = None,
                           _num_layers_per_chunk: list[int] | None = None, pool=None,
                           retain_graph_in_backward: bool = False,
                           _reuse_graph_input_output_buffers: bool = False,
                           clone_param_grads_on_return: bool = True, pre_warmup_hook=None,
                           post_warmup_hook=None, capture_time_hooks=None):
    """`modules`, a callable or a tuple of them, as callables that replay CUDA graphs.

    sample_args is the tuple of positional arguments of a module, or a tuple of such tuples for several modules;
    sample_kwargs likewise the dictionary of keyword arguments. In later calls, tensors must have the same shapes,
    dtypes and requires_grad, and other arguments the same values. A torch.nn.Module is changed in place. It runs
    without a graph in the mode, training or evaluation, in which it was not captured, and after its reset(),
    which gives the graph's memory back. Several modules are captured in the order in which they will run. A
    module in evaluation whose inputs want no gradients has no backward graph.

    With clone_param_grads_on_return, gradients of parameters get memory of their own in each backward pass;
    without it they lie in the graph's memory, and the next pass overwrites them. The warm-up hooks are called
    without arguments before and after the runs that warm up. enabled opens an FP8 region with `recipe`. pool is a
    memory pool of torch.cuda.graph_pool_handle(). Refused: no CUDA device; FP8 attention; orders of pipelines;
    capture_time_hooks.

    >>> layer = make_graphed_callables(layer, (x,), sample_kwargs={"attn_mask_type": "causal"})
    """
    recipe = fp8_recipe if recipe is None else recipe
    for name, value in (("fp8_enabled", fp8_enabled if _is_of_attention(recipe) else False),
                        ("enabled", enabled if _is_of_attention(recipe) else False),
                        ("fp8_calibrating", fp8_calibrating), ("calibrating", calibrating), ("_order", _order),
                        ("_num_layers_per_chunk", _num_layers_per_chunk),
                        ("capture_time_hooks", any(capture_time_hooks or ())),
                        ("retain_graph_in_backward", retain_graph_in_backward),
                        ("_reuse_graph_input_output_buffers", _reuse_graph_input_output_buffers)):
        if any(value) if isinstance(value, (tuple, list)) else value:
            raise NotImplementedError(
                f"make_graphed_callables: {name}={value!r}: tessera.te captures whole forward and backward "
                f"passes in order, without FP8 attention; leave {name} at its default")
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
    positional = tuple(_OfTensors(module, one, more, clone_param_grads_on_return)
                       for module, one, more in zip(modules, args, kwargs))
    samples = tuple(each.samples(*one, **more) for each, one, more in zip(positional, args, kwargs))
    set_capture_start()
    try:
        _warm_up(positional, samples, num_warmup_iters, allow_unused_input, pre_warmup_hook, post_warmup_hook)
        graphed = torch.cuda.make_graphed_callables(positional, samples, 0, allow_unused_input, pool)
    finally:
        set_capture_end()
    results = tuple(map(_installed, modules, positional, graphed))
    return results if several else results[0]


def _is_of_attention(recipe) -> bool:
    """Whether an FP8 region changes anything here: layers multiply in 16 bits."""
    return bool(recipes_of(get_default_recipe() if recipe is None else recipe))


def _warm_up(functions, samples, runs: int, allow_unused_input: bool, before, after):
    """Forward and backward passes on a stream of their own, so that no lazy work is left for a capture."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        if before is not None:
            before()
        for function, tensors in zip(functions, samples):
            for _ in range(runs):
                outputs = [o for o in pytree.tree_leaves(function(*tensors)) if o.requires_grad]
                if outputs:
                    torch.autograd.grad(outputs, [x for x in tensors if x.requires_grad],
                                        [torch.empty_like(o) for o in outputs], allow_unused=allow_unused_input)
        if after is not None:
            after()
    torch.cuda.synchronize()


class _Cloned(torch.autograd.Function):
    """A parameter, whose gradient is copied out of the graph's memory."""

    @staticmethod
    def forward(ctx, parameter):
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


class _OfTensors:
    """A callable as one of positional tensors, which is what PyTorch captures: the tensors of its arguments
    and then, where there are gradients, its parameters, which it reads by itself."""

    def __init__(self, function, args, kwargs, clones: bool = True):
        is_module = isinstance(function, torch.nn.Module)
        # The function is what runs when the module's own forward has become the graph.
        self.function = function.forward if is_module else function
        leaves, self.spec = _flat(args, kwargs)
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.has_gradients = not is_module or function.training or \
            any(leaves[place].requires_grad for place in self.places)
        self.parameters = tuple(function.parameters()) if is_module and self.has_gradients else ()
        self.clones = clones

    def __call__(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.set_grad_enabled(self.has_gradients and torch.is_grad_enabled()):
            return self.function(*args, **kwargs)

    def samples(self, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """What is captured."""
        return (*self.tensors(*args, **kwargs), *self.parameters)

    def inputs(self, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """What is replayed."""
        given = tuple(map(_Cloned.apply, self.parameters)) if self.clones else self.parameters
        return (*self.tensors(*args, **kwargs), *given)

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
    """What the user calls in the place of `function`. Its reset() gives the graph up."""
    is_module = isinstance(function, torch.nn.Module)
    plain, captured = (function.forward, function.training) if is_module else (function, None)
    held = [graphed]

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        if not held or is_module and function.training != captured:
            return plain(*args, **kwargs)
        return held[0](*positional.inputs(*args, **kwargs))
    if not is_module:
        forward.reset = held.clear
        return forward

    def reset():
        held.clear()
        if function.forward is forward:
            function.forward = plain
    function.forward, function.reset = forward, reset
    return function


# ---- for programs that capture graphs themselves ----

_capturing = False


def set_capture_start():
    """Says that warming up and capture begin: is_graph_capturing() until set_capture_end()."""
    global _capturing
    _capturing = True


def set_capture_end():
    global _capturing
    _capturing = False


def is_graph_capturing() -> bool:
    """Whether make_graphed_callables is at work, or a program between set_capture_start() and set_capture_end()."""
    return _capturing


def save_fp8_tensors(modules, recipe) -> list | None:
    """Copies of scales and amaxes, which a warm-up changes, for restore_fp8_tensors: an entry for each module in and
    below `modules`. None unless `recipe` is a DelayedScaling, as no other keeps any."""
    if not isinstance(recipe, DelayedScaling):
        return None
    return [each.get_fp8_meta_tensors() if isinstance(each, Float8Module) else None for each in _below(modules)]


def restore_fp8_tensors(modules, fp8_tensors: list | None):
    """Gives back what save_fp8_tensors copied of the same modules. Where it found no state, state is as new.
    ValueError: entries of other modules."""
    if fp8_tensors is None:
        return
    below = _below(modules)
    if len(below) != len(fp8_tensors):
        raise ValueError(f"restore_fp8_tensors: fp8_tensors of {len(fp8_tensors)} modules: must be what "
                         f"save_fp8_tensors gave of these {len(below)}")
    for each, saved in zip(below, fp8_tensors):
        if isinstance(each, Float8Module):
            each.reset_fp8_meta_tensors(saved)


def _below(modules) -> list[torch.nn.Module]:
    return [each for module in modules for each in module.modules()]
