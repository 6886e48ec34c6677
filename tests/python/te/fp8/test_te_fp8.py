# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's FP8 vocabulary: recipes, regions, histories, containers, states."""

import copy
import io
import math
import pickle
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import tessera.te.pytorch as te  # noqa: E402
import tessera.torch  # noqa: E402
from tessera.te.common import recipe as recipes  # noqa: E402
from tessera.te.common.recipe import (CustomRecipe, DelayedScaling, Float8BlockScaling,  # noqa: E402
                                      Float8CurrentScaling, Format, MMParams, MXFP8BlockScaling,
                                      NVFP4BlockScaling)
from tessera.te.pytorch import quantization  # noqa: E402
from te_fp8_core import E4M3, E5M2, O, QKV, fresh, module  # noqa: E402, F401
from tessera.te.pytorch.attention.dot_product_attention import backends, utils  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._quantized import _fp8_state  # noqa: E402
from tessera.te.pytorch.quantization import (DelayedScalingRecipeState, FP8GlobalStateManager,  # noqa: E402
                                             autocast)

FLT_MAX = torch.finfo(torch.float32).max


# ---- recipes ----

def test_recipes_have_te_s_defaults():
    r = DelayedScaling()
    assert (r.margin, r.fp8_format, r.amax_history_len, r.amax_compute_algo) == (0, Format.HYBRID, 1024, "max")
    assert r.reduce_amax and not r.fp8_dpa and not r.fp8_mha and r.scaling_factor_compute_algo is None
    assert Float8CurrentScaling().fp8_gemm_fprop == MMParams(use_split_accumulator=False)
    assert MXFP8BlockScaling().fp8_format == Float8BlockScaling().fp8_format == Format.E4M3
    assert NVFP4BlockScaling().fp4_quant_bwd_grad.stochastic_rounding
    assert Format.HYBRID.value == (448, 57344) and Format.HYBRID.value.max_bwd == 57344
    assert "recipe_type=DelayedScaling, margin=3" in repr(DelayedScaling(margin=3))
    assert te.recipe is recipes and isinstance(te.get_default_recipe(), DelayedScaling)


KINDS = {"delayed": DelayedScaling, "float8_current_scaling": Float8CurrentScaling, "mxfp8": MXFP8BlockScaling,
         "float8_block_scaling": Float8BlockScaling, "nvfp4": NVFP4BlockScaling, "custom": CustomRecipe}


@pytest.mark.parametrize("kind", KINDS)
def test_predicates(kind):
    assert [getattr(KINDS[kind], name)() for name in KINDS] == [name == kind for name in KINDS]
    per_tensor = kind in ("delayed", "float8_current_scaling")
    assert KINDS[kind].float8_per_tensor_scaling() == per_tensor


@pytest.mark.parametrize("make, message", [
    (lambda: DelayedScaling(fp8_format=Format.E5M2), "Pure E5M2"),
    (lambda: DelayedScaling(amax_history_len=0), "amax_history_len=0"),
    (lambda: DelayedScaling(amax_compute_algo="mean"), "amax_compute_algo='mean'"),
    (lambda: DelayedScaling(backward_override="dequantized"), "backward_override=None"),
    (lambda: Float8CurrentScaling(backward_override="none"), "backward_override must be one of"),
    (lambda: Float8BlockScaling(fp8_dpa=True), "FP8 attention is not supported.*NVTE_DPA_FP8_RECIPE"),
    (lambda: Float8BlockScaling(x_block_scaling_dim=3), "x_block_scaling_dim=3"),
    (lambda: Float8BlockScaling(grad_block_scaling_dim=2), "2D by 2D"),
    (lambda: Float8BlockScaling(fp8_gemm_wgrad=MMParams(False)), "required for wgrad"),
    (lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID), "Only E4M3"),
    (lambda: CustomRecipe(qfactory=1), "qfactory=1")], ids=range(11))
def test_recipes_assert(make, message):
    with pytest.raises(AssertionError, match=message):
        make()


