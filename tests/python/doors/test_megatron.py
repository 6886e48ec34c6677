# SPDX-License-Identifier: Apache-2.0
"""tessera as the core attention of Megatron-Core, which itself runs, on a CPU and a process group of one
(`./dev test hosts` installs it). Two things of Megatron's own attention are replaced, which it takes from the current
CUDA device: its buffer of scores, by one on the CPU, and its generators, by PyTorch's."""
import contextlib
import copy
import io
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import door_examples  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # noqa: E402
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import dot_product_attention as host  # noqa: E402
from megatron.core.transformer import utils  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera.doors import megatron as door  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=1e-4)
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)  # True = hidden


@pytest.fixture(scope="module", autouse=True)
def parallel(tmp_path_factory):
    meet = tmp_path_factory.mktemp("meet") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    if torch.cuda.is_available():
        return
    buffer = types.SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(host.parallel_state, "get_global_memory_buffer", lambda: buffer)
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext, is_initialized=lambda: False)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(host, "is_layer_window_attention", lambda window, *_: False)  # its mask is made on CUDA


def config(**more):
    return TransformerConfig(**{**dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False), **more})


def trained(given, mask=CAUSAL, **more):
    """(loss, gradients, core attention) of a two-layer GPT."""
    with given:
        spec = get_gpt_layer_local_spec()
    torch.manual_seed(0)
    model = GPTModel(config(**more), spec, vocab_size=64, max_sequence_length=16)
    loss = model(IDS, torch.arange(12).expand(2, 12), mask, labels=IDS).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], model.decoder.layers[1].self_attention.core_attention


def documents():
    """A causal mask of two documents in the second row."""
    mask = CAUSAL.repeat(2, 1, 1, 1)
    mask[1, :, 7:, :7] = True
    return mask


@pytest.mark.parametrize("mask", [CAUSAL, documents()], ids=["causal", "documents"])
@pytest.mark.parametrize("more", [{}, dict(num_query_groups=2), dict(
    apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)], ids=str)
def test_a_gpt_has_the_loss_and_gradients_of_megatrons(mask, more):
    loss, grads, core = trained(contextlib.nullcontext(), mask, **more)
    assert type(core) is host.DotProductAttention
    ours, our_grads, core = trained(door.patch(), mask, **more)
    assert type(core) is door.LocalDotProductAttention
    torch.testing.assert_close(ours, loss, **CLOSE)
    for a, b in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert type(trained(contextlib.nullcontext())[2]) is host.DotProductAttention


def test_the_example():
    text = door_examples.printed_alone("megatron_gpt")
    theirs, ours, again = door_examples.losses(text)
    near = pytest.approx(ours, abs=1e-3)
    assert theirs == near and again == near and ours[-1] < ours[0]
    assert door_examples.calls(text) == [0, 2 * 2 * len(ours), 0]  # layers, passes


def test_without_a_mask_it_is_causal():
    ours, *_ = trained(door.patch(), None)
    torch.testing.assert_close(ours, trained(door.patch())[0], **CLOSE)


def made(kind=AttnMaskType.causal, cls=door.LocalDotProductAttention, **more):
    return cls(config(**more), 1, kind, "self")


def qkv(*lead, h=4, d=8):
    torch.manual_seed(0)
    return [torch.randn(*lead, h, d, requires_grad=True) for _ in range(3)]


def test_packed_sequences():
    q, k, v = qkv(12)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7)
    o = made()(q, k, v, None, packed_seq_params=packed)
    parts = [tt.attention(*(x[None] for x in part), causal=True, softmax_scale=8 ** -0.5)[0].flatten(-2)
             for part in zip(*(x.split([5, 7]) for x in (q, k, v)))]
    torch.testing.assert_close(o, torch.cat(parts), **CLOSE)
    starts = torch.tensor([0, 6, 13], dtype=torch.int32)
    gaps = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=starts,
                           cu_seqlens_kv_padded=starts, max_seqlen_q=7, max_seqlen_kv=7)
    wide = [torch.cat([x[:5], x[:1], x[5:]]) for x in (q, k, v)]
    ours = made()(*wide, None, packed_seq_params=gaps)
    torch.testing.assert_close(torch.cat([ours[:5], ours[6:]]), o, **CLOSE)


