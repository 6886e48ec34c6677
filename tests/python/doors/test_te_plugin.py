# SPDX-License-Identifier: Apache-2.0
"""NVTE_PLUGIN=tessera.te.plugin in a stand-in of TransformerEngine 2.20.2, whose PyTorch part needs its CUDA library.

The stand-in has what TE has between loading its library and running a module, in TE's order and by its names: the
plugin part of common.load_framework_extension("torch") and of dot_product_attention.py, a selection, and backends that
say that they ran. Its words to a backend are those that DotProductAttention.forward gives.
"""
import copy
import dataclasses
import importlib
import os
import pickle
import sys
import types
import warnings
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tessera.torch as tt  # noqa: E402
from tessera import doors  # noqa: E402
from tessera.te import plugin  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _selection  # noqa: E402

PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"
TE_FIELDS = [(field.name, Any, field) for field in dataclasses.fields(_selection.AttentionParams)
             if field.name not in plugin._OF_OURS]


class FlashAttention(torch.nn.Module):
    """TE's, as far as the flash-attn package computes."""

    def __init__(self, softmax_scale, attention_dropout=0.0, attention_dropout_ctx=nullcontext, attention_type="self",
                 layer_number=None, deterministic=False):
        super().__init__()
        self.softmax_scale, self.deterministic = softmax_scale, deterministic
        self.attention_dropout, self.attention_dropout_ctx = attention_dropout, attention_dropout_ctx
        self.attention_type, self.layer_number = attention_type, layer_number

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_layout="sbh3d", cu_seqlens_q=None,
                cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type="causal", window_size=None,
                softcap=0.0, alibi_slopes=None, cp_group=None, cp_global_ranks=None, cp_stream=None,
                cp_comm_type="p2p", fp8=False, fp8_meta=None, quantizers=None, pad_between_seqs=False,
                inference_params=None, flash_attention_backend=None, fp8_output=False, num_splits=1,
                cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, load_balancing_strategy=None):
        return "the flash-attn package"


def module(name, **members):
    made = types.ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
    return made


@pytest.fixture
def te(monkeypatch):
    """load(plugin's name) -> TE's module dot_product_attention, after what TE does while it is imported."""
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)

    def load(name="tessera.te.plugin"):
        monkeypatch.setenv("NVTE_PLUGIN", name)
        library = module("transformer_engine_torch", get_cudnn_version=lambda: 91200)
        try:  # common/__init__.py
            sys.modules["transformer_engine_torch_nv"] = library
            importlib.import_module(os.environ["NVTE_PLUGIN"]).load_plugins()
        except Exception as e:
            sys.modules.pop("transformer_engine_torch_nv", None)
            sys.modules["transformer_engine_torch"] = library
            warnings.warn(f"NVTE_PLUGIN={name} but plugin loading failed: {e}", RuntimeWarning, stacklevel=2)
        parent = ""
        for part in PACKAGE.split("."):
            parent = f"{parent}.{part}".lstrip(".")
            module(parent, __path__=[])
        module(f"{PACKAGE}.backends", FlashAttention=FlashAttention)
        utils = module(f"{PACKAGE}.utils", AttentionParams=dataclasses.make_dataclass("AttentionParams", TE_FIELDS),
                       get_attention_backend=lambda params: (False, None, True, 1, False, [False, True, True]))
        dpa = module(f"{PACKAGE}.dot_product_attention", FlashAttention=FlashAttention, dpa_utils=utils,
                     _attention_backends={"backend_selection_requires_update": False})
        tex = sys.modules["transformer_engine_torch"]  # dot_product_attention.py
        dpa._FlashAttentionNative = dpa.FlashAttention
        dpa.FlashAttention = getattr(tex, "flash_attention", dpa._FlashAttentionNative)
        theirs = getattr(tex, "get_attention_backend", None)
        if theirs is not None:
            utils._original_get_attention_backend = utils.get_attention_backend
            utils.get_attention_backend = theirs
        plugin._class.cache_clear()
        return dpa

    yield load
    plugin.unload_plugins()
    plugin._class.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("transformer_engine"):
            del sys.modules[name]