def test_formats_of_a_recipe():
    for given, forward, backward in ((Format.HYBRID, E4M3, E5M2), (Format.E4M3, E4M3, E4M3)):
        r = DelayedScaling(fp8_format=given)
        assert quantization.get_fp8_te_dtype(r) == forward
        assert quantization.get_fp8_te_dtype(r, fprop_tensor=False) == backward
        assert quantization.get_fp8_max(r, False) == (57344 if backward == E5M2 else 448)


def test_what_is_available_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    available, reason = te.is_fp8_available(return_reason=True)
    explained = tessera.explain("fwd e4m3 b=1 s=128 h=1 d=128 qscale=one kvscale=one")
    assert available == (explained.backend is not None) == (reason == "") == te.is_fp8_available()
    for question in (te.is_mxfp8_available, te.is_fp8_block_scaling_available, te.is_nvfp4_available):
        assert question(return_reason=True)[0] is question() is False
        assert "DelayedScaling" in question(return_reason=True)[1]


# ---- regions ----

def test_regions_nest():
    manager = FP8GlobalStateManager
    outer, inner = DelayedScaling(margin=1), Float8CurrentScaling()
    assert not manager.is_fp8_enabled()
    with te.fp8_autocast(enabled=True, fp8_recipe=outer):
        assert manager.is_fp8_enabled() and manager.get_fp8_recipe() is outer
        assert manager.is_first_fp8_module() and not manager.is_first_fp8_module()
        with autocast(recipe=inner):
            assert manager.get_fp8_recipe() is inner and not manager.is_first_fp8_module()
        with autocast(enabled=False):
            assert not manager.is_fp8_enabled() and manager.quantization_state.autocast_depth == 2
        assert manager.get_fp8_recipe() is outer
    assert not manager.is_fp8_enabled() and manager.quantization_state.autocast_depth == 0
    with pytest.raises(ValueError, match="recipe='delayed': must be a recipe"), autocast(recipe="delayed"):
        pass


def state_of(recipe, slots=3, mode="forward"):
    state = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=slots, device="cpu")
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer({f"scaling_{mode[:1]}wd": state})
    return state


def test_scales_are_renewed_as_the_outermost_region_ends():
    state = state_of(DelayedScaling(amax_history_len=2))
    quantizer = state.make_quantizers()[1]
    x = torch.tensor([2.0, -3.5])
    with autocast(recipe=state.recipe):
        with autocast(recipe=state.recipe):
            quantizer(x)
        assert state.scale.tolist() == [1, 1, 1] and state.amax_history[0].tolist() == [0, 3.5, 0]
    assert state.scale.tolist() == [1, 128, 1] and state.amax_history.tolist() == [[0, 0, 0], [0, 3.5, 0]]
    for enabled, grad in ((False, True), (True, False)):
        with torch.set_grad_enabled(grad), autocast(enabled=enabled, recipe=state.recipe):
            quantizer(x * 2)
        assert state.scale[1] == 128 and state.amax_history[0, 1] == 7
    with pytest.raises(KeyError), autocast(recipe=state.recipe):
        raise KeyError
    assert state.scale[1] == 128
    with autocast(recipe=state.recipe):
        pass
    assert state.scale[1] == 64


# ---- the rule ----

def expected_update(history, scale, largest, margin, algorithm):
    """One slot: a list whose first is the newest, and a scale, in fp64 and by the written rule."""
    newest = history[0]
    amax = newest if algorithm == "most_recent" else max(history)
    if newest != 0:
        history = [0.0, *history[2:], newest] if len(history) > 1 else [0.0]
    if amax == 0 or math.isinf(amax):
        return history, scale
    return history, min(largest / 2 ** margin / amax, FLT_MAX)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length, margin", [(1, 0), (7, 2), (32, 0)])
