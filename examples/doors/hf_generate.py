# SPDX-License-Identifier: Apache-2.0
# example (torch): a door: a Llama of transformers generates on tessera
"""Generate with a small Llama of transformers (random weights, no download) on its own attention, on tessera, and on
its own again: the tokens are the same, and a profile says how often tessera ran. One prompt is padded on the left.

    ./dev example doors/hf_generate                     (seconds on a CPU)
    ./dev example doors/hf_generate --device cuda

With a real model: AutoModelForCausalLM.from_pretrained(name, attn_implementation="tessera").
"""
import argparse

import torch
import transformers

import tessera.hf  # noqa: F401  registers the name "tessera"


def generated(model, ids, mask):
    """New tokens of each prompt, and the calls of tessera's operators."""
    with torch.profiler.profile() as profile:
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    calls = sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))
    return tokens[:, ids.shape[1]:].tolist(), calls


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, initializer_range=0.3)).eval().to(device)
    ids = torch.randint(3, 97, (2, 9)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for name in ("eager", "tessera", "eager"):
        model.set_attn_implementation(name)
        tokens, calls = generated(model, ids, mask)
        print(f"{name:7}  tokens {tokens}  calls of tessera {calls}")


if __name__ == "__main__":
    main()