def params(dpa, **fields):
    given = dict(qkv_layout="sbhd_sbhd_sbhd", num_heads=4, num_gqa_groups=2, max_seqlen_q=9, max_seqlen_kv=9,
                 head_dim_qk=16, head_dim_v=16, attn_mask_type="causal", window_size=(-1, 0),
                 bottom_right_diagonal=False, softmax_scale=0.3, core_attention_bias_requires_grad=False)
    return dpa.dpa_utils.AttentionParams(**{**given, **fields})


def run(dpa, q, k, v, backend, **words):
    """As DotProductAttention.forward calls self.flash_attention."""
    given = dict(attention_mask=None, qkv_layout="sbhd_sbhd_sbhd", cu_seqlens_q=None, cu_seqlens_kv=None,
                 attn_mask_type="causal", window_size=(-1, 0), softcap=0.0, alibi_slopes=None, cp_group=None,
                 cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", load_balancing_strategy=1,
                 max_seqlen_q=9, max_seqlen_kv=9, fp8=False, fp8_meta={}, quantizers=None, pad_between_seqs=False,
                 inference_params=None, flash_attention_backend=backend, fp8_output=False, num_splits=1,
                 cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)
    module = dpa.FlashAttention(0.3, attention_type="self", layer_number=1, deterministic=False,
                                attention_dropout=0.0, attention_dropout_ctx=nullcontext)
    return module, lambda: module(q, k, v, **{**given, **words})


def qkv(*lead, h=4, hk=2, d=16):
    torch.manual_seed(0)
    return [torch.randn(*lead, heads, d, dtype=torch.bfloat16, requires_grad=True) for heads in (h, hk, hk)]


def with_gradients(function, inputs):
    o = function()
    return o, *torch.autograd.grad(o.float().square().sum(), inputs)


def test_it_was_read_in_the_version_that_is_named():
    assert plugin.TESTED == doors.DOORS["TransformerEngine"].tested


def test_the_library_keeps_its_names_and_has_two_more(te):
    dpa = te()
    library = sys.modules["transformer_engine_torch"]
    assert library.get_cudnn_version() == 91200 and sys.modules["transformer_engine_torch_nv"] is library
    assert dpa.FlashAttention is plugin.flash_attention
    assert dpa.dpa_utils.get_attention_backend is plugin.get_attention_backend


@pytest.mark.parametrize("words, fields, keywords", [
    ({}, {}, dict(causal=True, align="top_left")),
    (dict(attn_mask_type="no_mask", window_size=(-1, -1)), dict(bottom_right_diagonal=True), {}),
    (dict(window_size=(3, 0)), {}, dict(causal=True, window=(3, 0), align="top_left")),
    (dict(softcap=2.0), {}, dict(causal=True, align="top_left", softcap=2.0)),
], ids=str)
def test_what_it_carries(te, words, fields, keywords):
    dpa = te()
    flash, version, *_ = dpa.dpa_utils.get_attention_backend(params(dpa, **fields, **{
        name: value for name, value in words.items()}))
    assert flash and version is plugin.VERSION
    inputs = qkv(9, 2)
    theirs = with_gradients(
        lambda: tt.attention(*inputs, layout="sbhd", softmax_scale=0.3, **keywords).flatten(-2), inputs)
    _, call = run(dpa, *inputs, version, **words)
    for _ in range(2):  # the second by what the first prepared
        for a, b in zip(with_gradients(call, inputs), theirs, strict=True):
            assert torch.equal(a, b)


