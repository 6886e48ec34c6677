# SPDX-License-Identifier: Apache-2.0
"""tessera as the core attention of Megatron-Core, which itself runs, on a CPU and a process group of one, and of four
for context parallelism (`./dev test hosts` installs it). What Megatron takes from the current CUDA device is replaced:
its attention's buffer of scores, by one on the CPU, its generators, by PyTorch's, and its cut of rotary embeddings."""
import contextlib
import copy
import io
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import door_examples  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # noqa: E402
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.common.embeddings import rotary_pos_embedding  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import dot_product_attention as host  # noqa: E402
from megatron.core.transformer import utils  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

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


# ---- context parallelism: four processes over gloo ----

RANKS = 4
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p", None)
CU = torch.tensor([0, 13, 13, 53], dtype=torch.int32)
STORED = torch.tensor([0, 16, 16, 56], dtype=torch.int32)  # multiples of 2 * RANKS
PACKED = PackedSeqParams(qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, cu_seqlens_q_padded=STORED,
                         cu_seqlens_kv_padded=STORED, max_seqlen_q=40, max_seqlen_kv=40)
WINDOW = dict(window_size=(5, 0))
SINKS = torch.linspace(-1, 1, 4)
CASES = {"causal": ({}, None), "no_mask": ({}, None), "window": (WINDOW, None), "packed": ({}, PACKED),
         "packed window": (WINDOW, PACKED), "sinks": ({}, None), "logits": (dict(log_max_attention_logit=True), None)}


def rows_of(rank, x, packed=None):
    """This rank's rows of [s, ...], of packed sequences its two chunks of each, and what it holds of their padding."""
    parts = x.split(STORED.diff().tolist()) if packed else [x]
    halves = [part.chunk(2 * RANKS) for part in parts if len(part)]
    return torch.cat([chunks[i] for chunks in halves for i in (rank, 2 * RANKS - 1 - rank)])


def attended(case, rows=lambda x: x, **more):
    """(o, the largest logits, gradients of q, k, v and the sinks) of this rank's rows."""
    words, packed = CASES[case]
    core = door.LocalDotProductAttention(config(**words, **more), 1, AttnMaskType[case] if case == "no_mask" else
                                         AttnMaskType.causal, "self", cp_comm_type=more.get("cp_comm_type"))
    if case == "sinks":  # Megatron makes them on the current CUDA device
        core.config.softmax_type, core.softmax_offset = "learnable", torch.nn.Parameter(SINKS.clone())
    torch.manual_seed(0)
    shape = (56,) if packed else (32, 2)
    q, k, v = (torch.randn(*shape, h, 8) for h in (4, 2, 2))
    real = torch.ones(shape[0], 1)
    if packed:
        for start, end in zip(STORED[:-1] + CU.diff(), STORED[1:]):
            real[start:end] = 0
    q, k, v = (rows(x).requires_grad_() for x in (q, k, v))
    o = core(q, k, v, None, packed_seq_params=packed)
    o = torch.where(rows(real).bool().view(-1, *[1] * (o.dim() - 1)), o, 0)
    o.square().sum().backward()
    sinks = core.softmax_offset.grad if case == "sinks" else None
    return o.detach(), core.current_max_attn_logits, q.grad, k.grad, v.grad, sinks