def test_200_steps_of_history(length, margin, algorithm, mode):
    recipe = DelayedScaling(amax_history_len=length, margin=margin, amax_compute_algo=algorithm)
    slots, generator = 9, torch.Generator().manual_seed(length)
    state = state_of(recipe, slots, mode)
    quantizers = state.make_quantizers()
    largest = 448 if mode == "forward" else 57344
    histories, scales = [[0.0] * length for _ in range(slots)], [1.0] * slots
    special = [0.0, math.inf, 1e-42, 3e38]
    seen = set()
    for _ in range(200):
        amaxes = torch.exp2(torch.randint(-30, 30, (slots,), generator=generator).float())
        amaxes *= 1 + torch.rand(slots, generator=generator)
        for slot in range(slots):
            pick = int(torch.randint(0, 12, (1,), generator=generator))
            if pick < len(special):
                amaxes[slot] = special[pick]
            quantizers[slot].note(amaxes[slot])
            histories[slot][0] = float(amaxes[slot])
            histories[slot], scales[slot] = expected_update(histories[slot], scales[slot], largest, margin,
                                                            algorithm)
            seen.add(scales[slot] == FLT_MAX)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=mode == "forward")
        assert state.amax_history.T.tolist() == histories
        torch.testing.assert_close(state.scale.double(), torch.tensor(scales, dtype=torch.float64),
                                   rtol=2e-7, atol=0)
    assert seen == {False, True} or algorithm == "max" and length > 1


def test_many_layers_are_renewed_as_one_is():
    """States of several rules, devices aside, whose histories are of two lengths."""
    kinds = [DelayedScaling(amax_history_len=length, margin=margin, amax_compute_algo=algorithm)
             for length in (1, 4) for margin in (0, 3) for algorithm in ("max", "most_recent")]
    states = [state_of(recipe, slots) for slots in (3, 9) for recipe in kinds]
    alone = copy.deepcopy(states)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        for state, single in zip(states, alone):
            newest = torch.rand(state.num_quantizers, generator=generator).sub(0.3).clamp(min=0)
            for one in (state, single):
                one.amax_history[0] = newest
            single.update()
        FP8GlobalStateManager.reduce_and_update_fp8_tensors()
    for state, single in zip(states, alone):
        assert torch.equal(state.scale, single.scale) and torch.equal(state.amax_history, single.amax_history)


def test_functions_of_the_user_decide():
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.mean(0),
                            scaling_factor_compute_algo=lambda amax, scale, largest, r: largest / amax + scale)
    state = state_of(recipe, 1)
    for amax, scale in ((6.0, 448 / 2 + 1), (3.0, 448 / 3 + 448 / 2 + 1)):
        state.make_quantizers()[0].note(torch.tensor([amax]))
        state.update()
        assert state.scale.item() == pytest.approx(scale)


def test_a_history_of_another_length_keeps_the_newest():
    state = state_of(DelayedScaling(amax_history_len=4), 1)
    for amax in (1.0, 2.0, 3.0):
        state.make_quantizers()[0].note(torch.tensor([amax]))
        state.update()
    assert state.amax_history.flatten().tolist() == [0, 1, 2, 3]
    for length, rows in ((6, [0, 0, 0, 1, 2, 3]), (3, [0, 2, 3]), (1, [0])):
        state.refit(DelayedScaling(amax_history_len=length))
        assert state.amax_history.flatten().tolist() == rows


def test_a_module_that_is_gone_takes_no_part():
    state_of(DelayedScaling())
    FP8GlobalStateManager.reduce_and_update_fp8_tensors()
    assert FP8GlobalStateManager.quantization_state.states == []


# ---- containers ----

