# SPDX-License-Identifier: Apache-2.0
"""What TransformerEngine 2.20.2 brought: softcap of the layers, a mask for each sequence, the question to the
fused backend, and utilities that its tests import."""

import dataclasses
import inspect
import re

import pytest

torch = pytest.importorskip("torch")

import tessera.te.transformer_engine_torch as tex  # noqa: E402
from dropins import normal  # noqa: E402
from tessera.te.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling  # noqa: E402
from tessera.te.pytorch import DotProductAttention, MultiheadAttention, TransformerLayer, constants  # noqa: E402
from tessera.te.pytorch.attention import custom_ops  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import context_parallel, softmax, utils  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _questions, _selection  # noqa: E402
from tessera.te.pytorch.cpp_extensions import fused_attn as fused  # noqa: E402
from tessera._lib import Refused  # noqa: E402
from te_oracle import fresh_selection  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("fresh_selection")


# ---- softcap ----

def test_softcap_of_a_call_replaces_the_module_s():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    words = dict(qkv_format="bshd", attn_mask_type="causal")
    capped, plain = DotProductAttention(2, 8, softcap=0.5, **words), DotProductAttention(2, 8, **words)
    assert capped.softcap == 0.5
    assert torch.equal(capped(q, k, v), plain(q, k, v, softcap=0.5))
    assert torch.equal(capped(q, k, v, softcap=0.0), plain(q, k, v))
    assert not torch.allclose(capped(q, k, v), plain(q, k, v))
    fused = capped.fused_attention
    fused.softmax_scale = None
    own = fused(query_layer=q, key_layer=k, value_layer=v, qkv_layout="bshd_bshd_bshd", attn_mask_type="causal",
                softcap=0.5)
    torch.testing.assert_close(own, capped(q, k, v))


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), "30", True])
def test_softcap_that_is_none(value):
    with pytest.raises(ValueError, match="softcap=.*must be finite and at least 0"):
        DotProductAttention(2, 8, softcap=value)
    module = DotProductAttention(2, 8, qkv_format="bshd")
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match="softcap=.*0 turns it off"):
        module(q, q, q, softcap=value)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_softcap_of_layers(layer_type):
    words = dict(hidden_dropout=0.0, attention_dropout=0.0, layer_type=layer_type)
    x = torch.randn(5, 2, 16)
    more = {"encoder_output": torch.randn(4, 2, 16)} if layer_type == "decoder" else {}
    torch.manual_seed(0)
    capped = TransformerLayer(16, 32, 2, softcap=0.05, **words)
    torch.manual_seed(0)
    plain = TransformerLayer(16, 32, 2, **words)
    for layer in (capped, plain):  # scores that a cap changes
        for name, parameter in layer.named_parameters():
            if name.endswith(("query_weight", "key_weight")):
                parameter.data.mul_(100)
    assert torch.equal(capped(x, **more), plain(x, softcap=0.05, **more))
    assert not torch.allclose(capped(x, **more), plain(x, **more))
    attention = MultiheadAttention(16, 2, attention_dropout=0.0, softcap=0.05)
    assert attention.core_attention.softcap == 0.05
    assert torch.equal(attention(x), attention(x, softcap=0.05))


def test_layers_take_arguments_in_te_s_order():
    names = list(inspect.signature(TransformerLayer.__init__).parameters)
    assert names[12:19] == ["self_attn_mask_type", "window_size", "bottom_right_diagonal", "softcap",
                            "enc_dec_attn_mask_type", "enc_dec_bottom_right_diagonal", "enc_dec_window_size"]
    names = list(inspect.signature(MultiheadAttention.forward).parameters)
    assert names[4:9] == ["attn_mask_type", "window_size", "bottom_right_diagonal", "is_first_microbatch",
                          "checkpoint_core_attention"]


def test_strategies_of_context_parallelism():
    module = DotProductAttention(2, 8)
    strategies = constants.CPLoadBalancingStrategy
    module.set_context_parallel_group(None, None, None, "p2p", strategies.DUAL_CHUNK_SWAP)
    module.set_context_parallel_group(None, None, None, "p2p", strategies.NO_LOAD_BALANCE)
    function = inspect.signature(context_parallel.attn_forward_func_with_cp).parameters
    assert function["load_balancing_strategy"].default is strategies.DUAL_CHUNK_SWAP


