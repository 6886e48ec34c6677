# SPDX-License-Identifier: Apache-2.0
"""tessera among diffusers' attention backends; diffusers itself runs, on a CPU (`./dev test hosts` installs it)."""
import pickle
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import numpy as np  # noqa: E402
from diffusers.models import attention_dispatch as host  # noqa: E402
from diffusers.models._modeling_parallel import ParallelConfig  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import tessera  # noqa: E402
from tessera.doors import diffusers_backend  # noqa: E402

dispatch = host.dispatch_attention_fn
CLOSE = dict(atol=2e-5, rtol=1e-5)


@contextmanager
def registered():
    handle = diffusers_backend.register()
    try:
        yield handle
    finally:
        handle.remove()


@pytest.fixture
def calls(monkeypatch):
    seen = []
    attend = diffusers_backend._functions.attention
    monkeypatch.setattr(diffusers_backend._functions, "attention",
                        lambda *tensors, **keywords: seen.append(keywords) or attend(*tensors, **keywords))
    return seen


def qkv(b=2, sq=9, sk=9, h=4, hk=4, d=16):
    torch.manual_seed(0)
    return [torch.randn(b, s, heads, d, requires_grad=True) for s, heads in ((sq, h), (sk, hk), (sk, hk))]


def with_gradients(inputs, **keywords):
    o = dispatch(*inputs, **keywords)
    return o, *torch.autograd.grad(o.square().sum(), inputs)


@pytest.mark.parametrize("sizes, keywords", [
    ({}, {}),
    (dict(sq=5, sk=11), dict(scale=0.5)),
    ({}, dict(is_causal=True)),
    ({}, dict(scale=-0.3)),
    (dict(hk=2), dict(enable_gqa=True)),
    pytest.param({}, dict(attn_mask=torch.arange(18).reshape(2, 9) % 4 > 0), id="keys"),
    pytest.param({}, dict(attn_mask=torch.arange(81).reshape(9, 9) % 3 > 0), id="mask"),
    pytest.param({}, dict(attn_mask=torch.linspace(-1, 1, 162).reshape(2, 1, 9, 9)), id="bias"),
])
def test_as_the_native_backend(calls, sizes, keywords):
    inputs = qkv(**sizes)
    theirs = with_gradients(inputs, **keywords, backend="native")
    with registered():
        ours = with_gradients(inputs, **keywords, backend="tessera")
    assert len(calls) == 1
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("mask", [None, torch.arange(18).reshape(2, 9) % 4 > 0], ids=["plain", "keys"])
def test_lse(mask):
    q, k, v = qkv()
    with registered():
        o, lse = dispatch(q, k, v, mask, backend="tessera", attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / 4
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), **CLOSE)
    torch.testing.assert_close(o, dispatch(q, k, v, mask, backend="native"), **CLOSE)


