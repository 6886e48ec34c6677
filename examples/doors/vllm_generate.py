# SPDX-License-Identifier: Apache-2.0
# example (torch vllm): a door: vLLM generates with its own attention backend and with TESSERA
"""Generate with a small Llama (random weights, no download) in vLLM, on vLLM's own backend, on TESSERA, and on its own
again: the tokens are the same, and the layers say whose they are. Prompts are computed in chunks of 32 tokens.

    ./dev example doors/vllm_generate                   (a minute on a CPU)
    ./dev example doors/vllm_generate --device cuda

With an installed tessera, vLLM finds the plugin itself: vllm serve MODEL --attention-backend TESSERA.
"""
import argparse
import gc
import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

import torch  # noqa: E402
import transformers  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from tessera.doors import vllm_plugin  # noqa: E402

PROMPTS = [{"prompt_token_ids": [7 * i * i % 256 for i in range(length)]} for length in (5, 50, 65)]


def generated(place, backend):
    """The new tokens of each prompt, and the classes of the layers' attention."""
    llm = LLM(place, skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_batched_tokens=32,
              max_num_seqs=4, block_size=32, attention_backend=backend)
    done = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [one.outputs[0].token_ids for one in done], {type(layer.impl).__module__ for layer in layers}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    theirs, dtype = {"cpu": ("CPU_ATTN", "float32"), "cuda": ("FLASH_ATTN", "bfloat16")}[parser.parse_args(argv).device]
    handle = vllm_plugin.register()
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.4,
            dtype=dtype)).save_pretrained(place)
        for backend in (theirs, "TESSERA", theirs):
            tokens, layers = generated(place, backend)
            print(f"{backend:10}  tokens {tokens}  layers of {', '.join(layers)}", flush=True)
            gc.collect()
    handle.remove()


if __name__ == "__main__":
    main()