def test_clamped_swiglu():
    layer = TransformerLayer(8, 16, 2, activation="clamped_swiglu",
                             activation_params={"limit": 0.5, "alpha": 1.5}).layernorm_mlp
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(3, 8)
    y, _, normed = layer(x)
    gate, linear = torch.nn.functional.linear(normed, layer.fc1_weight, layer.fc1_bias).chunk(2, -1)
    gate = torch.where(gate > 0.5, 0.5, gate)
    want = gate / (1 + (-1.5 * gate).exp()) * (torch.where(linear.abs() > 0.5, 0.5 * linear.sign(), linear) + 1)
    torch.testing.assert_close(y, want @ layer.fc2_weight.T)
    with pytest.raises(ValueError, match="activation_params=.*beside activation="):
        TransformerLayer(8, 16, 2, activation_params={"limit": 1})


# ---- a mask for each sequence ----

POLICIES = {
    "masks": [([0, 3], "padding_causal", None, None), ([1, 2], "padding", None, None)],
    "windows": [([0, 1], "padding_causal", (2, 0), None), ([2], "padding_causal", (1, 0), None),
                ([3], "padding", (1, 2), False)],
    "corners": [([1], "padding_causal_bottom_right", (-1, 0), True), ([0, 2, 3], "padding", (2, 1), True),
                ([], "padding", None, None)],
}


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
@pytest.mark.parametrize("package", ["tessera", "unfused"])
@pytest.mark.parametrize("policies", POLICIES)
def test_policies_of_sequences(policies, package, dispatch, gap, monkeypatch):
    if package == "unfused":
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    launches = []
    forward = DotProductAttention.forward
    monkeypatch.setattr(DotProductAttention, "forward",
                        lambda *args, **given: launches.append(args) or forward(*args, **given))
    lens_q, lens_k = torch.tensor([5, 7, 3, 8]), torch.tensor([6, 7, 9, 8])
    starts = [torch.cat([torch.zeros(1, dtype=torch.int64), (x + gap).cumsum(0)]).int() for x in (lens_q, lens_k)]
    cu = [torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]).int() for x in (lens_q, lens_k)]
    leaves = [normal(int(starts[side][-1]), 2, 8, grad=True, seed=i) for i, side in enumerate((0, 1, 1))]
    module = DotProductAttention(2, 8, qkv_format="thd", softmax_type="learnable", return_max_logit=True, softcap=1.0)
    module.softmax_offset.data.copy_(torch.tensor([0.3, -0.2]))
    padded = dict(cu_seqlens_q_padded=starts[0], cu_seqlens_kv_padded=starts[1]) if gap else {}
    out, peak = module(
        *leaves, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1], **padded, max_seqlen_q=8, max_seqlen_kv=9,
        thd_attention_policy_dispatch=dispatch, thd_attention_policies=[
            {"sequence_ids": torch.tensor(ids, dtype=torch.int64), "mask_type": mask, "window_size": window,
             **({} if corner is None else {"bottom_right_diagonal": corner})}
            for ids, mask, window, corner in POLICIES[policies]])
    assert len(launches) == 1 + (package == "unfused") * sum(bool(ids) for ids, *_ in POLICIES[policies])
    do = normal(*out.shape)
    out.backward(do)
    got = [x.grad.clone() for x in (*leaves, module.softmax_offset)]
    for x in (*leaves, module.softmax_offset):
        x.grad = None
    peaks, inside = [], torch.zeros(len(out), dtype=torch.bool)
    for ids, mask, window, corner in POLICIES[policies]:
        for n in ids:
            rows = [slice(int(start[n]), int(start[n] + lens[n])) for start, lens in zip(starts, (lens_q, lens_k))]
            one = [torch.tensor([0, int(lens[n])], dtype=torch.int32) for lens in (lens_q, lens_k)]
            part, top = module(leaves[0][rows[0]], leaves[1][rows[1]], leaves[2][rows[1]], cu_seqlens_q=one[0],
                               cu_seqlens_kv=one[1], max_seqlen_q=8, max_seqlen_kv=9, attn_mask_type=mask,
                               window_size=window, bottom_right_diagonal=corner)
            torch.testing.assert_close(out[rows[0]], part)
            part.backward(do[rows[0]])
            peaks.append(top)
            inside[rows[0]] = True
    assert out[~inside].eq(0).all() and torch.equal(peak, torch.stack(peaks).amax(0))
    for x, grad in zip((*leaves, module.softmax_offset), got):
        torch.testing.assert_close(grad, x.grad)


