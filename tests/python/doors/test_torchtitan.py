# SPDX-License-Identifier: Apache-2.0
"""tessera as torchtitan's attention. torchtitan itself runs, on a CPU (`./dev test hosts` installs it); it is compared
with the same model whose attention is written out in PyTorch, as varlen_attn has no kernel of PyTorch's on a CPU."""
import dataclasses

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan")

from dropins import normal  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common import attention as host  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

from cp_pool import Pool  # noqa: E402

from tessera.doors import torchtitan as door  # noqa: E402

POSITIONS = torch.cat([torch.arange(20), torch.arange(44), torch.arange(64)]).view(2, 64)  # three documents
CLOSE = dict(atol=2e-2, rtol=2e-2)  # of bf16, which torchtitan rounds to
pytestmark = pytest.mark.xdist_group("gloo")


@pytest.fixture(autouse=True)
def restored():
    yield
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


def overridden(config):
    said = apply_overrides(OverrideConfig(imports=["tessera.doors.torchtitan.attention"]), config)
    return config, said


def plain(q, k, v, *, attention_masks, scale=None, window_size=(-1, 0), out_transform=None, **_):
    """VarlenAttention's forward of [b, s, h, d] in float32."""
    dtype, (b, s) = q.dtype, q.shape[:2]
    q, k, v = (x.to(torch.bfloat16).float().flatten(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    i = torch.arange(b * s)
    document = torch.bucketize(i, attention_masks.cu_seq_q[1:-1], right=True)
    ahead = i - i[:, None]
    left, right = window_size
    seen = (document == document[:, None]) & ((left < 0) | (ahead >= -left)) & ((right < 0) | (ahead <= right))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~seen, -torch.inf)
    o = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).unflatten(0, (b, s)).to(torch.bfloat16).to(dtype)
    return out_transform(o, scores.logsumexp(-1).T.unflatten(0, (b, s))) if out_transform else o


def trained(forward=None, steps=3):
    """Losses of a debug model, its gradients, and how often tessera ran."""
    config, said = overridden(config_registry.llama3_debugmodel_varlen_attn())
    assert len(said) == len(config.model_spec.model.layers)
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states()
    for layer in model.layers.values():
        assert type(layer.attention.inner_attention) is door.Attention
        if forward:
            layer.attention.inner_attention.forward = forward
    masks = host.create_varlen_metadata_for_document(POSITIONS)
    tokens = torch.arange(2 * 65).view(2, 65) * 7 % 31
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with torch.profiler.profile() as profile:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1], positions=POSITIONS, attention_masks=masks)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    calls = sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::attention"))
    return torch.stack(losses), {name: x.grad for name, x in model.named_parameters()}, calls


def test_the_debug_model_trains_as_with_plain_attention():
    losses, grads, calls = trained()
    expected, expected_grads, none = trained(plain)
    assert calls == 3 * 2 * 6 and none == 0  # steps, passes, layers
    torch.testing.assert_close(losses, expected, atol=2e-3, rtol=0)
    assert losses[-1] < losses[0]
    for name, grad in grads.items():
        difference = (grad - expected_grads[name]).norm() / expected_grads[name].norm()
        assert difference < 2e-2, name


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (2, 1)])
@pytest.mark.parametrize("heads, dv", [((4, 4), 16), ((4, 2), 16), ((4, 4), 8)])
def test_windows_grouped_heads_and_heads_of_two_sizes(window, heads, dv):
    module = door.Attention.Config(window_size=window).build()
    masks = host.create_varlen_metadata_for_document(POSITIONS)
    q, k, v = normal(2, 64, heads[0], 16), normal(2, 64, heads[1], 16), normal(2, 64, heads[1], dv)
    for more in ({}, {"scale": 0.3}):
        o = module(q, k, v, attention_masks=masks, enable_gqa=heads[0] != heads[1], **more)
        torch.testing.assert_close(o, plain(q, k, v, attention_masks=masks, window_size=window, **more), **CLOSE)


def test_lse_for_sinks():
    module, masks = door.Attention.Config().build(), host.create_varlen_metadata_for_document(POSITIONS)
    q, k, v = (normal(2, 64, 4, 16, seed=i) for i in range(3))
    for x, want in zip(*(forward(q, k, v, attention_masks=masks, out_transform=lambda o, lse: (o, lse))
                         for forward in (module, plain))):
        torch.testing.assert_close(x, want, **CLOSE)


