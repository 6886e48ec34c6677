# SPDX-License-Identifier: Apache-2.0
"""What attention_forward remembers of a call is keyed by all that the call depends on."""
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import tessera  # noqa: E402
import tessera.hf  # noqa: E402
from tessera.hf import _plans, attention_forward, attention_mask  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(_plans, "known", {})


class Layer(torch.nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def qkv(s=6, sk=None, b=1, h=4, hk=2, d=16, dtype=torch.float32):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(b, heads, n, d, generator=made, device="cpu").to(torch.get_default_device(), dtype)
            for heads, n in ((h, s), (hk, sk or s), (hk, sk or s))]


def padding(*real, s=6):
    return torch.arange(s)[None] < torch.tensor(real)[:, None]


def lengths(*starts):
    return torch.tensor(starts, dtype=torch.int32)


CU, OTHER = lengths(0, 2, 6), lengths(0, 2, 6)
SINK, BIAS = torch.tensor([0.1, 0.9, -0.5, 2.0]), torch.linspace(-1, 1, 36).reshape(1, 1, 6, 6)
CALLS = {
    "causal": {},
    "a module that sees both ways": dict(module=Layer(False)),
    "is_causal": dict(is_causal=False),
    "a window": dict(sliding_window=2),
    "another": dict(sliding_window=3),
    "a window on both sides": dict(sliding_window=2, is_causal=False),
    "scaling": dict(scaling=0.7),
    "an integer": dict(scaling=1),
    "softcap": dict(softcap=0.5),
    "no softcap": dict(softcap=0.0),
    "a sink": dict(s_aux=SINK),
    "another sink": dict(s_aux=SINK + 1),
    "a sink of 16 bits": dict(s_aux=SINK.bfloat16()),
    "one query": dict(inputs=qkv(1)),
    "one query beside a cache": dict(inputs=qkv(1, 6)),
    "two sequences": dict(inputs=qkv(b=2)),
    "16 bits": dict(inputs=qkv(dtype=torch.bfloat16)),
    "a causal mask": dict(mask=attention_mask(1, 6, 6), module=Layer(False)),
    "key ranges": dict(mask=attention_mask(1, 6, 6, attention_mask=padding(4))),
    "other ranges": dict(mask=attention_mask(1, 6, 6, attention_mask=padding(2))),
    "ranges and a sink": dict(mask=attention_mask(1, 6, 6, attention_mask=padding(4)), s_aux=SINK),
    "a user's mask": dict(mask=BIAS > 0),
    "a user's longer mask": dict(mask=torch.nn.functional.pad(BIAS > 0, (0, 3))),
    "a user's bias": dict(mask=BIAS),
    "position_bias": dict(position_bias=BIAS),
    "packed": dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU),
    "packed otherwise": dict(cu_seq_lens_q=lengths(0, 5, 6), cu_seq_lens_k=lengths(0, 5, 6)),
    "packed, both sides apart": dict(cu_seq_lens_q=CU, cu_seq_lens_k=OTHER),
    "packed, with lengths": dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=4, max_length_k=4),
    "packed, with longer ones": dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=5, max_length_k=6),
    "packed, with one length": dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_k=4),
    "packed, a window": dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, sliding_window=2),
    "packed, a mask": dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, mask=attention_mask(1, 6, 6, attention_mask=padding(5))),
    "positions of two sequences": dict(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]])),
    "positions of others": dict(position_ids=torch.tensor([[0, 1, 2, 3, 4, 0]])),
    "positions and a window": dict(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]), sliding_window=2),
    "seq_idx": dict(seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1]])),
}
TRANSLATED = {"position_bias", "seq_idx", "a user's bias", "a user's longer mask", "packed, a mask"}


def run(module=None, inputs=None, mask=None, **keywords):
    query, key, value = inputs or qkv()
    return attention_forward(module or Layer(), query, key, value, mask, **{"scaling": 0.3, **keywords})[0]


def test_each_word_tells_calls_apart(monkeypatch):
    first = {}
    for name, call in CALLS.items():
        _plans.known.clear()
        first[name] = run(**call)
    for call in CALLS.values():
        run(**call)
    results = [o for name, o in first.items() if o.shape == first["causal"].shape and o.dtype == torch.float32]
    assert len({tuple(o.flatten().tolist()) for o in results}) >= 20  # some say the same in other words

    def translated(*_, **__):
        raise AssertionError("was translated again")
    for name, call in CALLS.items():
        if name not in TRANSLATED:
            with monkeypatch.context() as patch:
                patch.setattr(tessera.hf, "attention", translated)
                assert torch.equal(run(**call), first[name]), name
        else:
            assert torch.equal(run(**call), first[name]), name


def test_deterministic_algorithms_are_a_word():
    before, calls = torch.are_deterministic_algorithms_enabled(), []
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            run()
        finally:
            torch.use_deterministic_algorithms(before)
        calls.append(len(_plans.known))
    assert calls == [1, 2]