def policy(*ids, **more):
    return {"sequence_ids": torch.tensor(ids, dtype=torch.int32), "mask_type": "padding", "window_size": None, **more}


@pytest.mark.parametrize("policies, given, message", [
    ([], {}, "thd_attention_policies='list': must be a list of at least one"),
    ([policy(0)], {}, "must name each of the 2 sequences in one policy"),
    ([policy(0, 1), policy(1)], {}, "must name each of the 2 sequences in one policy"),
    ([policy(1, 0)], {}, "must ascend"),
    ([policy(0, 1, mask_type="causal")], {}, "mask_type.*'causal': must be \"padding\""),
    ([policy(0, 1, extra=1)], {}, "must be a dict of sequence_ids, mask_type"),
    ([policy(0, 1, sequence_ids=[0, 1])], {}, "must be a tensor of integers"),
    ([policy(0, 1, bottom_right_diagonal=1)], {}, "must be True, False or None"),
    ([policy(0, 1)], {"attn_mask_type": "padding"}, "attn_mask_type='padding': each of thd_attention_policies"),
    ([policy(0, 1)], {"window_size": (1, 1)}, "window_size=.*leave it out"),
    ([policy(0, 1)], {"qkv_format": "bshd"}, 'need qkv_format="thd", not "bshd"'),
    ([policy(0, 1)], {"thd_attention_policy_dispatch": "fast"}, 'must be "auto" or "grouped"'),
    ([policy(0, 1)], {"attention_mask": torch.zeros(1, dtype=torch.bool)}, "them beside attention_mask")])
def test_policies_that_are_none(policies, given, message):
    x, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    module = DotProductAttention(2, 8, qkv_format="thd")
    with pytest.raises((ValueError, Refused), match=message):
        module(x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=cu, thd_attention_policies=policies, **given)


def test_policies_of_layers():
    x, cu = torch.randn(6, 16), torch.tensor([0, 2, 6], dtype=torch.int32)
    layer = TransformerLayer(16, 32, 2, attn_input_format="thd", hidden_dropout=0.0, attention_dropout=0.0,
                             self_attn_mask_type="padding_causal")
    words = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=4, max_seqlen_kv=4)
    got = layer(x, thd_attention_policies=[policy(1), policy(0, mask_type="padding_causal")], **words)
    torch.testing.assert_close(got[:2], layer(x, **words)[:2])
    torch.testing.assert_close(got[2:], layer(x, self_attn_mask_type="padding", **words)[2:])


# ---- the question to the fused backend ----

SIZES = dict(qkv_layout=fused.QKVLayout["bshd_bshd_bshd"], batch_size=2, num_attn_heads=4, num_gqa_groups=2,
             head_dim_qk=64, head_dim_v=64, max_seqlen_q=128, max_seqlen_kv=96)
FP8 = dict.fromkeys(("qkv_dtype", "o_dtype"), tex.DType.kFloat8E4M3) | \
    dict.fromkeys(("do_dtype", "dqkv_dtype"), tex.DType.kFloat8E5M2)


