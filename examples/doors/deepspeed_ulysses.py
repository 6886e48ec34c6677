# SPDX-License-Identifier: Apache-2.0
# example (torch deepspeed): a door: DeepSpeed's Ulysses (ALST) of two ranks, on packed documents
"""Train a small Mistral (random weights, no download) with windows on a row of packed documents: in one process with
eager attention, and with its tokens on two ranks, whose attention DeepSpeed's Ulysses hands to tessera. The losses are
the same: tessera tells documents apart by position_ids, as DeepSpeed drops transformers' masks.

    ./dev example doors/deepspeed_ulysses               (half a minute on a CPU)
    ./dev example doors/deepspeed_ulysses --device cuda (two GPUs)
"""
import argparse
import os
import tempfile

import torch
import transformers

import tessera.hf  # noqa: F401  registers the name "tessera"

IDS, POSITIONS = torch.arange(48)[None] * 7 % 31, torch.cat([torch.arange(n) for n in (13, 25, 10)])[None]


def train(attention, device, tokens=slice(48), register=lambda model: None):
    """(losses of four steps over these tokens of the row, calls of tessera's operators)."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, sliding_window=8), attn_implementation=attention).to(device)
    register(model)
    ids, positions, labels = (x[:, tokens].to(device) for x in (IDS, POSITIONS, IDS.roll(-1, 1)))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    with torch.profiler.profile() as profile:
        for _ in range(4):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / 48
            loss.backward()
            for x in (loss.detach(), *(p.grad for p in model.parameters())) if attention == "tessera" else ():
                torch.distributed.all_reduce(x)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(f"{loss.item():.4f}")
    return " ".join(losses), sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))


def rank_main(rank, device, meet):
    os.environ.update(LOCAL_RANK=f"{rank}", LOCAL_SIZE="2", DS_ACCELERATOR=device)
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF as Ulysses
    backend, place = ("gloo", "cpu") if device == "cpu" else ("nccl", f"cuda:{rank}")
    torch.distributed.init_process_group(backend, f"file://{meet}", rank=rank, world_size=2)
    deepspeed.init_distributed()
    losses, calls = train("tessera", place, slice(24 * rank, 24 * rank + 24), lambda model: (
        Ulysses.register_with_transformers(model, "tessera", sequence_parallel_size=2, micro_batch_size=1)))
    print(f"rank {rank}, tessera  losses {losses}  calls of tessera {calls}\n", end="", flush=True)
    torch.distributed.destroy_process_group()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    print("alone, eager     losses {}  calls of tessera {}".format(*train("eager", device)), flush=True)
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank_main, (device, f"{place}/meet"), 2)


if __name__ == "__main__":
    main()