@pytest.mark.parametrize("call", ["causal", "a sink", "key ranges", "packed"])
def test_gradients(call):
    both = []
    for _ in range(2):
        inputs = [x.requires_grad_() for x in qkv()]
        o = run(inputs=inputs, **CALLS[call])
        both.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_of_a_first_call(call):
    """The call is translated in the forward pass, and known when it is computed again."""
    both = []
    for checkpointed in (True, False):
        inputs = [x.clone().requires_grad_() for x in CALLS[call].get("inputs") or qkv()]
        arguments = {**CALLS[call], "inputs": inputs}
        o = checkpoint(run, use_reentrant=False, **arguments) if checkpointed else run(**arguments)
        both.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 2])
def test_positions_stand_for_a_dropped_mask(window):
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [4, 5, 6, 7, 0, 0]])  # the second continues, and ends in padding
    told = dict(inputs=qkv(b=2), sliding_window=window)
    apart = run(seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2]]), **told)
    torch.testing.assert_close(run(position_ids=positions, **told), apart)
    whole = run(**told)
    for call in (dict(position_ids=torch.arange(3, 9)[None]), dict(position_ids=positions[:, :3]),
                 dict(position_ids=positions[None]), dict(position_ids=positions, mask=attention_mask(2, 6, 6),
                                                          sliding_window=None)):
        expected = run(mask=call["mask"], inputs=qkv(b=2)) if "mask" in call else whole
        torch.testing.assert_close(run(**{**told, **call}), expected)
    both = dict(told, module=Layer(False))
    assert torch.equal(run(position_ids=positions, **both), run(**both))


@pytest.mark.parametrize("kinds, window, said", [
    (("chunked_attention", "full_attention"), None, "chunked_attention"),
    (("sliding_attention", "full_attention"), None, "sliding_attention"), (None, 2, "sliding_window")])
def test_a_pattern_that_was_in_a_dropped_mask_is_refused(kinds, window, said):
    layer = Layer()
    layer.layer_idx, layer.config = 0, types.SimpleNamespace(layer_types=kinds, sliding_window=window)
    told = dict(module=layer, position_ids=torch.arange(6)[None])
    with pytest.raises(tessera.Refused, match=f"Layer: attention_mask=None: the {said} of this layer"):
        run(**told)
    if "chunked" not in said:
        assert torch.equal(run(sliding_window=2, **told), run(**{**told, "module": None}, sliding_window=2))
    layer.layer_idx = 1
    if kinds:
        run(**told)
    layer.layer_idx, layer.config._attn_implementation = 0, "org/repo"  # whose short windows are the diagonal alone
    assert torch.equal(run(**told), run(**{**told, "module": None, "position_ids": None}))


def test_the_gradient_of_a_sink():
    both = []
    for _ in range(2):
        sink = SINK.clone().requires_grad_()
        both.append(torch.autograd.grad(run(s_aux=sink).square().sum(), sink)[0])
    assert torch.equal(*both)


def test_results_are_rows_of_tokens():
    for _ in range(2):
        assert run(inputs=qkv(b=2)).is_contiguous()  # whose heads models flatten by a view


def test_autocast_casts_what_is_known():
    run()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert run().dtype == torch.bfloat16


def test_dropout_is_drawn_anew():
    a, b = run(dropout=0.5), run(dropout=0.5)
    assert not torch.equal(a, b) and not _plans.known


def test_permuted_projections_are_copied():
    expected = run()
    permuted = [x.mT.contiguous().mT for x in qkv()]
    assert torch.equal(run(inputs=permuted), expected)  # the operator refuses them, which is no error
    _plans.known.clear()
    assert torch.equal(run(inputs=permuted), expected)
    assert not _plans.known


@pytest.mark.parametrize("call, pattern", [
    (dict(inputs=[*qkv()[:2], qkv(sk=5)[2]]), "v"),
    (dict(inputs=[qkv()[0], *qkv(hk=3)[1:]]), "hk|heads"),
    (dict(s_aux=SINK[:3]), "sink"),
    (dict(scaling=True), "softmax_scale"),
    (dict(cu_seq_lens_q=CU, cu_seq_lens_k=None), "cu_seq_lens_k"),
    (dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=-1, max_length_k=-1), "max_seqlen"),
    (dict(mystery=1), "mystery"),
])
def test_errors_are_those_of_a_first_call(call, pattern):
    said = []
    for known in ({}, CALLS["a sink"], CALLS["packed, with lengths"], dict(scaling=1)):
        if known:
            run(**known)
            run()
        else:
            _plans.known.clear()
        with pytest.raises((ValueError, RuntimeError), match=pattern) as raised:
            run(**call)
        said.append(str(raised.value))
    assert len(set(said)) == 1


def test_a_scale_in_a_tensor_is_read_each_time():
    scale = torch.tensor(0.3)
    assert torch.equal(run(scaling=scale), run()) and len(_plans.known) == 1
    scale.fill_(0.7)
    assert torch.equal(run(scaling=scale), run(scaling=float(scale)))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(_plans, "_MAX_KEPT", 3)
    for scale in range(1, 9):
        run(scaling=scale / 8)
    assert len(_plans.known) <= 3


def test_lengths_are_no_words():
    for longest in range(4, 9):
        run(cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=longest, max_length_k=longest)
    assert len(_plans.known) == 1