def pipeline():
    """Flux in small, with weights of a seed."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8))
    vae = diffusers.AutoencoderKL(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(4,), layers_per_block=1, latent_channels=1,
        norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=0.35)
    made = diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, transformer)
    made.set_progress_bar_config(disable=True)
    return made


def image(made):
    generator = torch.Generator().manual_seed(1)
    return made(prompt_embeds=torch.randn(1, 6, 32, generator=generator), output_type="np", height=8, width=8,
                pooled_prompt_embeds=torch.randn(1, 32, generator=generator), num_inference_steps=3,
                generator=generator).images[0]


def test_a_pipelines_images_are_equal(calls):
    made = pipeline()
    theirs = image(made)
    assert not calls
    with registered():
        made.transformer.set_attention_backend("tessera")
        ours = image(made)
        assert len(calls) == 2 * 3  # blocks, steps
        made.transformer.reset_attention_backend()
    again = image(made)
    assert len(calls) == 6 and np.array_equal(again, theirs)
    assert theirs.std() > 0.01
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(np.rint(ours * 255) - np.rint(theirs * 255)).max() <= 1  # a tie may round otherwise


def test_the_example(capsys):
    import door_examples  # not above: the processes that import this file do not find it

    text = door_examples.printed("diffusers_flux", capsys)
    ours, again = door_examples.differences(text)
    assert ours < 1e-4 and again == 0
    assert door_examples.calls(text) == [0, 2 * 3, 0]  # blocks, steps


def test_compiled():
    inputs = qkv()
    with registered(), host.attention_backend("tessera"):
        eager = dispatch(*inputs)
        compiled = torch.compile(lambda q, k, v: dispatch(q, k, v), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager, **CLOSE)


def test_undone():
    registry = host._AttentionBackendRegistry

    def state():
        return (list(host.AttentionBackendName), registry._active_backend, registry.list_backends(),
                len(registry._constraints), len(registry._supported_arg_names),
                set(registry._supports_context_parallel))

    before = state()
    with registered() as handle:
        assert handle.member is host.AttentionBackendName("tessera") is host.AttentionBackendName.TESSERA
        assert handle.member == "tessera" and handle.member in registry.list_backends()
        registry.set_active_backend(handle.member)
        with pytest.raises(ValueError, match="TESSERA: is there already"):
            diffusers_backend.register()
    assert state() == before and not hasattr(host.AttentionBackendName, "TESSERA")
    handle.remove()
    with pytest.raises(ValueError, match="tessera"):
        dispatch(*qkv(), backend="tessera")


def test_a_changed_interface_is_one_error(monkeypatch):
    monkeypatch.setattr(host, "dispatch_attention_fn", lambda query, key, value, sinks: None)
    with pytest.raises(RuntimeError, match=f"sinks.*{diffusers_backend.TESTED}"):
        diffusers_backend.register()


def test_what_has_no_lse_says_so():
    with registered(), pytest.raises(tessera.Refused, match="dropout_p: has no lse"):
        dispatch(*qkv(), dropout_p=0.1, backend="tessera", attention_kwargs={"return_lse": True})


# ---- context parallelism, two processes over gloo ----

def rank_main(rank, port, place):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    diffusers_backend.register()
    results = {}
    for kind in ("ring", "ulysses"):
        sizes = {f"{kind}_degree": 2}
        part = diffusers.ContextParallelConfig(**sizes)
        mesh = init_device_mesh("cpu", part.mesh_shape, mesh_dim_names=part.mesh_dim_names)
        part.setup(rank, 2, torch.device("cpu"), mesh)
        config = ParallelConfig(context_parallel_config=part)
        inputs = [x.detach().chunk(2, 1)[rank].clone().requires_grad_() for x in qkv(sq=10, sk=10)]
        results[kind] = [x.detach() for x in with_gradients(inputs, backend="tessera", parallel_config=config)]
        refused = dict(dropout_p=0.5) if kind == "ulysses" else dict(attn_mask=torch.ones(5, 5, dtype=torch.bool))
        try:
            dispatch(*inputs, backend="tessera", parallel_config=config, **refused)
        except tessera.Refused as error:
            results[f"{kind} refused"] = str(error)
    Path(place, f"{rank}").write_bytes(pickle.dumps(results))
    torch.distributed.destroy_process_group()


def test_ring_and_ulysses(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_diffusers as t; " \
        "t.rank_main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
    here = str(Path(__file__).parent)
    ranks = [subprocess.Popen([sys.executable, "-c", code, here, str(rank), str(port), str(tmp_path)])
             for rank in range(2)]
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    parts = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)]
    theirs = with_gradients(qkv(sq=10, sk=10), backend="native")
    for kind in ("ring", "ulysses"):
        for mine, x in zip(zip(*(part[kind] for part in parts)), theirs, strict=True):
            torch.testing.assert_close(torch.cat(mine, 1), x.detach(), **CLOSE)
    assert "dropout_p: is not built under context parallelism" in parts[0]["ulysses refused"]
    assert "attn_mask beside ring_degree > 1" in parts[1]["ring refused"]
