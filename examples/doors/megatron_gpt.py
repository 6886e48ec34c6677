# SPDX-License-Identifier: Apache-2.0
# example (torch megatron): a door: a GPT of Megatron-Core with tessera as its core attention
"""Train a two-layer GPT of Megatron-Core with Megatron's own core attention, with tessera's, and with Megatron's again:
the losses are the same, and a profile says how often tessera ran. patch() changes the specs that are made inside it.
tessera needs no causal mask as a tensor.

    ./dev example doors/megatron_gpt                    (seconds on a CPU)
    ./dev example doors/megatron_gpt --device cuda
"""
import argparse
import contextlib
import types

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tessera.doors import megatron as door


def train(spec, mask, device, steps=4):
    """The loss of every step, and the calls of tessera's operators."""
    torch.manual_seed(0)
    model = GPTModel(TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0, hidden_dropout=0,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False), spec, vocab_size=64, max_sequence_length=32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = (torch.arange(2 * 33) * 7 % 31).view(2, 33).to(device)
    losses = []
    with torch.profiler.profile() as profile:
        for _ in range(steps):
            loss = model(tokens[:, :-1], torch.arange(32).expand(2, 32).to(device), mask, labels=tokens[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(f"{loss.item():.4f}")
    return losses, sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    else:  # Megatron's own attention takes its scores' memory and its generator from a GPU
        memory = types.SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
        parallel_state.get_global_memory_buffer = lambda: memory
        tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    hidden = torch.ones(1, 1, 32, 32, dtype=torch.bool, device=device).triu(1)
    for name in ("Megatron", "tessera", "Megatron again"):
        with door.patch() if name == "tessera" else contextlib.nullcontext():
            spec = get_gpt_layer_local_spec()
        losses, calls = train(spec, None if name == "tessera" else hidden, device)
        print(f"{name:14}  losses {' '.join(losses)}  calls of tessera {calls}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
