# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention in FP8: emulated, by a core that stands in for kernels, and by the kernels."""

import copy
import logging

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.te.pytorch as te  # noqa: E402
from te_fp8_core import (DO, DP, DQKV, E4M3, E5M2, O, P, QKV, Core, contained, error, fresh,  # noqa: E402, F401
                         largest, module, problem, step)
from tessera.te.common.recipe import (DelayedScaling, Float8BlockScaling, Float8CurrentScaling,  # noqa: E402
                                      Format, MXFP8BlockScaling, NVFP4BlockScaling)
from tessera.te.pytorch.attention.dot_product_attention._choice import _selection  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._quantized import _fp8  # noqa: E402
from tessera.te.pytorch.quantization import autocast  # noqa: E402

DS = DelayedScaling(fp8_dpa=True)


# ---- attention ----

def test_a_region_that_leaves_attention_alone():
    m, inputs = module(), problem()
    expected = step(m, None, inputs, enabled=False)
    for recipe in (DelayedScaling(), MXFP8BlockScaling(), Float8BlockScaling(), NVFP4BlockScaling()):
        assert all(map(torch.equal, step(m, recipe, inputs), expected)) and not m.fp8
    with pytest.raises(ValueError, match="fp8_output=True: belongs in an autocast region"):
        m(*inputs[:3], fp8_output=True)
    q = te.Float8CurrentScalingQuantizer(E4M3, "cpu")(inputs[0])
    assert torch.equal(m(q, *inputs[1:3]), m(q.dequantize(), *inputs[1:3]))


def test_calibration_notes_amaxes_of_16_bits():
    m, (q, k, v, _) = module(), problem()
    with autocast(enabled=False, calibrating=True, recipe=DS):
        out = m(q, k, v)
    assert torch.equal(out, m(q, k, v)) and not m.fp8
    history = m.fp8_meta["scaling_fwd"].amax_history
    assert history[0, QKV] == max(x.abs().max() for x in (q, k, v)) and history[0, O] == out.abs().max()
    m(q * 2, k, v)  # outside
    assert history[0, QKV] == max(x.abs().max() for x in (q, k, v))


@pytest.mark.parametrize("recipe", [DelayedScaling(fp8_dpa=True, amax_history_len=4),
                                    Float8CurrentScaling(fp8_dpa=True), DelayedScaling(fp8_mha=True)],
                         ids=["delayed", "current", "delayed mha"])
def test_emulation(recipe, monkeypatch):
    m, inputs = module(), problem()
    expected = step(m, None, inputs, enabled=False)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    te.attention._attention_backends["backend_selection_requires_update"] = True
    for _ in range(3):
        got = step(m, recipe, inputs)
    assert isinstance(got[0], te.Float8Tensor) == recipe.fp8_mha
    for x, y, bound in zip(got, expected, (0.06, 0.14, 0.14, 0.12)):
        assert 1e-3 < error(x, y) < bound
    if recipe.delayed():
        forward, backward = m.fp8_meta["scaling_fwd"].scale, m.fp8_meta["scaling_bwd"].scale
        assert all(forward[slot] != 1 for slot in (QKV, O, P)) and (backward[[DQKV, DO, DP]] > 1).all()
        assert forward[P] <= 448 * 48 and (forward[[0, 1, 4, 5, 6, 7]] == 1).all()


# ---- attention by kernels of fp8 tensors ----

@pytest.fixture
def core(monkeypatch):
    """DotProductAttention over Core, which has every feature."""
    core = Core()
    monkeypatch.setattr(_fp8, "core_attention", core.attention)
    monkeypatch.setattr(_fp8, "core_backward", core.attention_backward)
    monkeypatch.setattr(_selection, "_explained", lambda question, device: ())
    return core