@pytest.mark.parametrize("given, backend, message", [
    ({}, "F16_arbitrary_seqlen", ""),
    (dict(attn_mask_type=fused.AttnMaskType["padding_causal"], window_size_left=8, window_size_right=0, dropout=0.1,
          softmax_type=fused.SoftmaxType["learnable"], deterministic=True), "F16_arbitrary_seqlen", ""),
    (dict(bias_type=fused.AttnBiasType["post_scale_bias"], bias_batch_size=1, bias_num_heads=4, bias_seqlen_q=1,
          bias_seqlen_kv=96), "F16_arbitrary_seqlen", ""),
    (dict(qkv_layout=fused.QKVLayout["paged_kv_thd_bshd_bshd"], page_size_k=16, is_training=False,
          attn_mask_type=fused.AttnMaskType["padding"]), "F16_arbitrary_seqlen", ""),
    (FP8, "FP8", ""),
    (dict(num_attn_heads=0), "No_Backend", "num_attn_heads=0: must be at least 1"),
    (dict(num_gqa_groups=3), "No_Backend", r"heads of q \(4\) must be a multiple"),
    (dict(qkv_layout=tex.NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET), "No_Backend", "NOT_SET: must be a layout"),
    (dict(qkv_dtype=tex.DType.kInt32), "No_Backend", "qkv_dtype=.*must be float16"),
    (dict(qkv_dtype=tex.DType.kFloat4E2M1), "No_Backend", "qkv_dtype=kFloat4E2M1"),
    (dict(FP8, scaling_mode=tex.NVTEScalingMode.NVTE_MXFP8_1D_SCALING), "No_Backend", "for every 32 values"),
    (dict(FP8, scaling_mode=tex.NVTEScalingMode.NVTE_BLOCK_SCALING_2D), "No_Backend", "one scale a tensor")])
def test_the_fused_backend_answers_with_its_reasons(given, backend, message):
    answer, text = tex.get_fused_attn_backend(utils.FusedAttentionParams(**{**SIZES, **given}))
    assert answer == fused.FusedAttnBackend[backend] == tex.NVTE_Fused_Attn_Backend[f"NVTE_{backend}"]
    assert re.search(message, text) and bool(text) == (backend == "No_Backend")


def test_specs_of_fused_calls():
    kinds = tex.DType
    spec = utils.get_fused_attn_spec(None, torch.float16, "thd_thd_thd", cs_o_in_f16=True)
    assert spec == utils.FusedAttnSpec(0, *[kinds.kFloat16] * 4, None, "thd_thd_thd", "thd", "thd", "thd_thd_thd")
    layout = "paged_kv_bshd_sbhd_sbhd"
    spec = utils.get_fused_attn_spec(DelayedScaling(), torch.bfloat16, layout, cs_o_in_f16=True)
    assert (spec.qkv, spec.o, spec.do, spec.dqkv) == (*[kinds.kFloat8E4M3] * 2, *[kinds.kFloat8E5M2] * 2)
    assert (spec.qkv_layout, spec.o_format, spec.dqkv_layout) == ("bshd_sbhd_sbhd", "bshd", layout)
    for wide_o, o in ((True, kinds.kFloat16), (False, kinds.kFloat8E4M3)):
        spec = utils.get_fused_attn_spec(Float8CurrentScaling(), torch.float8_e4m3fn, layout, cs_o_in_f16=wide_o,
                                         nominal_dtype=torch.float16)
        assert (spec.qkv, spec.o, spec.dqkv) == (kinds.kFloat8E4M3, o, kinds.kFloat16)
    spec = utils.get_fused_attn_spec(MXFP8BlockScaling(), torch.bfloat16, "bs3hd", cs_o_in_f16=True)
    assert (spec.scaling_mode.name, spec.qkv_layout, spec.scale_inv_format) == (
        "NVTE_MXFP8_1D_SCALING", "bhsd_bhsd_bhsd", "bhsd")


def test_parameters_of_a_selection_stand_in_te_s_order():
    names = [field.name for field in dataclasses.fields(utils.AttentionParams)]
    assert names[:4] == ["qkv_type", "qkv_dtype", "nominal_dtype", "qkv_layout"]
    assert names[names.index("window_size"):][:4] == ["window_size", "bottom_right_diagonal", "softcap",
                                                      "alibi_slopes_shape"]
    assert utils.AttentionParams().bottom_right_diagonal is utils.FusedAttentionParams().bottom_right_diagonal is True
    assert all(each.given["softcap"] == 30 for each in _questions.questions(utils.AttentionParams(softcap=30.0)))
    assert _selection._nominal(utils.AttentionParams(qkv_dtype=torch.float8_e4m3fn,
                                                     nominal_dtype=torch.float16)).qkv_dtype == torch.float16


