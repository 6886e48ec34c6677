# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching on tessera.

transformers serves only implementations whose name it knows. For "sdpa" and "paged|eager" it fills a dense mask
of all queries and all keys of the batch in every step. To names with "flash" in them it gives lengths instead. So
there is a second name, NAME, for the same attention over packed sequences. Do not load models with it:
transformers would look for a package of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import transformers
from packaging.version import Version  # which transformers needs
from transformers import PreTrainedModel, masking_utils

from .._lib import Refused
from ..torch import attention

NAME = "tessera_flash"


@contextlib.contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Inside this context, model.generate_batch and the ContinuousBatchingManager of `model` run on tessera.

    Do not call generate() inside. Load the model with attn_implementation="tessera"; another implementation is a
    ValueError. Refused before transformers 5.19.

    >>> with tessera.hf.continuous_batching(model):
    ...     outputs = model.generate_batch(prompts, max_new_tokens=64)
    """
    if Version(transformers.__version__) < Version("5.19.dev0"):
        raise Refused(f"tessera.hf.continuous_batching: transformers=={transformers.__version__}: gives steps to "
                      "implementations of its own alone; 5.19 or later would work")
    configs = list({id(part.config): part.config for part in model.modules()
                    if isinstance(part, PreTrainedModel)}.values())  # those of parts behind the whole
    before = [config._attn_implementation for config in configs]
    if before[0] != "tessera":
        raise ValueError(f'tessera.hf.continuous_batching: attn_implementation="{before[0]}": must be "tessera"; '
                         'model.set_attn_implementation("tessera") makes it so')
    after = [NAME if name == "tessera" else name for name in before]
    try:
        _set(configs, after)
        yield model
    finally:
        _set(configs, before)


@torch.compiler.disable  # the cache is written in place through views of it
def packed_attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None,
                     sliding_window=None, softcap=None, s_aux=None, position_bias=None, is_causal=True,
                     cache=None, cu_seq_lens_q=None, max_length_q=None, block_table=None, **paged):
    """transformers' attention function of a step: query [1, h, t, d] of all new tokens -> (o [1, t, h, d],
    None), where a step is what comes with lengths. Where cu_seq_lens_k is this layer's, key and value
    [1, h, keys, d] are those of each sequence from its first visible token on (transformers 5.24); where it
    is a table of all kinds of layers, they are of the new tokens, and cache.update makes them so (5.23)."""
    if cu_seq_lens_q is None or query.shape[0] != 1 or attention_mask is not None:
        raise Refused(f"tessera.hf: {type(module).__name__}: {_ONLY_STEPS}")
    if block_table is not None or position_bias is not None:
        name = "position_bias" if block_table is None else "block_table"
        raise Refused(f"tessera.hf.continuous_batching: {type(module).__name__}: {name}=Tensor: is not known to "
                      "packed sequences over transformers' cache; use sdpa for this model")
    if not getattr(module, "is_causal", True):  # from 5.24 on no mask tells
        raise Refused(f"tessera.hf.continuous_batching: {type(module).__name__}: is_causal=False: sees both ways, and "
                      "packed sequences over transformers' cache are causal; use sdpa for this model")
    if cache is not None and isinstance(paged.get("cu_seq_lens_k"), dict):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=paged)
    lengths = paged.get("cu_seq_lens_k")
    if not isinstance(lengths, torch.Tensor):
        raise Refused(f"tessera.hf.continuous_batching: {type(module).__name__}: cu_seq_lens_k="
                      f"{type(lengths).__name__}: this layer does not read transformers' paged cache; use sdpa for "
                      "this model")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    band = dict(causal=True, window=None if sliding_window is None else (sliding_window - 1, 0)) if is_causal else {}
    longest = {name: length for name, length in (("max_seqlen_q", max_length_q),
                                                 ("max_seqlen_k", paged.get("max_length_k")))
               if isinstance(length, int)}
    o = attention(q, k, v, layout="thd", cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=lengths,
                  align="bottom_right", softmax_scale=scaling, softcap=softcap or 0.0, dropout_p=dropout,
                  sink=None if s_aux is None else s_aux.float(), **band, **longest)
    return o[None], None


def no_mask(*_, mask_function=masking_utils.causal_mask_function, config=None, attention_mask=None, **others) -> None:
    """transformers' mask function of a step: lengths and the window say it all. Refused: another mask."""
    if attention_mask is not None:
        raise Refused(f'tessera.hf: model_type="{getattr(config, "model_type", "")}": {_ONLY_STEPS}')
    for name in _parts(mask_function):
        if name not in _SAID_BY_LENGTHS:
            raise Refused(f'tessera.hf.continuous_batching: model_type="{getattr(config, "model_type", "")}": its mask '
                          f"has {name}, and packed sequences over transformers' cache are causal, with a window or "
                          "without; use sdpa for this model")


# ---- below: how ----

_ONLY_STEPS = ("inside tessera.hf.continuous_batching only generate_batch and continuous batching run; call the model "
               "outside of it")
_SAID_BY_LENGTHS = {"causal_mask_function", "and_masks", "sliding_window_overlay", "packed_sequence_mask_function",
                    "remap_positions_for_packed_sequence"}


def _parts(function) -> Iterator[str]:
    """The names of a mask function and of those that it is made of."""
    yield function.__qualname__.partition(".")[0]
    for cell in function.__closure__ or ():
        inside = cell.cell_contents
        for each in inside if isinstance(inside, (tuple, list)) else (inside,):
            if callable(each) and hasattr(each, "__qualname__"):
                yield from _parts(each)


def _set(configs, names):
    for config, name in zip(configs, names):  # a configuration hands its own on to those inside it, which follow
        config._attn_implementation = name
