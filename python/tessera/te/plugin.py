# SPDX-License-Identifier: Apache-2.0
"""tessera inside an unchanged TransformerEngine: NVTE_PLUGIN=tessera.te.plugin, and nothing else.

TE 2.20 imports the module that NVTE_PLUGIN names while it loads its own library, calls load_plugins(), and takes from
transformer_engine_torch

    flash_attention         (softmax_scale, ...) -> module, where TE makes its FlashAttention
    get_attention_backend   (AttentionParams) -> which backend runs, where TE selects one

Calls that tessera can run go to the first. The others go to the backend that TE's own selection takes, with one
warning for each reason. The module is TE's FlashAttention with another forward, which runs for tessera's version:
if TE selects the flash-attn package, that still runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import warnings

import torch

from ..torch import attention
from ..torch._functions import Plans, prepared
from .pytorch import _words
from .pytorch.attention.dot_product_attention import _direct
from .pytorch.attention.dot_product_attention._choice import _selection
from .pytorch.constants import AttnMaskTypes

TESTED = "2.20.2"
VERSION = _selection.flash_version()  # of the backend, by which forward knows that it was selected
_LIBRARY = "transformer_engine_torch"
_DPA = "transformer_engine.pytorch.attention.dot_product_attention"
_OF_OURS = {"device", "requires_backward", "padding"}  # fields that TE's AttentionParams does not have
_OF_THEIRS = {"fp8", "fp8_meta", "qkv_type"}         # whose values are TE's own classes
_said: set[str] = set()


def load_plugins():
    """TE calls this. It adds the two names that TE looks for to TE's library, which keeps its own names."""
    library = sys.modules.get(_LIBRARY)
    if library is None:
        raise RuntimeError(f"tessera.te.plugin: load_plugins(): {_LIBRARY} is not imported; set "
                           "NVTE_PLUGIN=tessera.te.plugin, and TransformerEngine calls it")
    library.flash_attention, library.get_attention_backend = flash_attention, get_attention_backend


def unload_plugins():
    """Undoes load_plugins(): from their next call on, existing modules run the backend that TE's own selection
    takes."""
    library = sys.modules.get(_LIBRARY)
    for name, ours in (("flash_attention", flash_attention), ("get_attention_backend", get_attention_backend)):
        if getattr(library, name, None) is ours:
            delattr(library, name)
    dpa, utils = (sys.modules.get(f"{_DPA}.{name}") for name in ("dot_product_attention", "utils"))
    if getattr(dpa, "FlashAttention", None) is flash_attention:
        dpa.FlashAttention = dpa._FlashAttentionNative
    if getattr(utils, "get_attention_backend", None) is get_attention_backend:
        utils.get_attention_backend = utils._original_get_attention_backend
    if dpa is not None:
        dpa._attention_backends["backend_selection_requires_update"] = True
    _said.clear()


# ---- selection ----

def get_attention_backend(attention_params):
    """TE's six results, of FlashAttention in tessera's version, or of TE's own selection."""
    own = not _selection.switched_off()["FlashAttention"]
    reason = _why_not(attention_params) if own else None
    if own and reason is None:
        return True, VERSION, False, None, False, [True, False, False]
    if own and not torch.compiler.is_compiling():
        _say(reason)
    return sys.modules[f"{_DPA}.utils"]._original_get_attention_backend(attention_params)


def _say(reason: str):
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"NVTE_PLUGIN=tessera.te.plugin: {reason}; TransformerEngine's own selection runs it",
                      RuntimeWarning, stacklevel=3)


def _why_not(params) -> str | None:
    """Why tessera does not run this; None if it does."""
    for held, reason in _not_carried(params):
        if held:
            return reason
    ours = _selection.AttentionParams(**{name: getattr(params, name) for name in _shared()})
    if torch.compiler.is_compiling():  # a constant of the graph
        able = _selection.get_attention_backend(ours)[5][0]
        return None if able else "tessera has no kernel for it"
    return next(iter(_selection.why_not(ours)["FlashAttention"]), None)


@functools.cache
def _shared() -> tuple[str, ...]:
    return tuple(name for name in _selection._FIELDS if name not in _OF_OURS | _OF_THEIRS)