def test_packed_sequences_of_any_length_share_what_was_prepared(te):
    dpa = te()
    version = dpa.dpa_utils.get_attention_backend(params(dpa))[1]
    inputs = qkv(10)
    module, _ = run(dpa, *inputs, version)
    for lengths in ((3, 10), (3, 10), (8, 10), (5, 10)):
        for apart in (False, True):
            cu = torch.tensor([0, *lengths], dtype=torch.int32)
            longest = int(cu.diff().max())
            own = cu.clone() if apart else cu
            for mask, keywords in (("padding_causal", dict(causal=True, align="top_left")), ("padding", {}),
                                   ("padding_causal_bottom_right", dict(causal=True, align="bottom_right"))):
                words = dict(qkv_layout="thd_thd_thd", attn_mask_type=mask, cu_seqlens_q=cu, cu_seqlens_kv=own,
                             max_seqlen_q=longest, max_seqlen_kv=longest, window_size=(-1, 0) if keywords else (-1, -1))
                theirs = with_gradients(lambda: tt.attention(
                    *inputs, layout="thd", softmax_scale=0.3, cu_seqlens_q=cu, cu_seqlens_k=own, max_seqlen_q=longest,
                    max_seqlen_k=longest, **keywords).flatten(-2), inputs)
                ours = with_gradients(lambda: module(*inputs, flash_attention_backend=version, **words), inputs)
                for a, b in zip(ours, theirs, strict=True):
                    assert torch.equal(a, b)
    assert len(module._plans) == 2 * 3


def test_what_calls_share_is_no_window_of_other_types(te):
    dpa = te()
    version = dpa.dpa_utils.get_attention_backend(params(dpa))[1]
    inputs = qkv(10, 2)
    module, _ = run(dpa, *inputs, version)
    words = dict(flash_attention_backend=version, qkv_layout="sbhd_sbhd_sbhd", attn_mask_type="no_mask")
    for _ in range(2):
        module(*inputs, window_size=(2, 0), **words)
        with pytest.raises(ValueError, match=r"window_size=\(2.0, 0\): must be a pair"):
            module(*inputs, window_size=(2.0, 0), **words)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
                         ids=["copied", "pickled"])
def test_a_module_that_has_run_is_copied_and_pickled(te, copied):
    dpa = te()
    inputs = qkv(9, 2)
    version = dpa.dpa_utils.get_attention_backend(params(dpa))[1]
    module, call = run(dpa, *inputs, version)
    theirs = call()
    other = copied(module)
    assert type(other) is type(module) and module._plans and not other._plans
    words = dict(qkv_layout="sbhd_sbhd_sbhd", window_size=(-1, 0), flash_attention_backend=version)
    assert torch.equal(other(*inputs, **words), theirs) and len(other._plans) == 1


