# SPDX-License-Identifier: Apache-2.0
# example (torch trl): a door: TRL's SFT trainer on packed rows, to the losses of padded ones
"""Train a small Llama (random weights, no download) with TRL's SFTTrainer: on padded rows with eager attention, and on
one packed row with tessera, which is told where the sequences begin. Losses and weights are the same, and the packed
row has no padding to compute.

    ./dev example doors/trl_packing                     (half a minute on a CPU)
    ./dev example doors/trl_packing --device cuda
"""
import argparse
import tempfile

import datasets
import pyarrow
import torch
import transformers
import trl
from tokenizers import Tokenizer, models

import tessera.hf  # noqa: F401  registers the name "tessera"

LENGTHS = (5, 17, 9, 12, 20, 3)


def trained(attention, device, place, **keywords):
    """(losses, a batch's shape, calls of tessera's operators, weights) of three steps over all sequences."""
    torch.manual_seed(0)
    rows = [torch.randint(3, 97, (length,)).tolist() for length in LENGTHS]
    dataset = datasets.Dataset(pyarrow.table({"input_ids": rows}), fingerprint="rows")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "x": 3}, unk_token="x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2), attn_implementation=attention)
    args = trl.SFTConfig(output_dir=place, use_cpu=device == "cpu", bf16=False, max_steps=3, learning_rate=0.1,
                         optim="sgd", max_grad_norm=0, logging_steps=1, logging_strategy="steps", save_strategy="no",
                         report_to=[], disable_tqdm=True, **keywords)
    trainer = trl.SFTTrainer(model, args=args, processing_class=tokenizer, train_dataset=dataset)
    shape = list(next(iter(trainer.get_train_dataloader()))["input_ids"].shape)
    with torch.profiler.profile() as profile:
        trainer.train()
    calls = sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))
    losses = [f"{float(entry['loss']):.4f}" for entry in trainer.state.log_history if "loss" in entry]
    return losses, shape, calls, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    with tempfile.TemporaryDirectory() as place:
        padded = trained("eager", device, place, per_device_train_batch_size=len(LENGTHS))
        packed = trained("tessera", device, place, per_device_train_batch_size=1, packing=True, max_length=sum(LENGTHS))
    for name, (losses, shape, calls, _) in (("padded, eager", padded), ("packed, tessera", packed)):
        print(f"{name:15}  losses {' '.join(losses)}  batch {shape}  calls of tessera {calls}")
    print(f"weights differ by {(padded[-1] - packed[-1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