def test_quantizers_round_and_note():
    scale, amax = torch.tensor([4.0]), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    x = torch.tensor([[1.0, -3.3, 200.0], [math.inf, math.nan, 1e-9]], dtype=torch.bfloat16)
    got = quantizer(x)
    assert isinstance(got, te.Float8Tensor) and got.dtype == torch.bfloat16 and got.shape == (2, 3)
    assert (got._data.dtype, got._fp8_dtype, got._transpose) == (torch.uint8, E4M3, None)
    assert got._scale_inv.tolist() == [0.25]
    torch.testing.assert_close(got.dequantize(dtype=torch.float32),
                               torch.tensor([[1.0, -3.25, 112.0], [112.0, math.nan, 0.0]]), equal_nan=True)
    quantizer(x[:1])
    assert amax.item() == 200
    quantizer(x[:1, :2])
    assert amax.item() == 200  # the largest since it was 0
    again = quantizer.create_tensor_from_data(got._data, torch.bfloat16)
    assert torch.equal(again._data, got._data) and again._scale_inv.item() == 0.25
    quantizer.update_quantized(torch.ones(2, 3), got)
    assert got.dequantize().tolist() == [[1, 1, 1]] * 2
    assert quantizer.make_empty((2, 5)).shape == (2, 5)
    for dtype in (torch.float16, torch.float32, torch.float64):
        number = quantizer(torch.tensor(0.8, dtype=dtype))
        assert number.dequantize().item() == 0.8125 and number.shape == () and number.dtype == dtype


@pytest.mark.parametrize("x, scale", [([0.0, 0.0], 1), ([2.0, -7.0], 64), ([math.inf, 1.0], 1),
                                      ([1e-42], FLT_MAX)], ids=str)
def test_current_scales(x, scale):
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, "cpu")
    assert quantizer(torch.tensor(x))._scale_inv.item() == pytest.approx(1 / scale)
    assert te.Float8CurrentScalingQuantizer(E5M2, "cpu")(torch.tensor([3.0]))._scale_inv.item() == \
        pytest.approx(3 / 57344)
    power = te.Float8CurrentScalingQuantizer(E4M3, "cpu", force_pow_2_scales=True)
    assert power(torch.tensor([3.0]))._scale_inv.item() == 1 / 128
    assert te.Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=1.0)(
        torch.tensor([0.5]))._scale_inv.item() == pytest.approx(1 / 448)


def test_containers_answer_as_their_values():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 8)
    got = te.Float8CurrentScalingQuantizer(E4M3, "cpu")(x)
    value = got.dequantize()
    assert (value - x).abs().max() < 0.07 * x.abs().max() and type(value) is torch.Tensor
    moves = (lambda t: t.transpose(0, 1), lambda t: t.flatten(-2), lambda t: t[:, 1:3], lambda t: t[0],
             lambda t: t.split(2, 1)[1], lambda t: t.unbind(2)[3], lambda t: t.permute(3, 1, 0, 2).contiguous(),
             lambda t: t.unsqueeze(0).expand(3, *t.shape), lambda t: t.detach().clone(),
             lambda t: t.view(2, 6, 32).reshape(12, 32).t(), lambda t: t.squeeze(), lambda t: t.to("cpu"))
    for move in moves:
        moved = move(got)
        assert isinstance(moved, te.Float8Tensor) and moved.shape == move(value).shape
        assert moved.stride() == moved._data.stride() and torch.equal(moved.dequantize(), move(value))
    for compute in (lambda t: t + 1, lambda t: t @ t.mT, lambda t: torch.cat([t, t]), lambda t: t.to(torch.float64),
                    lambda t: torch.nn.functional.linear(t, torch.ones(3, 8)), torch.zeros_like):
        result = compute(got)
        assert type(result) is torch.Tensor and torch.equal(result, compute(value))
    other = got.detach()
    other.mul_(2)
    torch.testing.assert_close(other.dequantize(), value * 2)
    assert torch.equal(got.dequantize(), other.dequantize()), "a detached tensor shares what it stores"
    got[0].fill_(1.0)  # by the scale of the whole
    torch.testing.assert_close(got.dequantize(), torch.stack([torch.ones_like(value[0]), value[1] * 2]),
                               rtol=0.07, atol=0.01)
    for same in (pickle.loads(pickle.dumps(got)), copy.deepcopy(got)):
        assert isinstance(same, te.Float8Tensor) and torch.equal(same.dequantize(), got.dequantize())
    assert "Float8Tensor(fp8_dtype=kFloat8E4M3" in repr(got)


