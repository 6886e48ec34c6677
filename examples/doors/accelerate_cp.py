# SPDX-License-Identifier: Apache-2.0
# example (torch accelerate): a door: accelerate's context parallelism, on packed rows and sliding windows
"""Train a small Mistral (random weights, no download) on a packed row with accelerate: on one process, and with the
tokens on two (ParallelismConfig(cp_size=2), FSDP2), where accelerate itself refuses windows. Losses are the same.
accelerate takes context parallelism on accelerators only, so here processes on CPUs pass for GPUs.

    ./dev example doors/accelerate_cp                     (half a minute on a CPU; --device cuda for two GPUs)
"""
import argparse
import os
import tempfile

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig

from tessera.doors import accelerate_cp


def train(rank, size, device, place):
    os.environ.update({"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "localhost"})
    keywords = {}
    if size > 1:
        torch.distributed.init_process_group(init_method=f"file://{place}/meet", rank=rank, world_size=size)
        keywords = dict(parallelism_config=ParallelismConfig(cp_size=size), fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, transformer_cls_names_to_wrap=["MistralDecoderLayer"]))
        if device == "cpu":
            PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    with accelerate_cp.install():
        accelerator = Accelerator(cpu=device == "cpu", **keywords)
        model = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
            num_key_value_heads=2, sliding_window=8), attn_implementation="tessera")
        positions = torch.cat([torch.arange(length) for length in (5, 17, 9, 12, 20, 4)])[None]
        positions, ids = (x.to(accelerator.device) for x in (positions, torch.randint(3, 97, positions.shape)))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step(), optimizer.zero_grad()
            losses.append(f"{accelerator.reduce(loss.detach(), 'mean'):.4f}")
    if rank == 0:
        print(f"processes {size}  losses {' '.join(losses)}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as place:
            torch.multiprocessing.start_processes(train, (size, device, place), nprocs=size, start_method="spawn")


if __name__ == "__main__":
    main()
