# SPDX-License-Identifier: Apache-2.0
"""The methods of transformers' Trainer and TRL's SFTTrainer while accelerate_cp is installed, made of the hosts'."""

from __future__ import annotations

import contextlib
import inspect

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ..._lib import Refused

_NAME = "tessera.accelerate_cp"


def is_ours(model) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "tessera"


def _size(trainer, model) -> int:
    """Ranks of cp, if the model is tessera's; else 1."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return config.cp_size if config is not None and config.cp_enabled and is_ours(model) else 1


def prepare_inputs(theirs):
    def prepare(self, model, inputs):
        return theirs(self, model, inputs) if _size(self, model) == 1 else (contextlib.nullcontext, inputs)
    return prepare


def compute_loss(theirs):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        size = _size(self, model)
        if size == 1:
            return theirs(self, model, inputs, return_outputs, num_items_in_batch)
        for name, value in (("label_smoothing_factor", self.label_smoother),
                            ("compute_loss_func", self.compute_loss_func), ("compute_metrics", self.compute_metrics)):
            if value is not None:
                raise Refused(f"{_NAME}: {name}: would see the logits of this rank's tokens beside whole labels; leave "
                              "it out: the model computes the loss")
        if num_items_in_batch is None and "labels" in inputs:  # TRL's evaluation: ranks hold different numbers
            num_items_in_batch = (inputs["labels"][:, 1:] != -100).sum() / size
            if self.args.average_tokens_across_devices:  # the trainer then multiplies the loss by this
                num_items_in_batch *= self.accelerator.num_processes // self.get_tp_size()
        found = theirs(self, model, inputs, return_outputs, num_items_in_batch)
        if not torch.is_grad_enabled():  # an evaluation drops some ranks' losses of its last batch
            loss = found[0] if return_outputs else found
            dist.all_reduce(loss, group=self.accelerator.torch_device_mesh["cp"].get_group())
            loss /= size
        return found
    return compute_loss


def sft_init(theirs):
    """TRL packs before it makes its base class, and refuses packing under context parallelism after that."""
    signature = inspect.signature(theirs)

    def init(self, *args, **keywords):
        given = signature.bind(self, *args, **keywords)
        config = given.arguments.get("args")
        packs = getattr(config, "packing", False) or getattr(config, "eval_packing", False)
        if packs:
            packing, eval_packing, hidden = config.packing, config.eval_packing, _HidesPacking()
            given.arguments["callbacks"] = [*(given.arguments.get("callbacks") or ()), hidden]
        try:
            theirs(*given.args, **given.kwargs)
        finally:
            if packs:
                config.packing, config.eval_packing = packing, eval_packing
        if packs:
            self.remove_callback(hidden)
        self._tp_size *= _size(self, self.model)  # by which TRL divides its count of tokens: batches stay whole
    return init


class _HidesPacking(TrainerCallback):
    """Hides from TRL's check that rows are packed, where the model is tessera's."""

    def on_init_end(self, args, state, control, model=None, **others):
        if is_ours(model):
            args.packing = args.eval_packing = False