def test_gradients_pass_through_the_rounding():
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    rounded = te.Float8CurrentScalingQuantizer(E4M3, "cpu")(x)
    assert rounded.requires_grad
    out = torch.nn.functional.linear(rounded[1:], weight)
    do = torch.randn_like(out)
    out.backward(do)
    torch.testing.assert_close(x.grad[1:], do @ weight)
    torch.testing.assert_close(weight.grad, do.T @ rounded.dequantize()[1:])


@pytest.mark.parametrize("make, message", [
    (lambda: te.Float8Tensor((2,), torch.float32, data=torch.zeros(3, dtype=torch.uint8),
                             fp8_scale_inv=torch.ones(1), fp8_dtype=E4M3), r"shape=\[2\]: must be .*\[3\]"),
    (lambda: te.Float8Tensor((2,), torch.float32, data=torch.zeros(2), fp8_scale_inv=torch.ones(1),
                             fp8_dtype=E4M3), "data.dtype=torch.float32"),
    (lambda: te.Float8Tensor((2,), torch.float32, data=torch.zeros(2, dtype=torch.uint8),
                             fp8_scale_inv=torch.ones(1), fp8_dtype=6), "fp8_dtype=6"),
    (lambda: te.Float8Tensor((2,), torch.float32, data=torch.zeros(2, dtype=torch.uint8),
                             fp8_scale_inv=torch.ones(1), fp8_dtype=E4M3).add_(1), "quantizer=None"),
    (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu").update_quantized(torch.ones(1), torch.ones(1)),
     "dst=Tensor")], ids=range(5))
def test_misuse_of_containers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_combining():
    q, k, v = (torch.randn(2, 3, 2, 8, dtype=torch.bfloat16) * n for n in (1, 2, 3))
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, "cpu")
    *rounded, layout, scale_format = utils.combine_and_quantize("bshd_bshd_bshd", q, k, v, quantizer)
    assert (layout, scale_format) == ("bshd_bshd_bshd", None)
    assert len({x._scale_inv.item() for x in rounded}) == 1
    assert rounded[0]._scale_inv.item() == pytest.approx(max(x.abs().max().item() for x in (q, k, v)) / 448)
    values = utils.combine_and_dequantize("bshd_bshd_bshd", *rounded, src_nominal_dtype=torch.float32)
    for x, value in zip((q, k, v), values):
        assert value.dtype == torch.float32 and (value - x).abs().max() < 0.04 * v.abs().max()
    with pytest.raises(ValueError, match="qkv_layout='bhd3'"):
        utils.combine_and_quantize("bhd3", q, k, v, quantizer)


def test_emulation_rounds_one_side_of_a_pass():
    x = torch.randn(4, 8, requires_grad=True)
    quantizer = te.Float8CurrentScalingQuantizer(E5M2, "cpu")
    do = torch.randn(4, 8)
    for name, forward in (("QKV_quantizer", True), ("dQKV_quantizer", False), ("S_quantizer", True),
                          ("O_quantizer", True), ("dO_quantizer", False), ("dP_quantizer", False)):
        three = "QKV" in name
        out = backends.FP8EmulationFunc.apply(x, *((x, x) if three else (None, None)), quantizer, name,
                                              "bshd_bshd_bshd")[0]
        grad, = torch.autograd.grad(out, x, do, materialize_grads=True)
        expected = quantizer(do).dequantize()
        torch.testing.assert_close(out, quantizer(x.detach()).dequantize() if forward else x.detach(),
                                   check_stride=False)
        torch.testing.assert_close(grad, do if forward else expected)
    with pytest.raises(ValueError, match="quantizer_name='T_quantizer'"):
        backends.FP8EmulationFunc.apply(x, None, None, quantizer, "T_quantizer", None)