@pytest.mark.parametrize("mha", [False, True])
def test_delayed_scaling(core, mha):
    """Three steps: what is rounded by which scale, and what every slot notes."""
    recipe = DelayedScaling(fp8_dpa=True, fp8_mha=mha, amax_history_len=3)
    m, scales = module(), {QKV: 1.0, O: 1.0, DO: 1.0}
    for seed in range(3):
        inputs = problem(seed)
        expected = step(module(), None, inputs, enabled=False)
        out, *grads = step(m, recipe, inputs)
        assert core.calls[-2:] == [("forward", torch.float8_e4m3fn, torch.bfloat16, None),
                                   ("backward", torch.float8_e5m2, torch.float8_e4m3fn, None)]
        rounded = [((x.detach().float() * scales[QKV]).to(torch.float8_e4m3fn).float() / scales[QKV])
                   for x in inputs[:3]]
        at_rounded = module()(*rounded)
        if mha:
            assert isinstance(out, te.Float8Tensor) and out._fp8_dtype == E4M3
            assert out._scale_inv.item() == pytest.approx(1 / scales[O])
            assert error(out, at_rounded) < 0.04
        else:
            torch.testing.assert_close(out.float(), at_rounded, rtol=2**-8, atol=1e-6)
        assert type(grads[0]) is torch.Tensor and grads[0].dtype == torch.bfloat16
        for x, y, bound in zip((out, *grads), expected, (0.06, 0.09, 0.09, 0.08)):
            assert error(x, y) < bound
        forward, backward = m.fp8_meta["scaling_fwd"], m.fp8_meta["scaling_bwd"]
        newest = {QKV: largest(*inputs[:3]), O: at_rounded.abs().max().item(), P: 1.0}
        for slot in range(9):
            assert forward.amax_history[-1, slot].item() == pytest.approx(newest.get(slot, 0), rel=1e-6)
        assert backward.amax_history[-1, DO] == largest(inputs[3])
        assert backward.amax_history[-1, DQKV].item() == pytest.approx(largest(*grads), rel=2**-8)
        assert backward.scale[DP] == 1 and (backward.amax_history[:, DP] == 0).all()
        assert forward.scale[QKV].item() == pytest.approx(448 / forward.amax_history[:, QKV].max().item())
        scales = {QKV: forward.scale[QKV].item(), O: forward.scale[O].item()}


def test_the_format_of_the_recipe_is_that_of_do(core):
    step(module(), DelayedScaling(fp8_dpa=True, fp8_format=Format.E4M3), problem())
    assert core.calls[-1][1] == torch.float8_e4m3fn


def test_pytorch_s_autocast_casts_first(core):
    inputs = problem(dtype=torch.float32)
    with pytest.raises(ValueError, match="torch.float32: FP8 attention rounds float16 and bfloat16"):
        step(module(), DS, inputs)
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe=DS):
        out = module()(*inputs[:3])
    assert out.dtype == torch.bfloat16 and out.requires_grad


def test_gradients_of_containers_accumulate(core):
    m, inputs = module(), problem()
    expected = step(module(), None, inputs, enabled=False)
    leaves = contained(inputs)
    for _ in range(3):
        with autocast(recipe=DelayedScaling(fp8_mha=True, amax_history_len=1)):
            m(*leaves[:3]).backward(leaves[3])
    for x, y in zip(leaves[:3], expected[1:]):
        assert error(x.grad, 3 * y) < 0.16


def test_containers_in_containers_out(core):
    m, inputs = module(), problem()
    recipe = DelayedScaling(fp8_mha=True, amax_history_len=1)
    expected = step(module(), None, inputs, enabled=False)
    for _ in range(2):
        got = step(m, recipe, contained(inputs))
    assert core.calls[-1][-1] == torch.float8_e5m2
    scale = m.fp8_meta["scaling_bwd"].scale
    for x, y in zip(got, expected):
        assert isinstance(x, te.Float8Tensor) and x.dtype == torch.bfloat16 and error(x, y) < 0.12
    assert {x._fp8_dtype for x in got[1:]} == {E5M2}
    assert got[1]._scale_inv.item() == pytest.approx(1 / scale[DQKV].item(), rel=0.1)
    assert m.fp8_meta["scaling_fwd"].amax_history.shape == (1, 9) and m.fp8_meta["scaling_fwd"].scale[QKV] == 1
    do = te.Float8CurrentScalingQuantizer(E5M2, "cpu")(inputs[3])
    assert error(step(m, recipe, [*contained(inputs)[:3], do])[3], expected[3]) < 0.12
    assert scale[DO].item() == pytest.approx(57344 / largest(inputs[3]))  # that of the steps before


@pytest.mark.parametrize("mha", [False, True])
def test_inference_asks_for_no_lse(core, mha):
    m, (q, k, v, _) = module(), problem()
    with torch.no_grad():
        expected = m(q, k, v)
        with autocast(recipe=DelayedScaling(fp8_dpa=True, fp8_mha=mha)):
            out = m(q, k, v)
    assert core.calls == [("forward", torch.float8_e4m3fn, torch.bfloat16, None)] and core.asked == [(False, True)]
    assert isinstance(out, te.Float8Tensor) == mha and error(out, expected) < 0.08
    history = m.fp8_meta["scaling_fwd"].amax_history
    assert history[0, O] > 0 and (m.fp8_meta["scaling_fwd"].scale == 1).all()


