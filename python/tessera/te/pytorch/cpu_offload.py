# SPDX-License-Identifier: Apache-2.0
"""Keeps activations in host memory until the backward pass, under TE's names.

    context, sync = get_cpu_offload_context(enabled=True, num_layers=8, model_layers=12)
    for layer in layers:                       # any modules, each fed by the one before
        with context:
            x = layer(x)
        x = sync(x)

A stream of its own copies the tensors that a layer saves for its backward pass, such as q, k, v, o and lse of
attention, to pinned memory while later layers compute, and back before they are needed. The first `num_layers` of
`model_layers` layers are offloaded. So the device holds the activations of model_layers - num_layers layers, and
of one more in the backward pass. Tensors on the CPU are copied by the same code, without the gain.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._names import missing

__all__ = ["ManualOffloadSynchronizer", "get_cpu_offload_context", "is_cpu_offload_enabled",
           "mark_activation_offload", "mark_not_offload", "start_offload"]
__getattr__ = missing(__name__)

SMALLEST = 1 << 20  # bytes of a tensor that is worth a copy
_STAYS = "_tessera_stays"
_open: list[_Offload] = []  # contexts that a layer runs inside


class _Saved:
    """A tensor that a layer has saved: on its device until `release`, and from `reload` on."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.device = tensor.device
        self.copy: torch.Tensor | None = None
        self.done: torch.cuda.Event | None = None  # of the last copy, either way

    def offload(self, stream, buffer: torch.Tensor | None):
        """Starts the copy to the host, behind all that this thread has given the device."""
        if self.tensor is None or self.copy is not None:
            return
        fits = buffer is not None and buffer.shape == self.tensor.shape and buffer.dtype == self.tensor.dtype
        self.copy = buffer if fits else torch.empty_like(
            self.tensor, device="cpu", pin_memory=self.device.type == "cuda")
        self._run(stream, lambda: self.copy.copy_(self.tensor, non_blocking=True))

    def release(self):
        """Lets go of the tensor on the device, whose later work waits for the copy."""
        if self.tensor is None or self.copy is None:
            return
        self._check()
        self._wait()
        self.tensor = None

    def reload(self, stream):
        if self.tensor is None:
            self.tensor = torch.empty_like(self.copy, device=self.device)
            self._run(stream, lambda: self.tensor.copy_(self.copy, non_blocking=True))
            self.version = self.tensor._version

    def drop(self):
        """Lets go of a reloaded tensor, of which the host has a copy."""
        if self.copy is not None:
            self._wait()  # its memory is not another's before the copy is done
            self.tensor = None

    def get(self, stream) -> torch.Tensor:
        self.reload(stream)  # at once, where nobody has asked for it before
        self._check()
        self._wait()
        return self.tensor

    def _check(self):
        if self.tensor._version != self.version:
            raise RuntimeError("get_cpu_offload_context: a tensor that a layer saved for its backward pass "
                               "was modified in place; leave it alone, or run this layer outside the context")

    def _run(self, stream, copy: Callable[[], object]):
        if stream is None:
            copy()
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copy()
            self.done = stream.record_event()

    def _wait(self):
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)


class _Layer:
    """What one layer has saved in the forward pass that runs or ran last."""

    def __init__(self, retain: bool):
        self.saved: list[weakref.ref[_Saved]] = []  # the autograd graph owns them
        self.known: dict[tuple, _Saved] = {}        # while the layer runs: what it saves twice is one
        self.buffers: list[torch.Tensor] | None = [] if retain else None

    def alive(self) -> list[_Saved]:
        return [saved for saved in (reference() for reference in self.saved) if saved is not None]

    def push(self, tensor: torch.Tensor) -> _Saved:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        saved = self.known.get(key)
        if saved is None:
            saved = self.known[key] = _Saved(tensor)
            self.saved.append(weakref.ref(saved))
        return saved

    def offload(self, stream):
        for i, saved in enumerate(self.alive()):
            retained = self.buffers is not None
            saved.offload(stream, self.buffers[i] if retained and i < len(self.buffers) else None)
            if retained:
                self.buffers[i:i + 1] = [saved.copy]


