# SPDX-License-Identifier: Apache-2.0
"""transformers models whose sequences lie on two processes over gloo, against one: logits, loss and
gradients, with windows, caps, sinks, packed documents and checkpointing."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from transformers import masking_utils  # noqa: E402

import tessera.hf  # noqa: E402
from cp_pool import Pool  # noqa: E402
from cp_ranks import DEVICE  # noqa: E402
from test_torch_hf import MODELS  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


def build(name):
    torch.manual_seed(0)
    config = MODELS[name]()
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera")


def compare(rank, group, name, batch, checkpointing):
    model = build(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    want = model(**batch)
    want.loss.backward()
    wants = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parallel = tessera.hf.context_parallel(model, group)
    found = model(**batch)
    found.loss.backward()
    loss = found.loss.detach().clone()
    dist.all_reduce(loss, group=group)
    torch.testing.assert_close(loss, want.loss)
    for key, p in model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            torch.testing.assert_close(p.grad, wants[key], rtol=1e-3, atol=1e-5, msg=key)
    torch.testing.assert_close(found.logits, parallel.spread().shard(want.logits), rtol=1e-4,
                               atol=1e-5)
    parallel.remove()
    torch.testing.assert_close(model(**batch).loss, want.loss)


def tokens(rows, length, seed=1):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(3, 97, (rows, length), generator=generator)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_models(pool, name, checkpointing):
    ids = tokens(2, 37)
    labels = ids.clone()
    labels[0, :10] = -100
    pool.run(compare, 2, 1, name, dict(input_ids=ids, labels=labels), checkpointing)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_documents(pool, name):
    lengths = [30, 11, 25, 7]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = tokens(1, sum(lengths))
    # With a cache, transformers itself would not tell documents apart; gpt_oss needs their ends.
    batch = dict(input_ids=ids, labels=ids, position_ids=positions, use_cache=False)
    if name == "gpt_oss":
        cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch |= dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    pool.run(compare, 2, 1, name, batch, False)


def packed_rows(rank, group):
    """Two rows of documents, labels that are shifted already, and losses whose mean over ranks is one device's."""
    model = build("qwen2")
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ([9, 14, 6], [20, 9])])
    ids = tokens(2, 29)
    batch = dict(input_ids=ids, position_ids=positions, use_cache=False)
    want = model(labels=ids, **batch)
    parallel = tessera.hf.context_parallel(model, group, reduction="mean")
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    for labels in (dict(labels=ids), dict(shift_labels=following), dict(labels=ids, shift_labels=following)):
        found = model(**labels, **batch)
        loss = found.loss.detach().clone()
        dist.all_reduce(loss, group=group)
        torch.testing.assert_close(loss / 2, want.loss.detach())
    torch.testing.assert_close(found.logits, parallel.spread().shard(want.logits), rtol=1e-4, atol=1e-5)


def test_packed_rows_and_means(pool):
    pool.run(packed_rows, 2, 1)


def short(rank, group):
    """Documents of less than a tile, which balanced shards would give to one rank."""
    model, lengths = build("llama"), (5, 17, 9)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = dict(input_ids=tokens(1, 31), labels=tokens(1, 31), position_ids=positions, use_cache=False)
    want = model(**batch).loss
    parallel = tessera.hf.context_parallel(model, group)
    loss = model(**batch).loss.detach()
    dist.all_reduce(loss, group=group)
    torch.testing.assert_close(loss, want.detach())
    assert min(parallel.spread().shards.tokens(rank) for rank in range(2)) > 10
    with pytest.raises(ValueError, match=r"input_ids.shape=\[2, 1\]: leaves a rank of 2 without tokens; rows of 4"):
        model(input_ids=tokens(2, 1))


def test_no_rank_is_without_tokens(pool):
    pool.run(short, 2, 1)


