# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention, with TE's signature, attributes and state dict."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch.utils.checkpoint import checkpoint

from .....torch import attention
from .....torch._functions import drawn_state
from ...._logging import logger, switch
from ...._names import missing
from ... import _words
from ..._translate import Call
from ...constants import AttnTypes, CPLoadBalancingStrategy
from ...cpp_extensions._tables import META_O, META_QKV
from ...quantization import FP8GlobalStateManager
from ...tensor.quantized_tensor import QuantizedTensor
from . import _score_mod, _unfused
from ._choice import _plans, _policies, _selection
from ._inputs import _packed
from ._quantized import _fp8
from . import utils as dpa_utils
from ._direct import merged
from ._quantized._emulation import Emulation
from ._quantized._fp8_state import Float8Module
from ._choice._selection import AttentionParams, _attention_backends
from .backends import FlashAttention, FusedAttention, UnfusedDotProductAttention, function_of
from .context_parallel import Spread

__all__ = ["DotProductAttention", "_attention_backends"]
__getattr__ = missing(__name__)


class DotProductAttention(Float8Module):
    """TransformerEngine's attention between projections: [.., h, d] in, [.., h * dv] out.

    Arguments mean what TE documents. tessera's kernels also run calls that TE refuses or sends to its unfused
    path. kv_channels=(dqk, dv) is MLA. softmax_offset is None, zeros for "off-by-one", and a
    parameter [heads] for "learnable". Padding rows of the output are zero.

    >>> attention = DotProductAttention(16, 64, qkv_format="bshd", attn_mask_type="causal")
    >>> out = attention(query_layer, key_layer, value_layer)
    """

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
                 qkv_format="sbhd", attn_mask_type="causal", window_size=None,
                 bottom_right_diagonal=None, softcap=0.0, sequence_parallel=False, tp_size=1,
                 get_rng_state_tracker=None, tp_group=None, layer_number=None,
                 attention_type="self", cp_group=None, cp_global_ranks=None, cp_stream=None,
                 cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
                 return_max_logit=False, name=None):
        super().__init__()
        if attention_type not in AttnTypes:
            raise _words.error("attention_type", attention_type,
                               f"must be one of {_words.quoted(AttnTypes)}")
        self.qkv_format = _words.qkv_format(qkv_format)
        self.attn_mask_type = _words.mask_type(attn_mask_type)
        self.window_size = _words.check_set_window_size(self.attn_mask_type, window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softcap = _words.softcap(softcap)
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.sequence_parallel = sequence_parallel
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        for what, heads in (("num_attention_heads", num_attention_heads),
                            ("num_gqa_groups", self.num_gqa_groups)):
            if heads % self.tp_size:
                raise _words.error(what, heads, f"must be a multiple of tp_size={self.tp_size}")
        if num_attention_heads % self.num_gqa_groups:
            raise _words.error("num_gqa_groups", self.num_gqa_groups,
                               f"must divide num_attention_heads={num_attention_heads}")
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        pair = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = pair
        self.softmax_scale = pair[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.attention_type = attention_type
        self.attention_dropout = _words.dropout(attention_dropout)
        self.rng_states_tracker = None
        self.attention_dropout_ctx = contextlib.nullcontext
        if get_rng_state_tracker is not None and not sequence_parallel:
            self.rng_states_tracker = get_rng_state_tracker()
            self.attention_dropout_ctx = self.rng_states_tracker.fork
        self.layer_number = 1 if layer_number is None else layer_number
        self.name = name
        self.return_max_logit = return_max_logit
        self.deterministic = not switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", 1) or \
            torch.are_deterministic_algorithms_enabled()
        self.softmax_type = _words.softmax_type(softmax_type)
        self.softmax_offset = self._new_offset(num_attention_heads // self.tp_size)
        options = dict(softmax_scale=self.softmax_scale, attention_dropout=attention_dropout,
                       attention_dropout_ctx=self.attention_dropout_ctx,
                       attention_type=attention_type, layer_number=layer_number,
                       deterministic=self.deterministic, softmax_type=softmax_type,
                       return_max_logit=return_max_logit)
        self.flash_attention = FlashAttention(**options)
        self.fused_attention = FusedAttention(**options)
        self.unfused_attention = UnfusedDotProductAttention(**options)
        self.logger = logger
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p",
                                   load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP):
        """After this call, q, k and v hold this rank's rows of sequences on the ranks of cp_group, in TE's
        layouts, and lengths are those of the whole batch. None ends that; a group of one rank counts as None."""
        self._spread = Spread.of(cp_group, cp_comm_type, load_balancing_strategy)
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None,
                qkv_format=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
                attn_mask_type=None, window_size=None, bottom_right_diagonal=None, softcap=None,
                checkpoint_core_attention=False, core_attention_bias_type="no_bias",
                core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
                inference_params=None, pad_between_seqs=None, fp8_output=False,
                bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None,
                score_mod_tensors=None, score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None,
                qkv_interleave_dim=-3, thd_attention_policies=None, thd_attention_policy_dispatch="auto"):
        """[s, b, h * dv], [b, s, h * dv] or [t, h * dv]; with return_max_logit a pair with [h].

        Only padding masks read attention_mask and cu_seqlens_*; "arbitrary" reads attention_mask too.
        fast_zero_fill and num_splits have no effect: they ask for a schedule, and tessera has its own. In an FP8
        region fp8_output asks for a Float8Tensor, bf16_backward for 16-bit products of the backward pass.
        """
        q_format = self.qkv_format if qkv_format is None else _words.qkv_format(qkv_format)
        q, k, v, layout = _packed.separate(query_layer, key_layer, value_layer, qkv_layer, kv_layer,
                                           qkv_interleave_dim, q_format)
        if thd_attention_policies is not None:
            policies = _policies.checked(
                thd_attention_policies, thd_attention_policy_dispatch, attn_mask_type, window_size, q_format,
                inference_params=inference_params, cp_group=self._spread, attention_mask=attention_mask)
            return _policies.forward(
                self, policies, q, k, v,
                (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded), layout,
                bottom_right_diagonal=bottom_right_diagonal, softcap=softcap, max_seqlen_q=max_seqlen_q,
                max_seqlen_kv=max_seqlen_kv, checkpoint_core_attention=checkpoint_core_attention,
                core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
                alibi_slopes=alibi_slopes, fp8_output=fp8_output, bf16_backward=bf16_backward)
        tensors = (attention_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                   cu_seqlens_kv_padded, core_attention_bias, alibi_slopes, self._offset())
        words = (q_format, attn_mask_type, window_size, bottom_right_diagonal,
                 _words.max_seqlen("max_seqlen_q", max_seqlen_q),
                 _words.max_seqlen("max_seqlen_kv", max_seqlen_kv), core_attention_bias_type,
                 self.softcap if softcap is None else _words.softcap(softcap))
        if not score_mod is score_mod_tensors is score_mod_bprop is score_mod_bprop_tensors is None:
            mods = score_mod, score_mod_tensors, score_mod_bprop, score_mod_bprop_tensors
            self._check_modified(mods, inference_params, fp8_output)
            return self._modified(self._call(q, k, v, tensors, words), mods, checkpoint_core_attention)
        if self._may_be_in_fp8(q, k, v, fp8_output):
            self.init_fp8_metadata(device=q.device)
            if self.fp8:
                return self._in_fp8(q, k, v, tensors, words, inference_params, fp8_output, bf16_backward)
            if fp8_output:
                raise _words.error("fp8_output", True, "belongs in an autocast region whose recipe has fp8_dpa "
                                   "or fp8_mha")
            q, k, v = (x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (q, k, v))
        if inference_params is not None:
            return self._with_cache(inference_params, q, k, v, tensors, words)
        if self._spread is not None:
            return self._on_ranks(self._call(q, k, v, tensors, words), checkpoint_core_attention)
        if torch.compiler.is_compiling():
            keywords = self._call(q, k, v, tensors, words).keywords()
            backend = self._switched_backend()
        else:
            backend, keywords = self._prepared(q, k, v, tensors, words, layout,
                                               checkpoint_core_attention)
        if self.attention_dropout and self.training:
            keywords = {**keywords, **self._dropout(q.device)}
        if checkpoint_core_attention:
            result = checkpoint(backend, q, k, v, use_reentrant=False, **keywords)
        else:
            result = backend(q, k, v, **keywords)
        if self.fp8_calibration:
            self._calibrate(q, k, v, result)
        return merged(result) if self.return_max_logit else result.flatten(-2)

    def _may_be_in_fp8(self, q, k, v, fp8_output) -> bool:
        region = FP8GlobalStateManager.quantization_state
        return region.fp8_enabled or region.fp8_calibration or self.fp8 or self.fp8_calibration or \
            bool(fp8_output) or isinstance(q, QuantizedTensor) or isinstance(k, QuantizedTensor) or \
            isinstance(v, QuantizedTensor)

    def _with_windows(self, q, k, v, tensors, words, layout, windows: dict, checkpointing: bool):
        """forward where each sequence has a window of its own (_policies.windows_of), by tessera's kernels. None:
        they are not what is selected."""
        call = self._call(q, k, v, tensors, words)
        keywords = call.keywords() | windows
        self._check_heads(call)
        if torch.compiler.is_compiling():
            backend = function_of(self._switched_backend())
        else:
            self._select(self._params(call, keywords, layout, checkpointing))
            backend = self._selected_backend()
        if backend is not attention:
            return None
        if self.attention_dropout and self.training:
            keywords |= self._dropout(q.device)
        result = checkpoint(backend, q, k, v, use_reentrant=False, **keywords) if checkpointing else \
            backend(q, k, v, **keywords)
        return merged(result) if self.return_max_logit else result.flatten(-2)

    def _check_modified(self, mods, inference_params, fp8_output):
        for name, needs, x, other in (("score_mod_tensors", "score_mod", mods[1], mods[0]),
                                      ("score_mod_bprop", "score_mod", mods[2], mods[0]),
                                      ("score_mod_bprop_tensors", "score_mod_bprop", mods[3], mods[2])):
            if x is not None and other is None:
                raise _words.error(name, type(x).__name__, f"belongs to {needs}")
        region = FP8GlobalStateManager.quantization_state.fp8_enabled
        for name, value in (("inference_params", inference_params), ("cp_group", self._spread),
                            ("fp8_output", fp8_output or None), ("an FP8 region", region or None),
                            ("return_max_logit", self.return_max_logit or None)):
            if value is not None:
                raise _words.later("score_mod", "a callback", f"it beside {name}", "leave one of them out")

    def _modified(self, call: Call, mods, checkpointing: bool):
        """forward with score_mod, which is all there is between scores and softmax."""
        for name, value, default in (
                ("attn_mask_type", call.mask, "no_mask"), ("window_size", call.window, (-1, -1)),
                ("core_attention_bias_type", call.bias_type, "no_bias"), ("softcap", call.softcap, 0.0),
                ("softmax_type", call.softmax_type, "vanilla")):
            if value != default:
                raise _words.error(name, value, f"must be {default!r} beside score_mod, which can say the same")
        if call.packed:
            raise _words.error("qkv_format", call.q_format, 'must be "bshd" or "sbhd" beside score_mod')
        given = call.keywords()
        self._check_heads(call)
        score_mod, tensors, backward, backward_tensors = mods
        given |= _score_mod.keywords(score_mod, tensors, backward, backward_tensors, call.q, call.k, call.q_format,
                                     call.softmax_scale)
        if self.attention_dropout and self.training:
            given |= self._dropout(call.q.device)
        backend, qkv = function_of(self._switched_backend()), (call.q, call.k, call.v)
        result = checkpoint(backend, *qkv, use_reentrant=False, **given) if checkpointing else backend(*qkv, **given)
        return result.flatten(-2)

    def _on_ranks(self, call: Call, checkpointing: bool):
        self._check_heads(call)
        if self._switched_backend() is self.unfused_attention:
            raise _words.error("cp_group", f"{self._spread.size} ranks", "context parallelism needs "
                               "NVTE_FLASH_ATTN or NVTE_FUSED_ATTN; unset one of them")
        _no_package(self._switched_backend(), "context parallelism")
        dropout = self.attention_dropout if self.training else 0.0

        def attend(q, k, v):
            with self.attention_dropout_ctx() if dropout else contextlib.nullcontext():
                return self._spread.attention(dataclasses.replace(call, q=q, k=k, v=v), dropout)
        qkv = call.q, call.k, call.v
        result = checkpoint(attend, *qkv, use_reentrant=False) if checkpointing else attend(*qkv)
        return merged(result) if self.return_max_logit else result.flatten(-2)

    def set_meta_tensor(self, fwd: bool, recipe):
        """TE's hook round the states of a recipe, which are made here when a region begins."""

    def get_quantizer_roles(self, **_):
        raise _of_roles("get_quantizer_roles")

    def get_qkv_quantization_capabilities(self, **_):
        raise _of_roles("get_qkv_quantization_capabilities")

    # ---- below: how ----

    @torch.compiler.disable
    def _in_fp8(self, q, k, v, tensors, words, inference_params, fp8_output: bool, bf16_backward: bool):
        """forward where the region's recipe has FP8 attention. Nothing that checkpointing would spare is
        kept."""
        recipe = self.fp8_meta["local_recipes"][0]
        fp8_output = fp8_output or recipe.fp8_mha
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x if isinstance(x, QuantizedTensor) else x.to(dtype) for x in (q, k, v))
        call = self._call(q, k, v, tensors, words)
        keywords = call.keywords()
        self._check_heads(call)
        params = self._params(call, keywords, "_".join([call.q_format] * 3), False)
        meta = {name: self.fp8_meta[name] for name in ("recipe", "local_recipes")}
        self._select(dataclasses.replace(
            params, fp8=True, fp8_meta=meta, fp8_output=bool(fp8_output), inference_params=inference_params,
            qkv_type=type(q), context_parallel=self._spread is not None))
        if _attention_backends["use_fused_attention"]:
            _no_package(self.fused_attention, "FP8 attention")
        wide = _fp8.wants_wide_backward(bf16_backward)
        logger.debug("Running with fp8_recipe.fp8_mha=%s, fp8_recipe.fp8_dpa=%s, and NVTE_FP8_DPA_BWD=%s",
                     recipe.fp8_mha, recipe.fp8_dpa, int(not wide))
        if self.attention_dropout and self.training:
            keywords |= self._dropout(q.device)
        if _attention_backends["use_unfused_attention"]:
            result = _unfused.attention(q, k, v, **keywords, emulation=Emulation(self, fp8_output))
        else:
            result = _fp8.attention(self, q, k, v, keywords, fp8_output, wide)
        return merged(result) if self.return_max_logit else result.flatten(-2)

    def _calibrate(self, q, k, v, result):
        """What an FP8 region would have noted."""
        forward = self.quantizers["scaling_fwd"]
        forward[META_QKV].calibrate(q, k, v)
        forward[META_O].calibrate(result[0] if self.return_max_logit else result)

    def _dropout(self, device) -> dict:
        with self.attention_dropout_ctx():
            return {"dropout_p": self.attention_dropout, "rng_state": drawn_state(device)}

    def _with_cache(self, inference_params, q, k, v, tensors, words):
        """Appends k and v, without their gradients, to the cache of this layer; q sees all of it, along the
        bottom right."""
        mask = self.attn_mask_type if words[1] is None else _words.mask_type(words[1])
        if "padding" not in mask:
            raise _words.error("attn_mask_type", mask, 'must be a padding mask beside inference_params: '
                               '"padding", "padding_causal" or "padding_causal_bottom_right"')
        mask = "padding_causal_bottom_right" if "causal" in mask else mask
        q_format = words[0]
        k, v, table, cu_q, cu_kv = inference_params.append(self.layer_number, k, v, q_format)
        call = self._call(q, k, v, tensors, (q_format, mask, *words[2:]))
        call.kv_format, call.page_table_k = "bshd", table
        call.attention_mask, call.cu_seqlens_q, call.cu_seqlens_kv = None, cu_q, cu_kv
        call.cu_seqlens_q_padded = call.cu_seqlens_kv_padded = None
        if q_format == "thd":
            call.max_seqlen_q = inference_params.max_seqlen_q
        call.max_seqlen_kv = inference_params.max_sequence_length
        if torch.compiler.is_compiling():
            backend = function_of(self._switched_backend())
        else:
            params = self._params(call, call.keywords(), f"{q_format}_bshd_bshd" if table is None else
                                  f"paged_kv_{q_format}_bshd_bshd", False)
            self._select(dataclasses.replace(params, inference_params=inference_params,
                                             is_training=False, requires_backward=False))
            backend = self._selected_backend()
        if backend is function_of(self.unfused_attention) and table is not None:
            call.k, call.v = (pool[table.long()].flatten(1, 2) for pool in (k, v))
            call.page_table_k = None
        result = backend(call.q, call.k, call.v, **call.keywords())
        return merged(result) if self.return_max_logit else result.flatten(-2)

    def _new_offset(self, heads: int):
        if self.softmax_type == "vanilla":
            return None
        zeros = torch.zeros(heads, device="cuda" if torch.cuda.is_available() else None)
        return zeros if self.softmax_type == "off-by-one" else torch.nn.Parameter(zeros)

    def _offset(self):
        """The offset where it is learnt. That of "off-by-one" is when its owner wants a gradient."""
        offset = self.softmax_offset
        return offset if offset is not None and offset.requires_grad or \
            self.softmax_type == "learnable" else None

    def _window_for(self, mask: str):
        """The module's window beside another mask: what mask types add themselves is left out."""
        left, right = self.window_size
        if "causal" in mask:
            return left, 0
        return (-1, -1) if "causal" in self.attn_mask_type and left < 0 else (left, right)

    def _call(self, q, k, v, tensors, words) -> Call:
        """What forward was called with, in canonical words."""
        (q_format, attn_mask_type, window_size, bottom_right, max_seqlen_q, max_seqlen_kv,
         bias_type, softcap) = words
        (attention_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
         bias, alibi_slopes, offset) = tensors
        mask = self.attn_mask_type if attn_mask_type is None else _words.mask_type(attn_mask_type)
        window = self.window_size if window_size is None and attn_mask_type is None else \
            _words.check_set_window_size(mask, window_size or self._window_for(mask))
        if bottom_right is None:
            bottom_right = self.bottom_right_diagonal
        return Call(q, k, v, q_format, q_format, mask, window,
                    _words.bottom_right(mask, bottom_right), attention_mask, cu_seqlens_q,
                    cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q,
                    max_seqlen_kv, None, None, _words.bias_type(bias_type), bias, alibi_slopes,
                    self.softmax_scale, self.softmax_type, offset, self.deterministic,
                    self.return_max_logit, softcap)

    def _check_heads(self, call: Call):
        heads = self.num_attention_heads // self.tp_size
        for name, x, h, d in (
                ("query_layer", call.q, heads, self.hidden_size_per_attention_head_k),
                ("key_layer", call.k, self.num_gqa_groups_per_partition,
                 self.hidden_size_per_attention_head_k),
                ("value_layer", call.v, self.num_gqa_groups_per_partition,
                 self.hidden_size_per_attention_head_v)):
            if tuple(x.shape[-2:]) != (h, d):
                raise _words.error(f"{name}.shape", list(x.shape),
                                   f"must end with [{h}, {d}], this module's heads and head dim")

    def _prepared(self, q, k, v, tensors, words, layout, checkpointing: bool):
        """(the module that runs, its keywords but for dropout). Calls that look alike are checked
        once, and share a selection while it is the last one or the switches stay as they were."""
        window = words[2]
        types = tuple(map(type, window)) if type(window) is tuple else None  # (1.0, 0) == (1, 0)
        key = _plans.key(q, k, v, tensors, (*words, types, layout, checkpointing, *self._settings()))
        plan = _plans.find(key)
        if plan is not None:
            backend = self._selected_backend()
            if backend is attention and plan.kernels is not None and \
                    not (self.attention_dropout and self.training):
                return plan.kernels, {}
            keywords = plan.keywords or self._call(q, k, v, tensors, words).keywords(checked=True)
            return backend, keywords
        call = self._call(q, k, v, tensors, words)
        keywords = call.keywords()
        self._check_heads(call)
        self._select(self._params(call, keywords, layout, checkpointing))
        _plans.keep(key, keywords)
        return self._selected_backend(), keywords

    def _settings(self) -> tuple:
        """What this module adds to a call."""
        return (self.training, self.deterministic, self.attention_dropout, self.softmax_scale,
                self.softmax_type, self.return_max_logit, self.num_attention_heads, self.tp_size,
                self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head_k,
                self.hidden_size_per_attention_head_v, self.attn_mask_type, self.window_size,
                self.bottom_right_diagonal)

    def _select(self, params: AttentionParams):
        """Writes a selection to _attention_backends; raises every reason when none can."""
        cache = _attention_backends
        if cache["attention_params"] != params:
            cache["attention_params"] = params
            cache["backend_selection_requires_update"] = True
        if not cache["backend_selection_requires_update"]:
            return
        *chosen, _ = dpa_utils.get_attention_backend(params)
        cache.update(zip(_plans.CHOSEN, chosen))
        selected = any(chosen[::2])
        cache["backend_selection_requires_update"] = not selected
        if not selected:
            raise ValueError(_nothing_fits(_selection.why_not(params)))
        self._announce(cache)

    def _selected_backend(self):
        name = "fused_attention" if _attention_backends["use_fused_attention"] else \
            "flash_attention" if _attention_backends["use_flash_attention"] else \
            "unfused_attention"
        return function_of(self._modules[name])

    def _switched_backend(self):
        """While torch.compile traces: by the switches alone, without a log. A call that tessera's
        kernels refuse then raises their reasons."""
        off = _selection.switched_off()
        for name, module in (("FusedAttention", self.fused_attention),
                             ("FlashAttention", self.flash_attention),
                             ("UnfusedDotProductAttention", self.unfused_attention)):
            if not off[name]:
                return module
        raise ValueError(_nothing_fits(off))

    def _params(self, call: Call, keywords: dict, layout: str | None,
                checkpointing: bool) -> AttentionParams:
        bias = keywords.get("bias")
        slopes = call.alibi_slopes
        starts = "cu_seqlens_q_padded" in keywords or "cu_seqlens_k_padded" in keywords
        return AttentionParams(
            qkv_dtype=call.q.dtype,
            qkv_layout=layout or dpa_utils.get_qkv_layout(call.q, call.k, call.v, call.q_format)[0],
            batch_size=call.extent("b"), num_heads=call.extent("h"),
            num_gqa_groups=call.extent("h", "kv"),
            max_seqlen_q=keywords.get("max_seqlen_q") or call.extent("s") or call.q.shape[0],
            max_seqlen_kv=keywords.get("max_seqlen_k") or call.extent("s", "kv") or
            call.k.shape[0],
            num_tokens_q=call.q.shape[0] if call.q_format == "thd" else 0,
            num_tokens_kv=call.k.shape[0] if call.kv_format == "thd" else 0, softcap=call.softcap,
            softmax_scale=call.softmax_scale, head_dim_qk=call.q.shape[-1],
            head_dim_v=call.v.shape[-1], attn_mask_type=call.mask,
            window_size=call.window, bottom_right_diagonal=call.bottom_right,
            alibi_slopes_shape=None if slopes is None else slopes.shape,
            core_attention_bias_type=call.bias_type,
            core_attention_bias_shape=None if bias is None else tuple(bias.shape),
            core_attention_bias_requires_grad=bias is not None and bias.requires_grad,
            pad_between_seqs=starts,
            attention_dropout=self.attention_dropout if self.training else 0.0,
            deterministic=self.deterministic, is_training=self.training,
            softmax_type=self.softmax_type, return_max_logit=self.return_max_logit,
            checkpoint_core_attention=checkpointing, device=str(call.q.device),
            padding=_padding(call))

    def _announce(self, cache: dict):
        if cache["use_fused_attention"]:
            logger.info("Running with FusedAttention backend (sub-backend %s)",
                        int(cache["fused_attention_backend"]))
        elif cache["use_flash_attention"]:
            logger.info("Running with FlashAttention backend (version %s)",
                        cache["flash_attention_backend"])
        else:
            logger.info("Running with UnfusedDotProductAttention backend")


def _padding(call: Call) -> str:
    """AttentionParams.padding."""
    if call.masked:
        return "mask" if isinstance(call.attention_mask, torch.Tensor) else "two masks"
    return "lengths" if call.cu_seqlens_q is call.cu_seqlens_kv else "two lengths"


def _no_package(backend: torch.nn.Module, feature: str):
    package = getattr(backend, "package", None)
    if package is not None:
        raise _words.later("package", repr(package), f"{feature} of packages",
                           "leave package= out for tessera's kernels")


def _nothing_fits(reasons: dict) -> str:
    lines = [f"  {name}: {text}" for name, texts in reasons.items() for text in texts]
    return "\n".join(["No dot product attention backend is available for the provided inputs.",
                      *lines])


def _of_roles(method: str) -> Exception:
    return _words.later(method, "called", "CustomRecipe's roles", "give autocast DelayedScaling or "
                        "Float8CurrentScaling")