@pytest.mark.parametrize("switch", ["environment", "argument"])
def test_a_wide_backward_pass_sees_what_the_forward_saw(core, switch, monkeypatch):
    if switch == "environment":
        monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    inputs = problem()
    rounded = [te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)(x.detach()).dequantize().requires_grad_()
               for x in inputs[:3]]
    expected = step(module(), None, [*rounded, inputs[3]], enabled=False)
    got = step(module(), DS, inputs, bf16_backward=switch == "argument")
    assert core.calls[-1] == ("backward", torch.bfloat16, torch.bfloat16, None)
    for x, y in zip(got, expected):
        assert error(x, y) < 0.01


def test_current_scaling(core):
    inputs, m = problem(), module()
    expected = step(module(), None, inputs, enabled=False)
    step(m, Float8CurrentScaling(fp8_dpa=True), inputs)
    assert core.calls == [("forward", torch.bfloat16, None, "fp8")]
    step(m, Float8CurrentScaling(fp8_dpa=True), inputs, bf16_backward=True)
    assert core.asked == [(True, False)]  # who remembers nothing asks for no amax
    out, *grads = step(m, Float8CurrentScaling(fp8_mha=True), inputs)
    assert isinstance(out, te.Float8Tensor) and not any(isinstance(x, te.Float8Tensor) for x in grads)
    assert out._scale_inv.item() == pytest.approx(largest(expected[0]) / 448, rel=0.05)
    out, *grads = step(m, Float8CurrentScaling(fp8_mha=True), contained(inputs))
    for x, y in zip((out, *grads), expected):
        assert isinstance(x, te.Float8Tensor) and error(x, y) < 0.12
    assert len({x._scale_inv.item() for x in grads}) == 3  # each its own
    assert m.fp8_meta["scaling_fwd"].scale.tolist() == [1, 1, 448]  # slot S, of P