@pytest.mark.parametrize("given, keywords", [
    (dict(attention_bias=torch.linspace(-1, 1, 4 * 81).reshape(1, 4, 9, 9)),
     dict(bias=torch.linspace(-1, 1, 4 * 81).reshape(1, 4, 9, 9), causal=True)),
    (dict(attn_mask_type=AttnMaskType.no_mask), {}),
    (dict(attn_mask_type=AttnMaskType.causal_bottom_right), dict(causal=True)),
    (dict(attn_mask_type=AttnMaskType.padding, attention_mask=torch.arange(18).reshape(2, 1, 1, 9) % 4 == 0),
     dict(drop=torch.arange(18).reshape(2, 1, 1, 9) % 4 == 0)),
], ids=lambda x: ",".join(x))
def test_words_of_a_call(given, keywords):
    q, k, v = qkv(9, 2)
    o = made()(q, k, v, **{"attention_mask": None, **given})
    theirs = tt.attention(q, k, v, layout="sbhd", softmax_scale=8 ** -0.5, **keywords)
    torch.testing.assert_close(o, theirs.flatten(-2), **CLOSE)


def test_windows_are_megatrons_mask(monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **words: ones(*shape, **{**words, "device": "cpu"}))
    q, k, v = qkv(9, 2)
    ours = made(window_size=(3, 0))(q, k, v, None)
    mask = utils.get_sliding_window_causal_mask(9, 9, (3, 0))
    torch.testing.assert_close(ours, made(AttnMaskType.no_mask)(q, k, v, mask), **CLOSE)


def test_heads_of_two_sizes():
    """As latent attention makes them, to which Megatron's own module does not have the arguments."""
    core = door.LocalDotProductAttention(config(), 1, AttnMaskType.causal, "self", k_channels=24, v_channels=16)
    q, k, v = (qkv(9, 2, d=d)[0] for d in (24, 24, 16))
    theirs = tt.attention(q, k, v, layout="sbhd", causal=True, softmax_scale=24 ** -0.5)
    torch.testing.assert_close(core(q, k, v, None), theirs.flatten(-2), **CLOSE)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks(kind):
    """Megatron makes the offset on the current CUDA device; here it is given."""
    core = made()
    core.config.softmax_type, core.softmax_offset = kind, torch.nn.Parameter(torch.linspace(-1, 1, 4))
    q, k, v = qkv(9, 2)
    o = core(q, k, v, None)
    theirs = tt.attention(q, k, v, layout="sbhd", causal=True, softmax_scale=8 ** -0.5,
                          sink=core.softmax_offset if kind == "learnable" else "off_by_one")
    torch.testing.assert_close(o, theirs.flatten(-2), **CLOSE)


def test_calls_share_what_is_the_same_and_nothing_else():
    core = made()
    q, k, v = qkv(9, 2)
    plain = tt.attention(q, k, v, layout="sbhd", softmax_scale=8 ** -0.5).flatten(-2)
    for _ in range(2):
        causal = core(q, k, v, None)
        torch.testing.assert_close(core(q, k, v, None, attn_mask_type=AttnMaskType.no_mask), plain, **CLOSE)
        torch.testing.assert_close(core(q[-1:], k, v, None), plain[-1:], **CLOSE)  # one query beside a cache
    assert torch.equal(causal, core(q, k, v, None)) and not torch.allclose(causal, plain)
    hidden = CAUSAL[..., :9, :9].clone()
    hidden[..., 1:, 0] = True
    assert not torch.allclose(core(q, k, v, hidden), causal)


@pytest.mark.parametrize("change", [
    lambda core: setattr(core, "softmax_scale", 1.0), lambda core: setattr(core, "window", (2, 0)),
    lambda core: setattr(core.config, "deterministic_mode", True)], ids=["softmax_scale", "window", "deterministic"])
