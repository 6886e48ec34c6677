# SPDX-License-Identifier: Apache-2.0
"""What TransformerEngine 2.20.2 brought: softcap of the layers, a mask for each sequence, the question to the
fused backend, and utilities that its tests import."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from tessera.te.pytorch import DotProductAttention, MultiheadAttention, TransformerLayer, constants  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import context_parallel, utils  # noqa: E402
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
    words = dict(hidden_dropout=0.0, attention_dropout=0.0, device="cpu", layer_type=layer_type)
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
    attention = MultiheadAttention(16, 2, attention_dropout=0.0, device="cpu", softcap=0.05)
    assert attention.core_attention.softcap == 0.05
    assert torch.equal(attention(x), attention(x, softcap=0.05))


def test_layers_take_arguments_in_te_s_order():
    names = list(inspect.signature(TransformerLayer.__init__).parameters)
    assert names[12:19] == ["self_attn_mask_type", "window_size", "bottom_right_diagonal", "softcap",
                            "enc_dec_attn_mask_type", "enc_dec_bottom_right_diagonal", "enc_dec_window_size"]
    names = list(inspect.signature(MultiheadAttention.forward).parameters)
    assert names[4:9] == ["attn_mask_type", "window_size", "bottom_right_diagonal", "is_first_microbatch",
                          "checkpoint_core_attention"]


def test_one_chunk_a_rank_is_refused_by_name():
    module = DotProductAttention(2, 8)
    strategies = constants.CPLoadBalancingStrategy
    module.set_context_parallel_group(None, None, None, "p2p", strategies.DUAL_CHUNK_SWAP)
    with pytest.raises(Refused, match="NO_LOAD_BALANCE.*DUAL_CHUNK_SWAP would work"):
        module.set_context_parallel_group(None, None, None, "p2p", strategies.NO_LOAD_BALANCE)
    function = inspect.signature(context_parallel.attn_forward_func_with_cp).parameters
    assert function["load_balancing_strategy"].default is strategies.DUAL_CHUNK_SWAP


def test_clamped_swiglu():
    layer = TransformerLayer(8, 16, 2, activation="clamped_swiglu", device="cpu",
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
        TransformerLayer(8, 16, 2, device="cpu", activation_params={"limit": 1})


# ---- a mask for each sequence ----

POLICIES = {
    "masks": [([0, 3], "padding_causal", None, None), ([1, 2], "padding", None, None)],
    "windows": [([0, 1], "padding_causal", (2, 0), None), ([2], "padding_causal", (1, 0), None),
                ([3], "padding", (1, 2), False)],
    "corners": [([1], "padding_causal_bottom_right", (-1, 0), True), ([0, 2, 3], "padding", (2, 1), True), ([], "padding", None, None)],
}


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
@pytest.mark.parametrize("policies", POLICIES)
def test_policies_of_sequences(policies, dispatch, gap):
    generator = torch.Generator().manual_seed(1)
    lens_q, lens_k = torch.tensor([5, 7, 3, 8]), torch.tensor([6, 7, 9, 8])
    starts = [torch.cat([torch.zeros(1, dtype=torch.int64), (x + gap).cumsum(0)]).int() for x in (lens_q, lens_k)]
    cu = [torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]).int() for x in (lens_q, lens_k)]
    leaves = [torch.randn(int(starts[side][-1]), 2, 8, generator=generator).requires_grad_() for side in (0, 1, 1)]
    module = DotProductAttention(2, 8, qkv_format="thd", softmax_type="learnable", return_max_logit=True, softcap=1.0)
    module.softmax_offset.data.copy_(torch.tensor([0.3, -0.2]))
    padded = dict(cu_seqlens_q_padded=starts[0], cu_seqlens_kv_padded=starts[1]) if gap else {}
    out, peak = module(
        *leaves, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1], **padded, max_seqlen_q=8, max_seqlen_kv=9,
        thd_attention_policy_dispatch=dispatch, thd_attention_policies=[
            {"sequence_ids": torch.tensor(ids, dtype=torch.int64), "mask_type": mask, "window_size": window,
             **({} if corner is None else {"bottom_right_diagonal": corner})}
            for ids, mask, window, corner in POLICIES[policies]])
    do = torch.randn(out.shape, generator=generator)
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
                             device="cpu", self_attn_mask_type="padding_causal")
    words = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=4, max_seqlen_kv=4)
    got = layer(x, thd_attention_policies=[policy(1), policy(0, mask_type="padding_causal")], **words)
    torch.testing.assert_close(got[:2], layer(x, **words)[:2])
    torch.testing.assert_close(got[2:], layer(x, self_attn_mask_type="padding", **words)[2:])
