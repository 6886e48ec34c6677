# SPDX-License-Identifier: Apache-2.0
# example (torch kernels): a door: a Llama of transformers on tessera as a kernel of Hugging Face's hub
"""Write tessera as a kernel of Hugging Face's hub into a folder, and generate with a small Llama whose program imports
no tessera: it names the kernel, transformers loads it from the folder, and the tokens are those of eager attention.

    ./dev example doors/hub_kernel                      (seconds on a CPU)
    ./dev example doors/hub_kernel --device cuda

A folder that you upload as a repository needs no LOCAL_KERNELS: attn_implementation="you/attention" downloads it.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import kernels
import torch
from transformers.utils import import_utils


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "tessera.doors.hub_kernel", place], check=True)
        os.environ.update(LOCAL_KERNELS=f"someone/attention={place}", HF_HUB_OFFLINE="1")
        generate(device)


def generate(device):
    if not import_utils.is_kernels_available():  # transformers 5.24 asks for a version that PyPI does not have yet
        import_utils.is_kernels_available.__wrapped__.__defaults__ = (kernels.__version__, "0.19.0")
        import_utils.is_kernels_available.cache_clear()
    import transformers  # after the variables, which it reads
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, initializer_range=0.3)).eval().to(device)
    ids = torch.randint(3, 97, (2, 9)).to(device)
    for name in ("eager", "someone/attention", "eager"):
        model.set_attn_implementation(name)
        with torch.profiler.profile() as profile:
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8,
                                    do_sample=False)[:, 9:]
        calls = sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))
        print(f"{name:17}  tokens {tokens.tolist()}  calls of tessera {calls}")
    print("tessera was loaded from", sys.modules["tessera"].__file__)


if __name__ == "__main__":
    main()