def test_a_module_that_changes_after_a_call_is_translated_again(change, monkeypatch):
    seen = []
    monkeypatch.setattr(door._functions, "attention",
                        lambda *qkv, **keywords: seen.append(keywords) or tt.attention(*qkv, **keywords))
    core, new = made(), made()
    core(*qkv(9, 2), None)
    change(core)
    change(new)
    inputs = qkv(9, 2)
    assert torch.equal(core(*inputs, None), new(*inputs, None))
    assert len(seen) == 3 and seen[0] != seen[1] == seen[2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: stored(module)], ids=["copied", "stored"])
def test_a_module_that_has_run_is_copied_and_stored(copied):
    module = made()
    module.pg_collection = module.tp_group = None  # process groups themselves are never copied
    inputs = qkv(9, 2)
    theirs = module(*inputs, None)
    other = copied(module)
    assert module._plans and not other._plans
    assert torch.equal(other(*inputs, None), theirs) and other._plans.keys() == module._plans.keys()


def stored(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_masks_of_the_two_hosts():
    q, k, v = qkv(12, 2)
    mask = documents()
    te, local = (made(cls=cls)(q, k, v, mask) for cls in (door.TEDotProductAttention, door.LocalDotProductAttention))
    torch.testing.assert_close(te, made()(q, k, v, None), **CLOSE)
    assert not torch.allclose(te, local)


def test_the_largest_logits():
    core = made(log_max_attention_logit=True)
    q, k, v = qkv(9, 2)
    core(q, k, v, None)
    scores = (torch.einsum("qbhd,kbhd->bhqk", q, k) / 8 ** 0.5).masked_fill(CAUSAL[..., :9, :9], -torch.inf)
    torch.testing.assert_close(core.current_max_attn_logits, scores.amax((0, 2, 3)).detach(), **CLOSE)
    core(q * 2, k, v, None)
    torch.testing.assert_close(core.current_max_attn_logits, scores.amax((0, 2, 3)).detach() * 2, **CLOSE)


def test_dropout_is_drawn_and_seeded():
    core = made(attention_dropout=0.5)
    inputs = qkv(9, 2)

    def drawn(seed):
        torch.manual_seed(seed)
        return core(*inputs, None)

    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))
    core.eval()
    torch.testing.assert_close(core(*inputs, None), made()(*inputs, None), **CLOSE)


def test_undone():
    before = LocalSpecProvider.core_attention, TESpecProvider.core_attention
    handle = door.patch()
    assert LocalSpecProvider().core_attention() is door.LocalDotProductAttention
    assert TESpecProvider().core_attention() is door.TEDotProductAttention
    handle.remove()
    handle.remove()
    assert (LocalSpecProvider.core_attention, TESpecProvider.core_attention) == before
    assert LocalSpecProvider().core_attention() is host.DotProductAttention


def test_what_is_refused_says_so():
    parts = types.SimpleNamespace(size=lambda: 2)
    packed = PackedSeqParams(qkv_format="thd", cp_group=parts)
    with pytest.raises(tessera.Refused, match="context_parallel_size=2.*NVTE_PLUGIN"):
        made(context_parallel_size=2)
    with pytest.raises(tessera.Refused, match="packed_seq_params.cp_group"):
        made()(*qkv(9), None, packed_seq_params=packed)
    with pytest.raises(tessera.Refused, match="as many keys as queries"):
        q, k, v = qkv(9, 2)
        made()(q[:4], k, v, None)
    with pytest.raises(tessera.Refused, match="attention_mask=tuple"):
        made(AttnMaskType.padding)(*qkv(9, 2), (CAUSAL, CAUSAL))


def test_a_changed_interface_is_one_error(monkeypatch):
    monkeypatch.setattr(host.DotProductAttention, "forward", lambda self, query, mystery: None)
    before = LocalSpecProvider.core_attention
    with pytest.raises(RuntimeError, match=f"forward takes mystery.*{door.TESTED}"):
        door.patch()
    assert LocalSpecProvider.core_attention is before