# ---- states ----

def used_module(recipe=None):
    """A module whose slots have scales and histories of their own."""
    m = module()
    with torch.no_grad(), autocast(recipe=recipe or DelayedScaling(fp8_dpa=True, amax_history_len=5)):
        m.init_fp8_metadata(device=torch.device("cpu"))
    for key in ("scaling_fwd", "scaling_bwd"):
        state = m.fp8_meta[key]
        state.scale.copy_(torch.arange(1, len(state.scale) + 1))
        state.amax_history.copy_(torch.arange(state.amax_history.numel()).view_as(state.amax_history))
    return m


def values(m):
    return [x for key in ("scaling_fwd", "scaling_bwd") for x in (m.fp8_meta[key].scale,
                                                                  m.fp8_meta[key].amax_history)]


class FakeTe:
    """Modules of TE's names with its classes, such as a machine with TE has them."""

    def __enter__(self):
        self.before = {name: sys.modules.get(name) for name in (
            "transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")}
        for name in self.before:
            sys.modules[name] = types.ModuleType(name)
        home = sys.modules["transformer_engine.common.recipe"]
        import collections
        import enum
        helper = collections.namedtuple("_FormatHelper", ["max_fwd", "max_bwd"])
        for name, made in (
                ("_FormatHelper", helper),
                ("Format", enum.Enum("Format", {"E4M3": helper(448, 448), "HYBRID": helper(448, 57344)})),
                ("DelayedScaling", type("DelayedScaling", (), {"delayed": lambda self: True}))):
            made.__module__, made.__qualname__ = home.__name__, name
            setattr(home, name, made)
        return home

    def __exit__(self, *_):
        for name, before in self.before.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before


def test_extra_state_is_te_s():
    """What is saved here unpickles where TE is, as TE's classes; what TE saves is read here without TE."""
    m = used_module()
    saved = m.state_dict()["_extra_state"]
    with FakeTe() as home:
        state = pickle.loads(saved.numpy().tobytes())
        assert type(state["recipe"]) is home.DelayedScaling
        assert state["recipe"].fp8_format is home.Format.HYBRID and state["recipe"].amax_history_len == 5
        assert set(state) == {"recipe", "scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd",
                              "extra_fp8_variables"}
        assert state["scale_fwd"].shape == (9,) and state["amax_history_bwd"].shape == (5, 6)
        recipe = home.DelayedScaling()
        recipe.__dict__.update(margin=2, fp8_format=home.Format.HYBRID, amax_history_len=5, fp8_dpa=True)
        state["recipe"], state["extra_fp8_variables"] = recipe, {"num_gemms": 3, "local_recipes": [recipe]}
        from_te = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    other = module()
    other.load_state_dict({"_extra_state": from_te})
    assert all(map(torch.equal, values(other), values(m)))
    assert other.fp8_meta["recipe"] == DelayedScaling(margin=2, amax_history_len=5, fp8_dpa=True)


def test_a_state_is_taken_up_by_the_next_region():
    m, other = used_module(), module()
    other.load_state_dict(m.state_dict())
    with torch.no_grad(), autocast(recipe=DelayedScaling(fp8_dpa=True, amax_history_len=3)):
        other.init_fp8_metadata(device=torch.device("cpu"))
    assert torch.equal(other.fp8_meta["scaling_fwd"].scale, m.fp8_meta["scaling_fwd"].scale)
    assert torch.equal(other.fp8_meta["scaling_fwd"].amax_history,
                       m.fp8_meta["scaling_fwd"].amax_history[[0, 3, 4]])
    assert other.quantizers["scaling_fwd"][QKV].scale.item() == QKV + 1