def gpt(rows=lambda batch: batch, embedding="learned_absolute", **more):
    """(sum of losses, gradients) of the two-layer GPT, of this rank's tokens of 2 rows of 16."""
    with door.patch():
        spec = get_gpt_layer_local_spec()
    torch.manual_seed(0)
    model = GPTModel(config(num_query_groups=2, **more), spec, vocab_size=64, max_sequence_length=16,
                     position_embedding_type=embedding)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = rows(dict(tokens=ids, labels=ids.roll(-1, 1), position_ids=torch.arange(16).expand(2, 16)))
    with rotary_without_cuda():
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@contextlib.contextmanager
def rotary_without_cuda():
    """Megatron makes its table of rotary embeddings on the current CUDA device, and cuts it there by a pinned index."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
            patch.setattr(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank",
                          lambda table, _, group: rows_of(group.rank(), table))
        yield


def rank_main(rank, meet, place):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS, hierarchical_context_parallel_sizes=[2, 2])
    group, found = parallel_state.get_context_parallel_group(), {}
    for kind in KINDS:
        of_ranks = dict(context_parallel_size=RANKS, cp_comm_type=kind)
        for case, (_, packed) in CASES.items():
            found[kind, case] = attended(case, lambda x: rows_of(rank, x, packed), **of_ranks)
        for embedding in ("learned_absolute", "rope"):
            found[kind, embedding] = gpt(lambda batch: get_batch_on_this_cp_rank(batch, False, group), embedding,
                                         **of_ranks)
    found["dropout"] = dropped(lambda x: rows_of(rank, x), rank, context_parallel_size=RANKS)
    found["a group of a batch"] = of_a_batch(rank, group)
    found["a mask"] = {kind: masked(lambda x: rows_of(rank, x), context_parallel_size=RANKS, cp_comm_type=kind)
                       for kind in ("p2p", "all_gather")}
    with pytest.raises(ValueError, match="mask or bias with rows is not exchanged"):
        masked(lambda x: rows_of(rank, x), context_parallel_size=RANKS, cp_comm_type="a2a")
    Path(place, f"{rank}").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


def dropped(rows, rank, **more):
    """o with dropout, whose generator differs between ranks, and without after eval()."""
    core = door.LocalDotProductAttention(config(attention_dropout=0.5, **more), 1, AttnMaskType.causal, "self")
    torch.manual_seed(0)
    q, k, v = (rows(torch.randn(32, 1, 4, 8)) for _ in range(3))
    torch.manual_seed(7 + rank)
    return core(q, k, v, None), core.eval()(q, k, v, None)


def masked(rows, **more):
    """o with a mask of documents, which has this rank's queries and all keys."""
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool).triu(1)
    mask[1, :, 9:, :9] = True
    core = door.LocalDotProductAttention(config(**more), 1, AttnMaskType.causal, "self",
                                         cp_comm_type=more.get("cp_comm_type"))
    q, k, v = (rows(x.detach()) for x in qkv(32, 2))
    return core(q, k, v, rows(mask.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)).detach()


def of_a_batch(rank, group):
    """Packed sequences that name their group, and ones that say that they have none."""
    q, k, v = (x.detach() for x in qkv(56))
    core = made(context_parallel_size=RANKS)
    named, alone = copy.copy(PACKED), copy.copy(PACKED)
    named.cp_group, named.local_cp_size, alone.local_cp_size = group, RANKS, 1
    core.spread = None
    own = core(*(rows_of(rank, x, True) for x in (q, k, v)), None, packed_seq_params=named)
    whole = core(q, k, v, None, packed_seq_params=alone)
    return own, rows_of(rank, whole, True)


def test_context_parallelism(tmp_path):
    code = "import sys; sys.path[:0] = sys.argv[1:3]; import test_megatron as t; " \
        "t.rank_main(int(sys.argv[3]), *sys.argv[4:])"
    here = Path(__file__).parent
    ranks = [subprocess.Popen([sys.executable, "-c", code, here, here.parent, str(rank), tmp_path / "meet", tmp_path],
                              stderr=subprocess.PIPE, text=True) for rank in range(RANKS)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said[0][-3000:]
    found = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(RANKS)]
    close = dict(atol=1e-4, rtol=1e-4)
    embeddings = {"learned_absolute": gpt(), "rope": gpt(embedding="rope")}
    for kind in KINDS:
        for case, (_, packed) in CASES.items():
            o, logits, *whole, sinks = attended(case)
            for rank, (own, peak, *rest, _) in enumerate(of[kind, case] for of in found):
                for mine, x in zip((own, *rest), (o, *whole), strict=True):
                    torch.testing.assert_close(mine, rows_of(rank, x, packed), **close)
            if logits is not None:
                torch.testing.assert_close(torch.stack([of[kind, case][1] for of in found]).amax(0), logits, **CLOSE)
            if sinks is not None:
                torch.testing.assert_close(sum(of[kind, case][-1] for of in found), sinks, **close)
        for embedding, (loss, grads) in embeddings.items():
            parts = [of[kind, embedding] for of in found]
            torch.testing.assert_close(sum(part for part, _ in parts), loss, **close)
            for i, grad in enumerate(grads):
                torch.testing.assert_close(sum(of_rank[i] for _, of_rank in parts), grad, **close)
    for i, whole in enumerate(dropped(lambda x: x, 0)):
        for rank, of in enumerate(found):
            torch.testing.assert_close(of["dropout"][i], rows_of(rank, whole), **close)
    whole = masked(lambda x: x)
    for rank, of in enumerate(found):
        torch.testing.assert_close(*of["a group of a batch"], **close)
        for o in of["a mask"].values():
            torch.testing.assert_close(o, rows_of(rank, whole), **close)


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
    with pytest.raises(tessera.Refused, match="local_cp_size=2: needs a cp_group"):
        made()(*qkv(9), None, packed_seq_params=PackedSeqParams(qkv_format="thd", local_cp_size=2))
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
