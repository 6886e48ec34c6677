# SPDX-License-Identifier: Apache-2.0
"""tessera's context parallelism behind accelerate's ParallelismConfig(cp_size=N), and so in transformers' Trainer and
in TRL:

    handle = tessera.doors.accelerate_cp.install()       # after `import trl`, if you use it
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=...)
    ... the program as it is, with a model of attn_implementation="tessera"
    handle.remove()

accelerate itself cuts batches in place and drops the masks of every layer. For a model of attn_implementation="tessera"
install() has `Accelerator.prepare` call tessera.hf.context_parallel instead: batches stay whole until the model cuts
them, and layers keep packed rows, windows and sinks. Other models go accelerate's way.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import torch
from accelerate import Accelerator
from transformers import Trainer

from ... import hf
from .. import DOORS
from . import _trainers

TESTED = DOORS["accelerate"].tested


class Handle:
    """What install() replaced, until remove(). Models that were prepared in between keep tessera's hooks."""

    def __init__(self):
        self._before = []

    def replace(self, owner: type, method: str, make):
        theirs = getattr(owner, method)
        self._before.append((owner, method, theirs))
        setattr(owner, method, functools.wraps(theirs)(make(theirs)))

    def remove(self):
        while self._before:
            setattr(*self._before.pop())

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_):
        self.remove()


def install() -> Handle:
    """Replaces methods of Accelerator and Trainer, and of TRL's SFTTrainer if trl was imported, until remove() or the
    end of a `with`. RuntimeError if a host lacks one."""
    methods = [(Accelerator, "_prepare_cp", _prepare_cp), (Trainer, "compute_loss", _trainers.compute_loss),
               (Trainer, "_prepare_context_parallel_inputs", _trainers.prepare_inputs)]
    if "trl" in sys.modules:
        from trl import SFTTrainer
        methods += [(SFTTrainer, "__init__", _trainers.sft_init), (SFTTrainer, "compute_loss", _trainers.compute_loss)]
    for owner, method, _ in methods:
        if not hasattr(owner, method):
            raise RuntimeError(f"tessera.accelerate_cp: install(): {owner.__name__} has no {method}; the door was made "
                               f"for accelerate {TESTED}, transformers {DOORS['transformers'].tested} and trl "
                               f"{DOORS['TRL'].tested}; install those")
    handle = Handle()
    for owner, method, make in methods:
        handle.replace(owner, method, make)
    return handle


# ---- below: how ----

def _prepare_cp(theirs):
    def prepare(self, *args):
        models = [x for x in args if isinstance(x, torch.nn.Module)]
        ours = [model for model in models if _trainers.is_ours(model)]
        if not models and hasattr(self, "_cp_context"):  # data loaders of a model that was prepared before
            return args
        if not ours or len(ours) < len(models):
            return theirs(self, *args)
        group = self.torch_device_mesh["cp"].get_group()
        for model in ours:
            before = getattr(model, "_tessera_cp", None)  # a model may be prepared again
            if before is not None:
                before.remove()
            model._tessera_cp = hf.context_parallel(model, group, reduction="mean")  # as FSDP averages gradients
        self._cp_context = _whole  # of maybe_context_parallel, which would cut the batch
        return args
    return prepare


def _whole(buffers=None, buffer_seq_dims=None, no_restore_buffers=None):
    return contextlib.nullcontext()