def _not_carried(p):
    """What TE does not hand to its FlashAttention, and what of it is TE's own."""
    recipe = (p.fp8_meta or {}).get("recipe")
    yield p.qkv_type not in (torch.Tensor, torch.nn.Parameter), f"qkv_type={p.qkv_type.__name__}: takes torch.Tensor"
    yield p.fp8 and getattr(recipe, "fp8_dpa", True), "fp8_dpa=True: FP8 attention is TransformerEngine's"
    yield p.fp8_output, "fp8_output=True: takes 16-bit outputs"
    yield p.context_parallel, f"cp_size={p.cp_size}: context parallelism is TransformerEngine's"
    yield p.inference_params is not None, "inference_params: TransformerEngine's KV cache is its own"
    yield p.has_score_mod, "score_mod: a graph of cuDNN"
    yield p.softmax_type != "vanilla", f"softmax_type={p.softmax_type}: the offset does not reach a plugin"
    yield p.return_max_logit, "return_max_logit=True: does not reach a plugin"
    yield p.checkpoint_core_attention, "checkpoint_core_attention=True: does not reach a plugin"
    yield (p.core_attention_bias_type not in ("no_bias", "alibi"),
           f"core_attention_bias_type={p.core_attention_bias_type}: the bias does not reach a plugin")
    diagonal = p.window_size not in (None, (-1, -1), (-1, 0)) or p.core_attention_bias_type == "alibi"
    implied = _words.bottom_right(p.attn_mask_type, None)
    yield (diagonal and bool(p.bottom_right_diagonal) != implied,
           f"bottom_right_diagonal={p.bottom_right_diagonal} beside {p.attn_mask_type}: does not reach a plugin")


# ---- the module ----

def flash_attention(softmax_scale, **options):
    """What TE calls in place of its class FlashAttention."""
    return _class()(softmax_scale, **options)


@functools.cache
def _class() -> type:
    """TE's FlashAttention with tessera's forward, once TE is imported; a TE that says more is refused."""
    native = importlib.import_module(f"{_DPA}.backends").FlashAttention
    _check("FlashAttention.forward", list(inspect.signature(native.forward).parameters)[1:],
           _direct.WORDS | _direct._SHARED | {"query_layer", "key_layer", "value_layer"})
    fields = [field.name for field in dataclasses.fields(importlib.import_module(f"{_DPA}.utils").AttentionParams)]
    _check("AttentionParams", fields, set(_selection._FIELDS))
    if missing := [name for name in (*_shared(), *_OF_THEIRS) if name not in fields]:
        raise _changed(f"AttentionParams has no {', '.join(missing)}")

    class FlashAttention(native):
        softmax_type, return_max_logit = "vanilla", False  # what _direct reads of a module

        def __init__(self, softmax_scale, **options):
            super().__init__(softmax_scale, **options)
            self._plans = Plans()

        def forward(self, query_layer, key_layer, value_layer, **words):
            if words.get("flash_attention_backend") is not VERSION:
                return super().forward(query_layer, key_layer, value_layer, **words)
            return _forward(self, query_layer, key_layer, value_layer, words)

        def __reduce__(self):  # pickles find no class inside a function
            return _empty, (), self.__dict__

    return FlashAttention


def _empty() -> torch.nn.Module:
    """A module that its pickle fills."""
    return object.__new__(_class())


def _check(what: str, theirs: list, known):
    if strange := [name for name in theirs if name not in known]:
        raise _changed(f"{what} takes {', '.join(strange)}, which the plugin does not know")


def _changed(what: str) -> RuntimeError:
    return RuntimeError(f"NVTE_PLUGIN=tessera.te.plugin: {what}; it was tested with TransformerEngine {TESTED}; "
                        "unset NVTE_PLUGIN, or install that")


def _forward(module, q, k, v, words: dict):
    """[.., h * dv] of TE's words. Calls whose words are the same share what they were translated to."""
    key = None if torch.compiler.is_compiling() else _key(module, words)
    run = None if key is None else module._plans.get(key)
    if run is not None:
        if key[0][0] != "t":
            return run(q, k, v).flatten(-2)
        return run(q, k, v, words["cu_seqlens_q"], words["cu_seqlens_kv"], words["max_seqlen_q"],
                   words["max_seqlen_kv"]).flatten(-2)
    if not words.get("pad_between_seqs"):
        words = {**words, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
    q, k, v, keywords = _direct.translated(module, q, k, v, **words)
    out = attention(q, k, v, **keywords)
    if key is not None:
        module._plans[key] = prepared(_LENGTHS if key[0][0] == "t" else (), **keywords)
    return out.flatten(-2)


def _key(module, words: dict):
    """All that a translation depends on beside the tensors q, k, v and cu_seqlens, and the lengths; None where other
    tensors matter."""
    mask, layout = words.get("attn_mask_type", "causal"), words.get("qkv_layout", "sbh3d")
    if words.get("alibi_slopes") is not None or module.attention_dropout and module.training or mask not in _PLAIN:
        return None
    window = words.get("window_size")
    key = (layout, mask, window, window and tuple(map(type, window)), words.get("softcap", 0.0), module.softmax_scale,
           module.deterministic)
    if layout[0] != "t":
        return None if "padding" in mask else key
    if words.get("pad_between_seqs") or type(words.get("max_seqlen_q")) is not int or \
            type(words.get("max_seqlen_kv")) is not int:
        return None
    of_q, of_kv = words.get("cu_seqlens_q"), words.get("cu_seqlens_kv")
    return None if of_q is None or of_kv is None else (*key, of_q is of_kv)


_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # of packed sequences, new in each call
_PLAIN = frozenset(AttnMaskTypes) - {"arbitrary"}