def test_packed_sequences_with_and_without_gaps(te):
    dpa = te()
    cu, starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 9], [0, 4, 10]))
    packed = dict(qkv_layout="thd_thd_thd", attn_mask_type="padding_causal", max_seqlen_q=6, max_seqlen_kv=6)
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)
    inputs = qkv(10)
    for gaps in (True, False):
        flash, version, *_ = dpa.dpa_utils.get_attention_backend(params(
            dpa, **packed, pad_between_seqs=gaps, batch_size=2, num_tokens_q=10, num_tokens_kv=10))
        assert flash
        padded = dict(cu_seqlens_q_padded=starts, cu_seqlens_k_padded=starts) if gaps else {}
        theirs = with_gradients(lambda padded=padded: tt.attention(
            *inputs, layout="thd", softmax_scale=0.3, causal=True, align="top_left", **lengths,
            **padded).flatten(-2), inputs)
        _, call = run(dpa, *inputs, version, **packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, pad_between_seqs=gaps,
                      cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
        for _ in range(2):  # the second by what the first translated
            for a, b in zip(with_gradients(call, inputs), theirs, strict=True):
                assert torch.equal(a, b)


def test_what_calls_share_is_no_lengths(te):
    dpa = te()
    inputs = qkv(9)
    made, _ = run(dpa, *inputs, plugin.VERSION)
    for ends in ([0, 3, 9], [0, 7, 9]):
        cu = torch.tensor(ends, dtype=torch.int32)
        ours = made(*inputs, qkv_layout="thd_thd_thd", attn_mask_type="padding_causal", cu_seqlens_q=cu,
                    cu_seqlens_kv=cu, max_seqlen_q=9, max_seqlen_kv=9, flash_attention_backend=plugin.VERSION)
        theirs = tt.attention(*inputs, layout="thd", softmax_scale=0.3, causal=True, align="top_left", cu_seqlens_q=cu,
                              cu_seqlens_k=cu, max_seqlen_q=9, max_seqlen_k=9)
        assert torch.equal(ours, theirs.flatten(-2))


@pytest.mark.parametrize("fields", [
    dict(fp8=True, fp8_meta={"recipe": types.SimpleNamespace(fp8_dpa=True)}), dict(fp8_output=True),
    dict(context_parallel=True, cp_size=2), dict(inference_params=object()), dict(has_score_mod=True),
    dict(softmax_type="learnable"), dict(return_max_logit=True), dict(checkpoint_core_attention=True),
    dict(core_attention_bias_type="post_scale_bias", core_attention_bias_shape=(1, 4, 9, 9)),
    dict(bottom_right_diagonal=False, window_size=(2, 2), attn_mask_type="no_mask"), dict(qkv_dtype=torch.int8),
    dict(qkv_type=type("Float8Tensor", (torch.Tensor,), {}))],
    ids=lambda fields: next(iter(fields)))
def test_what_it_does_not_carry_runs_on_tes_own_and_says_so_once(te, fields):
    dpa = te()
    select = dpa.dpa_utils.get_attention_backend
    name = next(iter(fields))
    with pytest.warns(RuntimeWarning, match=f"NVTE_PLUGIN=tessera.te.plugin: .*{name.removeprefix('has_')[:7]}"):
        assert select(params(dpa, **fields))[2:4] == (True, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(params(dpa, **fields))[2:4] == (True, 1)


def test_fp8_layers_around_attention_in_16_bits(te):
    dpa = te()
    meta = {"recipe": types.SimpleNamespace(fp8_dpa=False, fp8_mha=False)}
    assert dpa.dpa_utils.get_attention_backend(params(dpa, fp8=True, fp8_meta=meta))[0]


def test_the_switch_of_flash_attention_is_obeyed(te, monkeypatch):
    dpa = te()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dpa.dpa_utils.get_attention_backend(params(dpa))[2:4] == (True, 1)


def test_another_version_is_the_package(te):
    dpa = te()
    made, call = run(dpa, *qkv(9, 2), _selection.Version("2.8.3"))
    assert isinstance(made, FlashAttention) and call() == "the flash-attn package"


def test_undone(te):
    dpa = te()
    made, call = run(dpa, *qkv(9, 2), None)
    plugin.unload_plugins()
    assert dpa.FlashAttention is FlashAttention and dpa._attention_backends["backend_selection_requires_update"]
    assert dpa.dpa_utils.get_attention_backend(params(dpa))[2:4] == (True, 1)
    assert not hasattr(sys.modules["transformer_engine_torch"], "flash_attention")
    assert call() == "the flash-attn package"


@pytest.mark.parametrize("change", ["forward", "fields", "missing"])
def test_a_changed_interface_is_one_error(te, monkeypatch, change):
    dpa = te()
    if change == "forward":
        monkeypatch.setattr(FlashAttention, "forward", lambda self, query_layer, mystery=None: None)
    elif change == "fields":
        monkeypatch.setattr(dpa.dpa_utils, "AttentionParams",
                            dataclasses.make_dataclass("AttentionParams", [*TE_FIELDS, ("mystery", int, 0)]))
    else:
        monkeypatch.setattr(dpa.dpa_utils, "AttentionParams",
                            dataclasses.make_dataclass("AttentionParams", TE_FIELDS[:-1]))
    with pytest.raises(RuntimeError, match=f"mystery|has_score_mod_bprop.*{plugin.TESTED}.*unset NVTE_PLUGIN"):
        dpa.FlashAttention(0.3)


def test_a_plugin_that_fails_leaves_te(te):
    with pytest.warns(RuntimeWarning, match="loading failed"):
        dpa = te("tessera.te.nothing")
    assert dpa.FlashAttention is FlashAttention