def test_copies_of_a_module_have_states_of_their_own():
    m = used_module()
    before = [x.clone() for x in values(m)]
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        with torch.no_grad(), autocast(recipe=DelayedScaling(fp8_dpa=True, amax_history_len=5)):
            other.init_fp8_metadata(device=torch.device("cpu"))
        assert all(map(torch.equal, values(other), before))
        other.quantizers["scaling_fwd"][O].note(torch.tensor([1e6]))
        other.fp8_meta["scaling_fwd"].update()
        assert other.fp8_meta["scaling_fwd"].scale[O] == torch.tensor(448) / 1e6
        assert all(map(torch.equal, values(m), before))


def test_states_of_te_1_6():
    m = used_module()
    scale_fwd, history_fwd, scale_bwd, history_bwd = values(m)
    file = io.BytesIO()
    torch.save({"scale_fwd": scale_fwd, "scale_inv_fwd": 1 / scale_fwd, "amax_history_fwd": history_fwd,
                "scale_bwd": scale_bwd, "scale_inv_bwd": 1 / scale_bwd, "amax_history_bwd": history_bwd,
                "global_fp8_buffer": {}, "extra_fp8_variables": {"num_gemms": 3, "fp8_checkpoint": True}}, file)
    layer = torch.nn.ModuleDict({"core_attention": module()})
    layer.load_state_dict({"core_attention.fused_attention._extra_state": file})
    assert all(map(torch.equal, values(layer["core_attention"]), values(m)))


class Evil:
    def __reduce__(self):
        return sys.exit, (1,)


def pickled(state):
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def state_with(**more):
    nine, six = torch.ones(9), torch.ones(6)
    return pickled(dict(scale_fwd=nine, amax_history_fwd=torch.zeros(4, 9), scale_bwd=six,
                        amax_history_bwd=torch.zeros(4, 6), extra_fp8_variables={}) | more)


@pytest.mark.parametrize("state, message", [
    (state_with(scale_fwd=torch.ones(6)), r"scale_fwd.shape=\[6\]: must be \[9\], or \[3\]"),
    (state_with(amax_history_bwd=torch.ones(4, 9)), r"amax_history_bwd.shape=\[4, 9\]: must be \[steps, 6\]"),
    (state_with(amax_history_fwd=torch.ones(4, 3)), "amax_history_fwd.shape=.*scale_fwd's 9 slots"),
    (state_with(amax_history_fwd=torch.ones(0, 9)), r"amax_history_fwd.shape=\[0, 9\]"),
    (state_with(scale_bwd=torch.ones(2), amax_history_bwd=torch.ones(4, 2)), r"scale_bwd.shape=\[2\].*beside"),
    (state_with(scale_bwd=None), "scale_bwd.shape=NoneType"),
    (state_with(scale_bwd=torch.tensor([1.0, 0, 1, 1, 1, 1])), "scale_bwd=.*must be finite and > 0"),
    (state_with(recipe=MXFP8BlockScaling()), "recipe=MXFP8BlockScaling: must be DelayedScaling"),
    (state_with(recipe=Evil()), "pickle=UnpicklingError: sys.exit: .*NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"),
    (pickled([1]), "pickle=list: must be a dict"), (torch.tensor([1, 2], dtype=torch.uint8), "pickle=.*no plain data"),
    (state_with(extra_fp8_variables=3), "extra_fp8_variables=int: must be a dict"),
    (torch.zeros(3), r"type=torch.float32\[3\]: must be a uint8"), ("state", "type=str")], ids=range(14))
def test_a_wrong_state_is_one_clear_error(state, message):
    m = used_module()
    before = [x.clone() for x in values(m)]
    with pytest.raises(ValueError, match=f"_extra_state: {message}"):
        m.load_state_dict({"_extra_state": state})
    assert all(map(torch.equal, values(m), before))


def test_a_state_that_inference_made_can_train():
    with torch.inference_mode():
        m = used_module()
        m.fp8_meta["scaling_fwd"].refit(DelayedScaling(amax_history_len=2))
    m.fp8_meta["scaling_fwd"].update()
    assert m.fp8_meta["scaling_fwd"].amax_history.shape == (2, 9)