# ---- utilities ----

def test_utilities_of_packed_tensors():
    cu, padded = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 8])
    assert utils.get_thd_padding_mask(10, cu, padded).tolist() == [
        False, False, True, True, False, False, False, True, True, True]
    x = torch.arange(12.0).view(3, 4, 1, 1)
    packed = utils.ConvertBSHDtoTHD.apply(x, cu, 7)
    assert packed.flatten().tolist() == [0, 1, 8, 9, 10, 0, 0]
    assert utils.ConvertBSHDtoTHD.apply(x, cu).flatten().tolist() == [0, 1, 8, 9, 10]
    assert torch.equal(custom_ops.convert_bshd_to_thd(x, cu, 7), packed)
    back = custom_ops.convert_thd_to_bshd(packed, cu, 3, 4)
    assert back.flatten().tolist() == [0, 1, 0, 0, *[0] * 4, 8, 9, 10, 0]


def test_layouts_that_must_be_looked_at():
    buffer = torch.zeros(2, 3, 3, 4, 8)
    q, k, v = buffer.unbind(2)
    assert utils.qkv_layout_needs_detection(q, k, v) and not utils.qkv_layout_needs_detection(None, buffer)
    assert not utils.qkv_layout_needs_detection(torch.zeros(3, 2, 4, 8).transpose(0, 1))
    assert utils.maybe_contiguous(q) is q
    assert utils.maybe_contiguous(q.mT).is_contiguous()
    utils.no_op_logger.warning("%s", 1)


def test_copies_of_custom_ops():
    whole = torch.randn(5, 2, 3, 3 * 8)
    q, k, v = whole.unflatten(-1, (3, 8)).unbind(3)
    got = custom_ops.fa_prepare_fwd(q)
    for x, want in zip(got, (q, k, v)):
        assert torch.equal(x, want.transpose(0, 1))
    assert torch.equal(custom_ops.fa_prepare_bwd(*got), whole)
    with pytest.raises(ValueError, match="fa_prepare_fwd: qkvi.stride"):
        custom_ops.fa_prepare_fwd(q.contiguous())
    cache = [torch.zeros(6, 4, 1, 8), torch.zeros(6, 4, 1, 8)]
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    new, cached = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 5, 6], dtype=torch.int32)
    k, v = torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    custom_ops.copy_to_kv_cache(k, v, *cache, table, new, cached, custom_ops.QKV_FORMAT_VALUE["thd"], 2, 3, 8, 2, False)
    for pool, x in zip(cache, (k, v)):
        assert torch.equal(pool[3, 2:], x[:2]) and torch.equal(pool[1, 0], x[2]) and torch.equal(pool[0, 0], x[3])
        assert int(pool.ne(0).any(-1).sum()) == 4
    with pytest.raises(Refused, match="is_non_paged=True.*InferenceParams"):
        custom_ops.copy_to_kv_cache(k, v, *cache, table, new, cached, 2, 2, 3, 8, 2, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 2, 4, 32), (1, 3, 5, 7), (2, 2, 32, 32)])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right", "padding", "arbitrary"])
