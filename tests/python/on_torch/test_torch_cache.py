# SPDX-License-Identifier: Apache-2.0
"""rotate, rope_table and append_kv on PyTorch tensors: NumPy's bits, gradients, tables of transformers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from caches import problem  # noqa: E402


def tables(max_pos, r, **keywords):
    return tuple(map(torch.from_numpy, tessera.rope_table(max_pos, r, **keywords)))


@pytest.mark.parametrize("layout, positions", [("bshd", [3, 40]), ("sbhd", [[0, 1, 5, 63, 2]] * 2),
                                               ("bhsd", None), ("thd", [0, 1, 0, 1, 2])])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_is_numpys(layout, positions, interleaved):
    shape = {"bshd": (2, 5, 3, 20), "sbhd": (5, 2, 3, 20), "bhsd": (2, 3, 5, 20), "thd": (5, 3, 20)}
    x = np.random.default_rng(0).standard_normal(shape[layout]).astype(np.float32)
    table = tessera.rope_table(64, 16)
    at = None if positions is None else np.array(positions)
    expected = tessera.rotate(x, *table, at, layout=layout, interleaved=interleaved)
    given = [torch.from_numpy(a) for a in (x, *table)] + [None if at is None else torch.from_numpy(at)]
    y = tt.rotate(*given, layout=layout, interleaved=interleaved)
    np.testing.assert_array_equal(y.numpy(), expected)
    assert tt.rotate(*given, layout=layout, interleaved=interleaved, out=given[0]) is given[0]
    np.testing.assert_array_equal(given[0].numpy(), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient(interleaved):
    cos, sin = tables(32, 6)
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([0, 20])
    assert torch.autograd.gradcheck(
        lambda x: tt.rotate(x, cos, sin, positions, interleaved=interleaved), x)
    assert torch.autograd.gradgradcheck(
        lambda x: tt.rotate(x, cos, sin, positions, interleaved=interleaved), x)


def test_compiles_without_breaks():
    cos, sin = tables(32, 16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, k_cache, v_cache, lengths):
        q = tt.append_kv(k, v, k_cache, v_cache, lengths, q=q, rope=(cos, sin))
        return tt.attention(tt.rotate(q, cos, sin, lengths), k_cache, v_cache, seqlens_k=lengths + 1)

    q, k, v = torch.randn(3, 2, 1, 2, 16)
    lengths = torch.tensor([0, 5])
    caches = torch.zeros(2, 2, 8, 2, 16), torch.zeros(2, 2, 8, 2, 16)
    results = [run(q, k, v, *cache, lengths) for run, cache in
               ((step, caches[0]), (step._torchdynamo_orig_callable, caches[1]))]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0)


def test_opcheck():
    cos, sin = tables(32, 16)
    x = torch.randn(2, 4, 3, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.tessera.rotate.default, (x, cos, sin, None, "bshd", False, False))
    given = {name: torch.from_numpy(value) for name, value in problem().items()}
    torch.library.opcheck(
        torch.ops.tessera.append_kv.default,
        (given["k"], given["v"], torch.zeros(3, 40, 2, 16), torch.zeros(3, 40, 2, 8),
         given["seqlens_k"], "bshd", None, None, None, None, None, None, False, None, None))


@pytest.mark.parametrize("page", [None, 16])
def test_append_is_numpys(page):
    theirs = problem(page=page)
    ours = {name: torch.from_numpy(value.copy()) for name, value in theirs.items()}
    q = np.random.default_rng(1).standard_normal((3, 4, 4, 16)).astype(np.float32)
    table = tessera.rope_table(64, 16)
    expected = tessera.append_kv(**theirs, q=q, rope=table)
    got = tt.append_kv(**ours, q=torch.from_numpy(q), rope=tuple(map(torch.from_numpy, table)))
    np.testing.assert_array_equal(got.numpy(), expected)
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(ours[name].numpy(), theirs[name])


def test_refusals_and_errors():
    cos, sin = tables(8, 8)
    x = torch.randn(1, 4, 1, 8, requires_grad=True)
    with pytest.raises(tessera.Refused, match="tessera.rotate: out=Tensor"):
        tt.rotate(x, cos, sin, out=torch.empty(1, 4, 1, 8))
    with pytest.raises(ValueError, match="tessera.rotate: positions: row 3 of sequence 0 is at 8"):
        tt.rotate(x, cos, sin, torch.tensor([5]))
    with pytest.raises(ValueError, match="tessera.rotate: cos=None"):
        tt.rotate(x, None, sin)
    cache = torch.zeros(1, 4, 1, 8)
    with pytest.raises(tessera.Refused, match="tessera.append_kv: requires_grad=True"):
        tt.append_kv(x, None, cache, None, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"tessera.append_kv: seqlens_k\[0\]=1"):
        tt.append_kv(x.detach(), None, cache, None, torch.tensor([1]))
    assert not cache.any()


# ---- transformers ----

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, mscale": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                     "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, no truncation": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0 + i / 16 for i in range(16)], "factor": 4.0,
                 "long_factor": [2.0 + i / 8 for i in range(16)],
                 "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [50, 256])
def test_tables_are_those_of_transformers(name, length):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    kind = name.partition(",")[0]
    scaling = {"rope_type": kind, **SCALINGS[name]}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32,
        max_position_embeddings=64 if kind == "dynamic" else 256,
        rope_parameters={**{key: value for key, value in scaling.items()
                            if key != "max_position_embeddings"}, "rope_theta": 10000.0})
    if kind == "default":
        frequency, factor = 10000.0 ** -(torch.arange(0, 32, 2).float() / 32), 1.0
    else:
        frequency, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    angles = torch.arange(length).float()[:, None] * frequency
    cos, sin = tables(length, 32, scaling=None if kind == "default" else scaling)
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=3e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=3e-5)


def test_rotation_is_that_of_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cos, sin = tables(16, 32)
    q, k = torch.randn(2, 1, 4, 16, 32)
    both = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    expected = llama.apply_rotary_pos_emb(q, k, *both)
    for x, y in zip((q, k), expected):
        torch.testing.assert_close(tt.rotate(x, cos, sin, layout="bhsd"), y, rtol=1e-6, atol=1e-6)
