# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses (ALST) with core_attn_implementation="tessera": DeepSpeed itself runs, on two processes over gloo
(`./dev test hosts` installs it), with its loader that shards batches. Each rank has half of the tokens, and the losses
and gradients add up to those of the whole model with eager attention."""
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

import door_examples  # noqa: E402

RANKS = 2
CLOSE = dict(atol=2e-5, rtol=1e-4)
COMMON = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
              max_position_embeddings=128, head_dim=8, use_cache=False)
MISTRAL = dict(COMMON, sliding_window=None)
CONFIGS = {
    "causal": transformers.MistralConfig(**MISTRAL, num_key_value_heads=2),
    "a window": transformers.MistralConfig(**{**MISTRAL, "sliding_window": 6}, num_key_value_heads=4),
    "fewer kv heads than ranks": transformers.MistralConfig(**{**MISTRAL, "sliding_window": 6}, num_key_value_heads=1),
    "caps and windows in turn": transformers.Gemma2Config(
        **COMMON, num_key_value_heads=2, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "sinks and windows in turn": transformers.GptOssConfig(
        **COMMON, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, sliding_window=6),
}
DOCUMENTS = {"one document": (24,), "packed": (7, 12, 5)}  # the second lies on both ranks


def batch_of(lengths, rows):
    """rows of these documents, one after another, and the labels that DeepSpeed shifts."""
    ids = torch.randint(3, 97, (rows, 24), generator=torch.Generator().manual_seed(len(lengths) + rows))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    return dict(input_ids=ids, position_ids=positions, labels=ids.clone())


def model_of(name, attention):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for x in (x for x_name, x in model.named_parameters() if x_name.endswith("sinks")):
        torch.nn.init.normal_(x)  # which transformers leaves near 0
    return model


def trained(model, input_ids, position_ids, shift_labels, lengths=None):
    """(logits, sum of losses, gradients) of this rank's tokens; of documents of these lengths, one by one."""
    parts = zip(*(x.split(lengths or x.shape[1], 1) for x in (input_ids, position_ids)))
    logits = torch.cat([model(input_ids=ids, position_ids=positions).logits for ids, positions in parts], 1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), loss.detach(), [p.grad for p in model.parameters()]


def registered(model, rows, **keywords):
    """Makes this model's attention DeepSpeed's, in the place of another's."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    if "tessera" in ALL_ATTENTION_FUNCTIONS._local_mapping:
        del ALL_ATTENTION_FUNCTIONS["tessera"]
    parallel_state_sp._release_sequence_parallel_groups()
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="tessera", sequence_parallel_size=RANKS,
        micro_batch_size=rows, **keywords)


def rank_main(rank, place):
    os.environ.update(LOCAL_RANK=f"{rank}", LOCAL_SIZE=f"{RANKS}", DS_ACCELERATOR="cpu")
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    import tessera.hf
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{place}/meet", rank=rank, world_size=RANKS)
    deepspeed.init_distributed()
    found = {}
    for name in CONFIGS:
        for documents, lengths in DOCUMENTS.items():
            for rows in (1, 2):
                model = model_of(name, "tessera")
                mpu = registered(model, rows)
                group = mpu.get_sequence_parallel_group()
                loader = UlyssesSPDataLoaderAdapter([batch_of(lengths, rows)], rank, group, RANKS, "cpu")
                shard = next(loader)
                found[name, documents, rows] = trained(model, **shard)
                if rows == 1 and documents == "packed":  # a layer is computed again in the backward pass
                    again = model_of(name, "tessera").train()
                    again.gradient_checkpointing_enable(dict(use_reentrant=False))
                    for a, b in zip(trained(again, **shard)[2], found[name, documents, rows][2], strict=True):
                        torch.testing.assert_close(a, b, **CLOSE)
    with pytest.raises(ValueError, match="sink"):  # of neither this rank's heads nor all
        tessera.hf.attention_forward(model, *[torch.ones(1, 2, 3, 8)] * 3, None, s_aux=torch.ones(3))
    model = model_of("causal", "tessera").eval()
    registered(model, 1, disable_in_eval=True)
    batch = batch_of(DOCUMENTS["packed"], 1)
    with torch.no_grad():
        found["eval"] = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert functions["tessera"] is not tessera.hf.attention_forward
    del functions["tessera"]  # which undoes it
    assert functions["tessera"] is tessera.hf.attention_forward
    Path(place, f"{rank}").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place, here = tmp_path_factory.mktemp("ranks"), Path(__file__).parent
    code = "import sys; sys.path[:0] = sys.argv[1:3]; import test_deepspeed as t; " \
        "t.rank_main(int(sys.argv[3]), sys.argv[4])"
    ranks = [subprocess.Popen([sys.executable, "-c", code, here, here.parent, str(rank), place],
                              stderr=subprocess.PIPE, text=True) for rank in range(RANKS)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said[0][-3000:]
    return [pickle.loads((place / str(rank)).read_bytes()) for rank in range(RANKS)]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_have_the_losses_and_gradients_of_the_whole(found, name, documents, rows):
    batch = batch_of(DOCUMENTS[documents], rows)
    labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    logits, loss, grads = trained(model_of(name, "eager"), **batch, shift_labels=labels, lengths=DOCUMENTS[documents])
    ours = [of[name, documents, rows] for of in found]
    torch.testing.assert_close(torch.cat([part for part, *_ in ours], 1), logits, **CLOSE)
    torch.testing.assert_close(sum(part for _, part, _ in ours), loss, **CLOSE)
    for mine, grad in zip(zip(*(part for *_, part in ours)), grads, strict=True):
        torch.testing.assert_close(sum(mine), grad, atol=2e-4, rtol=1e-3)


def test_evaluation_without_ranks(found):
    batch = batch_of(DOCUMENTS["packed"], 1)
    whole = model_of("causal", "eager")(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    for of in found:
        torch.testing.assert_close(of["eval"], whole, **CLOSE)


def test_the_example():
    text = door_examples.printed_alone("deepspeed_ulysses")
    alone, *ranks = door_examples.losses(text)
    assert len(ranks) == 2 and alone[-1] < alone[0]
    for losses in ranks:
        assert losses == pytest.approx(alone, abs=1e-3)
    assert door_examples.calls(text) == [0, *[2 * 2 * len(alone)] * 2]  # layers, passes
