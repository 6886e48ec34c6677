# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT trainer with attn_implementation="tessera": packed rows and padding-free batches train as padded ones do.

TRL itself runs, on a CPU; `./dev test nightly` installs it. What its collator makes (position_ids that begin again,
cu_seq_lens_q and cu_seq_lens_k, max_length_q and max_length_k, seq_idx) is in test_torch_hf.py without it.
"""
import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import door_examples  # noqa: E402
import pyarrow  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

import tessera.hf  # noqa: E402

LENGTHS = (5, 17, 9, 12, 20, 3)
CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
    max_position_embeddings=128, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "x": 3}, unk_token="x")),
    pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def trained(place, name, **keywords):
    """(loss, keys of a batch, weights after a step of SGD) of one step over all sequences."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation=name)
    args = trl.SFTConfig(
        output_dir=str(place), use_cpu=True, bf16=False, max_steps=1, report_to=[], learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no", disable_tqdm=True, **keywords)
    trainer = trl.SFTTrainer(model, args=args, processing_class=TOKENIZER, train_dataset=datasets.Dataset(
        pyarrow.table({"input_ids": rows}), fingerprint="tessera"))
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer.train().training_loss, set(batch), [x.detach() for x in model.parameters()]


def test_packed_and_padding_free_train_as_padded(tmp_path, monkeypatch):
    calls = []

    def counted(*arguments, **keywords):
        calls.append(keywords.get("cu_seq_lens_q") is not None)
        return tessera.hf.attention_forward(*arguments, **keywords)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "tessera", counted)
    everything = len(LENGTHS)
    loss, _, weights = trained(tmp_path, "eager", per_device_train_batch_size=everything)
    for keywords in (dict(packing=True, max_length=sum(LENGTHS), per_device_train_batch_size=1),
                     dict(padding_free=True, max_length=None, per_device_train_batch_size=everything)):
        calls.clear()
        ours, keys, trained_weights = trained(tmp_path, "tessera", **keywords)
        assert keys >= {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k"} and calls and all(calls)
        assert ours == pytest.approx(loss, abs=1e-5)
        for a, b in zip(trained_weights, weights, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_example(capsys):
    text = door_examples.printed("trl_packing", capsys)
    padded, packed = door_examples.losses(text)
    assert len(padded) == 3 and packed == pytest.approx(padded, abs=1e-3)
    assert door_examples.rows(text, "batch") == ["[6, 20]", f"[1, {sum(LENGTHS)}]"]
    none, some = door_examples.calls(text)
    assert none == 0 and some >= 2 * 2 * 3  # layers, passes, steps
    assert door_examples.differences(text)[0] < 1e-5