@pytest.mark.parametrize("layout", ["thd", "sbhd"])
def test_features_go_along(core, layout):
    """Learnt sinks, ALiBi slopes, packed sequences, dropout, max_logit: each with its gradient."""
    torch.manual_seed(0)
    heads, d, shape = 4, 16, (96, 4, 16) if layout == "thd" else (48, 2, 4, 16)
    m = te.DotProductAttention(heads, d, qkv_format=layout, softmax_type="learnable", attention_dropout=0.1,
                               attn_mask_type="padding_causal" if layout == "thd" else "causal",
                               return_max_logit=True)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 40, 96], dtype=torch.int32)
    more = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=56, max_seqlen_kv=56) if layout == "thd" else \
        dict(core_attention_bias_type="post_scale_bias",
             core_attention_bias=torch.randn(1, 4, 48, 48, dtype=torch.bfloat16).requires_grad_())
    leaves = [q, k, v, m.softmax_offset] + [x for x in more.values() if x is not None and
                                             isinstance(x, torch.Tensor) and x.requires_grad]
    results = []
    for enabled in (False, True):
        torch.manual_seed(1)
        for _ in range(2 if enabled else 1):
            torch.manual_seed(1)
            with autocast(enabled=enabled, recipe=DS):
                out, max_logit = m(q, k, v, **more)
        results.append([out, max_logit, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for x, y in zip(*results):
        assert x.shape == y.shape and x.dtype == y.dtype and 1e-4 < error(y, x) < 0.16


def test_the_chain_of_multi_head_attention(core):
    """fp8_mha through projections: it learns as in 16 bits."""
    torch.manual_seed(0)
    losses = {}
    state, x, target = None, torch.randn(24, 2, 64), torch.randn(24, 2, 64)
    for recipe in (None, DelayedScaling(fp8_mha=True, amax_history_len=4)):
        m = te.MultiheadAttention(64, 4, attention_dropout=0.0, fuse_qkv_params=True, device="cpu",
                                  params_dtype=torch.float32)
        state = copy.deepcopy(m.state_dict()) if state is None else state
        m.load_state_dict(state)
        m = m.bfloat16()
        optimizer = torch.optim.Adam(m.parameters(), 1e-2)
        for _ in range(8):
            with autocast(enabled=recipe is not None, recipe=recipe):
                out = m(x.bfloat16())
            loss = torch.nn.functional.mse_loss(out.float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(recipe is None, []).append(loss.item())
    assert losses[True][-1] < 0.85 * losses[True][0]
    assert losses[False] == pytest.approx(losses[True], rel=0.02) and losses[False] != losses[True]
    scales = m.core_attention.fp8_meta["scaling_bwd"].scale
    assert scales[DQKV] != 1 and scales[DO] != 1


def test_the_log(core, monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    with caplog.at_level(logging.DEBUG):
        step(module(), DS, problem())
    lines = [record.getMessage() for record in caplog.records]
    for line in ("Running with FusedAttention backend (sub-backend 2)", "Running forward in FP8",
                 "Running backward in FP8",
                 "Running with fp8_recipe.fp8_mha=False, fp8_recipe.fp8_dpa=True, and NVTE_FP8_DPA_BWD=1"):
        assert line in lines


def test_a_backward_pass_of_two_calls_renews_scales_once(core):
    m, other, inputs = module(), module(), problem()
    with autocast(recipe=DelayedScaling(fp8_dpa=True, amax_history_len=4)):
        out = m(*inputs[:3]) + other(*inputs[:3])
    out.backward(inputs[3])
    for one in (m, other):
        assert one.fp8_meta["scaling_bwd"].amax_history[:, DO].count_nonzero() == 1
    with pytest.raises(RuntimeError):
        out.backward(inputs[3])  # a second time
    with autocast(recipe=DelayedScaling(fp8_dpa=True, amax_history_len=4)):
        out = m(*inputs[:3])
    out.backward(inputs[3])
    assert m.fp8_meta["scaling_bwd"].amax_history[:, DO].count_nonzero() == 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [DelayedScaling(fp8_dpa=True, amax_history_len=4),
                                    Float8CurrentScaling(fp8_mha=True)], ids=["delayed", "current"])
def test_checkpoints_see_the_region_and_the_scales_of_the_first_time(core, reentrant, recipe):
    """Modules in checkpoints, one in the other, for two steps: gradients, scales and histories are as
    without."""
    found = []
    for checkpointed in (False, True):
        modules, inputs = [module(), module()], problem()

        def value(x):
            return x.dequantize() if isinstance(x, te.Float8Tensor) else x

        def inner(q, k, v):
            return value(modules[1](k, q, v))

        def run(q, k, v):
            first = te.checkpoint(inner, q, k, v, use_reentrant=reentrant) if checkpointed else inner(q, k, v)
            return first + value(modules[0](q, k, v))
        for _ in range(2):
            for x in inputs[:3]:
                x.grad = None
            with autocast(recipe=recipe):
                out = te.checkpoint(run, *inputs[:3], use_reentrant=reentrant) if checkpointed else \
                    run(*inputs[:3])
            out.backward(inputs[3])
        states = [m.fp8_meta[key] for m in modules for key in ("scaling_fwd", "scaling_bwd")]
        found.append([x.grad for x in inputs[:3]] + [x for state in states for x in
                                                     (state.scale, state.amax_history)])
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("one_device")
def test_a_cache_in_fp8_is_refused():
    params = te.InferenceParams(2, 8, 4, 16, torch.bfloat16, qkv_format="bshd")
    q = torch.zeros(2, 4, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="FP8 attention with inference_params.*NVTE_DPA_FP8_RECIPE=F16"), \
            torch.no_grad(), autocast(recipe=DS):
        module(attn_mask_type="padding_causal")(q, q, q, inference_params=params, cu_seqlens_q=torch.tensor(
            [0, 4, 8], dtype=torch.int32), cu_seqlens_kv=torch.tensor([0, 4, 8], dtype=torch.int32))


ROUNDS_INSIDE = tessera.explain("fwd bf16 b=1 s=4 h=1 d=16 precision=fp8").backend is not None


@pytest.mark.skipif(ROUNDS_INSIDE, reason="a kernel can")
def test_where_no_kernel_can_the_reason_is_the_core_s():
    q = torch.zeros(1, 4, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="FusedAttention: cpu: (.|\n)*precision"), \
            autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        module()(q, q, q)


@pytest.mark.skipif(not te.is_fp8_available(), reason="no kernel of this build takes fp8 tensors")
@pytest.mark.parametrize("recipe", [
    DelayedScaling(fp8_dpa=True), DelayedScaling(fp8_mha=True), Float8CurrentScaling(fp8_mha=True),
    pytest.param(Float8CurrentScaling(fp8_dpa=True), marks=pytest.mark.skipif(
        not ROUNDS_INSIDE, reason='no kernel has precision="fp8"'))],
    ids=["delayed", "delayed mha", "current mha", "current"])
@pytest.mark.parametrize("containers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_against_f16(recipe, containers, dtype):
    """By tessera's kernels of fp8 tensors."""
    m, inputs = module(), problem(dtype=dtype)
    expected = step(module(), None, inputs, enabled=False)
    for _ in range(2):
        got = step(m, recipe, contained(inputs) if containers else inputs)
    for x, y, bound in zip(got, expected, (0.08, 0.14, 0.14, 0.14)):
        assert 1e-3 < error(x, y) < bound