def test_tessera_stays_where_torchtitan_would_activate_another(monkeypatch):
    monkeypatch.setattr(utils, "get_cuda_flash_attention_impl", lambda: "FA3")  # as on Hopper
    config, _ = overridden(config_registry.llama3_debugmodel_varlen_attn())
    config.model_spec.model.build()
    assert current_flash_attention_impl() == "tessera"
    asked = []
    monkeypatch.setattr(host, "activate_flash_attention_impl", asked.append)
    model_registry("debugmodel", attn_backend="varlen").model.build()
    assert asked and set(asked) == {"FA3"}


def once(group=None):
    """(loss, gradients) of the debug model with three documents, or this rank's share of them."""
    config, _ = overridden(config_registry.llama3_debugmodel_varlen_attn())
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states()
    tokens = torch.arange(2 * 65).view(2, 65) * 7 % 31
    positions, tokens, labels = POSITIONS, tokens[:, :-1], tokens[:, 1:]
    masks = host.create_varlen_metadata_for_document(positions) if group is None else None
    if group is not None:
        style = door.ContextParallel()
        parallelize_module(model, DeviceMesh.from_group(group, "cpu"), {"layers.*.attention.inner_attention": style})
        positions, tokens, labels = style.shard(positions, tokens, labels)
    logits = model(tokens, positions=positions, attention_masks=masks)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def windowed(group=None):
    """(rows, o, lse) of a window and a scale, as gpt-oss calls it."""
    module = torch.nn.Sequential(door.Attention.Config(window_size=(3, 0)).build())
    given = POSITIONS, torch.arange(128).view(2, 64), *(normal(2, 64, heads, 16, seed=heads) for heads in (4, 2, 1))
    if group is not None:
        style = door.ContextParallel(exchange="keys")
        parallelize_module(module, DeviceMesh.from_group(group, "cpu"), {"0": style})
        given = style.shard(*given)
    positions, rows, q, k, v = given
    masks = host.create_varlen_metadata_for_document(positions) if group is None else None
    o, lse = module[0](q, k, v.expand_as(k), attention_masks=masks, scale=0.3, enable_gqa=True,
                       out_transform=lambda *found: found)
    return [x.flatten(0, 1) for x in (rows, o, lse)]


def on_rank(rank, group):
    found = once(group), windowed(group)
    restore_flash_attention_impl()
    return found


def test_context_parallelism_has_the_results_of_one_process(tmp_path):
    """torchtitan's model with its rotary embeddings, and a module with a window, on two processes over gloo."""
    pool = Pool(tmp_path)
    found = pool.run(on_rank, 2, 1)
    pool.close()
    loss, grads = once()
    torch.testing.assert_close(sum(part for (part, _), _ in found), loss, atol=0, rtol=1e-4)
    for name, grad in grads.items():
        difference = (sum(of[name] for (_, of), _ in found) - grad).norm() / grad.norm()
        assert difference < 1e-2, name
    wholes = windowed()
    for _, parts in found:
        for mine, whole in zip(parts, wholes, strict=True):
            torch.testing.assert_close(mine, whole[parts[0]], **CLOSE)
    assert sorted(torch.cat([rows for _, (rows, *_) in found]).tolist()) == list(range(128))


def test_context_parallelism_says_what_it_needs():
    style = door.ContextParallel()
    with pytest.raises(ValueError, match="shard: must follow parallelize_module"):
        style.shard(POSITIONS)
    with pytest.raises(ValueError, match="module=Linear: must be a VarlenAttention"):
        style._apply(torch.nn.Linear(1, 1), None)
    style._mesh = SimpleNamespace(size=lambda: 4)
    with pytest.raises(ValueError, match=r"positions.shape=\[1, 3\]: leaves a rank of 4 without tokens"):
        style.shard(torch.arange(3)[None])


def test_torchtitan_itself_refuses_varlen_beside_its_own_context_parallelism():
    config = config_registry.llama3_debugmodel_varlen_attn()
    config.parallelism.context_parallel_degree = 2
    with pytest.raises(NotImplementedError, match="Varlen attention is not supported with CP"):
        config.model_spec.model.update_from_config(config=config)


def test_other_backends_are_not_claimed():
    config, said = overridden(config_registry.llama3_debugmodel())  # FlexAttention
    assert said == []


def test_a_changed_interface_is_one_error():
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(host.VarlenAttention.Config):
        colour: str = "red"

    with pytest.raises(RuntimeError, match=f"has colour, which is not known here.*torchtitan {door.TESTED}"):
        door.attention(Config())