def test_softmax_of_given_scores(mask_type, shape, dtype):
    module = softmax.FusedScaleMaskSoftmax(lambda scores, hidden: scores.masked_fill(hidden, -10000.0))
    scores = torch.randn(shape, dtype=dtype).requires_grad_()
    hidden = torch.rand(shape[0], 1, *shape[2:]) < 0.4
    hidden[..., 0] = False
    sq, sk = shape[2:]
    given = hidden if mask_type in ("padding", "arbitrary") else None
    causal = torch.arange(sk) > torch.arange(sq)[:, None] + (sk - sq if "right" in mask_type else 0)
    wide = scores.detach().double().requires_grad_()
    off = causal if "causal" in mask_type else hidden if given is not None else torch.tensor(False)
    got, want = module(scores, given, mask_type, 0.5), (0.5 * wide).masked_fill(off, -torch.inf).softmax(-1)
    dp = torch.randn(shape, dtype=dtype)
    got.backward(dp)
    want.backward(dp.double())
    assert got.dtype == dtype
    tolerance = dict(rtol=2e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(got.double(), want, **tolerance)
    torch.testing.assert_close(scores.grad.double(), wide.grad, **tolerance)
    torch.testing.assert_close(softmax.scaled_softmax_backward(dp, got.detach(), 0.5).double(), wide.grad, **tolerance)


def test_functions_of_softmax():
    x = torch.randn(2, 3, 4, 4)
    want = (0.5 * x).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(softmax.scaled_upper_triang_masked_softmax_forward(x.flatten(0, 1), 0.5),
                               want.flatten(0, 1))
    longer = softmax.scaled_aligned_causal_masked_softmax_forward(x[:, :, :, :2], 0.5)  # 4 rows, 2 columns
    assert longer[:, :, :2].eq(0).all() and torch.equal(longer[:, :, 2, 0], torch.ones(2, 3))
    nothing = softmax.scaled_masked_softmax_forward(x, torch.ones(1, 1, 4, 4, dtype=torch.bool), 1.0)
    assert nothing.eq(0).all()
    module = softmax.FusedScaleMaskSoftmax(None, softmax_in_fp32=False)
    with pytest.raises(ValueError, match="scale=0.5: needs softmax_in_fp32=True"):
        module(x, None, "no_mask", 0.5)
    assert module.get_batch_per_block(128) == 8 and module.get_batch_per_block(1024) == 4


# ---- pieces of rings ----

def test_chunks_in_the_order_of_ranks():
    cu, x = torch.tensor([0, 8, 20], dtype=torch.int32), torch.arange(20)
    ranks = [context_parallel.get_thd_partitioned_indices(cu, 20, 2, rank) for rank in range(2)]
    assert ranks[1].tolist() == [2, 3, 4, 5, 11, 12, 13, 14, 15, 16] and ranks[0].dtype == torch.int32
    order = context_parallel.thd_sequence_order_to_cp_rank_order(x, cu, 2)
    assert torch.equal(order, torch.cat(ranks).long())
    assert torch.equal(context_parallel.thd_cp_rank_order_to_sequence_order(order[None], cu, 2, seq_dim=1)[0], x)
    assert torch.equal(tex.thd_cp_rank_order_to_sequence_order(
        tex.thd_sequence_order_to_cp_rank_order(x, cu, 2, 20), cu, 2, 20), x)
    before, after = (getattr(context_parallel, f"get_seq_chunk_ids_for_reordering_{when}_attn")(3, x.device)
                     for when in ("before", "after"))
    assert before.tolist() == [0, 2, 4, 5, 3, 1] and after.tolist() == [0, 5, 1, 4, 2, 3]
    rows = torch.arange(3 * 2 * 4 * 5).view(3, 2, 4, 5)  # [cp, b, s, d]
    whole = context_parallel.reorder_seq_chunks_for_a2a_before_attn(rows, before, 1, 3)
    assert torch.equal(whole[:, 5], rows[0, :, 2:]) and torch.equal(whole[:, 1], rows[1, :, :2])
    back = context_parallel.reorder_seq_chunks_for_a2a_after_attn(whole, after, 1, 3)
    assert torch.equal(back.movedim(1, 2).flatten(2, 3), rows)
    one = [context_parallel.get_thd_partitioned_indices(
        cu, 20, 2, rank, load_balancing_strategy=constants.CPLoadBalancingStrategy.NO_LOAD_BALANCE) for rank in (0, 1)]
    assert torch.cat(one).tolist() == list(range(20))
    assert context_parallel.get_bsh_dims("sbhd") == (1, 0, 2) and context_parallel.get_bsh_dims("thd") == (0, 0, 1)


def test_parts_of_dense_formats_are_merged():
    import tessera.torch as tt
    q, k, v = torch.randn(2, 6, 2, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    (o1, lse1), (o2, lse2) = (tt.attention(q, k[:, part], v[:, part], return_lse=True) for part in
                              (slice(0, 4), slice(4, 9)))
    want, want_lse = tt.attention(q, k, v, return_lse=True)
    out, lse = o1.clone(), lse1.clone()
    context_parallel.flash_attn_fwd_softmax_lse_correction(lse, lse2)
    context_parallel.flash_attn_fwd_incremental_out_correction(out, o2, lse1, lse, lse2, 1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    out, lse = o1.clone().unflatten(1, (2, 3)), lse1.clone().unflatten(-1, (2, 3))
    context_parallel.flash_attn_fwd_second_half_softmax_lse_correction(lse, lse2[..., 3:])
    context_parallel.flash_attn_fwd_incremental_second_half_out_correction(out, o2[:, 3:], lse1, lse.flatten(-2),
                                                                           lse2[..., 3:], 1)
    torch.testing.assert_close(out.flatten(1, 2)[:, 3:], want[:, 3:])
    assert torch.equal(out.flatten(1, 2)[:, :3], o1[:, :3])


def test_metadata_of_one_chunk_a_rank():
    cu, padded = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 4, 12], dtype=torch.int32)
    context_parallel.validate_no_load_balance_thd_metadata(cu, padded, 12, 2)
    (q,), (q_padded,), (kv,) = context_parallel.get_no_load_balance_thd_causal_metadata(cu, padded, 12, 2, 0)
    assert (q.tolist(), q_padded.tolist(), kv.tolist()) == ([0, 3, 5], [0, 4, 6], [0, 3, 5])
    (q,), (q_padded,), (kv,) = context_parallel.get_no_load_balance_thd_causal_metadata(cu, padded, 12, 2, 1)
    assert (q.tolist(), q_padded.tolist(), kv.tolist()) == ([0, 0, 4], [0, 0, 6], [0, 3, 9])
    with pytest.raises(ValueError, match="multiple of cp_size=5"):
        context_parallel.validate_no_load_balance_thd_metadata(cu, padded, 12, 5)
    sizes = dict(max_seqlen_q=64, max_seqlen_kv=128, num_tokens_q=0, num_tokens_kv=0, num_heads=8, num_gqa_groups=4,
                 window_size=(-1, 0), bottom_right_diagonal=False)
    ring = context_parallel.cp_per_step_configs("p2p", 4, 1, attn_mask_type="padding_causal", **sizes)
    assert [(x["attn_mask_type"], x["max_seqlen_q"], x["max_seqlen_kv"], x["window_size_right"]) for x in ring] == [
        ("padding_causal", 16, 32, 0), ("padding", 16, 16, -1), ("padding", 8, 32, -1)]
    gathered = context_parallel.cp_per_step_configs("all_gather", 4, 1, attn_mask_type="causal", **sizes)
    assert [(x["attn_mask_type"], x["max_seqlen_q"], x["max_seqlen_kv"]) for x in gathered] == [
        ("causal_bottom_right", 8, 16), ("causal_bottom_right", 8, 128)]
    heads, = context_parallel.cp_per_step_configs("a2a", 4, 1, attn_mask_type="no_mask", **sizes)
    assert (heads["num_attn_heads"], heads["num_gqa_groups"]) == (2, 1)


def test_functions_of_the_extension():
    x = torch.randn(5, 2, 3, 8)
    first, none = tex.multi_tensor_transpose_to_bhsd([x, None], "sbhd")
    assert torch.equal(first, x.permute(1, 2, 0, 3)) and first.is_contiguous() and none is None
    out = torch.empty(5, 3, 2, 8)
    assert tex.multi_tensor_transpose_to_bhsd([x], "bshd", [out])[0] is out and torch.equal(out, x.transpose(1, 2))
    padded, same = tex.multi_tensor_pad_last_dim([torch.ones(2, 5), torch.ones(2, 8)], 8)
    assert padded.tolist() == [[1.0] * 5 + [0.0] * 3] * 2 and same.shape == (2, 8)
    target, cu, stored = torch.zeros(8), torch.tensor([0, 2, 5]), torch.tensor([0, 4, 8])
    tex.thd_copy_valid_tokens_from_per_split_to_rank_local(target, torch.ones(8), stored, cu)
    assert target.tolist() == [1, 1, 0, 0, 1, 1, 1, 0]