def compiled(rank, group):
    """torch.compile has all layers in one graph, which other batches use too; the hooks are in none."""
    model, graphs = build("llama"), []

    def backend(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    wholes = [model(input_ids=tokens(2, 30), labels=tokens(2, 30, seed)).loss.detach() for seed in (2, 3)]
    tessera.hf.context_parallel(model, group)
    fast = torch.compile(model, backend=backend)
    for seed, want in zip((2, 3), wholes):
        loss = fast(input_ids=tokens(2, 30), labels=tokens(2, 30, seed)).loss
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        torch.testing.assert_close(loss, want)
    attention = [sum("cp_attention" in name for name in graph) for graph in graphs]
    assert [layers for layers in attention if layers] == [model.config.num_hidden_layers], attention


def test_a_compiled_model(pool):
    pool.run(compiled, 2, 1)


def test_models_that_mix_tokens_elsewhere_are_refused():
    model = build("llama")
    with pytest.raises(ValueError, match="reduction='max': must be"):
        tessera.hf.context_parallel(model, None, reduction="max")
    model.config.layer_types = ["conv", "full_attention"]
    with pytest.raises(tessera.Refused, match=r"config.layer_types=\['conv'\]: only attention sees"):
        tessera.hf.context_parallel(model, None)


def padding(rank, group):
    model = build("llama").eval()
    ids = tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 14:] = 0
    want = model(input_ids=ids, attention_mask=mask).logits
    parallel = tessera.hf.context_parallel(model, group)
    found = model(input_ids=ids, attention_mask=mask).logits
    real = parallel.spread().shard(mask).bool()
    torch.testing.assert_close(found[real], parallel.spread().shard(want)[real], rtol=1e-4, atol=1e-5)
    texts = []
    for batch in (dict(input_ids=ids, attention_mask=mask.flip(1)), dict(inputs_embeds=torch.ones(1)),
                  dict(input_ids=ids[:1], position_ids=torch.arange(20)[None] + 3),
                  dict(input_ids=ids[:1], position_ids=torch.arange(0, 40, 2)[None]),
                  dict(input_ids=ids, attention_mask=mask, position_ids=torch.arange(20)[None] % 7)):
        try:
            model(**batch)
        except ValueError as error:
            texts.append(str(error))
    assert not tessera.hf._parallel.is_on(), "an error must not leave it on"
    return texts


def test_padding_and_what_is_refused(pool):
    first, second = pool.run(padding, 2, 1)
    assert first == second and len(first) == 5
    assert "padding on the right" in first[0] and "begin at 0" in first[2] and "rise by 1" in first[3]
    assert "beside an attention_mask" in first[4]


@pytest.fixture
def place(monkeypatch):
    """Positions of a rank's tokens: a document, and two pieces of another."""
    place = torch.tensor([[0, 1, 0, 5, 6]])
    spread = SimpleNamespace(padded=False, place=place)
    monkeypatch.setattr(tessera.hf._parallel, "_current", SimpleNamespace(get=lambda: spread))
    return place


WINDOWS = {(-1, 0): masking_utils.causal_mask_function,
           (3, 0): masking_utils.sliding_window_causal_mask_function(4)}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("remapped", [False, True])
def test_documents_of_positions_are_a_band(place, window, remapped):
    """Masks of transformers count positions within each document from 5.23 on, and along the row before."""
    if remapped and not hasattr(masking_utils, tessera.hf._masks.REMAPPED):
        pytest.skip("this transformers counts along the row")
    ids = masking_utils.find_packed_sequence_indices(place)
    assert ids.tolist() == [[0, 0, 1, 2, 2]]
    of_rows = WINDOWS[window]
    if remapped:
        of_rows = masking_utils.remap_positions_for_packed_sequence(of_rows, place)
    function = masking_utils.and_masks(of_rows, masking_utils.packed_sequence_mask_function(ids))
    assert tessera.hf._parallel.band(function).window == window


@pytest.mark.parametrize("ids", [[[0, 0, 1, 1, 1]], [[0, 0, 1]], [[0, 0, 0, 0, 0]]])
def test_ids_of_a_users_own_are_no_band(place, ids):
    """A shard cannot tell whose tokens they name. Those that transformers makes of positions are in the shards."""
    own, users = (masking_utils.packed_sequence_mask_function(each) for each in (
        masking_utils.find_packed_sequence_indices(place), torch.tensor(ids)))
    causal, both = masking_utils.causal_mask_function, masking_utils.and_masks
    for function in (users, both(causal, users), both(both(causal, users), own), both(both(causal, own), users)):
        with pytest.raises(tessera.Refused, match="mask_function='packed_sequence_mask_function': is no band"):
            tessera.hf._parallel.band(function)