class _Offload(contextlib.ContextDecorator):
    """The context of get_cpu_offload_context; `sync` is its second result."""

    def __init__(self, layers: int, offloaded: int | None, retain: bool, stream: torch.cuda.Stream | None):
        self.layers = [_Layer(retain) for _ in range(layers)]
        self.manual = offloaded is None
        self.offloaded = offloaded or 0  # layers that go by themselves
        self.stay = layers - self.offloaded
        self.current = -1
        self._given = stream
        self._hooks: saved_tensors_hooks | None = None

    def stream(self, device: torch.device):
        if device.type != "cuda":
            return None
        if self._given is None:
            self._given = torch.cuda.Stream(device)
        return self._given

    def __enter__(self):
        if self._hooks is not None:
            raise RuntimeError("get_cpu_offload_context: the context was entered inside itself; leave it "
                               "after each layer")
        self.current = (self.current + 1) % len(self.layers)
        layer = self.layers[self.current]
        layer.saved, layer.known = [], {}
        self._each(self.current - self.stay, _Saved.release)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        _open.append(self)
        return self

    def __exit__(self, *error):
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        _open.remove(self)
        self.layers[self.current].known = {}
        if self.current < self.offloaded:
            self.start_offload(self.current)

    def sync(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called with what a layer gave, behind its context: the backward pass begins that layer with it."""
        if tensor.grad_fn is not None:
            number = self.current
            tensor.grad_fn.register_prehook(lambda gradients: self._backward(number))
        return tensor

    def start_offload(self, number: int):
        layer = self.layers[number]
        for saved in layer.alive()[:1]:
            layer.offload(self.stream(saved.device))

    # ---- below: how ----

    def _backward(self, number: int):
        if number + 1 < len(self.layers):
            self._each(number + 1, _Saved.drop)
        self._each(number - self.stay, lambda saved: saved.reload(self.stream(saved.device)))

    def _each(self, number: int, what: Callable[[_Saved], object]):
        if 0 <= number < self.offloaded:
            for saved in self.layers[number].alive():
                what(saved)

    def _pack(self, tensor: torch.Tensor):
        if not self.manual and self.current >= self.offloaded:
            return tensor
        stays = tensor.is_leaf and tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) or \
            isinstance(tensor._base, torch.nn.Parameter) or tensor.nbytes < SMALLEST or \
            type(tensor) not in (torch.Tensor, torch.nn.Parameter) or \
            getattr(tensor.untyped_storage(), _STAYS, False)
        return tensor if stays else self.layers[self.current].push(tensor)

    def _unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else packed.get(self.stream(packed.device))


class ManualOffloadSynchronizer:
    """Copies when they are asked for, layer by layer: get_cpu_offload_context(manual_synchronization=True).
    A layer for which nothing is called keeps its activations."""

    def __init__(self, context: _Offload):
        self._context = context

    def start_offload_layer(self, layer_id: int):
        """Starts to copy what layer `layer_id` has saved to the host."""
        self._context.start_offload(layer_id)

    def release_activation_forward_gpu_memory(self, layer_id: int):
        """Lets go of it on the device, whose later work waits for the copies."""
        for saved in self._context.layers[layer_id].alive():
            saved.release()

    def start_reload_layer(self, layer_id: int):
        """Starts to copy it back; the backward pass waits for each tensor that it needs."""
        for saved in self._context.layers[layer_id].alive():
            saved.reload(self._context.stream(saved.device))


def is_cpu_offload_enabled() -> bool:
    """Whether a layer runs inside an enabled context now."""
    return bool(_open)


def mark_not_offload(*tensors: torch.Tensor):
    """Keeps on the device what these tensors, and views of them, have in memory. None is left out."""
    for tensor in tensors:
        if tensor is not None:  # its memory bears the mark, as autograd saves some tensors detached
            setattr(tensor.untyped_storage(), _STAYS, True)


def start_offload(*tensors: torch.Tensor, offload_base_tensor: bool = False):
    """TE begins to copy `tensors` here. A copy here begins when its layer is left, behind all that computes it, so
    there is nothing to wait for; what two tensors share is copied for each."""
    del tensors, offload_base_tensor


def mark_activation_offload(*tensors: torch.Tensor):
    """Says nothing new, as in TE 2: everything that a layer saves goes, unless mark_not_offload kept it."""
    del tensors


def get_cpu_offload_context(enabled: bool = False, num_layers: int | None = 1, model_layers: int = 1,
                            offload_activations: bool = True, offload_weights: bool = False,
                            double_buffering: bool = False, manual_synchronization: bool = False,
                            retain_pinned_cpu_buffers: bool = False,
                            offload_stream: torch.cuda.Stream | None = None):
    """(context, sync): layers run inside `context`, and `sync` is called with the output of each.

    The first num_layers of model_layers layers are offloaded; num_layers is from 0 to model_layers - 1,
    as the last layer's activations are needed at once. With manual_synchronization
    (context, sync, ManualOffloadSynchronizer), and num_layers is ignored. retain_pinned_cpu_buffers keeps
    the host's memory for the next step. offload_stream is the stream of the copies, by default one of
    its own. Parameters stay, and tensors below 1 MiB. offload_weights and double_buffering have no
    effect, as in TE 2. Without `enabled` nothing is done. ValueError: anything else.
    """
    if not enabled:
        none = contextlib.nullcontext(), lambda tensor: tensor
        return (*none, ManualOffloadSynchronizer(_Offload(model_layers, None, False, None))) \
            if manual_synchronization else none
    if offload_weights:
        warnings.warn("get_cpu_offload_context: offload_weights=True: has no effect, as in "
                      "TransformerEngine 2", DeprecationWarning, stacklevel=2)
    elif not offload_activations:
        raise ValueError("get_cpu_offload_context: offload_activations=False: leaves nothing to offload; "
                         "leave it at True, or enabled at False")
    if not offload_activations:
        return contextlib.nullcontext(), lambda tensor: tensor
    if model_layers < 1:
        raise ValueError(f"get_cpu_offload_context: model_layers={model_layers}: must be at least 1")
    if manual_synchronization:
        num_layers = None
    elif num_layers is None or not 0 <= num_layers < model_layers:
        raise ValueError(f"get_cpu_offload_context: num_layers={num_layers}: must be from 0 to model_layers - 1 "
                         f"= {model_layers - 1}: the last layer's activations are needed at once")
    context = _Offload(model_layers, num_layers, retain_pinned_cpu_buffers, offload_stream)
    results = context, context.sync
    return (*results, ManualOffloadSynchronizer(context)) if manual_synchronization else results
