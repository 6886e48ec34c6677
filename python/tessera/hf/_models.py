# SPDX-License-Identifier: Apache-2.0
"""Which models attn_implementation="tessera" can serve: those whose attention goes through
transformers' attention interface.

transformers takes any registered name for any model. A model that computes attention by itself then ignores the
name, looks it up in a table of its own, or adds our masks to its scores. No flag shows this:
`_supports_attention_backend` is False for BART, T5 and Whisper, which go through the interface. So this module
reads the code: it starts from a model class, and follows everything that its methods name.
"""

from __future__ import annotations

import dis
import functools
import types

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from .._lib import Refused

# What makes scores of queries and keys. Deformable attention has none, and is not ours to compute.
_SCORES = {"matmul", "bmm", "baddbmm", "einsum", "@", "scaled_dot_product_attention", "MultiheadAttention",
           "multi_head_attention_forward"}


def check(model) -> None:
    """Refuses a model, while it is being built, whose attention would not be tessera's. Parts that
    are models themselves are checked when they are built. Raises tessera.Refused."""
    reason = why_not(type(model))
    if reason:
        works = ['"eager"', *(['"sdpa"'] if getattr(model, "_supports_sdpa", False) else [])]
        raise Refused(
            f'tessera.hf: attn_implementation="tessera": {type(model).__name__} (model_type='
            f'"{model.config.model_type}"): its attention does not go through transformers\' attention '
            f"interface: {reason}; use attn_implementation={' or '.join(works)}, in a composite model "
            'for this part alone: {"": "tessera", "name_of_its_sub_config": "eager"}')


@functools.cache
def why_not(cls: type) -> str:
    """Why a model class cannot run on an implementation registered under a new name, or ""."""
    through, composite, own, tables = False, False, [], []
    for part, names in _parts(cls):
        through |= any(isinstance(value, AttentionInterface) for value in names.values())
        composite |= any(_is_another_model(value, cls) for value in names.values())
        if "Attention" in part.__name__ and _SCORES & names.keys():
            own.append(part.__name__)
        tables += [name for name, value in names.items() if _is_table(value)]
    if tables:
        return f"it chooses from {tables[0]}, a table of its own"
    # Part of a model may attend by itself, as resamplers do: where it got a mask of ours, _masks refuses.
    return f"{own[0]} computes it" if own and not through and not composite else ""


# ---- below: how ----

def _parts(cls: type) -> list[tuple[type, dict]]:
    """The modules that a model class is built from, itself included, each with what its methods name;
    models with a configuration of their own are left out."""
    found, todo = {}, [cls]
    while todo:
        part = todo.pop()
        if part in found:
            continue
        names = found[part] = _names_in(part)
        for value in names.values():
            for each in value.values() if _is_table(value) else [value]:
                if isinstance(each, type) and issubclass(each, torch.nn.Module) and _belongs(each, cls):
                    todo.append(each)
    return list(found.items())


def _is_table(value) -> bool:
    """A table from implementations to classes."""
    return isinstance(value, dict) and "eager" in value and \
        all(isinstance(each, type) for each in value.values())


def _belongs(part: type, cls: type) -> bool:
    if not issubclass(part, PreTrainedModel):
        return not part.__module__.startswith("torch.")
    return part.__module__ == cls.__module__ and part.config_class in (None, cls.config_class)


def _is_another_model(value, cls: type) -> bool:
    if not isinstance(value, type) or value is PreTrainedModel:
        return False
    return issubclass(value, _BaseAutoModelClass) or \
        issubclass(value, PreTrainedModel) and not _belongs(value, cls)


def _names_in(part: type) -> dict:
    """Every name in the code of a class's methods, and of the functions of its modelling file that
    those call, with its value where it is a global."""
    names, done = {}, set()
    functions = [f for base in part.__mro__ if _is_models_own(base)
                 for name, attribute in vars(base).items() if name != "_init_weights"
                 for f in [_unwrapped(attribute)] if isinstance(f, types.FunctionType)]
    while functions:
        function = functions.pop()
        if function in done:
            continue
        done.add(function)
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            names[name] = value if value is not None else names.get(name)
            # eager_attention_forward is the fallback that classes hand to the interface
            if isinstance(value, types.FunctionType) and value.__module__ == part.__module__:
                functions.append(value)
    return names


def _is_models_own(base: type) -> bool:
    return base not in (torch.nn.Module, object, PreTrainedModel) and \
        not base.__module__.startswith(("torch.", "transformers.generation", "transformers.utils",
                                        "transformers.integrations", "transformers.modeling_utils"))


def _unwrapped(attribute):
    if isinstance(attribute, (staticmethod, classmethod)):
        attribute = attribute.__func__
    while hasattr(attribute, "__wrapped__"):
        attribute = attribute.__wrapped__
    return attribute


def _names(code) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    product = {"@"} if any(each.argrepr == "@" for each in dis.get_instructions(code)) else set()
    return product.union(code.co_names, *map(_names, inner))


def install() -> None:
    """Makes models ask check() when tessera is wanted of them. transformers has no hook between a
    model and an implementation's name but this method, which every model calls as it is built and
    when its implementation is set; what it answers for any name stays as it was."""
    asked = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(asked)
    def get_correct_attn_implementation(self, requested_attention, *arguments, **keywords):
        if requested_attention == "tessera":
            check(self)
        return asked(self, requested_attention, *arguments, **keywords)
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