def test_functions_of_a_recipe_that_cannot_be_saved():
    m = used_module(DelayedScaling(fp8_dpa=True, amax_compute_algo=lambda history: history[0]))
    with pytest.raises(ValueError, match="_extra_state: recipe=recipe_type=DelayedScaling, .*functions must be"):
        m.state_dict()


def test_a_trusted_pickle_may_hold_anything(monkeypatch):
    recipe = DelayedScaling(fp8_dpa=True, scaling_factor_compute_algo=math.hypot)
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    m = module()
    m.load_state_dict({"_extra_state": state_with(recipe=recipe)})
    assert m.fp8_meta["recipe"] == recipe


# ---- the recipe of attention ----

DS, CS = DelayedScaling(fp8_dpa=True), Float8CurrentScaling(fp8_dpa=True, fp8_format=Format.E4M3)


@pytest.mark.parametrize("given, switches, expected", [
    (DS, {}, [DS]), (DelayedScaling(), {}, []), (DS, {"RECIPE": "F16"}, []),
    (CS, {}, [CS, DelayedScaling(fp8_dpa=True, fp8_format=Format.E4M3, amax_history_len=1,
                                 amax_compute_algo="most_recent")]),
    (CS, {"RECIPE": "DelayedScaling", "DS_AMAX_HISTLEN": "7", "DS_AMAX_ALGO": "max", "DS_REDUCE_AMAX": "0"},
     [DelayedScaling(fp8_dpa=True, fp8_format=Format.E4M3, amax_history_len=7, reduce_amax=False)]),
    (DS, {"RECIPE": "Float8CurrentScaling"}, [Float8CurrentScaling(fp8_dpa=True), DS]),
    (NVFP4BlockScaling(fp8_mha=True), {"RECIPE": "DelayedScaling", "FORMAT": "E4M3"},
     [DelayedScaling(fp8_mha=True, fp8_format=Format.E4M3, amax_history_len=1,
                     amax_compute_algo="most_recent")]),
    (Float8BlockScaling(), {"RECIPE": "DelayedScaling", "RECIPE_DPA": "1"},
     [DelayedScaling(fp8_dpa=True, amax_history_len=1, amax_compute_algo="most_recent")]),
    (MXFP8BlockScaling(), {}, [])], ids=range(9))
def test_switches_give_attention_a_recipe_of_its_own(given, switches, expected, monkeypatch):
    for name, value in switches.items():
        monkeypatch.setenv(f"NVTE_DPA_FP8{'' if name.startswith('DS') else '_'}{name}", value)
    before = repr(given)
    assert _fp8_state.recipes_of(given) == expected
    assert repr(given) == before


@pytest.mark.parametrize("given, switches, error, message", [
    (MXFP8BlockScaling(fp8_dpa=True), {}, tessera.torch.Refused, "MXFP8BlockScaling: a scale for every 32"),
    (DS, {"RECIPE": "MXFP8BlockScaling"}, tessera.torch.Refused, "MXFP8BlockScaling: .*DelayedScaling and"),
    (NVFP4BlockScaling(fp8_mha=True), {}, tessera.torch.Refused, "NVFP4BlockScaling: .*NVTE_DPA_FP8_RECIPE="),
    (CustomRecipe(qfactory=max, fp8_dpa=True), {}, tessera.torch.Refused, "CustomRecipe: it has no FP8"),
    (DS, {"RECIPE": "FP16"}, ValueError, "NVTE_DPA_FP8_RECIPE='FP16': must be one of"),
    (CS, {"RECIPE": "DelayedScaling", "FORMAT": "E8M0"}, ValueError, "NVTE_DPA_FP8_FORMAT='E8M0'")],
    ids=range(6))
def test_refused_recipes(given, switches, error, message, monkeypatch):
    for name, value in switches.items():
        monkeypatch.setenv(f"NVTE_DPA_FP8_{name}", value)
    q = torch.zeros(1, 4, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(error, match=message), autocast(recipe=given):
        module()(q, q, q)
